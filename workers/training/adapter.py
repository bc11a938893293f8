"""Adapter: put `peft` LoRA layers into a model, merge their weights, and write adapter files.

The layers are inside the `transformers` model, whose other modules stay unchanged. A linear layer
NAME becomes

    NAME.base_layer.weight                              W, frozen, in the dtype of computation
    NAME.lora_A.default.weight, NAME.lora_B.default.weight
    NAME.lora_magnitude_vector.default.weight           with DoRA

A scalar head trains in full, as one of `peft`'s "modules to save".
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...dataflow.errors import UserError
from ...dataflow.runs.files import Disk
from ..models.images import LANGUAGE, is_type_that_sees
from ..models.model_folder import ADAPTER_CONFIG_FILE, SCALAR_HEAD, find_model_config, refusals_named
from .causal_lm import auto_class, training_settings
from .lora import Lora, check_targets
from .safetensors_files import copy_companions, write_file, write_tensors

_NAME = "default"
"""Name in `peft` of a trained adapter, and of the first served one."""
_PARAMETER = re.compile(rf"\.(lora_A|lora_B|lora_magnitude_vector)\.{_NAME}\.weight$")


class Adapter:
    """LoRA layers in place of a model's linear layers.

    Args:
        causal_lm: a `transformers` model in float32 on the meta device. The constructor freezes all
            its parameters except those of a scalar head, and converts them to `dtype`, in place.
        seed: seed for initializing the A matrices.
    """

    made: dict[str, Tensor]
    """Initial parameters by name, in float32 on the host. DoRA norms are zeros (see
    `measured_weight`). `FsdpEngine` empties the mapping once the model has loaded them."""

    def __init__(self, causal_lm: Any, lora: Lora, dtype: torch.dtype, seed: int) -> None:
        self._causal_lm = causal_lm
        self.travels_alone = lora.published == "adapter"
        """Whether to publish only the adapter, without the model's weights."""
        scalar = SCALAR_HEAD.removesuffix(".weight")
        self._whole = [scalar] if hasattr(causal_lm, scalar) else []
        chosen = _adapted_layers(causal_lm, lora)
        self._config = _peft_settings(causal_lm, lora, chosen, "SEQ_CLS" if self._whole else "CAUSAL_LM")
        layers = [causal_lm.get_submodule(name) for name in chosen]
        # `peft` draws from torch's global generator, whose state belongs to the user's program.
        with torch.random.fork_rng(devices=[]), _hollow(layers):
            torch.manual_seed(seed)
            inject_adapter_in_model(self._config, causal_lm, _NAME)
        self.made = {name: p.detach() for name, p in causal_lm.named_parameters() if is_adapter(name)}
        for module in causal_lm.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.device.type != "meta":
                    module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"))
        for name, parameter in causal_lm.named_parameters():
            parameter.requires_grad_(is_trained(name))
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    @contextmanager
    def off(self) -> Iterator[None]:
        layers = [module for module in self._causal_lm.modules() if isinstance(module, LoraLayer)]
        # `enable_adapters` would also freeze parameters, but FSDP checks only in the first pass
        # which parameters require gradients.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def merged(self, name: str, tensor: Tensor, adapter: Mapping[str, Tensor]) -> tuple[str, Tensor]:
        """Merge the adapter into one full tensor of the model. Return the tensor's name in the
        model without the adapter, and a new float32 tensor, or the tensor itself if its layer has
        no adapter. `adapter` maps names to full float32 parameters, and must include those of this
        layer."""
        path, found, what = name.rpartition(".base_layer.")
        if not found or what != "weight":
            return name.replace(".base_layer.", "."), tensor
        layer = self._causal_lm.get_submodule(path)
        a, b, magnitude = (
            adapter.get(f"{path}.{part}.{_NAME}.weight")
            for part in ("lora_A", "lora_B", "lora_magnitude_vector")
        )
        assert a is not None and b is not None
        transposed = isinstance(layer.base_layer, Conv1D)  # GPT-2 stores its weights as [in, out]
        merged = merged_weight(tensor.T if transposed else tensor, a, b, layer.scaling[_NAME], magnitude)
        return f"{path}.weight", merged.T.contiguous() if transposed else merged

    def write_folder(
        self, folder: Path, tensors: Mapping[str, Tensor], source: Path, disk: Disk
    ) -> None:
        """Write a folder for `peft.PeftModel.from_pretrained` from full float32 parameters on the
        host. Tokenizer and chat template come from `source`, the base model's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        copy_companions(folder, source, disk)
        model = Path(self._causal_lm.name_or_path)  # a path, or a name in the Hugging Face cache
        name = str(model.resolve()) if model.is_dir() else self._causal_lm.name_or_path
        # The constructor must not get it, because `peft` would then duplicate the head.
        settings = {**self._config.to_dict(), "modules_to_save": self._whole or None}
        settings |= {"base_model_name_or_path": name, "inference_mode": True}
        content = json.dumps(
            settings, indent=2, sort_keys=True, default=sorted
        )  # `peft` uses sets, which have no order
        write_file(folder / ADAPTER_CONFIG_FILE, [content.encode() + b"\n"], disk)
        named = {peft_name(name): tensor for name, tensor in tensors.items()}
        write_tensors(folder / "adapter_model.safetensors", named, {"format": "pt"}, disk)


def serve_adapters(causal_lm: Any, loras: Sequence[Lora]) -> list[ServedAdapter]:
    """Put adapters into a model, and return them in the same order. If there are several, activate
    one before each pass."""
    # With an adapter, the model has further linear layers, so choose the layers of all first.
    chosen = [_adapted_layers(causal_lm, lora) for lora in loras]
    served: list[ServedAdapter] = []
    for number, (lora, layers) in enumerate(zip(loras, chosen, strict=True)):
        name = f"{_NAME}{number or ''}"
        settings = _peft_settings(causal_lm, lora, layers, "CAUSAL_LM")
        with warnings.catch_warnings(action="ignore"):  # `peft` warns of every further adapter
            inject_adapter_in_model(settings, causal_lm, name)
        served.append(ServedAdapter(causal_lm, name))
    return served


@dataclass(frozen=True)
class ServedAdapter:
    """One of the adapters in a model that only generates."""

    causal_lm: Any
    name: str

    @cached_property
    def _layers(self) -> list[LoraLayer]:
        return [module for module in self.causal_lm.modules() if isinstance(module, LoraLayer)]

    def activate(self) -> None:
        """Let the model compute with this adapter instead of another."""
        for layer in self._layers:
            # `set_adapter` would also change which parameters require gradients.
            layer._active_adapter = [self.name]

    def tensors(self) -> dict[str, Tensor]:
        """Map published names to the adapter's parameters."""
        end = re.compile(rf"\.(lora_A|lora_B|lora_magnitude_vector)\.{self.name}\.weight$")
        return {
            peft_name(end.sub(rf".\1.{_NAME}.weight", name)): parameter.detach()
            for name, parameter in self.causal_lm.named_parameters()
            if end.search(name)
        }


