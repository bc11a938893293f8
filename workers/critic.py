"""CriticWorker: a trained language model with a scalar head (a critic or a reward model)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..algorithms.loss import Loss
from ..algorithms.values import ValueLoss
from ..dataflow.batch import Batch
from ..dataflow.column import PROMPT_IDS, RESPONSE_IDS, REWARD, VALUES
from ..dataflow.errors import UserError
from ..dataflow.metrics import Metrics
from .dispatch import Dispatch
from .engine_worker import TrainedConfig, TrainedWorker, loss_may_read, loss_reads, training_batch
from .models.model_folder import check_scalar_head, read_model_config
from .worker import Context, remote

if TYPE_CHECKING:
    from ..dataflow.graph import Node
    from ..dataflow.source import Source


class CriticConfig(TrainedConfig):
    """A language model with a scalar head: the head's meaning, sharding and training."""

    head: Literal["values", "rewards"] = "values"
    """Output of the scalar head. "values": the value before each response token, for PPO.
    "rewards": the reward of the sequence up to and including each token. Choose "rewards" to train
    a reward model."""


class CriticWorker(TrainedWorker):
    """Trains a model with a scalar head: a critic (head="values") or a reward model
    (head="rewards").

    The model may be any causal language model, or one with a scalar head, such as a trained reward
    model. A new head starts with small weights drawn from the seed. `lora` also trains the whole
    head.
    """

    Config = CriticConfig

    def __init__(self, config: CriticConfig, context: Context = Context()) -> None:
        super().__init__(config, context, head=config.head)

    @classmethod
    def check(cls, config: CriticConfig, nodes: Sequence[Node], source: Source) -> None:
        super().check(config, nodes, source)
        check_scalar_head(config.model, read_model_config(config.model))
        # Operations that need a certain head. Updates work with both.
        wanted = {"values": "values", "score": "rewards"}
        for node in nodes:
            head = wanted.get(node.operation.name, config.head)
            if head != config.head:
                raise UserError(
                    f"node {node.name!r} calls {node.group!r}, which has "
                    f"head={config.head!r}; {node.operation.name} needs head={head!r}"
                )

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=(PROMPT_IDS, RESPONSE_IDS), writes=lambda into: (into,))
    def values(self, batch: Batch, *, into: str = str(VALUES)) -> Batch:
        """Compute the value before each response token, [L] float32."""
        return batch.with_columns(**{into: self.engine.values(batch)})

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=(PROMPT_IDS, RESPONSE_IDS), writes=lambda into: (into,))
    def score(self, batch: Batch, *, into: str = str(REWARD)) -> Batch:
        """Compute the reward of each response, [1] float32: the head's output at the last token, or
        NaN for an empty response."""
        return batch.with_columns(**{into: last_of_rows(*self.engine.values(batch))})

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP, reads=loss_reads, may_read=loss_may_read, takes=training_batch
    )
    def update(
        self,
        batch: Batch,
        *,
        loss: Loss = ValueLoss(),
        epochs: int = 1,
        minibatches: int = 1,
        last: bool = True,
    ) -> Metrics:
        """Make a new version of the weights: `epochs` passes over the rows of `minibatches` steps
        each. For results and errors, see `Updates.update`. `last` marks an update's last call."""
        return self._updates.update(batch, loss, epochs=epochs, minibatches=minibatches, last=last)


def last_of_rows(values: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """Return the last value of each row, or NaN for an empty row: [rows] float32.

    >>> last_of_rows(np.array([1.0, 2.0, 3.0], np.float32), np.array([0, 2, 2, 3])).tolist()
    [2.0, nan, 3.0]
    """
    last = np.full(len(cu_seqlens) - 1, np.nan, np.float32)
    filled = np.diff(cu_seqlens) > 0
    last[filled] = values[cu_seqlens[1:][filled] - 1]
    return last
