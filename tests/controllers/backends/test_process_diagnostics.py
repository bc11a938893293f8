"""Exit reasons and stacks of processes that are not children, read from outside."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft.controllers.backends import process_diagnostics as module
from weft.controllers.backends.process_diagnostics import SIGNAL, ProcessWatch, shown, threads_in
from weft.dataflow.byte_units import gib

KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@contextmanager
def process(*arguments: str, log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with (
        (log or Path(os.devnull)).open("wb") as errors,
        subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=errors) as started,
    ):
        try:
            yield started
        finally:
            started.kill()


def python(does: str) -> tuple[str, ...]:
    """Return the command of a program that waits for a line, then runs `does`."""
    return sys.executable, "-S", "-c", f"import os, sys\nsys.stdin.readline()\n{does}"


def let_go(started: subprocess.Popen[bytes]) -> None:
    assert started.stdin is not None
    started.stdin.write(b"\n")
    started.stdin.flush()


DEATHS = {
    "os._exit(3)": "exit code 3",
    "os.kill(os.getpid(), 9)": "signal SIGKILL; the kernel reports no out-of-memory kill",
    "os.kill(os.getpid(), 11)": "signal SIGSEGV",
    "raise ValueError('no such token')": "exit code 1",
}


@pytest.mark.parametrize("does", DEATHS)
@pytest.mark.parametrize("reaped", [False, True])
def test_a_dead_process_is_reported_with_its_exit_reason(does: str, reaped: bool, tmp_path: Path):
    if reaped and KERNEL < (6, 15):
        pytest.skip("this kernel keeps the exit status for the parent alone")
    watch = ProcessWatch(tmp_path)
    with process(*python(does)) as started:
        watch.watch({"rollout[0]": started.pid})
        let_go(started)
        if reaped:
            started.wait()
        assert watch.ending("rollout[0]", 20.0).startswith(DEATHS[does])
    assert watch.ending("rollout[0]") == "", "it is told once"


def test_memory_that_ran_out_is_named_with_how_it_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel's counts are fake; the process is real."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    events = tmp_path / "sys/fs/cgroup/job/memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("oom_kill 2\n")
    monkeypatch.setattr(module, "SAMPLE_S", 0.0)
    watch = ProcessWatch(tmp_path, root=tmp_path)
    grows = "held = b'x' * (64 << 20)\nprint('grown', flush=True)\nsys.stdin.readline()"
    with process(*python(grows)) as started:
        watch.watch({"actor[1]": started.pid})
        watch.take_readings()
        let_go(started)
        assert started.stdout is not None and started.stdout.readline() == b"grown\n"
        watch.take_readings()
        (memory,) = watch.memory().processes.values()
        events.write_text("oom_kill 3\n")
        started.kill()
        said = watch.ending("actor[1]", 20.0)
    assert said.startswith(
        f"signal SIGKILL; out of memory: the kernel has killed a process on this machine since the last check ({events}"
    )
    assert "smaller microbatches" in said and said.endswith(f", {gib(memory.resident_bytes)}")
    assert memory.resident_bytes > 64 << 20


def test_a_process_that_exits_by_itself_is_not_reported_as_out_of_memory(tmp_path: Path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 2\n")
    watch = ProcessWatch(tmp_path, root=tmp_path)
    with process(*python("os._exit(3)")) as started:
        watch.watch({"actor[1]": started.pid})
        (tmp_path / "proc/vmstat").write_text("oom_kill 3\n")
        let_go(started)
        assert watch.ending("actor[1]", 20.0) == "exit code 3"


def test_a_process_that_lives_has_no_exit_code(tmp_path: Path):
    watch = ProcessWatch(tmp_path)
    watch.watch({"actor[1]": os.getpid()})
    assert watch.ending("actor[1]", 0.0) == ""


WAITING = f"""
import faulthandler, signal, sys, threading, time
faulthandler.register(signal.Signals({int(SIGNAL)}), file=2, all_threads=True)
def wait_for_the_others():
    time.sleep(600)
exec(compile("def take_turn():\\n    wait_for_the_others()\\n", "/x/ranks/executor.py", "exec"))
threading.Thread(target=take_turn, daemon=True).start()
print("up", flush=True)
sys.stdin.readline()
"""


def test_the_stack_of_a_process_is_read_from_its_log(tmp_path: Path):
    log = tmp_path / "actor_0.log"
    watch = ProcessWatch(tmp_path)
    with process(sys.executable, "-c", WAITING, log=log) as started:
        assert started.stdout is not None and started.stdout.readline() == b"up\n"
        watch.watch({"actor[0]": started.pid})
        said = watch.stacks(["actor[0]", "actor[1]"])
    assert list(said) == ["actor[0]"]
    assert said["actor[0]"].splitlines()[0] == "stack (innermost call first)"
    assert "in wait_for_the_others" in said["actor[0]"] and "take_turn" not in said["actor[0]"]
    assert log.read_text().count("hread 0x") == 2, "the log has all of them"


def test_a_missing_stack_is_explained(tmp_path: Path):
    watch = ProcessWatch(tmp_path)
    with process(*python("")) as started:
        watch.watch({"actor[0]": started.pid})
        assert watch.stacks(["actor[0]"], 0.2)["actor[0]"].endswith("it does not respond to signals")
        started.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while (
            "stopped" not in (said := watch.stacks(["actor[0]"], 0.2)["actor[0]"])
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        assert (
            said == "its process does not report its stack: it is stopped, by SIGSTOP or from a terminal"
        )
        started.kill()
        started.wait()
        assert watch.stacks(["actor[0]"], 0.2) == {"actor[0]": "its process is gone"}


def test_a_waiting_worker_is_shown_as_waiting():
    text = """Thread 0x01 (most recent call first):
  File "/weft/controllers/ranks/executor.py", line 9 in _serve
  File "/weft/controllers/ranks/executor.py", line 8 in _work
"""
    assert shown(threads_in(text)[0]) == "it is idle: it waits for a call"
    deep = [("a.py", str(k), "f") for k in range(20)]
    assert shown([*deep, ("/weft/ranks/executor.py", "1", "run")]).endswith(
        "line 11, in f\n  ... and 8 more"
    )


def test_a_log_that_cannot_be_read_hides_no_error(tmp_path: Path):
    watch = ProcessWatch(tmp_path)
    who = "x" * 300  # longer than the name of a file may be
    with process(*python("pass")) as started:
        watch.watch({who: started.pid})
        assert "does not report its stack" in watch.stacks([who], 0.1)[who]  # waited out
