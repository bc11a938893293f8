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
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
