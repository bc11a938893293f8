"""Stored weights: read parts (boxes) of a model's tensors from its files.

Each rank reads only the boxes that it holds. Files often store tensors under other names, and some
tensors of the model combine several stored ones, such as fused experts. This module applies the
renamings of `transformers` to names, and its conversions to one group of tensors at a time. If
`transformers` initializes a tensor that no file has, or if there are no safetensors files, the rank
loads the complete model, and logs that it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...dataflow.errors import UserError, nearest
from ...dataflow.untrusted_text import show
from ...resharding.weights import Box
from ..models.model_folder import SCALAR_HEAD
from ..models.weight_files import damage_named, weight_files
from .causal_lm import Skeleton, load_complete
from .safetensors_files import open_tensors

_ALWAYS_UNEXPECTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files store and models compute; `transformers` ignores them too."""


def open_stored(
    model: str | Path, folder: Path, skeleton: Skeleton, *, share: tuple[int, int] = (0, 1)
) -> WeightReader:
    """Open the weights in `folder` for `skeleton`, a model built from that folder. `model` is the
    user's name for the model. Conversions temporarily change the skeleton's tensors. `share` is
    (this rank, number of ranks): the ranks divide the checks that read files, and the first one
    logs anything unusual. Raises UserError if tensors are missing, unexpected or of another shape,
    or a file is damaged."""
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
    keys: tuple[tuple[str, ...], ...]
    """For each pattern of the conversion, the keys of the matching tensors in the files."""
    stacked: bool
    """Whether the i-th slice of the result depends only on the i-th key of each pattern."""


class StoredWeights:
    """The weights of a model in safetensors files. Raises UserError if tensors are missing,
    unexpected or of another shape, or a file is damaged."""

    def __init__(self, model: str | Path, files: Iterable[Path], skeleton: Skeleton) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._model, self._skeleton = model, skeleton
        self._causal_lm = skeleton.causal_lm
        self._tensors: dict[str, Tensor] = self._causal_lm.state_dict(keep_vars=True)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        with damage_named(model):
            self._stored = {key: stored for file in files for key, stored in open_tensors(file).items()}
        self.bytes_read = 0
        self._mapping: list[Any] = get_model_conversion_mapping(self._causal_lm)
        self._keys: dict[str, str] = {}
        """Maps the name of each tensor that needs no conversion to its key in the files."""
        self._converted: dict[str, _Conversion] = {}
        self._last: tuple[_Conversion, dict[str, Tensor]] | None = None
        """The last conversion and its result, which often serves several calls in a row."""
        unexpected = self._match()
        # After `_match`, which marks the conversions that apply.
        self.conversions = [conversion for conversion in self._mapping if conversion.was_used()]
        """The conversions of `transformers` that apply; saving the model reverts them."""
        self._names = self._names_in_files()
        self._refuse_unexpected(unexpected)
        self.made_anew = self._missing()
        """Tensors that `transformers` initializes because no file has them."""

    def read_box(self, name: str, box: Box) -> Tensor:
        """Return a box on the host, in the file's dtype, or in float32 if a conversion made the
        tensor."""
        name = self._names[name]
        if name in self._keys:
            return self._fetch(self._keys[name], box)
        conversion, full = self._converted[name], self._shapes[name]
        if conversion.stacked and box.shape[1:] == full[1:]:
            chosen = [keys[box.slices[0]] for keys in conversion.keys]
            return self._convert([key for keys in chosen for key in keys], {name: box.shape})[name]
        if self._last is None or self._last[0] is not conversion:
            self._last = None
            self._last = conversion, self._convert([key for keys in conversion.keys for key in keys])
        return self._last[1][name][box.slices]

    def check_ties(self, share: tuple[int, int]) -> None:
        """Check that tied tensors are equal if the files contain both. Each rank compares only its
        `share`. Raises UserError if they differ."""
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
        """Find where each tensor of the model is stored. Return the stored tensors that the model
        lacks, under the names that it would give them."""
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
        """Return the tensors that `transformers` makes from these keys. On the meta device, it
        reads no file. `shapes` lists tensors of which the result has only a part."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        given: dict[str, Tensor] = {}
        for key in keys:
            stored = self._stored[key]
            if device == "meta":
                given[key] = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            else:
                given[key] = self._fetch(key, Box.full(stored.shape))
        sources = ", ".join(map(repr, given))
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
            raise UserError(f"model {str(self._model)!r}: cannot convert {sources}: {'; '.join(wrong)}")
        names = self._shapes.keys() - found.missing_keys
        made = self._place({name: self._tensors[name] for name in names})
        return {name: tensor.detach() for name, tensor in made.items()}

    def _place(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
        """Map each tensor's name in the model to its alias in the files."""
        known = self._keys.keys() | self._converted.keys()
        aliases: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            aliases.setdefault(id(tensor), []).append(name)
        stored = {name: [n for n in names if n in known] for names in aliases.values() for name in names}
        return {name: name if name in names else names[0] for name, names in stored.items() if names}

    def _fetch(self, key: str, box: Box) -> Tensor:
        found = self._stored[key].read_box(box)
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
    """Return whether all operations only stack tensors, which leaves slices independent."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = operations
    alike = all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
    return isinstance(first, MergeModulelist) and first.dim == 0 and alike


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} others" if len(names) > 5 else "")


WeightReader = StoredWeights | _CompleteWeights
