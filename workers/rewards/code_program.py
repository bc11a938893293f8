"""Runs tests on the code of a response, inside a sandbox. `code.py` starts it as `python -I FILE`.

Standard input is a JSON object: a token, the code, and its tests. After each test, a line of standard
output has the token, the number of passed tests and the number of all tests. The code does not know
the token, so neither its output nor its exit code can pass for a verdict. Code that searches this
process for its functions could still fake one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    task = json.load(sys.stdin)
    # The code must not read the task, or print into the verdicts.
    verdicts = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    token = task.pop("token")

    def tell(passed: int, tests: int) -> None:
        verdicts.write(f"\n{token} {passed} {tests}\n")
        verdicts.flush()

    sys.path.insert(0, os.getcwd())
    if task["layout"] == "pytest":
        _run_pytest(task["files"], tell)
    else:
        _run_statements(task, tell)


def _run_statements(task: dict[str, Any], tell: Callable[[int, int], None]) -> None:
    """Run the code, then each test in its namespace. A test passes unless it raises."""
    tests = task["tests"]
    names: dict[str, Any] = {"__name__": "solution"}
    for text, file in ((task["setup"], "setup.py"), (task["code"], "solution.py")):
        exec(compile(text, file, "exec", dont_inherit=True), names)
    passed = 0
    for k, test in enumerate(tests):
        # A test may fail with any exception, SystemExit included.
        with contextlib.suppress(BaseException):
            exec(compile(test, f"test {k}", "exec", dont_inherit=True), names)
            passed += 1
        tell(passed, len(tests))


def _run_pytest(files: list[str], tell: Callable[[int, int], None]) -> None:
    if importlib.util.find_spec("pytest") is None:
        tell(-1, -1)
        return
    import pytest

    class Verdicts:
        """Counts the tests that pass in all phases."""

        def __init__(self) -> None:
            self._failed: set[str] = set()
            self._passed = self._tests = 0

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                pytest.exit("a file cannot be collected", returncode=1)

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self._tests = len(session.items)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.outcome != "passed":
                self._failed.add(report.nodeid)
            if report.when == "teardown":
                self._passed += report.nodeid not in self._failed
                tell(self._passed, self._tests)

    pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir=.", *files], plugins=[Verdicts()])


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of the code may still run
