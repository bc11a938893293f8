"""Metric names: the table of all metrics, and their names in a run.

`python docs/generate/metrics_page.py > docs/metrics.md` writes the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from .errors import UserError, nearest

# Metric table: every metric that Weft itself writes, with its unit and typical good and bad values.
#
# To add a metric, add a row to its section: `NAME | UNIT | MEANING | GOOD | BAD`. Further lines of a
# row are indented. The name has the prefix `GROUP/` if the worker group's name precedes it, and
# `[GROUP/]` if both occur. A `*` follows the name if `is_timed`. Metrics of users' rewards, losses, functions and workers are not in the
# table.


class _MetricEntry(NamedTuple):
    shown: str
    """Name with its prefix."""
    unit: str
    meaning: str
    good: str = ""
    bad: str = ""
    is_timed: bool = False
    """The metric depends on wall-clock time, so two equal runs differ in it."""

    @property
    def name(self) -> str:
        """Capital letters are placeholders: `pass@K` covers `pass@1`, `pass@8`, ..."""
        return re.sub(r"^\[?GROUP/\]?", "", self.shown)


class _Section(NamedTuple):
    """Metrics that are read together."""

    title: str
    text: str
    entries: tuple[_MetricEntry, ...]


def _section(title: str, text: str, table: str) -> _Section:
    rows = [row.split(" | ") for row in re.sub(r"\n +", " ", table).strip().splitlines()]
    entries = (_MetricEntry(n.rstrip("*"), *cells, is_timed=n.endswith("*")) for n, *cells in rows)
    return _Section(title, text, tuple(entries))


SECTIONS = (
    _section(
        "The step",
        "Written by the run itself after every step.",
        """
step | count | step number; 0 is the start of the run
time_s* | s | from the first start of the run to the end of the step
step_s* | s | from the end of the previous step to the end of this one | stays as it is | grows over
    the run
samples | rows | rows of the step's training data
tokens_per_s* | tokens/s | trained prompt and response tokens per second of the step | as high as the
    hardware allows | falls while `rollout/response_length` stays as it is
GROUP/idle_share* | 0 to 1 | share of the step without a call in flight; groups that share devices
    take turns, so their shares add up to more than 1 | near 0 for the most expensive group | near 1
    for devices that no other group uses
checkpoint_pause_s* | s | longest time that the latest checkpoint blocked a group | below a step |
    several steps
GROUP/weights_transfer_s* | s | for a group that follows another: longest time to receive a version
    of the weights | stays as it is | grows over the run
GROUP/weights_pause_s* | s | part of `weights_transfer_s` that blocked the group | below half of
    `weights_transfer_s` with `double_buffer`, the default on a CPU with enough memory | a large
    share of the step: set `double_buffer` if memory allows it
GROUP/weights_bytes | bytes | for a group that others follow: size of a version of the weights, or
    of its adapter, summed over the publishing ranks | stays as it is | changes
GROUP/ranks | count | running ranks of an elastic group | all requested ranks | falls
replaced_workers | count | worker processes replaced so far | missing: none so far | rises with
    every step
requeued_rows | rows | requeued so far because a rank failed | missing: none so far | rises with
    every step
failed_rows | rows | dropped so far because a node failed on them; in an evaluation:
    `EVALUATION/failed_rows` | missing: none so far | rises: the results exclude those rows
stale/FATE | groups | too stale for an update so far, by the action taken: `wait`, `mask`, `requeue`
    or `drop` | missing or 0 | `drop` rises: short responses are favored
""",
    ),
    _section(
        "Memory",
        "Read at most once a second, from outside the processes. `GROUP` may be `driver`. On nodes other "
        "than the driver's, the numbers are up to ten seconds old.",
        """
GROUP/resident_bytes* | bytes | own host memory of all processes of the group, including mapped files
    | stays as it is after the first steps | grows with every step: a leak
