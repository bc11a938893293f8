"""Training methods and rollout features: how exact and how fast they are.

    python benchmarks/rollouts.py                                      # thirty minutes
    python benchmarks/rollouts.py --parts distillation truncation      # two minutes

| figure | what it is | wanted |
|---|---|---|
| `distillation_gap` | largest divergence of a distilled student from the closed-form optimum on a one-token task, nats | 0.01 |
| `distillation_gap_top_4` | the same for the teacher's four likeliest tokens | 0.01 |
| `distillation_gap_before` | the same before the distillation, with all tokens | none |
| `truncated_gap`, `truncated_gap_largest` | gap between vLLM's and the trainer's log-probabilities, mean and largest, nats: the worst of \
samples with top-p 0.9, top-k 20, min-p 0.05, and all three | 1e-5, 5e-4 |
| `truncated_gap_transformers`, `truncated_gap_transformers_largest` | the same for the engine `transformers` | 1e-5, 5e-4 |
| `truncated_gap_whole` | mean gap if the trainer ignores the kept sets of top-p 0.9 | none |
| `kept_generation`, `kept_training` | time with kept sets (top-k 20) over the time without: `transformers` generating, an update | none |
| `int8_gap`, `int8_gap_largest` | gap between the log-probabilities of trainer and rollout in the demo with int8 rollouts, mean and \
largest, nats | none |
| `int8_kl`, `int8_truncated` | KL(generator, trainer) of these rollouts, nats a token; share of tokens with a truncated weight | none |
| `int8_accuracy`, `float32_accuracy` | the demo's accuracy with int8 rollouts and a correction, and without: mean of three seeds, and of \
the last four evaluations | none |
| `int8_accuracy_lost` | the difference | 0.03 |
| `adapters_equal`, `adapters_equal_transformers` | share of greedy responses of a mixed batch of four adapters that equal, bit for \
bit, the responses of each adapter alone in a batch of equal size, with vLLM and with `transformers` | 1, 1 |
| `adapters_equal_tokens`, `adapters_equal_tokens_transformers` | share with equal tokens if the batch of each adapter alone has only \
its quarter of the requests | 1, 1 |
| `adapters_gap`, `adapters_gap_transformers` | largest gap of their log-probabilities, nats | 1e-5, 0 |
| `adapters_time`, `adapters_time_transformers` | processor time of the mixed batch, divided by the time of a batch of one adapter | none |
| `speculation_p`, `speculation_p_ngram`, `speculation_p_draft_model` | p value of a chi-squared test that 20,000 responses of 5 tokens \
have one distribution with and without suffix drafts, n-gram drafts, and a draft model | 0.01 |
| `speculation_speedup`, `speculation_speedup_64` | tokens per second with suffix drafts over those without, for 2 and for 64 responses \
of repetitive text that decode together | 1.2, none |
| `speculating`, `speculating_64` | share of steps with drafts; the engine measures whether they pay | none |
| `draft_acceptance` | share of the drafted tokens that the model accepts, for 2 responses | none |

The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts import run_parts

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "rollouts"))
FIGURES = (
    *("distillation_gap", "distillation_gap_top_4", "distillation_gap_before"),
    *("truncated_gap", "truncated_gap_largest"),
    *("truncated_gap_transformers", "truncated_gap_transformers_largest"),
    *("truncated_gap_whole", "kept_generation", "kept_training"),
    *("int8_gap", "int8_gap_largest", "int8_kl", "int8_truncated"),
    *("int8_accuracy", "float32_accuracy", "int8_accuracy_lost"),
    *("adapters_equal", "adapters_equal_tokens", "adapters_gap", "adapters_time"),
    *("adapters_equal_transformers", "adapters_equal_tokens_transformers"),
    *("adapters_gap_transformers", "adapters_time_transformers"),
    *("speculation_p", "speculation_p_ngram", "speculation_p_draft_model"),
    *("speculation_speedup", "speculation_speedup_64"),
    *("speculating", "speculating_64", "draft_acceptance"),
)
PARTS = {
    "distillation": "distilled",
    "truncation": "truncated",
    "quantisation": "quantised",
    "adapters": "mixed_adapters",
    "speculation": "speculative",
}
"""Maps a part to its module, whose `measure()` returns figures by name."""

if __name__ == "__main__":
    run_parts(__doc__, FIGURES, PARTS)
