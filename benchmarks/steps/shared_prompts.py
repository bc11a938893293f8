"""Updates of rows that share prompts: computing each prompt once against each row by itself.

    python benchmarks/steps/shared_prompts.py            # two minutes
    python benchmarks/steps/shared_prompts.py --small    # to see that it works: not a measurement

| figure | what it is | wanted |
|---|---|---|
| `dpo_speedup` | seconds of an update of 8 pairs, prompts and answers of 128 tokens, over those with shared prompts | 1.3 |
| `grpo_speedup` | the same for 4 groups of 8 samples, prompts of 256 tokens and answers of 64 | |
| `grpo_logprobs_speedup` | the same for a pass that only computes log-probabilities of those samples | |
| `difference` | largest relative difference of the gradient norms | 1e-5 |

One process in float32 trains the model of 25 million parameters with 1,024 ids. Its head then takes
the same share of the arithmetic as in a model of 8 billion (a sixteenth). `large_head` figures have
32,768 ids: the head takes half, and costs the same either way. Both ways take turns, and seconds
are medians. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent)]


def rows_of(
    prompts: int, samples: int, prompt: int, answer: int, vocabulary: int, *, pairs: bool
) -> Any:
    """Return random rows with this many responses per prompt."""
    from weft.dataflow.batch import Batch

    rng, rows = np.random.default_rng(0), prompts * samples
    given = np.repeat(rng.integers(4, vocabulary, (prompts, prompt)), samples, axis=0)
    tokens, cu_seqlens = rows * answer, np.arange(rows + 1) * answer
    columns: dict[str, Any] = {
        "sample_id": np.arange(rows),
        "group_id": np.repeat(np.arange(prompts), samples),
        "prompt_ids": given.tolist(),
        "response_ids": (rng.integers(4, vocabulary, tokens), cu_seqlens),
        "response_mask": (np.ones(tokens, np.uint8), cu_seqlens),
    }
    if pairs:
        columns |= {
            "preferred": np.tile(np.array([1, 0], np.uint8), prompts),
            "reference_logprobs": (np.full(tokens, -10.0, np.float32), cu_seqlens),
        }
    else:
        drawn = rng.normal(size=tokens).astype(np.float32)
        columns |= {"advantages": (drawn, cu_seqlens), "response_logprobs": (drawn - 10, cu_seqlens)}
    return Batch.of(**columns)


def measure(*, small: bool, rounds: int, vocabulary: int) -> dict[str, Any]:
    from workloads import WORKLOADS, make_model, make_tokenizer

    from weft.algorithms.policy_loss import PolicyLoss
    from weft.algorithms.preference_loss import PreferenceLoss
    from weft.algorithms.surrogates import PlainPolicyGradient
    from weft.workers.actor import ActorConfig, ActorWorker

    workload = WORKLOADS["a"] if small else replace(WORKLOADS["b"], vocabulary=vocabulary)
    with tempfile.TemporaryDirectory(prefix="weft-prompts-") as scratch:
        folder = Path(scratch) / "model"
        make_tokenizer(workload, folder)
        make_model(workload, folder)
        worker = ActorWorker(ActorConfig(model=str(folder), learning_rate=1e-12))
        engine: Any = worker.engine
        size = (2, 2, 16, 16) if small else (8, 2, 128, 128)
        pairs = rows_of(*size, engine.vocabulary, pairs=True)
        size = (2, 4, 16, 8) if small else (4, 8, 256, 64)
        samples = rows_of(*size, engine.vocabulary, pairs=False)
        ways = {
            "dpo": lambda: worker.update(pairs, loss=PreferenceLoss()),
            "grpo": lambda: worker.update(samples, loss=PolicyLoss(surrogate=PlainPolicyGradient())),
            "grpo_logprobs": lambda: worker.logprobs(samples),
        }
        figures: dict[str, Any] = {}
        difference = 0.0
        for name, update in ways.items():
            seconds: dict[bool, list[float]] = {True: [], False: []}
            norms: dict[bool, float] = {}
            for number in range(rounds + 1):
                for shares in (True, False):
                    engine.model.shares_prompts = shares
                    start = time.perf_counter()
                    found: Any = update()
                    if number:  # the first update allocates memory and moments
                        seconds[shares].append(time.perf_counter() - start)
                    if name != "grpo_logprobs":
                        norms[shares] = found["grad_norm"].value
            if norms:
                difference = max(difference, abs(norms[True] / norms[False] - 1))
            once, each = median(seconds[True]), median(seconds[False])
            print(f"{name:<14} {once:7.3f} s with shared prompts, {each:7.3f} s without", flush=True)
            figures[f"{name}_speedup"] = round(each / once, 3)
        return {**figures, "difference": float(f"{difference:.1e}")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a tiny model and few rows")
    parser.add_argument("--rounds", type=int, default=5, help="counted updates in each way")
    asked = parser.parse_args()
    figures = measure(small=asked.small, rounds=asked.rounds, vocabulary=1024)
    if not asked.small:
        large = measure(small=False, rounds=asked.rounds, vocabulary=32768)
        figures |= {f"large_head_{name}": value for name, value in large.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
