"""Agents: exact tokens, speed, failures and containment.

    python benchmarks/agents.py                     # ten minutes
    python benchmarks/agents.py --parts contained

| figure | what it is | wanted |
|---|---|---|
| `exact` | share of 1,040 random conversations whose rows have exactly the sampled and given tokens | 1.0 |
| `retokenised` | rows of 500 append-only conversations with sampled text that was tokenised again | 0 |
| `max_logprob_gap` | largest difference of a sampled token's log-probabilities in trainer and engine, float32 | 5e-4 |
| `pitfalls` | bugs of `tests/workers/agents/test_pitfalls.py` whose tests pass, of 15 | 15 |
| `contained` | attacks of `tests/workers/attacks.py` that fail to leave the sandbox, of 12 | 12 |
| `sandbox_start_ms` | milliseconds from a new sandbox to the end of `true` in it, median of 20 | none |
| `sandbox_run_ms` | milliseconds of another `true` in the same sandbox, median of 20 | none |
| `embodied` | seconds of 80 steps of environments with one part and with two, on a fake clock | 320, 161 |
| `kills` | kills of processes (harness, sandbox, gateway, rollout rank, driver) that lost and repeated no episode, of 50 | 50 |
| `kills_s` | seconds of these runs | none |
| `endpoint_overhead` | tokens/s of the bare engine over the gateway's with 64 sessions, median of 5 | at most 1.1 |
| `bare_tokens_per_s` | tokens per second of the bare engine, median of 5 | none |
| `beside_verifiers` | turns/s of verifiers' own training client over those through the chat API, median of 5 | at most 1.0 |
| `idle_share` | share of time without a request in the engine, with slow tools in 64 sessions that are all in use | at most 0.15 |
| `idle_share_to_the_end` | the same until the last episode ends | none |

`exact` takes the original chat templates that TRL ships, if `make bench-peers` has installed it. Otherwise, and
for Mistral, it takes the templates of `tests/workers/chat_families.py`.

The last line printed is one JSON object, with null for figures that were not requested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts import run_parts

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "agents"))
FIGURES = ("exact", "retokenised", "max_logprob_gap", "pitfalls")
FIGURES += ("contained", "sandbox_start_ms", "sandbox_run_ms", "embodied", "kills", "kills_s")
FIGURES += ("endpoint_overhead", "bare_tokens_per_s", "idle_share", "idle_share_to_the_end")
FIGURES += ("beside_verifiers",)
NAMES = ("exact", "pitfalls", "contained", "embodied", "kills", "throughput", "beside_verifiers")
PARTS = {name: name for name in NAMES}
"""Maps a part to its module, whose `measure()` returns figures by name."""

if __name__ == "__main__":
    run_parts(__doc__, FIGURES, PARTS)
