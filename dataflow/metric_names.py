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
# row are indented. The prefix `GROUP/` stands for the worker group's name; `[GROUP/]` is optional.
# A `*` follows the name if `is_timed`. The table excludes metrics of users' rewards, losses,
# functions and workers.


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
        "The run writes these after every step.",
        """
step | count | number of the step; step 0 is the start of the run
time_s* | s | time from the first start of the run to the end of the step
step_s* | s | time since the end of the previous step | steady | grows over the run
samples | rows | rows that the step trained on
tokens_per_s* | tokens/s | prompt and response tokens trained on per second | as high as the
    hardware allows | falls while `rollout/response_length` is steady
GROUP/idle_share* | 0 to 1 | share of the step in which the group ran no call; groups that take
    turns on shared devices add up to more than 1 | near 0 for the most expensive group | near 1 for
    devices that no other group uses
GROUP/tokens_per_s_per_device* | tokens/s | tokens of the group's calls per second of these calls and
    per GPU (or rank without a GPU): for generation the new tokens, otherwise prompts and responses;
    only of groups whose model has [costs](planning.md#costs-of-a-model) | as high as the hardware allows | falls while lengths are steady
GROUP/flops_utilisation* | 0 to 1 | model FLOPs utilisation (MFU): operations that the group's calls
    need, divided by the peak of its GPUs during these calls. Counts a shared prompt once, and
    nothing that is recomputed. Missing on CPUs and [unknown GPUs](planning.md#devices) | updates:
    0.3 to 0.5; generation: a few hundredths | updates below 0.2: microbatches are too small, or
    ranks wait for each other
checkpoint_pause_s* | s | longest time that the latest checkpoint blocked a group | less than a step
    | several steps
GROUP/weights_transfer_s* | s | longest time in which a follower group received a version of the
    weights | steady | grows over the run
GROUP/weights_pause_s* | s | part of `weights_transfer_s` that blocked the group | with
    `double_buffer` (the default on a CPU with enough memory), below half of `weights_transfer_s` |
    a large share of the step: set `double_buffer` if memory allows it
GROUP/weights_bytes | bytes | size of a version of the weights or the adapter that a leader group
    published, summed over its ranks | constant | changes
GROUP/ranks | count | running ranks of an elastic group | all requested ranks | falls
replaced_workers | count | worker processes replaced so far | missing: none | rises with every step
requeued_rows | rows | rows requeued so far because a rank failed | missing: none | rises with every
    step
failed_rows | rows | rows dropped so far because a node failed on them; for an evaluation:
    `EVALUATION/failed_rows` | missing: none | rises: results exclude the dropped rows
stale/FATE | groups | groups so far that were too stale for an update, by the schedule's action:
    `wait`, `mask`, `requeue` or `drop` | missing or 0 | `drop` rises: training favors short
    responses
""",
    ),
    _section(
        "Memory",
        "Weft reads these at most once a second, from outside the processes. `GROUP` may be `driver`. "
        "Numbers of nodes other than the driver's are up to ten seconds old.",
        """
GROUP/resident_bytes* | bytes | host memory of all processes of the group, including mapped files
    but not shared memory | steady after the first steps | grows with every step: a leak
GROUP/shared_bytes* | bytes | shared memory that the group's largest process has touched: row
    segments, weights in transfer, Ray's object store | steady
GROUP/device_bytes* | bytes | PyTorch's peak memory on a rank's device so far; missing without a
    GPU. Excludes engines in separate processes, such as vLLM's with several ranks | stays below the
    device's memory | rises until the device is full: use smaller microbatches
segment_bytes* | bytes | size of all rows in flight, in memory or spilled to disk | steady | grows:
    rows wait for a slow node; `BufferConfig(max_bytes=...)` sets a limit
object_store_bytes* | bytes | size of Ray's object stores on the run's nodes; Weft uses them only
    for calls and replies | near 0 | grows: another program, or one of your functions, stores
    objects there
host_free_bytes* | bytes | free memory on the node with the smallest free share of its limit (the
    cgroup's or the machine's) | at least a tenth of `host_limit_bytes` | falls: Ray kills a worker
    at a twentieth
host_limit_bytes* | bytes | memory limit of the node of `host_free_bytes`
""",
    ),
    _section(
        "Rewards",
        "`GROUP` is the group of reward workers, such as `reward`. Each of several reward functions, and "
        "each value that a function logs, has its own metric `GROUP/NAME`.",
        """
GROUP/mean | of the reward | mean reward of the step's responses | rises | falls, or jumps within a
    few steps: check samples for reward hacking
GROUP/std | of the reward | standard deviation of the rewards of the step's responses | above 0 | 0:
    all rewards are equal
GROUP/max | of the reward | largest reward of the step
GROUP/scored | samples | number of samples with a reward; an episode is one sample
GROUP/failure_rate | 0 to 1 | share of attempts that failed, if a reward function is asynchronous, such
    as a judge. Weft requeues failed samples up to two times | 0 | above 0.05: the service is
    unreliable or too slow, or a judge gives no verdict
GROUP/COLUMN_mean | of the reward | mean of the rewards in another column, such as
    `baseline_reward_mean`
GROUP/COLUMN_std | of the reward | standard deviation of the rewards in another column
GROUP/COLUMN_max | of the reward | largest reward in another column
GROUP/COLUMN_scored | samples | samples with a reward in another column
groups_without_signal | 0 to 1 | share of groups whose rewards are all equal, which gives advantages
    of 0 | below 0.5 | 1: the run learns nothing; prompts are too easy or too hard, or `n` is too
    small
signal_of_shaping | 0 to 1 | of the groups whose shaped rewards differ, the share with equal rewards
    before the shaping | low | 1: the run only learns from shaping terms, such as a length penalty
truncated_rows | rows | rows that `mask_truncated` masked because they reached the length limit | few |
    many: raise `max_tokens`
zero_variance_groups | groups | groups that `drop_zero_variance` dropped | few | many: their
    generation is wasted
compared_fraction | 0 to 1 | distillation across tokenizers: share of trained tokens that the teacher's
    tokens cover | above 0.95 | below 0.8: the teacher cannot read special tokens or parts of the text
one_to_one_fraction | 0 to 1 | distillation across tokenizers: share of trained tokens that are one token
    of the teacher too | steady | low: most spans compare one number, with more variance
tied_groups | groups | groups that `best_and_worst` dropped because their rewards are equal or NaN |
    few | many: their generation is wasted
""",
    ),
    _section(
        "Curriculum",
        "A source with a curriculum writes these. A solve rate is the share of solved responses in the "
        "last two groups of a prompt.",
        """
curriculum/active | prompts | prompts that are not retired | above `prompts_per_step` | below it
curriculum/retired | prompts | prompts that gates have retired | grows slowly | nearly all prompts
curriculum/returned | prompts | how often a retired prompt has returned so far
curriculum/returned_early | prompts | how often a retired prompt has returned because no other was left
    to draw | 0 | rises: all prompts are retired; add data, or loosen the gates
curriculum/unmeasured | prompts | prompts without a solve rate | falls
curriculum/lost_groups | groups | groups so far that ended without an outcome, and count neither as
    solved nor as failed | 0 | rises with every step: see `failed_rows`
curriculum/solve_rate | 0 to 1 | mean solve rate of the measured prompts | rises | falls
curriculum/in_POOL | prompts | active prompts in a pool; `new` has those without a solve rate
curriculum/weight_of_SOURCE | 0 to 1 | share of a source in the drawn prompts while it has queued
    prompts
curriculum/solve_rate_of_SOURCE | 0 to 1 | mean solve rate of the measured prompts of a source
""",
    ),
    _section(
        "Generation",
        "`GROUP` is the group of rollout workers, such as `rollout`.",
        """
GROUP/tokens | tokens | generated response tokens; for an update: trained tokens
GROUP/response_length | tokens | mean length of the responses | changes slowly | collapses, or grows
    to the token limit
GROUP/truncation_rate | 0 to 1 | share of responses that reached the token limit | below 0.1 | near
    1: the reward grades unfinished responses
GROUP/forecast_error | ratio | under `Synchronous`: mean absolute error of the forecasts of response
    lengths, divided by the mean length; missing in the first step | below 0.5 | above
    0.7: lengths are unpredictable, so the longest responses do not start first
GROUP/moved_responses | count | with `Synchronous(migrate=True)`: unfinished responses that moved
    to an idle replica
GROUP/speculating* | 0 to 1 | with `speculation`: share of the engine's steps with drafts. Weft measures
    for each batch size whether drafts pay, unless `off_above` is set | 1 for small batches | near 0:
    drafts do not pay, so leave out `speculation`
GROUP/draft_acceptance | 0 to 1 | share of drafted tokens that the model accepted | above 0.5 | below
    0.2: choose another `method`
GROUP/draft_acceptance_K | 0 to 1 | the same for the Kth token of a draft | falls slowly with K | near 0
    for the last K: lower `tokens`
length_ratio | ratio | mean length of trained responses divided by that of finished responses | near
    1 | below 1: training favors short responses
mean_trained_length | tokens | mean length of the responses that the step trained on; for agents, of
    their rows, with prompts
mean_finished_length | tokens | mean length of the responses that finished in the step; for agents,
    of their rows, with prompts
GROUP/mean_staleness | versions | updates between sampling and training of a token, mean over tokens
    | below the schedule's bound | always at the bound: generation is faster than training
GROUP/max_staleness | versions | updates between sampling and training of the oldest token | at most
    the schedule's bound, unless `staleness_of` lets episodes have older tokens
GROUP/changed_share | 0 to 1 | with `transport="deltas"`: share of published elements that differ
    from the previous version | a few hundredths | above a tenth: deltas do not help
""",
    ),
    _section(
        "Agents",
        "`GROUP` is the group of rollout workers. Nodes `run` and `interact` write these, and the "
        "metrics of generation; a response is then an episode.",
        """
GROUP/reward | of the reward | mean reward of the episodes | rises | falls
GROUP/turns | turns | mean number of sampled turns of an episode | changes slowly | reaches the
    harness's limit
GROUP/episode_rows | rows | mean number of rows of an episode | 1 without sub-agents or shortened
    histories | grows: the harness changes earlier messages
GROUP/retokenised | rows | rows whose context contains sampled text that was tokenised again, because
    the harness changed the history | 0 | above 0 for a harness that only appends messages
GROUP/dropped_episodes | episodes | episodes that failed by no fault of the policy, and do not count
    | 0 | many: see the reasons in `logs/gateway.log`
GROUP/WHERE_failures | episodes | episodes that failed in the model, harness, tool, sandbox, task or
    grader | few | rises
""",
    ),
    _section(
        "The policy's update",
        "`GROUP` is the trained group, such as `actor`. Unless stated otherwise, metrics are means over "
        "trained tokens.",
        """
GROUP/loss | of the loss | mean loss over its units (tokens, rows or pairs) | supervised training:
    falls; policy gradients: not informative | not finite
GROUP/grad_norm | of the gradient | norm of the gradient before clipping | steady | grows over
    several steps, or is not finite
GROUP/learning_rate | per step | learning rate of the last optimizer step
GROUP/skipped_steps | count | optimizer steps skipped because they were bad or had no trained tokens
    | 0 | above 0
GROUP/bad_steps | count | optimizer steps with a loss or gradient that was not finite, or a gradient
    that was too large | 0 | above 0
GROUP/entropy | nats/token | entropy of the policy's token distributions | falls slowly | near 0
    within a few steps: the policy samples only one response
GROUP/clip_fraction | 0 to 1 | share of tokens with a clipped ratio (for a critic: a clipped value)
    | 0.01 to 0.2 | above 0.3: updates are too large
GROUP/approx_kl | nats/token | divergence from the policy before the update (k3 estimator) | below
    0.02 | above 0.1: updates are too large
GROUP/divergence | nats/token | divergence from the teacher in distillation, over its likeliest tokens
  and the tail | falls | stays: the teacher has no influence, or its tokenizer differs
GROUP/teacher_tail | probability | mass of the teacher outside its likeliest tokens | below 0.05 | above
  0.2: raise `top`
GROUP/student_tail | probability | mass of the student outside the teacher's likeliest tokens | falls |
  grows
GROUP/kl | nats/token | divergence from the reference, by the loss's estimator; with an adaptive
    penalty: nats per response | grows slowly | grows while the reward falls
GROUP/entropy_coefficient | per nat | coefficient of the adaptive entropy bonus
GROUP/kl_coefficient | per nat | coefficient of the adaptive KL penalty
GROUP/mean_logprob_gap | nats/token | mean absolute difference of a token's log-probabilities in
    generator and trainer under the same weights | below 0.01 (bfloat16), below 1e-5 (float32) |
    grows: generator and trainer compute different models
GROUP/max_logprob_gap | nats | largest difference of a token's log-probabilities in generator and
    trainer | below 1 | several nats
GROUP/moved_routes | 0 to 1 | with `routes=True`: share of tokens and layers for which the trainer's
    router would choose other experts than the generator's | 0 (float32), a few hundredths
    (bfloat16) | grows within an update of many steps: the recorded routes are stale
GROUP/generator_kl_k1 | nats/token | unbiased estimate (k1) of KL(generator || trainer) | near 0 |
    drifts away from 0
GROUP/generator_kl_k3 | nats/token | estimate (k3) of KL(generator || trainer) that is never
    negative | below 0.01 | grows
GROUP/mean_generator_ratio | ratio | ratio p_trainer / p_generator of a token, mean over tokens |
    near 1 | drifts away from 1
GROUP/max_generator_ratio | ratio | largest ratio p_trainer / p_generator of a token | below 10 |
    above 100
GROUP/mean_importance_weight | ratio | mean weight of a token from the corrections | near 1 | far
    below 1: most of the batch hardly counts
GROUP/truncated_fraction | 0 to 1 | share of tokens with a truncated importance weight | below 0.05
    | above 0.3
GROUP/masked_fraction | 0 to 1 | share of tokens that corrections mask | below 0.05 | above 0.3
GROUP/masked_tokens | tokens | tokens that corrections mask | few
GROUP/masked_rows | rows | rows that corrections mask completely | few
GROUP/high_covariance_fraction | 0 to 1 | share of tokens that Clip-Cov or KL-Cov treats differently |
    near `share` | far below: few tokens are within `bounds`
""",
    ),
    _section(
        "Mixtures of experts",
        "`GROUP` is the trained group. These metrics of updates cover all tokens that the model reads, "
        "including prompts. Experts have no capacity limit, so no token is dropped.",
        """
GROUP/expert_load | ratio | load of a layer's busiest expert divided by the mean load of its
    experts, mean over layers; between 1 and num_experts / experts_per_token | as at the start of
    the run | grows: few experts do most of the work (set `router_loss`)
GROUP/max_expert_load | ratio | `expert_load` of the layer where it is largest
GROUP/router_entropy | nats | entropy of a router's distribution over experts, mean over tokens and
    layers | steady | falls to 0
GROUP/router_loss | 1 | load-balancing loss before its coefficient, measured even if disabled:
    num_experts times the sum over experts of load times probability; with equal shares, the number
    of experts per token | near the number of experts per token | grows
""",
    ),
    _section(
        "The critic's update",
        "`GROUP` is the critic's group. Its other metrics, such as `loss`, `grad_norm` and "
        "`clip_fraction`, are as in the policy's update.",
        """
GROUP/value | of the return | predicted value, mean over tokens | follows `return` | far from
    `return`
GROUP/return | of the return | target of the value, mean over tokens
""",
    ),
    _section(
        "Preferences and reward models",
        "Metrics are means over pairs. `GROUP` is the trained group. The evaluation "
        "`preference_accuracy` writes its metrics without a group.",
        """
[GROUP/]preference_accuracy | 0 to 1 | share of pairs whose preferred response has the higher score
    | rises from 0.5 | below 0.5
preference_accuracy_low | 0 to 1 | in an evaluation: lower end of the 95 % interval of
    `preference_accuracy`
preference_accuracy_high | 0 to 1 | in an evaluation: upper end of the 95 % interval of
    `preference_accuracy`
preference_margin | nats | score of the preferred response minus that of the other | rises | falls
GROUP/chosen_reward | of the loss | implicit reward (or score) of preferred responses | rises
GROUP/rejected_reward | of the loss | implicit reward (or score) of rejected responses | falls
GROUP/reward_margin | of the loss | `chosen_reward` minus `rejected_reward` | rises | falls
GROUP/chosen_logprob | nats | log-probability of preferred responses under the policy | steady |
    falls by many nats: the policy also unlearns preferred responses
GROUP/rejected_logprob | nats | log-probability of rejected responses under the policy | falls
GROUP/policy_weight | factor | mean weight of a pair with on_policy=True (WPO): how likely the
    policy is to sample both responses | 0 to 1; near 0, other models wrote the pairs | -
GROUP/chosen_nll | nats/token | negative log-likelihood of preferred responses, the loss's
    supervised term | falls
GROUP/reference_point | nats | the log-ratio that responses are compared with: KTO's z0, a divergence
    from the reference, or BCO's boundary between good and bad responses | near 0 for KTO
GROUP/step_reward | 0 to 1 | a process reward model's probability that a step of a solution is
    correct
GROUP/step_accuracy | 0 to 1 | share of solution steps that the process reward model classifies
    correctly | rises | near the share of the larger class
""",
    ),
    _section(
        "Evaluations",
        "Weft writes these metrics with those of the evaluated step. Each name begins with the "
        "evaluation's name: `eval/pass@1`. The graph of an evaluation also writes metrics of the other "
        "sections: `eval/reward/mean`. Intervals, which treat prompts as independent, are Wilson "
        "intervals if all values are 0 or 1, otherwise Student's t intervals.",
        """
avg@K | of the reward | mean reward of K responses per prompt, mean over prompts | rises | falls
    while the training reward rises: the policy overfits the training prompts
avg@K_low | of the reward | lower end of the 95 % interval of `avg@K`
avg@K_high | of the reward | upper end of the 95 % interval of `avg@K`
pass@K | 0 to 1 | unbiased estimate of the probability that at least one of K responses to a prompt
    is correct, mean over prompts. The grader among the reward functions decides; without a grader,
    the reward must reach a threshold | rises | falls for large K while `pass@1` rises: the policy
    loses diversity
pass@K_low | 0 to 1 | lower end of the 95 % interval of `pass@K`
pass@K_high | 0 to 1 | upper end of the 95 % interval of `pass@K`
maj@K | 0 to 1 | probability that the most frequent final answer of K responses is correct, mean over
    prompts. The grader finds the answers (`FindsAnswers`) | rises; above `pass@1` | below
    `pass@1`: the policy is confident of a wrong answer to many prompts
maj@K_low | 0 to 1 | lower end of the 95 % interval of `maj@K`
maj@K_high | 0 to 1 | upper end of the 95 % interval of `maj@K`
prompts | count | evaluated prompts | all held-out prompts
prompts_lost | count | held-out prompts without a scored response, because the grader failed or a
    filter dropped them; means exclude them | 0 | above 0: steps that lost different prompts cannot
    be compared
prompts_asked | count | held-out prompts
oldest_version | version | oldest version of the weights that sampled responses; differs from the
    step's if training continues during the evaluation | the version of the step
newest_version | version | newest version of the weights that sampled responses | the version of the
    step
""",
    ),
)