def check_layers(model: str | Path, lora: Lora) -> None:
    """Check that an adapter's targets match layers of a model. Raises UserError if a target matches
    none."""
    settings = training_settings(model, find_model_config(model).parent)
    with refusals_named(model, "cannot be trained"), torch.device("meta"):
        causal_lm = auto_class(settings).from_config(settings)
    _adapted_layers(causal_lm, lora)


def _adapted_layers(causal_lm: Any, lora: Lora) -> list[str]:
    """Return the names of the linear layers to adapt; none are in heads and vision layers."""
    scalar_head = getattr(causal_lm, SCALAR_HEAD.removesuffix(".weight"), None)
    heads = (causal_lm.get_output_embeddings(), scalar_head)
    linear = [
        name
        for name, module in causal_lm.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not any(module is head for head in heads)
    ]
    if is_type_that_sees(causal_lm.config):
        linear = [name for name in linear if f".{LANGUAGE}." in f".{name}"]
    ends = {name.rpartition(".")[2]: name for name in linear}
    refused = {end: why for end, name in ends.items() if (why := _refused_by_peft(causal_lm, name))}
    fit = [name for name in linear if name.rpartition(".")[2] not in refused]
    owner = f"model {str(causal_lm.config.name_or_path)!r} ({type(causal_lm).__name__})"
    if not fit:
        raise UserError(
            f"lora=Lora(...): {owner} has no linear layer that can have an adapter; leave lora out"
        )
    if lora.dora and any(isinstance(causal_lm.get_submodule(name), Conv1D) for name in fit):
        raise UserError(
            f"Lora.dora: {owner} stores its weights transposed (Conv1D), which DoRA does not support; leave dora out"
        )
    if lora.targets == "all-linear":
        return fit
    for target in lora.targets:
        last = target.rpartition(".")[2]
        if last in refused:
            raise UserError(
                f"Lora.targets: {target!r} of {owner} can have no adapter: {refused[last]}; "
                "take some of "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in fit}))}"
            )
    check_targets(lora.targets, fit, f"the backbone of {owner}")
    return [name for name in fit if lora.is_on(name)]


