"""`weft watch`: a run of another process, while it works and afterwards."""

import io
import json
import shutil
import threading
from pathlib import Path

import pytest
from recorded_runs import Live

from weft.__main__ import main
from weft.commands.runs import _WatchedRun
from weft.controllers.reports.displays import PlainLines
from weft.controllers.reports.step_line import clock
from weft.controllers.reports.terminal import Terminal
from weft.dataflow.runs.alerts import Alerts
from weft.dataflow.runs.facts import facts_of


def test_a_run_that_is_over_is_shown_as_it_went(done: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["watch", "one"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "run one: done, step 3; files in runs/one"
    steps = [line for line in said if line.startswith(("step", "eval"))]
    assert [line.split("  ")[0] for line in steps] == [
        "step 1/3",
        "eval of step 2: mean reward 1.000",
        "step 2/3",
        "eval of step 3: mean reward 1.000",
        "step 3/3",
    ]
    assert any(line.split() == ["metrics:", "runs/one/metrics.parquet"] for line in said)
    took = clock(facts_of(done / "one").last["time_s"])
    assert f"run one: 3 steps, {took}" in said and "\x1b" not in "".join(said)
    for last in (0, 1):
        assert main(["watch", "one", "--last", f"{last}"]) == 0
        assert [
            line[:8] for line in capsys.readouterr().out.splitlines() if line.startswith("step")
        ] == ["step 3/3"] * last


def test_a_folder_that_holds_no_run_is_refused(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for inside, says in (
        (None, "it is empty"),
        ("config.json", "it has none of the files of a run"),
    ):
        folder = tmp_path / f"folder-{inside}"
        folder.mkdir()
        if inside:
            (folder / inside).write_text("{}")
        assert main(["watch", str(folder)]) == 2
        assert f"error: {folder} holds no run: {says}" in capsys.readouterr().err
    assert main(["watch", str(done)]) == 2
    assert (
        f"{done} is a folder of runs: name one of them, such as {done / 'one'}"
        in capsys.readouterr().err
    )


def test_an_alert_names_its_steps_once(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Path(shutil.copytree(done / "one", tmp_path / "alerted"))
    alerts = Alerts(run)
    alerts.step = 3
    alerts.report("equal_rewards", "steps 1 to 3: all rewards are equal. Try another reward.")
    alerts.report("failed", "worker actor[0] is gone", ends=True)
    assert main(["watch", str(run)]) == 0
    said = capsys.readouterr().out
    assert "warning: steps 1 to 3: all rewards are equal" in said
    assert "warning: ended at step 3: worker actor[0] is gone" in said


def test_with_json_it_is_the_present_state(done: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["watch", "one", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["step"], found["metrics"]["samples"]) == ("done", 3, 8.0)
    assert found["alerts"] == []


def test_a_live_run_is_followed_until_it_ends(tmp_path: Path):
    live, shown = Live(tmp_path, "live"), io.StringIO()
    view = _WatchedRun(live.path, PlainLines(shown), last=3)
    view.show_news()
    assert (
        view.goes_on and "run live: running" in shown.getvalue() and "held by host" in shown.getvalue()
    )
    assert main(["stop", str(live.path)]) == 0
    live.join()
    view.show_end()
    said = shown.getvalue().splitlines()
    numbers = [
        int(line.split("/")[0].removeprefix("step ")) for line in said if line.startswith("step ")
    ]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "no step is left out, none comes twice"
    assert any(line.startswith(f"run live: {numbers[-1]} steps") for line in said)


def test_a_terminal_gets_columns(done: Path):
    shown = io.StringIO()
    view = _WatchedRun(done / "one", Terminal(shown), last=3)
    view.show_end()
    header = next(
        line for line in shown.getvalue().splitlines() if line.split()[:2] == ["step", "reward"]
    )
    assert "tokens/s" in header


def test_watch_waits_for_the_end_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    live = Live(tmp_path, "live")
    stop = threading.Timer(0.5, lambda: (live.path / "stop.json").write_text('{"epoch": 1}'))
    stop.start()
    assert main(["watch", str(live.path)]) == 0
    assert live.join() == "returned"
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "samples:"
