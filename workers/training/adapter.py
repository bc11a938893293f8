"""Adapter: the LoRA layers that `peft` puts into a model, their weights merged, and the files in which `peft` keeps them.

The layers stand inside the `transformers` model, which stays what it is. A linear layer NAME becomes

    NAME.base_layer.weight                              W, frozen, in the dtype of computation
    NAME.lora_A.default.weight, NAME.lora_B.default.weight
    NAME.lora_magnitude_vector.default.weight           with DoRA

A scalar head (`scalar_head.py`) is trained as a whole beside them, as one of the "modules to save" of `peft`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
"""What `peft` calls the one adapter."""
_PARAMETER = re.compile(rf"\.(lora_A|lora_B|lora_magnitude_vector)\.{_NAME}\.weight$")


class Adapter:
    """LoRA layers in place of linear layers of a model.

    Args:
        causal_lm: a `transformers` model in float32 on the meta device, changed in place: its parameters are frozen, and of `dtype`; all
            but those of a scalar head.
        seed: what A is drawn from.
    """

    made: dict[str, Tensor]
    """What its parameters begin as, on the host in float32, by name; the lengths of DoRA as zeros (see `measured_weight`). It is emptied
    when the model has taken them over."""

    def __init__(self, causal_lm: Any, lora: Lora, dtype: torch.dtype, seed: int) -> None:
        self._causal_lm = causal_lm
        self.travels_alone = lora.published == "adapter"
        """Whether it is published without the model."""
        scalar = SCALAR_HEAD.removesuffix(".weight")
        self._whole = [scalar] if hasattr(causal_lm, scalar) else []
        chosen = _adapted_layers(causal_lm, lora)
        self._config = _peft_settings(causal_lm, lora, chosen, "SEQ_CLS" if self._whole else "CAUSAL_LM")
        with (
            torch.random.fork_rng(devices=[]),
            _hollow([causal_lm.get_submodule(name) for name in chosen]),
        ):
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
        """The model as it was without the adapter; for forward passes without a gradient."""
        layers = [module for module in self._causal_lm.modules() if isinstance(module, LoraLayer)]
        # Not `enable_adapters`, which also freezes the parameters: FSDP looks once, at the first pass, at which of them train.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def merged(self, name: str, tensor: Tensor, adapter: Mapping[str, Tensor]) -> tuple[str, Tensor]:
        """A tensor of the model as it was without the adapter, by its name there, with the adapter's part in it.

        Args:
            name: in the model with the adapter.
            tensor: full, of any dtype; not changed.
            adapter: full parameters in float32, by their names; those of this layer at least.

        Returns:
            (name, a new float32 tensor where the layer has an adapter, or else the tensor itself).
        """
        path, found, what = name.rpartition(".base_layer.")
        if not found or what != "weight":
            return name.replace(".base_layer.", "."), tensor
        layer = self._causal_lm.get_submodule(path)
        a, b, magnitude = (
            adapter.get(f"{path}.{part}.{_NAME}.weight")
            for part in ("lora_A", "lora_B", "lora_magnitude_vector")
        )
        assert a is not None and b is not None
        transposed = isinstance(layer.base_layer, Conv1D)  # GPT-2 stores [in, out]
        merged = merged_weight(tensor.T if transposed else tensor, a, b, layer.scaling[_NAME], magnitude)
        return f"{path}.weight", merged.T.contiguous() if transposed else merged

    def write(self, folder: Path, tensors: Mapping[str, Tensor], source: Path, disk: Disk) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` loads.

        Args:
            tensors: full parameters that are trained, on the host, in float32, by their names.
            source: folder of the model that it belongs to: its tokenizer and chat template are copied.
        """
        folder.mkdir(parents=True, exist_ok=True)
        copy_companions(folder, source, disk)
        model = Path(self._causal_lm.name_or_path)  # or the name of one in the Hugging Face cache
        name = str(model.resolve()) if model.is_dir() else self._causal_lm.name_or_path
        # Set only now: `peft` would put a copy of the head beside the head.
        settings = {**self._config.to_dict(), "modules_to_save": self._whole or None}
        settings |= {"base_model_name_or_path": name, "inference_mode": True}
        content = json.dumps(settings, indent=2, sort_keys=True, default=sorted)  # its sets have no order
        write_file(folder / ADAPTER_CONFIG_FILE, [content.encode() + b"\n"], disk)
        named = {peft_name(name): tensor for name, tensor in tensors.items()}
        write_tensors(folder / "adapter_model.safetensors", named, {"format": "pt"}, disk)