def _refused_by_peft(causal_lm: Any, name: str) -> str:
    """Return why `peft` cannot adapt a linear layer with this name, or "". In a mixture of experts,
    `peft` takes dense MLP layers for experts; fused Mamba kernels read some projections
    directly."""
    settings = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(settings, causal_lm, None)
        _check_lora_target_modules_mamba(settings, causal_lm, name.rpartition(".")[2])
    except ValueError as error:
        if "fused" not in str(error):
            return "fused kernels of Mamba read its weight"
        return "its name stands for the experts"
    return "" if settings.target_modules else "its name stands for the experts"


def _peft_settings(causal_lm: Any, lora: Lora, layers: list[str], task: str) -> LoraConfig:
    stored_transposed = isinstance(causal_lm.get_submodule(layers[0]), Conv1D)
    return LoraConfig(
        fan_in_fan_out=stored_transposed,
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]: any number
        target_modules=layers,
        use_dora=lora.dora,
        task_type=task,
    )


@contextmanager
def _hollow(layers: list[Any]) -> Iterator[None]:
    """Give layers on the meta device zero weights on the host, without memory, because `peft`
    creates its parameters on the device of the weights."""
    weights = [layer.weight for layer in layers]
    for layer, weight in zip(layers, weights, strict=True):
        zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        layer.weight = nn.Parameter(zeros, requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = weight


def is_adapter(name: str) -> bool:
    """Return whether a parameter of the model belongs to the adapter.

    >>> is_adapter("layers.0.q_proj.lora_A.default.weight"), is_adapter("layers.0.q_proj.base_layer.weight")
    (True, False)
    """
    return _PARAMETER.search(name) is not None


def is_trained(name: str) -> bool:
    """Return whether training changes a parameter of a model with an adapter: it belongs to the
    adapter or to a scalar head.

    >>> is_trained("layers.0.q_proj.lora_A.default.weight"), is_trained("score.weight"), is_trained("lm_head.weight")
    (True, True, False)
    """
    return is_adapter(name) or name == SCALAR_HEAD


def measured_weight(name: str) -> str | None:
    """Return the name of the weight whose row norms initialize a DoRA parameter; None for other
    parameters.

    >>> measured_weight("layers.0.q_proj.lora_magnitude_vector.default.weight")
    'layers.0.q_proj.base_layer.weight'
    """
    path, found, _ = name.rpartition(".lora_magnitude_vector.")
    return f"{path}.base_layer.weight" if found else None


def merged_weight(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None = None
) -> Tensor:
    """Merge a weight [out, in] with its adapter matrices a [rank, in] and b [out, rank]: W + s B A
    (arXiv:2106.09685, eq. 3), in float32. `magnitude` ([out]) sets the row norms of the result
    (DoRA, arXiv:2402.09353); None leaves them unchanged.

    >>> merged_weight(torch.eye(2), torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [0.0]]), 2.0).tolist()
    [[3.0, 0.0], [0.0, 1.0]]
    """
    merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
    if magnitude is not None:
        merged *= (magnitude.float() / torch.linalg.norm(merged, dim=1))[:, None]
    return merged


def shared_parts(*, rows: bool) -> tuple[str, str]:
    """Return the two linear layers inside a LoRA layer to split over tensor-parallel ranks: the
    base layer, and B to split rows or A to split columns. The remaining matrix has equal gradients
    on all ranks."""
    return "base_layer", f"{'lora_B' if rows else 'lora_A'}.{_NAME}"


def peft_name(name: str) -> str:
    """Return the name of a model's parameter in `peft` files.

    >>> peft_name("model.q_proj.lora_A.default.weight"), peft_name("model.q_proj.lora_magnitude_vector.default.weight")
    ('base_model.model.model.q_proj.lora_A.weight', 'base_model.model.model.q_proj.lora_magnitude_vector')
    """
    short = name.replace(f".lora_magnitude_vector.{_NAME}.weight", ".lora_magnitude_vector")
    return "base_model.model." + short.replace(f".{_NAME}.", ".")
