"""Sandboxes contain programs, report limits, and raise if they are not to blame themselves."""

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from attacks import ATTACKS, LIMITS, PATIENCE_S, python

from weft.dataflow.errors import NoSandboxError, SandboxError
from weft.workers import sandbox as module
from weft.workers.sandbox import Limits, ProgramEnding, Sandbox, working_engine


@pytest.fixture(scope="session")
def engine() -> str:
    try:
        return working_engine()
    except NoSandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "attack",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name in ("disk", "time"))) for name in ATTACKS],
)
def test_an_attack_fails(attack: str, engine: str):
    ATTACKS[attack](engine)


def test_a_program_gets_its_input_files_and_variables_and_no_others(engine: str):
    with Sandbox(LIMITS, engine=engine) as sandbox:
        result = sandbox.run(
            ["sh", "-c", "cat; cat data/numbers.txt; echo $MORE >&2; env | sort | head -n 1; exit 3"],
            stdin=b"standard input\n",
            files={"data/numbers.txt": b"1 2\n"},
            environment={"MORE": "another variable"},
        )
    assert result.stdout == b"standard input\n1 2\nHOME=/tmp\n"
    assert (result.stderr, result.ending, result.exit_code) == (
        b"another variable\n",
        ProgramEnding.EXITED,
        3,
    )
    assert not result.succeeded


def test_python_has_the_packages_of_this_process(engine: str):
    with Sandbox(LIMITS, engine=engine) as sandbox:
        result = sandbox.run(["python", "-c", "import pytest; print(pytest.__version__)"])
    assert result.stdout.decode().strip() == pytest.__version__, result


@pytest.mark.parametrize(
    ("program", "limits", "ending"),
    [
        ("import time; time.sleep(600)", {"wall_s": 0.5}, ProgramEnding.TIMED_OUT),
        ("while True: pass", {"cpu_s": 0.2}, ProgramEnding.OUT_OF_CPU_TIME),
        (
            "import time\nx = bytes(range(256)) * (100 << 12)\ntime.sleep(600)",
            {"memory_bytes": 64 << 20},
            ProgramEnding.OUT_OF_MEMORY,
        ),
        (
            "import threading, time\nfor _ in range(9): threading.Thread(target=time.sleep, args=[600]).start()",
            {"processes": 5},
            ProgramEnding.TOO_MANY_PROCESSES,
        ),
        ("while True: print('x' * 1000)", {"output_bytes": 10_000}, ProgramEnding.TOO_MUCH_OUTPUT),
        ("open('big', 'wb').write(bytes(20 << 20))", {"disk_bytes": 4 << 20}, ProgramEnding.DISK_FULL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", {}, ProgramEnding.CRASHED),
    ],
    ids=lambda value: value.name if isinstance(value, ProgramEnding) else "",
)
def test_each_limit_has_its_own_ending(
    program: str, limits: dict[str, Any], ending: ProgramEnding, engine: str
):
    with Sandbox(Limits(**{"wall_s": PATIENCE_S, "cpu_s": 60.0, **limits}), engine=engine) as sandbox:
        result = python(sandbox, program)
        assert result.ending is ending, result
        assert result.exit_code == (-signal.SIGSEGV if ending is ProgramEnding.CRASHED else None)
        if ending is not ProgramEnding.DISK_FULL:
            assert sandbox.run(["echo", "again"], wall_s=PATIENCE_S).stdout == b"again\n"


@pytest.mark.thorough
def test_memory_that_forked_processes_share_counts_once(engine: str):
    program = """
import os, time
shared = bytes(range(256)) * (1 << 18)  # 64 MiB
children = [os.fork() or (time.sleep(1), os._exit(0)) for _ in range(6)]
for child in children:
    os.waitpid(child, 0)
"""
    if engine == "gvisor":
        pytest.skip("gVisor's /proc does not tell shared pages")
    with Sandbox(LIMITS, engine=engine) as sandbox:
        assert python(sandbox, program).succeeded


def test_programs_of_a_sandbox_share_the_scratch_directory(engine: str):
    with Sandbox(LIMITS, engine=engine) as sandbox:
        sandbox.run(["sh", "-c", "echo kept > note; chmod 700 ."])
        assert sandbox.run(["cat", "note"]).stdout == b"kept\n"
    with Sandbox(LIMITS, engine=engine) as sandbox:
        assert sandbox.run(["cat", "note"]).exit_code == 1


def test_output_of_a_background_process_is_not_waited_for(engine: str):
    with Sandbox(LIMITS, engine=engine) as sandbox:
        result = sandbox.run(["sh", "-c", "sleep 600 & echo started"])
    assert (result.stdout, result.ending) == (b"started\n", ProgramEnding.EXITED)


def test_a_program_that_cannot_start_raises_as_subprocess_does(engine: str):
    with Sandbox(LIMITS, engine=engine) as sandbox:
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            sandbox.run(["no-such-program"])
        with pytest.raises(IsADirectoryError):
            sandbox.run(["sh", "-c", "mkdir main.py"])
            sandbox.run(["true"], files={"main.py": b""})
        for name in ("/etc/passwd", "../up", "a/../../b", "."):
            with pytest.raises(ValueError, match="not inside the scratch directory"):
                sandbox.run(["true"], files={name: b""})
        for odd in ([], "ls -l"):
            with pytest.raises(ValueError, match=r"must be a program and its arguments, like \['ls'\]"):
                sandbox.run(odd)
        for seconds in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="must be a positive number of seconds"):
                sandbox.run(["true"], wall_s=seconds)
        with pytest.raises(TypeError):  # before the sandbox gets anything
            sandbox.run(["true"], files={"main.py": "text"})  # pyright: ignore[reportArgumentType]
        assert sandbox.run([Path("/bin/true")]).succeeded  # pyright: ignore[reportArgumentType]


