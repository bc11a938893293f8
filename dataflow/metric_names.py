"""Metric names: the table of all metrics, and their names in a run.

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

# Metric table: every metric that Weft itself writes, with its unit and typical good and bad values.
#
# To add a metric, add an entry to its section. Metrics of users' rewards, losses, functions and
# workers are not in the table.


Place: TypeAlias = Literal["run", "group", "either"]
"""Prefix of the written name. run: none; group: the worker group; either: both occur."""


@dataclass(frozen=True)
class MetricEntry:
    name: str
    """Capital letters are placeholders: `pass@K` covers `pass@1`, `pass@8`, ..."""
    unit: str
    meaning: str
    good: str = ""
    bad: str = ""
    place: Place = "group"
    is_timed: bool = False
    """The metric depends on wall-clock time, so two equal runs differ in it."""


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
        MetricEntry("step", "count", "step number; 0 is the start of the run", place="run"),
        MetricEntry(
            "time_s",
            "s",
            "from the first start of the run to the end of the step",
            place="run",
            is_timed=True,
        ),
        MetricEntry(
            "step_s",
            "s",
            "from the end of the previous step to the end of this one",
            "stays as it is",
            "grows over the run",
            place="run",
            is_timed=True,
        ),
        MetricEntry("samples", "rows", "rows of the step's training data", place="run"),
        MetricEntry(
            "tokens_per_s",
            "tokens/s",
            "trained prompt and response tokens per second of the step",
            "as high as the hardware allows",
            "falls while `rollout/response_length` stays as it is",
            place="run",
            is_timed=True,
        ),
        MetricEntry(
            "idle_share",
            "0 to 1",
            "share of the step without a call in flight; groups that share devices take turns, so their shares add up to more than 1",
            "near 0 for the most expensive group",
            "near 1 for devices that no other group uses",
            is_timed=True,
        ),
        MetricEntry(
            "checkpoint_pause_s",
            "s",
            "longest time that the latest checkpoint blocked a group",
            "below a step",
            "several steps",
            place="run",
            is_timed=True,
        ),
        MetricEntry(
            "weights_transfer_s",
            "s",
            "for a group that follows another: longest time to receive a version of the weights",
            "stays as it is",
            "grows over the run",
            is_timed=True,
        ),
        MetricEntry(
            "weights_pause_s",
            "s",
            "part of `weights_transfer_s` that blocked the group",
            "below half of `weights_transfer_s` with `double_buffer`, the default on a CPU with enough memory",
            "a large share of the step: set `double_buffer` if memory allows it",
            is_timed=True,
        ),
        MetricEntry(
            "weights_bytes",
            "bytes",
            "for a group that others follow: size of a version of the weights, or of its adapter, summed over the publishing ranks",
            "stays as it is",
            "changes",
        ),
        MetricEntry(
            "ranks",
            "count",
            "running ranks of an elastic group",
            "all requested ranks",
            "falls",
            "group",
        ),
        MetricEntry(
            "replaced_workers",
            "count",
            "worker processes replaced so far",
            "missing: none so far",
            "rises with every step",
            "run",
        ),
        MetricEntry(
            "requeued_rows",
            "rows",
            "requeued so far because a rank failed",
            "missing: none so far",
            "rises with every step",
            "run",
        ),
        MetricEntry(
            "failed_rows",
            "rows",
            "dropped so far because a node failed on them; in an evaluation: `EVALUATION/failed_rows`",
            "missing: none so far",
            "rises: the results exclude those rows",
            "run",
        ),
        MetricEntry(
            "stale/FATE",
            "groups",
            "too stale for an update so far, by the action taken: `wait`, `mask`, `requeue` or `drop`",
            "missing or 0",
            "`drop` rises: short responses are favored",
            "run",
        ),
    ),
)

REWARD = Section(
    "Rewards",
    "`GROUP` is the group of reward workers, such as `reward`. Several reward functions, and values that a function logs, have "
    "separate metrics `GROUP/NAME`.",
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
            "0: all rewards are equal",
        ),
        MetricEntry("max", "of the reward", "largest reward of the step"),
        MetricEntry("scored", "rows", "rows with a reward"),
        MetricEntry(
            "COLUMN_mean",
            "of the reward",
            "the same for rewards in another column, such as `baseline_reward_mean`",
        ),
        MetricEntry("COLUMN_std", "of the reward", "the same"),
        MetricEntry("COLUMN_max", "of the reward", "the same"),
        MetricEntry("COLUMN_scored", "rows", "the same"),
        MetricEntry(
            "groups_without_signal",
            "0 to 1",
            "share of groups whose rewards are all equal: their advantages are 0",
            "below 0.5",
            "1: nothing is learned; prompts are too easy or too hard, or `n` is too small",
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
            "dropped because their rewards are all equal",
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
        MetricEntry("tokens", "tokens", "generated response tokens; for an update: trained tokens"),
        MetricEntry(
            "response_length",
            "tokens",
            "mean over responses",
            "moves slowly",
            "collapses, or grows to the token limit",
        ),
        MetricEntry(
            "truncation_rate",
            "0 to 1",
            "share of responses truncated at the token limit",
            "below 0.1",
            "near 1: rewards grade unfinished responses",
        ),
        MetricEntry(
            "length_ratio",
            "ratio",
            "mean length of trained responses over mean length of sampled responses",
            "near 1",
            "below 1: short responses are favored",
            "run",
        ),
        MetricEntry(
            "mean_trained_length", "tokens", "mean length of the step's trained responses", place="run"
        ),
        MetricEntry(
            "mean_finished_length",
            "tokens",
            "mean length of the responses finished in the step",
            place="run",
        ),
        MetricEntry(
            "mean_staleness",
            "versions",
            "mean over tokens: updates between sampling and training",
            "at most the bound of the schedule, lower on average",
            "at the bound in every step: generation is faster than training",
        ),
        MetricEntry(
            "max_staleness",
            "versions",
            "staleness of the oldest token",
            "at most the bound of the schedule",
        ),
        MetricEntry(
            "changed_share",
            "0 to 1",
            "with `deltas`: share of the published elements that differ from the previous version",
            "a few hundredths",
            "above a tenth: deltas do not help",
        ),
    ),
)

POLICY = Section(
    "The policy's update",
    "`GROUP` is the group that is trained, such as `actor`. All are means over trained tokens, unless stated otherwise.",
    (
        MetricEntry(
            "loss",
            "of the loss",
            "mean over the units of the loss (tokens, rows or pairs)",
            "supervised: falls; policy gradients: not informative",
            "not finite",
        ),
        MetricEntry(
            "grad_norm",
            "of the gradient",
            "norm before clipping",
            "steady",
            "grows over several steps, or is not finite",
        ),
        MetricEntry("learning_rate", "per step", "learning rate of the last optimizer step"),
        MetricEntry(
            "skipped_steps",
            "count",
            "optimizer steps that were skipped: bad ones, and steps without trained tokens",
            "0",
            "above 0",
        ),
        MetricEntry(
            "bad_steps",
            "count",
            "optimizer steps with a loss or gradient that was not finite or too large",
            "0",
            "above 0",
        ),
        MetricEntry(
            "entropy",
            "nats/token",
            "entropy of the policy's distributions",
            "falls slowly",
            "near 0 within a few steps: it samples only one response",
        ),
        MetricEntry(
            "clip_fraction",
            "0 to 1",
            "share of tokens with a clipped ratio (for a critic: a clipped value)",
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
            "divergence from the reference, by the estimator of the loss; with an adaptive penalty: nats per response",
            "grows slowly",
            "grows while the reward falls",
        ),
        MetricEntry("kl_coefficient", "per nat", "coefficient of the adaptive penalty in this step"),
        MetricEntry(
            "mean_logprob_gap",
            "nats/token",
            "gap between the log-probabilities of generator and trainer, for the same weights",
            "below 0.01 (bfloat16), below 1e-5 (float32)",
            "grows: the two compute different models",
        ),
        MetricEntry("max_logprob_gap", "nats", "largest of the step", "below 1", "several nats"),
        MetricEntry(
            "moved_routes",
            "0 to 1",
            "share of tokens and layers for which the router would choose other experts than the recorded ones of the generator "
            "(`routes=True`)",
            "0 (float32), a few hundredths (bfloat16)",
            "grows within an update of many steps: routes are stale",
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
            "probability under the trainer over probability under the generator",
            "near 1",
            "drifts away from 1",
        ),
        MetricEntry("max_generator_ratio", "ratio", "largest of the step", "below 10", "hundreds"),
        MetricEntry(
            "mean_importance_weight",
            "ratio",
            "a correction's weight of a token",
            "near 1",
            "far below 1: most of the batch is ignored",
        ),
        MetricEntry(
            "truncated_fraction",
            "0 to 1",
            "share of tokens with a truncated importance weight",
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
        MetricEntry("masked_tokens", "tokens", "left out by a correction", "few"),
        MetricEntry("masked_rows", "rows", "rows of which a correction leaves out every token", "few"),
    ),
)

MIXTURE = Section(
    "Mixtures of experts",
    "For updates; `GROUP` is the group that is trained. Covers all tokens that the model reads, including prompts. No token is dropped: "
    "experts have no capacity limit.",
    (
        MetricEntry(
            "expert_load",
            "1 to experts / chosen ones",
            "tokens of a layer's busiest expert over tokens of the average expert, mean over layers",
            "as at the start of the run",
            "grows: few experts do the work (`router_loss`)",
        ),
        MetricEntry("max_expert_load", "1 to experts / chosen ones", "the same for the worst layer"),
        MetricEntry(
            "router_entropy",
            "nats",
            "entropy of a router's distribution over experts, mean over tokens and layers",
            "steady",
            "falls to 0",
        ),
        MetricEntry(
            "router_loss",
            "1",
            "load-balancing loss before its coefficient, also measured without one: experts times the sum over experts of load times "
            "probability; equals the number of experts per token if all have equal shares",
            "near the number of chosen experts",
            "grows",
        ),
    ),
)

CRITIC = Section(
    "The critic's update",
    "`GROUP` is the group of the critic. `loss`, `grad_norm`, `clip_fraction` and others are as in other updates.",
    (
        MetricEntry(
            "value",
            "of the return",
            "prediction of the critic, mean over tokens",
            "follows `return`",
            "far from `return`",
        ),
        MetricEntry("return", "of the return", "training target of the critic, mean over tokens"),
    ),
)

MEMORY = Section(
    "Memory",
    "Read at most once a second, from outside the processes. `GROUP` may be `driver`. On nodes other than the driver's, the numbers are "
    "up to ten seconds old.",
    (
        MetricEntry(
            "resident_bytes",
            "bytes",
            "own host memory of all processes of the group, including mapped files",
            "stays as it is after the first steps",
            "grows with every step: a leak",
            is_timed=True,
        ),
        MetricEntry(
            "shared_bytes",
            "bytes",
            "shared memory that a process of the group has touched (row segments, weights in transfer, Ray's object store); of the "
            "largest process",
            "stays as it is",
            is_timed=True,
        ),
        MetricEntry(
            "device_bytes",
            "bytes",
            "peak of PyTorch's memory on a rank's device so far; missing without a GPU. Excludes an engine in a separate process (vLLM's, "
            "with several ranks)",
            "stays below the device's memory",
            "rises until the device is full: use smaller microbatches",
            is_timed=True,
        ),
        MetricEntry(
            "segment_bytes",
            "bytes",
            "columns of all rows in flight, in memory or spilled to disk",
            "stays as it is",
            "grows: rows wait for a slow node; `BufferConfig(max_bytes=...)` sets a limit",
            "run",
            is_timed=True,
        ),
        MetricEntry(
            "object_store_bytes",
            "bytes",
            "Ray's object stores on the nodes of the run; Weft only sends calls and replies through them",
            "near 0",
            "grows: another program on the cluster, or one of your functions, puts objects there",
            "run",
            is_timed=True,
        ),
        MetricEntry(
            "host_free_bytes",
            "bytes",
            "free memory on the node with the least, under the limit of its cgroup or of the machine",
            "a tenth of `host_limit_bytes` or more",
            "falls: Ray kills a worker when a twentieth is left",
            "run",
            is_timed=True,
        ),
        MetricEntry("host_limit_bytes", "bytes", "memory limit of that node", place="run", is_timed=True),
    ),
)

PREFERENCES = Section(
    "Preferences and reward models",
    "Means over pairs. `GROUP` is the group that is trained; the evaluation `preference_accuracy` writes its two metrics without a group.",
    (
        MetricEntry(
            "preference_accuracy",
            "0 to 1",
            "share of pairs with a higher score for the preferred response",
            "rises from 0.5",
            "below 0.5",
            "either",
        ),
        MetricEntry(
            "preference_accuracy_low",
            "0 to 1",
            "lower end of its 95 % interval, in an evaluation",
            place="run",
        ),
        MetricEntry(
            "preference_accuracy_high",
            "0 to 1",
            "upper end of its 95 % interval, in an evaluation",
            place="run",
        ),
        MetricEntry(
            "preference_margin",
            "nats",
            "lead of the preferred response",
            "rises",
            "falls",
            "run",
        ),
        MetricEntry(
            "chosen_reward", "of the loss", "implicit reward (or score) of preferred responses", "rises"
        ),
        MetricEntry("rejected_reward", "of the loss", "the same for rejected responses", "falls"),
        MetricEntry(
            "reward_margin", "of the loss", "`chosen_reward` minus `rejected_reward`", "rises", "falls"
        ),
        MetricEntry(
            "chosen_logprob",
            "nats",
            "log-probability of preferred responses under the policy",
            "stays as it is",
            "falls by many nats: the policy forgets them as well",
        ),
        MetricEntry("rejected_logprob", "nats", "the same for rejected responses", "falls"),
        MetricEntry("chosen_nll", "nats/token", "supervised term on preferred responses", "falls"),
        MetricEntry("reference_point", "nats", "KTO's z0", "near 0"),
        MetricEntry(
            "step_reward", "0 to 1", "a process reward model's probability that a step is correct"
        ),
        MetricEntry(
            "step_accuracy",
            "0 to 1",
            "share of steps that it grades like their labels",
            "rises",
            "near the share of the larger class",
        ),
    ),
)

EVALUATION = Section(
    "Evaluations",
    "Each name begins with the name of its evaluation, and is written with the metrics of the evaluated step: `eval/pass@1`. "
    "Other metrics of its graph have the names of the other sections: `eval/reward/mean`. Intervals are over prompts, which are "
    "independent of each other: Wilson's if all values are 0 or 1, otherwise Student's t.",
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
            "unbiased probability that one of K responses to a prompt is correct, mean over prompts; by the grader "
            "among the reward functions, or else by a threshold of the reward",
            "rises",
            "falls for large K while `pass@1` rises: the policy loses variety",
            "run",
        ),
        MetricEntry("pass@K_low", "0 to 1", "lower end of its 95 % interval", place="run"),
        MetricEntry("pass@K_high", "0 to 1", "upper end of its 95 % interval", place="run"),
        MetricEntry("prompts", "count", "evaluated prompts", "all of the held-out set", place="run"),
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
            "oldest version of the weights that wrote the responses, if training continues during the evaluation",
            "the version of the step",
            place="run",
        ),
        MetricEntry(
            "newest_version",
            "version",
            "newest version of these weights",
            "the version of the step",
            place="run",
        ),
    ),
)

SECTIONS = (STEP, MEMORY, REWARD, GENERATION, POLICY, MIXTURE, CRITIC, PREFERENCES, EVALUATION)

# Metric names

FUNCTIONS = "functions"
"""Worker group that runs the pure functions of graphs. It does not prefix metrics of the table."""
DRIVER = "driver"
"""Name of the driver among the processes of a run."""
FATES = ("wait", "mask", "requeue", "drop")
_FILLED = {"FATE": "|".join(FATES), "COLUMN": r"\w+", "K": r"\d+"}
"""Patterns for the capital letters of a name."""


@cache
def _pattern(name: str) -> re.Pattern[str]:
    # Capital letters are placeholders, and become patterns.
    parts = re.split("([A-Z]+)", name)
    return re.compile(
        "".join(f"(?:{_FILLED[part]})" if part in _FILLED else re.escape(part) for part in parts)
    )


def entries() -> Iterable[MetricEntry]:
    """Iterate over the whole table."""
    return (entry for section in SECTIONS for entry in section.entries)


@cache
def entry_named(name: str) -> MetricEntry | None:
    """Return the entry of a metric, without evaluation and group names, or None."""
    # Exact names first: `COLUMN_mean` would also match other names.
    exact = (entry for entry in entries() if entry.name == name)
    return next(exact, None) or next(
        (entry for entry in entries() if _pattern(entry.name).fullmatch(name)), None
    )


def written_name(group: str, name: str) -> str:
    """Return the written name of a worker group's metric.

    The group's name is the prefix, except for metrics of the table that a Weft function measured.

    >>> written_name("actor", "loss"), written_name("functions", "groups_without_signal"), written_name("functions", "my_own")
    ('actor/loss', 'groups_without_signal', 'functions/my_own')
    """
    entry = entry_named(name) if group == FUNCTIONS else None
    return f"{group}/{name}" if entry is None or entry.place == "group" else name


def is_of_group(name: str, metric: str) -> bool:
    """Whether a written name belongs to this metric of training (not of an evaluation).

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
    """Return the metrics of a step that do not depend on wall-clock time.

    >>> untimed({"step": 1.0, "step_s": 0.5, "actor/idle_share": 0.1, "actor/loss": 2.0})
    {'step': 1.0, 'actor/loss': 2.0}
    """
    timed = [entry.name for entry in entries() if entry.is_timed]
    return {name: value for name, value in row.items() if name.rpartition("/")[2] not in timed}


