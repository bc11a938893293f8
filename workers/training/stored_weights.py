"""Stored weights: read a model's tensors from its files, box by box.

Each rank reads only the boxes that it holds. Tensors in files often have other names, and some
tensors of the model combine several of them, such as fused experts. `transformers` knows both: this
module applies its renamings to names, and its conversions to one group of tensors at a time. If
`transformers` initializes a tensor that no file holds, or if there are no safetensors files, the
rank loads the complete model and logs that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...dataflow.errors import UserError, nearest
from ...dataflow.untrusted_text import show
from ...resharding.layout import Box, contiguous_strides
from ...resharding.weights import TensorPart
from ..models.model_folder import SCALAR_HEAD
from ..models.weight_files import weight_files
from .causal_lm import Skeleton, load_complete
from .safetensors_files import StoredTensor, open_tensors

_ALWAYS_UNEXPECTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers in older files that models compute today; `transformers` ignores them as well."""


def open_stored(
    model: str | Path, folder: Path, skeleton: Skeleton, *, share: tuple[int, int] = (0, 1)
) -> WeightReader:
    """Open the weights of a model that was built from the same folder. `model` is the user's name
    for it. Conversions change the tensors of the skeleton temporarily. `share` is this rank and the
    number of ranks, which divide checks that read files; the first rank logs anything unusual.
    Raises UserError if tensors are missing, unexpected or of another shape, or a file is damaged.
    """
    files = weight_files(model, folder)
    missing: list[str] = []
    if files:
        weights = StoredWeights(model, files, skeleton)
        if not weights.made_anew:
            weights.check_ties(share)
            return weights
        missing = weights.made_anew
    why = f"transformers initializes {missing[0]!r}" if missing else "there are no safetensors files"
    if share[0] == 0:
        show(f"model {str(model)!r}: each rank loads the complete model, because {why}")
    return _CompleteWeights(load_complete(model, folder))


class _CompleteWeights:
    def __init__(self, causal_lm: Any) -> None:
        self._tensors: dict[str, Tensor] = causal_lm.state_dict()
        self.bytes_read = sum(tensor.nbytes for tensor in self._tensors.values())
        self.conversions: list[Any] = getattr(causal_lm, "_weight_conversions", None) or []

    def read_box(self, name: str, box: Box) -> Tensor:
        return self._tensors[name][box.slices]


@dataclass(frozen=True, eq=False)
class _Conversion:
    """Tensors of the model that one conversion makes together."""

    keys: tuple[tuple[str, ...], ...]
    """Keys of the tensors in the files, for each pattern that they match."""
    stacked: bool
    """Whether the i-th slice of the result depends only on the i-th key of each pattern."""


