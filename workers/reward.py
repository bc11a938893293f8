"""RewardWorker: scores samples with a Python function that takes columns by name."""

from __future__ import annotations

import functools
import inspect
import math
import time
from bdb import BdbQuit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from ..dataflow.batch import Batch
from ..dataflow.column import IDENTITY, PROMPT, PROMPT_IDS, RESPONSE, RESPONSE_IDS, REWARD
from ..dataflow.config import Config
from ..dataflow.errors import Ended, SampleError, nearest
from ..dataflow.metrics import Max, Mean, Metrics
from ..dataflow.operation import ALL_COLUMNS
from ..dataflow.prompts.tokenizer import Tokenizer
from .deadline import deadline
from .dispatch import Dispatch
from .remote import remote
from .worker import MAX_FAILED, Context, Worker

if TYPE_CHECKING:
    from ..dataflow.node import Node
    from ..dataflow.source import Source


PART_S = 1.0
"""How long rewards are kept before they are given on."""
LONGEST_TEXT = 400
"""Characters of a prompt or response that a message shows."""


class RewardConfig(Config):
    function: Callable[..., float]
    """Called once per sample with the columns that its parameters name, e.g. `def score(response, answer) -> float`.
    `response` is the text of the response; every column of the data and of earlier nodes can be asked for. A parameter with a default
    gets the column of its name where there is one, and `**columns` gets all that are left. What `functools.partial` has set stays."""
    tokenizer: str | Path
    """Model folder (or Hugging Face id) whose tokenizer turns response tokens into text."""

    deadline_s: float | None = pydantic.Field(default=None, gt=0)
    """Seconds that a sample may take; then what was not scored is requeued, and a sample that takes longer for the third time is
    dropped. Under Ray the process is ended and replaced; under `Local` the function is interrupted, where it runs Python and no debugger.
    None: the driver's `call_timeout_s`."""
    max_failed: float = pydantic.Field(default=MAX_FAILED, ge=0, le=1)
    """Share of the samples that may fail three times each, and are dropped and counted (`failed_rows`); more of them end the run. It is of
    100 samples at least; 0: the first ends the run."""

    @pydantic.field_validator("function")
    @classmethod
    def _takes_a_response(cls, function: Callable[..., float]) -> Callable[..., float]:
        takes = f"{_name(function)}{inspect.signature(function)}"
        parameters = inspect.signature(function).parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
            raise ValueError(f"reward function {takes} must name its parameters: each is a column")
        names = [p.name for p in parameters]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not takes_all and not {str(RESPONSE), str(RESPONSE_IDS)} & set(names):
            hint = next(
                (f"; did you mean 'response' for {n!r}?" for n in names if nearest(n, ["response", "responses"])), ""
            )
            raise ValueError(f"reward function {takes} takes neither 'response' nor 'response_ids'{hint}")
        return function

    @property
    def silence_s(self) -> float | None:
        """How long a process that works may say nothing."""
        return None if self.deadline_s is None else self.deadline_s + PART_S

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the function cannot do without."""
        return tuple(p.name for p in self._parameters if p.default is p.empty and p.name != str(RESPONSE))

    @property
    def may_read(self) -> tuple[str, ...]:
        """Columns that it gets where there are any."""
        if self.takes_all:
            return (ALL_COLUMNS,)
        return tuple(p.name for p in self._parameters if p.default is not p.empty and p.name != str(RESPONSE))

    @property
    def takes_all(self) -> bool:
        """Whether it has `**columns`."""
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.function).parameters.values())

    @property
    def takes_text(self) -> bool:
        return self.takes_all or any(p.name == str(RESPONSE) for p in self._parameters)

    def columns(self, there: Iterable[str]) -> tuple[str, ...]:
        """Those of the columns of some rows that the function is called with."""
        named = {p.name for p in self._parameters}
        rest = set(self._set) | {str(RESPONSE), *map(str, IDENTITY)}
        return tuple(c for c in there if c != str(RESPONSE) and (c in named or (self.takes_all and c not in rest)))

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        """Those that are left to be given."""
        parameters = inspect.signature(self.function).parameters.values()
        return [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in self._set]

    @property
    def _set(self) -> Mapping[str, object]:
        """Keywords that `functools.partial` gives."""
        return self.function.keywords if isinstance(self.function, functools.partial) else {}


def _reads(config: RewardConfig) -> tuple[str, ...]:
    return (str(RESPONSE_IDS), *config.reads)


def _may_read(config: RewardConfig) -> tuple[str, ...]:
    return (str(PROMPT), str(PROMPT_IDS), *config.may_read)


class RewardWorker(Worker):
    """Python functions of the columns of a sample."""

    Config = RewardConfig
    replaceable = True

    @classmethod
    def check(cls, config: RewardConfig, nodes: Sequence[Node], source: Source) -> None:
        Tokenizer.load(config.tokenizer)

    def __init__(self, config: RewardConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        if config.takes_text:
            _ = self._tokenizer  # to load it is no part of scoring a sample

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.config.tokenizer)

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=_reads,
        may_read=_may_read,
        writes=lambda into: (into,),
    )
    def score(self, samples: Batch, *, into: str = str(REWARD)) -> Iterator[tuple[Batch, Metrics]]:
        """Call the function on each sample; of a slow one the rewards come in parts, so that nobody waits for all of them. A sample
        at which it fails holds back no other: what it raised comes after all rewards.

        Raises:
            SampleError: when the function returns no finite number.
            Exception: the first that the function raised. Like a `SampleError` it has `sample_ids`, of all samples that failed,
                and `sample`, the prompt and response of the first.
        """
        values = {name: samples[name].to_pylist() for name in self.config.columns(samples.columns)}
        if self.config.takes_text:
            values[str(RESPONSE)] = self._tokenizer.decode(samples[RESPONSE_IDS].to_pylist())
        limit = None if self.context.watched else self.config.deadline_s
        rewards: dict[int, float] = {}
        failed: dict[int, Exception | SystemExit] = {}
        said = time.monotonic()
        for k, sample_id in enumerate(samples["sample_id"].to_pylist()):
            if rewards and time.monotonic() - said > PART_S:
                yield self._part(samples.take([*rewards]), [*rewards.values()], into)
                rewards, said = {}, time.monotonic()
            self.context.at(sample_id)
            try:
                with deadline(limit, f"reward function {_name(self.config.function)}"):
                    reward = self.config.function(**{name: column[k] for name, column in values.items()})
                rewards[k] = self._checked(reward)
            except (BdbQuit, Ended):  # somebody has left the debugger, or ended the run
                raise
            except (Exception, SystemExit) as error:
                failed[k] = error
            finally:
                self.context.at(None)
                self.context.advance()
        yield self._part(
            samples.take([*rewards]) if failed or len(rewards) < len(samples) else samples, [*rewards.values()], into
        )
        if failed:
            raise self._blamed(samples, failed)

    def _blamed(self, samples: Batch, failed: Mapping[int, Exception | SystemExit]) -> Exception | SystemExit:
        """The first failure, with all samples that failed, and the texts of its own."""
        first, error = next(iter(failed.items()))
        ids = samples["sample_id"].to_pylist()
        texts = {str(PROMPT): samples[PROMPT][first].as_py()} if PROMPT in samples else {}
        for text, tokens in ((PROMPT, PROMPT_IDS), (RESPONSE, RESPONSE_IDS)):
            if str(text) not in texts and tokens in samples:
                texts[str(text)] = self._tokenizer.decode([samples[tokens][first].as_py()])[0]
        error.sample_ids = tuple(ids[k] for k in failed)  # pyright: ignore[reportAttributeAccessIssue]
        error.sample = ", ".join(f"{name} {_short(text)}" for name, text in texts.items())  # pyright: ignore[reportAttributeAccessIssue]
        return error

    def _part(self, samples: Batch, rewards: list[float], into: str) -> tuple[Batch, Metrics]:
        metrics = {"mean": Mean(sum(rewards), len(rewards))} | ({"max": Max(max(rewards))} if rewards else {})
        return samples.with_columns(**{into: rewards}), of_column(into, metrics)

    def _checked(self, reward: object) -> float:
        try:
            value = math.nan if isinstance(reward, str | bytes) else float(reward)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise SampleError(
                f"reward function {_name(self.config.function)} returned {reward!r}; a reward is a finite number"
            )
        return value


def of_column(column: str, metrics: Metrics) -> Metrics:
    """Metrics of rewards under their column's name, unless that is the reward itself: the mean of a baseline is not the reward's.

    >>> of_column("reward", {"mean": Mean(1.0)}), of_column("baseline_reward", {"mean": Mean(1.0)})
    ({'mean': Mean(total=1.0, weight=1.0)}, {'baseline_reward_mean': Mean(total=1.0, weight=1.0)})
    """
    return metrics if column == str(REWARD) else {f"{column}_{name}": metric for name, metric in metrics.items()}


def _short(text: str) -> str:
    """A text as a message shows it: how it begins and how it ends."""
    return repr(text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT // 2]} ... {text[-LONGEST_TEXT // 2 :]}")


def _name(function: Any) -> str:
    """What a person calls it: a function's name, that of a partial's function, else the class of the callable object."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", type(inner).__name__)
