"""Symptoms: signs that a run cannot learn. Each is reported once, with advice.

A `Mistake` shows in the graph before anything starts, a `Symptom` in the metrics of a step. A rule is a value: a new one is a line of
`MISTAKES` or `SYMPTOMS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
FIRST_WITHOUT_SIGNAL = 2
"""The same of signal: without it nothing at all is learned."""
LAST_JUDGED = 10
"""Last step after which a run can be said to have had no signal from the start."""
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


def _has_signal(row: Row) -> bool | None:
    """Whether rewards differ within any group; None: it was not measured."""
    known = [value for _, value in _training(row, "groups_without_signal") if not math.isnan(value)]
    return any(value != 1 for value in known) if known else None


def _no_signal(row: Row) -> str:
    if _has_signal(row) is not False:
        return ""
    values = {name: value for name, value in _training(row, "std") if value == 0}
    all_are = [f"all are {row[mean]:g}" for name in values if (mean := name.removesuffix("std") + "mean") in row]
    which = f" ({all_are[0]})" if all_are else ""
    return f"the rewards within every group are equal{which}, so that all advantages are 0 and nothing is learned"


def all_filtered(row: Row, groups: int) -> str:
    """What is to be said of a first step that cannot end, because a filter drops groups of equal rewards and all are; empty: there is
    nothing to be said yet.

    Args:
        row: the metrics of the step so far.
        groups: dropped groups from which on it is said, if no other has passed.

    >>> all_filtered({"functions/zero_variance_groups": 3.0, "reward/mean": 0.0}, 4)
    ''
    >>> all_filtered({"functions/zero_variance_groups": 4.0, "reward/mean": 0.0}, 4)[:64]
    'the rewards within each of the first 4 groups are equal (mean 0)'
    """
    dropped = sum(value for _, value in _training(row, "zero_variance_groups"))
    if dropped < groups or _has_signal(row) is not None:
        return ""
    means = [f"{name.partition('/')[2]} {value:g}" for name, value in row.items() if name.startswith("reward/")]
    shown = f" ({', '.join(means)})" if means else ""
    return (
        f"the rewards within each of the first {dropped:g} groups are equal{shown}, and a filter drops such groups, so that no step "
        f"is ever over. {SYMPTOMS[0].advice}; Driver(stop_without_signal=False) lets the run go on"
    )


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
        first=FIRST_WITHOUT_SIGNAL,
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
    """The settings that prevent learning, found before the run starts: a line of advice for each."""
    return [f"{where}; {rule.advice}" for rule in MISTAKES for where in rule.found(graph, handles)]


class Watch:
    """Looks at each step of a run, and reports each symptom once."""

    def __init__(self) -> None:
        self._said: set[int] = set()
        self._in_a_row: Counter[int] = Counter()
        self._signal: dict[int, bool] = {}
        """Step -> whether it had signal, where that was measured."""

    def see(self, row: Row) -> list[str]:
        """New symptoms of a finished step, a line for each."""
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

    def remember(self, rows: Iterable[Row]) -> None:
        """Note whether there was signal in steps that are over."""
        for row in rows:
            if row["step"] and (has := _has_signal(row)) is not None:
                self._signal[int(row["step"])] = has

    def without_signal(self, row: Row) -> str:
        """What is to be said of a run that has had no signal in any step so far, when a step is over; empty: it has had some, or it is
        too early to say, or too late to say it of the start."""
        step = int(row["step"])
        if not step or step > LAST_JUDGED:
            return ""
        self.remember([row])
        seen, steps = _no_signal(row), len(self._signal)
        if not seen or any(self._signal.values()) or steps < FIRST_WITHOUT_SIGNAL:
            return ""
        return f"in each of the first {steps} steps {seen}. {SYMPTOMS[0].advice}; Driver(stop_without_signal=False) lets the run go on"
