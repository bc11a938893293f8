"""ReferenceWorker: a model that is asked for log-probabilities and not trained; it may follow an actor, as a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..dataflow.batch import Batch
from ..dataflow.column import PROMPT_IDS, REFERENCE_LOGPROBS, RESPONSE_IDS, TEMPERATURE
from .dispatch import Coordinates, Dispatch
from .remote import remote
from .training.engine import ModelConfig, TrainingEngine
from .vocabulary import check_vocabulary
from .worker import Context, Worker

if TYPE_CHECKING:
    from ..dataflow.graph import Node, Source
    from ..resharding.weights import Weights


class ReferenceConfig(ModelConfig):
    """The reference model, and how it lies over its ranks."""


class ReferenceWorker(Worker):
    """Log-probabilities under weights that stand still, or that are taken over from an actor now and then."""

    Config = ReferenceConfig

    def __init__(
        self, config: ReferenceConfig, context: Context = Context(), engine: TrainingEngine | None = None
    ) -> None:
        super().__init__(config, context)
        if engine is None:
            from .training.fsdp import FsdpEngine

            engine = FsdpEngine(config, context)
        self.engine = engine
        self.version = 0
        """Policy version of the weights that it has."""

    @classmethod
    def check(cls, config: ReferenceConfig, nodes: Sequence[Node], source: Source) -> None:
        config.check()
        check_vocabulary(config.model, source)

    @property
    def coordinates(self) -> Coordinates:
        return self.engine.coordinates

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda of: (PROMPT_IDS, of),
        may_read=(TEMPERATURE,),
        writes=lambda into: (into,),
    )
    def logprobs(self, batch: Batch, *, into: str = str(REFERENCE_LOGPROBS), of: str = str(RESPONSE_IDS)) -> Batch:
        """Log-probability of each token of the responses in the column `of` under the reference, at the temperature that they
        were sampled at."""
        return batch.with_columns(**{into: self.engine.logprobs(batch.with_columns(response_ids=batch[of]))})

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Weights) -> str:
        """Take over a published version; returns the checksum of the bytes that were loaded."""
        from ..resharding.shared_memory import open_weights

        self.engine.load(open_weights(weights).items())  # open_weights compares the checksum with the bytes
        self.version = weights.version
        return weights.checksum

    def onload(self) -> None:
        self.engine.onload()

    def offload(self) -> None:
        self.engine.offload()

    def close(self) -> None:
        self.engine.close()
