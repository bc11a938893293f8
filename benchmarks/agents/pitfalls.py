"""Pitfalls: run the tests with the mark `pitfall(n)`, and count the numbers whose tests all pass.

This file is also a plugin of pytest, which prints the outcomes of each number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = ("tests/workers/agents", "tests/algorithms", "tests/controllers/test_episode_rows.py")
"""Places of these tests."""
outcomes: dict[int, dict[str, str]] = {}
"""Maps pitfalls to their tests and how these ended."""


def measure() -> dict[str, Any]:
    """Return `pitfalls`: how many numbers have tests that all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "pitfalls",
        "-m",
        "pitfall",
        *TESTS,
    ]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("pitfalls: ")]
    if not lines:
        raise RuntimeError(f"pytest printed no outcomes:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    found: dict[str, dict[str, str]] = json.loads(lines[0].removeprefix("pitfalls: "))
    for number, tests in sorted(found.items(), key=lambda item: int(item[0])):
        wrong = [f"{test} {outcome}" for test, outcome in tests.items() if outcome != "passed"]
        print(f"  {number}: {len(tests)} tests, {'; '.join(wrong) or 'all pass'}", flush=True)
    return {"pitfalls": sum({*tests.values()} == {"passed"} for tests in found.values())}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for mark in item.iter_markers("pitfall"):
        tests = outcomes.setdefault(mark.args[0], {})
        # Set-up and tear-down make further reports.
        if tests.get(item.nodeid, "passed") == "passed":
            tests[item.nodeid] = report.outcome
    return report


def pytest_sessionfinish() -> None:
    print(f"\npitfalls: {json.dumps(outcomes)}")
