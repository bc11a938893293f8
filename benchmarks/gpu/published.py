"""Published speeds on H100 (H20 where stated) that `gpu.py` prints with its own figures.

These figures were not measured here. `gpu.py` uses other models, lengths and parallelism,
so compare orders of magnitude. NeMo-RL counts tokens like `gpu.py`: those of training, prompts
included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NEMO_SUMMARY = "NVIDIA-NeMo/RL: docs/about/performance-summary.md"
NEMO_959 = "NVIDIA-NeMo/RL#959"
PRIME = "PrimeIntellect-ai/prime-rl: benchmarks/results"
RLINF = "RLinf docs: compare_with_verl"
VERL = "verl docs: fully_async.md"


@dataclass(frozen=True)
class Published:
    """One published result. None marks figures that the source does not give."""

    system: str
    model: str
    gpus: int
    work: str
    """Batch, lengths and parallelism."""
    source: str
    tokens_per_s_per_gpu: float | None = None
    step_s: float | None = None
    """[s] A step; of trainers alone, a microbatch; of weights, a transfer."""
    mfu: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """[s] Seconds of a step, by phase."""


STEPS = (
    Published(
        "NeMo-RL 0.5, on-policy", "Llama-3.1-8B", 16, "64 x 32 samples, max 4,096, mean 1,019 tokens; Megatron, PP 2",
        NEMO_SUMMARY, 1581, 92.8,
    ),
    Published(
        "NeMo-RL 0.5, one step off", "Llama-3.1-8B", 16, "64 x 32 samples, max 4,096, mean 1,123 tokens; Megatron",
        NEMO_SUMMARY, 2478, 64.8,
    ),
    Published(
        "NeMo-RL 0.5, one step off, FP8", "Llama-3.1-8B", 16, "64 x 32 samples, max 4,096, mean 1,128 tokens; FP8 on both sides",
        NEMO_SUMMARY, 3052, 53.0,
    ),
    Published(
        "NeMo-RL 0.3, Megatron", "Llama-3.1-8B-Instruct", 8, "mean 795 generated tokens",
        NEMO_959, step_s=112, phases={"update": 28, "weights": 5, "generate": 58, "logprobs": 18},
    ),
    Published(
        "NeMo-RL 0.3, DTensor", "Llama-3.1-8B-Instruct", 8, "mean 777 generated tokens; FSDP2",
        NEMO_959, step_s=122, phases={"update": 38, "weights": 4, "generate": 57, "logprobs": 19},
    ),
    Published("NeMo-RL 0.5", "Qwen3-32B", 32, "mean 3,251 tokens", NEMO_SUMMARY, 571, 376),
    Published("NeMo-RL 0.5, one step off", "Qwen3-32B", 64, "mean 3,251 tokens", NEMO_SUMMARY, 538, 200),
    Published("RLinf", "R1-Distill-Qwen-1.5B", 8, "context 28,672, mean about 14,000 tokens", RLINF, 2481, 346),
    Published("verl 0.5", "R1-Distill-Qwen-1.5B", 8, "context 28,672, mean about 14,000 tokens", RLINF, 2503, 364),
    Published(
        "SkyRL", "Qwen3.5-9B", 8, "DAPO, 32 x 8 samples, max 8,192 tokens, TP 4 (246.8 s with MTP)",
        "SkyRL docs: examples/spec_decode", step_s=400.7,
    ),
)  # fmt: skip
"""Complete steps."""
TRAINERS = (
    Published("prime-rl, trainer", "Qwen3-4B", 1, "LoRA of rank 16, 16k tokens", PRIME, 6230, 2.63, 0.217),
    Published("prime-rl, trainer", "Qwen3-0.6B", 1, "all parameters, 16k tokens", PRIME, 11_900, 1.38, 0.111),
    Published("prime-rl, trainer", "Qwen3-0.6B", 1, "all parameters, 64k tokens", PRIME, 10_200, 6.46, 0.268),
    Published("prime-rl, trainer", "Qwen3-4B", 8, "all parameters, 16k tokens", PRIME, 26_000 / 8, 5.04, 0.139),
    Published("prime-rl, trainer", "Qwen3-4B", 8, "all parameters, 64k tokens", PRIME, 29_000 / 8, 18.1, 0.354),
)  # fmt: skip
"""Training alone."""
WEIGHTS = (
    Published("TRL, vLLM's native API", "Qwen3-0.6B", 1, "one transfer", "huggingface/trl#5892", step_s=0.18),
    Published("verl, checkpoint engine", "7B", 8, "4 + 4 H20, one transfer", VERL, step_s=0.02),
    Published("verl, checkpoint engine", "30B-A3B", 32, "16 + 16 H20, one transfer", VERL, step_s=4.4),
    Published("verl, checkpoint engine", "235B", 128, "64 + 64 H20, one transfer", VERL, step_s=23.7),
)  # fmt: skip
"""Transfers of weights to the generator."""
