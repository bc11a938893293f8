"""Formats: rows of ten common data sets, and data of eight trainers' scripts, read unmodified.

    python benchmarks/tasks/formats.py

`formats()` counts the formats whose rows are all read correctly.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers import models, pre_tokenizers

from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer

ASK = {"role": "user", "content": "2 + 2?"}
RIGHT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}
THANK = {"role": "user", "content": "Thanks"}
PROMPT = "<user>2 + 2?\n<assistant>"


@dataclass(frozen=True)
class Case:
    """A row as a trainer's script writes it, and the expected result."""

    file: str
    row: Mapping[str, Any]
    prompt: str = PROMPT
    answer: str | None = None
    responses: tuple[str, ...] = ()
    """Text of the response, or of the chosen and the rejected one."""
    kept_as: Mapping[str, str] = field(default_factory=dict)
    """Renamed columns."""


CASES: dict[str, list[Case]] = {
    "TRL prompt-only": [
        Case("train.parquet", {"prompt": [ASK], "solution": r"So $\boxed{4}$."}, answer="4"),
        Case("train.jsonl", {"prompt": "2 + 2?"}),
    ],
    "TRL prompt-completion": [
        Case("train.parquet", {"prompt": [ASK], "completion": [RIGHT]}, responses=("4\n",)),
        Case(
            "train.jsonl",
            {"prompt": "2 + 2 =", "completion": " 4"},
            prompt="2 + 2 =",
            responses=(" 4<eos>",),
        ),
        Case("train.jsonl", {"messages": [ASK, RIGHT]}, responses=("4\n",)),
    ],
    "TRL preference": [
        Case(
            "train.parquet",
            {"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]},
            responses=("4\n", "5\n"),
        ),
        Case(
            "train.jsonl", {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, responses=("4\n", "5\n")
        ),
    ],
    "TRL preference, implicit prompt": [
        Case(
            "train.parquet",
            {
                "chosen": [ASK, RIGHT],
                "rejected": [ASK, WRONG],
                "score_chosen": 9.0,
                "score_rejected": 1.0,
            },
            responses=("4\n", "5\n"),
        ),
        Case(
            "train.jsonl",
            {"chosen": "Human: 2 + 2?\n\nAssistant: 4", "rejected": "Human: 2 + 2?\n\nAssistant: 5"},
            prompt="Human: 2 + 2?\n\nAssistant:",
            responses=(" 4<eos>", " 5<eos>"),
        ),
    ],
    "verl": [
        Case(
            "train.parquet",
            {
                "data_source": "openai/gsm8k",
                "prompt": [ASK],
                "ability": "math",
                "reward_model": {"ground_truth": "4", "style": "rule"},
                "extra_info": {
                    "answer": "2 + 2 = <<2+2=4>>4\n#### 4",
                    "index": 0,
                    "question": "2 + 2?",
                    "split": "train",
                },
                "__index_level_0__": 0,
            },
            answer="4",
        )
    ],
    "OpenRLHF": [
        Case("train.jsonl", {"input": [ASK], "label": "4", "datasource": "sums"}, answer="4"),
        Case(
            "train.parquet",
            {"context_messages": [ASK], "context": "2 + 2?", "dataset": "sums", "id": "a-1"},
        ),
        Case("train.jsonl", {"input": "2 + 2?", "output": "4"}, responses=("4\n",)),
    ],
    "slime": [
        Case("dapo.jsonl", {"prompt": [ASK], "label": "4"}, answer="4"),
        Case(
            "train.jsonl", {"messages": [ASK], "label": "4", "metadata": {"rm_type": "math"}}, answer="4"
        ),
    ],
    "prime-rl": [
        Case(
            "train.parquet",
            {"question": "2 + 2?", "answer": "4", "info": '{"level": 1}', "task": "sums"},
            answer="4",
        ),
        Case(
            "train.jsonl",
            {"example_id": 0, "task": "sums", "prompt": [ASK], "info": {"level": 1}, "answer": "4"},
            answer="4",
        ),
    ],
    "UltraFeedback": [
        Case(
            "train_prefs.parquet",
            {
                "prompt": "2 + 2?",
                "prompt_id": "f0e37e9f7800261167ce91143f98f511f768847236f133f2d0aed60b444ebe57",
                "chosen": [ASK, RIGHT],
                "rejected": [ASK, WRONG],
                "messages": [ASK, RIGHT],
                "score_chosen": 8.5,
                "score_rejected": 3.0,
            },
            responses=("4\n", "5\n"),
        ),
        Case(
            "pairs.jsonl",
            {"prompt": " 2 + 2?\n", "chosen": [SYSTEM, ASK, RIGHT], "rejected": [SYSTEM, ASK, WRONG]},
            prompt=f"<system>Be brief.\n{PROMPT}",
            responses=("4\n", "5\n"),
        ),
        Case(
            "turns.jsonl",
            {
                "prompt": "2 + 2?",
                "chosen": [ASK, RIGHT, THANK, {"role": "assistant", "content": "Fine."}],
                "rejected": [ASK, RIGHT, THANK, {"role": "assistant", "content": "No."}],
            },
            prompt=f"{PROMPT}4\n<user>Thanks\n<assistant>",
            responses=("Fine.\n", "No.\n"),
        ),
    ],
    "UltraChat": [
        Case(
            "train_sft.parquet",
            {"prompt": "2 + 2?", "prompt_id": "f0e37e9f", "messages": [ASK, RIGHT]},
            responses=("4\n",),
        ),
        Case(
            "train_sft.jsonl",
            {"prompt": "2 + 2?", "prompt_id": "f0e37e9f", "messages": [ASK, WRONG, ASK, RIGHT]},
            prompt=f"{PROMPT}5\n{PROMPT}",
            responses=("4\n",),
        ),
    ],
    "ShareGPT": [
        Case(
            "sharegpt.json",
            {
                "id": "QWJhYvA_0",
                "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}],
            },
            responses=("4\n",),
        ),
        Case(
            "hermes.parquet",
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "2 + 2?"},
                    {"from": "gpt", "value": "4"},
                ],
                "source": "sums",
            },
            prompt=f"<system>Be brief.\n{PROMPT}",
            responses=("4\n",),
        ),
        Case(
            "pairs.jsonl",
            {
                "system": "Be brief.",
                "conversations": [{"from": "human", "value": "2 + 2?"}],
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
            },
            prompt=f"<system>Be brief.\n{PROMPT}",
            responses=("4\n", "5\n"),
        ),
    ],
    "Alpaca": [
        Case(
            "alpaca.parquet",
            {
                "instruction": "Add.",
                "input": "2 + 2",
                "output": "4",
                "text": "Below is an instruction ...",
            },
            prompt="<user>Add.\n\n2 + 2\n<assistant>",
            responses=("4\n",),
        ),
        Case(
            "alpaca_data.json", {"instruction": "2 + 2?", "input": "", "output": "4"}, responses=("4\n",)
        ),
        Case(
            "alpaca.jsonl",
            {"instruction": "2 + 2?", "output": "4", "system": "Be brief."},
            prompt=f"<system>Be brief.\n{PROMPT}",
            responses=("4\n",),
        ),
    ],
    "Orca pairs": [
        Case(
            "orca_rlhf.jsonl",
            {"system": "Be brief.", "question": "2 + 2?", "chosen": "4", "rejected": "5"},
            prompt=f"<system>Be brief.\n{PROMPT}",
            responses=("4\n", "5\n"),
        ),
        Case(
            "orca_rlhf.parquet",
            {"system": "", "question": "2 + 2?", "chosen": "4", "rejected": "5"},
            responses=("4\n", "5\n"),
        ),
    ],
    "HH-RLHF": [
        Case(
            "train.jsonl.gz",
            {
                "chosen": "\n\nHuman: 2 + 2?\n\nAssistant: It is 4",
                "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: It is 5",
            },
            prompt="\n\nHuman: 2 + 2?\n\nAssistant:",
            responses=(" It is 4<eos>", " It is 5<eos>"),
        ),
        Case(
            "train.parquet",
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: Hi.\n\nHuman: 2 + 2?\n\nAssistant: 4",
                "rejected": "\n\nHuman: Hi\n\nAssistant: Hi.\n\nHuman: 2 + 2?\n\nAssistant: ",
            },
            prompt="\n\nHuman: Hi\n\nAssistant: Hi.\n\nHuman: 2 + 2?\n\nAssistant:",
            responses=(" 4<eos>", " <eos>"),
        ),
    ],
    "OpenAssistant pairs": [
        Case(
            "train.parquet",
            {
                "lang": "en",
                "parent_id": "0e5fa3b2-4b4c-4c35-8a8e-7a1b1b4c5b6a",
                "prompt": "2 + 2?",
                "chosen": "4",
                "rejected": "5",
                "__index_level_0__": 0,
            },
            responses=("4\n", "5\n"),
            kept_as={"parent_id": "file_parent_id"},
        ),
    ],
    "GSM8K": [
        Case(
            "test.jsonl",
            {"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4 in all.\n#### 4"},
            answer="4",
        ),
        Case(
            "test.parquet",
            {"question": "2 + 2?", "answer": "It is <<2*1000=2000>>2,000.\n#### 2,000"},
            answer="2000",
        ),
    ],
    "MATH": [
        Case(
            "train.parquet",
            {
                "problem": "2 + 2?",
                "level": "Level 1",
                "type": "Algebra",
                "solution": r"It is $\boxed{\frac{8}{2}}$.",
            },
            answer=r"\frac{8}{2}",
        ),
        Case(
            "test.jsonl",
            {
                "problem": "2 + 2?",
                "solution": r"It is $\boxed{4}$.",
                "answer": "4",
                "subject": "Algebra",
                "level": 1,
                "unique_id": "test/algebra/1.json",
            },
            answer="4",
        ),
    ],
    "verl's parquet": [
        Case(
            "train.parquet",
            {
                "data_source": "lighteval/MATH",
                "prompt": [ASK],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {"split": "train", "index": 0},
            },
            answer="4",
        ),
        Case(
            "sft.parquet",
            {"extra_info": {"question": "2 + 2?", "answer": "4"}, "messages": [ASK, RIGHT]},
            responses=("4\n",),
        ),
    ],
}
"""Maps a format to rows in actual use, the usual form first."""


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, an end-of-sequence token, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    return Tokenizer(backend, chat_template=template, special_tokens={"eos_token": "<eos>"})


