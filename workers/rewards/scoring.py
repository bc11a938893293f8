"""Scoring: one call of a reward worker, from its samples to each function's score of each sample.

    sample:  open ──every function has answered──> done ──take──> taken
               └───────a function has failed─────> failed

- Asynchronous functions start first, then batch functions run, then functions of one sample.
- A batch that fails is retried sample by sample, so that only the failing samples are blamed.
"""

from __future__ import annotations

import time
from bdb import BdbQuit
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...dataflow.errors import ResultError, SampleError
from ...dataflow.metrics import Mean
from ..worker import Context
from .calls import Caller, deadline
from .function import LARGEST, Reward, SampleScore, as_failure, name_of, results, score
from .signature import RewardRows

PART_S = 1.0
"""[s] Longest time to hold back finished rewards in order to yield them together."""


@dataclass(frozen=True)
class Outcome:
    """The result of a sample that every function has scored."""

    reward: float
    scores: Sequence[SampleScore]
    """One score from each function, in the functions' order."""

    def parts(self, rewards: Sequence[Reward]) -> dict[str, float]:
        """Return all numbers that make up the reward, by name."""
        if len(rewards) == 1:
            return dict(self.scores[0].parts)
        each = list(zip(rewards, self.scores, strict=True))
        named = {r.title: s.value for r, s in each if s.value is not None}
        return named | {f"{r.title}/{name}": v for r, s in each for name, v in s.parts.items()}


class Scoring:
    """The samples of one call. Each function call takes at most `deadline_s`."""

    def __init__(
        self, caller: Caller, samples: RewardRows, context: Context, deadline_s: float | None
    ) -> None:
        self.failed: dict[int, Exception] = {}
        """Exception of the first function that failed, by sample."""
        self.logged: dict[str, Mean] = {}
        """Metrics that the functions logged themselves."""
        self._rewards = caller.rewards
        self._samples = samples
        self._context = context
        self._caller = caller
        self._deadline_s = deadline_s
        self._scores: list[dict[int, SampleScore]] = [{} for _ in range(len(samples))]
        self._ids: list[int] = samples.rows["sample_id"].to_pylist()
        self._given: set[int] = set()
        self._gave_s = time.monotonic()

    def run(self) -> Iterator[dict[int, Outcome]]:
        """Call all functions on all samples. Yields the samples that finished since the last item,
        by index; the last item has all the rest."""
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
                    self._put(f, k, score(reward, result))
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
                self._put(f, k, score(reward, results(reward, result, 1)[0]))
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
        """Start calls, and yield each with its function and sample (None for all samples)."""
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
                # With a deadline every call ends, so a responsive loop counts as progress.
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
                self._put(f, k, score(reward, _result(future)))
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
        """Record an exception as the failure of sample `k`, unless it ends the run."""
        try:
            yield
        except BdbQuit:  # the user left the debugger
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
            each = results(reward, result, len(self._samples))
        except ResultError as error:
            self.failed = dict.fromkeys(range(len(self._samples)), error)
            raise
        for k, said in enumerate(each):
            with self._blaming(k):
                self._put(f, k, score(reward, said))

    def _put(self, f: int, k: int, said: SampleScore) -> None:
        scores = self._scores[k]
        scores[f] = said
        if len(scores) < len(self._rewards):
            return
        if all(s.value is None for s in scores.values()):
            who = f"each of the reward functions {', '.join(reward.title for reward in self._rewards)}"
            if len(self._rewards) == 1:
                who = f"reward function {name_of(self._rewards[0].function)}"
            self._fail(k, SampleError(f"{who} returned None; each sample needs a finite number"))
        elif abs(total := self._total(scores)) > LARGEST:
            why = f"the weighted sum of the rewards is {total}, which float32 cannot hold"
            self._fail(k, SampleError(why))

    def _total(self, scores: Mapping[int, SampleScore]) -> float:
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

    def _log(self, name: str, value: float) -> None:
        self.logged[name] = self.logged.get(name, Mean(0.0, 0.0)) + Mean(float(value))


def _result(future: Future[Any]) -> Any:
    """Return the result of an asynchronous call. A `GeneratorExit` fails only its sample."""
    try:
        return future.result()
    except GeneratorExit as error:
        raise as_failure(error) from error
