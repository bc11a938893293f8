"""Formats: data as eight trainers' own scripts write it, read without a change. `formats()` counts those that are read rightly.

python benchmarks/tasks/formats.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
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
PROMPT = "<user>2 + 2?\n<assistant>"


@dataclass(frozen=True)
class Case:
    """A row as a trainer's script writes it, and what must come of it."""

    file: str
    row: Mapping[str, Any]
    prompt: str = PROMPT
    answer: str | None = None
    responses: tuple[str, ...] = ()
    """Texts of the response, or of the chosen and the rejected one."""


CASES: dict[str, list[Case]] = {
    "TRL prompt-only": [
        Case("train.parquet", {"prompt": [ASK], "solution": r"So $\boxed{4}$."}, answer="4"),
        Case("train.jsonl", {"prompt": "2 + 2?"}),
    ],
    "TRL prompt-completion": [
        Case("train.parquet", {"prompt": [ASK], "completion": [RIGHT]}, responses=("4\n",)),
        Case("train.jsonl", {"prompt": "2 + 2 =", "completion": " 4"}, prompt="2 + 2 =", responses=(" 4<eos>",)),
        Case("train.jsonl", {"messages": [ASK, RIGHT]}, responses=("4\n",)),
    ],
    "TRL preference": [
        Case("train.parquet", {"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]}, responses=("4\n", "5\n")),
        Case("train.jsonl", {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, responses=("4\n", "5\n")),
    ],
    "TRL preference, implicit prompt": [
        Case(
            "train.parquet",
            {"chosen": [ASK, RIGHT], "rejected": [ASK, WRONG], "score_chosen": 9.0, "score_rejected": 1.0},
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
        Case("train.parquet", {"context_messages": [ASK], "context": "2 + 2?", "dataset": "sums", "id": "a-1"}),
        Case("train.jsonl", {"input": "2 + 2?", "output": "4"}, responses=("4\n",)),
    ],
    "slime": [
        Case("dapo.jsonl", {"prompt": [ASK], "label": "4"}, answer="4"),
        Case("train.jsonl", {"messages": [ASK], "label": "4", "metadata": {"rm_type": "math"}}, answer="4"),
    ],
    "prime-rl and verifiers": [
        Case(
            "train.parquet", {"question": "2 + 2?", "answer": "4", "info": '{"level": 1}', "task": "sums"}, answer="4"
        ),
        Case(
            "train.jsonl",
            {"example_id": 0, "task": "sums", "prompt": [ASK], "info": {"level": 1}, "answer": "4"},
            answer="4",
        ),
    ],
}
"""Format -> rows as they are in use. The first of each is its usual form."""


def byte_tokenizer() -> Tokenizer:
    """One token per byte, an end-of-sequence token, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    return Tokenizer(backend, chat_template=template, special_tokens={"eos_token": "<eos>"})


def write(folder: Path, case: Case) -> Path:
    """The file of a case, with two equal rows, as Parquet or JSON lines."""
    file = folder / case.file
    rows = [dict(case.row)] * 2
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def mistakes(folder: Path, case: Case) -> list[str]:
    """What is wrong with a case when its file is read: nothing, where all is right."""
    tokenizer = byte_tokenizer()
    prompts = Prompts.read(write(folder, case), tokenizer)
    row = prompts.table.to_pylist()[1]
    texts = [tokenizer.backend.decode(row[c], skip_special_tokens=False) for c in prompts.columns if c.endswith("_ids")]
    wanted = {"prompt": case.prompt, "responses": case.responses, "answer": case.answer}
    found = {"prompt": texts[0], "responses": tuple(texts[1:]), "answer": row.get("answer")}
    lost = [name for name in case.row if name not in ("prompt", "answer") and row.get(name) != case.row[name]]
    return [f"{name}: {found[name]!r}, not {wanted[name]!r}" for name in wanted if found[name] != wanted[name]] + [
        f"column {name!r} is {row.get(name)!r}, not {case.row[name]!r}" for name in lost
    ]


def formats() -> tuple[int, int]:
    """How many formats are read rightly in each of their forms, and how many there are."""
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
