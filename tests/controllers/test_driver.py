"""The driver in one process with toy workers, which count everything that happens."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
from toy import (
    ToyActor,
    ToyCritic,
    ToyLoss,
    ToyReward,
    ToyRollout,
    ToyTeacher,
    centred,
    prompts,
    toy_dapo,
    toy_distillation,
    toy_evaluation,
    toy_grpo,
    toy_ppo,
)
from toy_runs import drive, handles, training

from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.surrogates import sequence_ratio
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver, Evaluation
from weft.controllers.loop import admission
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.schedule import Pipelined, Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.errors import RunError, StalledError, UserError, WorkerError
from weft.dataflow.graph import Graph, group
from weft.dataflow.operation import GROUPS, Shape, node
from weft.dataflow.runs.samples import recorded
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


def samples_of(run: Path, graph: str, step: int) -> list[dict[str, Any]]:
    found = [
        part.rows().to_pylist() for part in recorded(run) if (part.graph, part.step) == (graph, step)
    ]
    return [row for rows in found for row in rows]


# The loop


def test_every_step_has_its_metrics(tmp_path: Path):
    with drive(training(), tmp_path) as driver:
        metrics = driver.run()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    for row in metrics[1:]:
        assert row["reward/mean"] == 1.5 and row["actor/rows"] == row["samples"] == 8
        assert row["rollout/tokens"] == 4 * (1 + 2)
        assert row["step_s"] > 0 and row["tokens_per_s"] > 0 and row["time_s"] > 0
    assert pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()[1:] == metrics[1:]


def test_each_step_trains_on_whole_groups_and_on_each_group_once(tmp_path: Path):
    graph = training()
    with drive(graph, tmp_path) as driver:
        driver.run()
        (seen,) = driver.call(graph.handles["actor"], "seen_groups")
    assert seen == [[g for g in range(4 * step, 4 * step + 4) for _ in range(2)] for step in range(3)]


def test_an_epoch_shows_every_prompt_once_in_an_order_drawn_from_the_seed(tmp_path: Path):
    def order(name: str, **settings: Any) -> list[list[int]]:
        with drive(training(), tmp_path, steps=4, name=name, **settings) as driver:
            driver.run()
        return [
            sorted({r["prompt_ids"][0] for r in samples_of(tmp_path / name, "train", k)})
            for k in range(1, 5)
        ]

    first = order("a", seed=1)
    everything = sorted(ids[0] for ids in prompts(8).table["prompt_ids"].to_pylist())
    assert sorted(first[0] + first[1]) == sorted(first[2] + first[3]) == everything
    assert order("b", seed=1) == first and order("c", seed=2) != first
    straight = order("d", schedule=Synchronous(steps=4, prompts_per_step=4, shuffle=False))
    assert straight[0] + straight[1] == everything


def test_a_run_can_be_stopped_by_its_metrics(tmp_path: Path):
    with drive(training(), tmp_path, steps=50, stop=lambda row: row["step"] >= 2) as driver:
        assert [row["step"] for row in driver.run()] == [0, 1, 2]


def test_evaluations_run_first_every_so_often_and_last(tmp_path: Path):
    made = handles()
    evaluation = toy_evaluation(prompts(6, "held_out"), rollout=made["rollout"], reward=made["reward"])
    evaluations = [Evaluation(evaluation, every=2), Evaluation(evaluation, every=10, name="seldom")]
    with drive(toy_grpo(prompts(8), **made), tmp_path, steps=5, evaluations=evaluations) as driver:
        metrics = driver.run()
    assert [row["step"] for row in metrics if "eval/reward/mean" in row] == [0, 2, 4, 5]
    assert [row["step"] for row in metrics if "seldom/reward/mean" in row] == [0, 5]
    assert all(row["eval/rollout/tokens"] == 6 for row in metrics if "eval/rollout/tokens" in row)
    assert all(row["reward/mean"] == 1.5 for row in metrics[1:]), "the two are not mixed"


def test_a_stop_by_an_evaluation_still_ends_with_every_evaluation(tmp_path: Path):
    made = handles()
    evaluation = toy_evaluation(prompts(6, "held_out"), rollout=made["rollout"], reward=made["reward"])
    evaluations = [Evaluation(evaluation, every=1), Evaluation(evaluation, every=10, name="seldom")]

    def stop(row: Any) -> bool:
        return row["step"] >= 2 and "eval/reward/mean" in row

    with drive(
        toy_grpo(prompts(8), **made), tmp_path, steps=5, evaluations=evaluations, stop=stop
    ) as driver:
        metrics = driver.run()
    assert metrics[-1]["step"] == 2 and "seldom/reward/mean" in metrics[-1]


def test_an_evaluation_of_the_same_function_name_runs_its_own_function(tmp_path: Path):
    def scored(value: float) -> Any:
        @node(reads=("response_ids",), writes=("reward", "advantages"))
        def constant(samples: Batch) -> Batch:
            lists = [[value] * n for n in samples.lengths("response_ids")]
            return samples.with_columns(reward=[value] * len(samples), advantages=lists)

        @graph
        def constantly(prompts: Any, *, rollout: Any, actor: Any = None) -> Any:
            samples = constant(rollout.generate(prompts))
            return actor.update(samples) if actor else samples

        return constantly

    made = handles()
    train = scored(1.0)(prompts(4), rollout=made["rollout"], actor=made["actor"])
    held_out = scored(2.0)(prompts(4), rollout=made["rollout"])
    with drive(train, tmp_path, steps=1, evaluations=[Evaluation(held_out)]) as driver:
        driver.run()
    assert {r["reward"] for r in samples_of(tmp_path / "run", "train", 1)} == {1.0}
    assert {r["reward"] for r in samples_of(tmp_path / "run", "eval", 0)} == {2.0}


# Filters


def test_a_step_is_refilled_for_the_groups_that_a_filter_dropped(tmp_path: Path):
    graph = toy_dapo(prompts(16), **handles())
    with drive(graph, tmp_path, prompts_per_step=5) as driver:
        metrics = driver.run()
        (seen,) = driver.call(graph.handles["actor"], "seen_groups")
        assert driver.buffer is not None
        dropped = driver.buffer.ledgers["train"].live.dropped
    assert all(row["actor/rows"] == row["samples"] == 10 for row in metrics[1:])
    assert [len(set(groups)) for groups in seen] == [5, 5, 5]
    assert dropped["odd_prompts"] > 0
    for step in range(3):
        rows = samples_of(tmp_path / "run", "train", step + 1)
        assert sorted({r["group_id"] for r in rows}) == sorted(set(seen[step])), (
            "all parts of the step are recorded"
        )
        assert len(rows) == 10 and all(r["prompt_ids"][0] % 2 for r in rows)


def test_refills_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admission, "MAX_REFILLS", 3)
    even = prompts(8)
    even = TableSource("even", even.table.take([0, 2, 4, 6]))
    schedule = Synchronous(steps=2, prompts_per_step=2)
    with (
        drive(toy_dapo(even, **handles()), tmp_path, schedule=schedule) as driver,
        pytest.raises(StalledError) as caught,
    ):
        driver.run()
    assert (
        "step 1 lacks 2 of its 2 groups: 0 of the 8 prompts issued for it have passed the filters"
        in str(caught.value)
    )
    assert "rows dropped in the run: 16 by 'odd_prompts'. Try " in str(caught.value)


# Several updating nodes, several followers


@pytest.mark.parametrize("shared", [True, False])
def test_two_updating_nodes_each_update_once_a_step(tmp_path: Path, shared: bool):
    made = handles() | {"critic": group(ToyCritic)}
    recorded = toy_ppo(prompts(8), **made)
    pool = ResourcePool("shared", cpus=1)
    placement = {"actor": Place(pool), "critic": Place(pool)} if shared else None
    with drive(recorded, tmp_path, placement=placement) as driver:
        metrics = driver.run()
        seen = [driver.call(made[name], "seen_groups")[0] for name in ("actor", "critic")]
    assert seen[0] == seen[1] and [len(groups) for groups in seen[0]] == [8, 8, 8]
    assert all(row["actor/rows"] == row["critic/rows"] == 8 for row in metrics[1:])
    issued = {c["rows"] for c in driver.directory.timeline if c["node"] == "rollout.generate"}
    assert issued == {4}, "no prompts beyond those of the step"


def test_updates_that_see_different_filters_wait_for_one_whole_step(tmp_path: Path):
    @node(shape=Shape.FILTER, takes=GROUPS, reads=("prompt_ids",))
    def not_the_first(samples: Batch) -> Batch:
        return samples.take([k for k, ids in enumerate(samples["prompt_ids"].to_pylist()) if ids[0]])

    @graph
    def two_ways(prompts: Any, *, rollout: Any, reward: Any, critic: Any, actor: Any) -> Any:
        samples = centred(reward.score(rollout.generate(prompts)))
        return critic.update(samples), actor.update(not_the_first(samples))

    made = handles() | {"critic": group(ToyCritic)}
    schedule = Synchronous(steps=2, prompts_per_step=4, shuffle=False)
    with drive(two_ways(prompts(8), **made), tmp_path, schedule=schedule) as driver:
        metrics = driver.run()
    assert [row["actor/rows"] for row in metrics[1:]] == [8, 8]
    assert [row["critic/rows"] for row in metrics[1:]] == [10, 10]


def test_a_teacher_follows_every_second_update(tmp_path: Path):
    made = handles() | {"teacher": group(ToyTeacher)}
    made["teacher"].follows(made["actor"], every=2)
    with drive(toy_distillation(prompts(8), **made), tmp_path, steps=5) as driver:
        metrics = driver.run()
    assert [row["teacher/version"] for row in metrics[1:]] == [0, 0, 2, 2, 4]


def test_versions_count_updates_and_travel_with_the_tokens(tmp_path: Path):
    with drive(training(), tmp_path) as driver:
        driver.run()
        assert driver.groups["actor"].version == driver.groups["rollout"].version == 3
    for step in range(3):
        for row in samples_of(tmp_path / "run", "train", step + 1):
            assert set(row["response_versions"]) == {step}


def test_a_skipped_weight_update_is_caught_at_once(tmp_path: Path):
    with drive(training(rollout={"skip_update_at": 1}), tmp_path) as driver:
        with pytest.raises(RuntimeError) as caught:
            driver.run()
        assert driver.directory.metrics[-1]["step"] == 1, "in the very next step"
    assert str(caught.value) == (
        "'actor' is at version 1, but rows ready for its update were generated by version 0; the schedule allows a "
        "staleness of 0. Was a weight update skipped? Followers: {'rollout': 1}"
    )


def test_a_policy_gradient_wants_a_generator_that_takes_over_every_version(tmp_path: Path):
    ratio = ToyLoss(column="response_logprobs")
    text = refused(tmp_path, toy_grpo(prompts(8), **handles(follow=False), loss=ratio))
    assert "'rollout' follows no group: add rollout.follows(actor)" in text
    slow = handles(follow=False)
    slow["rollout"].follows(slow["actor"], every=2)
    text = refused(tmp_path, toy_grpo(prompts(8), **slow, loss=ratio))
    assert (
        "'rollout' follows 'actor' every 2 updates, but Synchronous allows a staleness of 0; take every=1"
        in text
    )


def test_a_ratio_of_responses_too_wants_a_generator_that_takes_over_every_version(tmp_path: Path):
    gspo = PolicyLoss(ratio=sequence_ratio)
    assert "follows no group" in refused(
        tmp_path, toy_grpo(prompts(8), **handles(follow=False), loss=gspo)
    )


def test_a_generator_that_follows_no_group_may_teach(tmp_path: Path):
    with drive(training(follow=False), tmp_path) as driver:
        assert len(driver.run()) == 4


def test_groups_on_a_pool_with_gpus_make_room_for_each_other(tmp_path: Path):
    device = ResourcePool("device", cpus=1, gpus=1)
    places = {name: Place(device) for name in ("rollout", "actor")}
    with drive(training(), tmp_path, steps=2, placement=places) as driver:
        driver.run()
        turns = [
            (call["group"], call["node"])
            for call in driver.directory.timeline
            if call["node"] in ("onload", "offload")
        ]
    onloaded: set[str] = set()
    for group_name, method in turns:
        if method == "onload":
            assert not onloaded, "one model at a time"
            onloaded.add(group_name)
        else:
            onloaded.discard(group_name)
    assert turns.count(("actor", "onload")) == 2, (
        "for each update; it gives its weights away from host memory"
    )


class DiscardingRollout(ToyRollout):
    """Without weights, it samples rows of version -1."""

    discarded = 0

    @classmethod
    def discards_weights(cls, config: Any) -> bool:
        return True

    def offload(self, discard_weights: bool = False) -> None:
        if discard_weights:
            self.version = -1
            DiscardingRollout.discarded += 1


@pytest.mark.parametrize("schedule", [Synchronous, Pipelined])
@pytest.mark.parametrize("every", [1, 2])
def test_weights_that_an_update_replaces_are_discarded_and_always_arrive_before_they_are_used(
    tmp_path: Path, schedule: Any, every: int
):
    device = ResourcePool("device", cpus=1, gpus=1)
    places = {name: Place(device) for name in ("rollout", "actor")}
    made: dict[str, Any] = {
        "rollout": group(DiscardingRollout),
        "reward": group(ToyReward),
        "actor": group(ToyActor),
    }
    made["rollout"].follows(made["actor"])
    held_out = toy_evaluation(prompts(6, "held_out"), rollout=made["rollout"], reward=made["reward"])
    DiscardingRollout.discarded = 0
    with drive(
        toy_dapo(prompts(16), **made),
        tmp_path,
        schedule=schedule(steps=4, prompts_per_step=5),
        evaluations=[Evaluation(held_out, every=every)],
        placement=places,
    ) as driver:
        driver.run()
    assert DiscardingRollout.discarded
    for step in range(1, 5):
        rows = samples_of(tmp_path / "run", "train", step)
        if step % every == 0:
            rows += samples_of(tmp_path / "run", "eval", step)
        assert rows and all(min(row["response_versions"]) >= step - 1 for row in rows)


HAPPENED: list[str] = []


class NotingActor(ToyActor):
    """Notes when its model is created, onloaded and offloaded."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        HAPPENED.append(f"{self.context.name} made")

    def offload(self) -> None:
        HAPPENED.append(f"{self.context.name} offloaded")


