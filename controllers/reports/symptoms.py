"""Symptoms: signs that a run cannot learn. Each is reported once, with advice.

Weft looks for `MISTAKES` in the graph before the start, and for `SYMPTOMS` in the metrics of steps.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ...algorithms.advantages import group_advantages, is_group_relative
from ...algorithms.grpo import drop_zero_variance, first_of_group
from ...algorithms.policy_loss import PolicyLoss
from ...algorithms.preference import best_and_worst
from ...algorithms.rewards import penalize_overlong
from ...algorithms.solve_rates import solve_rates
from ...dataflow.byte_units import gib
from ...dataflow.column import RESPONSE_IDS, RESPONSE_LOGPROBS, REWARD
from ...dataflow.errors import UserError, nearest
from ...dataflow.graph import Graph, Handle, Node
from ...dataflow.metric_names import is_of_group
from ...dataflow.prompts.curriculum import curriculum_of
from ...workers.reward import RewardConfig

Row = Mapping[str, float]
"""The metrics of a step."""

NO_SIGNAL, SHORT_STEP = "no_signal", "short_step"
FIRST = 3
"""Number of first values of a metric that are the baseline for later ones."""
FIRST_WITHOUT_SIGNAL = 2
"""Report "no signal" if this many steps from the start of a run have none."""


@dataclass(frozen=True)
class _Symptom:
    name: str
    """Name in alerts and in `Driver(stop_on=...)`."""
    shows: Callable[[_Past], str | None]
    """Returns a description if the last step shows the symptom, "" if not, None if not measured."""
    advice: str
    steps: int = 1
    """Measured steps in a row that must show the symptom; 0 if `shows` considers earlier steps."""
    spoils: bool = False
    """Whether the symptom spoils the weights, so that the run must not save them."""


class _Past:
    """A run's metrics so far: its last steps, and averages of its first ones."""

    def __init__(self, quantised: str = "") -> None:
        self.quantised = quantised
        """Rollout groups with quantised weights, for messages."""
        self.rows: deque[Row] = deque(maxlen=64)
        self._first: dict[str, list[float]] = {}
        self.signal: dict[int, bool] = {}
        """Measured step -> whether rewards differed within any group."""

    def add_step(self, row: Row) -> None:
        if not row["step"]:
            return
        self.rows.append(row)
        for name, value in row.items():
            first = self._first.setdefault(name, [])
            if len(first) < FIRST and math.isfinite(value):
                first.append(value)
        if (has := _has_signal(row)) is not None:
            self.signal[int(row["step"])] = has

    @property
    def last(self) -> Row:
        return self.rows[-1]

    def at_first(self, name: str) -> float:
        """Return the mean of the first values of a metric, or NaN until there are enough."""
        first = self._first.get(name, [])
        return sum(first) / len(first) if len(first) == FIRST else math.nan


def check_group_sizes(graph: Graph) -> None:
    """Raise a `UserError` if a node compares the responses to a prompt, but there is only one."""
    for node in graph.nodes:
        estimator = node.arguments.get("estimator")
        compares = node.function in (drop_zero_variance, best_and_worst) or (
            node.function is group_advantages and is_group_relative(estimator)
        )
        if compares and _rows_of_group(graph, node) == 1:
            of = f" ({getattr(estimator, '__name__', estimator)})" if estimator is not None else ""
            raise UserError(
                f"node {node.name!r}{of} compares the responses to a prompt with each other, but n=1 samples one response each: "
                "nothing would be learned. Set n=2 or more, such as n=8, or use a method with another baseline: PPO (a critic) or "
                "ReMax (advantages=greedy_baseline)"
            )


def check_curriculum(graph: Graph) -> None:
    """Raise a `UserError` if a curriculum's groups can never have enough votes."""
    curriculum = curriculum_of(graph.source)
    for node in graph.nodes if curriculum is not None else ():
        rows = _rows_of_group(graph, node) if node.function is solve_rates else None
        if curriculum is not None and rows is not None and curriculum.votes > rows:
            raise UserError(
                f"Curriculum(votes={curriculum.votes}): a group counts from {curriculum.votes} votes on, but a prompt has {rows} "
                f"responses; set votes={rows} or less, or n={curriculum.votes} or more"
            )


