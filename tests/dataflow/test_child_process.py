"""Child processes: replies, deadlines, and ends."""

import os
import signal
from pathlib import Path

import pytest

from weft.dataflow.child_process import ChildProcess

PROGRAM = """
import json, os, sys, time
print("a message of a library", flush=True)
print(json.dumps({"ready": True, "arguments": sys.argv[1:], "variable": os.environ.get("WEFT_TEST")}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked == "hang":
        time.sleep(600)
    if asked == "leave":
        sys.exit(3)
    print(json.dumps(asked), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def test_requests_are_answered_in_turn_and_other_output_is_skipped(program: Path):
    child = ChildProcess(program, "--flag", environment={"WEFT_TEST": "1"})
    assert child.receive(60) == {"ready": True, "arguments": ["--flag"], "variable": "1"}
    assert [child.ask(value, 60) for value in (1, "two", {"three": None})] == [1, "two", {"three": None}]
    child.close_input()
    assert child.wait(60) and child.status == "exit code 0"
    child.kill()


def test_a_process_that_is_late_is_killed_and_one_that_ended_says_how(program: Path):
    late, ended = ChildProcess(program), ChildProcess(program)
    late.receive(60)
    ended.receive(60)
    with pytest.raises(TimeoutError, match=r"no reply within 0\.1 s"):
        late.ask("hang", 0.1)  # waited out
    assert late.kill() == f"signal {signal.SIGKILL}"
    with pytest.raises(EOFError):
        ended.ask("leave", 60)
    assert ended.wait(60) and ended.kill() == "exit code 3"
    with pytest.raises(EOFError):
        ended.send(1)


def test_a_log_gets_the_output_and_a_detached_process_has_its_own_session(program: Path, tmp_path: Path):
    child = ChildProcess(program, log=tmp_path / "log", detached=True)
    assert os.getsid(child.pid) == child.pid
    child.close_input()
    assert child.wait(60)
    child.kill()
    assert "a message of a library" in (tmp_path / "log").read_text()
