"""Activations: the memory of a pass beyond parameters, found by a pass of the model itself on tensors that have no memory.

No table of families is needed: the modules are those that are trained, attention and head are those of training, and every tensor that they
make is counted as long as it lives. A pass without memory takes a fraction of a second, whatever the size of the model.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from ...dataflow.errors import WeftError
from ..models.weight_files import weight_files
from .agreement import Agreement
from .causal_lm import build_causal_lm
from .engine import Head, Recomputed
from .head_logprobs import HeadForm
from .lora import Lora
from .memory import head_chunk_bytes
from .packed_attention import NAME, may_pack
from .packed_sequences import PackedSequences
from .response_model import ResponseModel
from .stored_weights import StoredWeights


@dataclass(frozen=True)
class PassShape:
    """The rows of a microbatch, all of one length."""

    rows: int
    length: int
    """Tokens of a row. A model with a head for rewards reads all of them, any other all but the last, which is only predicted."""
    predicted: int
    """Tokens of a row whose log-probability is computed."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside of it, for as long as they live.

    >>> known = torch.ones(8)
    >>> with LiveBytes([known]) as live:
    ...     _ = (known * 2).sum() + known[0]
    >>> live.peak
    36

    Args:
        known: tensors that are not counted, nor views of them.
    """

    def __init__(self, known: Any = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held: dict[int, int] = {each.untyped_storage()._cdata: 0 for each in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._count(made)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            self.resized(storage, 0)

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Count a storage that was made, or whose size was changed in place, which no operation shows.

        Args:
            before: bytes that it had.
        """
        if storage._cdata not in self._held:
            weakref.finalize(storage, self._ended, storage._cdata)
        self._held[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes() - before
        self.peak = max(self.peak, self.now)

    def _ended(self, storage: int) -> None:
        self.now -= self._held.pop(storage, 0)


class _EqualRows(PackedSequences):
    """Rows of one length, of which nothing has to be computed. They may belong to a device that is not there."""

    @property
    def positions(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.arange(self.longest).repeat(len(self.lengths))

    @property
    def padded_positions(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.arange(self.longest).expand(self.shape)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)


def pass_bytes(
    model: str | Path,
    folder: Path,
    shape: PassShape,
    *,
    head: Head = "logprobs",
    dtype: str = "float32",
    trains: bool = True,
    gradients_stay: bool = True,
    lora: Lora | None = None,
    checkpointing: Recomputed = False,
    gpu_bytes: int = 0,
) -> int:
    """Largest number of bytes that live in a pass, without parameters; with those of the gradients that it makes, if it trains.

    Args:
        model: what the user calls it.
        folder: where its settings are.
        shape: of the microbatch.
        dtype: in which it computes.
        trains: forward and backward; else forward alone.
        gradients_stay: gradients of earlier microbatches are there from the beginning.
        lora: the adapter that is trained. Its layers keep their inputs as if they were trained; its own gradients are small, and not
            counted.
        checkpointing: activations that are computed a second time.
        gpu_bytes: memory of the GPU that it is for, whose chunks of logits are larger; 0: a CPU.

    Raises:
        UserError: the files in the folder, if it has any, are not those of the model.
        ValueError: a pass of this model depends on the values of its tensors.
    """
    skeleton = build_causal_lm(
        model, folder, head, 0, activation_checkpointing=checkpointing if trains else False
    )
    if files := weight_files(model, folder):
        StoredWeights(model, files, skeleton)
    response = ResponseModel(skeleton.causal_lm, scalar=head != "logprobs").to(getattr(torch, dtype))
    packs = may_pack(skeleton.causal_lm)
    attention = NAME if packs else "sdpa"
    Agreement(packs, shares_prompts=False, attention=attention, head_form=HeadForm(), routers=()).put_on(
        response
    )
    response.chunk_bytes = head_chunk_bytes(gpu_bytes)
    response.requires_grad_(trains and lora is None)
    if trains and lora is not None:
        for name, layer in response.backbone.named_modules():
            if isinstance(layer, nn.Linear | Conv1D) and lora.is_on(name):
                layer.weight.requires_grad_(True)
    stays = gradients_stay and lora is None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(trains):
            return _peak(
                response.to_empty(device="cpu"),
                _EqualRows.of(
                    [max(1, shape.length - (head != "rewards"))] * shape.rows,
                    "cuda" if gpu_bytes else "cpu",
                ),
                shape.rows * shape.predicted,
                trains=trains,
                stays=stays,
                drops=stays or lora is not None,
            )
    except WeftError:
        raise
    except Exception as error:
        raise ValueError(f"a pass of {model} cannot be computed without values: {error}") from error


def _peak(
    model: ResponseModel, rows: _EqualRows, number: int, *, trains: bool, stays: bool, drops: bool
) -> int:
    """The largest number of bytes alive.

    Args:
        number: of tokens that are predicted.
        stays: all gradients are there from the beginning.
        drops: a gradient that is made is added to what is there, or is none of the model's own, and goes.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        if drops:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter: setattr(parameter, "grad", None)
                )
        outputs, hidden = model.run_backbone(torch.zeros(int(rows.lengths.sum()), dtype=torch.long), rows)
        hidden = hidden.index_select(0, torch.arange(number))
        if model.scalar:
            result = model.causal_lm.score(hidden.float())[:, 0]
        else:
            targets = torch.zeros(number, dtype=torch.long)
            result, _ = model.logprobs_of(outputs, hidden, targets, None, entropy=False)
        del outputs, hidden  # nobody holds them while gradients are computed
        if trains:
            result.sum().backward()
        gradients = sum(4 * p.numel() for p in parameters) if stays and trains else 0
        return live.peak + gradients
