"""The driver benchmark: each documented figure has a module that measures it."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.thorough
def test_the_costs_of_driver_and_simulator_are_separate(load: Any, monkeypatch: pytest.MonkeyPatch):
    row_cost, workload = load("driver/row_cost"), load("driver/workload")
    monkeypatch.setattr(row_cost, "ANSWERED", 1)
    cost = row_cost.measure(workload.Work.of(192, ranks=2))
    assert cost.figures["row_us"] > 0 and cost.figures["simulator_row_us"] > 0
    assert cost.figures["steps"] == 4 and 64 <= cost.figures["rows_in_flight"] <= 256


def test_every_figure_that_was_not_asked_for_is_null(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    folder = Path(load("machine").__file__).parent
    monkeypatch.setattr("sys.argv", ["driver.py", "--only", "call_rank_us", "--ranks", "2"])
    program = runpy.run_path(str(folder / "driver.py"), run_name="__main__")
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.pop("call_rank_us") > 0
    assert set(figures) == set(program["FIGURES"]) - {"call_rank_us"} and not any(figures.values())


def test_ranks_compute_few_prompts_twice_and_are_balanced(load: Any, monkeypatch: pytest.MonkeyPatch):
    module = load("driver/dispatch_tokens")
    monkeypatch.setattr(module, "DRAWS", 1)
    figures = module.dispatch_tokens()
    assert figures["dispatch_tokens"] <= 1.05 and figures["dispatch_imbalance"] <= 0.01
    by_case = figures["dispatch_by_case"]
    for distribution in ("equal", "log-normal"):
        for ranks in (2, 32):
            assert by_case[f"{distribution}, {ranks} ranks"]["tokens"] <= 1.05
    assert by_case["equal, 8 ranks, dealt by rows"]["tokens"] > 1.4
