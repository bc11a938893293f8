"""The processes that run harnesses. Runs as a script, by any Python ≥ 3.11, without Weft.

    gateway ── guard ── fork server ─┬─ episode ── processes that the harness starts
                                     └─ episode

- The **guard** runs no code of the user. When the gateway or the fork server ends, it kills every
  process below it.
- The **fork server** imports the harness once, and forks a process for each episode. It keeps the
  end of an episode's output for error messages and the log. When the guard ends, it kills every
  process below it.
- An **episode** runs the harness on its main thread. A busy loop, a crash or `os._exit` ends this
  episode only. The fork server kills the processes that an episode leaves behind: as "subreapers",
  both get the orphans below them.

Messages are lines of JSON on a socket:

    gateway -> fork server   {"function": "module:name", ...}       what to load
                             {"start": 1, "key": ..., "row": {...}, "base_url": ...}   {"kill": 1}
    fork server -> gateway   {"ready": true} or {"failure": ..., "text": ...}
                             {"end": 1, "status": "exit code 0", "result": "{...}", "output": "..."}
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

OUTPUT_BYTES = 16 << 10
"""[bytes] The end of an episode's output that the log and error messages keep."""
RESULT_BYTES = 16 << 20
"""[bytes] Maximum size of an episode's result."""
LOG_BYTES = 16 << 20
"""[bytes] Maximum size of a log file. A full one replaces `NAME.1`."""
KILL_S = 10.0
"""[s] Time limit for the guard or the fork server to end all processes below it."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


# Processes


def die_with(parent: int, number: int) -> None:
    """Get a signal when the parent ends. End now if it has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all processes below whose own parents end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # A program's name may contain spaces and brackets; the parent follows it.
            parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
            found.setdefault(int(parent), []).append(int(name))
    return found


def kill_children(keep: Iterable[int] = ()) -> None:
    """Kill all processes below this one, except for children in `keep` and their own."""
    tree = children_by_parent()
    found = [pid for pid in tree.get(os.getpid(), []) if pid not in keep]
    for pid in found:  # grows
        found += tree.get(pid, [])
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end_children() -> None:
    """Kill all processes below this one, and those that they start meanwhile, until none is left."""
    until = time.monotonic() + KILL_S
    while time.monotonic() < until:
        kill_children()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # no process is left
            break
        time.sleep(0.005)


class Signals:
    """Makes signals readable as bytes from `fd`. No code is interrupted."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self.fd, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in self.numbers:
            signal.signal(number, signal.SIG_DFL)
        os.close(self.fd)
        os.close(self._write)


class CappedLog:
    """Appends to a file of limited size."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError), self.path.open("ab") as file:  # a full disk loses the log
            file.write(data)
            if file.tell() > LOG_BYTES:
                os.replace(self.path, f"{self.path}.1")


def main() -> NoReturn:
    """Be the guard: `harness_process.py PARENT CONTROL LOG SCRATCH`."""
    parent, control, log, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    # In this order: a parent that ends from now on sends a signal that is seen.
    signals = Signals(signal.SIGTERM, signal.SIGCHLD)
    die_with(parent, signal.SIGTERM)
    adopt_orphans()
    output, theirs = os.pipe()
    guard, server = os.getpid(), os.fork()
    if server == 0:
        signals.close()
        die_with(guard, signal.SIGKILL)
        for fd in (1, 2):
            os.dup2(theirs, fd)
        os.close(output)
        os.close(theirs)
        ForkServer(socket.socket(fileno=control), CappedLog(Path(log)), Path(scratch)).run(guard)
    os.close(control)
    os.close(theirs)
    status = _guarded(server, output, signals.fd, CappedLog(Path(log)))
    end_children()
    os._exit(128 - status if status < 0 else status)  # as a shell reports signals


