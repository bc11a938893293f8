"""Time of an episode in environments, on a fake clock: one generator and one simulator. Both
take 2 s for a step of all environments.

With one part, each waits for the other: 80 steps take 320 s. With two parts they work at the same time:
160 s, and 1 s more for the last half step.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.workers.environment import Episode, play

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
STEPS, ENVIRONMENTS = 80, 16
GENERATOR_S, SIMULATOR_S = 2.0, 2.0


class _Endless:
    """Environments whose episodes do not end."""

    def __init__(self, width: int) -> None:
        self.width = width

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[list[str], Mapping[str, Any]]:
        return ["start"] * self.width, {}

    def step(self, actions: Sequence[str]) -> tuple[Any, ...]:
        no = [False] * self.width
        return ["on"] * self.width, [0.0] * self.width, no, no, {}


async def steps_of(parts: int) -> None:
    """Play one episode in each environment."""
    generator, simulator = asyncio.Lock(), asyncio.Lock()
    width = ENVIRONMENTS // parts

    async def generate(episodes: Sequence[Episode]) -> Sequence[str | None]:
        async with generator:
            await asyncio.sleep(GENERATOR_S * len(episodes) / ENVIRONMENTS)
            return ["go"] * len(episodes)

    async def simulate(function: Callable[[], Any]) -> Any:
        async with simulator:
            result = function()
            is_step = len(result) == 5
            await asyncio.sleep(SIMULATOR_S * width / ENVIRONMENTS * is_step)
            return result

    async with asyncio.TaskGroup() as tasks:
        for _ in range(parts):
            episodes = [Episode(f"{k}", {}) for k in range(width)]
            tasks.create_task(play(_Endless(width), episodes, width, STEPS, generate, simulate))


def measure() -> dict[str, Any]:
    """Return the seconds of 80 steps with one part and with two."""
    import fake_clock  # pyright: ignore[reportMissingImports]

    seconds = [round(fake_clock.run(steps_of(parts))[1], 6) for parts in (1, 2)]
    return {"embodied": seconds}
