"""One rule finds models and tokenizers: a folder, or a Hugging Face id in the local cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.dataflow.errors import UserError
from weft.dataflow.model_location import find_model_folder, folders_near


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models" / "qwen-tiny").mkdir(parents=True)
    (tmp_path / "models" / "qwen-tiny" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "models"


def test_a_mistyped_path_next_to_a_folder_is_not_looked_up_on_the_hub(models: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_model_folder("models/qwen-tyni", "config.json", download=["*"])
    assert (
        str(caught.value) == "model 'models/qwen-tyni': no such folder; did you mean 'models/qwen-tiny'?"
    )


def test_a_hub_id_with_an_unknown_owner_suggests_local_folders(models: Path) -> None:
    with pytest.raises(
        UserError, match=r"`hf download Qwen/qwen-tiny` .*; did you mean 'models/qwen-tiny'\?$"
    ):
        find_model_folder("Qwen/qwen-tiny", "config.json")


def test_a_folder_is_used_directly_and_errors_name_the_models_below_it(models: Path) -> None:
    assert find_model_folder(models, "config.json") == models
    assert (
        folders_near(models, "config.json") == f"; folders with a config.json here: '{models}/qwen-tiny'"
    )
    assert folders_near("/no/such/place", "config.json") == ""
