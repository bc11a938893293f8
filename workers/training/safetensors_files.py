"""Safetensors files: write tensors directly from host memory, map them back without a copy, and
read parts (boxes) of them.

The `safetensors` package would hold the interpreter lock during a write, which stalls training, and
would read complete rows, even if a rank needs only some columns.
"""

from __future__ import annotations

import errno
import json
import operator
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...dataflow.errors import UserError
from ...dataflow.runs.files import Disk
from ...dataflow.safe_files import read_json
from ...resharding.weights import Box
from ..models.model_folder import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    read_stop_tokens,
    text_settings,
    unnamed_stop_tokens,
)
from ..models.weight_files import DTYPES, Header, read_header

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
assert _DTYPES.keys() == DTYPES.keys()
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FACTOR = re.compile(r"\.lora_[AB]\.")
"""Part of the names of an adapter's tensors that `write_average` knows how to join."""
SHARDING = "DCP_SHARDING_INFO"
"""Metadata key of `torch.distributed.checkpoint` for the positions of parts in the full tensors."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], disk: Disk
) -> None:
    """Write tensors on the host to a new safetensors file and fsync it, without holding the
    interpreter lock. Raises the errors of `write_file`."""
    # Large elements come first, so that each tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        dtype, shape = _DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # The data then begins at a multiple of 8 bytes, the largest element size.
    text += b" " * (-len(text) % 8)
    contents = (
        t.contiguous().reshape(-1).view(torch.uint8).numpy().data for _, t in ordered if t.numel()
    )
    write_file(path, [len(text).to_bytes(8, "little") + text, *contents], disk)


def write_file(path: Path, contents: Iterable[bytes | memoryview], disk: Disk) -> None:
    """Write a new file and fsync it. Raises OSError if the write failed; the message names the file
    and, if the disk is full, the bytes needed and free."""
    contents = list(contents)
    descriptor = disk.open(path)
    try:
        for content in contents:
            disk.write(descriptor, cast(bytes, content))
        disk.sync(descriptor)
    except OSError as error:
        problem = error.strerror
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            path.unlink()
            needed, free = sum(len(content) for content in contents), shutil.disk_usage(path.parent).free
            problem = f"the disk is full: {needed:,} bytes are needed, {free:,} are free"
        raise OSError(error.errno, problem, str(path)) from None
    finally:
        disk.close(descriptor)


@dataclass(frozen=True)
class _StoredTensor:
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    _bytes: Tensor
    """[bytes] uint8, mapped from the file."""

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def read_box(self, box: Box) -> Tensor:
        """Return a box on the host, in the dtype of the file, reading only the box's bytes."""
        if not self.shape:
            return self._bytes.clone().view(self.dtype)[0]
        if not box.numel:
            return torch.empty(box.shape, dtype=self.dtype)
        # Read as bytes: some writers do not align tensors to their element size.
        size = self.dtype.itemsize
        last = slice(box.starts[-1] * size, box.stops[-1] * size)
        own = self._bytes.view(*self.shape[:-1], self.shape[-1] * size)[(*box.slices[:-1], last)]
        return own.clone(memory_format=torch.contiguous_format).view(self.dtype)


def open_tensors(path: Path) -> dict[str, _StoredTensor]:
    """Map the tensors of a safetensors file into memory, and return them by name. Raises ValueError
    if the file is damaged or has an unsupported dtype."""
    data, (entries, _) = _map(path)
    return {
        name: _StoredTensor(path, _DTYPES[entry.dtype], entry.shape, data[entry.start : entry.end])
        for name, entry in entries.items()
    }