# Metric names

FUNCTIONS = "functions"
"""Worker group that runs the pure functions of graphs. It does not prefix metrics of the table."""
DRIVER = "driver"
"""Name of the driver among the processes of a run."""
FATES = ("wait", "mask", "requeue", "drop")
_FILLED = {
    "FATE": "|".join(FATES),
    "COLUMN": r"\w+",
    "K": r"\d+",
    "POOL": r"\w+",
    "SOURCE": r"[\w.-]+",
    "WHERE": "model|harness|tool|sandbox|task|grader",
}
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
    """Return the table entry of a metric, if any. `name` has no evaluation or group prefix."""
    # `COLUMN_mean` would also match other names.
    exact = (entry for entry in entries() if entry.name == name)
    return next(exact, None) or next(
        (entry for entry in entries() if _pattern(entry.name).fullmatch(name)), None
    )


def written_name(group: str, name: str) -> str:
    """Return the written name of a worker group's metric.

    The group's name is the prefix, except for the table's metrics that Weft's functions measure.

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
    """Return a step's metrics that do not depend on wall-clock time.

    >>> untimed({"step": 1.0, "step_s": 0.5, "actor/idle_share": 0.1, "actor/loss": 2.0})
    {'step': 1.0, 'actor/loss': 2.0}
    """
    timed = [entry.name for entry in entries() if entry.is_timed]
    return {name: value for name, value in row.items() if name.rpartition("/")[2] not in timed}


def entry_of(name: str) -> _MetricEntry:
    """Return the entry of a metric by its written name, with prefixes.

    >>> entry_of("critic/loss").unit, entry_of("eval/stale/drop").name
    ('of the loss', 'stale/FATE')

    Raises:
        UserError: the table has no such metric.

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
"""Maps patterns of metrics to labels. An evaluation's score is the first match."""


def score_label(name: str) -> str | None:
    """Return the label of a metric if it can be an evaluation's score, otherwise None. `name` has
    no evaluation prefix.

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
