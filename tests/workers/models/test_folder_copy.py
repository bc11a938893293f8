"""A model folder that another node lacks is copied there once, completely or not at all."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from weft.dataflow.errors import UserError, WorkerError
from weft.workers.models import node_folder
from weft.workers.models.node_folder import (
    copy_of,
    growth_told,
    is_model_folder,
    list_folder,
    pieces_of,
    read_piece,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "folders"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    save_file(
        {f"layer.{i}": np.full(5000, i, np.float32) for i in range(5)}, folder / "model.safetensors"
    )
    for name in ("pytorch_model.bin", "model.gguf", ".hidden"):
        (folder / name).touch()
    return folder


Pieces = Callable[[str, int], Iterable[tuple[bytes, bytes]]]


def sent(folder: Path, asked: list[str] | None = None) -> Pieces:
    def pieces(name: str, size: int) -> Iterator[tuple[bytes, bytes]]:
        (asked if asked is not None else []).append(name)
        return (read_piece(folder / name, start) for start in pieces_of(size))

    return pieces


def test_processes_of_a_node_that_want_one_folder_copy_it_once(
    cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(node_folder, "PIECE_BYTES", 1000)
    listing, asked = list_folder(model, weights=True), list[str]()
    with ThreadPoolExecutor(3) as threads:
        copies = {*threads.map(lambda _: copy_of(listing, sent(model, asked)), range(3))}
    (copy,) = copies
    assert copy == cache / listing.key and sorted(asked) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
        name: (model / name).read_bytes() for name in asked
    }
    assert (
        copy.stat().st_mode & 0o777 == 0o700 and (copy / "config.json").stat().st_mode & 0o777 == 0o600
    )


def test_a_tokenizer_is_downloaded_without_the_weights(model: Path):
    assert [*list_folder(model, weights=False).files] == ["config.json", "tokenizer.json"]
    (model / "model.safetensors").unlink()
    assert "pytorch_model.bin" in list_folder(model, weights=True).files, "where there are no others"


def test_a_model_of_other_weights_is_another_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = list_folder(model, weights=True)
    monkeypatch.setattr(node_folder, "_SMALL_BYTES", 1000)
    large = list_folder(model, weights=True)
    tensors = {f"layer.{i}": np.full(5000, i, np.float32) for i in range(5)}
    tensors["layer.3"] += 1
    save_file(tensors, model / "model.safetensors")
    for limit, old in ((1 << 20, before), (1000, large)):
        monkeypatch.setattr(node_folder, "_SMALL_BYTES", limit)
        new = list_folder(model, weights=True)
        assert (new.contents, new.key) != (old.contents, old.key)
    other = Path(shutil.copytree(model, tmp_path / "there" / "tiny"))
    os.utime(other / "model.safetensors", (1, 1))
    found = list_folder(other, weights=True)
    assert found.contents == new.contents, "the same model, downloaded twice"
    assert found.key != new.key, "samples may miss what was changed; the time tells"


def test_unfinished_work_is_restarted_and_damage_reported(cache: Path, model: Path):
    listing = list_folder(model, weights=True)

    def damaged(name: str, size: int) -> Iterator[tuple[bytes, bytes]]:
        for piece, checksum in sent(model)(name, size):
            yield (b"x" + piece[1:] if name == "model.safetensors" else piece), checksum

    with pytest.raises(WorkerError, match=r"a piece of model\.safetensors arrived damaged"):
        copy_of(listing, damaged)
    assert not (cache / listing.key).exists()
    with pytest.raises(WorkerError, match=r"model\.safetensors changed while it was copied"):
        copy_of(
            listing, lambda name, size: [] if name == "model.safetensors" else sent(model)(name, size)
        )
    assert (copy_of(listing, sent(model)) / "model.safetensors").is_file()


def test_a_cache_without_room_or_right_to_write_is_named(
    cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    listing = list_folder(model, weights=True)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
        with pytest.raises(
            UserError,
            match=r"tiny \(0.0 GB\) is on the driver's node only, and .*cache.* has room for 0.0 GB",
        ):
            copy_of(listing, sent(model))
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        UserError,
        match=r"cannot be copied to .*; set WEFT_CACHE in the environment of this Ray node",
    ):
        copy_of(listing, sent(model))


def test_copies_unused_for_long_are_removed(cache: Path, model: Path):
    old, used = cache / "old-1", cache / "used-1"
    for path in (old, used):
        path.mkdir(parents=True)
    os.utime(old, (1, 1))
    copy = copy_of(list_folder(model, weights=True), sent(model))
    assert not old.exists() and used.exists() and copy.exists()


def test_folders_of_models_and_tokenizers_are_known_by_their_files(model: Path, tmp_path: Path):
    assert is_model_folder(model) and not is_model_folder(tmp_path)


def test_a_folder_that_is_renamed_while_it_is_looked_at_ends_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    partial, whole, scan = tmp_path / ".copy", tmp_path / "copy", os.scandir
    partial.mkdir()
    looked: list[Any] = []

    def rename_first(path: Any) -> Any:
        if partial.exists():
            partial.rename(whole)
        looked.append(path)
        return scan(path)

    monkeypatch.setattr("os.scandir", rename_first)
    with growth_told(partial, lambda: None):  # an exception in its thread fails this test
        pass
    assert looked and whole.exists()
