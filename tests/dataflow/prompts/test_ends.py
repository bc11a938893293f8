"""End tokens: prompts have none, and training texts end with one that stops generation."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing, RobertaProcessing, Sequence, TemplateProcessing

from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer

BOS, EOS, SEP, TWO = 0, 1, 2, 3
SPECIAL = ["<s>", "</s>", "[SEP]"]


def template(single: str) -> Any:
    return TemplateProcessing(
        single=single, special_tokens=[(text, id) for id, text in enumerate(SPECIAL)]
    )


PROCESSORS: dict[str, tuple[Any, list[int], int | None]] = {
    "eos": (template("$A </s>"), [], EOS),
    "bos and eos": (template("<s> $A </s>"), [BOS], EOS),
    "bos": (template("<s> $A"), [BOS], None),
    "separator": (template("<s> $A [SEP]"), [BOS], SEP),
    "two at the end": (template("<s> $A [SEP] </s>"), [BOS], EOS),
    "two at the beginning": (template("<s> [SEP] $A"), [BOS, SEP], None),
    "BERT's": (BertProcessing(("[SEP]", SEP), ("<s>", BOS)), [BOS], SEP),
    "RoBERTa's": (RobertaProcessing(("</s>", EOS), ("<s>", BOS)), [BOS], EOS),
    "in a row": (Sequence([template("<s> $A </s>")]), [BOS], EOS),
    "none": (None, [], None),
}


def tokenizer_of(processor: Any, **named: str) -> Tokenizer:
    backend = Backend(
        WordLevel({"<s>": BOS, "</s>": EOS, "[SEP]": SEP, "2": TWO, "4": 4, "?": 5}, unk_token="?")
    )
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    if processor is not None:
        backend.post_processor = processor
    return Tokenizer(backend, special_tokens=named)


@pytest.mark.parametrize(("processor", "before", "after"), PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize(
    "named", [{"bos_token": "<s>", "eos_token": "</s>"}, {}], ids=["eos named", "unnamed"]
)
def test_no_token_ends_a_prompt_and_one_ends_a_response(
    processor: Any, before: list[int], after: int | None, named: dict[str, str]
) -> None:
    tokenizer = tokenizer_of(processor, **named)
    prompts = Prompts.from_rows([{"prompt": "2 2"}, {"prompt": "4"}], tokenizer).table
    assert prompts["prompt_ids"].to_pylist() == [[*before, TWO, TWO], [*before, 4]]
    end = [EOS] if named else [] if after is None else [after]
    pairs = Prompts.from_rows([{"prompt": "2", "completion": " 4"}], tokenizer).table
    assert pairs["prompt_ids"].to_pylist() == [[*before, TWO]] and pairs["response_ids"].to_pylist() == [
        [4, *end]
    ]
    texts = Prompts.from_rows([{"text": "2 4"}], tokenizer).table
    assert texts["prompt_ids"][0].as_py() + texts["response_ids"][0].as_py() == [*before, TWO, 4, *end]


@pytest.mark.parametrize("spelled", [["<s> 2", "<s> 4"], ["<s>2", "<s>4"], ["<s> 2"]])
def test_a_text_that_spells_its_beginning_has_one_beginning(spelled: list[str]) -> None:
    tokenizer = tokenizer_of(template("<s> $A </s>"), bos_token="<s>", eos_token="</s>")
    ids = (
        Prompts.from_rows([{"prompt": text} for text in spelled], tokenizer)
        .table["prompt_ids"]
        .to_pylist()
    )
    assert all(row.count(BOS) == 1 and row[0] == BOS and EOS not in row for row in ids)


def test_a_prompt_that_spells_an_end_keeps_it() -> None:
    tokenizer = tokenizer_of(template("<s> $A </s>"), bos_token="<s>", eos_token="</s>")
    ids = Prompts.from_rows([{"prompt": "2 </s>"}], tokenizer).table["prompt_ids"].to_pylist()
    assert ids == [[BOS, TWO, EOS]]
