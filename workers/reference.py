"""ReferenceWorker: computes log-probabilities, as a frozen reference or as a teacher.
MovingReferenceWorker: the same, under a moving average of the policy's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from ..dataflow.batch import Batch
from ..dataflow.column import (
    IMAGES,
    PROMPT_IDS,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    ROUTES,
    TEMPERATURE,
)
from ..dataflow.errors import UserError, WeightSyncError
from .dispatch import Dispatch
from .engine_worker import EngineWorker, logprobs_may_read
from .training.engine import ModelConfig
from .worker import Context, remote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..dataflow.graph import Node
    from ..dataflow.source import Source
    from ..resharding.weights import Weights


OF_TEACHER: Mapping[str, Any] = {
    "dispatch": Dispatch.SPLIT_BY_DP,
    "reads": lambda of, prompts, where: (prompts, of, *([] if where is None else [where[0]])),
    "writes": lambda into: (f"{into}_ids", f"{into}_logprobs"),
}
"""Declaration of `top_logprobs`, apart from optional columns."""


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

    @classmethod
    def check(cls, config: ReferenceConfig, nodes: Sequence[Node], source: Source) -> None:
        super().check(config, nodes, source)
        for node in nodes:
            check_top(node.name, node.arguments.get("top", 1))

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda of, prompts: (prompts, of),
        may_read=logprobs_may_read,
        writes=lambda into: (into,),
    )
    def logprobs(
        self,
        batch: Batch,
        *,
        into: str = str(REFERENCE_LOGPROBS),
        of: str = str(RESPONSE_IDS),
        prompts: str = str(PROMPT_IDS),
        replay: bool = True,
    ) -> Batch:
        """Compute the log-probability of each response token at the sampling temperature and over its
        kept set.

        Args:
            batch: has the columns `prompt_ids` [P] int32, `of` [L] int32 and, unless it is 1,
                `temperature` [1] float32. Optional: `kept_counts` and `kept_ids`.
            into: the column to write, [L] float32 nats.
            prompts: the column of the prompt that this model reads, [P] int32.
            replay: whether a mixture of experts replays the column `routes`, if it exists. Set it
                to False unless the model has the trained model's initial weights.
        """
        self._check_whole()
        rows = batch.with_columns(response_ids=batch[of], prompt_ids=batch[prompts])
        if not replay:
            rows = rows.select([column for column in rows.columns if column != str(ROUTES)])
        return batch.with_columns(**{into: self.engine.logprobs(rows)})

    @remote(may_read=(TEMPERATURE, IMAGES), **OF_TEACHER)
    def top_logprobs(
        self,
        batch: Batch,
        *,
        top: int = 64,
        of: str = str(RESPONSE_IDS),
        prompts: str = str(PROMPT_IDS),
        where: tuple[str, Any] | None = None,
        into: str = "teacher",
    ) -> Batch:
        """Compute the likeliest tokens at each position of the responses, at the sampling temperature:
        `teacher_ids` [L * top] int32 and `teacher_logprobs` [L * top] float32 nats.

        Args:
            top: tokens per position; at most the vocabulary. A row needs 8 bytes for each.
            of: the column of the response that this model reads, [L] int32.
            prompts: the column of the prompt that this model reads, [P] int32.
            where: a column and a value; other rows get no tokens.
            into: the columns to write, `into`_ids and `into`_logprobs.
        """
        self._check_whole()
        scores = lambda rows: self.engine.top_logprobs(rows, top)  # noqa: E731
        return with_teacher(batch, scores, of=of, prompts=prompts, where=where, into=into)

    def _check_whole(self) -> None:
        if not self._whole:
            raise WeightSyncError(
                "an update of these weights failed, and no complete version has arrived since"
            )

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


class MovingReferenceConfig(ReferenceConfig):
    """A reference that moves with the policy."""

    mix: float = Field(gt=0, le=1)
    """[share] Required. Share of the policy's weights in each new version of the reference,
    reference = (1 - mix) * reference + mix * policy. Set it together with `follows(actor,
    every=...)`: 0.6 every 512 updates is a common choice; a small share after every update is an
    exponential moving average. 1 copies the policy."""


class MovingReferenceWorker(ReferenceWorker):
    """A reference whose weights are a moving average of the policy's (TR-DPO, arXiv:2404.09656). At
    first, it has the weights of `model`:

        reference = weft.group(weft.MovingReferenceWorker, model="model", mix=0.6)
        reference.follows(actor, every=512)

    The average is float32 and part of every checkpoint. It takes 4 bytes of host memory per
    parameter, and a transfer of the weights after every `every`-th update. An actor with an adapter
    sends merged weights.
    """

    Config = MovingReferenceConfig
    must_follow = True

    @classmethod
    def check(cls, config: Any, nodes: Sequence[Node], source: Source) -> None:
        super().check(config, nodes, source)
        if config.engine is not None and not getattr(config.engine, "averages", False):
            raise UserError(
                f"mix={config.mix:g}: engine={config.engine!r} keeps no moving average; leave `engine` out, or set "
                "averages=True on an engine that mixes the weights it receives"
            )

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str | Path) -> float:
        """See `TrainedWorker.save_checkpoint`."""
        return self.engine.snapshot(Path(path), {"version": self.version})

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Return whether the last checkpoint is on disk."""
        return self.engine.written(wait=wait)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str | Path) -> None:
        """Restore the average from a checkpoint, written by any number of ranks."""
        self.version = self.engine.restore(Path(path))["version"]


# What a teacher writes, whichever engine computes it.


Scores = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(log-probabilities [T, k] float32 nats, token ids [T, k] int32, cu_seqlens [rows + 1])."""


def check_top(name: str, top: object) -> None:
    if not isinstance(top, int) or isinstance(top, bool) or top < 1:
        raise UserError(f"node {name!r}: top must be an integer of at least 1, not {top!r}")


def with_teacher(
    batch: Batch,
    score: Callable[[Batch], Scores],
    *,
    of: str,
    prompts: str,
    where: tuple[str, Any] | None,
    into: str,
) -> Batch:
    """Add `into`_ids and `into`_logprobs to the rows that `where` selects, with responses and prompts
    from the columns `of` and `prompts`. Other rows get empty lists."""
    rows = batch.with_columns(response_ids=batch[of], prompt_ids=batch[prompts])
    mine = np.arange(len(batch))
    if where is not None:
        mine = np.flatnonzero([value == where[1] for value in batch[where[0]].to_pylist()])
    logprobs, ids, cu_seqlens = score(rows.take(mine))
    lengths = np.zeros(len(batch), np.int64)
    lengths[mine] = np.diff(cu_seqlens) * ids.shape[1]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    made = {f"{into}_ids": (ids.ravel(), ends), f"{into}_logprobs": (logprobs.ravel(), ends)}
    return batch.with_columns(**made)
