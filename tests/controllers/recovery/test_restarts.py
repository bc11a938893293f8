"""A driver restarts its run from the last checkpoint, a bounded number of times."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from saved_runs import SCHEDULES, Killed, run

from weft.controllers.driver import MAX_RESTARTS
from weft.controllers.recovery.checkpoints import complete_checkpoints
from weft.controllers.recovery.resume import find_checkpoint
from weft.dataflow.errors import WorkerDied
from weft.dataflow.runs.files import CHECKPOINTS


@pytest.mark.parametrize(("checkpoints", "deaths"), [(0, 1), (1, 1 + MAX_RESTARTS)])
def test_a_run_with_a_dying_worker_restarts_a_bounded_number_of_times(
    tmp_path: Path, checkpoints: int, deaths: int
):
    died = 0

    def die(_: Mapping[str, float]) -> None:
        nonlocal died
        if len(complete_checkpoints(tmp_path / "run" / CHECKPOINTS)) >= checkpoints:
            died += 1
            raise WorkerDied(f"death {died} of rank 1 of 'rollout'")

    with pytest.raises(WorkerDied, match=f"death {deaths} of"):
        run(tmp_path, SCHEDULES[0], at_step=die, evaluate=False)
    assert died == deaths


def test_the_time_of_a_run_counts_all_its_lives(tmp_path: Path):
    began = time.monotonic()

    def end(_: Mapping[str, float]) -> None:
        if complete_checkpoints(tmp_path / "run" / CHECKPOINTS):
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path, SCHEDULES[0], at_step=end, evaluate=False)
    point = find_checkpoint(tmp_path / "run")
    assert point is not None and 0 < point.state.time_s < time.monotonic() - began
    _, metrics = run(tmp_path, SCHEDULES[0], resume="latest", evaluate=False)
    assert metrics[point.state.step + 1]["time_s"] > point.state.time_s
    assert metrics[-1]["time_s"] < time.monotonic() - began
