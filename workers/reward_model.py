"""RewardModelWorker: scores samples with a frozen reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import EPISODE_ROWS, PROMPT_IDS, RESPONSE_IDS, REWARD, TOKEN_SCORES
from ..dataflow.errors import UserError
from ..dataflow.metrics import Metrics
from .critic import last_of_rows
from .dispatch import Coordinates, Dispatch
from .engine_worker import EngineWorker
from .models.model_folder import SCALAR_HEAD, check_scalar_head, read_model_config
from .models.weight_files import find_tensor
from .reward import of_column, reward_metrics, row_weights
from .training.engine import Head, ModelConfig
from .worker import Context, remote

if TYPE_CHECKING:
    from ..dataflow.graph import Node
    from ..dataflow.source import Source


class RewardModelConfig(ModelConfig):
    """The reward model: a folder with a scalar head, such as `CriticWorker(head="rewards")` saves.
    It must use the policy's tokenizer."""

    head: ClassVar[Head] = "rewards"


class RewardModelWorker(EngineWorker):
    """Scores responses with a model. Each rank has the complete model, so that a dead rank can be
    replaced while the others continue."""

    Config = RewardModelConfig
    replaceable = True

    def __init__(self, config: RewardModelConfig, context: Context = Context()) -> None:
        super().__init__(config, context, head=config.head, alone=True)

    @classmethod
    def check(cls, config: RewardModelConfig, nodes: Sequence[Node], source: Source) -> None:
        super().check(config, nodes, source)
        check_scalar_head(config.model, read_model_config(config.model))
        if find_tensor(config.model, SCALAR_HEAD) is None:
            raise UserError(
                f"model {str(config.model)!r} has no scalar head (a tensor {SCALAR_HEAD!r} in its safetensors files), so no rewards; "
                'a CriticWorker(head="rewards") trains and saves one'
            )
        for name in ("tensor_parallel", "sequence_parallel", "pipeline_parallel"):
            if (ranks := getattr(config, name)) > 1:
                raise UserError(
                    f"{name}={ranks}: each rank of a RewardModelWorker has the whole model; leave it at 1"
                )

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank, which is a replica."""
        return Coordinates(dp=self.context.rank)

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=(PROMPT_IDS, RESPONSE_IDS),
        may_read=(EPISODE_ROWS,),
        writes=lambda into: (into,),
    )
    def score(self, samples: Batch, *, into: str = str(REWARD)) -> tuple[Batch, Metrics]:
        """Compute the reward of each response: the head's output at its last token. Raises a
        UserError that names the row if a response is empty or its reward is not finite."""
        rewards = last_of_rows(*self.engine.values(samples))
        wrong = np.flatnonzero(~np.isfinite(rewards))
        if len(wrong):
            row = samples.numpy("sample_id")[wrong[0]] if "sample_id" in samples else wrong[0]
            raise UserError(
                f"{self.config.model} gives sample {row} the reward {rewards[wrong[0]]}; a "
                "reward must be a finite number"
            )
        metrics = reward_metrics(rewards.tolist(), row_weights(samples))
        return samples.with_columns(**{into: rewards}), of_column(into, metrics)

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=(PROMPT_IDS, RESPONSE_IDS), writes=lambda into: (into,))
    def token_scores(self, samples: Batch, *, into: str = str(TOKEN_SCORES)) -> Batch:
        """Compute the head's output at each response token. For a process reward model, the output
        at the end of a reasoning step is the logit that the step is right."""
        return samples.with_columns(**{into: self.engine.values(samples)})
