"""`weft export`: the model of a checkpoint, as a Hugging Face folder or on the Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..dataflow.errors import RunError, UserError, nearest
from .command_line import Answer, Name, RunName, StepNumber, Switch, find_run

MODEL = "model"
CARD = "README.md"


def export(
    run: RunName,
    out: Annotated[Positional[Path | None], arg(metavar="FOLDER", help_behavior_hint="")] = None,
    *,
    step: StepNumber = None,
    group: Name = None,
    merged: Switch = False,
    card: Switch = False,
    push: Name = None,
    public: Switch = False,
) -> Answer:
    """Write the model of a run's checkpoint as a Hugging Face folder, with its tokenizer, or push it
    to the Hub. Writes a LoRA adapter alone; --merged merges it into its base model.

    Args:
        out: The folder to create. Not needed with --push.
        step: Export the checkpoint of this step. Default: the last one.
        group: Export the model of this worker group. Default: actor, or the only group with a model.
        merged: Merge an adapter's weights into its base model.
        card: Write a model card into the folder: data, settings, evaluations and curves of the run.
        push: Push the model and its card to this repository of the Hub, such as ann/my-model. Creates
            a private repository if there is none.
        public: Create a public repository.
    """
    from ..dataflow.runs.manifest import verify_manifest

    if out is None and push is None:
        raise UserError("name a folder to create, or a repository: --push NAME")
    if out is not None and out.exists():
        raise UserError(f"{out} exists already; name a new folder")
    if public and push is None:
        raise UserError("--public needs a repository; add --push NAME")
    directory = find_run(run)
    checkpoint = _checkpoint(directory, step)
    model = model_of(checkpoint, group)
    if damage := verify_manifest(checkpoint):
        raise RunError(f"{checkpoint} is damaged: {damage[0]}; --step exports another checkpoint")
    from ..workers.models.model_folder import ADAPTER_CONFIG_FILE

    is_adapter = (model / ADAPTER_CONFIG_FILE).is_file()
    if merged and is_adapter and out is None:
        raise UserError("--merged writes a new model; name a folder for it as well")
    kind, name = "adapter" if is_adapter and not merged else "model", model.parent.name
    upload = None if push is None else _upload_to(push, model, public=public)
    text = _card(directory, checkpoint, name, kind) if card or push is not None else None
    if out is not None:
        with written(out) as partial:
            if merged and is_adapter:
                from ..workers.training.safetensors_files import write_merged

                # `write_merged` writes to the same partial folder, and renames it.
                write_merged(model, out)
            else:
                shutil.copytree(model, partial)
                partial.rename(out)
            if text is not None:
                (out / CARD).write_text(text)
    found = {"folder": None if out is None else str(out), "kind": kind, "checkpoint": str(checkpoint)}
    found |= {"group": name, "pushed": None}
    where = str(out)
    if upload is not None and text is not None:
        message = f"Add {directory.name}, {checkpoint.name.replace('_', ' ')}"
        found["pushed"] = pushed = upload(model if out is None else out, text, message)
        where = pushed if out is None else f"{out} and {pushed}"
    return Answer(found, f"{where}: the {kind} of {name!r} in {checkpoint}")


def _card(run: Path, checkpoint: Path, group: str, kind: str) -> str:
    from ..controllers.recovery.checkpoints import RunState
    from ..dataflow.runs.model_card import model_card

    state = RunState.read(checkpoint)
    return model_card(run, state.step, group, state.settings, adapter=kind == "adapter")


def _without_local_base(path: Path) -> Path | bytes:
    """Return a file to push. In the configuration of an adapter, a local folder of the base model
    becomes its name."""
    from ..workers.models.model_folder import ADAPTER_CONFIG_FILE

    if path.name != ADAPTER_CONFIG_FILE:
        return path
    settings = json.loads(path.read_text())
    base = str(settings.get("base_model_name_or_path") or "")
    if Path(base).is_absolute():
        settings["base_model_name_or_path"] = Path(base).name
    return json.dumps(settings, indent=2).encode() + b"\n"


def _upload_to(name: str, model: Path, *, public: bool) -> Callable[[Path, str, str], str]:
    """Check everything that can be checked without a request, and return a function that pushes a
    folder with a card under a message, and returns the address. Raises a UserError if the name, the
    token or the model is wrong."""
    import httpx
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name}: {error}; a name is REPOSITORY or OWNER/REPOSITORY") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push needs the network, but HF_HUB_OFFLINE is set; unset it")
    if get_token() is None:
        raise UserError("--push needs a token with write access: set HF_TOKEN, or run `hf auth login`")
    _check_complete(model)
    api = HfApi()

    def upload(folder: Path, card: str, message: str) -> str:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = {path.relative_to(folder).as_posix(): path for path in files}
        operations = [
            CommitOperationAdd(each, _without_local_base(path))
            for each, path in names.items()
            if each != CARD
        ]
        operations.append(CommitOperationAdd(CARD, card.encode()))
        try:
            repository = api.create_repo(name, private=not public, exist_ok=True).repo_id
            is_private = api.repo_info(repository).private  # an old repository keeps its visibility
            if not public and not is_private:
                raise UserError(
                    f"--push {name}: the repository exists and is public; add --public, or push to another name"
                )
            # With one commit, readers never see half a model.
            api.create_commit(repository, operations, commit_message=message)
        except UserError:
            raise
        except (HfHubHTTPError, httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
            raise RunError(f"{name} cannot be pushed to {api.endpoint}: {_first_line(error)}") from None
        return f"{api.endpoint}/{repository}"

    return upload


def _check_complete(model: Path) -> None:
    """Raise a UserError if the folder lacks settings or weights of a model or an adapter."""
    from ..workers.models.model_folder import ADAPTER_CONFIG_FILE, CONFIG_FILE
    from ..workers.models.weight_files import read_header, stored_tensors

    try:
        is_adapter = (model / ADAPTER_CONFIG_FILE).is_file()
        known = (
            read_header(model / "adapter_model.safetensors")[0]
            if is_adapter
            else stored_tensors(model, model)
        )
        if not known or not (is_adapter or (model / CONFIG_FILE).is_file()):
            raise ValueError("it has no weights" if not known else f"it has no {CONFIG_FILE}")
    except (OSError, ValueError) as error:
        raise UserError(f"{model} is not complete: {error}") from None


def _first_line(error: Exception) -> str:
    # huggingface_hub wraps the errors of its threads.
    lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


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