def test_a_machine_without_a_free_descriptor_has_no_sandbox(engine: str):
    """The policy is not to blame."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, before[1]))
    try:
        with pytest.raises(SandboxError, match="Too many open files"):
            Sandbox(LIMITS, engine=engine)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(taken[0])


def test_a_large_input_and_a_large_file_arrive(engine: str):
    with Sandbox(LIMITS, engine=engine) as sandbox:
        command = ["sh", "-c", "wc -c < big; wc -c"]
        result = sandbox.run(command, stdin=bytes(3 << 20), files={"big": bytes(5 << 20)})
        assert [*map(int, result.stdout.split())] == [5 << 20, 3 << 20]
        assert sandbox.run(["true"], stdin=bytes(3 << 20)).succeeded  # it reads nothing


def test_a_sandbox_that_is_killed_raises_and_is_not_a_result(engine: str):
    sandbox = Sandbox(LIMITS, engine=engine)
    launcher = psutil.Process(sandbox._launcher._process.pid)

    def kill_when_it_runs() -> None:
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            running = launcher.children(recursive=True)
            if engine == "gvisor" or any("sleep" in process.name() for process in running):
                break
            time.sleep(0.05)
        for process in (*launcher.children(recursive=True), launcher):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    killer = threading.Thread(target=kill_when_it_runs)
    killer.start()
    try:
        with pytest.raises(SandboxError, match="ended the sandbox"):
            sandbox.run(["sleep", "600"])
        with pytest.raises(SandboxError):
            sandbox.run(["true"])
    finally:
        killer.join()
        sandbox.close()


@pytest.mark.thorough
def test_a_sandbox_ends_with_its_owner(engine: str, tmp_path: Path):
    code = f"""
from weft.workers.sandbox import Sandbox
sandbox = Sandbox(engine={engine!r})
print(sandbox._launcher._process.pid, flush=True)
sandbox.run(["sleep", "600"], wall_s=600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    launcher = psutil.Process(int(owner.stdout.readline()))
    contained = [launcher, *launcher.children(recursive=True)]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(contained, timeout=60)
    assert not alive


def test_the_first_process_refuses_to_run_outside_of_a_sandbox():
    # It kills all processes that it sees, so a missing namespace must stop it before anything else.
    program = Path(module.__file__).with_name("sandbox_program.py")
    refused = subprocess.run(
        [sys.executable, "-I", "-S", program, "/tmp"], stdin=subprocess.DEVNULL, capture_output=True
    )
    assert refused.returncode == 1
    assert b"only as process 1" in refused.stderr


def test_closing_twice_and_running_after_it_are_safe(engine: str):
    sandbox = Sandbox(LIMITS, engine=engine)
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxError):
        sandbox.run(["true"])


def test_without_a_sandbox_the_error_names_both_and_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSandboxError) as caught:
        working_engine.__wrapped__()
    for part in ("no 'runsc' on PATH", "no 'bwrap' on PATH", "gvisor.dev", "apt-get install bubblewrap"):
        assert part in str(caught.value)


def test_an_engine_that_does_not_start_is_named_with_its_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin")
    monkeypatch.setattr(module, "ENGINES", {"bubblewrap": module.ENGINES["bubblewrap"]})
    with pytest.raises(NoSandboxError, match="No permissions to create a new namespace"):
        working_engine.__wrapped__()


def test_a_sandbox_closes_at_once_although_a_forked_process_keeps_its_input_open(engine: str):
    sandbox = Sandbox(LIMITS, engine=engine)
    copy = os.dup(sandbox._launcher._requests.fileno())  # as a forked process has it
    try:
        sandbox.close()
        assert sandbox._launcher._process.returncode == 0  # it was not killed
    finally:
        os.close(copy)
