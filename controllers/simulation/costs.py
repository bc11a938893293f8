"""Costs of a simulated run: the time of its calls, and the lengths of its responses."""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, field_validator, model_validator

from ...dataflow.batch import Batch
from ...dataflow.config import Config
from ...dataflow.errors import UserError
from ...dataflow.graph import SOURCE, Graph
from ...dataflow.metric_names import FUNCTIONS
from ...dataflow.runs.files import CONFIG
from ...dataflow.runs.tables import read_timeline
from ...dataflow.safe_files import read_json
from ...dataflow.source import positions
from ...workers.dispatch import RowCost
from ...workers.training.microbatch_plan import OptimizerSteps, plan_microbatches
from ...workers.training.pipeline_schedule import PipelineRun, interleaved, run
from ..placement import Placement, ranks_of_a_replica, resolve
from ..ranks.row_io import num_tokens
from .sequence_groups import SequenceCost, SequenceGroups, equal_groups, plan_groups

FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a microbatch: a backward pass has twice as many matrix products."""


class LogNormal(Config):
    """Log-normal response lengths with an upper limit, which lowers the mean slightly.

    >>> LogNormal(mean=100, max_tokens=400).draw((0, 7), position=7, n=3).tolist()
    [33, 128, 97]
    """

    mean: float = Field(gt=0)
    """[tokens] Required. Mean response length of your task, before the limit."""
    sigma: float = Field(default=1.0, ge=0)
    """[nats] Standard deviation of the length's logarithm. Raise it for a longer tail."""
    max_tokens: int = Field(ge=1)
    """[tokens] Required. Maximum response length, `Sampling.max_tokens`."""
    prompt_share: float = Field(default=0.0, ge=0, le=1)
    """[share] Share of the variance of the length's logarithm that depends on the prompt alone, the
    same in all epochs. Set it to the share in your task's samples, to see how much forecasts help."""

    def draw(self, key: Sequence[int], position: int, n: int) -> np.ndarray:
        """Return the lengths of the responses to the source row at `position`: [n] int64 tokens."""
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        mean = math.log(self.mean) - self.sigma**2 / 2
        if self.prompt_share:
            of_prompt = np.random.default_rng([*key[:2], position]).standard_normal()
            mean += self.sigma * math.sqrt(self.prompt_share) * of_prompt
        sigma = self.sigma * math.sqrt(1 - self.prompt_share)
        drawn = np.random.default_rng(key).lognormal(mean, sigma, n)
        return np.clip(np.rint(drawn), 1, self.max_tokens).astype(np.int64)