def entry_of(name: str) -> MetricEntry:
    """Return the entry of a metric by its written name, with evaluation and group names.

    >>> entry_of("critic/loss").unit, entry_of("eval/stale/drop").name
    ('of the loss', 'stale/FATE')

    Raises:
        UserError: the table has no such metric. The message suggests the nearest one.

    >>> entry_of("actor/entorpy")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: no metric is called 'actor/entorpy'; did you mean 'entropy'?
    """
    parts = name.split("/")
    # Drop prefixes until a name of the table remains.
    for first in range(len(parts)):
        if entry := entry_named("/".join(parts[first:])):
            return entry
    raise UserError(
        f"no metric is called {name!r}{nearest(parts[-1], [entry.name for entry in entries()])}".replace(
            "??", "?"
        )
    )


def undeclared(names: Iterable[str]) -> list[str]:
    """Return the written names that the table does not cover.

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
"""Pattern of a metric -> label. An evaluation's score is the metric of its first match."""


def score_label(name: str) -> str | None:
    """Return the label of an evaluation's score, or None if the metric is not one of `SCORES`.

    Args:
        name: the metric's name without the evaluation's.

    >>> score_label("pass@1"), score_label("avg@8"), score_label("judge/mean"), score_label("loss")
    ('pass@1', 'mean reward', 'mean reward', None)
    """
    return next((label for pattern, label in SCORES.items() if re.fullmatch(pattern, name)), None)


# The page

INTRODUCTION = """\
# Metrics

All metrics of a run, in sections of related ones. This page is generated from the table in `dataflow/metric_names.py`
(`python docs/generate/metrics_page.py > docs/metrics.md`), and a test compares the two.

A worker group's name is the prefix of its metrics: `actor/entropy`, `rollout/response_length`. An evaluation's name is a further prefix:
`eval/reward/mean`, `eval/rollout/response_length`. Capital letters are placeholders. Metrics of your own rewards, losses and workers
appear as `GROUP/NAME`, and metrics of your own functions as `functions/NAME`. These are not in the table.

A metric is missing in a step that did not measure it. `metrics.parquet` has a row for each step and a column for each metric. Trackers
get the same values ([watching.md](watching.md)).
"""


def metric_of(row: Mapping[str, float], metric: str) -> str | None:
    """Return the written name of a training metric in a step, or None.

    >>> metric_of({"eval/reward/mean": 1.0, "judge/mean": 2.0, "reward/mean": 3.0}, "mean")
    'reward/mean'
    """
    names = [n for n, v in row.items() if math.isfinite(v) and is_of_group(n, metric)]
    return f"reward/{metric}" if f"reward/{metric}" in names else next(iter(names), None)
