"""Models stop at the token that ends their training texts, whatever their settings name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from weft.dataflow.runs.files import Disk
from weft.workers.actor import ActorConfig
from weft.workers.models.model_folder import read_stop_tokens, stop_token_notes, unnamed_stop_tokens
from weft.workers.rollout_config import RolloutConfig
from weft.workers.training.safetensors_files import write_model

TEMPLATE = "{% for m in messages %}<turn>{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"


def model(
    folder: Path, generation: Any, eos: str | None, template: str | None = None, config: Any = None
) -> Path:
    backend = Tokenizer(WordLevel({"?": 0, "<stop>": 1, "<end>": 2, "<turn>": 3}, unk_token="?"))
    backend.add_special_tokens(["<stop>", "<end>", "<turn>"])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v}))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "eos_token_id": config, "pad_token_id": 0})
    )
    if generation is not None:
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": generation, "top_k": 20})
        )
    return folder


@pytest.mark.parametrize(
    ("generation", "eos", "template", "stops", "unnamed"),
    [
        (1, "<stop>", None, (1,), []),
        (1, "<end>", None, (1, 2), [2]),
        ([1], "<stop>", TEMPLATE, (1, 2), [2]),
        ([1, 2], "<stop>", TEMPLATE, (1, 2), []),
        ([2], "<stop>", TEMPLATE, (2, 1), [1]),
        (None, "<stop>", None, (1,), [1]),
        (7, None, None, (7,), []),
        (7, None, "{{ messages[0].content }}", (7,), []),
        (7, None, "{{ raise_exception('no') }}", (7,), []),
    ],
)
def test_rollouts_stop_at_the_end_token_of_training_texts_with_a_notice(
    generation: Any,
    eos: str | None,
    template: str | None,
    stops: tuple[int, ...],
    unnamed: list[int],
    tmp_path: Path,
) -> None:
    folder = model(tmp_path / "m", generation, eos, template)
    assert read_stop_tokens(folder) == stops and list(unnamed_stop_tokens(folder)) == unnamed
    notes = stop_token_notes(folder)
    assert (
        len(notes) == bool(unnamed) and RolloutConfig(model=folder, engine="transformers").notes == notes
    )
    assert ActorConfig(model=folder, learning_rate=1e-3).notes == notes
    if unnamed:
        token = ["?", "<stop>", "<end>"][unnamed[0]]
        assert f"training texts end with '{token}' (the " in notes[0]


@pytest.mark.parametrize("generation", [1, None])
def test_a_saved_model_names_all_of_them(generation: Any, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", generation, "<end>", config=1)
    causal_lm: Any = torch.nn.Module()
    causal_lm._keys_to_ignore_on_save = None
    write_model(tmp_path / "saved", causal_lm, {}, folder, {}, Disk())
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [1, 2] and saved.get("top_k") == (20 if generation else None)
    assert read_stop_tokens(tmp_path / "saved") == (1, 2) and not stop_token_notes(tmp_path / "saved")


def test_a_model_that_is_not_there_has_no_notes() -> None:
    assert stop_token_notes("no/such/folder") == ()