def _guarded(server: int, output: int, signals: int, log: CappedLog) -> int:
    """Log the fork server's own output until it ends, or until this process shall end."""
    with selectors.PollSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        selector.register(signals, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if output in ready:
                data = os.read(output, 1 << 16)
                log.write(data)
                if not data:
                    selector.unregister(output)
            if signals not in ready:
                continue
            told = os.read(signals, 512)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == server:
                        return os.waitstatus_to_exitcode(ended[1])
            if signal.SIGTERM in told:
                return 0


# The fork server


class EpisodeProcess:
    """An episode, as the fork server sees it."""

    def __init__(self, number: int, pid: int, output: int, result: int, folder: Path) -> None:
        self.number = number
        self.pid = pid
        self.pipes = {output: bytearray(), result: bytearray()}
        self.output, self.result = self.pipes.values()
        self.folder = folder

    def read(self, fd: int) -> bool:
        """Read what a pipe has. Return False at its end."""
        data = os.read(fd, 1 << 16)
        self.pipes[fd] += data
        del self.output[:-OUTPUT_BYTES]
        return bool(data)

    def kill(self) -> None:
        self.kill_group()
        os.kill(self.pid, signal.SIGKILL)  # it may not have made its group yet

    def kill_group(self) -> None:
        """Kill the processes that did not leave the episode's group, even while they fork."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class ForkServer:
    """Loads a harness, and forks a process for each episode."""

    def __init__(self, control: socket.socket, log: CappedLog, scratch: Path) -> None:
        self.control = control
        self.log = log
        self.scratch = scratch
        self.received = b""
        self.guard: int
        self.run_harness: Callable[..., Any]
        self.episodes: dict[int, EpisodeProcess] = {}

    def run(self, guard: int) -> NoReturn:
        self.guard = guard
        adopt_orphans()  # from here on, this process may start others
        try:
            self.run_harness = load(json.loads(self._first_line()))
        except BaseException as error:
            self._send({**failure_of(error), "output": trace_of(error)})
            os._exit(1)
        self._send({"ready": True})
        gc.collect()
        gc.freeze()  # pages that the collector does not touch stay shared
        # Processes that the user's modules started belong to all episodes.
        self.kept = set(children_by_parent().get(os.getpid(), []))
        self.signals = Signals(signal.SIGCHLD, signal.SIGTERM)
        die_with(guard, signal.SIGTERM)  # instead of SIGKILL: nothing else could end the orphans
        self.selector = selectors.PollSelector()  # has no descriptor that a fork could change
        self.selector.register(self.control, selectors.EVENT_READ, self._obey)
        self.selector.register(self.signals.fd, selectors.EVENT_READ, self._reap)
        while True:
            for key, _ in self.selector.select():
                key.data()

    # Messages

    def _first_line(self) -> bytes:
        while b"\n" not in self.received:
            self._receive()
        line, _, self.received = self.received.partition(b"\n")
        return line

    def _receive(self) -> None:
        data = self.control.recv(1 << 20)
        if not data:
            self._leave()
        self.received += data

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._leave()

    def _leave(self) -> NoReturn:
        """End, because the gateway has ended. The guard ends all processes below, if it has not ended."""
        if os.getppid() != self.guard:
            end_children()
        os._exit(0)

    def _obey(self) -> None:
        self._receive()
        *lines, self.received = self.received.split(b"\n")
        for order in map(json.loads, lines):
            if "start" in order:
                self._start(order)
            for episode in [e for e in self.episodes.values() if e.number == order.get("kill")]:
                episode.kill()

    # Episodes

    def _start(self, order: Mapping[str, Any]) -> None:
        folder = self.scratch / str(order["start"])
        (output, their_output), (result, their_result) = os.pipe(), os.pipe()
        server = os.getpid()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about locks of other threads
                pid = os.fork()
        except OSError as error:
            for fd in (output, their_output, result, their_result):
                os.close(fd)
            self._send(
                {"end": order["start"], "status": f"fork failed: {error}", "result": "", "output": ""}
            )
            return
        if pid == 0:
            try:
                self.signals.close()
                self.control.close()
                for fd in (output, result, *(fd for e in self.episodes.values() for fd in e.pipes)):
                    os.close(fd)
                for fd in (1, 2):
                    os.dup2(their_output, fd)
                os.close(their_output)
                os.setsid()
                adopt_orphans()
                die_with(server, signal.SIGKILL)
                be_episode(self.run_harness, order, folder, their_result)
            finally:
                os._exit(1)
        os.close(their_output)
        os.close(their_result)
        self.episodes[pid] = episode = EpisodeProcess(order["start"], pid, output, result, folder)
        for fd in episode.pipes:
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ, functools.partial(self._read, episode, fd))

    def _read(self, episode: EpisodeProcess, fd: int) -> None:
        # The process may have been reaped by an event of the same round.
        if episode.pid not in self.episodes:
            return
        if not episode.read(fd):
            self.selector.unregister(fd)
        if len(episode.result) > RESULT_BYTES:
            episode.kill()

    def _reap(self) -> None:
        if signal.SIGTERM in os.read(self.signals.fd, 1 << 12):  # the guard has ended
            end_children()
            os._exit(128 + signal.SIGTERM)
        ended: list[tuple[EpisodeProcess, int]] = []
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self.kept.discard(found[0])
                episode = self.episodes.pop(found[0], None)
                if episode is not None:
                    episode.kill_group()
                    ended.append((episode, os.waitstatus_to_exitcode(found[1])))
        # Any other child is an orphan of an episode that has ended.
        kill_children(keep={*self.kept, *self.episodes})
        for episode, code in ended:
            self._finish(episode, code)

    def _finish(self, episode: EpisodeProcess, code: int) -> None:
        status = f"signal {-code}" if code < 0 else f"exit code {code}"
        for fd in episode.pipes:
            with contextlib.suppress(OSError):  # until nothing is left
                while episode.read(fd):
                    pass
            with contextlib.suppress(KeyError):
                self.selector.unregister(fd)
            os.close(fd)
        if len(episode.result) > RESULT_BYTES:
            status += f", with a result of more than {RESULT_BYTES} bytes"
        output = episode.output.decode(errors="replace")
        if output:
            self.log.write(f"--- episode {episode.pid}: {status}\n{output.rstrip()}\n".encode())
        # A process that is killed may have written a part of its result.
        result = episode.result.decode() if episode.result.endswith(b"\n") else ""
        self._send({"end": episode.number, "status": status, "result": result, "output": output})
        self._remove(episode.folder)

    def _remove(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            folder.rmdir()
        if folder.exists():  # a full one may take long, so a process removes it
            pid = os.fork()
            if pid == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(0)
            self.kept.add(pid)


# An episode


def be_episode(
    run_harness: Callable[..., Any], order: Mapping[str, Any], folder: Path, result: int
) -> NoReturn:
    """Run the harness, write the result as a line of JSON to the descriptor, and end."""
    pid = os.getpid()
    try:
        folder.mkdir(mode=0o700)
        # If memory is short, the kernel kills an episode before the trainer.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")
        base_url, key = order["base_url"], order["key"]
        for name in ("WEFT", "OPENAI"):
            os.environ[f"{name}_BASE_URL"], os.environ[f"{name}_API_KEY"] = base_url, key
        # Anthropic's clients add /v1 themselves.
        os.environ |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        os.environ["HOME"] = os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        _draw_other_random_numbers()
        value = run_harness(order["row"], base_url=base_url, api_key=key)
        if inspect.isawaitable(value):
            value = asyncio.new_event_loop().run_until_complete(_waited(value))
        try:
            said = json.dumps({"value": value}, default=_plain)
        except (TypeError, ValueError) as error:
            text = f"JSON cannot hold the result: {error}"
            said = json.dumps({"failure": "InvalidResult", "text": text})
    except BaseException as error:
        said = json.dumps(failure_of(error))
    if os.getpid() != pid:  # a fork that the harness made, and that ran out of it
        os._exit(1)
    with contextlib.suppress(OSError):
        data = memoryview(said.encode() + b"\n")
        while data:
            data = data[os.write(result, data) :]
    # A thread or an exit handler of the harness could hold up a normal exit.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(0)


def failure_of(error: BaseException) -> dict[str, str]:
    """Return the JSON form of a failure. Prints the traceback of an unexpected exception."""
    if name := getattr(error, "failure", ""):
        return {"failure": str(name), "text": str(error)}
    with contextlib.suppress(Exception):
        print(trace_of(error), file=sys.stderr)
    return {"failure": "HarnessRaised", "text": traceback.format_exception_only(error)[-1].strip()}


def trace_of(error: BaseException) -> str:
    """Return the traceback, without the frames of this file and of asyncio that call the harness."""
    trace = error.__traceback__
    callers = (__file__, os.path.dirname(asyncio.__file__))
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(callers):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _plain(value: Any) -> Any:
    """Convert arrays, tensors and their scalars for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it has {value!r}")


def _draw_other_random_numbers() -> None:
    """Reseed random generators, which a fork copies. Python reseeds its own."""
    seed = int.from_bytes(os.urandom(4))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


# Harnesses


def load(program: Mapping[str, Any]) -> Callable[..., Any]:
    """Load a function `run(row, *, base_url, api_key)`: a pickle, "module:name" or "file.py:name". With
    arguments, the named function makes this function."""
    os.chdir(program["folder"])
    if "pickle" in program:
        return pickle.loads(base64.b64decode(program["pickle"]))
    place, _, name = program["function"].rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("weft_harness", place)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function: Any = functools.reduce(getattr, name.split("."), module)
    return function(**program["arguments"]) if "arguments" in program else function


async def _waited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main()
