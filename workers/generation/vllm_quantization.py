"""Quantised weights in vLLM: each version arrives unquantised, and is quantised layer by layer.

vLLM's linear layers keep an unquantised loading format, so the trainer's tensors are received, checked
and written as in any engine (`resharding/vllm_writer.py`). When a layer is complete, vLLM calls
`process_weights_after_loading`, which quantises the weight and gives the result to the kernels of
vLLM's `compressed-tensors` schemes. No quantised file and no calibration data are needed.

    scheme   weight                        scale                             activations
    int8     int8, -127 to 127             max |w| / 127 of an output row    int8 per token
    fp8      float8_e4m3fn                 max |w| / 448 of an output row    fp8 per token
    w4a16    4 bits, -8 to 7               max |w| / 7.5 of a group          not quantised

Only linear layers are quantised. Embeddings, the output head, norms and biases keep their dtype. With
tensor parallelism, each rank scales the part of a row that it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Int8,
    CompressedTensorsWNA16,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import pack_quantized_values_into_int32
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types
from vllm.utils.torch_utils import set_default_torch_dtype

from ...resharding.vllm_writer import with_class_of
from .quantization import group_size, method_name

# Quantisers. They round half to even. A row or group of zeros gets the smallest positive scale.


def to_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantise a weight [rows, columns]. Return `weight` (int8 [rows, columns]) and `weight_scale`
    (float32 [rows, 1]). A NaN makes its row NaN."""
    weight = weight.float()
    scale = _scale(weight, 127, torch.float32)
    codes = (weight / scale).round_().clamp_(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def to_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantise a weight [rows, columns]. Return `weight` (float8_e4m3fn [rows, columns]) and
    `weight_scale` (float32 [rows, 1])."""
    weight, dtype = weight.float(), torch.float8_e4m3fn
    largest = torch.finfo(dtype).max
    scale = _scale(weight, largest, torch.float32)
    codes = (weight / scale).clamp_(-largest, largest)
    return {"weight": codes.to(dtype), "weight_scale": scale}


def to_w4a16(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Quantise a weight [rows, columns] in groups of `group` columns. Return `weight_packed` (int32
    [rows, columns / 8]: eight codes plus 8, the first in the lowest bits), `weight_scale` ([rows,
    groups], in the dtype of the weight) and `weight_shape`."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // group, group)
    scale = _scale(groups, 7.5, weight.dtype)
    # The kernel multiplies by the rounded scale, so divide by it.
    codes = (groups / scale.float()).round_().clamp_(-8, 7).to(torch.int32).view(rows, columns)
    return {
        "weight_packed": pack_quantized_values_into_int32(codes + 8, scalar_types.uint4b8, 1),
        "weight_scale": scale.squeeze(-1),
        "weight_shape": torch.tensor([rows, columns], device=weight.device),
    }


def _scale(weight: torch.Tensor, largest: float, dtype: torch.dtype) -> torch.Tensor:
    scale = weight.abs().amax(-1, keepdim=True).div_(largest).to(dtype)
    return scale.clamp_(min=torch.finfo(dtype).tiny)


# vLLM's side


class _QuantisedLinear(LinearMethodBase):
    """A linear layer that loads an unquantised `weight`, and computes with what `quantise` makes of it.

    loading format: `weight`  ──process_weights_after_loading──>  the parameters of the scheme's kernel
    """

    uses_meta_device = True  # vLLM's loader then gives memory to one layer at a time
    arriving_bytes = 0
    """[bytes] Size of the layer's unquantised weight, which the engine holds while it arrives."""
    _scheme: CompressedTensorsScheme
    _dtype: torch.dtype
    _parameters: dict[str, torch.Tensor]
    """The scheme's parameters without memory."""
    _scale_of_onednn: torch.Tensor

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def new_scheme(self, columns: int) -> CompressedTensorsScheme:
        """Create the scheme for a weight with this many columns."""
        raise NotImplementedError

    def quantise(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the scheme's parameters for an unquantised weight."""
        raise NotImplementedError

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader: Any = extra_weight_attrs.get("weight_loader")
        self._scheme, self._dtype = self.new_scheme(input_size_per_partition), params_dtype
        before = {*layer._parameters}
        with torch.device("meta"):
            self._scheme.create_weights(
                layer=layer,
                input_size_per_partition=input_size_per_partition,
                output_partition_sizes=output_partition_sizes,
                input_size=input_size,
                output_size=output_size,
                params_dtype=params_dtype,
                weight_loader=loader,
            )
            shape = sum(output_partition_sizes), input_size_per_partition
            weight = torch.empty(shape, dtype=params_dtype)
        made = {name: layer._parameters.pop(name) for name in {*layer._parameters} - before}
        self._parameters = {name: each for name, each in made.items() if each is not None}
        for name in made.keys() - self._parameters:  # kernels read these as None
            layer.register_parameter(name, None)
        self.arriving_bytes = weight.nbytes
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return  # vLLM calls it for each layer, and again after the first load
        bias = getattr(layer, "bias", None)
        memory: Any = getattr(bias, "data", None)
        found = self.quantise(layer.weight.data)
        del layer.weight
        for name, wanted in self._parameters.items():
            layer.register_parameter(name, with_class_of(wanted, found[name]))
        # Kernels take the output's dtype from torch's default.
        with set_default_torch_dtype(self._dtype):
            self._scheme.process_weights_after_loading(layer)
        if getattr(layer, "weight", layer) is None:
            # oneDNN has a copy of the weight, and a pointer to the scale, which vLLM's reload would free.
            # The reload only restores parameters that are not None.
            layer.weight = torch.nn.Parameter(found["weight"].new_empty(0), requires_grad=False)
            self._scale_of_onednn = found["weight_scale"]
        if bias is not None and (bias.shape, bias.dtype) == (memory.shape, memory.dtype):
            # Marlin reorders the bias in new memory, but a CUDA graph reads the old one.
            memory.copy_(bias.data)
            bias.data = memory
        layer._already_called_process_weights_after_loading = True

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._scheme.apply_weights(layer, x, bias)


class _Int8Linear(_QuantisedLinear):
    def new_scheme(self, columns: int) -> CompressedTensorsScheme:
        return CompressedTensorsW8A8Int8(
            strategy=QuantizationStrategy.CHANNEL, is_static_input_scheme=False, input_symmetric=True
        )

    def quantise(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return to_int8(weight)


class _Fp8Linear(_QuantisedLinear):
    def new_scheme(self, columns: int) -> CompressedTensorsScheme:
        weights = QuantizationArgs(
            num_bits=8, type=QuantizationType.FLOAT, strategy=QuantizationStrategy.CHANNEL
        )
        return CompressedTensorsW8A8Fp8(weights, is_static_input_scheme=False)

    def quantise(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return to_fp8(weight)


class _W4a16Linear(_QuantisedLinear):
    _group = 0

    def new_scheme(self, columns: int) -> CompressedTensorsScheme:
        size = group_size(columns)
        if size is None:
            raise ValueError(f"layer {self._prefix}: w4a16 cannot split {columns} columns into groups")
        self._group = size
        return CompressedTensorsWNA16(
            strategy="group", num_bits=4, group_size=size, layer_name=self._prefix
        )

    def quantise(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return to_w4a16(weight, self._group)


class _QuantisedModel(QuantizationConfig):
    """vLLM's configuration of a model whose linear layers use one of the methods above."""

    method: type[_QuantisedLinear]
    name: str
    min_capability: int
    """Compute capability of the oldest GPU with the kernels, such as 89 for 8.9."""

    def get_name(self) -> Any:
        return self.name

    @classmethod
    def get_min_capability(cls) -> int:
        return cls.min_capability

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        half = [torch.bfloat16, torch.float16]
        return [torch.float32, *half] if current_platform.is_cpu() else half

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        raise NotImplementedError("the weights arrive unquantised, so no file describes them")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return self.method(prefix) if isinstance(layer, LinearBase) else None


@register_quantization_config(method_name("int8"))
class Int8Model(_QuantisedModel):
    method, name = _Int8Linear, method_name("int8")
    min_capability = CompressedTensorsW8A8Int8.get_min_capability()


@register_quantization_config(method_name("fp8"))
class Fp8Model(_QuantisedModel):
    method, name = _Fp8Linear, method_name("fp8")
    min_capability = CompressedTensorsW8A8Fp8.get_min_capability()


@register_quantization_config(method_name("w4a16"))
class W4a16Model(_QuantisedModel):
    method, name = _W4a16Linear, method_name("w4a16")
    min_capability = CompressedTensorsWNA16.get_min_capability()