class NotingRollout(ToyRollout):
    """Does the same for a rollout."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        HAPPENED.append(f"{self.context.name} made")

    def offload(self) -> None:
        HAPPENED.append(f"{self.context.name} offloaded")


def test_groups_that_share_devices_start_in_turn_and_followers_last(tmp_path: Path):
    device = Place(ResourcePool("device", gpus=1))
    made: dict[str, Any] = {
        "rollout": group(NotingRollout),
        "reward": group(ToyReward),
        "actor": group(NotingActor),
    }
    made["rollout"].follows(made["actor"])
    HAPPENED.clear()
    with drive(toy_grpo(prompts(8), **made), tmp_path, placement={"rollout": device, "actor": device}):
        began = list(HAPPENED)
    assert began[:4] == ["actor made", "actor offloaded", "rollout made", "rollout offloaded"]
    HAPPENED.clear()
    with drive(toy_grpo(prompts(8), **made), tmp_path, name="apart"):
        assert HAPPENED == ["actor made", "rollout made"], "who has devices of its own keeps them"


def test_a_failed_run_refuses_further_use(tmp_path: Path):
    with drive(training(rollout={"fail_on": 20}), tmp_path) as driver:
        with pytest.raises(WorkerError, match="not to my taste"):
            driver.run()
        with pytest.raises(RuntimeError, match="this run has failed"):
            driver.run()


def test_a_run_can_be_used_only_in_the_with_block_of_its_driver(tmp_path: Path):
    driver = drive(training(), tmp_path)

    def refuses() -> None:
        assert driver.buffer is None
        with pytest.raises(RunError, match="use its driver in a `with` block"):
            driver.run()

    refuses()
    assert not driver.groups
    with driver:
        assert set(driver.groups) >= {"rollout", "actor"} and driver.buffer is not None
        driver.run()
    refuses()


def test_weights_that_arrive_garbled_are_refused(tmp_path: Path):
    message = (
        r"weights of version 0 arrived at rollout\[0\] with checksum garbled, but f4dbdf21 was published"
    )
    with pytest.raises(RuntimeError, match=message), drive(training(rollout={"garble": True}), tmp_path):
        pass


def test_a_loss_of_the_users_own_travels_as_an_argument(tmp_path: Path):
    made = handles()
    recorded = toy_grpo(prompts(8), **made, loss=ToyLoss(scale=10.0, column="response_logprobs"))
    assert (
        "response_logprobs" in recorded["actor.update"].reads
        and "advantages" not in recorded["actor.update"].reads
    )
    with drive(toy_grpo(prompts(8), **handles(), loss=ToyLoss(scale=10.0)), tmp_path, steps=1) as driver:
        assert driver.run()[1]["actor/largest"] == 5.0


class Drawing(ToyRollout):
    """Notes the inputs of its random generators."""

    seen: ClassVar[dict[int, list[list[int]]]] = {}

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        reads=("prompt_ids",),
        may_read=("draw_path",),
        writes=("response_ids",),
    )
    def say(self, prompts: Batch) -> Iterator[Batch]:
        for k in reversed(range(len(prompts))):  # finish some earlier than others
            self.seen.setdefault(prompts["group_id"][k].as_py(), []).append(
                prompts["draw_path"][k].as_py()
            )
            yield Batch.of(parent_id=[prompts["sample_id"][k].as_py()] * 2, response_ids=[[1], [1]])


@pytest.mark.parametrize(
    "schedule", [Synchronous(prompts_per_step=4, steps=1), Pipelined(prompts_per_step=2, steps=2)]
)
def test_rows_of_a_group_have_distinct_seeds_under_every_schedule(tmp_path: Path, schedule: Any):
    @graph
    def turns(prompts: Any, *, drawing: Any, actor: Any) -> Any:
        drawing.say(prompts)
        return actor.update(drawing.say(drawing.say(prompts)), loss=ToyLoss(column="response_ids"))

    with drive(
        turns(prompts(4), drawing=group(Drawing), actor=group(ToyActor)), tmp_path, schedule=schedule
    ) as driver:
        driver.run()
    drawn, Drawing.seen = Drawing.seen, {}
    assert len(drawn) == 4 and all(sorted(d) == [[], [2], [3, 0, 2], [3, 1, 2]] for d in drawn.values())


def test_ranks_that_a_backend_does_not_provide_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pool = ResourcePool("two", cpus=2)
    placement = {"rollout": Place(pool, ranks=2), "reward": Place(pool)}
    schedule = Synchronous(steps=1, prompts_per_step=4)
    with Driver(training(), schedule=schedule, placement=placement, root=tmp_path, name="run") as driver:
        driver.run()
    assert (
        "the backend gives each group one rank, the placement asks for more: rollout 2\n"
        in capsys.readouterr().out
    )


# Before anything starts


def refused(root: Path, recorded: Graph | None = None, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        drive(recorded or training(), root, **settings)
    assert not (root / "run").exists(), "nothing was made"
    return str(caught.value)


def test_a_placement_is_checked(tmp_path: Path):
    text = refused(tmp_path, placement={"rolout": Place(ResourcePool())})
    assert text == (
        "the placement names a group 'rolout', which no graph has; did you mean 'rollout'? "
        "(groups: rollout, reward, actor, functions, recorder)"
    )
    big = {"actor": Place(ResourcePool("big", cpus=4096))}
    text = refused(tmp_path, placement=big, backend=RayBackend())
    assert re.search(r"asks for 4096 CPUs \(big: 4096\), but this machine has \d+", text)
    pools = {"actor": Place(ResourcePool("a", cpus=1)), "rollout": Place(ResourcePool("a", cpus=2))}
    assert refused(tmp_path, placement=pools) == "two resource pools are called 'a'"


def test_a_source_without_rows_is_refused(tmp_path: Path):
    empty = TableSource("nothing", prompts(1).table.slice(0, 0))
    assert (
        refused(tmp_path, toy_grpo(empty, **handles()))
        == "source 'nothing' of graph 'toy_grpo' has no rows"
    )


def test_two_groups_of_one_name_in_two_graphs_are_refused(tmp_path: Path):
    other = toy_evaluation(
        prompts(), rollout=group(ToyRollout, name="rollout"), reward=group(ToyReward, name="judge")
    )
    assert refused(tmp_path, evaluations=[Evaluation(other)]).startswith(
        "two worker groups are called 'rollout'"
    )


def test_a_leader_that_no_graph_updates_is_refused(tmp_path: Path):
    made = handles()
    recorded = toy_evaluation(prompts(), rollout=made["rollout"], reward=made["reward"])
    assert "follows 'toyactor', which no node updates" in refused(tmp_path, recorded)


def test_evaluations_have_distinct_names(tmp_path: Path):
    made = handles()
    evaluation = toy_evaluation(prompts(), rollout=made["rollout"], reward=made["reward"])
    both = [Evaluation(evaluation), Evaluation(evaluation)]
    assert "two graphs of the run are called 'eval'" in refused(
        tmp_path, toy_grpo(prompts(), **made), evaluations=both
    )
    one = [Evaluation(evaluation, name="train")]
    assert "'train'" in refused(tmp_path, toy_grpo(prompts(), **made), evaluations=one)


def test_a_used_run_directory_is_refused(tmp_path: Path):
    with drive(training(), tmp_path, steps=1) as driver:
        driver.run()
    with pytest.raises(
        UserError, match=r"run directory .*run is used already; give the run another name, or remove it"
    ):
        drive(training(), tmp_path)


# Files of a run


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a tokenizer that writes token 7 as `t7`."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    folder.mkdir()
    words = tokenizers.models.WordLevel({f"t{k}": k for k in range(200)}, unk_token="t0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"schedule": "sync"},
            r"Driver\(schedule=...\) takes a value such as weft.Synchronous\(steps=100\), not 'sync'",
        ),
        ({"schedule": Synchronous}, r"Driver\(schedule=...\) takes a value"),
        ({"buffer": {"max_rows": 10}}, r"Driver\(buffer=...\) takes a weft.BufferConfig"),
        (
            {"backend": "local"},
            r"Driver\(backend=...\) takes weft.Local\(\) or weft.RayBackend\(\), not 'local'",
        ),
        (
            {"placement": {"actor": ResourcePool()}},
            r"Driver\(placement=...\) takes a mapping of group names to weft.Place",
        ),
    ],
)
def test_a_thing_of_another_kind_is_refused_by_name(tmp_path: Path, wrong: dict[str, Any], message: str):
    settings: dict[str, Any] = {
        "schedule": Synchronous(steps=1, prompts_per_step=4),
        "root": tmp_path,
        **wrong,
    }
    with pytest.raises(UserError, match=message):
        Driver(training(), **settings)


def test_the_run_directory_has_everything(tmp_path: Path, model: str):
    graph = training(rollout={"model": model})
    with drive(
        graph, tmp_path, settings={"steps": 3, "where": tmp_path, "how": math.inf}, record_every=2
    ) as driver:
        driver.run()
    run = tmp_path / "run"
    assert sorted(p.name for p in run.iterdir()) == [
        "buffer",
        "config.json",
        "graph.json",
        "graph.mmd",
        "live.json",
        "lock",
        "logs",
        "metrics.parquet",
        "processes.arrows",
        "samples",
        "timeline.parquet",
    ]
    config = json.loads((run / "config.json").read_text())
    assert (
        config["groups"]["rollout"] | {"class": "toy.ToyRollout", "model": model}
        == config["groups"]["rollout"]
    )
    assert (
        config["schedule"] | {"kind": "Synchronous", "steps": 3, "prompts_per_step": 4}
        == config["schedule"]
    )
    assert config["settings"]["where"] == str(tmp_path) and config["backend"] == "Local()"
    assert config["graphs"]["train"] == str(graph).splitlines()
    assert (run / "graph.mmd").read_text() == graph.mermaid()
    assert [(part.graph, part.step) for part in recorded(run)] == [("train", 2)]
    row = samples_of(run, "train", 2)[1]
    first = row["prompt_ids"][0]
    assert row["response"] == f"t{first} t{first + 1}" and row["prompt"].startswith(f"t{first} ")
    assert (
        row["reward"] == 2.0
        and row["advantages"] == [0.5, 0.5]
        and row["response_logprobs"] == [-1.0, -1.0]
    )
    assert {"sample_id", "group_id", "parent_id", "answer", "response_versions"} <= set(row)
    timeline = pq.read_table(run / "timeline.parquet").to_pylist()
    assert [
        c["node"] for c in timeline if c["step"] == 1 and c["rows"] and c["group"] != "functions"
    ] == [
        "rollout.generate",
        "reward.score",
        "actor.update",
    ]
    assert all(0 <= c["start_s"] <= c["end_s"] and c["worker_s"] >= 0 for c in timeline)


def test_metrics_of_a_run_that_failed_are_on_disk(tmp_path: Path):
    with drive(training(rollout={"skip_update_at": 1}), tmp_path) as driver, pytest.raises(RuntimeError):
        driver.run()
    assert pq.read_table(tmp_path / "run" / "metrics.parquet")["step"].to_pylist() == [0, 1]


def test_calls_outside_the_loop_are_checked(tmp_path: Path):
    recorded = training()
    with drive(recorded, tmp_path) as driver:
        with pytest.raises(UserError, match="ToyActor has no remote method 'sav'"):
            driver.call(recorded.handles["actor"], "sav")
        with pytest.raises(UserError, match="not a group of this run"):
            driver.call(group(ToyActor, name="stranger"), "seen_groups")