def write(folder: Path, case: Case) -> Path:
    """Write the file of a case, with two equal rows."""
    file = folder / case.file
    rows = [dict(case.row)] * 2
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        text = (
            json.dumps(rows)
            if file.suffix == ".json"
            else "".join(json.dumps(row) + "\n" for row in rows)
        )
        file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def mistakes(folder: Path, case: Case) -> list[str]:
    """Read the file of a case, and return the mistakes."""
    tokenizer = byte_tokenizer()
    prompts = Prompts.read(write(folder, case), tokenizer)
    row = prompts.table.to_pylist()[1]
    texts = [
        tokenizer.backend.decode(row[c], skip_special_tokens=False)
        for c in prompts.columns
        if c.endswith("_ids")
    ]
    wanted = {"prompt": case.prompt, "responses": case.responses, "answer": case.answer}
    found = {"prompt": texts[0], "responses": tuple(texts[1:]), "answer": row.get("answer")}
    kept = {
        name: row.get(case.kept_as.get(name, name))
        for name in case.row
        if name not in ("prompt", "answer")
    }
    lost = [name for name, value in kept.items() if value != case.row[name]]
    return [
        f"{name}: {found[name]!r}, not {wanted[name]!r}"
        for name in wanted
        if found[name] != wanted[name]
    ] + [f"column {name!r} is {kept[name]!r}, not {case.row[name]!r}" for name in lost]


def formats() -> tuple[int, int]:
    """Return the number of formats that are read correctly in all forms, and of all formats."""
    right = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, cases in CASES.items():
            wrong = [mistake for case in cases for mistake in mistakes(Path(folder), case)]
            right += not wrong
            for mistake in wrong:
                print(f"{name}: {mistake}", file=sys.stderr)
    return right, len(CASES)


if __name__ == "__main__":
    done, number = formats()
    print(json.dumps({"formats": f"{done}/{number}"}))