class StoredWeights:
    """Weights in safetensors files. Raises UserError if tensors are missing, unexpected or of
    another shape, or a file is damaged."""

    def __init__(self, model: str | Path, files: Iterable[Path], skeleton: Skeleton) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._model, self._skeleton = model, skeleton
        self._causal_lm = skeleton.causal_lm
        self._tensors: dict[str, Tensor] = self._causal_lm.state_dict(keep_vars=True)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        try:
            self._stored = {key: stored for file in files for key, stored in open_tensors(file).items()}
        except OSError as error:
            raise UserError(
                f"model {str(model)!r}: {error.filename} cannot be read ({error.strerror})"
            ) from None
        except ValueError as error:
            raise UserError(f"model {str(model)!r}: {error}") from None
        self.bytes_read = 0
        self._mapping: list[Any] = get_model_conversion_mapping(self._causal_lm)
        self._keys: dict[str, str] = {}
        """Key in the files of each tensor that needs no conversion, by its name in the model."""
        self._converted: dict[str, _Conversion] = {}
        self._last: tuple[_Conversion, dict[str, Tensor]] | None = None
        """Cached result of the last conversion, since tensors of one conversion are often read one
        after the other."""
        unexpected = self._match()
        # After `_match`, which marks the conversions that it uses.
        self.conversions = [conversion for conversion in self._mapping if conversion.was_used()]
        """Conversions of `transformers` that were used; saving the model reverts them."""
        self._names = self._names_in_files()
        self._refuse_unexpected(unexpected)
        self.made_anew = self._missing()
        """Tensors that the files lack and that `transformers` initializes."""

    def read_box(self, name: str, box: Box) -> Tensor:
        """Return a box on the host, in the file's dtype, or float32 after a conversion."""
        name = self._names[name]
        if name in self._keys:
            return self._fetch(self._stored[self._keys[name]], box)
        conversion, full = self._converted[name], self._shapes[name]
        if conversion.stacked and box.shape[1:] == full[1:]:
            chosen = [keys[box.slices[0]] for keys in conversion.keys]
            return self._convert([key for keys in chosen for key in keys], {name: box.shape})[name]
        if self._last is None or self._last[0] is not conversion:
            self._last = None  # free memory before the next conversion
            self._last = conversion, self._convert([key for keys in conversion.keys for key in keys])
        return self._last[1][name][box.slices]

    def check_ties(self, share: tuple[int, int]) -> None:
        """Check that tied tensors are equal if the files hold both. Each rank compares its `share`.
        Raises UserError if they differ."""
        for tied, source in self._causal_lm.all_tied_weights_keys.items():
            if tied not in self._keys or source not in self._keys:
                continue
            one, other = self._stored[self._keys[tied]], self._stored[self._keys[source]]
            rank, ranks = share
            rows = one.shape[0]
            box = Box.along(one.shape, 0, rows * rank // ranks, rows * (rank + 1) // ranks)
            if one.shape != other.shape or not torch.equal(one.read_box(box), other.read_box(box)):
                raise UserError(
                    f"model {str(self._model)!r}: config.json ties {tied!r} and {source!r} "
                    "(tie_word_embeddings), but the files hold two tensors that differ; "
                    "set it to false, or remove one of them"
                )

    def _match(self) -> list[str]:
        """Find where each tensor of the model is stored. Return stored tensors that the model
        lacks, under the names that they would have in it."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        tensors, prefix = self._tensors, self._causal_lm.base_model_prefix
        unexpected: list[str] = []
        groups: dict[str, dict[str | None, list[str]]] = {}
        for key in sorted(self._stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
            if name not in tensors and key in tensors:
                name, pattern = rename_source_key(key, [], [], prefix, tensors)
            if name in tensors:
                groups.setdefault(name, {}).setdefault(pattern, []).append(key)
            else:
                unexpected.append(name)
        for name, group in groups.items():
            if list(group) == [None] and len(group[None]) == 1:
                self._keys[name] = key = group[None][0]
                if (shape := self._stored[key].shape) != self._shapes[name]:
                    raise UserError(
                        f"model {str(self._model)!r}: {name!r} has shape {list(shape)} in the files, "
                        f"but {list(self._shapes[name])} by config.json"
                    )
                continue
            conversion = _Conversion(
                tuple(tuple(keys) for keys in group.values()),
                all(
                    pattern is not None and _stacks(of_pattern[pattern].operations) for pattern in group
                ),
            )
            made = self._convert([key for keys in conversion.keys for key in keys], device="meta")
            self._converted |= dict.fromkeys(made, conversion)
        return unexpected

    def _convert(
        self,
        keys: Iterable[str],
        shapes: dict[str, tuple[int, ...]] | None = None,
        *,
        device: str = "cpu",
    ) -> dict[str, Tensor]:
        """Return the tensors that `transformers` makes from these keys. On the meta device nothing
        is read. `shapes` has tensors to make only in part."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        sources = {key: self._stored[key] for key in keys}
        given = {
            key: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            if device == "meta"
            else self._fetch(stored, Box.full(stored.shape))
            for key, stored in sources.items()
        }
        self._place({name: torch.empty(shape, device="meta") for name, shape in (shapes or {}).items()})
        config = LoadStateDictConfig(
            dtype=torch.float32, device_map={"": device}, weight_mapping=self._mapping
        )
        found, _ = convert_and_load_state_dict_in_model(self._causal_lm, given, config)
        wrong = [
            f"{name!r} would have shape {list(made)}, not {list(own)}"
            for name, made, own in found.mismatched_keys
        ]
        wrong += [f"{name!r} cannot be made" for name in found.conversion_errors]
        if wrong:
            raise UserError(
                f"model {str(self._model)!r}: cannot convert "
                f"{', '.join(map(repr, sources))}: {'; '.join(wrong)}"
            )
        names = self._shapes.keys() - found.missing_keys
        made = self._place({name: self._tensors[name] for name in names})
        return {name: tensor.detach() for name, tensor in made.items()}

    def _place(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put tensors into the model; return the ones they replace."""
        before: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            path, _, last = name.rpartition(".")
            module = self._causal_lm.get_submodule(path)
            held: dict[str, Any] = module._parameters if last in module._parameters else module._buffers
            before[name] = held[last]
            wrap = held is module._parameters and not isinstance(tensor, torch.nn.Parameter)
            held[last] = torch.nn.Parameter(tensor, requires_grad=False) if wrap else tensor
        return before

    def _names_in_files(self) -> dict[str, str]:
        """Map each tensor name of the model to the alias under which files store it."""
        known = self._keys.keys() | self._converted.keys()
        aliases: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            aliases.setdefault(id(tensor), []).append(name)
        stored = {name: [n for n in names if n in known] for names in aliases.values() for name in names}
        return {name: name if name in names else names[0] for name, names in stored.items() if names}

    def _fetch(self, stored: StoredTensor, box: Box) -> Tensor:
        found = stored.read_box(box)
        self.bytes_read += found.nbytes
        return found

    # Refusals

    def _missing(self) -> list[str]:
        lacking = [n for n in self._shapes if n not in self._names and n not in self._skeleton.made]
        expected = self._causal_lm._keys_to_ignore_on_load_missing or ()
        refused = [name for name in lacking if not any(re.search(pattern, name) for pattern in expected)]
        if refused:
            raise UserError(f"model {str(self._model)!r}: its files have no {_some(refused)}")
        return lacking

    def _refuse_unexpected(self, names: Iterable[str]) -> None:
        patterns = (*(self._causal_lm._keys_to_ignore_on_load_unexpected or ()), *_ALWAYS_UNEXPECTED)
        known = {*self._skeleton.dropped, *self._skeleton.made}
        refused = [
            n for n in names if n not in known and not any(re.search(pattern, n) for pattern in patterns)
        ]
        if not refused:
            return
        hint = nearest(refused[0], sorted(self._shapes.keys() - self._names.keys()))
        if SCALAR_HEAD in refused:
            hint = "; that is the head of a reward model or critic, not of a policy"
        kind = type(self._causal_lm).__name__
        raise UserError(
            f"model {str(self._model)!r}: its files hold {_some(refused)}, which {kind} does not have{hint}"
        )


def _stacks(operations: Iterable[Any]) -> bool:
    """Return whether conversions only stack tensors, with independent slices."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = operations
    alike = all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
    return isinstance(first, MergeModulelist) and first.dim == 0 and alike


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} others" if len(names) > 5 else "")


WeightReader = StoredWeights | _CompleteWeights


# Checkpoint names: map each tensor of the model to tensors of the checkpoint, which may be several.
# `transformers` knows how to cut and rename tensors when it saves a model. That code runs once on
# meta tensors with copies turned into views, so the strides of each result show its box:
#
#     layers.0.mlp.experts.gate_up_proj (8, 28, 16), box [3:4, 0:14, 0:16]
#         -> all of layers.0.block_sparse_moe.experts.3.w1.weight (14, 16)
#
# Tensors that need arithmetic (joined parts, interleaved rows) keep their name in memory. Receivers
# that load with `transformers` know it; vLLM refuses it by name.


@dataclass(frozen=True)
class _Stored:  # a tensor of the checkpoint, as a box of a tensor of the model
    name: str
    shape: tuple[int, ...]
    box: Box
    """Box within the tensor of the model; never empty."""
    dims: tuple[int | None, ...]
    """Dimension of the model's tensor for each dimension of this one, or None for one of size 1."""

    views: dict[
        tuple[Box, tuple[int, ...]], tuple[Box, tuple[int, ...], tuple[int, ...], int] | None
    ] = field(default_factory=dict, compare=False, repr=False)
    """Cached views by box and strides of a part of the model's tensor."""

    def part(self, held: TensorPart) -> TensorPart:
        """Return the overlap with a part of the model's tensor: a view, or an empty tensor."""
        strides = held.tensor.stride()
        if (key := (held.box, strides)) not in self.views:
            self.views[key] = self._view(held.box, strides)
        if (view := self.views[key]) is None:
            empty = Box.full((0,) * len(self.shape))
            return TensorPart(
                self.name, self.shape, empty, held.tensor.new_empty(empty.shape), held.dtype
            )
        box, extents, strides, offset = view
        tensor = held.tensor.as_strided(extents, strides, held.tensor.storage_offset() + offset)
        return TensorPart(self.name, self.shape, box, tensor, held.dtype)

    def _view(
        self, held: Box, strides: tuple[int, ...]
    ) -> tuple[Box, tuple[int, ...], tuple[int, ...], int] | None:
        common = self.box.intersection(held)
        if common is None:
            return None
        starts = tuple(
            0 if dim is None else common.starts[dim] - self.box.starts[dim] for dim in self.dims
        )
        extents = tuple(1 if dim is None else common.shape[dim] for dim in self.dims)
        stops = tuple(start + extent for start, extent in zip(starts, extents, strict=True))
        shift = sum(
            (a - b) * stride for a, b, stride in zip(common.starts, held.starts, strides, strict=True)
        )
        own = tuple(0 if dim is None else strides[dim] for dim in self.dims)
        return Box(starts, stops), extents, own, shift


class CheckpointNames:
    """Names and boxes of a model's tensors in its checkpoint. `causal_lm` has the conversions that
    were used to load it; of `tensors`, only names, shapes and dtypes are read."""

    def __init__(self, causal_lm: Any, tensors: Mapping[str, Tensor]) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        fakes = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()}
        with torch.no_grad(), _Views():
            stored = revert_weight_conversion(causal_lm, fakes)
        of_storage = {fake.untyped_storage()._cdata: name for name, fake in fakes.items()}
        self._stored: dict[str, list[_Stored]] = {name: [] for name in fakes}
        for name, view in stored.items():
            source = of_storage.get(view.untyped_storage()._cdata)
            if source is not None and (found := _located(name, view, tuple(fakes[source].shape))):
                self._stored[source].append(found)
        for name, fake in fakes.items():
            found = self._stored[name]
            if not found or sum(each.box.numel for each in found) != fake.numel():
                shape = tuple(fake.shape)
                self._stored[name] = [_Stored(name, shape, Box.full(shape), tuple(range(len(shape))))]

    def stored_names(self, name: str) -> list[str]:
        """Return the checkpoint names of a tensor of the model."""
        return [stored.name for stored in self._stored[name]]

    def parts(self, held: TensorPart) -> Iterator[TensorPart]:
        """Split a part into parts of checkpoint tensors: a view of each, possibly empty."""
        return (stored.part(held) for stored in self._stored[held.name])


class _Views(TorchDispatchMode):
    """Turns copies into views, except for shapes that no view can have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        if func in (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default):
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError:  # a `reshape` that must copy
                return args[0].new_empty(args[1])
        return func(*args, **(kwargs or {}))


def _located(name: str, view: Tensor, shape: tuple[int, ...]) -> _Stored | None:
    """Return the box that `view` shows in a contiguous tensor of this shape, or None."""
    if not view.numel():
        return None
    strides, offset = contiguous_strides(shape), int(view.storage_offset())
    long = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    dims = tuple(
        long.get(stride) if extent > 1 else None
        for extent, stride in zip(view.shape, view.stride(), strict=True)
    )
    used = [dim for dim in dims if dim is not None]
    starts: list[int] = []
    stops: list[int] = []
    for dim, stride in enumerate(strides):
        starts.append(offset // stride)
        offset %= stride
        stops.append(starts[-1] + (view.shape[dims.index(dim)] if dim in used else 1))
    box = Box(tuple(starts), tuple(stops))
    if (
        len(set(used)) < len(used)
        or box.numel != view.numel()
        or box.intersection(Box.full(shape)) != box
    ):
        return None
    return _Stored(name, tuple(view.shape), box, dims)