def serve_adapter(causal_lm: Any, lora: Lora) -> None:
    """Put an adapter into a model that generates; it begins as nothing, and is overwritten by those that arrive.

    Args:
        causal_lm: a `transformers` model with its weights, changed in place.
    """
    layers = _adapted_layers(causal_lm, lora)
    inject_adapter_in_model(_peft_settings(causal_lm, lora, layers, "CAUSAL_LM"), causal_lm, _NAME)


def adapter_of(causal_lm: Any) -> dict[str, Tensor]:
    """The parameters of a model's adapter, by the names under which they are published.

    Args:
        causal_lm: a `transformers` model with an adapter.
    """
    return {peft_name(name): p.detach() for name, p in causal_lm.named_parameters() if is_adapter(name)}


def check_layers(model: str | Path, lora: Lora) -> None:
    """Check the targets of an adapter against the layers of a model, which is built without weights.

    Raises:
        UserError: names the target that matches no layer, and the targets that do.
    """
    settings = training_settings(model, find_model_config(model).parent)
    with refusals_named(model, "cannot be trained"), torch.device("meta"):
        causal_lm = auto_class(settings).from_config(settings)
    _adapted_layers(causal_lm, lora)


def _adapted_layers(causal_lm: Any, lora: Lora) -> list[str]:
    """Names of the linear layers that get an adapter: none of the heads, and in a model with vision only layers of its language model.

    Raises:
        UserError: a target matches no layer that can have an adapter, or the model has no such layer.
    """
    heads = (
        causal_lm.get_output_embeddings(),
        getattr(causal_lm, SCALAR_HEAD.removesuffix(".weight"), None),
    )
    linear = [
        name
        for name, module in causal_lm.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not any(module is head for head in heads)
    ]
    if is_type_that_sees(causal_lm.config):
        linear = [name for name in linear if f".{LANGUAGE}." in f".{name}"]
    refused = {name.rpartition(".")[2]: name for name in linear}
    refused = {
        last: reason for last, name in refused.items() if (reason := _refused_by_peft(causal_lm, name))
    }
    fit = [name for name in linear if name.rpartition(".")[2] not in refused]
    owner = f"model {str(causal_lm.config.name_or_path)!r} ({type(causal_lm).__name__})"
    if not fit:
        raise UserError(
            f"lora=Lora(...): {owner} has no linear layer that can have an adapter; leave lora out"
        )
    if lora.dora and any(isinstance(causal_lm.get_submodule(name), Conv1D) for name in fit):
        raise UserError(
            f"Lora.dora: {owner} stores its weights transposed (Conv1D), which DoRA does not measure; leave dora out"
        )
    if lora.targets == "all-linear":
        return fit
    for target in lora.targets:
        last = target.rpartition(".")[2]
        if last in refused:
            raise UserError(
                f"Lora.targets: {target!r} of {owner} can have no adapter: {refused[last]}; take some of "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in fit}))}"
            )
    check_targets(lora.targets, fit, f"the backbone of {owner}")
    return [name for name in fit if any(f".{name}".endswith(f".{target}") for target in lora.targets)]