def _groups_of_one(graph: Graph, handles: Mapping[str, Handle]) -> Iterator[str]:
    for node in graph.nodes:
        reads = getattr(node.arguments.get("estimator"), "reads", ())
        if node.function is group_advantages and not reads and _rows_of_group(graph, node) == 1:
            yield f"node {node.name!r} has one response to each prompt (n=1), and its estimator reads no other column"


def _rows_of_group(graph: Graph, node: Node) -> int | None:
    """Return the number of rows in a group at a node, or None if unknown."""
    number, level = 1, node.level
    while level:
        maker = next(n for n in graph.nodes if n.makes_level == level)
        each = maker.arguments.get("n")
        if not isinstance(each, int):
            return None
        number, level = number * each, maker.level
    for before in graph.nodes[: graph.nodes.index(node)]:
        kept = before.arguments.get("n")
        if before.function is first_of_group and before.level == node.level and isinstance(kept, int):
            number = min(number, kept)
    return number


def _greedy(graph: Graph, handles: Mapping[str, Handle]) -> Iterator[str]:
    if not any(n.operation.updates for n in graph.nodes):  # an evaluation
        return
    generating = [n for n in graph.nodes if str(RESPONSE_IDS) in n.writes and n.makes_level is not None]
    settings = [n.arguments.get("sampling") for n in generating]
    if settings and all(getattr(one, "temperature", None) == 0 for one in settings):
        yield f"node {generating[0].name!r} trains on responses of temperature 0: all responses to a prompt are the same"


def _large_rates(graph: Graph, handles: Mapping[str, Handle]) -> Iterator[str]:
    for name in dict.fromkeys(n.group for n in graph.nodes if n.operation.updates and n.group):
        rate = getattr(handles[name].config, "learning_rate", 0.0)
        # AdamW moves each weight by about the learning rate a step; weights are smaller than 0.1.
        if isinstance(rate, float | int) and rate >= 0.1:
            yield f"worker group {name!r} has learning_rate={rate:g}, and a step moves each weight by about that much"


def _hidden_outcomes(graph: Graph, handles: Mapping[str, Handle]) -> Iterator[str]:
    """Find filters for equal outcomes that compare sums with shaping terms instead."""
    for node in graph.nodes:
        if node.function is not drop_zero_variance:
            continue
        by = str(node.arguments.get("by", REWARD))
        writer = next((n for n in graph.nodes if n.name == node.writers.get(by)), None)
        if writer is None:
            continue
        if writer.function is penalize_overlong:
            yield f"node {node.name!r} compares {by!r}, which {writer.name!r} has shaped"
        if writer.group is None:
            continue
        config = handles[writer.group].config
        if not isinstance(config, RewardConfig) or by != str(writer.arguments.get("into", REWARD)):
            continue
        outcome = config.verdict(by)
        others = [
            each.title for each in config.rewards if each.weight and outcome != f"{by}/{each.title}"
        ]
        if outcome not in (None, by) and others:
            yield f"node {node.name!r} compares {by!r}, the sum of the outcome {outcome!r} and {', '.join(others)}"