class LinearCost(Config):
    """Cost of a call: a constant, plus a time per row and per token.

    The replica with the most work determines the cost. An update's cost covers all its optimizer
    steps.

    >>> LinearCost(fixed_s=1.0, per_token_s=0.5).seconds(rows=2, tokens=10)
    6.0
    """

    fixed_s: float = Field(default=0.0, ge=0)
    """[s] Constant time of each call. An update that comes in parts takes it once, in the last
    part. Set it to the time of a call without rows."""
    per_row_s: float = Field(default=0.0, ge=0)
    """[s] Time per row of the busiest replica. Set it for calls such as rewards."""
    per_token_s: float = Field(default=0.0, ge=0)
    """[s] Time per token of the busiest replica, including prompt tokens. Set it for calls whose
    time depends on tokens, such as training."""
    keep: float = Field(default=1.0, ge=0, le=1)
    """[share] Share of rows that a filter keeps, or of groups if it filters whole groups. Lower it
    for a filter that drops many."""

    def seconds(self, rows: float, tokens: float, steps: OptimizerSteps = OptimizerSteps()) -> float:
        """Return the seconds of a call on rows of equal length. Times of this class cover all
        optimizer steps of a call; times of subclasses cover one pass."""
        return self.fixed_s + self.per_row_s * rows + self.per_token_s * tokens

    def seconds_of_steps(self, lengths: np.ndarray, cuts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the seconds of a call, without the constant, for rows of these lengths [tokens].

        Args:
            cuts: indexes of the rows of each optimizer step.

        Returns:
            [optimizer steps], since replicas wait for each other after each; or [1] if only the
            time of the whole call is known.
        """
        return np.array([self.per_row_s * len(lengths) + self.per_token_s * float(lengths.sum())])

    def least_s(self, rows: float, tokens: float, steps: OptimizerSteps = OptimizerSteps()) -> float:
        """Return a lower bound on a call's seconds for any row lengths, without the constant."""
        return self.per_row_s * rows + self.per_token_s * tokens


class PipelineCost(LinearCost):
    """Cost of an update in a pipeline with the 1F1B schedule.

    With several chunks per stage, the schedule is interleaved 1F1B (arXiv:2104.04473). Times per
    row and token are for one forward and backward pass through the whole model. The pipeline fills
    and drains in each optimizer step, and in each part of an update.

    >>> cost = PipelineCost(stages=4, microbatch_tokens=100, per_token_s=0.01)
    >>> round(cost.seconds(rows=8, tokens=800), 6), cost.played(rows=8, tokens=800).bubble  # 8 / 4 s without the bubble
    (2.75, 0.375)
    >>> round(cost.seconds(rows=8, tokens=800, steps=OptimizerSteps(epochs=1, minibatches=2)), 6)  # twice 4 / 4 s, and twice the bubble
    3.5
    """

    stages: int = Field(ge=1)
    """[stages] Required. Planned number of pipeline stages."""
    chunks: int = Field(default=1, ge=1)
    """[chunks] Model chunks per stage. Raise it for a smaller bubble but more transfers."""
    microbatch_tokens: int = Field(ge=1)
    """[tokens] Required. Maximum number of tokens in a microbatch, as in `ModelConfig`. Lower it
    for more microbatches and a smaller bubble."""
    transfer_s: float = Field(default=0.0, ge=0)
    """[s] Time per token to send activations or gradients to the next stage. Raise it for a slow
    network."""
    shares: tuple[float, ...] = ()
    """Each model chunk's share of the time of a pass: one number for each of the `stages` x
    `chunks` chunks. By default, all are equal. Set it if layers do not divide evenly, or if the
    head is expensive."""

    @model_validator(mode="after")
    def _shares_are_of_all_pieces(self) -> PipelineCost:
        if self.shares and (
            len(self.shares) != self.stages * self.chunks or min(self.shares) < 0 or not sum(self.shares)
        ):
            raise ValueError(
                f"shares must be {self.stages * self.chunks} numbers of at least 0, one for each piece of the model, not {self.shares}"
            )
        return self

    def seconds(self, rows: float, tokens: float, steps: OptimizerSteps = OptimizerSteps()) -> float:
        of_step = self.played(rows / steps.minibatches, tokens / steps.minibatches)
        return self.fixed_s + steps.number * of_step.seconds

    def seconds_of_steps(self, lengths: np.ndarray, cuts: Sequence[np.ndarray]) -> np.ndarray:
        """See `LinearCost`. Cuts rows into microbatches as the training engine does."""
        found: list[float] = []
        for own in (lengths[cut] for cut in cuts):
            parts = plan_microbatches(own, self.microbatch_tokens, packed=True)
            found.append(self._play([(len(part), float(own[part].sum())) for part in parts]).seconds)
        return np.array(found)

    def least_s(self, rows: float, tokens: float, steps: OptimizerSteps = OptimizerSteps()) -> float:
        """See `LinearCost`. The bound is the compute time of the busiest stage."""
        stages = self._shares.reshape(self.chunks, self.stages).sum(0)
        return steps.epochs * float(stages.max()) * (self.per_row_s * rows + self.per_token_s * tokens)

    def played(self, rows: float, tokens: float) -> PipelineRun:
        """Simulate the schedule of one optimizer step on rows of equal length."""
        number = self.microbatches(rows, tokens)
        each = self._rows_of_one(rows, tokens)
        sizes = [min(each, rows - k * each) for k in range(number)]
        return self._play([(own, own * tokens / rows if rows else 0.0) for own in sizes])

    def microbatches(self, rows: float, tokens: float) -> int:
        """Return the number of microbatches, without the padding of an interleaved schedule."""
        return max(1, math.ceil(rows / self._rows_of_one(rows, tokens)))

    def _rows_of_one(self, rows: float, tokens: float) -> int:
        """Return the number of whole rows in a full microbatch."""
        # The small addend keeps rounding from losing a row that fits exactly.
        fit = self.microbatch_tokens * rows / tokens + 1e-9 if tokens else math.ceil(rows)
        return max(1, math.floor(fit))

    @property
    def _shares(self) -> np.ndarray:
        """[pieces] Shares of the time of a pass; they sum to 1."""
        shares = np.array(self.shares or (1.0,) * (self.stages * self.chunks))
        return shares / shares.sum()

    def _play(self, microbatches: Sequence[tuple[float, float]]) -> PipelineRun:
        """Simulate microbatches, each given as (rows, tokens). Empty microbatches pad an
        interleaved schedule to whole rounds."""
        number = max(1, len(microbatches))
        whole = number if self.chunks == 1 else -(-number // self.stages) * self.stages
        work = np.zeros((whole, 2))
        work[: len(microbatches)] = np.reshape(microbatches, (-1, 2))
        # Not `work @ ...`, whose rounding depends on the machine.
        seconds = self.per_row_s * work[:, 0] + self.per_token_s * work[:, 1]
        passes = np.outer(self._shares, seconds)
        schedule = interleaved(self.stages, whole, self.chunks)
        transfers = (self.transfer_s * work[:, 1]).tolist()
        return run(schedule, FORWARD_SHARE * passes, (1 - FORWARD_SHARE) * passes, transfers)


class SequenceParallelCost(LinearCost):
    """Cost of an update whose ranks split the tokens of long rows.

    Each optimizer step divides the ranks into groups of different sizes to suit its rows (FlexSP,
    arXiv:2412.01523). Times are for one forward and backward pass; `per_token_s` is the time of a
    token's linear layers on one rank.

    >>> cost = SequenceParallelCost(ranks=4, memory_tokens=100, per_token_s=0.01)
    >>> [cost.groups(np.array([200, 100, 100]), degree=degree).seconds for degree in (None, 4)]
    [1.0, 1.0]
    """

    ranks: int = Field(ge=1)
    """[ranks] Required. Number of ranks of a replica, which share the rows of a call."""
    memory_tokens: int = Field(ge=1)
    """[tokens] Required. Maximum number of tokens that fit on a rank in one pass, from `weft plan`
    or a trial run."""
    attention_length: float = Field(default=math.inf, gt=0, allow_inf_nan=True)
    """[tokens] Length of a row whose attention takes as long as all its other computation. Set it
    for rows of more than a few thousand tokens."""
    exchange_s: Mapping[int, float] = Field(default_factory=dict)
    """[s] Maps the number of ranks that share a row to the time of the all-to-all exchanges, per
    token of a rank. Give values measured within a node and between nodes."""

    def seconds(self, rows: float, tokens: float, steps: OptimizerSteps = OptimizerSteps()) -> float:
        number = max(1, round(rows / steps.minibatches))
        lengths = np.full(number, math.ceil(tokens / steps.minibatches / number))
        return self.fixed_s + steps.number * float(
            self.seconds_of_steps(lengths, [np.arange(number)])[0]
        )

    def seconds_of_steps(self, lengths: np.ndarray, cuts: Sequence[np.ndarray]) -> np.ndarray:
        """See `LinearCost`: the time of the slowest group in each step."""
        return np.array(
            [self.per_row_s * len(cut) / self.ranks + self.groups(lengths[cut]).seconds for cut in cuts]
        )

    def least_s(self, rows: float, tokens: float, steps: OptimizerSteps = OptimizerSteps()) -> float:
        """See `LinearCost`. The bound assumes rows of equal length, which need the least attention,
        and no exchanges between ranks."""
        linear = rows * float(self._cost.row_cost(np.array(tokens / rows))) if rows else 0.0
        return steps.epochs * (self.per_row_s * rows + self.per_token_s * linear) / self.ranks

    def groups(self, lengths: np.ndarray, degree: int | None = None) -> SequenceGroups:
        """Return the groups of an optimizer step on rows of these lengths. `degree` is the number
        of ranks of every group; None allows different sizes. Raises a `UserError` if no group has
        room for the longest row."""
        if degree is not None:
            return equal_groups(lengths, self.ranks, degree, self._cost)
        return plan_groups(lengths, self.ranks, self._cost)

    @property
    def _cost(self) -> SequenceCost:
        return SequenceCost(
            self.memory_tokens, self.per_token_s, RowCost(self.attention_length), self.exchange_s
        )


class Generation(Config):
    """Continuous batching on one replica. The batch has at most `max_num_seqs` responses, a setting
    of the rollout; others queue.

    >>> table = ((0, 0.5), (4, 0.7))
    >>> generation = Generation(lengths=((3, 5), (2, 7)), decode_step_s=table)
    >>> generation.draw_lengths((), position=1, n=2).tolist(), generation.seconds_by_batch(4).round(2).tolist()
    ([2, 7], [0.5, 0.55, 0.6, 0.65, 0.7])
    """

    lengths: LogNormal | tuple[tuple[int, ...], ...]
    """[tokens] Required. Response lengths: a `LogNormal`, or a sequence of lengths for each row of
    the source, in order. Set it to your task's lengths (the tail decides how much a schedule
    gains), or give the lengths of a run to replay it."""
    decode_step_s: float | Sequence[tuple[float, float]]
    """[s] Required. Time of a decode step, or a table of (responses in the batch, seconds) to
    interpolate linearly. Give values measured on your engine."""
    prefill_s: float = Field(default=0.0, ge=0)
    """[s] Prefill time per prompt token, counted once for all responses to the prompt. The batch
    pauses during prefill. Set it if prompts are long."""

    retired: ClassVar[Mapping[str, str]] = {"max_num_seqs": "it is that of the rollout's configuration"}

    @field_validator("decode_step_s")
    @classmethod
    def _is_a_table(cls, value: Any) -> Any:
        table = ((0.0, value),) if isinstance(value, float) else value
        if (
            not table
            or any(s <= 0 for _, s in table)
            or [b for b, _ in table] != sorted({b for b, _ in table})
        ):
            raise ValueError(
                "decode_step_s must be seconds above 0, or a table of such by ascending numbers of responses"
            )
        return value

    def draw_lengths(self, key: Sequence[int], position: int, n: int) -> np.ndarray:
        """Return the lengths of the responses to the source row at `position`: [n] int64 tokens."""
        if isinstance(self.lengths, LogNormal):
            return self.lengths.draw(key, position, n)
        own = self.lengths[position % len(self.lengths)]
        return np.array([max(1, own[k % len(own)]) for k in range(n)], np.int64)

    def seconds_by_batch(self, max_num_seqs: int) -> np.ndarray:
        """Return [max_num_seqs + 1] seconds of a decode step, by the number of responses."""
        table = (
            ((0.0, self.decode_step_s),) if isinstance(self.decode_step_s, float) else self.decode_step_s
        )
        return np.interp(np.arange(max_num_seqs + 1), *np.array(table, float).T)


def batch_limit(config: object) -> int:
    """Return the maximum number of responses in a replica's batch."""
    return getattr(config, "max_num_seqs", 256)


class CostModel(Config):
    """The costs of all calls in a simulated run.

    >>> CostModel(nodes={"actor.update": LinearCost(fixed_s=0.5), "rollout.receive_weights": LinearCost(fixed_s=0.1)}).dispatch_s
    0.0
    """

    nodes: Mapping[str, LinearCost | Generation] = Field(default_factory=dict)
    """Maps nodes to costs. A key is a node of the graph ("actor.update", or the name of a
    function), or a group's method outside the graph ("actor.publish_weights",
    "rollout.receive_weights", "actor.onload", "actor.offload"). Other calls take no time. Give
    measured values; `calibrate` fits them to a timeline."""
    dispatch_s: float = Field(default=0.0, ge=0)
    """[s] Time that the driver takes to send a call to each rank, one after the other. All ranks
    start when the first one has the call. Raise it for a slow network."""

    retired: ClassVar[Mapping[str, str]] = {
        "seed": "the lengths follow Driver(seed=...)",
        "ranks_per_replica": "a replica has the ranks of the group's configuration (tensor_parallel, "
        "sequence_parallel, ..., or replica_ranks of your own Config), or those of its cost",
    }

    def replica_ranks(self, group: str, config: object) -> int:
        """Return the ranks per replica, from the group's configuration, or else from its cost."""
        configured = ranks_of_a_replica(config)
        # A training group's configuration always states the number, even if it is 1.
        if configured > 1 or hasattr(config, "sequence_parallel"):
            return configured
        for name, cost in self.nodes.items():
            if name.partition(".")[0] == group and isinstance(cost, SequenceParallelCost | PipelineCost):
                return cost.ranks if isinstance(cost, SequenceParallelCost) else cost.stages
        return 1

    def pipeline(self, name: str, config: object) -> PipelineCost | None:
        """Return the pipeline cost of a node, or None if its cost is of another kind. Raises a
        `UserError` if the group has a different number of stages."""
        cost = self.nodes.get(name)
        if not isinstance(cost, PipelineCost):
            return None
        stages = getattr(config, "pipeline_parallel", cost.stages)
        if cost.stages != stages:
            raise UserError(
                f"the cost of node {name!r} is for a pipeline of {cost.stages} stages, but its group has pipeline_parallel={stages}"
            )
        return cost

    def linear(self, name: str) -> LinearCost:
        """Return the cost of a call that does not generate; zero by default."""
        cost = self.nodes.get(name)
        return cost if isinstance(cost, LinearCost) else LinearCost()


def draw_key(seed: int, graph: str, position: int, turn: int, path: Sequence[int] = ()) -> list[int]:
    """Return the key that seeds the random draws for a row, the same under every schedule.

    Args:
        position: position of the source row.
        turn: number of the row's group among the groups made of that source row.
        path: numbers of the row's ancestors and then of the row itself, each among its siblings.
    """
    # Python's `hash` of a text differs between processes.
    return [seed, zlib.crc32(graph.encode()), position, turn, *path]


# A lower bound on the time of a step


@dataclass(frozen=True)
class _Bound:
    seconds: float
    """[s] Average time of a step, set by the slowest pool."""
    pool: str
    """The slowest pool, whose groups are always busy."""
    pools: Mapping[str, float]
    """Pool -> minimum busy seconds per step of its groups."""


def bound(
    costs: CostModel,
    graph: Graph,
    placement: Placement | None = None,
    *,
    prompts_per_step: int,
    steps: int = 1,
    seed: int = 0,
    shuffle: bool = True,
) -> _Bound:
    """Return a lower bound on the time of a step, for any schedule in this placement.

    The bound assumes perfectly balanced pools, generation at the most efficient batch size, and no
    time for waiting, weight transfers and the driver.

    Args:
        costs: the costs of the calls. The bound assumes that filters drop nothing.
        steps: number of steps, from the first one, to average over.
        seed: the driver's seed, for the order of the prompts and the lengths of responses.
    """
    places = resolve(placement, {**graph.handles, FUNCTIONS: None})
    busy: Counter[str] = Counter()
    rows, tokens = _load(costs, graph, prompts_per_step * steps, seed, shuffle)
    for node in graph.nodes:
        group = node.group or FUNCTIONS
        config = graph.handles[group].config if group in graph.handles else None
        replicas = places[group].ranks // costs.replica_ranks(group, config)
        cost = costs.nodes.get(node.name, LinearCost())
        if isinstance(cost, Generation):
            assert node.makes_level is not None
            # Tokens of a response row include its prompt, which is subtracted here.
            prompts = tokens[node.level] * rows[node.makes_level] / rows[node.level]
            made = tokens[node.makes_level] - prompts
            # seconds per token at the most efficient batch size
            limit = batch_limit(config)
            best = float((cost.seconds_by_batch(limit)[1:] / np.arange(1, limit + 1)).min())
            seconds = (made * best + tokens[node.level] * cost.prefill_s) / replicas
        else:
            own = rows[node.level] / replicas, tokens[node.level] / replicas
            seconds = steps * cost.fixed_s + cost.least_s(*own, OptimizerSteps.of_node(node))
        busy[places[group].pool.name] += seconds / steps  # pyright: ignore[reportArgumentType]
    pool = max(busy, key=lambda name: busy[name])
    return _Bound(float(busy[pool]), pool, dict(busy))


def _load(
    costs: CostModel, graph: Graph, groups: int, seed: int, shuffle: bool
) -> tuple[Counter[int], Counter[int]]:
    """Return the rows and tokens on each level of the graph, for a run's first `groups` groups."""
    batch = Batch.of_table(graph.source.table)
    lengths = num_tokens(batch)
    rows: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    makers = [n for n in graph.nodes if n.makes_level is not None]
    order = itertools.islice(positions(len(batch), seed, shuffle=shuffle), groups)
    for number, position in enumerate(order):
        # Level -> (path, tokens) of each row.
        made: dict[int, list[tuple[list[int], int]]] = {SOURCE: [([], int(lengths[position]))]}
        for node in makers:
            n, cost = int(node.arguments.get("n", 1)), costs.nodes.get(node.name)
            children = made.setdefault(node.makes_level or SOURCE, [])
            for path, own in made[node.level]:
                drawn = np.zeros(n, np.int64)
                if isinstance(cost, Generation):
                    key = draw_key(seed, "train", position, number // len(batch), path)
                    drawn = cost.draw_lengths(key, position, n)
                children += [([*path, k], own + int(length)) for k, length in enumerate(drawn)]
        for level, own in made.items():
            rows[level] += len(own)
            tokens[level] += sum(size for _, size in own)
    return rows, tokens


# Costs fitted to the timeline of a real run


def calibrate(
    timeline: pa.Table | Path,
    *,
    replicas: Mapping[str, int] | None = None,
    nodes: Mapping[str, LinearCost | Generation] | None = None,
    **others: Any,
) -> CostModel:
    """Fit a cost model to the timeline of a real run, by nonnegative least squares.

    If several costs fit equally well (for example because all calls had the same number of rows),
    the one with the fewest terms wins. A timeline has no response lengths, so give the `Generation`
    of a generating node in `nodes`.

    Args:
        timeline: the folder of a run, whose `config.json` has the ranks of each group; or a
            `timeline.parquet`, or its table, with the columns group, node, worker_s, rows, tokens,
            and optionally last.
        replicas: group -> number of replicas that shared the rows of a call; 1 by default.
        nodes: known costs, which `calibrate` keeps.
        others: further settings of `CostModel`.

    Raises:
        UserError: the timeline is missing, unreadable or lacks a column, or `config.json` is
            damaged.
    """
    counts = _ranks(timeline / CONFIG) if isinstance(timeline, Path) and timeline.is_dir() else {}
    counts |= dict(replicas or {})
    table = _read(timeline) if isinstance(timeline, Path) else timeline
    needed = ("group", "node", "worker_s", "rows", "tokens")
    for column in needed:
        if column not in table.column_names:
            raise UserError(
                f"the timeline has no column {column!r}; calibrate() needs {', '.join(needed)}"
            )
    calls: dict[str, list[tuple[float, float, float, float]]] = {}
    for call in table.to_pylist():
        group, node = call["group"], call["node"]
        known = group == FUNCTIONS or node.startswith(f"{group}.")
        share = counts.get(group, 1)
        calls.setdefault(node if known else f"{group}.{node}", []).append(
            (call["worker_s"], call["rows"] / share, call["tokens"] / share, call.get("last", True))
        )
    fitted = {name: _fit(np.array(own, float)) for name, own in calls.items()}
    return CostModel(nodes={**fitted, **(nodes or {})}, **others)


def _read(timeline: Path) -> pa.Table:
    try:
        table = read_timeline(timeline) if timeline.is_dir() else pq.read_table(timeline)
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        raise UserError(f"the timeline of {timeline} cannot be read: {error}") from None
    if table is None:
        raise UserError(
            f"{timeline} has no timeline: nothing was called yet, or it is not the directory of a run"
        )
    return table


def _ranks(config: Path) -> dict[str, int]:
    """Return group -> number of ranks for a run; empty for a run in one process."""
    try:
        described = read_json(config)
        if described["backend"] == "Local()":
            return {}
        return {
            name: int(place["ranks"])
            for name, place in described["placement"].items()
            if isinstance(place, dict)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{config} lacks the ranks of each group ({error!r}); give the run's timeline.parquet and replicas={{...}}"
        ) from None


def _fit(calls: np.ndarray) -> LinearCost:
    """Fit a cost with nonnegative coefficients, and with as few terms as possible. `calls`: [calls,
    (seconds, rows, tokens, constants)]."""
    subsets = ((0,), (2,), (1,), (0, 2), (0, 1), (1, 2), (0, 1, 2))
    per_token, per_row, fixed = fit_terms(calls[:, [2, 1, 3]], calls[:, 0], subsets).tolist()
    return LinearCost(fixed_s=fixed, per_row_s=per_row, per_token_s=per_token)


def fit_terms(terms: np.ndarray, seconds: np.ndarray, subsets: Iterable[Sequence[int]]) -> np.ndarray:
    """Fit times as sums of terms with nonnegative weights, by least squares.

    Args:
        terms: [calls, terms].
        seconds: [calls].
        subsets: indexes of the terms to try together, fewest first: a sum with more terms has to fit
            clearly better.

    Returns:
        [terms] weights, 0 for terms that are left out.
    """
    error, found = float(seconds @ seconds), np.zeros(terms.shape[1])
    for chosen in map(list, subsets):
        # Skip terms without unique weights, for example if all calls had the same number of rows.
        if np.linalg.matrix_rank(terms[:, chosen]) < len(chosen):
            continue
        weights = np.linalg.lstsq(terms[:, chosen], seconds, rcond=None)[0]
        left = float(((terms[:, chosen] @ weights - seconds) ** 2).sum())
        if (weights >= 0).all() and left < error * (1 - 1e-6) - 1e-12:
            error, found = left, np.zeros(terms.shape[1])
            found[chosen] = weights
    return found