def _refused_by_peft(causal_lm: Any, name: str) -> str:
    """The reason why `peft` cannot put an adapter on a linear layer of this name. Empty if it can.

    In mixtures of experts, `peft` maps the names of a dense MLP to the experts. `transformers` stores their weights stacked, and Weft does
    not support adapters on stacked weights. In models with Mamba layers, `peft` refuses the projections that fused kernels read.
    """
    settings = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(settings, causal_lm, None)
        _check_lora_target_modules_mamba(settings, causal_lm, name.rpartition(".")[2])
    except ValueError as error:
        return (
            "its name stands for the experts"
            if "fused" in str(error)
            else "fused kernels of Mamba read its weight"
        )
    return "" if settings.target_modules else "its name stands for the experts"


def _peft_settings(causal_lm: Any, lora: Lora, layers: list[str], task: str) -> LoraConfig:
    stored_transposed = isinstance(causal_lm.get_submodule(layers[0]), Conv1D)
    return LoraConfig(
        fan_in_fan_out=stored_transposed,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=layers,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type=task,
    )


@contextmanager
def _hollow(layers: list[Any]) -> Iterator[None]:
    """Give layers on the meta device weights of zeros on the host, which take no memory: `peft` draws parameters where it finds those."""
    weights = [layer.weight for layer in layers]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(
            torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False
        )
    try:
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = weight


def is_adapter(name: str) -> bool:
    """Whether a parameter of the model belongs to the adapter.

    >>> is_adapter("layers.0.q_proj.lora_A.default.weight"), is_adapter("layers.0.q_proj.base_layer.weight")
    (True, False)
    """
    return _PARAMETER.search(name) is not None


def is_trained(name: str) -> bool:
    """Whether a parameter of a model with an adapter is trained: those of the adapter, and the scalar head, if there is one.

    >>> is_trained("layers.0.q_proj.lora_A.default.weight"), is_trained("score.weight"), is_trained("lm_head.weight")
    (True, True, False)
    """
    return is_adapter(name) or name == SCALAR_HEAD


def measured_weight(name: str) -> str | None:
    """The weight whose rows' lengths a parameter of DoRA begins as, by name; None: it is no such parameter.

    >>> measured_weight("layers.0.q_proj.lora_magnitude_vector.default.weight")
    'layers.0.q_proj.base_layer.weight'
    """
    path, found, _ = name.rpartition(".lora_magnitude_vector.")
    return f"{path}.base_layer.weight" if found else None


def merged_weight(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None = None
) -> Tensor:
    """One weight in place of the weight and its adapter: W + s B A (arXiv:2106.09685, eq. 3), in float32.

    Args:
        weight: [out, in].
        a, b: [rank, in] and [out, rank].
        scaling: s.
        magnitude: [out], lengths that the rows of the result get (arXiv:2402.09353); None: those that they have.

    >>> merged_weight(torch.eye(2), torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [0.0]]), 2.0).tolist()
    [[3.0, 0.0], [0.0, 1.0]]
    """
    merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
    if magnitude is not None:
        merged *= (magnitude.float() / torch.linalg.norm(merged, dim=1))[:, None]
    return merged


def shared_parts(*, rows: bool) -> tuple[str, str]:
    """The linear layers inside a LoRA layer that tensor-parallel ranks share, where they share the layer that it stands for.

    In a layer whose rows they share, B is shared in the same way and every rank has all of A; where they share columns it is the other way
    round. A matrix that is not shared gets the same gradient on all ranks.
    """
    return "base_layer", f"{'lora_B' if rows else 'lora_A'}.{_NAME}"


def peft_name(name: str) -> str:
    """The name of a parameter in the files of `peft`.

    Args:
        name: in the model.

    >>> peft_name("model.q_proj.lora_A.default.weight"), peft_name("model.q_proj.lora_magnitude_vector.default.weight")
    ('base_model.model.model.q_proj.lora_A.weight', 'base_model.model.model.q_proj.lora_magnitude_vector')
    """
    short = name.replace(f".lora_magnitude_vector.{_NAME}.weight", ".lora_magnitude_vector")
    return "base_model.model." + short.replace(f".{_NAME}.", ".")
