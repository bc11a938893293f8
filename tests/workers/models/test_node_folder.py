"""One process per node downloads a Hugging Face model; the others wait and report it."""

import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import try_to_load_from_cache

from weft.controllers.backends.model_folders import named_folders
from weft.dataflow.errors import RunError, UserError
from weft.workers.models import node_folder
from weft.workers.models.node_folder import node_folder as find
from weft.workers.rollout_config import RolloutConfig

MODEL = "somebody/tiny"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


class Hub:
    """Fills the cache in the layout of the hub's client, and counts the downloads."""

    def __init__(self, cache: Path, *files: str) -> None:
        self.cache, self.files, self.downloads = cache, files, 0

    def snapshot_download(self, model: str, allow_patterns: list[str]) -> str:
        self.downloads += 1
        repository = self.cache / f"models--{model.replace('/', '--')}"
        snapshot = repository / "snapshots" / "abc"
        snapshot.mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text("abc")
        for name in self.files:
            (snapshot / name).write_text(
                '{"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}'
            )
        return str(snapshot)


def hub(cache: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> Hub:
    made = Hub(cache, *files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    find_cached = partial(try_to_load_from_cache, cache_dir=cache)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", find_cached)
    return made


def test_processes_that_want_one_model_download_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch):
    made = hub(cache, monkeypatch, "config.json", "model.safetensors")
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: find(MODEL), range(4)))
    assert made.downloads == 1
    assert [folder.name for folder in folders] == ["abc"]


def test_a_cached_model_without_weights_is_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch):
    hub(
        cache, monkeypatch, "config.json", "model.safetensors.index.json", "model-1.safetensors"
    ).snapshot_download(MODEL, [])
    made = hub(cache, monkeypatch, "config.json", "model-2.safetensors")
    assert (find(MODEL) / "model-2.safetensors").is_file()
    find(MODEL)
    assert made.downloads == 1


def test_the_snapshot_of_an_id_is_known_where_the_cache_has_all_that_is_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    hub(cache, monkeypatch, "tokenizer.json").snapshot_download(MODEL, [])
    found = node_folder.cached_folder(MODEL, weights=False)
    assert (
        found is not None
        and found.name == "abc"
        and node_folder.cached_folder(MODEL, weights=True) is None
    )
    hub(cache, monkeypatch, "config.json", "model.safetensors").snapshot_download(MODEL, [])
    assert node_folder.cached_folder(MODEL, weights=True) == found
    assert named_folders(RolloutConfig.model_construct(model=MODEL, tokenizer=None)) == {"model": found}
    assert node_folder.cached_folder("somebody/else", weights=False) is None


def test_a_download_without_weights_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch):
    hub(cache, monkeypatch, "config.json")
    with pytest.raises(UserError, match="has no complete weights in safetensors files"):
        find(MODEL)


def test_a_wait_for_another_process_ends_and_names_it(cache: Path, monkeypatch: pytest.MonkeyPatch):
    hub(cache, monkeypatch, "config.json", "model.safetensors")
    with (
        node_folder._one_of_the_node(MODEL, 1, print),
        pytest.raises(RunError, match=f"process {os.getpid()} of this node downloads model"),
    ):
        find(MODEL, wait_s=0.01)  # waited out
    assert find(MODEL).name == "abc"


def test_a_path_is_never_asked_of_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made = hub(cache, monkeypatch, "config.json", "model.safetensors")
    (tmp_path / "models").mkdir()
    for name in ("models/qwne", "/no/such/folder", tmp_path / "nothing"):
        with pytest.raises(UserError, match="no such folder"):
            find(name)
    assert made.downloads == 0
    shutil.copytree(Path(made.snapshot_download(MODEL, [])), tmp_path / "models" / "own")
    assert find("models/own") == Path("models/own")


def test_the_progress_of_a_download_is_reported_also_by_waiting_processes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    made = hub(cache, monkeypatch, "config.json", "model.safetensors")
    monkeypatch.setattr(node_folder, "_LOOK_S", 0.01)  # waited out, again and again
    told = {"downloads": threading.Event(), "waits": threading.Event()}

    def snapshot_download(model: str, allow_patterns: list[str]) -> str:
        blobs = cache / "models--somebody--tiny" / "blobs"
        blobs.mkdir(parents=True)
        with (blobs / "x.incomplete").open("ab", buffering=0) as file:
            while not all(event.wait(0.01) for event in told.values()):
                file.write(b"more")
        return made.snapshot_download(model, allow_patterns)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(find, MODEL, advance=event.set) for event in told.values()]
        assert {one.result(timeout=60).name for one in found} == {"abc"}


def test_a_damaged_index_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made = hub(cache, monkeypatch, "config.json", "model.safetensors.index.json")
    index = Path(made.snapshot_download(MODEL, [])) / "model.safetensors.index.json"
    for damaged in ('{"weight_map": {"x": "mod', "[]", '{"weight_map": ["model-1.safetensors"]}', "{}"):
        index.write_text(damaged)
        with pytest.raises(UserError, match=rf"the index of a model's weights, {index}, is damaged \("):
            find(MODEL)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_second_user_of_a_cache_downloads_into_it(monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shared = Path(folder) / "hub"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(shared))
        before = os.umask(0o077)
        try:
            with node_folder._one_of_the_node(MODEL, 1, print):
                pass
        finally:
            os.umask(before)
        (lock,) = (shared / ".locks").iterdir()
        assert lock.stat().st_mode & 0o777 == 0o666
        for path in (shared, shared / ".locks"):
            path.chmod(0o755)
        for mode in (0o666, 0o644):  # the current mode of the file, and the one of older versions
            lock.chmod(mode)
            os.seteuid(65534)
            try:
                with (
                    node_folder._one_of_the_node(MODEL, 1, print),
                    pytest.raises(RunError, match="of this node downloads model"),
                    node_folder._one_of_the_node(MODEL, 0.01, print),
                ):
                    pass
            finally:
                os.seteuid(0)


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "hub").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UserError, match=r"cannot be downloaded: .*hub/.locks/weft--.* is not writable"):
        find(MODEL)
