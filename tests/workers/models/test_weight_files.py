"""Damaged or missing weight files and unsupported dtypes are named before any process starts."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.numpy import save_file

from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.models.weight_files import FILE, INDEX, find_tensor, read_header
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.training.memory import model_size

SETTINGS = {
    "model_type": "qwen2",
    "vocab_size": 9,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
NO_ROWS: Any = SimpleNamespace(name="rows", table=pa.table({}), columns=())


def model_of(folder: Path, files: int) -> Path:
    """Make a folder with an index and this many files, each with a norm and a matrix."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    weight_map: dict[str, str] = {}
    for number in range(files):
        tensors = {
            f"layers.{number}.up.weight": np.zeros((3, 4), np.float32),
            f"layers.{number}.bias": np.ones(4, np.float32),
        }
        name = f"model-{number:05}-of-{files:05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refused(model: Path) -> str:
    """Return the error of an actor, a rollout and a plan, which must be equal."""
    said: list[str] = []
    rollout = RolloutConfig(model=model, engine="transformers")
    for check in (
        lambda: ActorWorker.check(ActorConfig(model=model), [], NO_ROWS),
        lambda: RolloutWorker.check(rollout, [], NO_ROWS),
        lambda: model_size(model),
    ):
        with pytest.raises(UserError) as caught:
            check()
        said.append(str(caught.value))
    assert said == said[:1] * 3
    return said[0]


def rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


def longer(header: dict[str, Any]) -> None:
    header["layers.1.up.weight"]["shape"] = [5, 4]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (
        lambda file: file.write_bytes(file.read_bytes()[:-3]),
        r"is \d+ bytes, not \d+ as its header says",
    ),
    "cut off in the header": (
        lambda file: file.write_bytes(file.read_bytes()[:40]),
        "is damaged or not a safetensors file: its 40 bytes end before its header does",
    ),
    "empty": (lambda file: file.write_bytes(b""), "its 0 bytes end before its header does"),
    "a pointer": (
        lambda file: file.write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
        ),
        "is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`",
    ),
    "garbage": (
        lambda file: file.write_bytes((9).to_bytes(8, "little") + b"not JSON " * 2),
        "is damaged or not a safetensors file: the header cannot be read",
    ),
    "another shape": (
        lambda file: rewrite(file, longer),
        r"is damaged: 'layers.1.up.weight' of shape \[5, 4\] and dtype F32 needs 80 bytes, but the header gives it 48",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str):
    model = model_of(tmp_path / "model", 3)
    file = model / "model-00001-of-00003.safetensors"
    change, message = DAMAGES[damage]
    change(file)
    said = refused(model)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(file)
    assert said == f"model '{model}': {caught.value}" and str(file) in said


def test_a_missing_or_incomplete_file_of_300_is_named(tmp_path: Path):
    model = model_of(tmp_path / "model", 300)
    ActorWorker.check(ActorConfig(model=model), [], NO_ROWS)
    file = model / "model-00217-of-00300.safetensors"
    save_file({"layers.217.up.weight": np.zeros((3, 4), np.float32)}, file)
    assert (
        refused(model)
        == f"model '{model}': {INDEX} says that {file.name} holds 'layers.217.bias', but it does not"
    )
    file.unlink()
    assert refused(model) == f"model '{model}': {INDEX} names {file.name}, which is missing"
    (model / "model-00218-of-00300.safetensors").unlink()
    assert refused(model).endswith("which is missing (2 of 300 files are missing)")


def test_weights_of_integers_are_not_trained_and_may_be_sampled_from(tmp_path: Path):
    model = model_of(tmp_path / "model", 1)
    file = model / "model-00000-of-00001.safetensors"
    save_file(
        {"layers.0.up.weight": np.zeros((3, 4), np.int8), "layers.0.bias": np.zeros(4, np.int64)}, file
    )
    with pytest.raises(
        UserError,
        match=rf"'layers.0.up.weight' in {file.name} has the dtype I8; .* one of F64, F32, F16, BF16",
    ):
        ActorWorker.check(ActorConfig(model=model), [], NO_ROWS)
    RolloutWorker.check(RolloutConfig(model=model, engine="transformers"), [], NO_ROWS)


def test_files_outside_the_index_are_not_counted(tmp_path: Path):
    model = model_of(tmp_path / "model", 2)
    save_file({"consolidated": np.zeros((100, 100), np.float32)}, model / "consolidated.safetensors")
    assert model_size(model).parameters == 2 * (12 + 4)
    assert find_tensor(model, "consolidated") is None


@pytest.mark.parametrize("said", [True, None])
def test_a_head_that_is_the_embedding_counts_once_however_it_is_stored(
    tmp_path: Path, said: bool | None
):
    embedding = {"model.embed_tokens.weight": np.zeros((9, 4), np.float32)}
    head = {"lm_head.weight": np.zeros((9, 4), np.float32)}
    settings = SETTINGS if said is None else {**SETTINGS, "tie_word_embeddings": said}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    stored = [embedding, {**embedding, **head}, head] if said else [embedding]
    for tensors in stored:
        save_file(tensors, tmp_path / FILE)
        size = model_size(tmp_path)
        assert (size.parameters, size.tied) == (36, True)
        assert model_size(tmp_path, scalar=True).parameters == 36 + 4
    save_file({**embedding, **head}, tmp_path / FILE)
    (tmp_path / "config.json").write_text(json.dumps({**SETTINGS, "tie_word_embeddings": False}))
    assert model_size(tmp_path).parameters == 72 and not model_size(tmp_path).tied
    assert model_size(tmp_path, scalar=True).parameters == 36 + 4, (
        "a scalar head takes the place of the other"
    )


class Calls:
    """Calls a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize("kind", ["torch.save", "pickle", "garbage"])
def test_a_pickle_that_holds_more_than_tensors_is_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "pytorch_model.bin"
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 97}')
    if kind == "torch.save":
        torch.save({"weight": torch.zeros(2), "more": Calls()}, file)
    else:
        file.write_bytes(pickle.dumps(Calls()) if kind == "pickle" else b"garbage")
    with pytest.raises(UserError) as caught:
        ActorWorker.check(ActorConfig(model=tmp_path), [], NO_ROWS)
    said = str(caught.value)
    named = "is damaged" if kind == "garbage" else "holds more than tensors: a pickle that calls "
    assert f"{file} {named}" in said and "Weft never runs code from files" in said
    assert "weights_only" not in said and "\n" not in said and "executed" not in capsys.readouterr().out


def test_a_file_of_tensors_alone_passes(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 97}')
    for old in (False, True):
        tensors = {"weight": torch.zeros(2), "half": torch.zeros(2, dtype=torch.bfloat16)}
        torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
        ActorWorker.check(ActorConfig(model=tmp_path), [], NO_ROWS)