def quantised_rollouts(graph: Graph, handles: Mapping[str, Handle]) -> dict[str, str]:
    """Map the nodes of a graph that sample with quantised weights to a description of their group."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.group is None or str(RESPONSE_IDS) not in node.writes:
            continue
        if (scheme := getattr(handles[node.group].config, "quantization", None)) is not None:
            found[node.name] = f"{node.group} ({scheme})"
    return found


def _uncorrected_quantisation(graph: Graph, handles: Mapping[str, Handle]) -> Iterator[str]:
    quantised = quantised_rollouts(graph, handles)
    for node in graph.nodes:
        group = quantised.get(node.writers.get(str(RESPONSE_IDS), ""))
        if group is None or not node.operation.updates:
            continue
        samples = f"node {node.name!r} trains on samples of {group}, whose weights are quantised,"
        if str(RESPONSE_LOGPROBS) not in node.reads:
            yield f"{samples} and does not read 'response_logprobs', so no metric shows how far they are off"
        elif not getattr(node.arguments.get("loss", PolicyLoss()), "corrects_gap", True):
            yield f"{samples} without a correction for the gap"


MISTAKES = (
    (
        _groups_of_one,
        "if it compares the responses to a prompt with each other, nothing is learned. Try n=8, or an estimator with another baseline "
        "(greedy_baseline)",
    ),
    (_greedy, "there is nothing to compare. Try Sampling(temperature=1)"),
    (
        _hidden_outcomes,
        "shaping terms differ within most groups, so groups of equal outcomes pass the filter, and only the shape is trained. Try "
        "drop_zero_variance(samples, by=...) with the column of the outcome",
    ),
    (
        _uncorrected_quantisation,
        "the samples come from another distribution than the trainer's. Try PolicyLoss(correction=TruncatedImportance())",
    ),
    (
        _large_rates,
        "that destroys a model. Try 1e-6 for all weights, 1e-4 for an adapter, 1e-3 for a tiny model",
    ),
)
"""Mistakes: (function that yields their places in a training graph and its groups, advice)."""


def _has_signal(row: Row) -> bool | None:
    """Whether rewards differ within any group; None if not measured."""
    shares = _without_signal(row)
    return any(share != 1 for share in shares) if shares else None


def _without_signal(row: Row) -> list[float]:
    shares = (share for _, share in _training(row, "groups_without_signal"))
    return [share for share in shares if not math.isnan(share)]


def _no_signal(past: _Past) -> str | None:
    if _has_signal(past.last) is None:
        return None
    steps = len(past.signal)
    # After step 10, `signal_lost` takes over.
    if any(past.signal.values()) or steps < FIRST_WITHOUT_SIGNAL or past.last["step"] > 10:
        return ""
    return (
        f"in each of the first {steps} steps the rewards within every group are equal{_all_are(past.last)}, so that all advantages "
        "are 0 and nothing is learned"
    )


def _signal_lost(past: _Past) -> str | None:
    share = min(_without_signal(past.last), default=None)
    if share is None:
        return None
    if share < 0.95 or not any(past.signal.values()):
        return ""
    row = past.last
    reward = f" (reward {row['reward/mean']:g})" if "reward/mean" in row else ""
    return f"{share:.0%} of the groups have equal rewards{reward}, so the run learns nothing from them"


def _only_shaping(past: _Past) -> str | None:
    share = min((v for _, v in _training(past.last, "signal_of_shaping") if v == v), default=None)
    if share is None:
        return None
    if share < 1:
        return ""
    return (
        "in each group whose shaped rewards differ, the rewards before shaping are equal, so the run only learns from "
        "the shaping terms"
    )


def _equal_rewards(past: _Past) -> str | None:
    """Report equal rewards in methods that compare no groups, such as PPO."""
    deviations = dict(_training(past.last, "std"))
    if not deviations or _has_signal(past.last) is not None:
        return None
    if any(value != 0 for value in deviations.values()):
        return ""
    return (
        f"all rewards are equal{_all_are(past.last)}, so they cannot tell a good response from a bad one"
    )


def _all_are(row: Row) -> str:
    """Describe the one value of all rewards; empty if they differ."""
    means = [name.removesuffix("std") + "mean" for name, value in _training(row, "std") if value == 0]
    known = [row[mean] for mean in means if mean in row]
    return f" (all are {known[0]:g})" if known else ""


def all_filtered(row: Row, groups: int) -> str:
    """Return a message if a filter drops every group for its equal rewards, so that the first step
    cannot end; empty if it is too early to tell.

    Args:
        row: Metrics of the step so far.
        groups: Number of dropped groups, with none passed, that triggers the message.

    >>> all_filtered({"zero_variance_groups": 3.0, "reward/mean": 0.0}, 4)
    ''
    >>> all_filtered({"zero_variance_groups": 4.0, "reward/mean": 0.0}, 4)[:64]
    'the rewards within each of the first 4 groups are equal (mean 0)'
    """
    dropped = sum(value for _, value in _training(row, "zero_variance_groups"))
    if dropped < groups or _has_signal(row) is not None:
        return ""
    return (
        f"the rewards within each of the first {dropped:g} groups are equal{rewards_of(row)}, and a filter drops such groups, so that "
        f"no step ever ends. {SYMPTOMS[0].advice}. {GOES_ON}"
    )


def rewards_of(row: Row) -> str:
    """Format the mean rewards of a step so far; empty without rewards.

    >>> rewards_of({"reward/mean": 0.12, "reward/std": 0.1, "reward/right": 0.02, "reward/scored": 8.0, "actor/loss": 1.0})
    ' (mean 0.12, std 0.1, right 0.02)'
    """
    rewarders = {name.partition("/")[0] for name, _ in _training(row, "mean")}
    shown = [
        f"{name.partition('/')[2] if len(rewarders) == 1 else name} {value:.3g}"
        for name, value in row.items()
        if name.count("/") == 1
        and name.partition("/")[0] in rewarders
        and not name.endswith(("/scored", "/max"))
    ]
    return f" ({', '.join(shown)})" if shown else ""


def _all_truncated(past: _Past) -> str | None:
    rates = [rate for _, rate in _training(past.last, "truncation_rate")]
    if not rates:
        return None
    said = "every response is truncated at its limit of tokens, so no response is complete"
    return said if all(rate == 1 for rate in rates) else ""


def _blown_up(past: _Past) -> str:
    row = past.last
    for name, value in (*_training(row, "loss"), *_training(row, "grad_norm")):
        if not math.isfinite(value):
            return f"{name} is {value}"
    for name, value in _training(row, "grad_norm"):
        if value > 1e4:
            return f"{name} is {value:.3g}"
    for name, value in (*_training(row, "approx_kl"), *_training(row, "mean_logprob_gap")):
        if not abs(value) <= 1.0:  # probabilities that are wrong by a factor of e
            return f"{name} is {value:.3g} nats a token"
    return ""


def _collapsed(past: _Past) -> str | None:
    known = [(n, value) for n, value in _training(past.last, "entropy") if math.isfinite(value)]
    for name, value in known:
        if value < 0.05 * (first := past.at_first(name)):
            return f"{name} is {value:.3g} nats a token, and was {first:.3g} at first: the policy samples almost the same each time"
    return "" if known else None


def _drifted(past: _Past) -> str | None:
    known = list(_training(past.last, "mean_logprob_gap"))
    for name, value in known:
        if value > 0.05 and value > 5 * (first := past.at_first(name)):
            return f"{name} is {value:.3g} nats a token, and was {first:.3g} at first: generator and trainer drift apart"
    return "" if known else None


QUANTISED_LIMITS = {
    "mean_logprob_gap": 0.05,  # nats a token
    "generator_kl_k3": 0.01,  # nats a token
    "truncated_fraction": 0.3,
    "masked_fraction": 0.3,
}
"""Largest value of each metric of an update that is safe with quantised rollouts."""


def _quantised_gap(past: _Past) -> str | None:
    if not past.quantised:
        return None
    known = [
        (*each, limit)
        for metric, limit in QUANTISED_LIMITS.items()
        for each in _training(past.last, metric)
    ]
    for name, value, limit in known:
        if not value <= limit:  # also true for NaN
            return (
                f"{name} is {value:.3g}, and safe up to {limit:g}: the quantised weights of {past.quantised} sample from another "
                "distribution than the trainer's"
            )
    if known:
        return ""
    if not any(_training(past.last, "loss")):
        return None
    return f"no metric of the update shows how far the quantised weights of {past.quantised} are off"


def _training(row: Row, metric: str) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of a metric of each training group."""
    return ((name, value) for name, value in row.items() if is_of_group(name, metric))


