"""Sockets of a default run on Ray, seen from outside: loopback only, and none after the run."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from toy_runs import drive, training

from weft.controllers.recovery.resume import find_checkpoint

SCRIPT = Path(__file__).with_name("listening_run.py")
LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    address: str
    port: int
    command: str


def processes(mark: str) -> list[Path]:
    """Return the processes that inherited this environment variable."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes() and state(entry) != "Z":
                    found.append(entry)
            except OSError:  # it has just ended
                continue
    return found


def state(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def descriptors(process: Path) -> Iterator[str]:
    """Yield the targets of the open descriptors.

    A process that lists its own descriptors finds the descriptor of the listing, closed by the time
    it is read. Skip it, and keep the others.
    """
    with contextlib.suppress(OSError):  # the process has just ended
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(descriptor)


def listeners(owners: list[Path]) -> list[Listener]:
    """Return the listening TCP sockets of these processes, from /proc/net/tcp and tcp6."""
    commands = {}
    for process in owners:
        for target in descriptors(process):
            if target.startswith("socket:["):
                commands[target[8:-1]] = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in commands:
                address, _, port = fields[1].partition(":")
                found.append(Listener(readable(address), int(port, 16), commands[fields[9]]))
    return found


def readable(address: str) -> str:
    """Format an address from /proc, which writes 32-bit words in the machine's byte order."""
    words = b"".join(struct.pack("=I", int(address[k : k + 8], 16)) for k in range(0, len(address), 8))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def shared_memory(owners: list[Path]) -> set[Path]:
    return {
        Path(t)
        for p in owners
        for t in descriptors(p)
        if t.startswith("/dev/shm/") and not t.endswith(" (deleted)")
    }


@contextlib.contextmanager
def piped(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed with the test, whatever happens."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def test_addresses_are_read_as_the_kernel_writes_them():
    assert readable("0100007F") == "127.0.0.1" and readable("00000000") == "0.0.0.0"
    assert readable("00000000000000000000000001000000") == "::1"


def test_a_run_in_one_process_listens_nowhere(tmp_path: Path):
    def own() -> set[tuple[str, int]]:
        return {(x.address, x.port) for x in listeners([Path("/proc/self")])}

    lower = os.open(os.devnull, os.O_RDONLY)
    with socket.create_server(("127.0.0.1", 0)) as seen:
        os.close(
            lower
        )  # the listing of descriptors reuses this number, and closes it before the test reads it
        before = own()
        assert seen.getsockname() in before, "the test sees sockets of this process"
        with drive(training(), tmp_path) as driver:
            driver.run()
            assert own() == before


@pytest.mark.thorough
@pytest.mark.ray
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param("end", 0, marks=pytest.mark.slow),
        pytest.param("interrupt", 130, marks=pytest.mark.slow),
        ("terminate and save", 0),
    ],
)
def test_a_run_listens_on_loopback_alone_and_leaves_nothing_behind(
    tmp_path: Path, ending: str, code: int
):
    """SIGTERM goes to the process group of the run, as batch systems send it."""
    mark = f"WEFT_TEST_RUN={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))
    environment = {**os.environ, name: value, "TMPDIR": str(temporary)}
    saves = ending == "terminate and save"
    command = [sys.executable, str(SCRIPT), "--root", str(tmp_path), *["--checkpoints"] * saves]
    with piped(command, environment) as run:
        assert run.stdin is not None and run.stdout is not None
        assert run.stdout.readline() == "up\n", run.communicate()[1]
        alive = processes(mark)
        open_now = listeners(alive)
        memory = shared_memory(alive)
        if ending == "interrupt":
            run.send_signal(signal.SIGINT)
        else:
            run.stdin.write("go on\n" if saves else "end\n")
            run.stdin.flush()
        if saves:
            os.killpg(run.pid, signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    assert any("raylet" in x.command for x in open_now), "the test sees Ray's sockets"
    assert [x for x in open_now if x.address not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")] == []
    assert run.returncode == code, errors
    assert "Traceback" not in errors
    if saves:
        assert (
            "the run writes a checkpoint and ends" in errors
            and find_checkpoint(tmp_path / "run") is not None
        )
    deadline = time.monotonic() + 30
    while processes(mark) and time.monotonic() < deadline:  # Ray's processes take a moment to exit
        os.sched_yield()
    left = [(p / "cmdline").read_bytes().replace(b"\0", b" ")[:200] for p in processes(mark)]
    assert not left
    assert [f for f in memory if f.exists()] == []
    temporary.rmdir()  # fails unless Ray has removed its folder
    assert sorted(p.name for p in (tmp_path / "run" / "logs").iterdir()) == [
        "actor_0.log",
        "actor_1.log",
        "functions_0.log",
        "recorder_0.log",
        "reward_0.log",
        "rollout_0.log",
    ]
