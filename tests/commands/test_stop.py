"""`weft stop`: a run saves itself and exits with 0, without signals."""

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from recorded_runs import Live, driver

from weft.__main__ import main
from weft.dataflow.runs.lock import Life, life_of


def test_a_run_that_makes_checkpoints_saves_itself_and_leaves_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    live = Live(tmp_path, "live", every=100_000)
    assert main(["stop", str(live.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["asked"], found["ended"], found["status"]) == (True, True, "stopped")
    assert live.join() == 0
    [saved] = (live.path / "checkpoints").glob("step_*")
    assert int(saved.name.removeprefix("step_")) == found["step"]
    resumed = driver(tmp_path, "live", steps=found["step"] + 1, every=100_000, resume="latest")
    with resumed:  # an old request does not stop it
        assert resumed.run()[-1]["step"] == found["step"] + 1


def test_a_stopped_run_without_checkpoints_finishes_its_step_and_returns(tmp_path: Path):
    live = Live(tmp_path, "live")
    assert main(["stop", str(live.path)]) == 0
    assert live.join() == "returned"


def test_a_run_that_is_over_is_left_alone(done: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["stop", "one"]) == 0
    assert capsys.readouterr().out == "runs/one is not running: done, after step 3 of 3\n"
    assert not (done / "one" / "stop.json").exists()


@pytest.mark.thorough
def test_a_run_on_another_host_is_asked_by_its_file_and_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its process id may belong to another process here, which must stay untouched."""
    run = tmp_path / "run"
    (run / "lock").mkdir(parents=True)
    live = Live(tmp_path, "live")
    _, holder = life_of(live.path)
    main(["stop", str(live.path)])
    live.join()
    assert holder is not None
    elsewhere = replace(holder, host="elsewhere", pid=os.getpid(), epoch=4)
    (run / "lock" / "epoch_000004").write_text(json.dumps(asdict(elsewhere)) + "\n")
    assert life_of(run)[0] is Life.ALIVE
    (run / "stop.json").mkdir()
    assert main(["stop", str(run)]) == 1 and not (run / "stop.json.partial").exists()
    (run / "stop.json").rmdir()
    capsys.readouterr()
    assert main(["stop", str(run), "--timeout", "0.1"]) == 1
    assert "did not end within 0.1 s: its driver is host 'elsewhere'" in capsys.readouterr().err
    assert json.loads((run / "stop.json").read_text())["epoch"] == 4
    silent = (run / "lock" / "epoch_000004").stat().st_mtime - 100
    os.utime(run / "lock" / "epoch_000004", (silent, silent))
    assert life_of(run)[0] is Life.DEAD
    ahead = time.time() + 30 * 86400
    os.utime(run / "lock" / "epoch_000004", (ahead, ahead))
    assert life_of(run)[0] is Life.DEAD, "a clock that went back"
    assert main(["stop", str(run)]) == 0
