"""Systems that take turns: each is a long-lived process that makes a step only on request.

    harness -> system   {"steps": 3}                one line
    system -> harness   {"step_s": 1.2, ...}        one line per step; between turns the system blocks in a read

Lines use the standard streams that the process started with; all other output goes to a log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

WARM_UP = 2
"""Uncounted first steps of each system."""
ROUND = 2
"""Steps per turn."""

Steps = list[dict[str, Any]]
"""Reports of a system on its steps."""


class Turns:
    """The system's side. Create it before importing anything that prints."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.command: dict[str, Any] = {}
        self._left = 0

    def go_on(self) -> bool:
        """Wait for the next turn if this one is over; call it before each step. Return False to
        stop."""
        if not self._left:
            line = sys.stdin.readline()
            if not line:
                return False
            self.command = json.loads(line)
            self._left = self.command["steps"]
        self._left -= 1
        return True

    def say(self, **facts: Any) -> None:
        """Report once when the system is up, and after each step."""
        print(json.dumps(facts), file=self._out)


class CountedSteps(Turns):
    """The side of a system that runs alone: it makes a number of steps, and keeps its reports."""

    def __init__(self, steps: int) -> None:
        self.said: Steps = []
        self._left = steps

    def go_on(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def say(self, **facts: Any) -> None:
        self.said.append(facts)


class System:
    """The harness's side: one process with its reports and its log.

    Args:
        script: program of the system; it can import the modules of this folder.
        arguments: arguments of the script.
        log: file for all other output of the process.
        python: interpreter; the peers have a different one.
    """

    def __init__(
        self, script: Path, *arguments: object, log: Path, python: Path | str = sys.executable
    ) -> None:
        self.log = log
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "RAY_"))}
        path = [str(Path(__file__).resolve().parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [str(python), str(script), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
            )
        self.facts = self._hear()
        """The system's first report, from when it was up."""

    def run(self, steps: int, **command: Any) -> Steps:
        """Let the system make steps while all others sleep; return its reports."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"steps": steps, **command}) + "\n")
        self._process.stdin.flush()
        return [self._hear() for _ in range(steps)]

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(
                f"{self._process.args} ended; the end of its log:\n{self.log.read_text()[-3000:]}"
            )
        return json.loads(line)

    def close(self) -> None:
        """End the process, first by closing its input, then by force."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process.stdout.close()


def take_turns(
    starts: Mapping[str, Callable[[], System]],
    steps: int,
    told: Callable[[str, Steps], dict[str, Any]] = lambda name, made: {},
) -> tuple[dict[str, Steps], dict[str, dict[str, Any]]]:
    """Start systems, let them make steps in turns, and end them.

    Args:
        starts: start functions by name. In each round, the first system goes first.
        steps: counted steps per system.
        told: function of (other system, latest steps of the first one) that returns extra command
            arguments.

    Returns:
        The counted steps of each system, and its report when it was up.
    """
    with ExitStack() as running:
        systems: dict[str, System] = {}
        for name, start in starts.items():
            print(f"  starting {name} ...", flush=True)
            systems[name] = start()
            running.callback(systems[name].close)
        first = next(iter(systems))
        measured: dict[str, Steps] = {name: [] for name in systems}
        rounds = [WARM_UP, *(min(ROUND, steps - made) for made in range(0, steps, ROUND))]
        for number, size in enumerate(rounds):
            made = {first: systems[first].run(size)}
            for name, system in systems.items():
                if name != first:
                    made[name] = system.run(size, **told(name, made[first]))
            if number:
                for name, more in made.items():
                    measured[name] += more
            what = f"round {number} of {len(rounds) - 1}" if number else "warm-up"
            seconds = {
                name: ", ".join(f"{step['step_s']:.2f}" for step in more) for name, more in made.items()
            }
            print(
                f"  {what}: {'  '.join(f'{name} {each}' for name, each in seconds.items())}", flush=True
            )
        return measured, {name: system.facts for name, system in systems.items()}


def ratio(above: float | None, below: float | None) -> float | None:
    """Return the rounded ratio, or None if either value is missing."""
    return None if above is None or below is None else round(above / below, 4)


def seconds_of(steps: Sequence[Mapping[str, Any]], key: str = "step_s") -> float | None:
    """Return the median over a system's steps, or None without steps."""
    return median(step[key] for step in steps) if steps else None
