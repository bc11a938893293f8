"""Quantised weights of a rollout: the schemes, and the checks before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...dataflow.errors import UserError
from ..models.model_folder import (
    complete_text_settings,
    head_dim,
    num_experts,
    num_heads,
    sees_images,
    text_settings,
)

Quantization = Literal["int8", "fp8", "w4a16"]

GROUP_SIZES = (128, 64, 32)
"""Sizes of w4a16's groups that vLLM's kernels support, largest first."""


def group_size(columns: int) -> int | None:
    """Return the size of w4a16's groups for a weight with this many columns on a rank, or None if
    none divides them.

    >>> group_size(4096), group_size(96), group_size(80)
    (128, 32, None)
    """
    return next((size for size in GROUP_SIZES if columns % size == 0), None)


def method_name(scheme: Quantization) -> str:
    """Return vLLM's name of the quantisation method."""
    return f"weft_{scheme}"


def check_quantization(
    scheme: Quantization,
    model: str | Path,
    settings: Mapping[str, Any],
    *,
    engine: str,
    dtype: str,
    compile: bool | None,
    tensor_parallel: int,
    on_cpu: bool,
) -> None:
    """Check that vLLM can quantise the weights of a model with these settings (`config.json`).
    `on_cpu` says whether vLLM is its build for CPUs. Raises a UserError."""
    problem = ""
    if engine != "vllm":
        problem = f"engine={engine!r} has no quantised kernels; choose engine='vllm', or leave it out"
    elif any(each.get("quantization_config") for each in (settings, text_settings(settings))):
        problem = f"the weights in {model} are quantised already; leave it out"
    elif num_experts(complete_text_settings(model)) is not None:
        problem = f"{model} is a mixture of experts, and Weft quantises dense models only; leave it out"
    elif sees_images(settings):
        problem = f"{model} reads images, and Weft quantises text models only; leave it out"
    elif on_cpu and scheme == "fp8":
        problem = "vLLM has no fp8 kernels for this CPU; choose 'int8'"
    elif on_cpu and compile:
        problem = "on a CPU, compiled code may keep the kernels of old weights; leave out compile=True"
    elif dtype == "float32" and not on_cpu:
        problem = "on a GPU, the kernels compute in half precision; choose dtype='bfloat16'"
    elif dtype in ("auto", "float32") and on_cpu and scheme == "w4a16":
        problem = "on a CPU, the kernel computes in half precision; choose dtype='bfloat16'"
    elif scheme == "w4a16" and (wrong := _without_groups(settings, tensor_parallel)) is not None:
        problem = (
            f"{model} has a weight of {wrong} columns on a rank, which must be a multiple of {GROUP_SIZES[-1]}; choose 'int8', or "
            "another tensor_parallel"
        )
    if problem:
        raise UserError(f"RolloutConfig.quantization={scheme!r}: {problem}")


def _without_groups(settings: Mapping[str, Any], tensor_parallel: int) -> int | None:
    """Return the columns of a rank's projection that w4a16 cannot split; None if the settings name
    no such projection."""
    text = text_settings(settings)
    heads, size = num_heads(settings), head_dim(settings)
    columns = [
        int(text.get("hidden_size") or 0),
        int(text.get("intermediate_size") or 0) // tensor_parallel,
    ]
    columns.append(heads * size // tensor_parallel if heads and size else 0)
    return next((each for each in columns if group_size(each) is None), None)
