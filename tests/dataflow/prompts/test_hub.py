"""Data sets by Hugging Face id: from the cache, with subset and split, and a clear error if
missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_tokenizers import complaint, jsonl

from weft.dataflow.prompts.prompts import Prompts

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The hub's cache with a data set `tiny/sums`, as `hf download` leaves it, and no network."""
    datasets = pytest.importorskip("datasets")
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, tmp_path / "datasets")
    repository = tmp_path / "hub" / "datasets--tiny--sums"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for subset, split, rows in (("main", "train", 3), ("main", "test", 2), ("socratic", "train", 1)):
        (snapshot / subset).mkdir(parents=True, exist_ok=True)
        jsonl(
            snapshot / subset / f"{split}-00000-of-00001.jsonl",
            [{"question": f"{subset} {split}", "answer": f"so\n#### {k}"} for k in range(rows)],
        )
    (snapshot / "README.md").write_text(CARD)
    datasets.disable_progress_bars()
    yield tmp_path
    datasets.enable_progress_bars()


def test_an_id_is_read_from_the_cache(cache: Path, base: Path) -> None:
    prompts = Prompts.read("tiny/sums", base)
    assert prompts.name == "sums_train"
    assert prompts.table["prompt"].to_pylist() == ["main train"] * 3
    assert prompts.table["answer"].to_pylist() == ["0", "1", "2"]
    assert prompts.understood is not None and prompts.understood.source == "tiny/sums (main, train)"
    assert prompts.understood.choices == (
        "subset 'main' of main, socratic",
        "split 'train' of train, test",
    )
    assert len(Prompts.read("tiny/sums", base, split="test", limit=1)) == 1
    assert Prompts.read("tiny/sums", base, subset="socratic").table["prompt"].to_pylist() == [
        "socratic train"
    ]
    assert "tiny/sums: there is no split 'tset'; did you mean 'test'?" in complaint(
        "tiny/sums", base, split="tset"
    )
    assert "tiny/sums: there is no subset 'mian'; did you mean 'main'" in complaint(
        "tiny/sums", base, subset="mian"
    )


def test_an_unavailable_hub_id_is_named(cache: Path, base: Path) -> None:
    said = complaint("tiny/smus", base)
    assert said.startswith(
        "'tiny/smus' is not a file or folder, and not a data set in the local Hugging Face cache"
    )
    assert "run `hf download --repo-type dataset tiny/smus`" in said
    (cache / "tiny").mkdir()  # now it is a mistyped path
    assert "prompt file 'tiny/smus' does not exist" in complaint("tiny/smus", base)


def test_without_the_library_the_extra_is_named(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "install the library datasets: pip install 'weft[datasets]'" in complaint("tiny/sums", base)


def test_a_dataset_that_is_loaded_already_is_taken_as_it_is(base: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": f"{k} + 0", "answer": str(k)} for k in range(5)])
    prompts = Prompts.from_rows(
        rows.filter(lambda row: row["answer"] != "1"), base, name="sums", limit=3
    )
    assert (prompts.name, prompts.table["answer"].to_pylist()) == ("sums", ["0", "2", "3"])
