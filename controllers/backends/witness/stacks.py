"""Where a process stands: on a signal it writes the stacks of all of its threads to its log, also while it hangs in C.

The driver, or the server of segments of another node, sends the signal, and reads what comes. The part that matters is the thread that
carries out the calls; the log has all of them.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .exit_status import HeldProcess

SIGNAL = signal.SIGURG
"""A process that does not know of it ignores it."""
WAIT_S = 2.0
"""Longest wait for the stacks of a process."""
SETTLED_S = 0.1
"""A log that does not grow for so long has all of them."""
POLL_S = 0.02
MAX_BYTES = 1 << 20
"""Most bytes of a log that are read."""
MAX_FRAMES = 12
"""Frames that are shown, the innermost."""
AT_WORK = "executor_thread.py"
"""The file whose frame is in the stack of the thread that carries out calls."""
FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$')
STATES = {
    "T": "it is stopped, by SIGSTOP or from a terminal",
    "t": "a debugger has stopped it",
    "D": "it waits in the kernel for a device or a file system, which does not answer",
    "Z": "it has ended",
    "X": "it has ended",
}


def write_on_request(stream: int = 2) -> None:
    """From here on this process writes its stacks on request.

    Args:
        stream: descriptor of the file that they are written to.
    """
    faulthandler.register(SIGNAL, file=stream, all_threads=True)


@dataclass(frozen=True)
class Asked:
    """Processes of this machine that were asked for their stacks, all at once."""

    logs: Mapping[str, tuple[int, Path]]
    """Worker -> number of its process, and its log."""
    begun: Mapping[str, int]
    """Bytes of each log before."""
    known: Mapping[str, bool]
    """Whether the process was there."""

    def answers(self, wait_s: float = WAIT_S) -> dict[str, str]:
        """Where the processes stand, each in a few lines. Holds no process: others may end and forget them meanwhile.

        Args:
            wait_s: longest wait for all of them.

        Returns:
            Worker -> the innermost frames of the thread that carries out calls, or why there are none.
        """
        deadline, grown, last = time.monotonic() + wait_s, dict(self.begun), time.monotonic()
        while time.monotonic() < deadline:
            now = {who: _size(log) for who, (_, log) in self.logs.items()}
            if now != grown:
                grown, last = now, time.monotonic()
            all_wrote = all(now[who] > self.begun[who] for who, known in self.known.items() if known)
            if all_wrote and time.monotonic() - last > SETTLED_S:
                break
            time.sleep(POLL_S)
        return {
            who: _in_words(_read(log, self.begun[who]), pid, known=self.known[who])
            for who, (pid, log) in self.logs.items()
        }


def ask_stacks(processes: Mapping[str, tuple[HeldProcess, Path]]) -> Asked:
    """Have processes of this machine write their stacks.

    Args:
        processes: worker -> its process, and its log.
    """
    begun = {who: _size(log) for who, (_, log) in processes.items()}
    known = {who: process.send(SIGNAL) for who, (process, _) in processes.items()}
    return Asked({who: (process.pid, log) for who, (process, log) in processes.items()}, begun, known)


def _in_words(text: str, pid: int, *, known: bool) -> str:
    if not known:
        return "its process is gone"
    found = threads_in(text)
    if not found:
        return f"its process does not say where it stands: {STATES.get(_state(pid), 'it answers no signal')}"
    working = [frames for frames in found if any(Path(file).name == AT_WORK for file, *_ in frames)]
    return shown(working[0] if working else found[-1])


def threads_in(text: str) -> list[list[tuple[str, str, str]]]:
    """The stacks in what `faulthandler` wrote: of each thread the frames (file, line, function), the innermost first.

    >>> threads_in('noise\\nThread 0x01 (most recent call first):\\n  File "a.py", line 7 in f\\n  File "b.py", line 9 in g\\n')
    [[('a.py', '7', 'f'), ('b.py', '9', 'g')]]
    """
    found: list[list[tuple[str, str, str]]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            found.append([])
        elif found and (frame := FRAME.match(line)):
            found[-1].append((frame[1], frame[2], frame[3]))
    return [frames for frames in found if frames]


def shown(frames: list[tuple[str, str, str]]) -> str:
    """The frames above those of the executor; that it waits for a call, where there are none."""
    own: list[tuple[str, str, str]] = []
    for frame in frames:
        if Path(frame[0]).name in (AT_WORK, "executor.py") and Path(frame[0]).parent.name == "ranks":
            break
        own.append(frame)
    if not own or (len(own) < len(frames) and frames[len(own)][2] == "_serve"):
        return "it waits for a call, as if it had none"
    more = [f"  ... and {len(own) - MAX_FRAMES} more"] if len(own) > MAX_FRAMES else []
    lines = [f'  File "{file}", line {line}, in {name}' for file, line, name in own[:MAX_FRAMES]]
    return "\n".join(["it stands at (the innermost call first)", *lines, *more])


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _read(log: Path, begin: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(begin)
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (OSError, IndexError):
        return "Z"
