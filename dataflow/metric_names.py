"""Names of metrics: under which name a run writes one, and which entry of the table it has.

`python docs/generate/metrics_page.py > docs/metrics.md` writes the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from .errors import UserError, nearest

# Metric table
#
# The table of metrics: every number that Weft itself writes of a run, with its unit, and what is
# good and bad of it.
#
# A new metric is a line here, in the section that it belongs to; `metric_names.py` makes
# `docs/metrics.md` of the table. What a user's own rewards, losses, functions and workers measure
# is in no table.


Place: TypeAlias = Literal["run", "group", "either"]
"""run: it is written as it is called; group: behind the name of the worker group that measured it; either: both are used."""


@dataclass(frozen=True)
class MetricEntry:
    """One metric."""

    name: str
    """Capital letters stand for what a run fills in: `pass@K` is `pass@1`, `pass@8`, ..."""
    unit: str
    meaning: str
    good: str = ""
    bad: str = ""
    place: Place = "group"
    is_timed: bool = False
    """Two runs that compute the same differ in it, because one took longer."""


@dataclass(frozen=True)
class Section:
    """Metrics that are read together."""

    title: str
    text: str
    entries: tuple[MetricEntry, ...]


STEP = Section(
    "The step",
    "Written by the run itself after every step.",
    (
        MetricEntry("step", "count", "number of the step; 0 is the start of the run", place="run"),
        MetricEntry(
            "time_s",
            "s",
            "since the run was started first, at the end of the step",
            place="run",
            is_timed=True,
        ),
        MetricEntry(
            "step_s",
            "s",
            "from the end of the step before",
            "stays as it is",
            "grows over the run",
            place="run",
            is_timed=True,
        ),
        MetricEntry("samples", "rows", "that the step trained on", place="run"),
        MetricEntry(
            "tokens_per_s",
            "tokens/s",
            "prompt and response tokens that were trained on, by the time of the step",
            "as high as the hardware allows",
            "falls while `rollout/response_length` stays as it is",
            place="run",
            is_timed=True,
        ),
        MetricEntry(
            "idle_share",
            "0 to 1",
            "of the step: the group had no call under way; groups that share devices take turns, and their shares add up to more than 1",
            "near 0 for the group that costs most",
            "near 1 for devices that nobody else uses",
            is_timed=True,
        ),
        MetricEntry(
            "checkpoint_pause_s",
            "s",
            "longest time for which the latest checkpoint kept a group from training",
            "below a step",
            "several steps",
            place="run",
            is_timed=True,
        ),
        MetricEntry(
            "weights_transfer_s",
            "s",
            "of a group that follows another: longest time that it took to receive a version of the weights",
            "stays as it is",
            "grows over the run",
            is_timed=True,
        ),
        MetricEntry(
            "weights_pause_s",
            "s",
            "the part of it in which the group could do nothing else",
            "below half of it with `double_buffer`, the default on a CPU with room",
            "a large share of the step: set `double_buffer` where memory allows it",
            is_timed=True,
        ),
        MetricEntry(
            "weights_bytes",
            "bytes",
            "of a group that others follow: size of a version of the weights, or of its adapter, summed over the ranks that give it",
            "stays as it is",
            "changes",
        ),
        MetricEntry(
            "ranks",
            "count",
            "of an elastic group that are up",
            "all that were asked for",
            "falls",
            "group",
        ),
        MetricEntry(
            "replaced_workers",
            "count",
            "processes that were replaced so far",
            "missing: there were none",
            "rises with every step",
            "run",
        ),
        MetricEntry(
            "requeued_rows",
            "rows",
            "given back so far because a rank failed",
            "missing: there were none",
            "rises with every step",
            "run",
        ),
        MetricEntry(
            "failed_rows",
            "rows",
            "dropped so far because a node failed at them; of an evaluation: `EVALUATION/failed_rows`",
            "missing: there were none",
            "rises: the results leave those rows out",
            "run",
        ),
        MetricEntry(
            "stale/FATE",
            "groups",
            "that were too old when an update wanted them, so far, and what became of them: `wait`, `mask`, `requeue` or `drop`",
            "missing or 0",
            "`drop` rises: short responses are favoured",
            "run",
        ),
    ),
)

REWARD = Section(
    "Rewards",
    "`GROUP` is the group of reward workers, such as `reward`. With several reward functions, and for the numbers that a function "
    "logs, there is `GROUP/NAME` for each of them.",
    (
        MetricEntry(
            "mean",
            "of the reward",
            "mean over the responses of the step",
            "rises",
            "falls, or jumps within a few steps: look at samples for an exploit",
        ),
        MetricEntry(
            "std",
            "of the reward",
            "standard deviation over the responses of the step",
            "above 0",
            "0: there is nothing to compare",
        ),
        MetricEntry("max", "of the reward", "largest of the step"),
        MetricEntry("scored", "rows", "that were rewarded"),
        MetricEntry(
            "COLUMN_mean",
            "of the reward",
            "the same of rewards that go to another column, such as `baseline_reward_mean`",
        ),
        MetricEntry("COLUMN_std", "of the reward", "the same"),
        MetricEntry("COLUMN_max", "of the reward", "the same"),
        MetricEntry("COLUMN_scored", "rows", "the same"),
        MetricEntry(
            "groups_without_signal",
            "0 to 1",
            "share of groups whose rewards are all equal: their advantages are 0",
            "below 0.5",
            "1: nothing is learned; prompts are too easy, too hard, or too few responses (n)",
            "run",
        ),
        MetricEntry(
            "zero_variance_groups",
            "groups",
            "dropped by `drop_zero_variance`",
            "few",
            "many: each costs a generation",
            "run",
        ),
        MetricEntry(
            "tied_groups",
            "groups",
            "dropped because no response is better than the others",
            "few",
            "many: each costs a generation",
            "run",
        ),
    ),
)

GENERATION = Section(
    "Generation",
    "`GROUP` is the group of rollout workers, such as `rollout`.",
    (
        MetricEntry(
            "tokens", "tokens", "of responses that were generated; of an update: that were trained on"
        ),
        MetricEntry(
            "response_length",
            "tokens",
            "mean over responses",
            "moves slowly",
            "collapses, or grows to the limit of tokens",
        ),
        MetricEntry(
            "truncation_rate",
            "0 to 1",
            "share of responses that were truncated at the limit of tokens",
            "below 0.1",
            "near 1: rewards judge unfinished responses",
        ),
        MetricEntry(
            "length_ratio",
            "ratio",
            "mean length of what was trained on over that of what was sampled",
            "near 1",
            "below 1: short responses are favoured",
            "run",
        ),
        MetricEntry(
            "mean_trained_length", "tokens", "of responses that the step trained on", place="run"
        ),
        MetricEntry(
            "mean_finished_length", "tokens", "of responses that were finished in the step", place="run"
        ),
        MetricEntry(
            "mean_staleness",
            "versions",
            "mean over tokens: updates between sampling and training",
            "at most what the schedule allows, on average less",
            "at the bound in every step: generation is ahead of training",
        ),
        MetricEntry("max_staleness", "versions", "the oldest token", "at most what the schedule allows"),
        MetricEntry(
            "changed_share",
            "0 to 1",
            "with `deltas`: elements of the published weights that differ from the version before",
            "a few hundredths",
            "above a tenth: deltas are of no use",
        ),
    ),
)

POLICY = Section(
    "The policy's update",
    "`GROUP` is the group that is trained, such as `actor`. All are means over trained tokens, unless something else is said.",
    (
        MetricEntry(
            "loss",
            "of the loss",
            "mean over what the loss counts (tokens, rows or pairs)",
            "supervised: falls; policy gradients: says little",
            "not finite",
        ),
        MetricEntry(
            "grad_norm",
            "of the gradient",
            "before clipping",
            "steady",
            "grows over several steps, or is not finite",
        ),
        MetricEntry("learning_rate", "per step", "of the last optimizer step"),
        MetricEntry(
            "skipped_steps",
            "count",
            "optimizer steps that were not taken: bad ones, and those without anything to train on",
            "0",
            "above 0",
        ),
        MetricEntry(
            "bad_steps",
            "count",
            "optimizer steps whose loss or gradient was not finite or too large",
            "0",
            "above 0",
        ),
        MetricEntry(
            "entropy",
            "nats/token",
            "of the policy's distributions",
            "falls slowly",
            "near 0 within a few steps: it samples one response only",
        ),
        MetricEntry(
            "clip_fraction",
            "0 to 1",
            "share of tokens whose ratio was clipped (of a critic: whose value was)",
            "0.01 to 0.2",
            "above 0.3: steps are too large",
        ),
        MetricEntry(
            "approx_kl",
            "nats/token",
            "divergence from the policy before the update (k3)",
            "below 0.02",
            "above 0.1: steps are too large",
        ),
        MetricEntry(
            "kl",
            "nats/token",
            "divergence from the reference, by the estimator of the loss; of an adaptive penalty: nats a response",
            "grows slowly",
            "grows while the reward falls",
        ),
        MetricEntry("kl_coefficient", "per nat", "of the adaptive penalty in this step"),
        MetricEntry(
            "mean_logprob_gap",
            "nats/token",
            "between the log-probabilities of the generator and of the trainer, for the same weights",
            "below 0.01 (bfloat16), below 1e-5 (float32)",
            "grows: the two do not compute the same model",
        ),
        MetricEntry("max_logprob_gap", "nats", "the largest of the step", "below 1", "several nats"),
        MetricEntry(
            "moved_routes",
            "0 to 1",
            "share of tokens, over layers, for which the router would have chosen other experts than the generator's, which were taken "
            "(`routes=True`)",
            "0 (float32), a few hundredths (bfloat16)",
            "grows within an update of many steps: routes are old",
        ),
        MetricEntry(
            "generator_kl_k1",
            "nats/token",
            "estimate of KL(generator || trainer), unbiased",
            "near 0",
            "drifts away from 0",
        ),
        MetricEntry("generator_kl_k3", "nats/token", "the same, never negative", "below 0.01", "grows"),
        MetricEntry(
            "mean_generator_ratio",
            "ratio",
            "probability by the trainer over that by the generator",
            "near 1",
            "drifts away from 1",
        ),
        MetricEntry("max_generator_ratio", "ratio", "the largest of the step", "below 10", "hundreds"),
        MetricEntry(
            "mean_importance_weight",
            "ratio",
            "weight by which a correction counts a token",
            "near 1",
            "far below 1: most of the batch is ignored",
        ),
        MetricEntry(
            "truncated_fraction",
            "0 to 1",
            "share of tokens whose importance weight was truncated",
            "below 0.05",
            "above 0.3",
        ),
        MetricEntry(
            "masked_fraction",
            "0 to 1",
            "share of tokens that a correction leaves out",
            "below 0.05",
            "above 0.3",
        ),
        MetricEntry("masked_tokens", "tokens", "that a correction leaves out", "few"),
        MetricEntry("masked_rows", "rows", "of which a correction leaves out every token", "few"),
    ),
)

MIXTURE = Section(
    "Mixtures of experts",
    "Of updates; `GROUP` is the group that is trained. Over all tokens that the model reads, prompts included. No token is dropped: "
    "experts take as many as they are sent.",
    (
        MetricEntry(
            "expert_load",
            "1 to experts / chosen ones",
            "tokens of the busiest expert of a layer over those of the mean one, mean over layers",
            "as at the start of the run",
            "grows: few experts do the work (`router_loss`)",
        ),
        MetricEntry("max_expert_load", "1 to experts / chosen ones", "the same of the worst layer"),
        MetricEntry(
            "router_entropy",
            "nats",
            "of a router's distribution over experts, mean over tokens and layers",
            "steady",
            "falls to 0",
        ),
        MetricEntry(
            "router_loss",
            "1",
            "loss of balance before its coefficient, computed with and without one: experts times the sum over them of load times "
            "probability; the number of experts chosen for a token where all have equal shares",
            "near the number of chosen experts",
            "grows",
        ),
    ),
)

CRITIC = Section(
    "The critic's update",
    "`GROUP` is the group of the critic. `loss`, `grad_norm`, `clip_fraction` and others are those of any update.",
    (
        MetricEntry(
            "value",
            "of the return",
            "predicted by the critic, mean over tokens",
            "follows `return`",
            "far from `return`",
        ),
        MetricEntry("return", "of the return", "that the critic is trained towards, mean over tokens"),
    ),
)

MEMORY = Section(
    "Memory",
    "Read once a second at most, from outside of the processes. `GROUP` may be `driver`. On nodes other than the driver's the numbers are "
    "up to ten seconds old.",
    (
        MetricEntry(
            "resident_bytes",
            "bytes",
            "of all processes of the group: their own host memory, with the files that they have mapped",
            "stays as it is after the first steps",
            "grows step by step: something is kept",
            is_timed=True,
        ),
        MetricEntry(
            "shared_bytes",
            "bytes",
            "of shared memory that a process of the group has touched (segments of rows, weights on their way, Ray's object store); of the "
            "largest process",
            "stays as it is",
            is_timed=True,
        ),
        MetricEntry(
            "device_bytes",
            "bytes",
            "most that PyTorch has held on the device of a rank so far; missing without a GPU. An engine in a process of its own (vLLM's, "
            "with several ranks) is not among it",
            "stays below the device's memory",
            "rises until the device is full: smaller microbatches",
            is_timed=True,
        ),
        MetricEntry(
            "segment_bytes",
            "bytes",
            "columns of all rows in flight, in memory or spilled",
            "stays as it is",
            "grows: rows wait for a node that is too slow; `BufferConfig(max_bytes=...)` bounds it",
            "run",
            is_timed=True,
        ),
        MetricEntry(
            "object_store_bytes",
            "bytes",
            "Ray's object stores, on the nodes of the run: Weft sends calls and replies alone through them",
            "near 0",
            "grows: something else on the cluster, or a function of yours, puts objects there",
            "run",
            is_timed=True,
        ),
        MetricEntry(
            "host_free_bytes",
            "bytes",
            "left on the node of the run with least left, under the limit of its cgroup or of the machine",
            "a tenth of `host_limit_bytes` or more",
            "falls: Ray ends a worker when a twentieth is left",
            "run",
            is_timed=True,
        ),
        MetricEntry("host_limit_bytes", "bytes", "that limit", place="run", is_timed=True),
    ),
)

PREFERENCES = Section(
    "Preferences and reward models",
    "Means over pairs. `GROUP` is the group that is trained; the evaluation `preference_accuracy` writes its two without one.",
    (
        MetricEntry(
            "preference_accuracy",
            "0 to 1",
            "share of pairs whose preferred response is ahead",
            "rises from 0.5",
            "below 0.5",
            "either",
        ),
        MetricEntry(
            "preference_accuracy_low",
            "0 to 1",
            "lower end of its 95 % interval, of an evaluation",
            place="run",
        ),
        MetricEntry(
            "preference_accuracy_high",
            "0 to 1",
            "upper end of its 95 % interval, of an evaluation",
            place="run",
        ),
        MetricEntry(
            "preference_margin",
            "nats",
            "by which the preferred response is ahead",
            "rises",
            "falls",
            "run",
        ),
        MetricEntry(
            "chosen_reward", "of the loss", "implicit reward (or score) of preferred responses", "rises"
        ),
        MetricEntry("rejected_reward", "of the loss", "the same of the others", "falls"),
        MetricEntry(
            "reward_margin", "of the loss", "`chosen_reward` less `rejected_reward`", "rises", "falls"
        ),
        MetricEntry(
            "chosen_logprob",
            "nats",
            "of preferred responses under the policy",
            "stays as it is",
            "falls by many nats: the policy forgets them, too",
        ),
        MetricEntry("rejected_logprob", "nats", "of the others", "falls"),
        MetricEntry("chosen_nll", "nats/token", "supervised term on preferred responses", "falls"),
        MetricEntry("reference_point", "nats", "KTO's z0", "near 0"),
        MetricEntry(
            "step_reward", "0 to 1", "probability of being right that a process reward model gives steps"
        ),
        MetricEntry(
            "step_accuracy",
            "0 to 1",
            "share of steps that it judges as they are labelled",
            "rises",
            "near the share of the larger class",
        ),
    ),
)

EVALUATION = Section(
    "Evaluations",
    "Each is written behind the name of its evaluation, beside the metrics of the step that it evaluates: `eval/pass@1`. "
    "What its graph measures besides has the names of the other sections: `eval/reward/mean`. Intervals are over prompts, which are "
    "independent of each other: Wilson's where all values are 0 or 1, else Student's t.",
    (
        MetricEntry(
            "avg@K",
            "of the reward",
            "mean reward of K responses to each prompt, mean over prompts",
            "rises",
            "falls while the reward in training rises: the policy fits the prompts it trains on",
            "run",
        ),
        MetricEntry("avg@K_low", "of the reward", "lower end of its 95 % interval", place="run"),
        MetricEntry("avg@K_high", "of the reward", "upper end of its 95 % interval", place="run"),
        MetricEntry(
            "pass@K",
            "0 to 1",
            "probability that one of K responses to a prompt is right, mean over prompts; unbiased. The grader among the reward functions "
            "decides, else a threshold of the reward",
            "rises",
            "falls for large K while `pass@1` rises: the policy loses variety",
            "run",
        ),
        MetricEntry("pass@K_low", "0 to 1", "lower end of its 95 % interval", place="run"),
        MetricEntry("pass@K_high", "0 to 1", "upper end of its 95 % interval", place="run"),
        MetricEntry("prompts", "count", "that were evaluated", "all of the held-out set", place="run"),
        MetricEntry(
            "prompts_lost",
            "count",
            "held-out prompts without a scored response, because the grader failed or a filter dropped them; means cover the other prompts",
            "0",
            "scores of steps that lost different prompts cannot be compared",
            "run",
        ),
        MetricEntry("prompts_asked", "count", "held-out prompts", place="run"),
        MetricEntry(
            "oldest_version",
            "version",
            "of the weights that wrote the responses, where training goes on meanwhile",
            "the version of the step",
            place="run",
        ),
        MetricEntry(
            "newest_version", "version", "the same, the newest", "the version of the step", place="run"
        ),
    ),
)

SECTIONS = (STEP, MEMORY, REWARD, GENERATION, POLICY, MIXTURE, CRITIC, PREFERENCES, EVALUATION)

FUNCTIONS = "functions"
"""The worker group that runs the pure functions of graphs. Users do not name it, and it names no metric of the table."""
DRIVER = "driver"
"""Name of the driver among the processes of a run."""
FATES = ("wait", "mask", "requeue", "drop")
_FILLED = {"FATE": "|".join(FATES), "COLUMN": r"\w+", "K": r"\d+"}
"""What the capital letters of a name stand for, as patterns."""


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split("([A-Z]+)", name)
    return re.compile(
        "".join(f"(?:{_FILLED[part]})" if part in _FILLED else re.escape(part) for part in parts)
    )


def entries() -> Iterable[MetricEntry]:
    """All of the table."""
    return (entry for section in SECTIONS for entry in section.entries)


@cache
def entry_named(name: str) -> MetricEntry | None:
    """The entry of a metric without the names of its evaluation and group; None: the table has none."""
    exact = (entry for entry in entries() if entry.name == name)
    return next(exact, None) or next(
        (entry for entry in entries() if _pattern(entry.name).fullmatch(name)), None
    )


def written_name(group: str, name: str) -> str:
    """The name under which a run writes what a worker group measured: behind the group's, unless it is a number of the table that a
    function of Weft measured.

    >>> written_name("actor", "loss"), written_name("functions", "groups_without_signal"), written_name("functions", "my_own")
    ('actor/loss', 'groups_without_signal', 'functions/my_own')
    """
    entry = entry_named(name) if group == FUNCTIONS else None
    return f"{group}/{name}" if entry is None or entry.place == "group" else name


def is_of_group(name: str, metric: str) -> bool:
    """Whether a name is that of a metric of training (not of an evaluation).

    >>> is_of_group("rollout/truncation_rate", "truncation_rate"), is_of_group("eval/rollout/truncation_rate", "truncation_rate")
    (True, False)
    """
    entry = entry_named(metric)
    if name == metric:
        return True
    return (
        (entry is None or entry.place != "run") and name.count("/") == 1 and name.endswith(f"/{metric}")
    )


def untimed(row: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step without those that two runs differ in because one took longer.

    >>> untimed({"step": 1.0, "step_s": 0.5, "actor/idle_share": 0.1, "actor/loss": 2.0})
    {'step': 1.0, 'actor/loss': 2.0}
    """
    timed = [entry.name for entry in entries() if entry.is_timed]
    return {name: value for name, value in row.items() if name.rpartition("/")[2] not in timed}


