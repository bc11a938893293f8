"""Symptoms: signs that a run cannot learn. Each is said once, in words, with what to try.

A `Mistake` shows in the graph before anything starts, a `Symptom` in the metrics of a step. A rule is a value: a new one is a line of
`MISTAKES` or `SYMPTOMS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..algorithms.advantages import group_advantages
from ..dataflow.column import RESPONSE_IDS
from ..dataflow.graph import Graph
from ..dataflow.handle import Handle
from ..dataflow.node import Node

Row = Mapping[str, float]
"""The metrics of a step."""

FIRST = 3
"""Steps from the first in which nothing has to show before a run is said to be without it."""
LARGE_RATE = 0.1
"""AdamW moves each weight by about the learning rate a step; weights are smaller than this."""
LARGE_NORM = 1e4
LARGE_GAP = 1.0
"""Nats of a token: a probability that is wrong by a factor of e."""


@dataclass(frozen=True)
class Mistake:
    """What shows in a training graph, or in its groups."""

    found: Callable[[Graph, Mapping[str, Handle]], Iterator[str]]
    """Where it is, in words."""
    advice: str


@dataclass(frozen=True)
class Symptom:
    """What shows in metrics."""

    shows: Callable[[Row], str]
    """What is seen in the metrics of a step; empty when nothing is."""
    advice: str
    first: int | None = None
    """It counts when it shows in each of so many steps from the first on; None: whenever it shows."""


def _groups_of_one(graph: Graph, handles: Mapping[str, Handle]) -> Iterator[str]:
    for node in graph.nodes:
        if (
            node.function is group_advantages
            and not getattr(node.arguments.get("estimator"), "reads", ())
            and _siblings(graph, node) == 1
        ):
            yield f"node {node.name!r} compares the responses to a prompt with each other, and there is one of each (n=1)"


def _siblings(graph: Graph, node: Node) -> int | None:
    """Rows of a group on a node's level, as far as the graph says."""
    number, level = 1, node.level
    while level:
        maker = next(n for n in graph.nodes if n.makes_level == level)
        each = maker.arguments.get("n")
        if not isinstance(each, int):
            return None
        number, level = number * each, maker.level
    return number


def _greedy(graph: Graph, handles: Mapping[str, Handle]) -> Iterator[str]:
    generating = [n for n in graph.nodes if str(RESPONSE_IDS) in n.writes and n.makes_level is not None]
    settings = [n.arguments.get("sampling") for n in generating]
    if settings and all(getattr(one, "temperature", None) == 0 for one in settings):
        yield f"node {generating[0].name!r} trains on responses of temperature 0: all responses to a prompt are the same"


def _large_rates(graph: Graph, handles: Mapping[str, Handle]) -> Iterator[str]:
    for name in dict.fromkeys(n.group for n in graph.nodes if n.operation.updates and n.group):
        rate = getattr(handles[name].config, "learning_rate", 0.0)
        if isinstance(rate, float | int) and rate >= LARGE_RATE:
            yield f"worker group {name!r} has learning_rate={rate:g}, and a step moves each weight by about that much"


MISTAKES = (
    Mistake(
        _groups_of_one,
        "all advantages are 0, and nothing is learned. Try n=8, or an estimator with a baseline of its own (greedy_baseline)",
    ),
    Mistake(_greedy, "there is nothing to compare. Try Sampling(temperature=1)"),
    Mistake(
        _large_rates, "that destroys a model. Try 1e-6 for all weights, 1e-4 for an adapter, 1e-3 for a tiny model"
    ),
)


def _no_signal(row: Row) -> str:
    known = dict(_training(row, "groups_without_signal"))
    if known and all(value == 1 for value in known.values()):
        return "the rewards within every group are equal, so that all advantages are 0 and nothing is learned"
    return ""


def _all_cut_off(row: Row) -> str:
    known = dict(_training(row, "cut_off"))
    if known and all(value == 1 for value in known.values()):
        return "every response is cut off at its limit of tokens, so that none comes to its end"
    return ""


def _blown_up(row: Row) -> str:
    for name, value in (*_training(row, "loss"), *_training(row, "grad_norm")):
        if not math.isfinite(value):
            return f"{name} is {value}"
    for name, value in _training(row, "grad_norm"):
        if value > LARGE_NORM:
            return f"{name} is {value:.3g}"
    for name, value in (*_training(row, "approx_kl"), *_training(row, "mean_logprob_gap")):
        if not abs(value) <= LARGE_GAP:
            return f"{name} is {value:.3g} nats a token"
    return ""


def _training(row: Row, metric: str) -> Iterator[tuple[str, float]]:
    """Metrics of this name of the groups that train: not those of evaluations."""
    return ((name, value) for name, value in row.items() if name.count("/") == 1 and name.endswith(f"/{metric}"))


SYMPTOMS = (
    Symptom(
        _no_signal,
        "Look at the rewards in samples/. Try a reward that tells answers apart, easier prompts, more responses to each (n), or a "
        "model that succeeds now and then",
        first=FIRST,
    ),
    Symptom(
        _all_cut_off,
        "Try a larger Sampling(max_tokens=...), and look in samples/ whether the model ever writes its end-of-text token",
        first=FIRST,
    ),
    Symptom(
        _blown_up,
        "Training has probably diverged. Try a learning_rate ten times smaller, warmup_steps, or go back to a checkpoint before it",
    ),
)


def mistakes(graph: Graph, handles: Mapping[str, Handle]) -> list[str]:
    """What stands against learning before the run starts."""
    return [f"{where}; {rule.advice}" for rule in MISTAKES for where in rule.found(graph, handles)]


class Watch:
    """Looks at each step of a run, and says of each symptom once that it shows."""

    def __init__(self) -> None:
        self._said: set[int] = set()
        self._in_a_row: Counter[int] = Counter()

    def see(self, row: Row) -> list[str]:
        """What is to be said of a step that is over."""
        step, new = int(row["step"]), []
        for number, symptom in enumerate(SYMPTOMS):
            seen = symptom.shows(row)
            if number in self._said or not step or not seen:
                continue
            self._in_a_row[number] += 1
            if symptom.first is None:
                new.append(f"step {step}: {seen}. {symptom.advice}")
            elif step == symptom.first == self._in_a_row[number]:
                new.append(f"in each of the first {step} steps {seen}. {symptom.advice}")
            else:
                continue
            self._said.add(number)
        return new
