"""The table of metrics lists exactly the names that the library writes."""

import ast
from functools import cache
from pathlib import Path

import pytest
from metrics_page import page

from weft.dataflow.errors import UserError
from weft.dataflow.metric_names import (
    entries,
    entry_named,
    entry_of,
    is_of_group,
    undeclared,
    written_name,
)

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("algorithms", "workers", "controllers", "dataflow/prompts")
MAKERS = {"Mean", "Max", "Sum", "Std"}
OF_FUNCTIONS = {"observed", "_observed"}
"""Functions that make metrics from a mapping's items, or from keywords."""
KEPT_IN = {"watched", "largest", "counted", "row", "metrics", "counts"}
"""Names of mappings in the library that become metrics."""
NO_METRICS = {"chosen", "rejected", "over"}
"""Keywords of these functions that are not metrics."""


def names_in(file: Path) -> set[str]:
    """Return the metrics that a module writes: names of `Mean` values, and keys of metric
    mappings."""
    found: set[str] = set()
    tree = ast.parse(file.read_text())
    of_metrics = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef)
        and any(w in ast.unparse(n.returns or n) for w in ("Metric", "float]", "OptimizerStep"))
    ]
    for function in of_metrics:
        for node in ast.walk(function):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    made = (
                        isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[0] in MAKERS
                    )
                    if isinstance(key, ast.Constant) and (made or _is_kept(node, function)):
                        found.add(str(key.value))
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                target = ast.unparse(node.value)
                if target in KEPT_IN and isinstance(node.slice, ast.Constant):
                    found.add(str(node.slice.value))
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in OF_FUNCTIONS:
                found |= {
                    k.arg
                    for k in node.keywords
                    if k.arg and k.arg not in {*NO_METRICS, "largest", "counts"}
                }
    return found


def _is_kept(made: ast.Dict, function: ast.FunctionDef) -> bool:
    """Return whether a mapping is assigned to one of the names in KEPT_IN."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(t) in KEPT_IN for t in targets) and made in ast.walk(node.value):
                return True
    return False


@cache
def written() -> dict[str, str]:
    """Return metric -> a module that writes it."""
    files = [file for floor in FLOORS for file in sorted((ROOT / floor).rglob("*.py"))]
    return {name: str(file.relative_to(ROOT)) for file in files for name in names_in(file)}


def test_every_metric_that_the_library_writes_is_in_the_table():
    missing = {name: where for name, where in written().items() if entry_named(name) is None}
    assert not missing, f"dataflow/metric_names.py has no entry for these: {missing}"
    assert {
        "entropy",
        "loss",
        "grad_norm",
        "mean",
        "chosen_nll",
        "masked_rows",
        "kl_coefficient",
        "bad_steps",
    } <= {*written()}


def test_every_entry_of_the_table_is_written_somewhere():
    source = "\n".join(file.read_text() for floor in FLOORS for file in (ROOT / floor).rglob("*.py"))
    measured = [
        entry.name.removesuffix("_low").removesuffix("_high") for entry in entries()
    ]  # followed by the ends of intervals
    plain = [name for name in measured if not any(c.isupper() for c in name)]
    unused = [
        name
        for name in plain
        if f'"{name}"' not in source and f"/{name}" not in source and f" {name}=" not in source
    ]
    assert not unused, f"nothing writes these metrics: {unused}"


def test_names_are_unique_with_a_description_and_a_unit():
    names = [entry.name for entry in entries()]
    assert len(names) == len(set(names))
    assert all(entry.unit and entry.meaning for entry in entries())


def test_the_page_is_that_of_the_table():
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), (
        "run: python docs/generate/metrics_page.py > docs/metrics.md"
    )


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("step", "step"),
        ("actor/entropy", "entropy"),
        ("stale/requeue", "stale/FATE"),
        ("eval/reward/mean", "mean"),
        ("reward/baseline_reward_mean", "COLUMN_mean"),
        ("pairs/preference_accuracy", "preference_accuracy"),
        ("actor/mean_logprob_gap", "mean_logprob_gap"),
    ],
)
def test_a_name_that_a_run_writes_finds_its_entry(name: str, entry: str):
    assert entry_of(name).name == entry and undeclared([name]) == []


def test_a_name_that_is_not_in_the_table_is_answered_with_the_nearest():
    with pytest.raises(
        UserError, match="no metric is called 'rollout/truncation'; did you mean 'truncation_rate'"
    ):
        entry_of("rollout/truncation")
    assert undeclared(["actor/loss", "reward/form", "functions/my_count"]) == [
        "reward/form",
        "functions/my_count",
    ]


def test_a_number_of_a_users_function_is_written_behind_the_name_of_the_group():
    assert written_name("functions", "tied_groups") == "tied_groups"
    assert written_name("functions", "step_seconds") == "functions/step_seconds"
    assert written_name("functions", "loss") == "functions/loss", "a loss is of a group that is trained"
    assert written_name("actor", "tied_groups") == "actor/tied_groups"


def test_a_metric_of_an_evaluation_is_not_taken_for_one_of_training():
    assert is_of_group("groups_without_signal", "groups_without_signal")
    assert not is_of_group("eval/groups_without_signal", "groups_without_signal")
    assert is_of_group("actor/loss", "loss") and not is_of_group("eval/actor/loss", "loss")
