"""Your own task: data, rewards and graders in their usual forms.

    python benchmarks/tasks.py [--only FIGURE ...] [--gsm8k FILE] [--seeds N ...] [--backends local ray]

| figure | what it is | wanted |
|---|---|---|
| `trials_ok` | trials of three examples x 10 seeds x 2 backends: exit 0, accuracy +0.15, in 120 s | 60/60 |
| `gsm8k_tiny_s` | seconds of the GSM8K example with a tiny model on a CPU | 150 or fewer |
| `graded_right` | share of labelled answers (`tasks/graded_answers.jsonl`) that the graders judge correctly | 0.99 |
| `graded_new` | the same share of `tasks/graded_new.jsonl`, which was labelled before a grader read it | 0.98 |
| `signatures` | libraries whose reward functions run unmodified | 5/5 |
| `formats` | formats of common data sets and trainers that are read unmodified | 18/18 |
| `reward_calls_s_ratio` | 64 asynchronous rewards of 100 ms on one rank: time in sequence over time in parallel | 21 |

Each figure is a function in a module of `tasks/`. `trials_ok` prints the accuracies and seconds of
each trial to standard error, to tell a slow machine from a model that does not learn. All 60 trials
take an hour; `--seeds` and `--backends` select some. The last line printed is one JSON object, with
null for figures that were not requested.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "tasks"))


def _figure(module: str, function: str, *arguments: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments)


def _of_all(counts: tuple[int, int]) -> str:
    return f"{counts[0]}/{counts[1]}"


def _reward_calls(_: object) -> dict[str, float]:
    together_s, in_turn_s = _figure("reward_calls", "reward_calls")
    return {
        "reward_calls_s": round(together_s, 3),
        "reward_calls_s_ratio": round(in_turn_s / together_s, 1),
    }


_NEW_ANSWERS = Path(__file__).resolve().parent / "tasks" / "graded_new.jsonl"
FIGURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "trials_ok": lambda given: {
        "trials_ok": _of_all(_figure("trials", "trials", given.seeds, given.backends))
    },
    "gsm8k_tiny_s": lambda given: {
        "gsm8k_tiny_s": round(_figure("gsm8k", "gsm8k_tiny_s", given.gsm8k), 1)
    },
    "graded_right": lambda _: {"graded_right": round(_figure("graded", "graded_right"), 4)},
    "graded_new": lambda _: {"graded_new": round(_figure("graded", "graded_right", _NEW_ANSWERS), 4)},
    "signatures": lambda _: {"signatures": _of_all(_figure("signatures", "signatures"))},
    "formats": lambda _: {"formats": _of_all(_figure("formats", "formats"))},
    "reward_calls_s_ratio": _reward_calls,
}
NAMES = (
    "trials_ok",
    "gsm8k_tiny_s",
    "graded_right",
    "graded_new",
    "signatures",
    "formats",
    "reward_calls_s_ratio",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(FIGURES), default=list(FIGURES), metavar="FIGURE"
    )
    parser.add_argument(
        "--gsm8k", type=Path, metavar="FILE", help="rows of GSM8K for gsm8k_tiny_s; default: generated"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=list(range(10)), metavar="N", help="seeds of trials_ok"
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=("local", "ray"),
        default=["local", "ray"],
        help="backends of trials_ok",
    )
    arguments, figures = parser.parse_args(), dict[str, Any].fromkeys(NAMES)
    for name in arguments.only:
        figures |= FIGURES[name](arguments)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
