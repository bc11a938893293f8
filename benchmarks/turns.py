"""How the systems take turns: each is a process that stays, and makes a step only when it is told to.

    harness -> system   {"steps": 3}                one line
    system -> harness   {"step_s": 1.2, ...}        one line a step; between its turns it sleeps in a read

Lines go through the standard streams that the process was started with; whatever else it prints goes to its log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WARM_UP = 2
"""Steps of each system that are not counted."""
ROUND = 2
"""Steps that each system makes in its turn."""

Steps = list[dict[str, Any]]
"""What a system said of its steps."""


class Turns:
    """The side of the system. Make it before importing anything that prints."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.command: dict[str, Any] = {}
        """What the present turn was called with."""
        self._left = 0

    def go_on(self) -> bool:
        """Before each step: wait for the turn, if it is over. False: there are no more."""
        if not self._left:
            line = sys.stdin.readline()
            if not line:
                return False
            self.command = json.loads(line)
            self._left = self.command["steps"]
        self._left -= 1
        return True

    def say(self, **facts: Any) -> None:
        """Once when the system is up, and after each step."""
        print(json.dumps(facts), file=self._out)


class System:
    """The side of the harness: one process, its answers and its log."""

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self.log = log
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "RAY_"))}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
            )
        self.facts = self._hear()
        """What it said when it was up."""

    def run(self, steps: int, **command: Any) -> list[dict[str, Any]]:
        """Let it make steps, while everybody else sleeps; returns what it says of each."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"steps": steps, **command}) + "\n")
        self._process.stdin.flush()
        return [self._hear() for _ in range(steps)]

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"{self._process.args} ended; the end of its log:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End it: first by ending its input, then by force."""
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
    """Start systems, let them make steps by turns, and end them.

    Args:
        starts: by name; the first one makes its steps before the others in each round.
        steps: counted ones, of each.
        told: from the name of another system and the steps that the first one just made, what that one is told of them.

    Returns:
        The counted steps of each system, and what each said when it was up.
    """
    with ExitStack() as running:
        systems: dict[str, System] = {}
        for name, start in starts.items():
            print(f"  starting {name} ...", flush=True)
            systems[name] = start()
            running.callback(systems[name].close)
        first = next(iter(systems))
        measured: dict[str, Steps] = {name: [] for name in systems}
        rounds = [WARM_UP, *rounds_of(steps)]
        for number, size in enumerate(rounds):
            made = {first: systems[first].run(size)}
            for name, system in systems.items():
                if name != first:
                    made[name] = system.run(size, **told(name, made[first]))
            if number:
                for name, more in made.items():
                    measured[name] += more
            what = f"round {number} of {len(rounds) - 1}" if number else "warm-up"
            print(f"  {what}: {'  '.join(map(_seconds_of, made, made.values()))}", flush=True)
        return measured, {name: system.facts for name, system in systems.items()}


def command(script: str, *arguments: object, python: Path | str = sys.executable) -> list[str]:
    """That runs a script of this folder."""
    return [str(python), str(HERE / script), *map(str, arguments)]


def rounds_of(steps: int) -> list[int]:
    """
    >>> rounds_of(5)
    [2, 2, 1]
    """
    return [min(ROUND, steps - start) for start in range(0, steps, ROUND)]


def _seconds_of(name: str, steps: Steps) -> str:
    return f"{name} {', '.join(format(step['step_s'], '.2f') for step in steps)}"
