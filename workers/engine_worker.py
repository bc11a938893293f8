"""EngineWorker: parent of the workers whose work is done by a training engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .dispatch import Coordinates
from .training.engine import ModelConfig, TrainingEngine
from .vocabulary import check_vocabulary
from .worker import Context, Worker

if TYPE_CHECKING:
    from ..dataflow.node import Node
    from ..dataflow.source import Source


class EngineWorker(Worker):
    """A worker that owns a `TrainingEngine`."""

    def __init__(self, config: ModelConfig, context: Context, engine: TrainingEngine) -> None:
        super().__init__(config, context)
        self.engine = engine

    @classmethod
    def check(cls, config: Any, nodes: Sequence[Node], source: Source) -> None:
        config.check()
        check_vocabulary(config.model, source)

    @property
    def coordinates(self) -> Coordinates:
        return self.engine.coordinates

    def onload(self) -> None:
        self.engine.onload()

    def offload(self) -> None:
        self.engine.offload()

    def close(self) -> None:
        self.engine.close()
