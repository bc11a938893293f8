"""A run survives trackers that raise, hang or die, and reports each problem once."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from saved_runs import SCHEDULES, Killed
from saved_runs import run as saved_run
from test_follower import add, kept, record, rows, stream
from toy_runs import drive, training

from weft.controllers.backends.local import Local
from weft.controllers.reports import tracker_threads
from weft.controllers.reports.tracker_threads import TrackerThreads
from weft.dataflow.errors import UserError
from weft.dataflow.metric_names import untimed
from weft.dataflow.runs.alerts import read_alerts

ENDING = [f"fake_trackers:{name}" for name in ("Kept", "Raising", "Leaving")]
HANGING = [f"fake_trackers:{name}" for name in ("Hanging", "HangingAtOnce")]


def test_no_tracker_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKER_API_KEY", "k3y-of-a-service")
    monkeypatch.setattr(tracker_threads, "FINISH_S", 600.0)
    with drive(training(), tmp_path / "plain") as driver:
        expected = driver.run()
    with drive(training(), tmp_path, trackers=ENDING) as driver:
        metrics = driver.run()
    assert [untimed(row) for row in metrics] == [untimed(row) for row in expected]
    run = tmp_path / "run"
    sent: dict[float, dict[str, Any]] = {}
    for line in kept(run):
        if "step" in line:
            step = sent.setdefault(line["step"], {"step": float(line["step"])})
            assert not step.keys() & (line.keys() - {"step"}), "a metric of a step is sent once"
            step |= line
    assert list(sent.values()) == metrics and kept(run)[-1] == {"closed": "well"}
    said = [alert.text for alert in read_alerts(run) if alert.name == "tracker"]
    about = {name: [text for text in said if repr(name) in text] for name in ENDING}
    assert {name: len(texts) for name, texts in about.items()} == {
        ENDING[0]: 0,
        **dict.fromkeys(ENDING[1:], 1),
    }
    assert (
        "ConnectionError: refused with the key [value of TRACKER_API_KEY]" in about[ENDING[1]][0]
        and "SystemExit: 1" in about[ENDING[2]][0]
    )
    left = [file for file in (run / "trackers").iterdir() if "k3y-of-a-service" in file.read_text()]
    assert not left and "k3y-of-a-service" not in (run / "alerts.jsonl").read_text()


def test_a_run_does_not_wait_for_trackers_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracker_threads, "FINISH_S", 0.1)  # waited out
    with drive(training(), tmp_path, trackers=HANGING) as driver:
        driver.run()
        deadline = time.monotonic() + 60
        while not all((tmp_path / "run" / file).exists() for file in ("hangs", "hangs_later")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    said = [alert.text for alert in read_alerts(tmp_path / "run") if alert.name == "tracker"]
    assert len(said) == 2
    assert all(
        f"tracker {name!r} had not sent everything 0.1 s after the end" in "".join(said)
        for name in HANGING
    )


def test_a_killed_and_resumed_run_sends_each_step_once(tmp_path: Path):
    trackers = ("fake_trackers:Kept",)
    with pytest.raises(Killed):
        saved_run(tmp_path, SCHEDULES[0], kill_at=5, trackers=trackers)
    _, metrics = saved_run(tmp_path, SCHEDULES[0], resume="latest", trackers=trackers)
    lines = kept(tmp_path / "run")
    assert [line["open"] for line in lines if "open" in line] == ["", "first"]
    assert [line["closed"] for line in lines if "closed" in line] == ["failed", "well"]
    for name in ("actor/rows", "time_s", "eval/reward/mean"):
        sent = [line["step"] for line in lines if name in line]
        assert sent == [row["step"] for row in metrics if name in row], (
            f"{name}: each step once, in order"
        )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tracker_that_shows_no_sign_of_life_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracker_threads, "LEAVE_S", 0.1)  # waited out
    (tmp_path / "logs").mkdir()
    said: list[str] = []
    clock = Clock()
    one = TrackerThreads(
        ["fake_trackers:HangingAtOnce"], tmp_path, lambda run, row: None, said.append, clock
    )
    one.start(None)
    try:
        for now in (1.0, tracker_threads.STUCK_S, tracker_threads.STUCK_S + 1, 1000.0):
            clock.now = now
            one.stepped({"step": 1.0})
            assert len(said) == (now > tracker_threads.STUCK_S)
    finally:
        clock.now = 1e9
        one.end_all(finished=False)
    assert len(said) == 1 and "has not responded for 60 s. The run continues" in said[0]


def test_a_failing_endpoint_is_reported_once_and_left_alone(tmp_path: Path):
    said: list[str] = []
    asked: list[str] = []

    def report(run: str, row: object) -> None:
        asked.append(run)
        raise RuntimeError("the agent is gone")

    one = TrackerThreads(["prometheus"], tmp_path / "sums", report, said.append)
    one.start(None)
    one.stepped({"step": 1.0})
    one.stepped({"step": 2.0})
    one.end_all(finished=True)
    assert asked == ["sums"] and len(said) == 1 and "the agent is gone" in said[0]


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        (("tensorbord",), "there is no 'tensorbord'; did you mean 'tensorboard'?"),
        (
            ("prometheus",),
            "'prometheus' is the endpoint of a Ray cluster, so it needs backend=RayBackend()",
        ),
        ("wandb", r"trackers='wandb' is text, but must be a sequence of names: trackers=\('wandb',\)"),
        (("my_module:Mine", "my_module:Mine"), "'my_module:Mine' is named twice"),
        ((3,), "there is no 3"),
        ({"my_module:Mine": -1}, "'my_module:Mine' gets 0 to 100 samples of a step, not -1"),
        ({"my_module:Mine": True}, "gets 0 to 100 samples of a step, not True"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, trackers: Any, message: str
):
    with pytest.raises(UserError, match=message):
        drive(training(), tmp_path, trackers=trackers)
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package wandb, .*: pip install 'weft\[wandb\]'"):
        drive(training(), tmp_path, trackers=("wandb",))


def test_a_mapping_of_trackers_sends_samples_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracker_threads, "FINISH_S", 600.0)
    record(tmp_path, 1, "first", "second", "third")
    add(stream(tmp_path), *rows(1))
    said: list[str] = []
    following = TrackerThreads({"fake_trackers:Sampled": 2}, tmp_path, None, said.append)
    following.start(None)
    following.end_all(finished=True)
    [sent] = [line["rows"] for line in kept(tmp_path) if "rows" in line]
    assert len(sent) == 2 and not said


def test_a_run_without_trackers_starts_no_thread(tmp_path: Path):
    assert Local().cluster is None
    with drive(training(), tmp_path) as driver:
        driver.run()
        assert driver._history.trackers._threads == []
    assert not (tmp_path / "run" / "trackers").exists()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["trackers"] == []
