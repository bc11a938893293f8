"""TeacherWorker: a teacher for distillation that runs in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import (
    PROMPT_IDS,
    RESPONSE_IDS,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEMPERATURE,
)
from ..dataflow.errors import SampleError, UserError
from .generation.vllm_engine import VllmEngine
from .reference import OF_TEACHER, Scores, check_top, with_teacher
from .rollout import RolloutWorker
from .rollout_config import RolloutConfig
from .worker import remote

if TYPE_CHECKING:
    from ..dataflow.graph import Node
    from ..dataflow.source import Source


class TeacherWorker(RolloutWorker):
    """A frozen model in vLLM that scores the student's samples. Choose it over a `ReferenceWorker` for
    a teacher that vLLM serves in a quantised or otherwise cheaper form. It takes the settings of
    `RolloutWorker`, and needs a context of one token more than the longest row.

        teacher = weft.group(weft.TeacherWorker, model="Qwen/Qwen3-32B", tensor_parallel=4)
    """

    @classmethod
    def check(cls, config: RolloutConfig, nodes: Sequence[Node], source: Source) -> None:
        super().check(config, [], source)  # no node samples
        if config.engine != "vllm":
            raise UserError(
                f"TeacherWorker(engine={config.engine!r}) needs vLLM; for transformers, use weft.ReferenceWorker"
            )
        for node in nodes:
            check_top(node.name, node.arguments.get("top", 1))

    @remote(may_read=(TEMPERATURE, TEACHER_IDS, TEACHER_LOGPROBS), **OF_TEACHER)
    def top_logprobs(
        self,
        batch: Batch,
        *,
        top: int = 64,
        prompts: str = str(PROMPT_IDS),
        where: tuple[str, Any] | None = None,
    ) -> Batch:
        """See `ReferenceWorker.top_logprobs`. Raises a SampleError for rows with a temperature other
        than 1, whose distribution vLLM cannot give."""
        return with_teacher(batch, prompts, where, lambda rows: self._scores(rows, top))

    def _scores(self, rows: Batch, top: int) -> Scores:
        temperatures = rows.numpy(TEMPERATURE) if TEMPERATURE in rows else np.ones(len(rows))
        if len(wrong := temperatures[~np.isin(temperatures, (0, 1))]):
            raise SampleError(
                f"a TeacherWorker gives probabilities at temperature 1, not {wrong[0]:g}; sample at temperature 1, or make the "
                "teacher a weft.ReferenceWorker"
            )
        assert isinstance(self.engine, VllmEngine)
        (ids, starts), (responses, ends) = (
            rows.ragged_numpy(column) for column in (PROMPT_IDS, RESPONSE_IDS)
        )
        both = (np.split(ids, starts[1:-1]), np.split(responses, ends[1:-1])) if len(rows) else ([], [])
        return (*self.engine.top_logprobs(*both, top), ends)
