"""Folders of files: splits and subsets are found by name, and ambiguous ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_tokenizers import complaint, jsonl

from weft.dataflow.prompts.prompts import Prompts


def data(folder: Path, *names: str) -> Path:
    """Make a folder of files, each with one row that holds its name."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        jsonl(file, [{"prompt": name}])
    return folder


def read(folder: Path, base: Path, **how: Any) -> list[str]:
    return Prompts.read(folder, base, **how).table["prompt"].to_pylist()


def test_all_files_of_one_kind_are_read_by_name(tmp_path: Path, base: Path) -> None:
    folder = data(tmp_path / "sums", "b.jsonl", "a.jsonl")
    (folder / "README.md").write_text("What this is.")
    assert read(folder, base) == ["a.jsonl", "b.jsonl"]
    assert Prompts.read(folder, base).name == "sums"
    (folder / "c.csv").write_text("prompt\nc\n")
    assert "holds files of several kinds (a.jsonl, b.jsonl, c.csv); pass a list" in complaint(
        folder, base
    )


def test_the_split_is_train_unless_another_is_asked_for(tmp_path: Path, base: Path) -> None:
    folder = data(
        tmp_path / "sums",
        "data/train-00000-of-00002.jsonl",
        "data/train-00001-of-00002.jsonl",
        "data/test-0.jsonl",
    )
    train = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
    prompts = Prompts.read(folder, base)
    assert (prompts.name, prompts.table["prompt"].to_pylist()) == ("sums_train", train)
    assert "  default   split 'train' of test, train" in str(prompts.understood)
    assert read(folder, base, split="test") == ["data/test-0.jsonl"]
    assert "there is no split 'tset'; did you mean 'test'?" in complaint(folder, base, split="tset")
    (folder / "data" / "hard.jsonl").write_text('{"prompt": "hard"}\n')
    assert "  default   files without a split in their name are not read: hard.jsonl" in str(
        Prompts.read(folder, base).understood
    )
    other = data(tmp_path / "other", "dev.jsonl", "test.jsonl")
    assert "has the splits validation, test; choose one, such as split='validation'" in complaint(
        other, base
    )
    assert read(other, base, split="validation") == ["dev.jsonl"]


def test_folders_that_are_no_splits_are_subsets(tmp_path: Path, base: Path) -> None:
    folder = data(tmp_path / "gsm8k", "main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl")
    assert read(folder, base) == ["main/train.jsonl"]
    assert "subset 'main' of main, socratic" in str(Prompts.read(folder, base).understood)
    assert read(folder, base, subset="main", split="test") == ["main/test.jsonl"]
    assert read(folder, base, subset="socratic") == ["socratic/train.jsonl"]
    assert "there is no subset 'man'; did you mean 'main'?" in complaint(folder, base, subset="man")
    other = data(tmp_path / "other", "hard/train.jsonl", "easy/train.jsonl")
    assert "has the subsets easy, hard; choose one, such as subset='easy'" in complaint(other, base)


def test_splits_and_subsets_that_are_not_there_are_refused(tmp_path: Path, base: Path) -> None:
    folder = data(tmp_path / "sums", "a.jsonl")
    assert "no file is named after a split (split='train'); it has a.jsonl" in complaint(
        folder, base, split="train"
    )
    assert "has no subsets (subset='main')" in complaint(folder, base, subset="main")
    assert "split='train' is for folders and Hugging Face ids" in complaint(
        folder / "a.jsonl", base, split="train"
    )
    (tmp_path / "empty").mkdir()
    assert "is a folder without readable prompt files" in complaint(tmp_path / "empty", base)


def test_a_link_that_leads_back_is_not_followed(tmp_path: Path, base: Path) -> None:
    folder = data(tmp_path / "sums", "train/a.jsonl")
    (folder / "train" / "train").symlink_to(folder / "train")
    (folder / "train" / "data").symlink_to(folder)
    assert read(folder, base) == ["train/a.jsonl"]
