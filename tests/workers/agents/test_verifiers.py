"""Task sets of the real verifiers package, in its own environment.

    python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers uv

WEFT_VERIFIERS may name another interpreter.
"""

import os
from pathlib import Path

import pytest
from agents.rig import Rig

from weft.dataflow.errors import UserError
from weft.workers.agents.failures import ModelUnreachable, NoVerdict
from weft.workers.agents.harness import Verifiers

ROOT = Path(__file__).resolve().parents[3]
PYTHON = Path(os.environ.get("WEFT_VERIFIERS", ROOT / ".venv-verifiers" / "bin" / "python"))
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="verifiers is not installed in .venv-verifiers"),
]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Verifiers:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return Verifiers(env={"taskset": {"id": "echo_tasks"}, "agent": AGENT}, python=PYTHON)


def test_a_task_set_runs_unmodified_and_its_rewards_arrive(harness: Verifiers, tmp_path: Path):
    rows = harness.rows(10)
    assert [row["prompt"] for row in rows] == ["Say Hello.", "Say Goodbye.", "Say Nothing."]
    rig = Rig(harness, tmp_path)
    hello, goodbye, nothing = rig.run(*rows)
    rig.close()
    assert hello == {"reward": 1.0} and goodbye == {"reward": 0.0}
    assert isinstance(nothing, NoVerdict) and "no grader today" in str(nothing)
    assert {request["messages"][0]["content"] for request in rig.requests} == {
        row["prompt"] for row in rows
    }


def test_a_dead_engine_is_no_fault_of_the_policy(harness: Verifiers, tmp_path: Path):
    refused = (400, {"error": {"message": "the engine is gone", "type": "server_error"}})
    rig = Rig(harness, tmp_path, lambda _: refused)
    [failure] = rig.run(harness.rows(1)[0])
    rig.close()
    assert isinstance(failure, ModelUnreachable) and not failure.scored


def test_a_task_set_that_is_not_installed_is_refused():
    harness = Verifiers(env={"taskset": {"id": "no-such-tasks"}, "agent": AGENT}, python=PYTHON)
    with pytest.raises(UserError, match=r"task set no-such-tasks cannot be loaded(?s:.*)no_such_tasks"):
        harness.rows(1)