def entry_of(name: str) -> MetricEntry:
    """The entry of a metric as a run writes it, behind the names of an evaluation and a group.

    >>> entry_of("critic/loss").unit, entry_of("eval/stale/drop").name
    ('of the loss', 'stale/FATE')

    Raises:
        UserError: the table has none; it names the nearest.

    >>> entry_of("actor/entorpy")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: no metric is called 'actor/entorpy'; did you mean 'entropy'?
    """
    parts = name.split("/")
    for first in range(len(parts)):
        if entry := entry_named("/".join(parts[first:])):
            return entry
    raise UserError(
        f"no metric is called {name!r}{nearest(parts[-1], [entry.name for entry in entries()])}".replace(
            "??", "?"
        )
    )


def undeclared(names: Iterable[str]) -> list[str]:
    """Those of some metrics, as a run writes them, that the table does not have.

    >>> undeclared(["actor/loss", "eval/reward/mean", "reward/form"])
    ['reward/form']
    """
    return [name for name in names if not any(entry_named(tail) for tail in _tails(name))]


def _tails(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[first:]) for first in range(len(parts))]


SCORES = {
    r"pass@1": "pass@1",
    r"avg@\d+": "mean reward",
    r"(.*/)?reward/mean": "mean reward",
    r"(.*/)?mean": "mean reward",
    r"(.*/)?preference_accuracy": "preference accuracy",
}
"""Pattern of a metric -> label of the score. The first pattern that an evaluation has is its score, and more is better."""