def _all_retired(past: _Past) -> str | None:
    early = past.last.get("curriculum/returned_early")
    if early is None:
        return None
    if not early:
        return ""
    retired = past.last.get("curriculum/retired", 0.0)
    return (
        f"the curriculum had no prompt left to draw, so {early:,.0f} retired prompts have returned early; "
        f"{retired:,.0f} are retired now"
    )


def _memory_low(past: _Past) -> str | None:
    free, limit = past.last.get("host_free_bytes"), past.last.get("host_limit_bytes")
    if free is None or not limit:
        return None
    own = _resident(past.last)
    # Only if the run itself uses much of the node's memory.
    if free > 0.1 * limit or sum(own.values()) < 0.05 * limit:
        return ""
    largest = sorted(own, key=lambda group: -own[group])[:3]
    takes = ", ".join(f"{group} {gib(own[group])}" for group in largest)
    return f"{gib(free)} of the {gib(limit)} of host memory of a node are left ({takes})"


def _memory_grows(past: _Past) -> str | None:
    if len(past.rows) < 32 or "host_free_bytes" not in past.last:
        return None
    for group, now in _resident(past.last).items():
        values = [_resident(row).get(group, now) for row in past.rows]
        each = len(values) // 4
        quarters = [sum(values[k * each : (k + 1) * each]) / each for k in range(4)]
        rises = [after - before for before, after in pairwise(quarters)]
        grown = quarters[3] - quarters[0]
        # Each quarter must rise by at least half an even share of the growth.
        if grown >= max(256 << 20, 0.1 * quarters[0]) and min(rises) > grown / 6:
            a_step = grown / (3 * each)
            left = past.last["host_free_bytes"] / a_step
            return (
                f"the host memory of {group} grows by {gib(a_step)} a step, steadily over the last {len(values)} steps, and is "
                f"{gib(now)}; the free memory lasts for about {left:.0f} steps"
            )
    return ""


