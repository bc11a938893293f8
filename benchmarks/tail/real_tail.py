"""Generation of synchronous steps with two vLLM replicas, a core each.

The engine draws the length of each response: log-normal with a median of 24 tokens, sigma 1 and at
most 512 tokens. The prompt explains `PROMPT_SHARE` of the variance of the logarithm. Runs in order
and runs with forecasts and rounds take turns. The first epoch does not count.
"""

from __future__ import annotations

import math
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from long_tailed import (  # pyright: ignore[reportMissingImports] (of `../schedules`)
    LongTailedConfig,
    LongTailedRollout,
    PinnedActor,
)
from simulated_tail import PROMPT_SHARE, InOrder
from work import Work  # pyright: ignore[reportMissingImports]
from workloads import prepare
from workloads import reward as score

import weft
from weft.algorithms.grpo import grpo
from weft.workers.dispatch import Dispatch
from weft.workers.generation.engine import GenerationRequest, Response
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.rollout import RolloutWorker
from weft.workers.worker import remote

WORK = Work(groups=32, samples=8, median=24.0, sigma=1.0, longest=512, slots=64)
EPOCH_STEPS, EPOCHS, TURNS = 4, 3, 1
Calls = list[list[list[tuple[int, float]]]]
"""Steps of each call on each rank: responses in the batch, and seconds."""


class TailEngine(VllmEngine):
    """Ends each response at a length that depends on its prompt and its seed."""

    def __init__(self, config: LongTailedConfig, **settings: Any) -> None:
        super().__init__(str(config.model), config, **settings)
        self._median, self._sigma = config.median, config.sigma
        self.calls: list[list[tuple[int, float]]] = [[]]
        """[calls] (responses in the batch, seconds) of each step."""

    def submit(self, request: GenerationRequest, sampling: weft.Sampling) -> int:
        assert request.seed is not None
        of_prompt = np.random.default_rng(zlib.crc32(request.prompt_ids.tobytes())).standard_normal()
        own = np.random.default_rng(request.seed).standard_normal()
        drawn = math.sqrt(PROMPT_SHARE) * of_prompt + math.sqrt(1 - PROMPT_SHARE) * own
        length = int(np.clip(round(self._median * math.exp(self._sigma * drawn)), 1, WORK.longest))
        return super().submit(request, sampling.model_copy(update={"max_tokens": length}))

    def step(self) -> list[Response]:
        number, started = self.num_unfinished, time.perf_counter()
        found = super().step()
        self.calls[-1].append((number, time.perf_counter() - started))
        if not self.num_unfinished:
            self.calls.append([])
        return found


class TailRollout(LongTailedRollout):
    _seed = RolloutWorker._seed

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def engine_calls(self) -> list[list[tuple[int, float]]]:
        """Return the steps of each call so far."""
        assert isinstance(self.engine, TailEngine)
        return self.engine.calls[:-1]

    def new_engine(self, **settings: Any) -> TailEngine:
        assert isinstance(self.config, LongTailedConfig)
        return TailEngine(self.config, **settings)


def measure() -> Mapping[str, Any]:
    steps: dict[str, Any] = {"steps": EPOCHS * EPOCH_STEPS, "prompts_per_step": WORK.groups}
    schedules = (InOrder(**steps), weft.Synchronous(**steps, rounds=EPOCH_STEPS))
    seconds: tuple[list[float], ...] = ([], [])
    calls: tuple[list[Calls], ...] = ([], [])
    with tempfile.TemporaryDirectory(prefix="weft-tail-") as root:
        sizes = replace(WORK, warm_up=0, counted=EPOCH_STEPS, tail=0)
        folder = prepare(sizes.workload(), Path(root) / "work")
        for turn in range(TURNS):
            for k in (0, 1) if turn % 2 == 0 else (1, 0):
                found, steps_of_ranks = run(schedules[k], folder)
                seconds[k].extend(found[EPOCH_STEPS:])
                calls[k].append(steps_of_ranks)
                name = type(schedules[k]).__name__
                print(f"  {name}: {', '.join(f'{s:.2f}' for s in found)} s", flush=True)
    before, after = (float(np.mean(each)) for each in seconds)
    step_s = line(
        [step for own in calls for ranks in own for rank in ranks for call in rank for step in call]
    )
    quiet = [np.mean([generation_s(ranks, step_s) for ranks in own]) for own in calls]
    print(f"  a step of B responses takes {step_s[1]:.5f} + {step_s[0]:.6f} B s", flush=True)
    return {
        "real_speedup": round(before / after, 3),
        "real_speedup_by_steps": round(float(quiet[0] / quiet[1]), 3),
    }


def line(steps: Sequence[tuple[int, float]]) -> np.ndarray:
    """Fit the seconds of a step to its responses, by the fastest tenth of the steps of each size."""
    numbers, seconds = (np.array(column) for column in zip(*steps, strict=True))
    sizes = [size for size in np.unique(numbers) if (numbers == size).sum() >= 10]
    fastest = [np.quantile(seconds[numbers == size], 0.1) for size in sizes]
    return np.polyfit(sizes, fastest, 1)


def generation_s(ranks: Calls, step_s: np.ndarray) -> float:
    """Return the mean seconds of the slower rank from the second epoch on, if each step takes the
    time of its line."""
    of_ranks = [
        [sum(float(np.polyval(step_s, number)) for number, _ in call) for call in calls]
        for calls in ranks
    ]
    return float(np.max(of_ranks, axis=0)[EPOCH_STEPS:].mean())


def run(schedule: weft.Synchronous, folder: Path) -> tuple[list[float], Calls]:
    """Return the seconds of generation of each step, and the engine's steps on each rank."""
    model = str(folder / "model")
    actor = weft.group(PinnedActor, name="actor", model=model, learning_rate=1e-8, cores=(0, 1))
    rollout = weft.group(
        TailRollout,
        name="rollout",
        model=model,
        max_context=WORK.context,
        max_num_seqs=WORK.slots,
        cores=(0, 1),
        median=WORK.median,
        sigma=WORK.sigma,
    )
    rollout.follows(actor)
    graph = grpo(
        weft.Prompts.read(folder / "prompts.jsonl", model),
        rollout=rollout,
        reward=weft.group(weft.RewardWorker, name="reward", function=score, tokenizer=model),
        actor=actor,
        n=WORK.samples,
        sampling=weft.Sampling(max_tokens=WORK.longest, stop=None),
    )
    pool = weft.ResourcePool("both cores", cpus=2)
    with weft.Driver(
        graph,
        schedule=schedule,
        placement={name: weft.Place(pool, ranks=2) for name in ("rollout", "actor")},
        backend=weft.RayBackend(),
        root=folder / "runs",
        progress=False,
        record_every=0,
        stop_on=(),
    ) as driver:
        driver.run()
        calls = [c for c in driver.directory.timeline if c["node"] == "rollout.generate"]
        of_ranks = [own[-len(calls) :] for own in driver.call(rollout, "engine_calls")]
    return [call["end_s"] - call["start_s"] for call in calls], of_ranks
