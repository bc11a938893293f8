"""The schedules of `schedules.py`, and the work that all of them do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from workloads import PROMPT_TOKENS, Workload

APART = ("rollout", "actor")
"""Groups with one core each, or with both cores together."""
Measured = Mapping[str, Sequence[Mapping[str, Any]]]
"""Schedule -> reports of its runs."""


class Setting(NamedTuple):
    kind: Literal["synchronous", "pipelined", "asynchronous"]
    max_staleness: int = 0
    apart: bool = True
    """Rollout and actor have a core each; if False, they take turns on both."""


SCHEDULES = {
    "synchronous": Setting("synchronous"),
    "pipelined": Setting("pipelined"),
    "asynchronous_1": Setting("asynchronous", 1),
    "asynchronous_2": Setting("asynchronous", 2),
    "colocated": Setting("synchronous", apart=False),
}


@dataclass(frozen=True)
class Work:
    """The work of every schedule, with about equal times for generation and training."""

    groups: int = 32
    samples: int = 8
    median: float = 32.0
    """[tokens] Median response; lengths are log-normal."""
    sigma: float = 0.8
    longest: int = 192
    slots: int = 24
    """Concurrent responses of the engine. Fewer slow down generation, but not training."""
    groups_per_part: int = 2
    """Half of the tokens of a microbatch, so that the first part arrives early."""
    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    mlp: int = 1024
    warm_up: int = 1
    counted: int = 6
    tail: int = 3
    """Steps after the counted ones, more than the staleness: generation that runs ahead ends here."""

    @property
    def steps(self) -> int:
        return self.warm_up + self.counted + self.tail

    @property
    def context(self) -> int:
        return PROMPT_TOKENS + self.longest

    def workload(self) -> Workload:
        """Return the model, and a different prompt for each group of the run."""
        sizes = {
            name: getattr(self, name) for name in ("vocabulary", "hidden", "layers", "heads", "mlp")
        }
        prompts = self.groups * self.steps
        return Workload(
            "schedules", num_prompts=prompts, num_samples=self.samples, max_tokens=self.longest, **sizes
        )

    def small(self) -> Work:
        few = {
            "groups": 3,
            "groups_per_part": 1,
            "samples": 4,
            "slots": 8,
            "warm_up": 1,
            "counted": 3,
            "tail": 3,
        }
        short = {"median": 6.0, "longest": 24}
        return replace(self, **few, **short, vocabulary=256, hidden=64, layers=2, heads=2, mlp=128)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
