"""RewardWorker: scores samples with Python functions, written for Weft or another library."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pydantic

from ..algorithms.graders.grader import FindsAnswers
from ..algorithms.graders.instructions import IFEVAL_IDS, Instructions
from ..dataflow.batch import Batch
from ..dataflow.column import (
    ANSWER,
    EPISODE_ROWS,
    FINAL_ANSWER,
    PROMPT,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    REWARD,
    Column,
)
from ..dataflow.config import Config
from ..dataflow.errors import ResultError, UserError
from ..dataflow.metrics import Max, Mean, Metric, Metrics, Std, Sum, merge
from ..dataflow.prompts.tokenizer import Tokenizer
from .dispatch import Dispatch
from .rewards.calls import Caller
from .rewards.function import Reward
from .rewards.judge import Judge
from .rewards.scoring import PART_S, Outcome, Scoring
from .rewards.signature import ANSWERS, RewardRows
from .worker import MAX_FAILED, Context, Worker, remote

if TYPE_CHECKING:
    from ..dataflow.graph import Node
    from ..dataflow.source import Source


LONGEST_TEXT = 400
"""Number of characters of a prompt or response that messages show."""
# Stack frames in this folder belong to Weft, not to the user's code.
_LIBRARY = str(Path(__file__).parent.parent / "workers")


class RewardConfig(Config):
    """Reward functions, and how to handle samples that they cannot score."""

    function: Callable[..., Any] | Reward | tuple[Callable[..., Any] | Reward, ...]
    """Required. Set it to a reward function or grader, or to several whose weighted sum is the
    reward. Parameter names select columns of the data or of earlier nodes: `def score(response,
    answer) -> float`; `response` is the text of the response. A parameter with a default is
    optional, and `**columns` gets all other columns. `functools.partial` may fix arguments. Weft
    recognizes functions written for TRL, verl, OpenRLHF, slime and verifiers 0.1 to 0.3 by their
    parameters, and calls them as their library does. `Reward(function=..., name=..., weight=...)`
    sets a name or a weight."""
    tokenizer: str | Path
    """Required. Set it to the rollout's model: folder or Hugging Face id of the tokenizer that
    decodes responses."""

    deadline_s: float | None = pydantic.Field(default=None, gt=0)
    """[s] Time limit for each sample, or for each call of a batch function; None selects the
    driver's `call_timeout_s`. After it, Weft requeues the samples without a score, and drops a
    sample that has exceeded the limit three times. Ray replaces the process; `Local` interrupts
    Python functions that run outside a debugger. Asynchronous calls are cancelled. Set it if
    graders may hang."""
    max_failed: float = pydantic.Field(default=MAX_FAILED, ge=0, le=1)
    """[share] Maximum share of samples that may fail; a larger share ends the run. For the first
    100 samples, it is a share of 100, so that a few early failures do not end the run. With 0, the
    first failure ends it. Weft drops a sample that fails three times and counts it in
    `failed_rows`. Raise it for a service that fails often."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(("deadline_s", "max_failed"))

    @pydantic.field_validator("function", mode="before")
    @classmethod
    def _can_be_called(cls, function: Any) -> Any:
        function = tuple(function) if isinstance(function, list) else function
        for each in function if isinstance(function, tuple) else (function,):
            if not isinstance(each, Reward) and not callable(each):
                raise ValueError(f"input should be callable, not {each!r}")
        titles = [reward.title for reward in _rewards(function)]
        if not titles:
            raise ValueError("there is no reward function")
        twice = next((title for title in titles if titles.count(title) > 1), None)
        if twice is not None:
            raise ValueError(
                f"two reward functions are called {twice!r}; give one a name: Reward(function=..., name='...')"
            )
        return function

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        return _rewards(self.function)

    @property
    def silence_s(self) -> float | None:
        """[s] Longest time without progress in a process that works."""
        return None if self.deadline_s is None else self.deadline_s + PART_S

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that the functions require."""
        return tuple(dict.fromkeys(name for reward in self.rewards for name in reward.needs))

    @property
    def may_read(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for reward in self.rewards for name in reward.may_read))

    @property
    def takes_text(self) -> bool:
        return any(reward.takes_text for reward in self.rewards)

    def columns(self, into: str) -> tuple[str, ...]:
        """Return the columns to write: the reward, each function's result, and results' parts."""
        named = [f"{into}/{reward.title}" for reward in self.rewards] if len(self.rewards) > 1 else []
        return (into, *named, *([f"{into}_parts"] if self.has_parts else []))

    @property
    def has_parts(self) -> bool:
        """Whether a function may return a dictionary, according to its library or annotation."""
        return any(reward.may_return_parts for reward in self.rewards)

    def verdict(self, into: str) -> str | None:
        """Return the column of the only grader that gives verdicts, right (1) or wrong (0); None if
        there is not exactly one."""
        if self._verdict_reward is None:
            return None
        return f"{into}/{self._verdict_reward.title}" if len(self.rewards) > 1 else into

    @property
    def _verdict_reward(self) -> Reward | None:
        verdicts = [r for r in self.rewards if getattr(r.function, "is_verdict", False)]
        return verdicts[0] if len(verdicts) == 1 else None

    @property
    def voting(self) -> FindsAnswers | None:
        """The only grader that gives verdicts, if it finds final answers, which can be counted as
        votes."""
        grader = None if self._verdict_reward is None else self._verdict_reward.function
        return grader if isinstance(grader, FindsAnswers) else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to log when a run starts: functions with another library's signature."""
        found = ((reward, reward.signature) for reward in self.rewards)
        return tuple(
            f"reward function {r.title} ({r.place}) has {signature}"
            for r, signature in found
            if signature
        )


