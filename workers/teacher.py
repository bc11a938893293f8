"""TeacherWorker: a teacher for distillation that runs in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.column import (
    KEPT_IDS,
    PROMPT_IDS,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    TEMPERATURE,
)
from ..dataflow.errors import SampleError, UserError
from .dispatch import Dispatch
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
        if config.speculation is not None:
            raise UserError(
                "TeacherWorker(speculation=...): a teacher scores samples and generates nothing; leave it out"
            )
        for node in nodes:
            check_top(node.name, node.arguments.get("top", 1))
            if str(KEPT_IDS) in node.reads:
                raise UserError(
                    f"node {node.name!r}: a TeacherWorker gives probabilities over the whole vocabulary, not over kept sets; sample "
                    "without top_p, top_k, min_p and min_tokens, or make the teacher a weft.ReferenceWorker"
                )

    @remote(may_read=(TEMPERATURE,), **OF_TEACHER)
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
        """See `ReferenceWorker.top_logprobs`. Raises a SampleError for rows with a temperature other
        than 1, whose distribution vLLM cannot give."""
        scores = lambda rows: self._scores(rows, top)  # noqa: E731
        return with_teacher(batch, scores, of=of, prompts=prompts, where=where, into=into)

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda of, prompts: (prompts, of),
        may_read=lambda of: (TEMPERATURE, *([KEPT_IDS] if of == str(RESPONSE_IDS) else [])),
        writes=lambda into: (into,),
    )
    def logprobs(
        self,
        batch: Batch,
        *,
        into: str = str(REFERENCE_LOGPROBS),
        of: str = str(RESPONSE_IDS),
        prompts: str = str(PROMPT_IDS),
    ) -> Batch:
        """See `ReferenceWorker.logprobs`. Raises a SampleError for rows with a temperature other than
        1."""
        rows = batch.with_columns(response_ids=batch[of], prompt_ids=batch[prompts])
        prompt_ids, responses, ends = self._inputs(rows)
        assert isinstance(self.engine, VllmEngine)
        return batch.with_columns(**{into: (self.engine.logprobs(prompt_ids, responses), ends)})

    def _scores(self, rows: Batch, top: int) -> Scores:
        prompts, responses, ends = self._inputs(rows)
        assert isinstance(self.engine, VllmEngine)
        return (*self.engine.top_logprobs(prompts, responses, top), ends)

    def _inputs(self, rows: Batch) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
        """Return prompts and responses, and the cu_seqlens of the responses."""
        temperatures = rows.numpy(TEMPERATURE) if TEMPERATURE in rows else np.ones(len(rows))
        if len(wrong := temperatures[~np.isin(temperatures, (0, 1))]):
            raise SampleError(
                f"a TeacherWorker gives probabilities at temperature 1, not {wrong[0]:g}; sample at temperature 1, or make the "
                "teacher a weft.ReferenceWorker"
            )
        (ids, starts), (responses, ends) = (
            rows.ragged_numpy(column) for column in (PROMPT_IDS, RESPONSE_IDS)
        )
        if not len(rows):
            return [], [], ends
        return np.split(ids, starts[1:-1]), np.split(responses, ends[1:-1]), ends
