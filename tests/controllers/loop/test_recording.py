"""Samples are recorded asynchronously: each row once, under the step that trained it."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from saved_runs import SCHEDULES, Killed
from saved_runs import run as saved_run
from simulated_runs import KNOWN, apart, calls, costs, run, times
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo

from weft.controllers.driver import Driver
from weft.controllers.loop.recording import MAX_BEHIND, with_recording
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Asynchronous, Synchronous, Training
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import CostModel, LinearCost
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.log_rules import Rule
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import Shape
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.log import LogReader
from weft.dataflow.runs.manifest import describe
from weft.dataflow.runs.samples import archive, note_checksum, noted_checksums, recorded, sample_files
from weft.dataflow.runs.tables import read_timeline
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


def filed(run: Path, graph: str = "train") -> list[tuple[int, int]]:
    """Return (sample id, step) of every recorded row."""
    tables = [part.rows() for part in recorded(run) if part.graph == graph]
    return sorted((row["sample_id"], row["step"]) for table in tables for row in table.to_pylist())


def trained(run: Path) -> list[tuple[int, int]]:
    """Return (sample id, step) of every trained row in the log."""
    rows: dict[int, list[int]] = {}
    found: list[tuple[int, int]] = []
    for record in LogReader(run / "buffer" / LOG):
        if record["do"] == "claim" and record["node"] == "actor.update":
            rows[record["lease"]] = record["ids"]
        elif record["do"] == "finish" and "step" in record:
            found += [(id, record["step"]) for id in rows[record["lease"]]]
    return sorted(found)


# Files of rows


@pytest.mark.parametrize(
    "schedule", SCHEDULES, ids=["synchronous", "pipelined", "asynchronous", "requeue"]
)
def test_each_row_is_filed_under_the_step_that_trained_it(tmp_path: Path, schedule: Training):
    saved_run(tmp_path, schedule, checkpoint=CheckpointConfig())
    assert filed(tmp_path / "run") == trained(tmp_path / "run")
    assert Counter(step for _, step in trained(tmp_path / "run")) == dict.fromkeys(range(1, 10), 3 * 2)
    assert {step for _, step in filed(tmp_path / "run", "eval")} == {0, 2, 4, 6, 8, 9}


@pytest.mark.parametrize(
    "kill_at", [3, *(pytest.param(step, marks=pytest.mark.thorough) for step in (6, 8))]
)
@pytest.mark.parametrize("schedule", SCHEDULES[::2], ids=["synchronous", "asynchronous"])
def test_after_a_kill_and_a_resume_the_samples_hold_each_trained_row_once(
    tmp_path: Path, schedule: Training, kill_at: int
):
    with pytest.raises(Killed):
        saved_run(tmp_path, schedule, kill_at=kill_at)
    saved_run(tmp_path, schedule, resume="latest")
    run = tmp_path / "run"
    assert filed(run) == trained(run) and len(filed(run)) == 9 * 3 * 2
    assert pq.read_table(archive(run)).num_rows == sum(
        len(filed(run, graph)) for graph in ("train", "eval")
    )
    report = check_log(run / "buffer")
    assert not report.violations and not [note for note in report.damage if "samples" in note]


def test_metrics_timeline_and_samples_count_steps_alike(tmp_path: Path):
    _, metrics = saved_run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig())
    timeline = read_timeline(tmp_path / "run")
    assert timeline is not None
    updates = [call["step"] for call in timeline.to_pylist() if call["node"] == "actor.update"]
    assert (
        updates
        == [row["step"] for row in metrics][1:]
        == sorted({step for _, step in filed(tmp_path / "run")})
    )
    ends = {row["step"]: row["time_s"] for row in metrics}
    for call in timeline.to_pylist():
        assert ends.get(call["step"] - 1, 0.0) <= call["end_s"], (
            "no call is of a step that had not begun"
        )
        assert call["end_s"] <= ends[call["step"]] or call["step"] == 9, "nor of one that was over"


def test_samples_of_some_steps_are_kept(tmp_path: Path):
    saved_run(tmp_path, SCHEDULES[2], checkpoint=CheckpointConfig(), record_every=4)
    assert {step for _, step in filed(tmp_path / "run")} == {4, 8}
    assert {step for _, step in filed(tmp_path / "run", "eval")} == {0, 4, 8}
    assert not check_log(tmp_path / "run" / "buffer").violations


# `weft buffer check`


def doubled(run: Path) -> None:
    part = recorded(run)[0]
    read = part.rows().drop_columns(["graph", "step"])
    table = pa.Table.from_pylist(read.to_pylist(), read.schema)  # copy it: the file is overwritten
    with pa.ipc.new_file(part.path, table.schema) as writer:
        writer.write_table(pa.concat_tables([table, table]))


def moved(run: Path) -> None:
    path = recorded(run)[-1].path
    path.rename(path.with_name(path.name.replace("000009", "000008")))


def with_lists_beyond_its_end(run: Path) -> None:
    part = recorded(run)[-1]
    offsets = part.rows()["response_ids"].combine_chunks().offsets.to_numpy()
    beyond = np.append(offsets[:-1], np.int32(1 << 28))
    data = part.path.read_bytes()
    assert offsets.tobytes() in data
    part.path.write_bytes(data.replace(offsets.tobytes(), beyond.tobytes()))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (
            lambda run: recorded(run)[-1].path.unlink(),
            r"samples: lease \d+ .* recorded 6 rows; 6 are missing",
        ),
        (
            doubled,
            r"samples: lease \d+ of graph 'eval': 2 rows were not recorded by it, or are there more than once",
        ),
        (
            moved,
            r"samples: lease \d+ of graph 'train': sample \d+ is filed under step 8; it belongs to step 9",
        ),
        (lambda run: recorded(run)[-1].path.write_bytes(b"half"), "samples: .* cannot be read"),
        (with_lists_beyond_its_end, "samples: .* cannot be read"),
    ],
)
def test_samples_that_contradict_the_log_refute_it(
    tmp_path: Path, harm: Callable[[Path], object], says: str
):
    saved_run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig())
    harm(tmp_path / "run")
    (violation,) = map(str, check_log(tmp_path / "run" / "buffer").violations)
    assert re.match(says, violation)


@pytest.mark.parametrize("place", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_a_flipped_byte_of_a_file_of_samples_is_found(tmp_path: Path, place: float):
    saved_run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig())
    run = tmp_path / "run"
    assert not check_log(run / "buffer").violations
    path = recorded(run)[-1].path
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    violations = check_log(run / "buffer").violations
    assert [violation.rule for violation in violations] == [Rule.SAMPLES]
    assert re.match(
        rf"samples: {path} (was changed: its checksum is \w+, not \w+|cannot be read)",
        str(violations[0]),
    )


def test_a_torn_line_of_checksums_costs_no_other(tmp_path: Path):
    path = tmp_path / "samples" / "train_000001.7.0.arrow"
    path.parent.mkdir()
    path.write_bytes(b"rows")
    (tmp_path / "samples" / "checksums.0.txt").write_bytes(b"0123456789abcdef train_0000")
    note_checksum(path, path, 0)
    assert noted_checksums(tmp_path)[path.name] == describe(path)["xxh3_64"]


def test_a_part_of_a_lease_that_was_never_finished_counts_for_nothing(tmp_path: Path):
    saved_run(tmp_path, SCHEDULES[0], checkpoint=CheckpointConfig())
    run = tmp_path / "run"
    before, whole = filed(run), recorded(run)[-1].path
    stray = whole.with_name("train_000009.999.0.arrow")
    stray.write_bytes(whole.read_bytes())
    assert stray in {part.path for part in sample_files(run)} and filed(run) == before
    report = check_log(run / "buffer")
    assert not report.violations and report.damage == [
        f"{stray} belongs to a lease that was not finished: readers skip it"
    ]


# Asynchronous recording


def with_cost(node: str, cost: LinearCost) -> CostModel:
    given = costs(KNOWN)
    return given.model_copy(update={"nodes": {**given.nodes, node: cost}})


def test_no_step_waits_for_its_record_until_recording_is_far_behind(tmp_path: Path):
    def steps(record_s: float, number: int = 6) -> np.ndarray:
        simulated = Simulated(with_cost("recorder.record", LinearCost(fixed_s=record_s)))
        schedule = Synchronous(steps=number, prompts_per_step=2, shuffle=False)
        driver = run(tmp_path, schedule, simulated, number=2, record_every=1)
        assert len(calls(driver, "recorder.record")) == number
        return np.diff([0.0, *times(driver)])

    without = steps(0.0)
    for record_s in (5.0, 10.0, float(without[1])):
        assert steps(record_s) == pytest.approx(without)
    slow = steps(4 * without[1])
    assert slow[:MAX_BEHIND] == pytest.approx(without[:MAX_BEHIND])
    assert slow[-1] == pytest.approx(4 * without[1]), "then a step takes as long as its record"


def test_updates_during_generation_do_not_wait_for_records(tmp_path: Path):
    def end(record_s: float) -> float:
        simulated = Simulated(with_cost("recorder.record", LinearCost(fixed_s=record_s)))
        schedule = Asynchronous(steps=6, prompts_per_step=2, max_staleness=2)
        return times(run(tmp_path, schedule, simulated, apart(2, 1), record_every=1))[-1]

    assert end(4.0) == pytest.approx(end(0.0))


def test_functions_get_the_ranks_of_their_place(tmp_path: Path):
    pool = ResourcePool("beside", cpus=4)

    def end(ranks: int) -> float:
        simulated = Simulated(with_cost("centred", LinearCost(per_row_s=1.0)))
        schedule = Synchronous(steps=2, prompts_per_step=4)
        driver = run(
            tmp_path, schedule, simulated, {"functions": Place(pool, ranks=ranks)}, record_every=1
        )
        places = json.loads((driver.directory.path / "config.json").read_text())["placement"]
        assert places["functions"]["ranks"] == ranks and places["recorder"]["pool"]["name"] != "beside"
        return times(driver)[-1]

    assert end(1) - end(4) == pytest.approx(2 * (8 - 2)), "8 rows a step, 2 on each of four ranks"


def test_a_group_of_the_graph_cannot_be_called_as_one_of_the_run(tmp_path: Path):
    recorder = group(ToyReward, name="recorder")
    graph = toy_grpo(prompts(4), rollout=group(ToyRollout), reward=recorder, actor=group(ToyActor))
    with pytest.raises(
        UserError, match="worker group 'recorder' has the name of Weft's group that writes"
    ):
        Driver(graph, schedule=Synchronous(steps=1), root=tmp_path)


def test_a_group_that_was_trained_on_is_not_issued_again_when_its_columns_are_lost(tmp_path: Path):
    rollout, actor = group(ToyRollout, name="rollout"), group(ToyActor, name="actor")
    graph = with_recording(toy_grpo(prompts(4), rollout=rollout, reward=group(ToyReward), actor=actor))
    ledger = Ledger(graph, name="train")
    ledger.issue([0, 1], [1, 1], step=1)
    for node in graph.nodes[:-1]:
        lease = ledger.claim(node)
        assert lease is not None
        if node.makes_level is not None:
            ids, parents = lease.first_children, lease.ids
            ledger.publish(
                lease, Published(ids, np.ones(2, np.int64), np.zeros(2, np.int64), parents), None
            )
        else:
            ledger.publish(lease, Published(lease.ids, np.zeros(len(lease.ids), np.int64)), None)
        ledger.finish(lease, step=1 if node.operation.updates else None)
    assert (ledger.live.groups_at_work, ledger.live.groups_behind) == (0, 2)
    assert not ledger.lose(0, "its node is gone")
    assert (ledger.live.groups_at_work, ledger.live.groups_behind) == (
        0,
        1,
    ) and ledger.prompts_issued == 2


class PartedReward(ToyReward):
    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=("response_ids",),
        writes=("reward", "reward/form", "reward_parts", "other"),
    )
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        return samples, {}


def test_parts_of_a_reward_are_recorded_with_it():
    graph = toy_grpo(
        prompts(2), rollout=group(ToyRollout), reward=group(PartedReward), actor=group(ToyActor)
    )
    reads = with_recording(graph)["recorder.record"].reads
    assert (
        {"reward", "reward/form", "reward_parts"} <= {*reads}
        and "other" not in reads
        and len({*reads}) == len(reads)
    )


class EpisodeRollout(ToyRollout):
    """Makes two rows of each episode, with a turn of one sampled token after a given one."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        reads=("prompt_ids",),
        writes=(
            *("response_ids", "response_logprobs", "response_versions", "response_mask", "turn_ends"),
            *("turn_rewards", "episode_id", "episode_rows", "episode_tokens"),
        ),
    )
    def generate(self, prompts: Batch, *, n: int = 2) -> Iterator[tuple[Batch, Metrics]]:
        for parent in prompts.numpy("sample_id").tolist():
            rows = Batch.of(
                parent_id=[parent] * n,
                response_ids=[[5, 6]] * n,
                response_logprobs=[[0.0, -1.0]] * n,
                response_versions=[[self.version] * 2] * n,
                response_mask=(
                    np.array([0, 1] * n, np.uint8),
                    np.arange(0, 2 * n + 1, 2, dtype=np.int32),
                ),
                turn_ends=[[2]] * n,
                turn_rewards=[[0.5]] * n,
                episode_id=np.full(n, (1 << 62) + parent, np.int64),
                episode_rows=np.full(n, n, np.int32),
                episode_tokens=np.full(n, n, np.int32),
            )
            yield rows, {}


def test_episodes_are_recorded_with_their_turns_and_masks(tmp_path: Path):
    graph = toy_grpo(
        prompts(4), rollout=group(EpisodeRollout), reward=group(ToyReward), actor=group(ToyActor)
    )
    schedule = Synchronous(steps=1, prompts_per_step=4)
    with Driver(
        graph, schedule=schedule, root=tmp_path, name="it", progress=False, stop_on=()
    ) as driver:
        driver.run()
    [part] = recorded(tmp_path / "it")
    rows = part.rows().to_pylist()
    assert len(rows) == 8 and len({row["episode_id"] for row in rows}) == 4
    for row in rows:
        assert (row["response_mask"], row["turn_ends"], row["turn_rewards"]) == ([0, 1], [2], [0.5])
        assert (row["episode_rows"], row["episode_tokens"]) == (2, 2)
        assert row["prompt_ids"] and row["response_versions"] == [0, 0]
