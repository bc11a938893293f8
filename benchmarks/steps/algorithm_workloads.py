"""Workloads of `algorithm_steps.py`: given responses for PPO, given pairs for DPO. Imports no Weft.

Lengths are as uneven as in real data: prompts of 8 to 32 tokens, log-normal responses of 4 to 256
with a median of 48.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workloads import STOP, WORKLOADS, Workload, make_model, make_tokenizer

PROMPT = (8, 32)
RESPONSE = (4, 256)
EPOCHS, MINIBATCHES = 2, 2
"""PPO's epochs and minibatches, for critic and actor."""


@dataclass(frozen=True)
class AlgorithmWorkload:
    """A model, and the rows per step."""

    model: Workload
    rows: int
    """Rows of a PPO step. A DPO step has half as many pairs."""
    trl_microbatch: int
    """[pairs] The fastest of 1 to 16 on the smaller model."""

    @property
    def pairs(self) -> int:
        return self.rows // 2

    def small(self) -> AlgorithmWorkload:
        """Return the same workload at the size of a test."""
        return replace(self, model=_long(self.model.small()), rows=8, trl_microbatch=2)


def _long(model: Workload) -> Workload:
    return replace(model, max_tokens=PROMPT[1] + RESPONSE[1] + 1, mean_tokens=48)


ALGORITHM_WORKLOADS = {
    "1m": AlgorithmWorkload(_long(WORKLOADS["a"]), rows=128, trl_microbatch=4),
    "25m": AlgorithmWorkload(_long(WORKLOADS["b"]), rows=32, trl_microbatch=4),
}


def prepare(workload: AlgorithmWorkload, folder: Path) -> Path:
    """Write `model/` (weights, tokenizer), `scalar/` (with a scalar head), `rows.jsonl` and
    `pairs.jsonl`."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "scalar"):
        make_tokenizer(workload.model, folder / name)
    make_model(workload.model, folder / "model")
    scalar: Any = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    scalar.save_pretrained(folder / "scalar")
    draw = random.Random(0)

    def words(lengths: tuple[int, int]) -> str:
        low, high = lengths
        length = draw.randint(low, high) if lengths == PROMPT else round(draw.lognormvariate(3.87, 0.7))
        return " ".join(
            f"w{draw.randrange(2, workload.model.vocabulary)}"
            for _ in range(min(high, max(low, length)))
        )

    rows = [{"prompt": words(PROMPT), "given": words(RESPONSE)} for _ in range(workload.rows)]
    pairs = [
        # TRL joins both before it tokenises them.
        {"prompt": words(PROMPT), "chosen": f" {words(RESPONSE)}", "rejected": f" {words(RESPONSE)}"}
        for _ in range(workload.pairs)
    ]
    for name, made in (("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def read(file: Path) -> list[dict[str, list[int]]]:
    """Return the rows as token ids. Chosen and rejected responses end with the stop token, as in
    both libraries."""
    ends = {"chosen": [STOP], "rejected": [STOP]}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        {
            name: [int(word[1:]) for word in text.split()] + ends.get(name, [])
            for name, text in row.items()
        }
        for row in rows
    ]


def num_tokens(rows: list[dict[str, list[int]]]) -> int:
    """Return the tokens of all sequences, each a prompt with a response."""
    return sum(
        (len(row) - 1) * len(row["prompt"]) + sum(map(len, row.values())) - len(row["prompt"])
        for row in rows
    )
