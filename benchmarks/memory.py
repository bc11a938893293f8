"""Training memory: savings by the chunked head, cost of loading, and accuracy of the memory plan.

    python benchmarks/memory.py                  # minutes
    python benchmarks/memory.py --quick          # small sizes
    python benchmarks/memory.py --only head plan

| figure | what it is | wanted |
|---|---|---|
| `lean_peak_ratio` | peak bytes of a loss with log-probabilities, entropies and k3: chunked head over plain head | 0.25 |
| `lean_time_ratio` | the same for seconds, medians of three | 1.1 |
| `large_head_gb` | resident memory of a chunked head in bfloat16, with hidden states and gradients | 4 |
| `load_ratio` | bytes that each of eight ranks reads or holds to load a model, over its shard (`model_loading.py`) | near 1 |
| `plan_error` | largest relative error of planned bytes against a real engine, over the ways of training | 0.1 |
| `sp_equal` | largest relative gradient error of two sequence-parallel ranks, over the models that support it | 1e-5 |
| `models_ok` | models of twelve that pass all checks of `models.py`: plain `transformers`, saving, adapters, two ranks, vLLM | 12 |
| `replayed_gap_ratio` | logprob gap between trainer and vLLM in bfloat16, with replayed experts over the trainer's own | below 1 |

The first two figures use 8,192 tokens and 32,768 ids, `large_head_gb` 16,384 tokens and 151,936
ids. The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "memory"), str(HERE / "operate"), str(HERE)]
FIGURES = (
    "lean_peak_ratio",
    "lean_time_ratio",
    "large_head_gb",
    "load_ratio",
    "plan_error",
    "sp_equal",
    "models_ok",
    "replayed_gap_ratio",
)


def _load(*, quick: bool) -> dict[str, Any]:
    found = importlib.import_module("model_loading").measure(small=quick, ranks=2 if quick else 8)
    return {"load_ratio": found["start_bytes_per_rank_ratio"]}


def _plan(*, quick: bool) -> dict[str, Any]:
    found = importlib.import_module("plan_memory").measure(quick=quick)
    return {"plan_error": found["plan_memory_error"]}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "head": lambda quick: importlib.import_module("head_chunks").measure(quick=quick),
    "large_head": lambda quick: importlib.import_module("head_chunks").measure_large(quick=quick),
    "load": _load,
    "plan": _plan,
    "routes": lambda quick: importlib.import_module("routes").measure(quick=quick),
    "models": lambda quick: importlib.import_module("models").measure(quick=quick),
}


def main() -> None:
    from machine import load

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, for the tests")
    options = parser.parse_args()
    figures = dict.fromkeys(FIGURES)
    for part in options.only:
        found = PARTS[part](quick=options.quick)
        print(f"{part}: {found}; load {load()}", flush=True)
        figures |= {name: value for name, value in found.items() if name in FIGURES}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
