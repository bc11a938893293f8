"""The graph, schedules and workers of `schedules.py`.

The workers are Weft's, each pinned to its core. The length of a response depends only on its prompt
and its index in the group, so that every schedule generates and trains on the same lengths.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from work import APART, SCHEDULES, Work
from workloads import reward as score

import weft
from weft.algorithms.grpo import grpo
from weft.algorithms.sampling import Sampling
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.dispatch import Dispatch
from weft.workers.generation.engine import GenerationRequest, Response
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.worker import Context, remote


class LongTailedConfig(RolloutConfig):
    cores: tuple[int, ...]
    """Cores of the ranks, reused cyclically if there are more ranks."""
    median: float
    sigma: float
    """Sigma of the log-normal lengths."""


class PinnedConfig(ActorConfig):
    cores: tuple[int, ...]


class LongTailedEngine(VllmEngine):
    """Draws the length of each response from the request's seed."""

    def __init__(self, config: LongTailedConfig, **settings: Any) -> None:
        super().__init__(str(config.model), config, **settings)
        self._lengths = config.median, config.sigma
        self.steps_s: dict[int, list[float]] = {}
        """Maps responses in the batch to the seconds of each step of that size."""
        self.between_s: list[float] = []
        """[s] Time from one step to the next, for the worker's handling of answers and weights."""
        self._ended: float | None = None
        self._room = config.max_num_seqs

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        assert request.seed is not None
        length = response_length(request.seed, *self._lengths, sampling.max_tokens)
        return super().submit(request, sampling.model_copy(update={"max_tokens": length}))

    def step(self) -> list[Response]:
        number, started = min(self.num_unfinished, self._room), time.perf_counter()
        if self._ended is not None:
            self.between_s.append(started - self._ended)
        found = super().step()
        ended = time.perf_counter()
        self.steps_s.setdefault(number, []).append(ended - started)
        self._ended = ended if self.num_unfinished else None
        return found


def response_length(seed: int, median: float, sigma: float, longest: int) -> int:
    length = median * np.exp(sigma * np.random.default_rng(seed).standard_normal())
    return int(np.clip(round(length), 1, longest))


def response_seed(prompt_ids: np.ndarray, index: int) -> int:
    digest = hashlib.blake2b(prompt_ids.astype("<i8").tobytes() + bytes([index]), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def lengths_of(work: Work, folder: Path) -> list[list[int]]:
    """Return the length of each response to each prompt of the run, in order."""
    prompts = weft.Prompts.read(folder / "prompts.jsonl", str(folder / "model"))
    return [
        [
            response_length(response_seed(np.array(ids), index), work.median, work.sigma, work.longest)
            for index in range(work.samples)
        ]
        for ids in prompts.table["prompt_ids"].to_pylist()
    ]


class LongTailedRollout(RolloutWorker):
    Config = LongTailedConfig

    def __init__(self, config: LongTailedConfig, context: Context = Context()) -> None:
        pin(config.cores, context)
        super().__init__(config, context)

    def new_engine(self, **settings: Any) -> LongTailedEngine:
        assert isinstance(self.config, LongTailedConfig)
        return LongTailedEngine(self.config, **settings)

    def _seed(self, group_id: int, draw: Sequence[int], content: bytes, index: int) -> int | None:
        # Seed by prompt: a group's number depends on the schedule.
        return response_seed(np.frombuffer(content, np.int32), index)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def steps_s(self) -> dict[int, float]:
        """Return a mapping from responses in the batch to this rank's mean seconds between
        steps."""
        assert isinstance(self.engine, LongTailedEngine)
        between = float(np.median(self.engine.between_s or [0.0]))
        return {
            number: float(np.mean(seconds)) + between
            for number, seconds in sorted(self.engine.steps_s.items())
        }


class PinnedActor(ActorWorker):
    Config = PinnedConfig

    def __init__(self, config: PinnedConfig, context: Context = Context()) -> None:
        pin(config.cores, context)
        super().__init__(config, context)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()


def pin(cores: Sequence[int], context: Context) -> None:
    """Pin this thread, and all that it starts, to the core of its rank."""
    os.sched_setaffinity(0, {cores[context.rank % len(cores)]})


def groups(work: Work, name: str, folder: Path) -> tuple[Any, Any, Any]:
    """Return handles of rollout, actor and reward for a schedule; rollout follows actor."""
    first, second, *_ = [*sorted(os.sched_getaffinity(0)), *sorted(os.sched_getaffinity(0))]
    apart = SCHEDULES[name].apart
    cores = {"rollout": (first,), "actor": (second,)} if apart else dict.fromkeys(APART, (first, second))
    model = str(folder / "model")
    actor = weft.group(PinnedActor, name="actor", model=model, learning_rate=1e-8, cores=cores["actor"])
    rollout = weft.group(
        LongTailedRollout,
        name="rollout",
        model=model,
        max_context=work.context,
        max_num_seqs=work.slots,
        cores=cores["rollout"],
        median=work.median,
        sigma=work.sigma,
    )
    rollout.follows(actor)
    return rollout, actor, weft.group(weft.RewardWorker, name="reward", function=score, tokenizer=model)


def graph_of(work: Work, folder: Path, *, rollout: Any, actor: Any, reward: Any) -> Any:
    return grpo(
        weft.Prompts.read(folder / "prompts.jsonl", str(folder / "model")),
        rollout=rollout,
        reward=reward,
        actor=actor,
        n=work.samples,
        sampling=Sampling(max_tokens=work.longest, stop=None),
    )


def schedule_of(work: Work, name: str) -> Any:
    setting = SCHEDULES[name]
    steps: dict[str, Any] = {"steps": work.steps, "prompts_per_step": work.groups, "shuffle": False}
    if setting.kind == "synchronous":
        return weft.Synchronous(**steps)
    if setting.kind == "pipelined":
        return weft.Pipelined(**steps, groups_per_part=work.groups_per_part)
    return weft.Asynchronous(
        **steps, max_staleness=setting.max_staleness, groups_per_part=work.groups_per_part
    )
