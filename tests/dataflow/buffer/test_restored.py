"""Damaged, missing or outdated files are skipped and named, and a run can go back."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from buffer_graphs import GRAPHS, eval_graph, train_graph
from fragile_disk import Crash, FragileDisk
from played_buffers import Driver, comes_to_its_end, fine, go_on, start, state_of

from weft.dataflow.buffer import recovery
from weft.dataflow.buffer.recovery import ledger_checkpoints, restore
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.errors import RecoveryError, UserError
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.log import Position


def broken_run(folder: Path, seed: int = 5) -> tuple[list[Position], str, str]:
    """Make a run with two checkpoints and later records; return positions, first state and last
    state."""
    driver = start(folder, seed=seed)
    positions: list[Position] = []
    first = ""
    for steps in (60, 40, 50):
        for _ in range(steps):
            driver.chance.choice(
                [driver.issue, driver.claim, driver.claim, driver.publish, driver.finish]
            )()
        if len(positions) < 2:
            positions.append(driver.buffer.checkpoint())
        first = first or state_of(driver.buffer)
    driver.buffer.commit(sync=True)
    driver.buffer.log.close()
    return positions, first, state_of(driver.buffer)


@pytest.mark.parametrize("every", [101, pytest.param(17, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, every: int):
    folder = tmp_path / "run"
    _, _, end = broken_run(folder)
    latest, earlier = ledger_checkpoints(folder)
    whole = latest.read_bytes()
    lines = whole.splitlines(keepends=True)
    broken = [b"", whole[:-1], whole[: len(whole) // 2], b"".join(lines[:-1]), b"".join(lines[1:])]
    for byte in range(0, len(whole), every):
        changed = bytearray(whole)
        changed[byte] ^= 1 << byte % 8
        broken.append(bytes(changed))
    for data in broken:
        latest.write_bytes(data)
        history = restore(folder, GRAPHS)
        assert state_of(history) == end and history.checkpoints == [earlier]
        assert (
            len(history.damage) == 1
            and str(latest) in history.damage[0]
            and "the one" not in history.damage[0]
        )
    earlier.write_bytes(b"")
    history = restore(folder, GRAPHS)
    assert state_of(history) == end and history.checkpoints == [], "the log alone tells everything"
    assert [str(p) in d for p, d in zip((latest, earlier), history.damage, strict=True)] == [True, True]
    comes_to_its_end(go_on(folder))


def test_a_checkpoint_of_another_version_is_skipped_and_the_log_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "run"
    _, _, end = broken_run(folder)
    for path in ledger_checkpoints(folder):
        position, records = recovery.read_checkpoint(path)
        with monkeypatch.context() as then:
            then.setattr(recovery, "FORMAT", 1)
            recovery.write_checkpoint(path, position, records)
    history = restore(folder, GRAPHS)
    assert state_of(history) == end and history.checkpoints == []
    assert all("has format 1, of an earlier version of Weft" in line for line in history.damage)


def test_a_checkpoint_beyond_the_end_of_the_log_is_passed_over(tmp_path: Path):
    folder = tmp_path / "run"
    positions, first, _ = broken_run(folder)
    log = folder / LOG
    log.write_bytes(log.read_bytes()[: positions[0].offset])
    history = restore(folder, GRAPHS)
    assert state_of(history) == first and history.end == positions[0]
    assert len(history.damage) == 1 and f"byte {positions[1].offset} of the log" in history.damage[0]
    comes_to_its_end(go_on(folder))


def test_a_checkpoint_of_a_future_that_was_given_up_is_passed_over(tmp_path: Path):
    folder = tmp_path / "run"
    positions, _, _ = broken_run(folder)
    late = ledger_checkpoints(folder)[0]
    kept = late.read_bytes()
    driver = go_on(folder, at=positions[0])
    assert not late.exists(), "it is deleted when the run goes back"
    while driver.buffer.log.position.offset < positions[1].offset + 500:
        driver.step()
    driver.buffer.commit(sync=True)
    driver.buffer.log.close()
    late.write_bytes(kept)  # a power failure undid its deletion
    history = restore(folder, GRAPHS)
    assert state_of(history) == state_of(driver.buffer) and late not in history.checkpoints
    assert any(str(late) in d for d in history.damage)


def test_a_damaged_log_is_used_up_to_the_damage_and_the_rest_is_kept(tmp_path: Path):
    folder = tmp_path / "run"
    positions, _, _ = broken_run(folder)
    data = bytearray((folder / LOG).read_bytes())
    byte = (positions[1].offset + len(data)) // 2
    data[byte] ^= 4
    (folder / LOG).write_bytes(data)
    driver = go_on(folder)
    (damage,) = driver.buffer.damage
    end = int(damage.split("byte ")[1].split(":")[0])
    assert (
        positions[1].offset <= end <= byte
        and "checksum" in damage
        and "the state before it is used" in damage
    )
    assert (folder / f"{LOG}.cut-{end}").read_bytes() == data[end:]
    comes_to_its_end(driver)


def test_a_run_goes_back_to_a_checkpoint_and_keeps_later_records(tmp_path: Path):
    folder = tmp_path / "run"
    positions, first, _ = broken_run(folder)
    whole = (folder / LOG).read_bytes()
    history = restore(folder, GRAPHS, at=positions[0])
    assert state_of(history) == first and history.end == positions[0] and not history.damage
    driver = go_on(folder, at=positions[0])
    assert (folder / f"{LOG}.cut-{positions[0].offset}").read_bytes() == whole[positions[0].offset :]
    assert driver.buffer.damage == [] and len(ledger_checkpoints(folder)) == 1
    notes = json.loads(first)[1]
    assert driver.buffer.notes == notes
    comes_to_its_end(driver)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_killed_while_going_back_can_go_back_again(tmp_path: Path, every: int):
    """Stop it at each operation on the disk. Each `every` times, complete the run as well."""
    positions, first, _ = broken_run(tmp_path / "run")
    number = 0
    for number in range(60):
        folder = tmp_path / "again"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "run", folder)
        disk = FragileDisk(number // 3, ("before", 0.4, "after")[number % 3])
        try:
            go_on(folder, disk, at=positions[0]).buffer.log.close()
            break
        except Crash:
            disk.lose_power(random.Random(number))
        assert state_of(restore(folder, GRAPHS, at=positions[0])) == first
        driver = go_on(folder, at=positions[0])
        assert not driver.buffer.damage
        if number % every == 0:
            comes_to_its_end(driver)
        else:
            driver.buffer.log.close()
    assert number >= 9


def test_a_position_that_is_not_in_the_log_is_named(tmp_path: Path):
    folder = tmp_path / "run"
    positions, _, _ = broken_run(folder)
    size = (folder / LOG).stat().st_size
    (damage,) = restore(folder, GRAPHS, at=Position(size + 5, 1)).damage
    assert damage == f"{folder / LOG} is sound to byte {size}: the state at byte {size + 5} is not there"
    assert restore(folder, GRAPHS, at=Position(positions[0].offset, 77)).damage


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"do": "lose", "group": 0, "why": "gone", "instead": 3}, "unknown field 'instead'"),
        ({"do": "split", "group": 0}, "unknown event 'split'"),
    ],
    ids=["field", "event"],
)
def test_a_record_of_a_later_version_is_refused(tmp_path: Path, record: dict[str, object], problem: str):
    folder = tmp_path / "run"
    buffer = SampleBuffer.create(folder, GRAPHS)
    buffer.ledgers["train"].issue([0], [1], step=0)
    buffer.log.append({**record, "graph": "train"})
    buffer.close(going_on=True)
    with pytest.raises(RecoveryError, match=f"{problem}; a later version of Weft wrote it"):
        restore(folder, GRAPHS)


def test_a_run_can_be_looked_into_without_its_graphs(tmp_path: Path):
    folder = tmp_path / "run"
    positions, first, end = broken_run(folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert state_of(restore(folder)) == end and state_of(restore(folder, at=positions[0])) == first
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before, (
        "it was only looked at"
    )
    driver = Driver(SampleBuffer.recover(folder, check=fine), random.Random(1), [0.0], "looking")
    assert state_of(driver.buffer).count('"lease"') == 0


def test_a_later_version_of_a_node_may_read_more_optional_columns(tmp_path: Path):
    folder = tmp_path / "run"
    broken_run(folder)
    graph = GRAPHS["train"]
    *others, node = graph.nodes
    operation = replace(node.operation, may_read=(*node.operation.may_read, "extra"))
    writers = {**node.writers, "extra": others[0].name}
    later = replace(node, operation=operation, reads=(*node.reads, "extra"), writers=writers)
    graphs = GRAPHS | {"train": replace(graph, nodes=(*others, later))}
    restored = SampleBuffer.recover(folder, graphs, check=fine)
    assert "extra" in restored.ledgers["train"].graph.nodes[-1].reads


def test_an_evaluation_of_an_earlier_version_continues_without_new_optional_nodes(tmp_path: Path):
    folder = tmp_path / "run"
    earlier = {"train": eval_graph(counts=True), "eval": eval_graph(counts=True)}
    SampleBuffer.create(folder, earlier).close(going_on=True)
    later = eval_graph(votes=True, counts=True)
    assert [node.name for node in later.nodes] == ["generate", "score", "vote", "count"]
    graph = restore(folder, earlier | {"eval": later}).ledgers["eval"].graph
    assert [(node.name, node.reads, node.after) for node in graph.nodes[1:]] == [
        ("score", ("response",), ("generate",)),
        ("count", ("reward",), ("generate", "score")),
    ]
    needed = eval_graph(votes=True, counts=True, reads=("reward", "vote"))
    for graphs in (
        {"eval": needed},
        {"eval": eval_graph(votes=True)},
        {"train": later},  # training with other columns is another run
    ):
        with pytest.raises(
            (UserError, RecoveryError), match="differs from when the run was started; check vote"
        ):
            restore(folder, earlier | graphs)


def test_an_evaluation_whose_truncated_samples_had_no_probabilities_continues(tmp_path: Path):
    folder = tmp_path / "run"
    earlier, later = eval_graph(), eval_graph(writes=("response", "response_logprobs"))
    SampleBuffer.create(folder, {"train": earlier, "eval": earlier}).close(going_on=True)
    assert restore(folder, {"train": earlier, "eval": later}).ledgers["eval"].graph is not None
    with pytest.raises((UserError, RecoveryError), match="check generate"):
        restore(folder, {"train": later, "eval": later})


def test_the_graphs_must_be_those_of_the_run(tmp_path: Path):
    folder = tmp_path / "run"
    broken_run(folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for graphs, says in (
        (
            GRAPHS | {"train": train_graph(scorer="judge")},
            "graph 'train' differs from when the run was started; check judge",
        ),
        (
            GRAPHS | {"train": train_graph(quorum=False)},
            "graph 'train' differs from when the run was started",
        ),
        ({"train": GRAPHS["train"]}, "the run has a graph 'eval', which is not given"),
        (
            GRAPHS | {"third": eval_graph()},
            r"is of a run of the graphs \['eval', 'train'\], not \['eval', 'third', 'train'\]",
        ),
    ):
        with pytest.raises(UserError, match=says):
            SampleBuffer.recover(folder, graphs, check=fine)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before, "nothing was changed"
    with pytest.raises(UserError, match="already has the buffer of a run"):
        SampleBuffer.create(folder, GRAPHS)
    with pytest.raises(UserError, match="holds no log of a run"):
        SampleBuffer.recover(tmp_path / "else", GRAPHS)


def test_other_numbers_of_samples_are_no_other_graph(tmp_path: Path):
    folder = tmp_path / "run"
    _, _, end = broken_run(folder)
    graphs = GRAPHS | {"train": train_graph(samples=9)}
    assert state_of(restore(folder, graphs, clock=lambda: -5.0)) == end
