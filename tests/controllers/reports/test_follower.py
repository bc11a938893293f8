"""A follower hands each metric of a run to its tracker once, over all starts of the run and ends with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fake_trackers import Kept
from test_new_values import add, stream

from weft.controllers.reports.tracker_threads import FAILED, FINISHED, _Follower, _SentMetrics, path_of
from weft.dataflow.runs.samples import sample_file_name


def rows(*steps: int, value: float = 0.0) -> list[dict[str, float]]:
    return [{"step": float(step), "loss": step + value} for step in steps]


def kept(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "kept.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in kept(run) if "loss" in line]


def scripted(*doing: Callable[[], object], last: str = FINISHED) -> Callable[[float], str | None]:
    """A driver that acts between two looks of the follower, and then reports how the run ended."""
    todo = list(doing)

    def said_within(seconds: float) -> str | None:
        if todo:
            todo.pop(0)()
            return None
        return last

    return said_within


def test_metrics_are_sent_as_they_come_and_the_run_is_closed(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"seed": 1, "settings": {"api_key": "abc"}}))
    writer = stream(tmp_path)
    late = {"step": 1.0, "eval/reward/mean": 0.5}
    _Follower(tmp_path, "fake_trackers:Kept", None).follow(
        scripted(lambda: add(writer, *rows(1, 2)), lambda: None, lambda: add(writer, *rows(3), late))
    )
    writer.close()
    config = {"seed": 1, "settings": {"api_key": "[hidden]"}}
    assert kept(tmp_path) == [
        {"open": "", "after": None, "logged": 0, "config": config},
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 3.0},
        {"step": 1, "eval/reward/mean": 0.5},
        {"closed": "well"},
    ]


@pytest.mark.parametrize(("tracker", "again"), [("Kept", []), ("Overwriting", [(3, 3.5), (4, 4.5)])])
def test_a_run_that_goes_back_resends_steps_only_to_trackers_that_replace_them(
    tmp_path: Path, tracker: str, again: list[tuple[int, float]]
):
    name, first = f"fake_trackers:{tracker}", stream(tmp_path)
    _Follower(tmp_path, name, None).follow(
        scripted(lambda: add(first, *rows(0, 1, 2, 3, 4)), last=FAILED)
    )
    first.close()
    assert losses(tmp_path) == [(step, float(step)) for step in range(5)] and kept(tmp_path)[-1] == {
        "closed": "failed"
    }
    first.path.unlink()
    second = stream(
        tmp_path
    )  # the directory of a run that goes on after step 2 begins with what was until then
    _Follower(tmp_path, name, 2).follow(
        scripted(lambda: add(second, *rows(0, 1, 2), *rows(3, 4, 5, value=0.5)))
    )
    second.close()
    assert losses(tmp_path)[5:] == [*again, (5, 5.5)]
    opened = [line for line in kept(tmp_path) if "open" in line]
    assert [(line["open"], line["after"], line["logged"]) for line in opened] == [
        ("", None, 0),
        ("first", 2, 5),
    ]


def test_metrics_unsent_at_a_kill_are_sent_on_resume(tmp_path: Path):
    writer = stream(tmp_path)
    add(writer, *rows(1, 2, 3))
    writer.close()
    _SentMetrics(id="first", logged=1, steps={"loss": 1}).save(path_of(tmp_path, "fake_trackers:Kept"))
    _Follower(tmp_path, "fake_trackers:Kept", 3).follow(scripted())
    assert losses(tmp_path) == [(2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("damage", ["", "[]", '{"id": 1}', "{"])
def test_a_damaged_record_of_sent_metrics_counts_as_none(tmp_path: Path, damage: str):
    path = path_of(tmp_path, "wandb")
    path.parent.mkdir()
    path.write_text(damage)
    assert _SentMetrics.of_file(path) == _SentMetrics()


def test_secrets_are_left_out_of_what_a_tracker_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "s3cr3t-value")
    config = {
        "url": "https://user:s3cr3t-value@host",
        "max_tokens": 4,
        "HF_TOKEN": "x",
        "tokenizer": "t",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    _Follower(tmp_path, "fake_trackers:Kept", None).follow(lambda _: FINISHED)
    told = {
        "url": "https://user:[value of MY_SERVICE_TOKEN]@host",
        "max_tokens": 4,
        "HF_TOKEN": "[hidden]",
        "tokenizer": "t",
    }
    assert kept(tmp_path)[0]["config"] == told


def test_a_tracker_of_ones_own_is_any_class_with_these_methods():
    from weft.controllers.reports.trackers import Tracker, new_tracker

    tracker: Tracker = new_tracker("fake_trackers:Kept")
    assert isinstance(tracker, Kept)


def record(run: Path, step: int, *responses: str) -> None:
    """Write samples of a step as the recorder does."""
    path = run / "samples" / sample_file_name("train", step, step, 0)
    path.parent.mkdir(exist_ok=True)
    rewards = pa.array([float(n) for n in range(len(responses))], pa.float32())
    table = pa.table({"prompt": ["say"] * len(responses), "response": [*responses], "reward": rewards})
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


def test_samples_of_the_latest_step_are_sent_once_cut_escaped_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-value")
    writer = stream(tmp_path)

    def two_steps() -> None:
        record(tmp_path, 1, "first")
        record(tmp_path, 2, "a\x1b[31m s3cr3t-value", "b" * 5000, "third")
        add(writer, *rows(1, 2))

    process = _Follower(tmp_path, "fake_trackers:Sampled", None, samples=2)
    process.follow(scripted(two_steps, lambda: None, lambda: add(writer, *rows(3))))
    [sent] = [line for line in kept(tmp_path) if "rows" in line]
    first, second = sent["rows"]
    assert sent["samples_of"] == 2
    assert "\x1b" not in first["response"] and "[value of MY_API_KEY]" in first["response"]
    assert (first["prompt"], first["reward"], second["reward"]) == ("say", 0.0, 1.0)
    assert len(second["response"]) < 1500
    again = _Follower(tmp_path, "fake_trackers:Sampled", 2, samples=2)
    again.follow(scripted(lambda: add(writer, *rows(4))))
    assert sum("rows" in line for line in kept(tmp_path)) == 1, "a run that goes on sends them once"


@pytest.mark.parametrize(("tracker", "samples"), [("Sampled", 0), ("Kept", 2)])
def test_no_samples_are_sent_unless_wanted_and_supported(tracker: str, samples: int, tmp_path: Path):
    writer = stream(tmp_path)
    record(tmp_path, 1, "first")
    add(writer, *rows(1))
    _Follower(tmp_path, f"fake_trackers:{tracker}", None, samples=samples).follow(scripted())
    assert not any("rows" in line for line in kept(tmp_path))


def test_a_follower_that_the_run_left_behind_sends_nothing_more(tmp_path: Path):
    writer, follower = stream(tmp_path), _Follower(tmp_path, "fake_trackers:Kept", None)

    def leave() -> None:
        add(writer, *rows(2))
        follower.is_left_behind = True

    with pytest.raises(RuntimeError, match="the run ended without it"):
        follower.follow(scripted(lambda: add(writer, *rows(1)), leave))
    writer.close()
    assert losses(tmp_path) == [(1, 1.0)]
    assert _SentMetrics.of_file(path_of(tmp_path, "fake_trackers:Kept")).steps == {"loss": 1}
