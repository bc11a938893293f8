"""EngineWorker: parent of the workers whose work is done by a training engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..dataflow.column import IMAGES, RESPONSE_IDS, ROUTES, TEMPERATURE, Column
from ..dataflow.errors import UserError
from .dispatch import Coordinates
from .images import check_images
from .model_folder import context_of, read_model_config
from .row_cost import RowCost, row_cost_of
from .training.engine import Head, ModelConfig, TrainingConfig, TrainingEngine
from .vocabulary import check_vocabulary
from .worker import Context, Worker

if TYPE_CHECKING:
    from ..dataflow.node import Node
    from ..dataflow.source import Source


def logprobs_may_read(of: str, replay: bool = True) -> tuple[Column, ...]:
    """Columns that a pass for the log-probabilities of responses uses if they exist; routes are those of sampled ones.

    Args:
        of: the column of response tokens.
        replay: whether a mixture of experts takes the experts of `routes`.
    """
    return (TEMPERATURE, IMAGES, *([ROUTES] if replay and of == str(RESPONSE_IDS) else []))


class EngineWorker(Worker):
    """A worker that owns a `TrainingEngine`: `config.engine` makes it, or, if that is None, it is an `FsdpEngine`.

    Args:
        training, head: see `EngineFactory`.
        alone: whether this rank has a complete model and meets no others.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        training: TrainingConfig | None = None,
        *,
        head: Head = "logprobs",
        alone: bool = False,
    ) -> None:
        super().__init__(config, context)
        make = config.engine
        if make is None:
            from .training.fsdp import FsdpEngine as make
        where = replace(context, rank=0, world_size=1, rendezvous=None) if alone else context
        self.engine: TrainingEngine = make(config, where, training, head=head)
        missing = [name for name in vars(TrainingEngine) if name[0] != "_" and not hasattr(self.engine, name)]
        if missing:
            made = type(self.engine).__name__
            raise UserError(
                f"engine={config.engine!r} made a {made}, which is no TrainingEngine: it has no {', '.join(missing)}"
            )

    @classmethod
    def check(cls, config: Any, nodes: Sequence[Node], source: Source) -> None:
        config.check()
        check_vocabulary(config.model, source)
        check_images(config.model, source)

    @classmethod
    def longest_row(cls, config: Any) -> int | None:
        return context_of(read_model_config(config.model))

    @classmethod
    def row_cost(cls, config: Any) -> RowCost:
        return row_cost_of(config.model)

    @property
    def coordinates(self) -> Coordinates:
        return self.engine.coordinates

    def onload(self) -> None:
        self.engine.onload()

    def offload(self) -> None:
        self.engine.offload()

    def close(self) -> None:
        self.engine.close()
