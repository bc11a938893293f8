"""Prompts from files: the formats of TRL, verl and OpenRLHF, the ids of `transformers`, and every kind of bad input."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer

CORPUS = [
    "What color is the sky? It is blue. The sky is green.",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total?",
    "2 + 2 = 4, 12 + 30 = 42; the answer is 42.",
    "Großmutter fährt schnell. Цвет неба синий. 空は青い。 ¿Qué? 😀",
]

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if loop.index0 > 8 %}{% break %}{% endif %}"
    "[{{ m.role | upper }}] {{ m.content | trim }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
)


def qwen_like(folder: Path) -> Path:
    """Byte-level BPE, no token added to plain text, ChatML template in a file of its own."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    regex = words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(i): {"content": text, "lstrip": False, "rstrip": False, "single_word": False} | flags
            for i, text, flags in [
                (0, "<|endoftext|>", {"normalized": False, "special": True}),
                (1, "<|im_start|>", {"normalized": False, "special": True}),
                (2, "<|im_end|>", {"normalized": False, "special": True}),
                (backend.get_vocab_size(), "<think>", {"normalized": False, "special": False}),  # not in tokenizer.json
            ]
        },
    }
    return write_tokenizer(folder, backend, config, {"chat_template.jinja": CHATML})


def llama_like(folder: Path) -> Path:
    """BPE over `▁`-marked words with a beginning-of-sequence token; configuration as old models have it."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(max_length=8)  # files often come with it on, and it must not shorten prompts
    backend.enable_padding(length=8)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,  # tokenizer.json decides, not this
        "bos_token": {
            "__type": "AddedToken",
            "content": "<s>",
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
        },
        "chat_template": [
            {"name": "default", "template": LLAMA},
            {"name": "tool_use", "template": "{{ tools | tojson }}" + LLAMA},
        ],
    }
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return write_tokenizer(folder, backend, config, {"special_tokens_map.json": json.dumps(special)})


def write_tokenizer(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, text in {"tokenizer_config.json": json.dumps(config), **files}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_like(tmp_path_factory.mktemp("models") / "qwen2-tiny")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_like(tmp_path_factory.mktemp("models") / "llama-tiny")


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def text_of(tokenizer: Path, ids: list[int]) -> str:
    return Tokenizer.load(tokenizer).backend.decode(ids, skip_special_tokens=False)


def complaint(*args: Any, **settings: Any) -> str:
    """What `Prompts.read` says about bad input, on one line, paths shortened to file names; quick, as it must be."""
    started = time.perf_counter()
    with pytest.raises(UserError) as caught:
        Prompts.read(*args, **settings)
    assert time.perf_counter() - started < 1.5
    return re.sub(r"(?<![\w/])/\S*/", "", str(caught.value))


USER = {"role": "user", "content": "What color is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}


# The formats


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_verl_prompts_load_unmodified(write: Any, tmp_path: Path, qwen: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 7},
    }
    file = write(tmp_path / f"train.{write.__name__}", [row, row])
    prompts = Prompts.read(file, qwen)
    assert (len(prompts), prompts.name, prompts.format) == (2, "train", "verl prompts")
    assert prompts.columns == (
        "prompt_ids", "prompt", "answer", "data_source", "ability", "reward_model", "extra_info", "prompt_messages",
    )  # fmt: skip
    first = prompts.table.slice(0, 1).to_pylist()[0]
    assert first["prompt"] == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(qwen, first["prompt_ids"]) == first["prompt"]
    assert first["answer"] == "4"
    assert first["extra_info"] == row["extra_info"] and first["reward_model"] == row["reward_model"]
    assert first["prompt_messages"] == row["prompt"]
    assert prompts.table.schema.field("prompt_ids").type == pa.list_(pa.int32())


def test_a_ground_truth_that_is_no_text_becomes_text(qwen: Path) -> None:
    def answers(*values: Any) -> list[Any]:
        rows = [{"prompt": "2 + 2", "reward_model": {"style": "rule", "ground_truth": value}} for value in values]
        return Prompts.from_rows(rows, qwen).table["answer"].to_pylist()

    assert answers(4, None) == ["4", None]
    assert answers(["4", "four"]) == ['["4", "four"]']
    assert answers({"target": [4]}) == ['{"target": [4]}']


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "The sky is"}, None),
        ({"prompt": [USER], "solution": "blue"}, "blue"),
        ({"prompt": [USER], "ground_truth": "blue"}, "blue"),
        ({"input": "The sky is", "label": "blue"}, "blue"),
        ({"input": [USER], "label": "blue"}, "blue"),
        ({"context_messages": [USER]}, None),
        ({"messages": [USER]}, None),
        ({"question": "The sky is", "answer": "#### blue"}, "#### blue"),
    ],
)
def test_prompts_of_trl_and_openrlhf_load_unmodified(row: dict[str, Any], answer: str | None, qwen: Path) -> None:
    prompts = Prompts.from_rows([row], qwen)
    first = prompts.table.to_pylist()[0]
    chat = "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n"
    assert first["prompt"] == ("The sky is" if "The sky is" in row.values() else chat)
    assert text_of(qwen, first["prompt_ids"]) == first["prompt"]
    assert first.get("answer") == answer
    assert "response_ids" not in first


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "completion": [BLUE]},
        {"prompt": [USER], "completion": [BLUE], "label": True},
        {"messages": [USER, BLUE]},
        {"input": [USER, BLUE]},
        {"input": [USER], "output": [BLUE]},
        {"prompt": [USER], "response": "It is blue."},
    ],
)
def test_chat_responses_end_with_the_token_that_stops_generation(row: dict[str, Any], qwen: Path) -> None:
    first = Prompts.from_rows([row], qwen).table.to_pylist()[0]
    assert first["prompt"].endswith("<|im_start|>assistant\n")
    assert text_of(qwen, first["prompt_ids"]) == first["prompt"]
    assert text_of(qwen, first["response_ids"]) == "It is blue.<|im_end|>"
    assert "answer" not in first  # a label of true or false is a preference, not a ground truth
    assert first.get("label") == row.get("label")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sky is", "completion": " blue."},
        {"prompt": "The sky is", "response": " blue."},
        {"input": "The sky is", "output": " blue."},
    ],
)
def test_plain_responses_get_the_end_token(row: dict[str, Any], qwen: Path, llama: Path) -> None:
    first = Prompts.from_rows([row], qwen).table.to_pylist()[0]
    assert (text_of(qwen, first["prompt_ids"]), text_of(qwen, first["response_ids"])) == (
        "The sky is",
        " blue.<|im_end|>",
    )
    # Here a response tokenised by itself would begin with a second space.
    first = Prompts.from_rows([row], llama).table.to_pylist()[0]
    assert text_of(llama, first["prompt_ids"] + first["response_ids"]) == "<s> The sky is blue.</s>"


def test_a_token_that_reaches_from_prompt_to_response_does_not_change_the_text(qwen: Path, llama: Path) -> None:
    rows = [{"prompt": "The sky is ", "completion": "blue."}, {"prompt": "The sk", "completion": "y is blue."}]
    for row in Prompts.from_rows(rows, llama).table.to_pylist():
        assert text_of(llama, row["prompt_ids"] + row["response_ids"]) == "<s> The sky is blue.</s>"
    # Byte-level tokens keep the prompt's own tokens, those that generation goes on from.
    supervised, prompts = (
        Prompts.from_rows(rows, qwen),
        Prompts.from_rows([{"prompt": r["prompt"]} for r in rows], qwen),
    )
    assert supervised.table["prompt_ids"] == prompts.table["prompt_ids"]
    for row in supervised.table.to_pylist():
        assert text_of(qwen, row["prompt_ids"] + row["response_ids"]) == "The sky is blue.<|im_end|>"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]},
        {"chosen": [USER, BLUE], "rejected": [USER, GREEN]},
        {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN], "margin": 0.5},
    ],
)
def test_conversational_preferences_give_a_prompt_and_two_responses(row: dict[str, Any], qwen: Path) -> None:
    prompts = Prompts.from_rows([row], qwen)
    first = prompts.table.to_pylist()[0]
    assert prompts.columns[:4] == ("prompt_ids", "chosen_ids", "rejected_ids", "prompt")
    assert first["prompt"] == "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(qwen, first["chosen_ids"]) == "It is blue.<|im_end|>"
    assert text_of(qwen, first["rejected_ids"]) == "It is green.<|im_end|>"
    assert first["chosen"] == row["chosen"]  # the columns of the file stay


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"question": "The sky is", "chosen": " blue.", "rejected": " green."},
    ],
)
def test_plain_preferences_give_a_prompt_and_two_responses(row: dict[str, Any], qwen: Path) -> None:
    first = Prompts.from_rows([row], qwen, prompt="question" if "question" in row else None).table.to_pylist()[0]
    assert first["prompt"] == "The sky is"
    assert text_of(qwen, first["chosen_ids"]) == " blue.<|im_end|>"
    assert text_of(qwen, first["rejected_ids"]) == " green.<|im_end|>"


def test_an_implicit_prompt_ends_before_the_first_word_that_differs(qwen: Path) -> None:
    def parts(chosen: str, rejected: str) -> tuple[str, str, str]:
        first = Prompts.from_rows([{"chosen": chosen, "rejected": rejected}], qwen).table.to_pylist()[0]
        return first["prompt"], text_of(qwen, first["chosen_ids"]), text_of(qwen, first["rejected_ids"])

    end = "<|im_end|>"
    assert parts("It is blue", "It is black") == ("It is", " blue" + end, " black" + end)
    assert parts("Human: hi\n\nA: yes", "Human: hi\n\nA: no") == ("Human: hi\n\nA:", " yes" + end, " no" + end)
    assert parts("It is", "It is so") == ("It", " is" + end, " is so" + end)
    assert parts("It is", "It is") == ("It", " is" + end, " is" + end)


def test_a_language_modeling_text_is_one_token_of_context_and_the_rest(qwen: Path) -> None:
    first = Prompts.from_rows([{"text": "The sky is blue."}], qwen).table.to_pylist()[0]
    assert len(first["prompt_ids"]) == 1
    assert text_of(qwen, first["prompt_ids"] + first["response_ids"]) == "The sky is blue.<|im_end|>"
    assert text_of(qwen, first["prompt_ids"]) == first["prompt"]


def test_the_columns_can_be_named_and_reached_inside_structs(qwen: Path) -> None:
    rows = [{"extra_info": {"question": "2 + 2", "answer": "4", "why": "so"}, "id": 3}]
    prompts = Prompts.from_rows(rows, qwen, prompt="extra_info.question", answer="extra_info.answer")
    assert prompts.columns == ("prompt_ids", "prompt", "answer", "extra_info", "id")
    assert prompts.table.select(["prompt", "answer"]).to_pylist() == [{"prompt": "2 + 2", "answer": "4"}]
    supervised = Prompts.from_rows(rows, qwen, prompt="extra_info.question", response="extra_info.answer")
    assert text_of(qwen, supervised.table["response_ids"].to_pylist()[0]) == "4<|im_end|>"


def test_plain_text_can_be_sent_as_a_users_message(qwen: Path) -> None:
    rows = [{"question": "2 + 2?", "answer": "4"}]
    prompt = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert Prompts.from_rows(rows, qwen, chat=True).table["prompt"].to_pylist() == [prompt]
    supervised = Prompts.from_rows(rows, qwen, chat=True, prompt="question", response="answer").table.to_pylist()[0]
    assert text_of(qwen, supervised["prompt_ids"] + supervised["response_ids"]) == prompt + "4<|im_end|>"


def test_a_prompt_that_ends_with_the_assistant_is_continued(qwen: Path, llama: Path) -> None:
    row = {"prompt": [USER, {"role": "assistant", "content": "It is "}]}
    text = Prompts.from_rows([row], qwen).table["prompt"].to_pylist()[0]
    assert text == "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\nIt is "
    # This template trims messages, so the space before the response is the response's.
    assert Prompts.from_rows([row], llama).table["prompt"].to_pylist()[0].endswith("[ASSISTANT] It is")


def test_tools_and_template_variables_come_from_their_columns(qwen: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        rows = [{"prompt": [USER], "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}]
        text = Prompts.from_rows(rows, qwen).table["prompt"].to_pylist()[0]
        assert text.startswith("<|im_start|>system\nTools:\n" + json.dumps(tool))
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_fields_that_only_some_messages_have_are_not_null_in_the_others(qwen: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    rows = [{"messages": [USER, call, {"role": "tool", "content": "4"}]}, {"messages": [USER]}]
    texts = Prompts.from_rows(rows, qwen).table["prompt"].to_pylist()
    assert '<|im_start|>assistant\n{"name": "add"}<|im_end|>' in texts[0]
    assert "None" not in "".join(texts)


def test_a_named_column_of_whole_conversations_is_parted_into_prompt_and_response(qwen: Path) -> None:
    first = Prompts.from_rows([{"dialogue": [USER, BLUE]}], qwen, prompt="dialogue").table.to_pylist()[0]
    assert first["prompt"].endswith("<|im_start|>assistant\n")
    assert text_of(qwen, first["response_ids"]) == "It is blue.<|im_end|>"


def test_every_example_row_of_the_documentation_loads(qwen: Path) -> None:
    document = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(\{.*\})` \| (.*) \|$", document, re.M)
    assert len(rows) == 13
    for row, gives in rows:
        columns = Prompts.from_rows([json.loads(row)], qwen).columns
        assert ("answer" in columns) == ("answer" in gives), row
        assert ("response_ids" in columns) == ("response" in gives), row
        assert ("chosen_ids" in columns) == ("chosen" in row), row


# Reading files


def test_files_are_read_one_after_the_other(tmp_path: Path, qwen: Path) -> None:
    first = parquet(tmp_path / "a.parquet", [{"prompt": [{"content": "0", "role": "user"}], "level": None}])
    second = jsonl(
        tmp_path / "b.jsonl", [{"level": 1, "prompt": [{"role": "user", "content": str(i)}]} for i in (1, 2)]
    )
    prompts = Prompts.read([first, second], qwen)
    assert prompts.name == "a+b"
    assert [re.findall(r"\d", text) for text in prompts.table["prompt"].to_pylist()] == [["0"], ["1"], ["2"]]
    assert prompts.table["level"].to_pylist() == [None, 1, 1]
    assert all(column.num_chunks == 1 for column in prompts.table.columns)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_limit_reads_the_first_rows_only(write: Any, tmp_path: Path, qwen: Path) -> None:
    files = [write(tmp_path / f"{n}.{write.__name__}", [{"prompt": f"{n} {i}"} for i in range(5)]) for n in "ab"]
    assert Prompts.read(files, qwen, limit=7).table["prompt"].to_pylist() == [
        *(f"a {i}" for i in range(5)),
        "b 0",
        "b 1",
    ]
    assert len(Prompts.read(files, qwen, limit=2)) == 2
    assert "limit=0" in complaint(files, qwen, limit=0)


def test_a_json_file_may_hold_one_array(tmp_path: Path, qwen: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"prompt": "2"}, {"prompt": "3", "hard": True}], indent=2))
    assert Prompts.read(file, qwen).table["hard"].to_pylist() == [None, True]
    jsonl(file, [{"prompt": "2"}])
    assert len(Prompts.read(file, qwen)) == 1


def test_text_that_looks_like_a_date_stays_text(tmp_path: Path, qwen: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "2024-01-01"}],
            "answer": "2024-01-01 10:00:00",
            "n": [{"d": "1999-12-31"}],
        }
    ]
    prompts = Prompts.read(jsonl(tmp_path / "dates.jsonl", rows), qwen)
    assert "2024-01-01<|im_end|>" in prompts.table["prompt"].to_pylist()[0]
    assert prompts.table["answer"].to_pylist() == ["2024-01-01 10:00:00"]
    assert prompts.table["n"].to_pylist() == [[{"d": "1999-12-31"}]]


def test_rows_longer_than_pyarrows_block_and_blank_lines_are_read(tmp_path: Path, qwen: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(
        "\ufeff" + json.dumps({"prompt": "1", "book": "x" * 3_000_000}) + '\n\n{"prompt": "2", "book": ""}\n\n'
    )
    assert Prompts.read(file, qwen).table["prompt"].to_pylist() == ["1", "2"]


def test_long_prompts_are_an_error_or_dropped_and_counted(tmp_path: Path, qwen: Path) -> None:
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "1"}, {"prompt": "1 2 3", "answer": "x"}, {"prompt": "1 2 3 4"}])
    said = complaint(file, qwen, max_prompt_tokens=2)
    assert said == (
        "p.jsonl, line 2: the prompt has 5 tokens, max_prompt_tokens is 2 (2 of 3 rows are longer); "
        "raise max_prompt_tokens, or say too_long='drop'"
    )
    prompts = Prompts.read(file, qwen, max_prompt_tokens=2, too_long="drop")
    assert (prompts.table["prompt"].to_pylist(), prompts.dropped) == (["1"], 2)
    assert len(Prompts.read(file, qwen, max_prompt_tokens=7)) == 3  # the bound is inclusive
    many = jsonl(tmp_path / "many.jsonl", [{"prompt": "1 2 3"}])
    assert "1 of 1" in complaint(many, qwen, max_prompt_tokens=2, too_long="drop")
    assert "did you mean 'drop'" in complaint(many, qwen, too_long="dropp")
    assert "at least one token" in complaint(many, qwen, max_prompt_tokens=0)


# Bad input


def test_a_missing_file_is_answered_with_the_nearest(tmp_path: Path, qwen: Path) -> None:
    jsonl(tmp_path / "gsm8k_test.jsonl", [{"prompt": "1"}])
    assert complaint(tmp_path / "gsm8k_tset.jsonl", qwen).endswith("does not exist; did you mean 'gsm8k_test.jsonl'?")
    assert "has gsm8k_test.jsonl" in complaint(tmp_path / "zz.parquet", qwen)
    assert "there is no folder" in complaint(tmp_path / "datta" / "a.jsonl", qwen)
    assert "is a folder; give the prompt files in it" in complaint(tmp_path, qwen)
    assert "the list of paths is empty" in complaint([], qwen)


def test_unknown_empty_and_broken_files_are_named(tmp_path: Path, qwen: Path) -> None:
    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    assert "unknown kind of file '.csv'; these can be read: .parquet, .jsonl, .json" in complaint(
        file("a.csv", b"x"), qwen
    )
    assert "did you mean '.parquet'" in complaint(file("a.parq", b"x"), qwen)
    assert complaint(file("a.jsonl", b""), qwen) == "a.jsonl: the file is empty"
    assert complaint(file("b.jsonl", b"\n\n"), qwen) == "b.jsonl: the file has no rows"
    assert complaint(file("b.json", b"[]"), qwen) == "b.json: there are no rows"
    assert complaint(file("c.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n'), qwen).startswith(
        'c.jsonl, line 3: not JSON (Expecting value: line 1 column 11 (char 10)): {"prompt":'
    )
    assert "d.jsonl, line 2: a row is an object {...} on one line, not [1]" in complaint(
        file("d.jsonl", b'{"prompt": "a"}\n[1]\n'), qwen
    )
    assert "e.jsonl, line 2: not UTF-8" in complaint(file("e.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n'), qwen)
    assert "row 2: a row is an object" in complaint(file("e.json", b'[{"prompt": "a"}, 3]'), qwen)
    assert "f.parquet: not a Parquet file" in complaint(file("f.parquet", b"PAR1 is not enough"), qwen)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "g.parquet")
    assert complaint(tmp_path / "g.parquet", qwen) == "g.parquet: the file has no rows"


def test_mixed_types_are_named_with_both_lines(tmp_path: Path, qwen: Path) -> None:
    file = jsonl(
        tmp_path / "m.jsonl", [{"prompt": "1", "a": None}, {"prompt": "1", "a": 5}, {"prompt": "1", "a": "five"}]
    )
    assert (
        complaint(file, qwen) == "m.jsonl, line 3: 'a' is text (\"five\"), but a number in line 2; one column, one type"
    )
    jsonl(file, [{"prompt": [USER]}, {"prompt": "1"}])
    assert "line 2: 'prompt' is text (\"1\"), but a list in line 1" in complaint(file, qwen)
    jsonl(file, [{"prompt": [USER]}, {"prompt": [{"role": "user", "content": [{"type": "text", "text": "?"}]}]}])
    assert "line 2: 'prompt[].content' is a list" in complaint(file, qwen)
    with pytest.raises(UserError, match=r"rows, row 2: 'prompt' is a number \(3\), but text in row 1"):
        Prompts.from_rows([{"prompt": "x"}, {"prompt": 3}], qwen)


def test_a_wrong_layout_is_answered_with_what_was_found_and_the_nearest(tmp_path: Path, qwen: Path) -> None:
    file = jsonl(tmp_path / "w.jsonl", [{"promt": "2 + 2", "n": 1, "conversation": [{"from": "human", "value": "hi"}]}])
    assert complaint(file, qwen) == (
        "w.jsonl: no known format has these columns: "
        "found 'promt' (text), 'n' (int64), 'conversation' (list of {from, value}); "
        "the nearest format is TRL prompt-only (prompt); it needs 'prompt', did you mean 'promt'?"
        "; rename the column, or say which holds the prompt (prompt='...'); docs/data.md shows all formats"
    )
    jsonl(file, [{"chosen_response": "a", "rejected_response": "b", "prompts": "c"}])
    said = complaint(file, qwen)
    assert "the nearest format is TRL or OpenRLHF preference (prompt, chosen, rejected)" in said
    assert "it needs 'chosen', did you mean 'chosen_response'?; it needs 'rejected'" in said
    assert "there is no column 'promts' (prompt='promts'); did you mean 'prompts'?" in complaint(
        file, qwen, prompt="promts"
    )
    assert "did you mean 'chosen_response'" in complaint(file, qwen, prompt="prompts", answer="chosen_respons")
    jsonl(file, [{"prompt": "a", "reward_model": {"ground_truth": "1"}}])
    assert "has no field 'groundtruth' (answer='reward_model.groundtruth'); did you mean 'ground_truth'?" in complaint(
        file, qwen, answer="reward_model.groundtruth"
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": 3}, "column 'prompt' is int64; it must be text, or messages"),
        ({"prompt": ["a", "b"]}, "column 'prompt' is list of text; it must be text, or messages"),
        ({"prompt": [{"from": "human", "value": "hi"}]}, "rename 'from' to 'role' and 'value' to 'content'"),
        ({"prompt": None}, "column 'prompt' is empty (null) in every row"),
        ({"prompt": []}, "column 'prompt' is list of null; it must be text, or messages"),
        ({"messages": "hi"}, "say prompt='messages' to use the text as a prompt"),
        ({"prompt": "a", "chosen": [BLUE], "rejected": [GREEN]}, "column 'prompt' is text, but 'chosen' is messages"),
        ({"prompt": "a", "prompt_ids": [1]}, "column 'prompt_ids' is one that Weft writes; rename it in the file"),
        ({"prompt": [{"role": "robot", "content": "a"}]}, "refused the messages: unknown role robot"),
        ({"prompt": [{"role": None, "content": "a"}, USER]}, "line 1: a message in 'prompt' has no role"),
        ({"prompt": [USER], "tools": "{"}, "column 'tools' is text that is not JSON"),
        ({"instruction": "add", "input": "2 2", "output": "4"}, "Alpaca's format) make one prompt together"),
        ({"messages": [BLUE]}, "line 1: 'messages' holds only a response"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]},
            "line 1: the content of a message of role 'user' is a list of content blocks (image, text); Weft takes text alone",
        ),
        (
            {"prompt": [USER], "completion": [{"role": "assistant", "content": ["Blue"]}]},
            "line 1: the content of a message of role 'assistant' is a list of content blocks (str); Weft takes text alone",
        ),
        ({"prompt": [{"role": "user", "content": 4}]}, "the content of a message of role 'user' is 4; it must be text"),
        (
            {"prompt": "What is it?", "images": ["cat.png"]},
            "line 1: column 'images' holds what a model would have to see or",
        ),
        (
            {"prompt": "a", "image": {"bytes": None, "path": "cat.png"}},
            "line 1: column 'image' holds what a model would have",
        ),
        ({"chosen": [BLUE], "rejected": [GREEN]}, "line 1: 'chosen' and 'rejected' begin with different messages"),
        ({"chosen": "Blue it is", "rejected": "Green it is"}, "line 1: 'chosen' and 'rejected' do not begin with"),
    ],
)
def test_columns_of_the_wrong_kind_are_named(row: dict[str, Any], said: str, tmp_path: Path, qwen: Path) -> None:
    assert said in complaint(jsonl(tmp_path / "k.jsonl", [row]), qwen)


def test_a_column_for_images_may_be_empty(tmp_path: Path, qwen: Path) -> None:
    rows = [{"prompt": "a", "images": [], "video": None}, {"prompt": "b", "images": None, "video": ""}]
    assert len(Prompts.read(jsonl(tmp_path / "k.jsonl", rows), qwen)) == 2


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ({"prompt": "a"}, {"prompt": ""}, "'prompt' is \"\"; every row needs text there"),
        ({"prompt": "a"}, {"prompt": " \n"}, "'prompt' is \" \\n\"; every row needs text there"),
        ({"prompt": "a"}, {"prompt": None}, "'prompt' is null; every row needs text there"),
        ({"prompt": [USER]}, {"prompt": []}, "'prompt' is []; every row needs at least one message there"),
        ({"prompt": [USER]}, {"prompt": None}, "'prompt' is null; every row needs at least one message there"),
        (
            {"messages": [USER, BLUE]},
            {"messages": [USER]},
            "'messages' ends without it (a prompt), but the rows before end",
        ),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}, "'completion' is null"),
    ],
)
def test_a_bad_row_is_named(write: Any, good: Any, bad: Any, said: str, tmp_path: Path, qwen: Path) -> None:
    other = write(tmp_path / f"a.{write.__name__}", [good])
    file = write(tmp_path / f"b.{write.__name__}", [good, good, bad, good])
    place = "b.jsonl, line 3: " if write is jsonl else "b.parquet, row 3: "
    assert (place + said) in complaint([other, file], qwen)


def test_the_line_is_right_after_blank_lines(tmp_path: Path, qwen: Path) -> None:
    file = tmp_path / "blank.jsonl"
    file.write_text('\n{"prompt": "a"}\n\n\n{"prompt": ""}\n')
    assert complaint(file, qwen).startswith("blank.jsonl, line 5: ")


def test_files_with_different_columns_are_refused(tmp_path: Path, qwen: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1"}])
    second = jsonl(tmp_path / "b.jsonl", [{"prompt": "1", "anser": "1"}])
    assert (
        complaint([first, second], qwen) == "b.jsonl: has no column 'answer', which a.jsonl has; did you mean 'anser'?"
    )
    jsonl(second, [{"prompt": "1", "answer": 1}])
    assert complaint([first, second], qwen) == "b.jsonl: column 'answer' is int64, but string in a.jsonl"


def test_a_tokenizer_that_cannot_be_had_is_named(tmp_path: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert said.startswith("tokenizer 'qwen2-tny' is neither a folder here nor a Hugging Face model that can be had")
    assert said.endswith("did you mean 'models/qwen2-tiny'?")


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    folder = qwen_like(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": [USER]}])
    assert "base has no chat template" in complaint(file, folder)
    assert len(Prompts.read(jsonl(file, [{"prompt": "2"}]), folder)) == 1
    (folder / "chat_template.jinja").write_text("{% for %}")
    assert "the chat template of" in complaint(jsonl(file, [{"prompt": [USER]}]), folder)


def test_a_chat_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    folder = qwen_like(tmp_path / "evil")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    assert "unsafe" in complaint(jsonl(tmp_path / "p.jsonl", [{"prompt": [USER]}]), folder)


def test_a_hub_id_is_taken_from_the_local_cache(tmp_path: Path, qwen: Path) -> None:
    # A cache as huggingface_hub keeps it; a process of its own, because the cache's place is read at import.
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
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout.splitlines()
    assert json.loads(out[0]) == Prompts.from_rows([{"prompt": "2 + 2"}], qwen).table["prompt_ids"].to_pylist()
    assert out[1] == "set()"  # nothing heavy was imported on the way


# The ids are those of transformers

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
    [{"role": "system", "content": "Be brief. "}, USER, BLUE, {"role": "user", "content": " And at night?\n"}],
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
            assert ours.render(dialogue, **how) == expected
            ids = ours.encode([expected], add_special_tokens=False)[0].tolist()
            assert ids == theirs.apply_chat_template(dialogue, tokenize=True, return_dict=False, **how)
        begun = [*dialogue, {"role": "assistant", "content": " It is \n"}]
        expected = theirs.apply_chat_template(begun, tokenize=False, continue_final_message=True)
        assert ours.render(begun, continue_last=True) == expected
    prompts = Prompts.from_rows([{"prompt": dialogue} for dialogue in DIALOGUES], folder)
    assert prompts.table["prompt_ids"].to_pylist() == [
        theirs.apply_chat_template(dialogue, add_generation_prompt=True, return_dict=False) for dialogue in DIALOGUES
    ]
    assert (
        Prompts.from_rows([{"prompt": t} for t in TEXTS[:-1]], folder).table["prompt_ids"].to_pylist()
        == (theirs(TEXTS[:-1])["input_ids"])
    )


def test_added_tokens_of_a_file_keep_their_flags() -> None:
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("abc ")}, []))
    backend.add_tokens([AddedToken("<a>", lstrip=True)])
    values, offsets = Tokenizer(backend).encode(["ab  <a>c", ""])
    assert (values.tolist(), offsets.tolist()) == ([0, 1, 4, 2], [0, 4, 4])


@pytest.mark.slow
def test_a_hundred_thousand_prompts_take_little_more_than_the_library(tmp_path: Path, qwen: Path) -> None:
    rows = [{"prompt": f"{CORPUS[i % 4]} {i}", "answer": str(i)} for i in range(100_000)]
    file = jsonl(tmp_path / "many.jsonl", rows)
    texts = [row["prompt"] for row in rows]
    backend = Tokenizer.load(qwen).backend
    started = time.perf_counter()
    expected = [encoding.ids for encoding in backend.encode_batch_fast(texts)]
    library_s = time.perf_counter() - started
    started = time.perf_counter()
    prompts = Prompts.read(file, qwen)
    weft_s = time.perf_counter() - started
    assert prompts.table["prompt_ids"].to_pylist() == expected
    assert weft_s < 1.5 * library_s + 1.0, (weft_s, library_s)
