"""What of a vLLM engine's memory is on a GPU that it shares with a trainer.

    AWAKE ──sleep──> ASLEEP ──wake_weights──> WEIGHTS ──wake──> AWAKE

Weights arrive in WEIGHTS: the memory for keys and values is claimed by the first request after them. vLLM itself schedules nothing
before all of its memory is there again.
"""

from __future__ import annotations

import enum
from typing import Protocol


class OnDevice(enum.Enum):
    """What of an engine's memory is on the device."""

    AWAKE = "weights, keys and values"
    WEIGHTS = "weights"
    ASLEEP = "nothing"


class Sleeper(Protocol):
    """The part of vLLM's `LLMEngine` that is used here."""

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> object: ...


class SleepingEngine:
    """The states of one engine, and its way from each to the others. What is in a state already stays as it is.

    Args:
        engine: awake.
    """

    def __init__(self, engine: Sleeper) -> None:
        self._engine = engine
        self.on_device = OnDevice.AWAKE

    def sleep(self) -> None:
        """Move weights to host memory, and free keys and values."""
        self._wake_cache()
        if self.on_device is OnDevice.AWAKE:
            self._engine.sleep(level=1)
            self.on_device = OnDevice.ASLEEP

    def wake_weights(self) -> None:
        """Move weights back to the device."""
        if self.on_device is OnDevice.ASLEEP:
            self._engine.wake_up(tags=["weights"])
            self.on_device = OnDevice.WEIGHTS

    def wake(self) -> None:
        """Have everything on the device."""
        self.wake_weights()
        self._wake_cache()

    def _wake_cache(self) -> None:
        """Claim memory for keys and values, where weights are on the device. vLLM's allocator frees only what is there, so an engine does
        so before it sleeps, too."""
        if self.on_device is OnDevice.WEIGHTS:
            self._engine.wake_up(tags=["kv_cache"])
            self.on_device = OnDevice.AWAKE