def _rewards(function: Any) -> tuple[Reward, ...]:
    each = function if isinstance(function, tuple) else (function,)
    return tuple(
        f if isinstance(f, Reward) else f.reward if isinstance(f, Judge) else Reward(function=f)
        for f in each
    )


def _reads(config: RewardConfig) -> tuple[str, ...]:
    return (str(RESPONSE_IDS), *config.needs)


def _may_read(config: RewardConfig) -> tuple[str | Column, ...]:
    return (str(PROMPT), str(PROMPT_IDS), EPISODE_ROWS, *config.may_read)


def reward_processes(cpus: int) -> int:
    """Return the number of processes that score samples on a node with GPUs: a quarter of its CPUs, up
    to 8.

    >>> reward_processes(2), reward_processes(16), reward_processes(208)
    (1, 4, 8)
    """
    return max(1, min(8, cpus // 4))


class RewardWorker(Worker):
    """Scores samples with Python functions."""

    Config = RewardConfig
    replaceable = True

    @classmethod
    def default_ranks(cls, config: RewardConfig, cpus: int) -> int:
        # A rank makes asynchronous calls side by side, and their limits apply to each rank.
        return 1 if any(reward.is_async for reward in config.rewards) else reward_processes(cpus)

    @classmethod
    def check(cls, config: RewardConfig, nodes: Sequence[Node], source: Source) -> None:
        Tokenizer.load(config.tokenizer)
        for reward in config.rewards:
            if reward.lacks and not {*ANSWERS} & {*source.columns}:
                raise UserError(
                    f"reward function {reward.title} takes {reward.lacks[0]!r}, and "
                    f"{source.name!r} has no ground truth: no column "
                    f"{', '.join(sorted(ANSWERS))}; it has {', '.join(source.columns)}"
                )
            _check_answers(reward, source)
            if isinstance(reward.function, Judge):
                reward.function.check()
            if isinstance(reward.function, Instructions) and IFEVAL_IDS in source.columns:
                reward.function.check_ids(source.table[IFEVAL_IDS].to_pylist())

    def __init__(self, config: RewardConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        self._caller = Caller(config.rewards)
        if config.takes_text:
            _ = self._tokenizer
        for reward in config.rewards:
            if (prepare := getattr(reward.function, "prepare", None)) is not None:
                prepare()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.config.tokenizer)

    def close(self) -> None:
        self._caller.close()

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=_reads,
        may_read=_may_read,
        writes=lambda config, into: config.columns(into),
    )
    def score(self, samples: Batch, *, into: str = str(REWARD)) -> Iterator[tuple[Batch, Metrics]]:
        """Call the functions on each sample. Slow functions yield rewards in parts. A failed sample
        does not stop the others: its exception is raised after all rewards.

        Raises:
            ResultError: a function returned no number. No further sample is scored.
            SampleError: a function returned NaN or infinity, or no function applies to a sample.
            Exception: the first exception of a function. Like a `SampleError`, it has the
                attributes `sample_ids` (of all failed samples) and `sample` (prompt and response of
                the first failed sample, and the line that raised).
        """
        decode = self._tokenizer.decode if self.config.takes_text else lambda ids: [""] * len(ids)
        rows = RewardRows(samples, decode)
        scoring = Scoring(self._caller, rows, self.context, self.config.deadline_s)
        try:
            with _working_directory_kept():
                for done in scoring.run():
                    rows = samples if len(done) == len(samples) else samples.take([*done])
                    outcomes = [*done.values()]
                    metrics = self._metrics(
                        outcomes, row_weights(rows), scoring.take_metrics(len(done)), into
                    )
                    yield self._written(rows, outcomes, into), metrics
        except ResultError:
            raise self._blamed(samples, scoring.failed) from None
        if scoring.failed:
            raise self._blamed(samples, scoring.failed)

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=(RESPONSE_IDS,), writes=(FINAL_ANSWER,))
    def final_answers(self, samples: Batch) -> Batch:
        """Add the final answer of each response, found by the only grader that gives verdicts. Raises
        a UserError if it finds none."""
        grader = self.config.voting
        if grader is None:
            raise UserError(
                "final_answers needs one grader with verdicts that defines `final_answer`, such as Math()"
            )
        texts = self._tokenizer.decode(samples[RESPONSE_IDS].to_pylist())
        answers: list[str | None] = []
        for sample_id, text in zip(samples["sample_id"].to_pylist(), texts, strict=True):
            self.context.at(sample_id)
            try:
                answers.append(grader.final_answer(text))
            except Exception:  # a response without an answer does not vote
                answers.append(None)
            self.context.advance()
        self.context.at(None)
        return samples.with_columns(**{str(FINAL_ANSWER): pa.array(answers, pa.string())})

    def _written(self, rows: Batch, outcomes: Sequence[Outcome], into: str) -> Batch:
        rewards = self.config.rewards
        columns: dict[str, Any] = {into: [outcome.reward for outcome in outcomes]}
        if len(rewards) > 1:
            for f, reward in enumerate(rewards):
                values = [outcome.scores[f].value for outcome in outcomes]
                columns[f"{into}/{reward.title}"] = pa.array(values, pa.float32())
        if self.config.has_parts:
            parts = [json.dumps(outcome.parts(rewards)) for outcome in outcomes]
            columns[f"{into}_parts"] = pa.array(parts, pa.string())
        return rows.with_columns(**columns)

    def _metrics(
        self, outcomes: Sequence[Outcome], weights: list[float] | None, logged: Metrics, into: str
    ) -> Metrics:
        parts = merge(
            {name: Mean(weight * v, weight) for name, v in outcome.parts(self.config.rewards).items()}
            for outcome, weight in zip(outcomes, weights or [1.0] * len(outcomes), strict=True)
        )
        own = reward_metrics([outcome.reward for outcome in outcomes], weights)
        return of_column(into, {**logged, **parts, **own})

    def _blamed(self, samples: Batch, failed: Mapping[int, Exception]) -> Exception:
        """Return the first failure, with all failed samples' ids and the first one's texts."""
        first, error = next(iter(failed.items()))
        ids = samples["sample_id"].to_pylist()
        texts = {str(PROMPT): samples[PROMPT][first].as_py()} if PROMPT in samples else {}
        for text, tokens in ((PROMPT, PROMPT_IDS), (RESPONSE, RESPONSE_IDS)):
            if str(text) not in texts and tokens in samples:
                texts[str(text)] = self._tokenizer.decode([samples[tokens][first].as_py()])[0]
        said = [f"{name} {_short(text)}" for name, text in texts.items()]
        place = _raised_at(error) or next(
            (r.place for r in self.config.rewards if len(self.config.rewards) == 1), ""
        )
        error.sample_ids = tuple(ids[k] for k in failed)  # pyright: ignore[reportAttributeAccessIssue]
        error.sample = ", ".join([*said, f"at {place}"] if place else said)  # pyright: ignore[reportAttributeAccessIssue]
        return error


