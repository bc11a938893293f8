"""The models of `gpu.py`: exact architectures with random weights, and their arithmetic.

    python benchmarks/gpu/gpu_model.py FOLDER SETTINGS      # writes model and prompts; SETTINGS is JSON

A separate process writes a model, so that it holds no GPU memory during the measurement. It prints
the device and its peak as one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from workloads import Workload, make_tokenizer, prompts_of

from weft.controllers.planner.devices import device_named
from weft.workers.models.transformer import Transformer

SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class Architecture:
    """The sizes of a dense model. Qwen3 normalises queries and keys; Qwen2 has biases there."""

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings in `config.json`."""
        return {
            "architectures": [f"{self.kind}ForCausalLM"],
            "model_type": self.kind.lower(),
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }

    def training_flops(self, work: Workload, *, adapter: bool) -> float:
        """Return the floating-point operations that an update needs, with each prompt computed once
        and nothing recomputed."""
        model, prompt, response = Transformer.of(self.settings), work.prompt_tokens, work.max_tokens
        prompts = model.training_flops([prompt] * work.num_prompts, adapter=adapter)
        about: dict[str, Any] = {
            "after": prompt,
            "predicted": [response] * work.rows,
            "adapter": adapter,
        }
        return prompts + model.training_flops([response] * work.rows, **about)


MODELS = {
    "0.6B": Architecture("Qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, tied=True),
    "1.5B": Architecture("Qwen2", 1536, 8960, 28, 12, 2, 128, 151_936, tied=True),
    "8B": Architecture("Qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, tied=False),
    "tiny": Architecture("Qwen3", 64, 128, 2, 2, 1, 32, 256, tied=True),
}
NAMES = {"0.6B": "Qwen3-0.6B", "1.5B": "Qwen2.5-1.5B", "8B": "Qwen3-8B", "tiny": "a tiny Qwen3"}


def write(folder: Path, architecture: Architecture, work: Workload, dtype: str) -> None:
    """Write `model/` (weights, tokenizer) and `prompts.jsonl`."""
    import torch
    from safetensors.torch import save_file

    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    prompts = "".join(json.dumps({"prompt": text}) + "\n" for text in prompts_of(work))
    (folder / "prompts.jsonl").write_text(prompts)
    make_tokenizer(work, model)
    settings = architecture.settings | {"dtype": dtype}
    (model / "config.json").write_text(json.dumps(settings))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    index: dict[str, str] = {}
    for number, shapes in enumerate(_shards(model)):
        file = f"model-{number:05}.safetensors"
        tensors = {
            name: _random(name, shape, getattr(torch, dtype), device) for name, shape in shapes.items()
        }
        save_file(tensors, model / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    listed = {"metadata": {}, "weight_map": index}
    (model / "model.safetensors.index.json").write_text(json.dumps(listed))


def _shards(model: Path) -> Iterator[dict[str, Any]]:
    """Yield the names and shapes of the tensors of each file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    tied = skeleton.config.tie_word_embeddings
    shapes, held = dict[str, Any](), 0
    for name, parameter in skeleton.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        if shapes and held + 2 * parameter.numel() > SHARD_BYTES:
            yield shapes
            shapes, held = {}, 0
        shapes[name] = parameter.shape
        held += 2 * parameter.numel()
    yield shapes


def _random(name: str, shape: Any, dtype: Any, device: str) -> Any:
    import torch

    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    if "norm" in name:
        return torch.ones(shape, dtype=dtype)
    return (0.02 * torch.randn(shape, dtype=dtype, device=device)).cpu()


def peak_flops(dtype: str) -> tuple[str, float]:
    """Return the name of the device and its peak in FLOP/s: from the table of devices, or of a
    product of two matrices on this device."""
    import torch

    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else "CPU"
    if cuda and (known := device_named(name)) is not None:
        return name, known.peak_flops(dtype)
    size = 8192 if cuda else 1024
    a = torch.randn(size, size, dtype=getattr(torch, dtype), device="cuda" if cuda else "cpu")
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        # The sum makes the host wait for the device.
        (a @ a)[0].sum().item()
        best = min(best, time.perf_counter() - start)
    return name, 2 * size**3 / best


def main(folder: Path, name: str, work: Mapping[str, Any], dtype: str) -> None:
    write(folder, MODELS[name], Workload.of(work), dtype)
    device, peak = peak_flops(dtype)
    print(json.dumps({"device": device, "peak_flops": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
