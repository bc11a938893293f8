"""Model files: the folder of a model, as `from_pretrained` loads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...dataflow.errors import UserError
from ...dataflow.runs.files import Disk
from ...dataflow.safe_files import read_json
from ..models.model_folder import ADAPTER_CONFIG_FILE, CONFIG_FILE, read_stop_tokens, text_settings, unnamed_stop_tokens
from .safetensors_files import write_file, write_tensors


def write_model(
    folder: Path, causal_lm: Any, tensors: dict[str, Tensor], source: Path, changed: Mapping[str, Any], disk: Disk
) -> None:
    """Write a folder that `from_pretrained` loads.

    Args:
        causal_lm: the `transformers` model, which knows how its names appear in files.
        tensors: full, on the host, by their names in the model; tied ones once.
        source: folder of the model that was loaded: its settings, tokenizer and chat template are copied.
        changed: settings that differ from the source's, such as the `dtype` of the tensors.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir(parents=True, exist_ok=True)
    copy_companions(folder, source, disk)
    _name_stop_tokens(folder, source, disk)
    settings = read_json(source / CONFIG_FILE)
    settings.pop("torch_dtype", None)  # its name in older versions
    _write_json(folder / CONFIG_FILE, {**settings, **changed}, disk)
    # Not `save_pretrained`: safetensors holds the interpreter while it writes, and training would stop.
    tensors = {n: t for n, t in tensors.items() if n not in (causal_lm._keys_to_ignore_on_save or ())}
    tensors = revert_weight_conversion(causal_lm, tensors)
    split = split_torch_state_dict_into_shards(tensors)
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: tensors[name] for name in names}, {"format": "pt"}, disk)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index, disk)


def copy_companions(folder: Path, source: Path, disk: Disk) -> None:
    """Copy the files beside a model's weights and settings: tokenizer, chat template, generation settings."""
    for file in source.iterdir():
        is_weights = "safetensors" in file.name or file.suffix in (".bin", ".pt", ".pth")
        if file.is_file() and not is_weights and file.name != CONFIG_FILE:
            write_file(folder / file.name, [file.read_bytes()], disk)


def _name_stop_tokens(folder: Path, source: Path, disk: Disk) -> None:
    """Name the tokens that end training texts in the generation settings, so that the model stops at them wherever it is served."""
    if not unnamed_stop_tokens(source):
        return
    file = source / "generation_config.json"
    if file.is_file():
        settings = read_json(file)
    else:  # what `transformers` would make of the model's settings
        of_model = text_settings(read_json(source / CONFIG_FILE))
        settings = {name: of_model[name] for name in ("bos_token_id", "pad_token_id") if of_model.get(name) is not None}
    (folder / file.name).unlink(missing_ok=True)  # the copy
    _write_json(folder / file.name, {**settings, "eos_token_id": list(read_stop_tokens(source))}, disk)


def _write_json(path: Path, content: Mapping[str, Any], disk: Disk) -> None:
    write_file(path, [json.dumps(content, indent=2).encode() + b"\n"], disk)


# Merged folder
#
# The folder of a whole model, made of an adapter's and of the model that it belongs to.


def write_merged(adapter: Path, folder: Path) -> None:
    """Write a folder that `from_pretrained` loads, by `peft`.

    Args:
        adapter: folder of the adapter, which names its model.
        folder: a new one.

    Raises:
        UserError: the model that it belongs to is not there any more.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    settings = read_json(adapter / ADAPTER_CONFIG_FILE)
    base, is_scored = settings["base_model_name_or_path"], settings.get("task_type") == "SEQ_CLS"
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(f"the adapter in {adapter} belongs to the model in {base}, which is not there any more")
    model_class = AutoModelForSequenceClassification if is_scored else AutoModelForCausalLM
    labels = {"num_labels": 1} if is_scored else {}
    model = PeftModel.from_pretrained(model_class.from_pretrained(base, dtype="auto", **labels), adapter)
    partial = folder.with_name(f".{folder.name}.partial")
    model.merge_and_unload().save_pretrained(partial)
    copy_companions(partial, adapter, Disk())
    (partial / ADAPTER_CONFIG_FILE).unlink(missing_ok=True)
    partial.rename(folder)
