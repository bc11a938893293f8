"""`weft export`: the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..dataflow.errors import RunError, UserError, nearest
from .command_line import Answer, Name, RunName, StepNumber, Switch, find_run

MODEL = "model"


def export(
    run: RunName,
    out: Annotated[Positional[Path], arg(metavar="FOLDER")],
    *,
    step: StepNumber = None,
    group: Name = None,
    merged: Switch = False,
) -> Answer:
    """Write the model of a run's checkpoint as a Hugging Face folder, with its tokenizer. Writes a
    LoRA adapter alone; --merged merges it into its base model.

    Args:
        out: The folder to create.
        step: Export the checkpoint of this step. Default: the last one.
        group: Export the model of this worker group. Default: actor, or the only group with a model.
        merged: Merge an adapter's weights into its base model.
    """
    from ..dataflow.runs.manifest import verify_manifest

    if out.exists():
        raise UserError(f"{out} exists already; name a new folder")
    checkpoint = _checkpoint(find_run(run), step)
    model = model_of(checkpoint, group)
    if damage := verify_manifest(checkpoint):
        raise RunError(f"{checkpoint} is damaged: {damage[0]}; --step exports another checkpoint")
    from ..workers.models.model_folder import ADAPTER_CONFIG_FILE

    is_adapter = (model / ADAPTER_CONFIG_FILE).is_file()
    with written(out) as partial:
        if merged and is_adapter:
            from ..workers.training.safetensors_files import write_merged

            # `write_merged` writes to the same partial folder, and renames it.
            write_merged(model, out)
        else:
            shutil.copytree(model, partial)
            partial.rename(out)
    kind, name = "adapter" if is_adapter and not merged else "model", model.parent.name
    found = {"folder": str(out), "kind": kind, "checkpoint": str(checkpoint), "group": name}
    return Answer(found, f"{out}: the {kind} of {name!r} in {checkpoint}")


@contextmanager
def written(out: Path) -> Iterator[Path]:
    """Yield a partial folder next to `out`, which the caller renames to `out` when it is complete.
    Removes the folder if writing fails."""
    from ..dataflow.runs.files import remove

    partial = out.with_name(f".{out.name}.partial")
    try:
        remove(partial)  # left by an export that was killed
        yield partial
    except OSError as error:
        with suppress(OSError):
            remove(partial)
        # copytree's error lists (source, target, reason) for each failed file.
        files = error.args[0] if isinstance(error, shutil.Error) else None
        why = files[0][2] if isinstance(files, list) and files else error
        raise RunError(f"{out} cannot be written: {why}") from None


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by step. Raises a UserError if there are none."""
    from ..controllers.recovery.checkpoints import complete_checkpoints, step_of
    from ..dataflow.runs.files import CHECKPOINTS

    there = {step_of(path): path for path in complete_checkpoints(run / CHECKPOINTS)}
    if not there:
        raise UserError(
            f"{run} has no checkpoint: CheckpointConfig(every=...) makes them, and a script may also save its model itself"
        )
    return there


def _checkpoint(run: Path, step: int | None) -> Path:
    there = checkpoints_of(run)
    if step is None:
        return there[max(there)]
    if step not in there:
        raise UserError(
            f"{run} has no checkpoint of step {step}; it has checkpoints of steps {', '.join(map(str, sorted(there)))}"
        )
    return there[step]


def model_of(checkpoint: Path, group: str | None) -> Path:
    """Return the folder of a group's model in a checkpoint."""
    there = {path.parent.name: path for path in sorted(checkpoint.glob(f"*/{MODEL}")) if path.is_dir()}
    if not there:
        raise UserError(f"{checkpoint} has no model: none of its worker groups trains one")
    name = group or (next(iter(there)) if len(there) == 1 else "actor")
    if name not in there:
        hint = nearest(name, there) or f"; it has models of {', '.join(there)}"
        raise UserError(f"{checkpoint} has no model of a group {name!r}{hint}")
    return there[name]