def map_tensors(path: Path) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield each tensor of a file from `write_tensors`: its name, its box in the full tensor, and
    its content. Raises ValueError if the file is damaged."""
    data, (entries, metadata) = _map(path)
    try:
        sharding = json.loads(metadata[SHARDING])
        offsets = {name: sharding[name]["saved_offsets"] for name in entries}
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is damaged: its header lacks the positions of its tensors in the full ones"
        ) from None
    for name, entry in entries.items():
        part = data[entry.start : entry.end].view(_DTYPES[entry.dtype])
        stops = tuple(map(operator.add, offsets[name], entry.shape))
        yield name, Box(tuple(offsets[name]), stops), part.view(entry.shape)


def _map(path: Path) -> tuple[Tensor, Header]:
    header = read_header(path)
    for name, entry in header[0].items():
        if entry.dtype not in _DTYPES:
            raise ValueError(
                f"{path}: {name!r} has the dtype {entry.dtype}; supported are {', '.join(_DTYPES)}"
            )
    # The mapping is private: writes to a tensor never reach the file.
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    return data, header


# Model folders in the format of `from_pretrained`


def write_model(
    folder: Path,
    causal_lm: Any,
    tensors: dict[str, Tensor],
    source: Path,
    changed: Mapping[str, Any],
    disk: Disk,
) -> None:
    """Write a folder that `from_pretrained` loads. `tensors` are full tensors on the host, by their
    name in the model. `changed` has settings to replace; `source` provides other settings,
    tokenizer and chat template."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir(parents=True, exist_ok=True)
    copy_companions(folder, source, disk)
    _name_stop_tokens(folder, source, disk)
    settings = read_json(source / CONFIG_FILE)
    settings.pop("torch_dtype", None)
    _write_json(folder / CONFIG_FILE, {**settings, **changed}, disk)
    # `save_pretrained` would hold the interpreter lock during the write, which stalls training.
    tensors = {n: t for n, t in tensors.items() if n not in (causal_lm._keys_to_ignore_on_save or ())}
    tensors = revert_weight_conversion(causal_lm, tensors)
    split = split_torch_state_dict_into_shards(tensors)
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: tensors[name] for name in names}, {"format": "pt"}, disk)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index, disk)


def copy_companions(folder: Path, source: Path, disk: Disk) -> None:
    """Copy the other files of a model folder: tokenizer, chat template, generation settings."""
    for file in source.iterdir():
        is_weights = "safetensors" in file.name or file.suffix in (".bin", ".pt", ".pth")
        if file.is_file() and not is_weights and file.name != CONFIG_FILE:
            write_file(folder / file.name, [file.read_bytes()], disk)


def _name_stop_tokens(folder: Path, source: Path, disk: Disk) -> None:
    """Add the end tokens of training texts to the generation settings, so that every server stops
    there."""
    if not unnamed_stop_tokens(source):
        return
    file = source / "generation_config.json"
    if file.is_file():
        settings = read_json(file)
    else:  # as `transformers` derives them from the model's settings
        of_model = text_settings(read_json(source / CONFIG_FILE))
        names = [name for name in ("bos_token_id", "pad_token_id") if of_model.get(name) is not None]
        settings = {name: of_model[name] for name in names}
    (folder / file.name).unlink(missing_ok=True)
    _write_json(folder / file.name, {**settings, "eos_token_id": list(read_stop_tokens(source))}, disk)


def _write_json(path: Path, content: Mapping[str, Any], disk: Disk) -> None:
    write_file(path, [json.dumps(content, indent=2).encode() + b"\n"], disk)


# Average the weights of several folders


def write_average(models: Sequence[Path], weights: Sequence[float], folder: Path) -> None:
    """Write the weighted average of model or adapter folders, in the dtype of the first. `weights`
    add up to 1. One tensor at a time is in memory, and one file of the first folder.

    The average of adapters has their ranks one after the other: W + sum_i w_i s_i B_i A_i, with the
    weights in its B. Raises ValueError if the folders differ in tensors, shapes or settings.
    """
    adapters = [(model / ADAPTER_CONFIG_FILE).is_file() for model in models]
    if len(set(adapters)) > 1:
        raise ValueError("some are adapters and others are complete models")
    disk = Disk()
    folder.mkdir(parents=True, exist_ok=True)
    copy_companions(folder, models[0], disk)
    if (models[0] / CONFIG_FILE).is_file():
        write_file(folder / CONFIG_FILE, [(models[0] / CONFIG_FILE).read_bytes()], disk)
    factors = [list(weights)] * 2
    if adapters[0]:
        factors = [[1.0] * len(models), _adapter_factors(models, weights, folder, disk)]
    for index in models[0].glob("*.safetensors.index.json"):
        write_file(folder / index.name, [index.read_bytes()], disk)
    stored = [_all_tensors(model) for model in models]
    for other, model in zip(stored[1:], models[1:], strict=True):
        if difference := stored[0].keys() ^ other.keys():
            raise ValueError(f"{models[0]} and {model} differ in {sorted(difference)[0]!r}")
    for file in sorted({tensor.file for tensor in stored[0].values()}):
        made: dict[str, Tensor] = {}
        for name, tensor in stored[0].items():
            if tensor.file != file:
                continue
            parts = [of_model[name] for of_model in stored]
            if _FACTOR.search(name):
                by_rank = 0 if ".lora_A." in name else 1
                scaled = zip(parts, factors[by_rank], strict=True)
                whole = torch.cat([factor * _content(part).float() for part, factor in scaled], by_rank)
                made[name] = whole.to(tensor.dtype)
                continue
            for part, model in zip(parts, models, strict=True):
                if part.shape != tensor.shape:
                    raise ValueError(
                        f"{name!r} is {part.shape} in {model} and {tensor.shape} in {models[0]}"
                    )
            if not tensor.dtype.is_floating_point:
                made[name] = _content(tensor)
                continue
            total = torch.zeros(tensor.shape, dtype=torch.float64)
            for part, weight in zip(parts, weights, strict=True):
                total.add_(_content(part).double(), alpha=weight)
            made[name] = total.to(tensor.dtype)
        write_tensors(folder / file.name, made, {"format": "pt"}, disk)


