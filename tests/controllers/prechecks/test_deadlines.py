"""Default deadlines follow the size of the largest model."""

import json
from pathlib import Path
from typing import Any

import pytest
from toy import ToyActor, ToyReward, ToyRollout
from toy_runs import drive, training

from weft.controllers.prechecks.checks import CALL_S, READ_BYTES_PER_S, longest_start_s, model_bytes
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group


def model(folder: Path, *sizes: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
    for number, size in enumerate(sizes):
        (folder / f"model-{number}.safetensors").write_bytes(b"\0" * size)
    return str(folder)


def test_the_largest_model_counts_with_all_of_its_files(tmp_path: Path):
    small, large = model(tmp_path / "small", 10), model(tmp_path / "large", 1000, 2000)
    handles: list[Any] = [group(ToyActor, model=large), group(ToyRollout, model=small), group(ToyReward)]
    assert model_bytes(handles) == 3000 and model_bytes(handles[1:]) == 10
    assert model_bytes([]) == 0
    missing: Any = group(ToyActor, model=str(tmp_path / "missing"))
    assert model_bytes([missing]) == 0


def test_a_model_that_takes_longer_to_read_has_more_time_to_start():
    assert longest_start_s(int(READ_BYTES_PER_S)) == longest_start_s(0) + 1


def test_a_run_takes_the_deadlines_that_the_user_sets_and_no_others(tmp_path: Path):
    for given, start_s, call_s in ((None, 300.0, CALL_S), (70.0, 300.0, 70.0), (900.0, 900.0, 900.0)):
        driver = drive(training(), tmp_path, call_timeout_s=given, name=f"run-{given}")
        assert (driver._spec.start_timeout_s, driver._spec.call_timeout_s) == (start_s, call_s)
        driver.close()
    with pytest.raises(
        UserError, match=r"Driver\.call_timeout_s: input should be greater than 0, not -1"
    ):
        drive(training(), tmp_path, call_timeout_s=-1, name="other")
