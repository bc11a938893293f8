"""Generation of synchronous steps with two vLLM replicas, a core each.

The engine draws the length of each response: log-normal with a median of 24 tokens, sigma 1 and at
most 512 tokens. The prompt explains `PROMPT_SHARE` of the variance of the logarithm. Runs of all
schedules take turns. The first epoch does not count.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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


class EngineStep(NamedTuple):
    version: int
    """Version of the weights, which tells the step of the run."""
    responses: int
    context: int
    """[tokens] Prompts and responses so far, over the whole batch."""
    began_s: float
    """[s] On a clock that all processes of the machine share."""
    seconds: float
    cpu_s: float
    """[s] Time on the core. vLLM runs in the thread of the worker."""


class TailEngine(VllmEngine):
    """Ends each response at a length that depends on its prompt and its seed."""

    def __init__(self, config: LongTailedConfig, **settings: Any) -> None:
        super().__init__(str(config.model), config, **settings)
        self._median, self._sigma = config.median, config.sigma
        self.steps: list[EngineStep] = []
        self._context: dict[int, int] = {}
        """Ticket -> tokens of its prompt and response so far."""

    def submit(self, request: GenerationRequest, sampling: weft.Sampling) -> int:
        assert request.seed is not None
        prompt = request.prompt_ids[: len(request.prompt_ids) - request.sampled]
        of_prompt = np.random.default_rng(zlib.crc32(prompt.tobytes())).standard_normal()
        own = np.random.default_rng(request.seed).standard_normal()
        drawn = math.sqrt(PROMPT_SHARE) * of_prompt + math.sqrt(1 - PROMPT_SHARE) * own
        length = int(np.clip(round(self._median * math.exp(self._sigma * drawn)), 1, WORK.longest))
        own = sampling.model_copy(update={"max_tokens": length - request.sampled})
        ticket = super().submit(request, own)
        self._context[ticket] = len(request.prompt_ids)
        return ticket

    def abort(self, tickets: Collection[int]) -> None:
        super().abort(tickets)
        for ticket in tickets:
            self._context.pop(ticket, None)

    def step(self) -> list[Response]:
        # vLLM starts requests in order, so the others wait.
        running = list(itertools.islice(self._context, WORK.slots))
        number, context = len(running), sum(self._context[ticket] for ticket in running)
        began_s, before_s = time.perf_counter(), time.thread_time()
        found = super().step()
        seconds, cpu_s = time.perf_counter() - began_s, time.thread_time() - before_s
        self.steps.append(EngineStep(self.version, number, context, began_s, seconds, cpu_s))
        for ticket in running:
            self._context[ticket] += 1
        for response in found:
            del self._context[response.ticket]
        return found


class TailRollout(LongTailedRollout):
    _seed = RolloutWorker._seed

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def engine_steps(self) -> list[EngineStep]:
        assert isinstance(self.engine, TailEngine)
        return self.engine.steps

    def new_engine(self, **settings: Any) -> TailEngine:
        assert isinstance(self.config, LongTailedConfig)
        return TailEngine(self.config, **settings)


@dataclass(frozen=True)
class Measured:
    seconds: list[float]
    """[s] Generation of each step of the run."""
    ranks: list[list[EngineStep]]
    """[ranks] of the engine's steps."""


def measure() -> Mapping[str, Any]:
    steps: dict[str, Any] = {"steps": EPOCHS * EPOCH_STEPS, "prompts_per_step": WORK.groups}
    schedules = {
        "in order": InOrder(**steps),
        "with rounds": weft.Synchronous(**steps, rounds=EPOCH_STEPS),
        "with rounds and migration": weft.Synchronous(**steps, rounds=EPOCH_STEPS, migrate=True),
    }
    runs: dict[str, list[Measured]] = {name: [] for name in schedules}
    with tempfile.TemporaryDirectory(prefix="weft-tail-") as root:
        sizes = replace(WORK, warm_up=0, counted=EPOCH_STEPS, tail=0)
        folder = prepare(sizes.workload(), Path(root) / "work")
        for turn in range(TURNS):
            for name in schedules if turn % 2 == 0 else reversed(schedules):
                found = run(schedules[name], folder)
                runs[name].append(found)
                print(f"  {name}: {', '.join(f'{s:.2f}' for s in found.seconds)} s", flush=True)
    every = [step for own in runs.values() for one in own for rank in one.ranks for step in rank]
    step_s = fit(every)
    said = f"{step_s[0]:.5f} + {step_s[1]:.6f} B + {step_s[2]:.8f} K s"
    print(f"  a step of B responses with K tokens takes {said}", flush=True)
    later_s, quiet_s = (
        {name: float(np.mean([seconds(one) for one in own])) for name, own in runs.items()}
        for seconds in (
            lambda one: np.mean(one.seconds[EPOCH_STEPS:]),
            lambda one: generation_s(one.ranks, step_s),
        )
    )
    before, rounds, both = later_s.values()
    quiet_before, _, quiet_both = quiet_s.values()
    return {
        "real_speedup": round(before / both, 3),
        "real_rounds_speedup": round(before / rounds, 3),
        "real_speedup_by_steps": round(quiet_before / quiet_both, 3),
    }


def fit(steps: Sequence[EngineStep]) -> np.ndarray:
    """Fit the time of a step on the core to a constant, its responses and their tokens, by the
    fastest tenth of the steps with about as many of both."""
    cells: dict[tuple[int, int], list[EngineStep]] = {}
    for step in steps:
        cells.setdefault((step.responses, round(4 * math.log2(1 + step.context))), []).append(step)
    kept = [
        step for own in cells.values() for step in sorted(own, key=lambda s: s.cpu_s)[: len(own) // 10]
    ]
    inputs = np.array([(1.0, step.responses, step.context) for step in kept])
    return np.linalg.lstsq(inputs, np.array([step.cpu_s for step in kept]), rcond=None)[0]


def generation_s(ranks: Sequence[Sequence[EngineStep]], step_s: np.ndarray) -> float:
    """Return the mean seconds of the slower rank from the second epoch on, if each of its steps takes
    the time that was fitted."""
    totals = np.zeros((len(ranks), EPOCHS * EPOCH_STEPS))
    for rank, steps in enumerate(ranks):
        for step in steps:
            totals[rank, step.version] += step_s @ (1.0, step.responses, step.context)
    return float(totals.max(axis=0)[EPOCH_STEPS:].mean())


def run(schedule: weft.Synchronous, folder: Path) -> Measured:
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
        ranks = driver.call(rollout, "engine_steps")
    return Measured([call["end_s"] - call["start_s"] for call in calls], ranks)