def _all_tensors(model: Path) -> dict[str, _StoredTensor]:
    return {
        name: one
        for file in sorted(model.glob("*.safetensors"))
        for name, one in open_tensors(file).items()
    }


def _content(tensor: _StoredTensor) -> Tensor:
    return tensor.read_box(Box((0,) * len(tensor.shape), tensor.shape))


def _adapter_factors(
    models: Sequence[Path], weights: Sequence[float], folder: Path, disk: Disk
) -> list[float]:
    """Write the settings of the joined adapter, whose scale is 1, and return the factor of each B."""
    settings = [read_json(model / ADAPTER_CONFIG_FILE) for model in models]
    first = settings[0]
    for other, model in zip(settings, models, strict=True):
        if other.get("use_dora") or other.get("rank_pattern") or other.get("alpha_pattern"):
            raise ValueError(f"{model} is no plain LoRA adapter (DoRA, or ranks that differ by layer)")
        if odd := [name for name in _all_tensors(model) if "lora_" in name and not _FACTOR.search(name)]:
            raise ValueError(
                f"{model} has {odd[0]!r}, which cannot be averaged; only lora_A and lora_B can"
            )
        for name in ("base_model_name_or_path", "target_modules", "modules_to_save", "bias"):
            one, two = (
                sorted(v) if isinstance(v, list) else v for v in (first.get(name), other.get(name))
            )
            if one != two:
                raise ValueError(f"{name} is {two!r} in {model} and {one!r} in {models[0]}")
    rank = sum(each["r"] for each in settings)
    joined = {**first, "r": rank, "lora_alpha": rank, "use_rslora": False}
    (folder / ADAPTER_CONFIG_FILE).unlink(missing_ok=True)
    _write_json(folder / ADAPTER_CONFIG_FILE, joined, disk)
    roots = [each["r"] ** 0.5 if each.get("use_rslora") else each["r"] for each in settings]
    return [
        weight * each["lora_alpha"] / root
        for weight, each, root in zip(weights, settings, roots, strict=True)
    ]


# Merge an adapter's folder with its base model's


def write_merged(adapter: Path, folder: Path) -> None:
    """Merge an adapter with its base model, using `peft`, into a new folder for `from_pretrained`.
    Raises UserError if the base model that the `adapter` folder names no longer exists."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    settings = read_json(adapter / ADAPTER_CONFIG_FILE)
    base, is_scored = settings["base_model_name_or_path"], settings.get("task_type") == "SEQ_CLS"
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(
            f"the adapter in {adapter} belongs to the model in {base}, which no longer exists"
        )
    model_class = AutoModelForSequenceClassification if is_scored else AutoModelForCausalLM
    labels = {"num_labels": 1} if is_scored else {}
    model = PeftModel.from_pretrained(model_class.from_pretrained(base, dtype="auto", **labels), adapter)
    partial = folder.with_name(f".{folder.name}.partial")
    model.merge_and_unload().save_pretrained(partial)
    copy_companions(partial, adapter, Disk())
    (partial / ADAPTER_CONFIG_FILE).unlink(missing_ok=True)
    partial.rename(folder)
