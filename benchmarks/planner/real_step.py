"""ReaLHF's PPO step (arXiv:2406.14088) as calls with costs: LLaMA models on nodes of 8 H100.

The costs are a roofline: matrix products at a share of the peak, memory traffic, the transfers of
tensor, pipeline and data parallelism, and a fixed time for each layer of a decode step. They compare
plans with each other; they are not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from weft.controllers.planner.execution_plans import ModelCall, PlannedStep
from weft.controllers.planner.options import Option, options

CALLS = (
    ModelCall("generate", "actor"),
    ModelCall("reward", "reward", ("generate",)),
    ModelCall("reference", "reference", ("generate",)),
    ModelCall("values", "critic", ("generate",)),
    ModelCall("actor update", "actor", ("reward", "reference", "values"), trains=True),
    ModelCall("critic update", "critic", ("reward", "reference", "values"), trains=True),
)
NODE_GPUS, GPU_BYTES = 8, 80e9
FLOPS, BANDWIDTH = 0.5 * 989e12, 0.8 * 3.35e12
"""Reached floating-point operations and bytes of memory per second of an H100."""
IN_NODE, BETWEEN_NODES = 0.7 * 450e9, 0.8 * 50e9
"""Reached bytes per second of each GPU over NVLink and over the network."""
ALL_REDUCE_S, LAYER_S = 6e-6, 15e-6
"""[s] Latency of an all-reduce, for each doubling of its GPUs, and fixed time of a layer in a decode
step."""


@dataclass(frozen=True)
class Llama:
    hidden: int
    inner: int
    layers: int
    grouped: int = 1
    """Query heads that share a head of keys and values."""
    vocabulary: int = 32000

    @property
    def parameters(self) -> int:
        h, i = self.hidden, self.inner
        return 3 * self.vocabulary * h + (3 * h * i + 2 * h * h + self.cache_width * h) * self.layers

    @property
    def cache_width(self) -> int:
        """Keys and values of a token in a layer."""
        return 2 * self.hidden // self.grouped


LLAMAS = {
    "7B": Llama(4096, 11008, 32),
    "13B": Llama(5120, 13824, 40),
    "34B": Llama(8192, 22016, 48, grouped=8),
    "70B": Llama(8192, 28672, 80, grouped=8),
}


@dataclass(frozen=True)
class Setting:
    actor: str
    nodes: int
    critic: str = "7B"
    """Also the size of the reward model."""
    batch: int = 512
    prompt: int = 1024
    generated: int = 1024

    def model(self, call: str) -> Llama:
        is_actor = call in ("generate", "reference", "actor update")
        return LLAMAS[self.actor if is_actor else self.critic]

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.generated

    def step(self, smallest: int = 4) -> PlannedStep:
        """Return the step with all options of meshes of at least `smallest` GPUs."""
        return PlannedStep(
            CALLS,
            options(self.nodes, NODE_GPUS, smallest),
            gpu_bytes=GPU_BYTES,
            seconds=self.seconds,
            held_bytes=self.held_bytes,
            active_bytes=self.active_bytes,
            move_s=self.move_s,
        )

    # Seconds: formulas of a pipeline whose microbatches take equally long

    def seconds(self, call: str, option: Option) -> float:
        pp, _, dp = option.strategy
        if call == "generate":
            # Each decode step takes one microbatch after the other through all stages.
            prompts = self.pass_s(call, option, ceil(self.batch / dp / pp) * self.prompt)
            decode = self.decode_s(option, ceil(self.batch / dp / pp))
            return generate_s(prompts, decode, self.generated, pp)
        if call.endswith("update"):
            microbatches = 2 * pp if pp > 1 else 1
            forward = self.pass_s(call, option, ceil(self.batch / dp / microbatches) * self.tokens)
            return train_s(forward, 2 * forward, self.optimizer_s(call, option), pp)
        return inference_s(self.pass_s(call, option, ceil(self.batch / dp / pp) * self.tokens), pp)

    def pass_s(self, call: str, option: Option, tokens: float) -> float:
        """Return the seconds of a forward pass of tokens through one pipeline stage."""
        model, (pp, tp, _) = self.model(call), option.strategy
        layers = model.layers / pp
        flops = 2 * model.parameters / pp + 2 * layers * self.tokens * model.hidden
        reduced = 4 * (tp - 1) / tp * tokens * 2 * model.hidden * layers / IN_NODE
        sent = tokens * 2 * model.hidden / BETWEEN_NODES if pp > 1 else 0.0
        return flops * tokens / tp / FLOPS + reduced + sent

    def decode_s(self, option: Option, responses: float) -> float:
        """Return the seconds of a decode step of one pipeline stage."""
        model, (pp, tp, _) = self.model("generate"), option.strategy
        layers = model.layers / pp
        weights = 2 * model.parameters / pp
        cache = responses * (self.prompt + self.generated / 2) * 2 * model.cache_width * layers
        compute = weights * responses / tp / FLOPS
        latency = layers * (LAYER_S + 2 * ALL_REDUCE_S * log2(tp))
        return max((weights + cache) / tp / BANDWIDTH, compute) + latency

    def optimizer_s(self, call: str, option: Option) -> float:
        """Return the seconds of the gradients' all-reduce and of the optimizer."""
        pp, tp, dp = option.strategy
        shard = self.model(call).parameters / (pp * tp)
        link = IN_NODE if tp * dp <= NODE_GPUS else BETWEEN_NODES
        return 4 * shard * (dp - 1) / dp / link + 24 * shard / dp / BANDWIDTH

    def move_s(self, model: str, old: Option, new: Option) -> float:
        """Return the seconds to send the weights of a model: each GPU of `new` receives its shard."""
        weights = 2 * self.model("generate" if model == "actor" else "values").parameters
        crosses = old.mesh.gpus > NODE_GPUS or new.mesh.gpus > NODE_GPUS or old.mesh != new.mesh
        return weights / (new.strategy.pp * new.strategy.tp) / (BETWEEN_NODES if crosses else IN_NODE)

    # Bytes of each GPU

    def held_bytes(self, call: str, option: Option) -> float:
        n, strategy = self.model(call).parameters, option.strategy
        weights = 4 * n / (strategy.pp * strategy.tp)
        return weights + (20 * n / strategy.gpus if call.endswith("update") else 0.0)

    def active_bytes(self, call: str, option: Option) -> float:
        model = self.model(call)
        if call == "generate":
            cache = 2 * self.batch * self.tokens * model.cache_width * model.layers
            return cache / option.strategy.gpus
        return 0.0


def inference_s(forward_s: float, pp: int) -> float:
    """Return the seconds of `pp` microbatches in a pipeline of `pp` stages."""
    return forward_s * (2 * pp - 1)


def train_s(forward_s: float, backward_s: float, optimizer_s: float, pp: int) -> float:
    """Return the seconds of `2 * pp` microbatches, or one without a pipeline, and of the optimizer."""
    microbatches = 2 * pp if pp > 1 else 1
    return (forward_s + backward_s) * (pp + microbatches - 1) + optimizer_s


def generate_s(prefill_s: float, decode_s: float, tokens: int, pp: int) -> float:
    return inference_s(prefill_s, pp) + decode_s * (tokens - 1) * pp