GROUP/shared_bytes* | bytes | shared memory that a process of the group has touched (row segments,
    weights in transfer, Ray's object store); of the largest process | stays as it is
GROUP/device_bytes* | bytes | peak of PyTorch's memory on a rank's device so far; missing without a
    GPU. Excludes an engine in a separate process (vLLM's, with several ranks) | stays below the
    device's memory | rises until the device is full: use smaller microbatches
segment_bytes* | bytes | columns of all rows in flight, in memory or spilled to disk | stays as it is
    | grows: rows wait for a slow node; `BufferConfig(max_bytes=...)` sets a limit
object_store_bytes* | bytes | Ray's object stores on the nodes of the run; Weft only sends calls and
    replies through them | near 0 | grows: another program on the cluster, or one of your functions,
    puts objects there
host_free_bytes* | bytes | free memory on the node with the least, under the limit of its cgroup or
    of the machine | a tenth of `host_limit_bytes` or more | falls: Ray kills a worker when a
    twentieth is left
host_limit_bytes* | bytes | memory limit of that node
""",
    ),
    _section(
        "Rewards",
        "`GROUP` is the group of reward workers, such as `reward`. Several reward functions, and values "
        "that a function logs, have separate metrics `GROUP/NAME`.",
        """
GROUP/mean | of the reward | mean over the responses of the step | rises | falls, or jumps within a
    few steps: look at samples for an exploit
GROUP/std | of the reward | standard deviation over the responses of the step | above 0 | 0: all
    rewards are equal
GROUP/max | of the reward | largest reward of the step
GROUP/scored | rows | rows with a reward
GROUP/COLUMN_mean | of the reward | the same for rewards in another column, such as
    `baseline_reward_mean`
GROUP/COLUMN_std | of the reward | the same
GROUP/COLUMN_max | of the reward | the same
GROUP/COLUMN_scored | rows | the same
groups_without_signal | 0 to 1 | share of groups whose rewards are all equal: their advantages are 0
    | below 0.5 | 1: nothing is learned; prompts are too easy or too hard, or `n` is too small
zero_variance_groups | groups | dropped by `drop_zero_variance` | few | many: each costs a
    generation
tied_groups | groups | dropped because their rewards are all equal | few | many: each costs a
    generation
""",
    ),
    _section(
        "Generation",
        "`GROUP` is the group of rollout workers, such as `rollout`.",
        """
GROUP/tokens | tokens | generated response tokens; for an update: trained tokens
GROUP/response_length | tokens | mean over responses | moves slowly | collapses, or grows to the
    token limit
GROUP/truncation_rate | 0 to 1 | share of responses truncated at the token limit | below 0.1 | near
    1: rewards grade unfinished responses
length_ratio | ratio | mean length of trained responses over mean length of sampled responses | near
    1 | below 1: short responses are favored
mean_trained_length | tokens | mean length of the step's trained responses
mean_finished_length | tokens | mean length of the responses finished in the step
GROUP/mean_staleness | versions | mean over tokens: updates between sampling and training | at most
    the bound of the schedule, lower on average | at the bound in every step: generation is faster
    than training
GROUP/max_staleness | versions | staleness of the oldest token | at most the bound of the schedule
GROUP/changed_share | 0 to 1 | with `transport="deltas"`: share of the published elements that differ
    from the previous version | a few hundredths | above a tenth: deltas do not help
""",
    ),
    _section(
        "The policy's update",
        "`GROUP` is the group that is trained, such as `actor`. All are means over trained tokens, unless "
        "stated otherwise.",
        """
GROUP/loss | of the loss | mean over the units of the loss (tokens, rows or pairs) | supervised:
    falls; policy gradients: not informative | not finite
GROUP/grad_norm | of the gradient | norm before clipping | steady | grows over several steps, or is
    not finite
GROUP/learning_rate | per step | learning rate of the last optimizer step
GROUP/skipped_steps | count | optimizer steps that were skipped: bad ones, and steps without trained
    tokens | 0 | above 0
GROUP/bad_steps | count | optimizer steps with a loss or gradient that was not finite or too large |
    0 | above 0
GROUP/entropy | nats/token | entropy of the policy's distributions | falls slowly | near 0 within a
    few steps: it samples only one response
GROUP/clip_fraction | 0 to 1 | share of tokens with a clipped ratio (for a critic: a clipped value)
    | 0.01 to 0.2 | above 0.3: steps are too large
GROUP/approx_kl | nats/token | divergence from the policy before the update (k3) | below 0.02 |
    above 0.1: steps are too large
GROUP/kl | nats/token | divergence from the reference, by the estimator of the loss; with an
    adaptive penalty: nats per response | grows slowly | grows while the reward falls
GROUP/kl_coefficient | per nat | coefficient of the adaptive penalty in this step
GROUP/mean_logprob_gap | nats/token | gap between the log-probabilities of generator and trainer,
    for the same weights | below 0.01 (bfloat16), below 1e-5 (float32) | grows: the two compute
    different models
GROUP/max_logprob_gap | nats | largest of the step | below 1 | several nats
GROUP/moved_routes | 0 to 1 | share of tokens and layers for which the router would choose other
    experts than the recorded ones of the generator (`routes=True`) | 0 (float32), a few hundredths
    (bfloat16) | grows within an update of many steps: routes are stale
GROUP/generator_kl_k1 | nats/token | estimate of KL(generator || trainer), unbiased | near 0 |
    drifts away from 0
GROUP/generator_kl_k3 | nats/token | the same, never negative | below 0.01 | grows
GROUP/mean_generator_ratio | ratio | probability under the trainer over probability under the
    generator | near 1 | drifts away from 1
GROUP/max_generator_ratio | ratio | largest of the step | below 10 | hundreds
GROUP/mean_importance_weight | ratio | a correction's weight of a token | near 1 | far below 1: most
    of the batch is ignored
GROUP/truncated_fraction | 0 to 1 | share of tokens with a truncated importance weight | below 0.05
    | above 0.3
GROUP/masked_fraction | 0 to 1 | share of tokens that a correction leaves out | below 0.05 | above
    0.3
GROUP/masked_tokens | tokens | left out by a correction | few
GROUP/masked_rows | rows | rows of which a correction leaves out every token | few
""",
    ),
    _section(
        "Mixtures of experts",
        "For updates; `GROUP` is the group that is trained. Covers all tokens that the model reads, "
        "including prompts. No token is dropped: experts have no capacity limit.",
        """
GROUP/expert_load | 1 to experts / chosen ones | tokens of a layer's busiest expert over tokens of
    the average expert, mean over layers | as at the start of the run | grows: few experts do the
    work (`router_loss`)
GROUP/max_expert_load | 1 to experts / chosen ones | the same for the worst layer
GROUP/router_entropy | nats | entropy of a router's distribution over experts, mean over tokens and
    layers | steady | falls to 0
GROUP/router_loss | 1 | load-balancing loss before its coefficient, also measured without one:
    experts times the sum over experts of load times probability; equals the number of experts per
    token if all have equal shares | near the number of chosen experts | grows
""",
    ),
    _section(
        "The critic's update",
        "`GROUP` is the group of the critic. `loss`, `grad_norm`, `clip_fraction` and others are as in "
        "other updates.",
        """
GROUP/value | of the return | prediction of the critic, mean over tokens | follows `return` | far
    from `return`
GROUP/return | of the return | training target of the critic, mean over tokens
""",
    ),
    _section(
        "Preferences and reward models",
        "Means over pairs. `GROUP` is the group that is trained; the evaluation `preference_accuracy` "
        "writes its two metrics without a group.",
        """
[GROUP/]preference_accuracy | 0 to 1 | share of pairs with a higher score for the preferred response
    | rises from 0.5 | below 0.5
preference_accuracy_low | 0 to 1 | lower end of its 95 % interval, in an evaluation
preference_accuracy_high | 0 to 1 | upper end of its 95 % interval, in an evaluation
preference_margin | nats | lead of the preferred response | rises | falls
GROUP/chosen_reward | of the loss | implicit reward (or score) of preferred responses | rises
GROUP/rejected_reward | of the loss | the same for rejected responses | falls
GROUP/reward_margin | of the loss | `chosen_reward` minus `rejected_reward` | rises | falls
GROUP/chosen_logprob | nats | log-probability of preferred responses under the policy | stays as it
    is | falls by many nats: the policy forgets them as well
GROUP/rejected_logprob | nats | the same for rejected responses | falls
GROUP/chosen_nll | nats/token | supervised term on preferred responses | falls
GROUP/reference_point | nats | KTO's z0 | near 0
GROUP/step_reward | 0 to 1 | a process reward model's probability that a step is correct
GROUP/step_accuracy | 0 to 1 | share of steps that it grades like their labels | rises | near the
    share of the larger class
""",
    ),
    _section(
        "Evaluations",
        "Each name begins with the name of its evaluation, and is written with the metrics of the "
        "evaluated step: `eval/pass@1`. Other metrics of its graph have the names of the other sections: "
        "`eval/reward/mean`. Intervals are over prompts, which are independent of each other: Wilson's if "
        "all values are 0 or 1, otherwise Student's t.",
        """
avg@K | of the reward | mean reward of K responses to each prompt, mean over prompts | rises | falls
    while the reward in training rises: the policy fits the prompts it trains on
avg@K_low | of the reward | lower end of its 95 % interval
avg@K_high | of the reward | upper end of its 95 % interval
pass@K | 0 to 1 | unbiased probability that one of K responses to a prompt is correct, mean over
    prompts; by the grader among the reward functions, or else by a threshold of the reward | rises
    | falls for large K while `pass@1` rises: the policy loses variety
pass@K_low | 0 to 1 | lower end of its 95 % interval
pass@K_high | 0 to 1 | upper end of its 95 % interval
prompts | count | evaluated prompts | all of the held-out set
prompts_lost | count | held-out prompts without a scored response, because the grader failed or a
    filter dropped them; means cover the other prompts | 0 | scores of steps that lost different
    prompts cannot be compared
prompts_asked | count | held-out prompts
oldest_version | version | oldest version of the weights that wrote the responses, if training
    continues during the evaluation | the version of the step
newest_version | version | newest version of these weights | the version of the step
""",
    ),
)

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
    parts = (_FILLED.get(part) or re.escape(part) for part in re.split("([A-Z]+)", name))
    # A group for each part, because the pattern of FATE has alternatives.
    return re.compile("".join(f"(?:{part})" for part in parts))


def entries() -> Iterable[_MetricEntry]:
    """Iterate over the whole table."""
    return (entry for section in SECTIONS for entry in section.entries)


@cache
def entry_named(name: str) -> _MetricEntry | None:
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
    return f"{group}/{name}" if entry is None or entry.shown.startswith("GROUP/") else name


def is_of_group(name: str, metric: str) -> bool:
    """Whether a written name belongs to this metric of training (not of an evaluation).

    >>> is_of_group("rollout/truncation_rate", "truncation_rate"), is_of_group("eval/rollout/truncation_rate", "truncation_rate")
    (True, False)
    """
    if name == metric:
        return True
    entry = entry_named(metric)
    of_groups = entry is None or "GROUP/" in entry.shown
    return of_groups and name.count("/") == 1 and name.endswith(f"/{metric}")


def untimed(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step that do not depend on wall-clock time.

    >>> untimed({"step": 1.0, "step_s": 0.5, "actor/idle_share": 0.1, "actor/loss": 2.0})
    {'step': 1.0, 'actor/loss': 2.0}
    """
    timed = [entry.name for entry in entries() if entry.is_timed]
    return {name: value for name, value in row.items() if name.rpartition("/")[2] not in timed}


def entry_of(name: str) -> _MetricEntry:
    """Return the entry of a metric by its written name, with evaluation and group names.

    >>> entry_of("critic/loss").unit, entry_of("eval/stale/drop").name
    ('of the loss', 'stale/FATE')

    Raises:
        UserError: the table has no such metric. The message suggests the nearest one.

    >>> entry_of("actor/entorpy")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: no metric is called 'actor/entorpy'; did you mean 'entropy'?
    """
    if entry := _find(name):
        return entry
    hint = nearest(name.rpartition("/")[2], [entry.name for entry in entries()])
    raise UserError(f"no metric is called {name!r}{hint}")


def undeclared(names: Iterable[str]) -> list[str]:
    """Return the written names that the table does not cover.

    >>> undeclared(["actor/loss", "eval/reward/mean", "reward/form"])
    ['reward/form']
    """
    return [name for name in names if _find(name) is None]


def _find(name: str) -> _MetricEntry | None:
    # Drop prefixes until a name of the table remains.
    parts = name.split("/")
    return next((e for k in range(len(parts)) if (e := entry_named("/".join(parts[k:])))), None)


SCORES = {
    r"pass@1": "pass@1",
    r"avg@\d+": "mean reward",
    r"(.*/)?reward/mean": "mean reward",
    r"(.*/)?mean": "mean reward",
    r"(.*/)?preference_accuracy": "preference accuracy",
}
"""Pattern of a metric -> label. An evaluation's score is the metric of its first match."""


def score_label(name: str) -> str | None:
    """Return the label of an evaluation's score by its name without the evaluation's, or None.

    >>> score_label("pass@1"), score_label("avg@8"), score_label("judge/mean"), score_label("loss")
    ('pass@1', 'mean reward', 'mean reward', None)
    """
    return next((label for pattern, label in SCORES.items() if re.fullmatch(pattern, name)), None)


def metric_of(row: Mapping[str, float], metric: str) -> str | None:
    """Return the written name of a training metric in a step, or None.

    >>> metric_of({"eval/reward/mean": 1.0, "judge/mean": 2.0, "reward/mean": 3.0}, "mean")
    'reward/mean'
    """
    names = [n for n, v in row.items() if math.isfinite(v) and is_of_group(n, metric)]
    return f"reward/{metric}" if f"reward/{metric}" in names else next(iter(names), None)