def _check_answers(reward: Reward, source: Source) -> None:
    """Reject rows without an answer if the function needs one."""
    for name in reward.answers:
        column = name if name in source.columns else str(ANSWER)
        if column not in source.columns:
            continue
        missing = np.flatnonzero(source.table.column(column).is_null().to_numpy())
        if len(missing):
            rows = len(source.table)
            raise UserError(
                f"reward function {reward.title} needs an answer for each row: {len(missing):,} of {rows:,} rows of {source.name!r} "
                f"have none in column {column!r}, the first is row {missing[0] + 1}; take these rows out or give them answers. "
                f"If the function accepts None, declare it: {name}: str | None"
            )


@contextlib.contextmanager
def _working_directory_kept() -> Iterator[None]:
    """Restore the working directory, which functions such as code sandboxes may change."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if here is not None:
                os.chdir(here)


def row_weights(samples: Batch) -> list[float] | None:
    """Return the weights with which metrics count an episode once, however many rows it has; None if
    rows have equal weights. Other calls may have further rows of the episode.

    >>> row_weights(Batch.of(episode_rows=[2, 1, 2]))
    [0.5, 1.0, 0.5]
    """
    return (1.0 / samples.numpy(EPISODE_ROWS)).tolist() if EPISODE_ROWS in samples else None


def reward_metrics(rewards: Sequence[float], weights: list[float] | None) -> dict[str, Metric]:
    """Return mean, standard deviation, number (`scored`) and, unless there are none, maximum."""
    mean, std = Mean.of(rewards, weights), Std.of(rewards, weights)
    metrics = {"mean": mean, "std": std, "scored": Sum(mean.weight)}
    return {**metrics, **({"max": Max(max(rewards))} if rewards else {})}


def of_column(column: str, metrics: Metrics) -> Metrics:
    """Prefix metrics with their column's name, unless it is the reward: a baseline's mean, for
    example, must not count as the reward's.

    >>> of_column("reward", {"mean": Mean(1.0)}), of_column("baseline_reward", {"mean": Mean(1.0)})
    ({'mean': Mean(total=1.0, weight=1.0)}, {'baseline_reward_mean': Mean(total=1.0, weight=1.0)})
    """
    if column == str(REWARD):
        return metrics
    return {f"{column}_{name}": metric for name, metric in metrics.items()}


def _raised_at(error: BaseException) -> str:
    """Return file and line of the innermost frame of user code in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if not f.filename.startswith((_LIBRARY, "<"))]
    installed = ("site-packages", f"{os.sep}lib{os.sep}python")
    own = [f for f in frames if not any(part in f.filename for part in installed)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _short(text: str) -> str:
    half = LONGEST_TEXT // 2
    return repr(text if len(text) <= LONGEST_TEXT else f"{text[:half]} ... {text[-half:]}")