def _resident(row: Row) -> dict[str, float]:
    return {name.partition("/")[0]: value for name, value in _training(row, "resident_bytes")}


SYMPTOMS = (
    _Symptom(
        NO_SIGNAL,
        _no_signal,
        "Look at the rewards in samples/. Try a reward that tells answers apart, easier prompts, more responses to each (n), or a "
        "model that succeeds now and then",
        steps=0,
    ),
    _Symptom(
        "signal_lost",
        _signal_lost,
        "If the rewards are high, the prompts are learned: end the run, or continue with harder ones. If they are low, try easier prompts, "
        "more responses to each (n), or a higher temperature; drop_zero_variance spares the work on such groups",
        steps=5,
    ),
    _Symptom(
        "only_shaping",
        _only_shaping,
        "Drop groups of equal outcomes: drop_zero_variance(samples, by='reward') before the shaping. Try easier or harder prompts, or "
        "more responses to each (n)",
        steps=3,
    ),
    _Symptom(
        "equal_rewards",
        _equal_rewards,
        "Look at the rewards in samples/. Try a reward that tells answers apart, or easier prompts",
        steps=3,
    ),
    _Symptom(
        "all_truncated",
        _all_truncated,
        "Try a larger Sampling(max_tokens=...), and look in samples/ whether the model ever writes its end-of-text token",
        steps=3,
    ),
    _Symptom(
        "diverged",
        _blown_up,
        "Training has probably diverged. Try a learning_rate ten times smaller, warmup_steps, or go back to a checkpoint before it",
        spoils=True,
    ),
    _Symptom(
        "entropy_collapse",
        _collapsed,
        "If the reward has stopped rising, go back to a checkpoint before it. Try a smaller learning_rate, an entropy_coefficient, a "
        "higher upper clip (clip_high), or a penalty on the divergence from a reference",
        steps=3,
        spoils=True,
    ),
    _Symptom(
        "gap_drift",
        _drifted,
        "Try a smaller max_staleness and a correction for it (truncated importance sampling), the same dtype on both sides, or float32 "
        "for the head",
        steps=3,
    ),
    _Symptom(
        "quantised_gap",
        _quantised_gap,
        "Try a scheme with more bits ('int8', 'fp8') or none, PolicyLoss(correction=TruncatedImportance()), and, if rows are stale, a "
        "smaller max_staleness",
    ),
    _Symptom(
        "all_retired",
        _all_retired,
        "If they retired because they are solved, end the run or add harder prompts. Otherwise, loosen the gates, or give them "
        "return_after=...",
    ),
    _Symptom(
        "memory_low",
        _memory_low,
        "Ray ends a worker when a twentieth is left, the kernel when none is left. Try smaller microbatches, fewer ranks on a node, "
        "BufferConfig(max_bytes=...), or a node with more memory",
    ),
    _Symptom(
        "memory_grows",
        _memory_grows,
        "Something holds on to memory: look in your reward functions and workers for lists and caches that only grow. A run that "
        "writes checkpoints can be restarted with resume='latest'",
    ),
)
SYMPTOM_NAMES = (*(symptom.name for symptom in SYMPTOMS), SHORT_STEP)
"""Names for `Driver(stop_on=...)`. `../loop/admission.py` detects short steps."""


