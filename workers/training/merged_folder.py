"""The folder of a whole model, made of an adapter's and of the model that it belongs to."""

from __future__ import annotations

from pathlib import Path

from ...dataflow.buffer.disk import Disk
from ...dataflow.errors import UserError
from ...dataflow.safe_files import read_json
from ..model_folder import ADAPTER_CONFIG_FILE
from .model_files import copy_companions


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
