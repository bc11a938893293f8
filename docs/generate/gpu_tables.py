"""Tables of docs/gpu.md: the first way of training that fits on a GPU, for common models.

    python docs/generate/gpu_tables.py

prints them. The bytes are computed, not measured, from the model sizes below. Nothing is
downloaded, because the modules are made without weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.controllers.planner.phase_memory import generating_memory, trained_memory
from weft.controllers.prechecks.plan_memory import WAYS
from weft.dataflow.byte_units import GIB
from weft.workers.actor import ActorConfig
from weft.workers.training.lora import Lora
from weft.workers.training.memory import BYTES, ModelSize, folder_bytes

PROMPT, RESPONSE = 1024, 3072
"""[tokens] The lengths of each row."""
USABLE = 0.92
"""[share] Usable GPU memory; fragmentation takes the rest."""
QWEN, LLAMA = "Qwen2", "Llama"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the settings for `transformers`."""
        return {
            "architectures": [f"{self.family}ForCausalLM"],
            "model_type": self.family.lower(),
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": PROMPT + RESPONSE,
        }


MODELS: dict[str, Shape] = {
    "Qwen2.5-0.5B": Shape(QWEN, 896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen2.5-1.5B": Shape(QWEN, 1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen2.5-3B": Shape(QWEN, 2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen2.5-7B": Shape(QWEN, 3584, 18944, 28, 28, 4, 152064),
    "Llama-3.1-8B": Shape(LLAMA, 4096, 14336, 32, 32, 8, 128256),
    "Qwen2.5-14B": Shape(QWEN, 5120, 13824, 48, 40, 8, 152064),
    "Qwen2.5-32B": Shape(QWEN, 5120, 27648, 64, 40, 8, 152064),
    "Llama-3.1-70B": Shape(LLAMA, 8192, 28672, 80, 64, 8, 128256),
}


@dataclass(frozen=True)
class Machine:
    """The GPUs of one machine, and the tokens of a pass on each."""

    gpus: int
    gib: int
    microbatch_tokens: int

    @property
    def usable(self) -> float:
        """[bytes] Memory of a GPU for a plan."""
        return USABLE * self.gib * GIB


MACHINES = (Machine(1, 24, 4096), Machine(1, 80, 16384), Machine(8, 80, 16384))
ADAPTER = Lora(rank=16)


@dataclass(frozen=True)
class Expected:
    """Bytes of a way of training: per GPU, and on the host for all ranks."""

    settings: Mapping[str, Any]
    device: int
    activations: int
    host: int


def expected(model: str, machine: Machine, settings: Mapping[str, Any]) -> Expected | None:
    """Return the memory that an actor needs in addition to vLLM, or None if its weights alone do
    not fit.

    Args:
        model: a name in `MODELS`.
        machine: the GPUs to train on.
        settings: settings of an `ActorConfig` in bfloat16.
    """
    config, size = ActorConfig(model=model, dtype="bfloat16", **settings), _size(model)
    vllm = generating_memory(BYTES["bfloat16"] * size.parameters, 0).asleep
    about: dict[str, Any] = {"ranks": machine.gpus, "gpu_bytes": machine.gib * GIB}
    if (
        vllm.device + trained_memory(size, config, activations=0, **about).working.device
        > machine.usable
    ):
        return None
    activations = _activations(model, machine, config.lora is not None, config.activation_checkpointing)
    made = trained_memory(size, config, activations=activations, **about)
    # Pinned memory stays allocated, so the host has room for the tensors of both sleepers.
    host = machine.gpus * (made.asleep.host + vllm.host) + folder_bytes(size, config, config.lora)
    return Expected(settings, vllm.device + made.working.device, activations, host)


def first_that_fits(model: str, machine: Machine, lora: Lora | None) -> Expected | None:
    """Return the fastest way of training a model or its adapter that fits on these GPUs, or
    None."""
    for way in WAYS:
        found = expected(model, machine, way if lora is None else {**way, "lora": lora})
        if found is not None and found.device <= machine.usable:
            return found
    return None


def table(machine: Machine) -> Iterator[str]:
    """Yield the lines of a table in docs/gpu.md."""
    yield "| model | trained | settings | GiB on each GPU | of it a pass | GiB of host memory | GiB of vLLM's weights |"
    yield "|---|---|---|---|---|---|---|"
    for model in MODELS:
        for what, lora in (("all", None), ("adapter", ADAPTER)):
            found = first_that_fits(model, machine, lora)
            weights = _size(model).parameters * BYTES["bfloat16"]
            if found is None:
                yield f"| {model} | {what} | does not fit | | | | {weights / GIB:.0f} |"
                continue
            said = ", ".join(
                f"`{name}={value!r}`" for name, value in found.settings.items() if name != "lora"
            )
            numbers = (found.device, found.activations, found.host, weights)
            yield (
                f"| {model} | {what} | {said or 'none'} | "
                + " | ".join(f"{n / GIB:.0f}" for n in numbers)
                + " |"
            )


@cache
def _size(model: str) -> ModelSize:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = MODELS[model]
    with torch.device("meta"):
        settings = shape.settings()
        made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    shapes = {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}
    return ModelSize(shapes, shape.vocabulary, shape.layers)


@cache
def _activations(model: str, machine: Machine, adapter: bool, again: Any) -> int:
    """Return the activation bytes of a microbatch of equal rows, without gradients."""
    from weft.workers.training.activations import pass_bytes

    rows = machine.microbatch_tokens // (PROMPT + RESPONSE)
    with tempfile.TemporaryDirectory(prefix="weft-expected-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model].settings()))
        found = pass_bytes(
            folder,
            Path(folder),
            rows=rows,
            length=PROMPT + RESPONSE,
            predicted=RESPONSE,
            dtype="bfloat16",
            lora=ADAPTER if adapter else None,
            checkpointing=again,
            gpu_bytes=machine.gib * GIB,
        )
    # Without an adapter, `pass_bytes` includes the float32 gradients.
    return found - (0 if adapter else 4 * _size(model).parameters)


def main() -> None:
    for machine in MACHINES:
        print(f"### {machine.gpus} x {machine.gib} GB, passes of {machine.microbatch_tokens:,} tokens\n")
        print("\n".join(table(machine)), end="\n\n")


if __name__ == "__main__":
    main()
