"""Costs of a transformer on given devices, without a run: seconds of passes and of decoding, sequences
that fit, and bytes that devices exchange.

    costs = TransformerCosts.of("Qwen/Qwen3-8B", device("H100"), tensor=2)
    costs.training([4096] * 4, predicted=[3072] * 4)      # Prediction(seconds=..., source=..., error=...)
    costs.decode_step(batch=256, context=2048)
    costs.concurrent(32_768)                              # sequences at once

`Transformer` (`workers/models/transformer.py`) counts operations and parameters, `phase_memory.py`
counts memory. `update_cost` and `generation` give costs to the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...dataflow.errors import UserError
from ...workers.models.model_folder import read_model_config
from ...workers.models.transformer import Transformer
from ...workers.training.memory import BYTES, FLOAT32
from ..simulation.costs import Generation, LinearCost, LogNormal, fit_terms
from .devices import Device

# Shares of a device's peaks without a measurement, and the relative error of times from them. The
# ranges cover the published figures of `benchmarks/gpu/published.py` and of Megatron-LM
# (arXiv:2104.04473, table 1); nothing was measured on a GPU here.

ASSUMED_UTILISATION, UTILISATION_ERROR = 0.35, 0.4
"""Share of the peak FLOP/s in passes: 0.25 to 0.58 is within the error."""
ASSUMED_BANDWIDTH, BANDWIDTH_ERROR = 0.6, 0.5
"""Share of the memory bandwidth in decoding. Small models are slower, because the engine takes
milliseconds of each step."""
USED_MEMORY = 0.9
"""Share of a GPU's memory that an engine uses, vLLM's default."""


@dataclass(frozen=True)
class Prediction:
    seconds: float
    source: str
    """Origin of the rates, in words."""
    error: float | None
    """Relative error of `seconds`: measured if a fit gave the rates, else assumed. None if unknown."""

    def __str__(self) -> str:
        known = "unknown error" if self.error is None else f"± {self.error:.0%}"
        return f"{self.seconds:.4g} s ({known}; {self.source})"


@dataclass(frozen=True)
class DecodeFit:
    """Seconds of a decode step: a multiple of the roofline, a time per response, and a constant."""

    scale: float = 1 / ASSUMED_BANDWIDTH
    per_row_s: float = 0.0
    fixed_s: float = 0.0
    source: str = f"{ASSUMED_BANDWIDTH:.0%} of the peak bandwidth, assumed"
    error: float | None = BANDWIDTH_ERROR

    def seconds(self, batch: float, roofline_s: float) -> float:
        return self.scale * roofline_s + self.per_row_s * batch + self.fixed_s


_SUBSETS = tuple(chosen for number in (1, 2, 3) for chosen in combinations(range(3), number))


def fit_decode(measured: Mapping[int, float], roofline_s: Callable[[int], float]) -> DecodeFit:
    """Fit decode steps to measurements. The error is the largest relative error for a measured batch
    that the other batches predict, or None for fewer than three batches.

    Args:
        measured: responses in the batch -> [s] of a decode step, as rollouts record.
        roofline_s: number of responses -> [s] by the roofline.
    """
    if not measured or min(measured.values()) <= 0:
        raise UserError(f"a fit of decode steps needs seconds above 0 by batch, not {dict(measured)!r}")

    def fitted(batches: Sequence[int]) -> DecodeFit:
        terms = np.array([[roofline_s(batch), batch, 1.0] for batch in batches])
        seconds = np.array([measured[batch] for batch in batches])
        # Relative errors count, because small batches are fast.
        weights = fit_terms(terms / seconds[:, None], np.ones(len(batches)), _SUBSETS)
        return DecodeFit(*weights.tolist(), source=f"{len(measured)} measured batches", error=None)

    batches, errors = sorted(measured), list[float]()
    if len(batches) > 2:
        for left_out in batches:
            others = fitted([batch for batch in batches if batch != left_out])
            predicted = others.seconds(left_out, roofline_s(left_out))
            errors.append(abs(predicted / measured[left_out] - 1))
    return replace(fitted(batches), error=max(errors, default=None))


@dataclass(frozen=True)
class TransformerCosts:
    """Costs of one replica of a model: `tensor` devices that share each layer."""

    model: Transformer
    device: Device
    dtype: str = "bfloat16"
    tensor: int = 1
    utilisation: float | None = None
    """Share of the peak FLOP/s in passes, as the metric `GROUP/flops_utilisation` measures it; None
    assumes `ASSUMED_UTILISATION`."""
    decode: DecodeFit = DecodeFit()

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.model.heads % self.tensor:
            raise UserError(
                f"tensor={self.tensor} does not divide the model's {self.model.heads} attention heads"
            )
        self.device.peak_flops(self.dtype)  # refuses a dtype without a peak

    @classmethod
    def of(
        cls, model: str | Path, device: Device, *, dtype: str = "bfloat16", tensor: int = 1
    ) -> TransformerCosts:
        """Return the costs of a model in a folder or the cache, whose weights need not be there."""
        return cls(Transformer.of(read_model_config(model)), device, dtype, tensor)

    @property
    def width(self) -> int:
        """[bytes] of a weight in passes, and of keys and values."""
        return BYTES[self.dtype]

    # Passes

    def forward(
        self, tokens: ArrayLike, *, after: ArrayLike = 0, predicted: ArrayLike = 0
    ) -> Prediction:
        """Predict a forward pass, such as prefill or log-probabilities. For the arguments, see
        `Transformer.forward_flops`."""
        flops = self.model.forward_flops(tokens, after=after, predicted=predicted)
        return self._passes(flops, tokens, passes=1)

    def training(
        self,
        tokens: ArrayLike,
        *,
        after: ArrayLike = 0,
        predicted: ArrayLike = 0,
        adapter: bool = False,
        recomputes: bool = False,
    ) -> Prediction:
        """Predict a forward and a backward pass, without the exchange of gradients. For the
        arguments, see `Transformer.training_flops`."""
        about: dict[str, Any] = {
            "after": after,
            "predicted": predicted,
            "adapter": adapter,
            "recomputes": recomputes,
        }
        flops = self.model.training_flops(tokens, **about)
        return self._passes(flops, tokens, passes=2)

    def _passes(self, flops: float, tokens: ArrayLike, *, passes: int) -> Prediction:
        share = self.utilisation or ASSUMED_UTILISATION
        computing_s = flops / (self.tensor * self.device.peak_flops(self.dtype) * share)
        number = float(np.asarray(tokens, float).sum())
        sent = tensor_parallel_bytes(number, self.model.hidden, self.tensor, self.width) * passes / 2
        exchange_s = sent * len(self.model.layers) / self.device.node_bandwidth
        told = "measured" if self.utilisation else "assumed"
        source = f"table of devices: {share:.0%} of the peak of {self.device.name}, {told}"
        error = None if self.utilisation else UTILISATION_ERROR
        return Prediction(computing_s + exchange_s, source, error)

    # Decoding

    def least_decode_s(self, batch: int, context: float) -> float:
        """Return the least time of a decode step: reading weights, keys and values, or computing.

        Args:
            batch: number of responses.
            context: [tokens] mean length of the sequences so far.
        """
        read = self.model.read_bytes(batch, self.width) / self.tensor
        read += batch * self.kv_bytes(context)
        flops = self.model.forward_flops([1] * batch, after=context, predicted=[1] * batch)
        peak = self.device.peak_flops(self.dtype)
        return roofline_s(read, flops / self.tensor, self.device.memory_bandwidth, peak)

    def decode_step(self, batch: int, context: float) -> Prediction:
        """Predict a decode step of `batch` responses with `context` tokens each on average. Leaves out
        the exchange between tensor-parallel devices."""
        seconds = self.decode.seconds(batch, self.least_decode_s(batch, context))
        source = f"roofline of {self.device.name}: {self.decode.source}"
        return Prediction(seconds, source, self.decode.error)

    def fitted(self, measured: Mapping[int, float], context: float) -> TransformerCosts:
        """Return these costs with decode steps fitted to measurements (see `fit_decode`)."""
        return replace(
            self, decode=fit_decode(measured, lambda batch: self.least_decode_s(batch, context))
        )

    # Keys and values

    def kv_bytes(self, tokens: float) -> float:
        """Return the bytes of one sequence's keys and values on each device. Devices beyond the
        number of key heads hold copies."""
        parts = min(self.tensor, self.model.kv_heads)
        return self.model.kv_bytes(tokens, self.width) / parts

    def concurrent(self, context: int, *, share: float = USED_MEMORY) -> int:
        """Return how many sequences of `context` tokens fit next to the weights.

        Args:
            share: share of the memory for weights, keys and values.
        """
        free = share * self.device.memory_bytes - self.width * self.model.parameters / self.tensor
        return max_concurrent(free, self.kv_bytes(context))

    # Costs of the simulator

    def generation(
        self,
        lengths: LogNormal | tuple[tuple[int, ...], ...],
        *,
        context: float,
        max_num_seqs: int = 256,
        prompt_tokens: int = 0,
    ) -> Generation:
        """Return the cost of generation on one replica.

        Args:
            lengths: lengths of responses.
            context: [tokens] mean length of running sequences: the prompt, and about half a response.
            max_num_seqs: most responses at once.
            prompt_tokens: mean length of a prompt, which determines the time of prefill.
        """
        batches = {0, max_num_seqs, *(1 << power for power in range(max_num_seqs.bit_length()))}
        table = [(float(n), self.decode_step(max(1, n), context).seconds) for n in sorted(batches)]
        prefill = self.forward(prompt_tokens).seconds / prompt_tokens if prompt_tokens else 0.0
        return Generation(lengths=lengths, decode_step_s=table, prefill_s=prefill)

    def update_cost(
        self,
        tokens: int,
        *,
        predicted: int = 0,
        data: int = 1,
        bandwidth: float | None = None,
        adapter: bool = False,
        recomputes: bool = False,
    ) -> LinearCost:
        """Return the cost of an update with one optimizer step.

        Args:
            tokens, predicted: sizes of a typical row.
            data: number of replicas, which exchange gradients and weights once.
            bandwidth: [bytes/s] of the slowest link between them; by default, that within a node.

        Raises:
            UserError: `tokens` is not positive.
        """
        if tokens < 1:
            raise UserError(f"a typical row has at least one token, not tokens={tokens}")
        about: dict[str, Any] = {"predicted": predicted, "adapter": adapter, "recomputes": recomputes}
        row_s = self.training(tokens, **about).seconds
        trained = 0 if adapter else self.model.parameters / self.tensor
        exchanged = gradient_bytes(trained, data, FLOAT32)
        # AdamW reads parameters, gradients and two moments, and writes all but the gradients.
        stepped = 7 * FLOAT32 * trained / data
        fixed_s = exchanged / (bandwidth or self.device.node_bandwidth)
        fixed_s += stepped / (self.device.memory_bandwidth * ASSUMED_BANDWIDTH)
        return LinearCost(fixed_s=fixed_s, per_token_s=row_s / tokens)


def roofline_s(num_bytes: float, flops: float, bandwidth: float, peak_flops: float) -> float:
    """Return the least time of work that reads bytes and computes at the same time.

    >>> roofline_s(14e9, 14e9, bandwidth=2e12, peak_flops=312e12)
    0.007
    """
    return max(num_bytes / bandwidth, flops / peak_flops)


def max_concurrent(free_bytes: float, bytes_a_sequence: float) -> int:
    """Return how many sequences fit into the free memory; 0 if the weights alone do not fit.

    >>> max_concurrent(12e9, 5e9), max_concurrent(-1e9, 5e9)
    (2, 0)
    """
    return max(0, math.floor(free_bytes / bytes_a_sequence))


# Megatron-LM's formulas (arXiv:2104.04473). Bytes count what one device sends.


def stage_bytes(tokens: float, hidden: int, tensor: int = 1, width: int = 2) -> float:
    """Return the bytes of a microbatch's activations from one pipeline stage to the next. Each of the
    `tensor` ranks sends its part (section 4.1)."""
    return tokens * hidden * width / tensor


def tensor_parallel_bytes(tokens: float, hidden: int, tensor: int, width: int = 2) -> float:
    """Return the bytes for a layer, forward and backward: four all-reduces of activations (section 3.2).

    >>> tensor_parallel_bytes(100, hidden=10, tensor=2)
    8000.0
    """
    return 8 * tokens * hidden * (tensor - 1) / tensor * width


def gradient_bytes(parameters: float, data: int, width: int = 2) -> float:
    """Return the bytes of a step's all-reduce of gradients, or of the same work by FSDP: to reduce
    gradients and gather parameters (section 3.3.1)."""
    return 2 * (data - 1) / data * parameters * width


def batch_seconds(rows: int, microbatch: int, stages: int, forward_s: float, backward_s: float) -> float:
    """Return the time of a replica's batch in a pipeline without interleaving (equation 1).

    Args:
        rows, microbatch: rows of the batch, and of a microbatch.
        forward_s, backward_s: times of a microbatch on one stage.
    """
    return (rows / microbatch + stages - 1) * (forward_s + backward_s)


def best_microbatch(
    rows: int, stages: int, forward_s: Mapping[int, float], backward_s: Mapping[int, float]
) -> int:
    """Return the fastest microbatch size, given the times of each. The smallest one wins ties.

    >>> best_microbatch(8, 4, {1: 1.0, 4: 2.0}, {1: 2.0, 4: 4.0})  # 11 x 3 s against 5 x 6 s
    4
    """
    sizes = sorted(forward_s.keys() & backward_s.keys())
    return min(sizes, key=lambda b: batch_seconds(rows, b, stages, forward_s[b], backward_s[b]))


def best_checkpoints(layers: int, input_bytes: float, intermediate_bytes: float) -> float:
    """Return the number of checkpoints with the least memory (section 3.5).

    Args:
        input_bytes: size of a layer's input, which each checkpoint keeps.
        intermediate_bytes: size of all activations in a layer.
    """
    return math.sqrt(layers * intermediate_bytes / input_bytes)
