"""The tokenizer gives the ids of `transformers`, and missing ones are named."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_tokenizers import BLUE, GREEN, USER, complaint, jsonl, qwen_like
from tokenizers import AddedToken, models

from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer

TEXTS = [
    "The sky is",
    " leading and trailing ",
    "tabs\tand\n\nlines\r\n",
    "Großmutter fährt 123456 Mal. 空は青い。 e\u0301 = é 😀",
    "special <|im_end|> tokens </s><s> and <think> inside <|im_start|>user",
    "x",
    "   ",
]

DIALOGUES = [
    [USER],
    [
        {"role": "system", "content": "Be brief. "},
        USER,
        BLUE,
        {"role": "user", "content": " And at night?\n"},
    ],
    [{"role": "user", "content": text} for text in TEXTS],
    [{"role": "user", "content": "<b>&'\" 空</b>"}, GREEN, {"role": "user", "content": ""}],
]


@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_ids_are_those_of_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for special in (True, False):
        values, offsets = ours.encode(TEXTS, add_special_tokens=special)
        split = [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]
        assert split == theirs(TEXTS, add_special_tokens=special)["input_ids"]
    tools = [{"type": "function", "function": {"name": "add", "description": "<sum> of é"}}]
    settings: list[dict[str, Any]] = [
        {"add_generation_prompt": True},
        {},
        {"tools": tools, "add_generation_prompt": True},
    ]
    for dialogue in DIALOGUES:
        for how in settings:
            expected = theirs.apply_chat_template(dialogue, tokenize=False, **how)
            assert ours.chat.render(dialogue, **how) == expected
            ids = ours.encode([expected], add_special_tokens=False)[0].tolist()
            assert ids == theirs.apply_chat_template(dialogue, tokenize=True, return_dict=False, **how)
        begun = [*dialogue, {"role": "assistant", "content": " It is \n"}]
        expected = theirs.apply_chat_template(begun, tokenize=False, continue_final_message=True)
        assert ours.chat.render(begun, continue_last=True) == expected
    prompts = Prompts.from_rows([{"prompt": dialogue} for dialogue in DIALOGUES], folder)
    assert prompts.table["prompt_ids"].to_pylist() == [
        theirs.apply_chat_template(dialogue, add_generation_prompt=True, return_dict=False)
        for dialogue in DIALOGUES
    ]
    assert (
        Prompts.from_rows([{"prompt": t} for t in TEXTS[:-1]], folder, chat=False)
        .table["prompt_ids"]
        .to_pylist()
        == (theirs(TEXTS[:-1])["input_ids"])
    )


def test_added_tokens_of_a_file_keep_their_flags() -> None:
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("abc ")}, []))
    backend.add_tokens([AddedToken("<a>", lstrip=True)])
    values, offsets = Tokenizer(backend).encode(["ab  <a>c", ""])
    assert (values.tolist(), offsets.tolist()) == ([0, 1, 4, 2], [0, 4, 4])


def test_a_tokenizer_that_cannot_be_had_is_named(
    tmp_path: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    there = qwen_like(tmp_path / "models" / "qwen2-tiny")
    assert "did you mean 'qwen2-tiny'?" in complaint(file, tmp_path / "models" / "qwen2-tny")
    assert "is a file; give the folder" in complaint(file, there / "tokenizer.json")
    (tmp_path / "empty").mkdir()
    assert "has no tokenizer.json" in complaint(file, tmp_path / "empty")
    (tmp_path / "empty" / "vocab.json").write_text("{}")
    assert "AutoTokenizer.from_pretrained" in complaint(file, tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    assert "not a tokenizer that the tokenizers library can read" in complaint(file, tmp_path / "empty")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'models/qwen2-tiny'?" in complaint(file, "models/qwen2-tny")
    said = complaint(file, "qwen2-tny")
    assert said.startswith(
        "tokenizer 'qwen2-tny': no such folder, and no model of that name in the local Hugging Face cache; it cannot be downloaded"
    )
    assert said.endswith("did you mean 'models/qwen2-tiny'?")


def test_a_hub_id_is_taken_from_the_local_cache(tmp_path: Path, qwen: Path) -> None:
    # A cache in the layout of huggingface_hub. Its place is read at import, hence the separate
    # process.
    cache = tmp_path / "hub" / "models--tiny--qwen2"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in qwen.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    code = (
        "import sys; from weft.dataflow.prompts.prompts import Prompts\n"
        "print(Prompts.from_rows([{'prompt': '2 + 2'}], 'tiny/qwen2').table['prompt_ids'].to_pylist())\n"
        "print({'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules))\n"
    )
    environment = {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": ":".join(p for p in sys.path if p),
    }
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.splitlines()
    assert (
        json.loads(out[0])
        == Prompts.from_rows([{"prompt": "2 + 2"}], qwen).table["prompt_ids"].to_pylist()
    )
    assert out[1] == "set()"  # no heavy imports
