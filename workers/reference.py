"""ReferenceWorker: a model that computes log-probabilities and is not trained; it may follow an actor, as a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dataflow.batch import Batch
from ..dataflow.column import PROMPT_IDS, REFERENCE_LOGPROBS, RESPONSE_IDS, TEMPERATURE
from .dispatch import Dispatch
from .engine_worker import EngineWorker
from .remote import remote
from .training.engine import ModelConfig, TrainingEngine
from .worker import Context

if TYPE_CHECKING:
    from ..resharding.weights import Weights


class ReferenceConfig(ModelConfig):
    """The reference model, and how it is sharded."""


class ReferenceWorker(EngineWorker):
    """Log-probabilities under frozen weights, or under weights that are loaded from an actor now and then.

    Args:
        engine: for tests and for other engines; None: an `FsdpEngine`.
    """

    Config = ReferenceConfig

    def __init__(
        self, config: ReferenceConfig, context: Context = Context(), engine: TrainingEngine | None = None
    ) -> None:
        if engine is None:
            from .training.fsdp import FsdpEngine

            engine = FsdpEngine(config, context)
        super().__init__(config, context, engine)
        self.version = 0
        """Policy version of its weights."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda of: (PROMPT_IDS, of),
        may_read=(TEMPERATURE,),
        writes=lambda into: (into,),
    )
    def logprobs(self, batch: Batch, *, into: str = str(REFERENCE_LOGPROBS), of: str = str(RESPONSE_IDS)) -> Batch:
        """Log-probability of each response token under the reference, at the temperature that it was sampled at.

        Args:
            batch: columns `prompt_ids` [P] int32, `of` [L] int32 and, if the temperature is not 1, `temperature` [1] float32.
            into: the column that is written.
            of: the column of response tokens.

        Returns:
            The batch with `into`, [L] float32 nats.
        """
        return batch.with_columns(**{into: self.engine.logprobs(batch.with_columns(response_ids=batch[of]))})

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Weights) -> str:
        """Load a published version of the weights; returns the checksum of the bytes that were loaded.

        Raises:
            WeightSyncError: they do not fit the model, or are not those that were published.
        """
        from ..resharding.open_weights import open_weights

        self.engine.receive_weights(open_weights(weights))
        self.version = weights.version
        return weights.checksum
