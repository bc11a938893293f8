"""Trials of the examples for real models, each in a separate process, per seed and backend."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = ("grpo_gsm8k", "ppo_gsm8k", "dpo_pairs")
BACKENDS = ("local", "ray")
GAIN = 0.15
"""Required gain in held-out accuracy."""
LIMIT_S = 120.0
"""[s] Longest trial, including the warm start."""


@dataclass(frozen=True)
class Trial:
    """One example with `--tiny`, run to its end."""

    example: str
    backend: str
    seed: int
    code: int
    seconds: float
    before: float | None
    """Held-out accuracy before the first step, or None if it was not printed."""
    after: float | None
    said: str
    """The last lines of the program's output."""

    @property
    def learned(self) -> bool:
        """Return whether it exited with 0 and gained at least `GAIN`."""
        if self.code or self.before is None or self.after is None:
            return False
        return self.after - self.before >= GAIN

    @property
    def ok(self) -> bool:
        return self.learned and self.seconds <= LIMIT_S

    @property
    def line(self) -> str:
        """Format the trial as a line of the table.

        >>> Trial("grpo_gsm8k", "local", 3, 0, 41.25, 0.375, 0.875, "").line
        'grpo_gsm8k   local    3     0   0.375   0.875  +0.500     41.2  ok'
        """
        figures = f"{'-':>23}"
        if self.before is not None and self.after is not None:
            figures = f"{self.before:7.3f} {self.after:7.3f}  {self.after - self.before:+.3f}"
        verdict = "ok" if self.ok else "slow" if self.learned else "failed"
        return f"{self.example:12} {self.backend:6} {self.seed:3} {self.code:5} {figures} {self.seconds:8.1f}  {verdict}"


HEAD = "example      backend seed exit  before   after    gain  seconds"


def trial(example: str, backend: str, seed: int) -> Trial:
    """Run an example in a separate process and folder."""
    with tempfile.TemporaryDirectory(prefix="weft-trial-") as root:
        command = [
            sys.executable,
            str(FOLDER / f"{example}.py"),
            "--tiny",
            "--backend",
            backend,
            "--seed",
            str(seed),
        ]
        started = time.monotonic()
        try:
            done = subprocess.run(
                [*command, "--root", root, "--name", "trial"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=1800,
            )
            code, said = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, said = 124, str(error)
        seconds = time.monotonic() - started
    found = next(
        (json.loads(line) for line in reversed(said.splitlines()) if line.startswith('{"accuracy')), {}
    )
    before, after = found.get("accuracy_before"), found.get("accuracy_after")
    return Trial(example, backend, seed, code, seconds, before, after, said[-2000:])


def trials(seeds: Sequence[int], backends: Sequence[str]) -> tuple[int, int]:
    """Return (successful trials, trials) over all examples, seeds and backends; print the table to
    stderr."""
    print(HEAD, file=sys.stderr, flush=True)
    made: list[Trial] = []
    for backend in backends:
        for seed in seeds:
            for example in EXAMPLES:
                made.append(trial(example, backend, seed))
                print(made[-1].line, file=sys.stderr, flush=True)
                if made[-1].code:
                    print(made[-1].said, file=sys.stderr, flush=True)
    return sum(one.ok for one in made), len(made)
