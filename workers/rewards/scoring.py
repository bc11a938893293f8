"""Scoring: one call of a reward worker, from samples to each function's scores.

    sample:  open ──every function has answered──> done ──take──> taken
               └───────a function has failed─────> failed

- Asynchronous functions start first. Then batch functions run, then the others.
- If a batch fails, Weft retries its samples one by one, to find those that fail.
"""

from __future__ import annotations

import math
import time
from bdb import BdbQuit
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...dataflow.column import LARGEST_REWARD
from ...dataflow.errors import ResultError, SampleError
from ...dataflow.metrics import Mean
from ...dataflow.untrusted_text import beginning
from ..worker import Context
from .calls import Caller, deadline
from .function import Reward, as_failure, name_of
from .signature import RewardRows

_TOTALS = ("reward", "score", "rewards")
"""Keys of the reward in a dictionary, in order of preference."""
PART_S = 1.0
"""[s] Maximum wait of finished rewards for others, to yield them together."""


@dataclass(frozen=True)
class _SampleScore:
    """One function's score of a sample."""

    value: float | None
    """None if the function does not apply to the sample."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Outcome:
    """The result of a sample that all functions have scored."""

    reward: float
    scores: Sequence[_SampleScore]
    """One score per function, in order."""

    def parts(self, rewards: Sequence[Reward]) -> dict[str, float]:
        """Map names to all numbers that make up the reward."""
        if len(rewards) == 1:
            return dict(self.scores[0].parts)
        each = list(zip(rewards, self.scores, strict=True))
        named = {r.title: s.value for r, s in each if s.value is not None}
        return named | {f"{r.title}/{name}": v for r, s in each for name, v in s.parts.items()}


class Scoring:
    """The samples of one call. A function call may take `deadline_s`."""

    def __init__(
        self, caller: Caller, samples: RewardRows, context: Context, deadline_s: float | None
    ) -> None:
        self.failed: dict[int, Exception] = {}
        """Maps each failed sample to the exception of the first function that failed."""
        self._logged: dict[str, Mean] = {}
        self._counted = 0
        """Number of failed samples that `take_metrics` has counted."""
        self._rewards = caller.rewards
        self._samples = samples
        self._context = context
        self._caller = caller
        self._deadline_s = deadline_s
        self._scores: list[dict[int, _SampleScore]] = [{} for _ in range(len(samples))]
        self._ids: list[int] = samples.rows["sample_id"].to_pylist()
        self._given: set[int] = set()
        self._gave_s = time.monotonic()

    def run(self) -> Iterator[dict[int, Outcome]]:
        """Call all functions on all samples. Yields mappings from index to outcome for newly
        finished samples; the last one has all that remain."""
        if len(self._samples):
            kinds = list(enumerate(self._rewards))
            pending = [call for f, r in kinds if r.is_async for call in self._started(f, r)]
            for f, reward in kinds:
                if reward.is_batch and not reward.is_async:
                    self._call_batch(f, reward)
            yield from self._one_by_one([(f, r) for f, r in kinds if not r.is_batch and not r.is_async])
            yield from self._awaited(pending)
        yield self._take()

    # Plain functions

    def _one_by_one(self, functions: Sequence[tuple[int, Reward]]) -> Iterator[dict[int, Outcome]]:
        arguments = [(f, reward, reward.arguments(self._samples)) for f, reward in functions]
        for k, sample_id in enumerate(self._ids if functions else []):
            if self._is_due and (done := self._take()):
                yield done
            self._context.at(sample_id)
            for f, reward, columns in arguments:
                with self._blaming(k):
                    result = self._called(f, {name: v[k] for name, v in columns.items()})
                    self._put(f, k, _score(reward, result))
            self._context.at(None)
            self._context.advance()

    def _call_batch(self, f: int, reward: Reward) -> None:
        try:
            result = self._called(f, reward.arguments(self._samples))
        except BdbQuit:
            raise
        except Exception as error:
            self._call_parts(f, reward, error)
        else:
            self._put_all(f, reward, result)
        self._context.advance()

    def _call_parts(self, f: int, reward: Reward, error: Exception) -> None:
        if len(self._samples) == 1:
            self._fail(0, error)
            return
        for k, sample_id in enumerate(self._ids):
            self._context.at(sample_id)
            with self._blaming(k):
                result = self._called(f, reward.arguments(self._samples.one(k)))
                self._put(f, k, _score(reward, _results(reward, result, 1)[0]))
            self._context.at(None)
            self._context.advance()

    def _called(self, f: int, arguments: Mapping[str, Any]) -> Any:
        # The driver replaces a watched process that exceeds the deadline.
        limit = None if self._context.watched else self._deadline_s
        with deadline(limit, f"reward function {self._rewards[f].title}"):
            result, logged = self._caller.call_reward(f, arguments)
        for name, value in logged:
            self._log(name, value)
        return result

    # Asynchronous functions

    def _started(self, f: int, reward: Reward) -> Iterator[tuple[Future[Any], int, int | None]]:
        """Start calls, and yield (call, function, sample); the sample is None for all samples."""
        arguments = reward.arguments(self._samples)
        if reward.is_batch:
            yield self._in_flight(reward, arguments), f, None
            return
        for k in range(len(self._samples)):
            yield self._in_flight(reward, {name: values[k] for name, values in arguments.items()}), f, k

    def _in_flight(self, reward: Reward, arguments: Mapping[str, Any]) -> Future[Any]:
        log = {"log_extra": lambda name, values: None, "log_metric": self._log}
        return self._caller.calls.start(
            reward, lambda: reward.call_function(arguments, log), self._deadline_s
        )

    def _awaited(
        self, calls: Sequence[tuple[Future[Any], int, int | None]]
    ) -> Iterator[dict[int, Outcome]]:
        pending = {future: (f, k) for future, f, k in calls}
        try:
            while pending:
                finished, _ = wait(pending, timeout=PART_S, return_when=FIRST_COMPLETED)
                # With a deadline, every call ends, so a responsive loop counts as progress.
                if finished or (self._deadline_s is not None and self._caller.calls.is_alive()):
                    self._context.advance()
                for future in finished:
                    f, k = pending.pop(future)
                    self._receive(f, k, future)
                if self._is_due and (done := self._take()):
                    yield done
        finally:
            for future in pending:
                future.cancel()

    def _receive(self, f: int, k: int | None, future: Future[Any]) -> None:
        reward = self._rewards[f]
        if k is not None:
            with self._blaming(k):
                self._put(f, k, _score(reward, _result(future)))
            return
        try:
            result = _result(future)
        except Exception as error:
            for sample in range(len(self._samples)):
                self._fail(sample, error)
        else:
            self._put_all(f, reward, result)

    # Results

    @contextmanager
    def _blaming(self, k: int) -> Iterator[None]:
        """Record an exception as the failure of sample `k`, unless it must end the run."""
        try:
            yield
        except BdbQuit:  # the user has left the debugger
            raise
        except ResultError as error:  # every other sample would fail in the same way
            self.failed = {k: error}
            raise
        except Exception as error:
            self._fail(k, error)

    def _fail(self, k: int, error: Exception) -> None:
        self.failed.setdefault(k, error)

    def _put_all(self, f: int, reward: Reward, result: Any) -> None:
        try:
            each = _results(reward, result, len(self._samples))
        except ResultError as error:
            self.failed = dict.fromkeys(range(len(self._samples)), error)
            raise
        for k, said in enumerate(each):
            with self._blaming(k):
                self._put(f, k, _score(reward, said))

    def _put(self, f: int, k: int, said: _SampleScore) -> None:
        scores = self._scores[k]
        scores[f] = said
        if len(scores) < len(self._rewards):
            return
        if all(s.value is None for s in scores.values()):
            who = f"each of the reward functions {', '.join(reward.title for reward in self._rewards)}"
            if len(self._rewards) == 1:
                who = f"reward function {name_of(self._rewards[0].function)}"
            self._fail(k, SampleError(f"{who} returned None; each sample needs a finite number"))
        elif abs(total := self._total(scores)) > LARGEST_REWARD:
            why = f"the weighted sum of the rewards is {total}, which float32 cannot hold"
            self._fail(k, SampleError(why))

    def _total(self, scores: Mapping[int, _SampleScore]) -> float:
        return sum(
            reward.weight * s.value
            for f, reward in enumerate(self._rewards)
            if (s := scores[f]).value is not None
        )

    @property
    def _is_due(self) -> bool:
        return time.monotonic() - self._gave_s > PART_S

    def _take(self) -> dict[int, Outcome]:
        """Return the finished samples that were not returned before."""
        done: dict[int, Outcome] = {}
        for k, found in enumerate(self._scores):
            if k not in self._given and k not in self.failed and len(found) == len(self._rewards):
                each = [found[f] for f in range(len(self._rewards))]
                done[k] = Outcome(self._total(found), each)
        if done:
            self._gave_s = time.monotonic()
        self._given |= done.keys()
        return done

    def take_metrics(self, finished: int) -> dict[str, Mean]:
        """Return the metrics since the last call: values that functions logged and, if a function is
        asynchronous, the share of attempts that failed.

        Args:
            finished: number of samples that have finished since the last call.
        """
        metrics, self._logged = self._logged, {}
        failed, self._counted = len(self.failed) - self._counted, len(self.failed)
        if failed + finished and any(reward.is_async for reward in self._rewards):
            metrics.setdefault("failure_rate", Mean(float(failed), float(failed + finished)))
        return metrics

    def _log(self, name: str, value: float) -> None:
        self._logged[name] = self._logged.get(name, Mean(0.0, 0.0)) + Mean(float(value))


def _result(future: Future[Any]) -> Any:
    """Return the result of an asynchronous call. A `GeneratorExit` fails only its own sample."""
    try:
        return future.result()
    except GeneratorExit as error:
        raise as_failure(error) from error


# Results of functions


def _results(reward: Reward, result: Any, number: int) -> list[Any]:
    """Split the result of a batch call by sample. Raises a ResultError unless it is a list with one
    entry per sample or a dictionary of such lists."""
    if isinstance(result, Mapping):  # as in OpenRLHF
        return _of_lists(reward, result, number)
    listed = _listed(result)
    if listed is None or len(listed) != number:
        raise ResultError(
            f"reward function {name_of(reward.function)} returned {_shown(result)} for {number} samples; "
            "it must return a list with a reward for each"
        )
    return listed


def _of_lists(reward: Reward, result: Mapping[Any, Any], number: int) -> list[Any]:
    """Split a dictionary of lists by sample. A single number applies to all samples."""
    extra = result.get("extra_logs")
    entries = {**result, **(extra if isinstance(extra, Mapping) else {})}
    lists = {name: listed for name, values in entries.items() if (listed := _listed(values)) is not None}
    total = reward.part or next((name for name in _TOTALS if name in entries), "")
    wrong = next((name for name, listed in lists.items() if len(listed) != number), None)
    if wrong is None and total and total not in lists:
        wrong = total
    if wrong is None and not total:  # the sum is the reward, so each entry is a part of it
        wrong = next(
            (name for name in entries if name not in lists and entries[name] is not extra), None
        )
    if wrong is not None or not lists:
        which = f"; its {wrong!r} is not a list with a value for each" if wrong is not None else ""
        raise ResultError(
            f"reward function {name_of(reward.function)} returned {_shown(result)} for {number} samples; "
            f"it must return a list with a reward for each{which}"
        )
    single = {name: value for name, value in entries.items() if name not in lists}
    whole = {name: value for name, value in single.items() if _as_number(value) is not None}
    return [{**whole, **{name: values[k] for name, values in lists.items()}} for k in range(number)]


def _score(reward: Reward, result: Any) -> _SampleScore:
    """Return the score in the result for one sample.

    Raises:
        ResultError: the result is not a number, None, or a dictionary of numbers.
        SampleError: the result or one of its parts is not finite.
    """
    if result is None:
        return _SampleScore(None)
    if not isinstance(result, Mapping):
        number = _as_number(result)
        if number is None or not _is_finite(number):
            refused = ResultError if number is None else SampleError
            raise refused(
                f"reward function {name_of(reward.function)} returned {_shown(result)}; "
                "a reward must be a finite number that float32 can hold"
            )
        return _SampleScore(number)
    who = f"reward function {name_of(reward.function)} returned {_shown(result)}"
    each = {str(name): _as_number(value) for name, value in result.items()}
    numbers = {name: number for name, number in each.items() if number is not None}
    odd = next((name for name, number in numbers.items() if not _is_finite(number)), None)
    if odd is not None:
        raise SampleError(f"{who}; its {odd!r} is not a finite number")
    total = reward.part or next((name for name in _TOTALS if name in result), "")
    if total and total in result and result[total] is None:
        return _SampleScore(None, numbers)
    if total and total not in numbers:
        raise ResultError(f"{who}; its {total!r} is not a finite number")
    if total:
        return _SampleScore(numbers.pop(total), numbers)
    other = [
        str(name) for name, value in result.items() if value is not None and each[str(name)] is None
    ]
    if other:
        raise ResultError(
            f"{who}; its {other[0]!r} is not a number, so the parts have no sum: name the "
            "part with the reward 'reward', or choose it with Reward(part=...)"
        )
    if not numbers:
        raise ResultError(f"{who}; it has no finite number")
    if not _is_finite(total := sum(numbers.values())):
        raise SampleError(f"{who}; the sum of its parts is not a finite number that float32 can hold")
    return _SampleScore(total, numbers)


def _as_number(value: object) -> float | None:
    """Return a number, possibly infinite or NaN; None if the value is not a number."""
    # `float` accepts text such as "1".
    if isinstance(value, str | bytes | complex):
        return None
    try:
        return float(value)  # pyright: ignore[reportArgumentType]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_finite(number: float) -> bool:
    return abs(number) <= LARGEST_REWARD


def _listed(values: Any) -> list[Any] | None:
    """Return a list, tuple, array, series or tensor as a list; None for other values."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return list(values) if isinstance(values, list | tuple) else None


def _shown(value: object) -> str:
    return beginning(repr(value), 200)
