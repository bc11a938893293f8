"""RewardWorker: scores samples with a Python function that takes columns by name."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from ..dataflow.batch import Batch
from ..dataflow.column import RESPONSE, RESPONSE_IDS, REWARD
from ..dataflow.config import Config
from ..dataflow.errors import SampleError, nearest
from ..dataflow.metrics import Max, Mean, Metrics
from ..dataflow.tokenizer import Tokenizer
from .dispatch import Dispatch
from .remote import remote
from .worker import Context, Worker

if TYPE_CHECKING:
    from ..dataflow.graph import Node, Source


PART_S = 1.0
"""How long rewards are kept before they are given on."""


class RewardConfig(Config):
    function: Callable[..., float]
    """Called once per sample with the columns that its parameters name, e.g. `def score(response, answer) -> float`.
    `response` is the text of the response; every column of the data and of earlier nodes can be asked for."""
    tokenizer: str | Path
    """Model folder (or Hugging Face id) whose tokenizer turns response tokens into text."""

    deadline_s: float | None = pydantic.Field(default=None, gt=0)
    """Seconds that a sample may take. Under Ray, a process that takes longer is ended and replaced, and what it had not scored is
    asked again; the third time at the same sample ends the run. None: the driver's `call_timeout_s`."""

    @pydantic.field_validator("function")
    @classmethod
    def _takes_a_response(cls, function: Callable[..., float]) -> Callable[..., float]:
        takes = f"{_name(function)}{inspect.signature(function)}"
        parameters = inspect.signature(function).parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
            raise ValueError(f"reward function {takes} must name its parameters: each is a column")
        names = [p.name for p in parameters]
        if not {str(RESPONSE), str(RESPONSE_IDS)} & set(names):
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
    def arguments(self) -> tuple[str, ...]:
        """Names that the function is called with; parameters with a default are the function's own business."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the function wants beside the response's text."""
        return tuple(n for n in self.arguments if n != str(RESPONSE))


class RewardWorker(Worker):
    """Python functions of the columns of a sample."""

    Config = RewardConfig
    replaceable = True

    @classmethod
    def check(cls, config: RewardConfig, nodes: Sequence[Node], source: Source) -> None:
        Tokenizer.load(config.tokenizer)

    def __init__(self, config: RewardConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        if str(RESPONSE) in config.arguments:
            _ = self._tokenizer  # to load it is no part of scoring a sample

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.config.tokenizer)

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=(RESPONSE_IDS, "{config.reads}"), writes=("{into}",))
    def score(self, samples: Batch, *, into: str = str(REWARD)) -> Iterator[tuple[Batch, Metrics]]:
        """Call the function on each sample; of a slow one the rewards come in parts, so that nobody waits for all of them.

        Raises:
            SampleError: naming the sample, when the function returns no finite number.
        """
        values = {name: samples[name].to_pylist() for name in self.config.reads}
        if str(RESPONSE) in self.config.arguments:
            values[str(RESPONSE)] = self._tokenizer.decode(samples[RESPONSE_IDS].to_pylist())
        rewards: list[float] = []
        first, said = 0, time.monotonic()
        for k, sample_id in enumerate(samples["sample_id"].to_pylist()):
            if rewards and time.monotonic() - said > PART_S:
                yield self._part(samples.slice(first, k - first), rewards, into)
                first, rewards, said = k, [], time.monotonic()
            self.context.at(sample_id)
            try:
                reward = self.config.function(**{name: column[k] for name, column in values.items()})
            except Exception as error:
                error.sample_ids = (sample_id,)  # pyright: ignore[reportAttributeAccessIssue]
                raise
            finally:
                self.context.at(None)
            rewards.append(self._checked(reward, sample_id))
        yield self._part(samples.slice(first, len(samples) - first), rewards, into)

    def _part(self, samples: Batch, rewards: list[float], into: str) -> tuple[Batch, Metrics]:
        metrics = {"mean": Mean(sum(rewards), len(rewards))} | ({"max": Max(max(rewards))} if rewards else {})
        return samples.with_columns(**{into: rewards}), metrics

    def _checked(self, reward: object, sample_id: int) -> float:
        try:
            value = math.nan if isinstance(reward, str | bytes) else float(reward)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise SampleError(
                f"reward function {_name(self.config.function)} returned {reward!r}; a reward is a finite number",
                (sample_id,),
            )
        return value


def _name(function: Any) -> str:
    """What a person calls it: a function's name, that of a partial's function, else the class of the callable object."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", type(inner).__name__)
