"""Forwarded: which variables of the driver's environment the ranks get, wherever they stand.

On an existing cluster a process has the environment in which its node joined. What a user sets for NCCL, vLLM, the Hugging Face hub or a
tracker where the script is started must reach the ranks as well.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "VLLM_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "WANDB_",
    "MLFLOW_",
    "WEFT_",
)
"""Variables whose names begin so are forwarded. `PYTHONPATH` and the number of threads are, too (`rank.py`)."""
OF_A_NODE = (
    "VLLM_HOST_IP",
    "HF_HOME",
    "TORCH_HOME",
    *(f"HF_{what}_CACHE" for what in ("HUB", "XET", "ASSETS", "MODULES", "DATASETS")),
    "HUGGINGFACE_HUB_CACHE",
    "HUGGINGFACE_ASSETS_CACHE",
    "TRANSFORMERS_CACHE",
    "TORCH_EXTENSIONS_DIR",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "VLLM_ASSETS_CACHE",
    "WANDB_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_CONFIG_DIR",
    "WANDB_DATA_DIR",
    "WEFT_CACHE",
)
"""Not these: an address or a folder of the driver's node may be none of another."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the ranks get before anything in their processes reads them. They travel with the arguments of a rank, and nobody
    writes them to disk: tokens and keys are among them.

    >>> forwarded({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_x", "VLLM_CACHE_ROOT": "/home/me/.cache", "HOME": "/home/me"})
    {'NCCL_DEBUG': 'INFO', 'HF_TOKEN': 'hf_x'}
    """
    return {name: value for name, value in environment.items() if name.startswith(PREFIXES) and name not in OF_A_NODE}
