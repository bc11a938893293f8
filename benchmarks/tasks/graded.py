"""Graded answers: the share of labelled answers that the graders judge correctly.

    python benchmarks/tasks/graded.py [FILE]

Each line of the file is a case: the grader's kind (`math`, `gsm8k` or `choice`), the correct
answer, a response, and its label. `source` names the project whose public tests contain the case;
"own" cases were written here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from weft.algorithms.graders import math
from weft.algorithms.graders.choice import MultipleChoice
from weft.algorithms.graders.math import Gsm8k, Math
from weft.dataflow.errors import SampleError

FILE = Path(__file__).resolve().parent / "graded_answers.jsonl"
math.DEADLINE_S = 30.0  # a busy machine must not change a figure
GRADERS: dict[str, Any] = {"math": Math(), "gsm8k": Gsm8k(), "choice": MultipleChoice()}


def read(file: Path = FILE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def wrong(cases: list[dict[str, Any]]) -> list[str]:
    """Describe each wrong judgement. A missing verdict counts as wrong."""
    found: list[str] = []
    for case in cases:
        try:
            said = bool(GRADERS[case["kind"]](case["response"], case["answer"]))
        except SampleError as error:
            said = f"no verdict ({error})"
        if said is not case["right"]:
            found.append(
                f"{case['kind']}, {case['source']}: {case['response'][-200:]!r} for {case['answer']!r}: {said}"
            )
    return found


def graded_right(file: Path = FILE) -> float:
    """Return the share of correctly judged cases."""
    cases = read(file)
    mistakes = wrong(cases)
    for mistake in mistakes:
        print(mistake, file=sys.stderr)
    return 1 - len(mistakes) / len(cases)


if __name__ == "__main__":
    print(json.dumps({"graded_right": graded_right(*map(Path, sys.argv[1:]))}))
