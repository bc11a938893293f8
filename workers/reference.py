"""ReferenceWorker: computes log-probabilities, as a frozen reference or as a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dataflow.batch import Batch
from ..dataflow.column import PROMPT_IDS, REFERENCE_LOGPROBS, RESPONSE_IDS, ROUTES
from ..dataflow.errors import WeightSyncError
from .dispatch import Dispatch
from .engine_worker import EngineWorker, logprobs_may_read
from .training.engine import ModelConfig
from .worker import Context, remote

if TYPE_CHECKING:
    from ..resharding.weights import Weights


class ReferenceConfig(ModelConfig):
    """The reference model and its sharding."""


class ReferenceWorker(EngineWorker):
    """Computes log-probabilities under frozen weights, or under those of a followed actor."""

    Config = ReferenceConfig

    def __init__(self, config: ReferenceConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        self.version = 0
        """Policy version of the weights."""
        self._whole = True
        """Whether all weights have the same version."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda of: (PROMPT_IDS, of),
        may_read=logprobs_may_read,
        writes=lambda into: (into,),
    )
    def logprobs(
        self,
        batch: Batch,
        *,
        into: str = str(REFERENCE_LOGPROBS),
        of: str = str(RESPONSE_IDS),
        replay: bool = True,
    ) -> Batch:
        """Compute the log-probability of each response token at the sampling temperature.

        Args:
            batch: has the columns `prompt_ids` [P] int32, `of` [L] int32 and, unless it is 1,
                `temperature` [1] float32.
            into: the column to write, [L] float32 nats.
            replay: whether a mixture of experts replays the column `routes`, if it exists. Set it
                to False unless the model has the trained model's initial weights.
        """
        if not self._whole:
            raise WeightSyncError(
                "an update of these weights failed, and no complete version has arrived since"
            )
        rows = batch.with_columns(response_ids=batch[of])
        if not replay:
            rows = rows.select([column for column in rows.columns if column != str(ROUTES)])
        return batch.with_columns(**{into: self.engine.logprobs(rows)})

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Weights) -> str:
        """Load a published version, and return its checksum. Raises a WeightSyncError if the
        weights do not fit the model or differ from the published ones."""
        from ..resharding.incoming import IncomingWeights

        # Stays False if loading fails.
        self._whole = False
        with IncomingWeights(weights.to(f"{self.context.name}[{self.context.rank}]")) as incoming:
            checksum = self.engine.receive_weights(incoming)
        self._whole = True
        self.version = weights.version
        return checksum