def check_stop_on(names: object) -> tuple[str, ...]:
    """Check and return names of symptoms that end a run.

    >>> check_stop_on(["no_signal", "diverge"])
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: Driver(stop_on=...): unknown symptom 'diverge'; did you mean 'diverged'? They \
are no_signal, signal_lost, only_shaping, equal_rewards, all_truncated, diverged, entropy_collapse, gap_drift, quantised_gap, \
all_retired, memory_low, memory_grows, short_step

    Raises:
        UserError: A name is not a symptom.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        raise UserError(
            f"Driver(stop_on={names!r}) must be a sequence of names of symptoms, such as stop_on=('no_signal',)"
        )
    for name in names:
        if name not in SYMPTOM_NAMES:
            raise UserError(
                f"Driver(stop_on=...): unknown symptom {name!r}{nearest(str(name), SYMPTOM_NAMES) or '.'} "
                f"They are {', '.join(SYMPTOM_NAMES)}"
            )
    return tuple(names)


class Seen(NamedTuple):
    symptom: _Symptom
    text: str


GOES_ON = (
    "To continue anyway, set another Driver(stop_on=...), such as stop_on=(); weft.train has the default, so add it to the program that "
    "explain=True prints"
)


def mistakes(graph: Graph, handles: Mapping[str, Handle]) -> list[str]:
    """Return a line of advice for each setting that prevents or harms learning."""
    return [f"{where}; {advice}" for found, advice in MISTAKES for where in found(graph, handles)]


class Watch:
    """Checks a run's steps, and reports each symptom once. `quantised` names the rollout groups with
    quantised weights."""

    def __init__(self, quantised: str = "") -> None:
        self._said: set[str] = set()
        self._in_a_row: Counter[str] = Counter()
        self._past = _Past(quantised)

    def remember(self, rows: Iterable[Row]) -> None:
        """Replace the history by the steps of a resumed run."""
        self._past = _Past(self._past.quantised)
        self._in_a_row.clear()
        for row in rows:
            self._past.add_step(row)

    def see(self, row: Row) -> list[Seen]:
        self._past.add_step(row)
        step = int(row["step"])
        judged = [self._judge(symptom, step) for symptom in SYMPTOMS if step]
        return [seen for seen in judged if seen is not None]

    def _judge(self, symptom: _Symptom, step: int) -> Seen | None:
        # A step without the metric neither continues nor ends a streak.
        if symptom.name in self._said or (text := symptom.shows(self._past)) is None:
            return None
        self._in_a_row[symptom.name] = self._in_a_row[symptom.name] + 1 if text else 0
        if not text or self._in_a_row[symptom.name] < symptom.steps:
            return None
        self._said.add(symptom.name)
        steps = f"steps {step - symptom.steps + 1} to {step}" if symptom.steps > 1 else f"step {step}"
        when = f"{steps}: " if symptom.steps else ""
        return Seen(symptom, f"{when}{text}. {symptom.advice}")