def score_label(name: str) -> str | None:
    """The label of an evaluation's score, or None if the metric is not one of `SCORES`.

    Args:
        name: the metric's name without the evaluation's.

    >>> score_label("pass@1"), score_label("avg@8"), score_label("judge/mean"), score_label("loss")
    ('pass@1', 'mean reward', 'mean reward', None)
    """
    return next((label for pattern, label in SCORES.items() if re.fullmatch(pattern, name)), None)


# The page

INTRODUCTION = """\
# Metrics

Every number that a run writes, one section for what is read together. This page is made from the table in `dataflow/metric_names.py`
(`python docs/generate/metrics_page.py > docs/metrics.md`), and a test compares the two.

A metric that a worker group measures is written behind the group's name: `actor/entropy`, `rollout/response_length`. One of an
evaluation is written behind the evaluation's: `eval/reward/mean`, `eval/rollout/response_length`. Capital letters stand for what a run
fills in. What your own rewards, losses and workers measure is passed on under `GROUP/NAME`, and that of your own functions under
`functions/NAME`; these are not in the table.

A metric is missing in a step that did not measure it. `metrics.parquet` has a row for each step and a column for each metric; the same
numbers go to every tracker ([watching.md](watching.md)).
"""


def metric_of(row: Mapping[str, float], metric: str) -> str | None:
    """The name under which a step has a metric of training: its own, or behind a group's; None: it has none.

    >>> metric_of({"eval/reward/mean": 1.0, "judge/mean": 2.0, "reward/mean": 3.0}, "mean")
    'reward/mean'
    """
    names = [n for n, v in row.items() if math.isfinite(v) and is_of_group(n, metric)]
    return f"reward/{metric}" if f"reward/{metric}" in names else next(iter(names), None)
