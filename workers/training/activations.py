"""Memory of a pass beyond the parameters, measured by running the model on meta tensors.

The pass runs the modules, attention and head of training, and counts every live tensor. It takes a
fraction of a second for any model size, and needs no table of model families.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...dataflow.errors import WeftError
from ..models.weight_files import weight_files
from .adapter import Adapter
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


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors created inside the context, except the tensors `known` and
    their views.

    >>> known = torch.ones(8)
    >>> with _LiveBytes([known]) as live:
    ...     _ = (known * 2).sum() + known[0]
    >>> live.peak
    36
    """

    def __init__(self, known: Any = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held: dict[int, int] = {each.untyped_storage()._cdata: 0 for each in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and (storage := made.untyped_storage())._cdata not in self._held:
                self.resized(storage, 0)
        return out

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Count a storage that an operation created or resized in place; no operation reports a
        resize. `before` is its previous size in bytes."""
        if storage._cdata not in self._held:
            weakref.finalize(storage, self._ended, storage._cdata)
        self._held[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes() - before
        self.peak = max(self.peak, self.now)

    def _ended(self, storage: int) -> None:
        self.now -= self._held.pop(storage, 0)


class _EqualRows(PackedSequences):  # used for its shapes only, so its device may be absent
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
    *,
    rows: int,
    length: int,
    predicted: int,
    head: Head = "logprobs",
    dtype: str = "float32",
    trains: bool = True,
    gradients_stay: bool = True,
    lora: Lora | None = None,
    checkpointing: Recomputed = False,
    gpu_bytes: int = 0,
) -> int:
    """Return the peak bytes of a pass, without the parameters. A training pass includes new
    gradients. `model` is the user's name for the model; `folder` contains its settings.

    Args:
        rows, length, predicted: number of rows in the microbatch, tokens per row, and the number of
            tokens that get a log-probability. A reward head reads all tokens; other models read all
            but the last.
        gradients_stay: whether gradients of earlier microbatches exist when the pass starts.
        lora: the adapter to train. The result excludes its own small gradients.
        gpu_bytes: memory of the target GPU, which determines the size of logit chunks; 0 for a CPU.

    Raises:
        UserError: the folder's files do not belong to the model.
        ValueError: the model's forward or backward pass depends on tensor values.
    """
    skeleton = build_causal_lm(
        model, folder, head, 0, activation_checkpointing=checkpointing if trains else False
    )
    if files := weight_files(model, folder):
        # Run only for its checks, which reject files that do not belong to the model.
        StoredWeights(model, files, skeleton)
    response = ResponseModel(skeleton.causal_lm, scalar=head != "logprobs")
    response.requires_grad_(trains)
    if trains and lora is not None:
        with torch.device("meta"):  # without values
            Adapter(skeleton.causal_lm, lora, torch.float32, 0)
    response.to(getattr(torch, dtype))
    packs = may_pack(skeleton.causal_lm)
    attention = NAME if packs else "sdpa"
    # There are no weights to compare results with, so assume the fastest way.
    way = Agreement(packs, shares_prompts=False, attention=attention, head_form=HeadForm(), routers=())
    way.put_on(response)
    response.chunk_bytes = head_chunk_bytes(gpu_bytes)
    stays = gradients_stay and lora is None
    read = max(1, length - (head != "rewards"))
    packed = _EqualRows.of_lengths([read] * rows, "cuda" if gpu_bytes else "cpu")
    number, drops = rows * predicted, stays or lora is not None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(trains):
            empty = response.to_empty(device="cpu")
            return _peak(empty, packed, number, trains=trains, stays=stays, drops=drops)
    except WeftError:
        raise
    except Exception as error:
        raise ValueError(f"a pass of {model} cannot be computed without values: {error}") from error


def _peak(
    model: ResponseModel, rows: _EqualRows, number: int, *, trains: bool, stays: bool, drops: bool
) -> int:
    """Return the peak bytes of a pass with `number` predicted tokens. The pass frees new gradients
    if gradients existed from the start (`stays`) or do not belong to the model (`drops`)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with _LiveBytes([*model.parameters(), *model.buffers()]) as live:
        if drops:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter: setattr(parameter, "grad", None)
                )
        outputs, hidden = model.run_backbone(
            torch.zeros(int(rows.lengths.sum()), dtype=torch.long), rows
        )
        hidden = hidden.index_select(0, torch.arange(number))
        if model.scalar:
            result = model.causal_lm.score(hidden.float())[:, 0]
        else:
            targets = torch.zeros(number, dtype=torch.long)
            result, _ = model.logprobs_of(outputs, hidden, targets, None, entropy=False)
        del outputs, hidden  # free them before the backward pass
        if trains:
            result.sum().backward()
        # float32 gradients of earlier microbatches
        gradients = sum(4 * p.numel() for p in parameters) if stays and trains else 0
        return live.peak + gradients
