"""Resident memory of a process before it holds a tensor: the interpreter, torch, transformers, vLLM, and what they allocate for themselves.

Measured, not computed: `resident_bytes` of each group in runs of the examples (docs/metrics.md), less what is planned for their
tensors, on Linux with Python 3.11, torch 2.13 for CPUs, transformers 5.19, vLLM 0.32 and Ray 2.60; `benchmarks/operate.py --only plan`
compares them anew. Files that several processes have mapped (libraries, above all) are counted in each. A torch for CUDA takes more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from ...dataflow.byte_units import MIB
from ...dataflow.handle import Handle
from ...dataflow.metric_names import FUNCTIONS
from ...workers.training.engine import ModelConfig

TRAINING = 600 * MIB
"""A rank with an engine that trains, or that only computes log-probabilities."""
VLLM = 785 * MIB
TRANSFORMERS = 570 * MIB
"""A rollout with the engine of `transformers`."""
WITH_TORCH = 350 * MIB
"""A rank for the functions of graphs, where one of them uses torch (advantages do)."""
PLAIN = 200 * MIB
"""A rank without torch: rewards, samples, other functions. It begins with 140, and grows to this with the first rows and texts."""
DRIVER = 240 * MIB
"""The driver, with Ray."""
TORCH = 405 * MIB
"""More of a driver whose script has imported torch, to prepare a model, say."""
ONE_PROCESS = 540 * MIB
"""Driver and all groups together, under `Local`, without Ray."""
HELD_FREE = 0.15
"""Of what a pass makes and gives back, on a CPU: the share by which the heap is larger than what is in use. Two FSDP2 ranks of a model of
84M parameters held 11 to 15 % more than their tensors took at most."""


def resident_bytes(name: str, handle: Handle, functions: Iterable[Callable[..., Any]]) -> int:
    """What a rank of a group takes before it holds a tensor.

    Args:
        name: of the group.
        handle: of the group.
        functions: that the graphs of the run are made of.
    """
    if isinstance(handle.config, ModelConfig):
        return TRAINING
    engine = getattr(handle.config, "engine", None)
    if engine is not None:
        return VLLM if engine == "vllm" else TRANSFORMERS
    return WITH_TORCH if name == FUNCTIONS and any(map(_uses_torch, functions)) else PLAIN


def driver_bytes(*, in_process: bool) -> int:
    """What the driver takes: to be asked before the planner itself imports torch."""
    return ONE_PROCESS if in_process else DRIVER + TORCH * ("torch" in sys.modules)


def _uses_torch(function: Callable[..., Any]) -> bool:
    return "torch" in vars(sys.modules.get(function.__module__, object()))
