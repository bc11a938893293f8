"""Weft under one schedule, from start to end: says one line of what it measured (turns.py), and ends.

    python benchmarks/schedules_weft.py FOLDER '{"schedule": "asynchronous_1", ...}'       # schedules.py fills in the rest

The workers are Weft's own but for two things: each is kept on its core, and a response has the length that its prompt and its
place in the group say, whatever is sampled. So every schedule has the same responses to make and to train on.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from schedules import APART, SCHEDULES, Work
from turns import Turns
from workloads import reward as score

import weft
from weft.algorithms.grpo import grpo
from weft.algorithms.sampling import Sampling
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.log import LogReader
from weft.dataflow.buffer.sample_buffer import LOG
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.dispatch import Dispatch
from weft.workers.generation.engine import Request
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings
from weft.workers.remote import remote
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.worker import Context, Worker

Calls = Sequence[Mapping[str, Any]]


class LongTailedConfig(RolloutConfig):
    cores: tuple[int, ...]
    """Of rank 0, 1, ..."""
    median: float
    sigma: float
    """Of the log-normal distribution of lengths."""


class PinnedConfig(ActorConfig):
    cores: tuple[int, ...]


class LongTailedEngine(VllmEngine):
    """Each request has a length of its own, drawn by its seed."""

    def __init__(self, config: LongTailedConfig, max_context: int) -> None:
        super().__init__(str(config.model), config.vllm, max_context=max_context)
        self._lengths = config.median, config.sigma
        self.steps_s: dict[int, list[float]] = {}
        """Responses in the batch -> seconds of each step that was made of so many."""
        self.between_s: list[float] = []
        """Seconds from one step to the next: what the worker does with its answers, weights that are taken over."""
        self._ended: float | None = None
        self._slots = config.vllm.max_num_seqs

    def _add(self, request: Request, sampling: Sampling) -> str:
        assert request.seed is not None
        length = response_length(request.seed, *self._lengths, sampling.max_tokens)
        return super()._add(request, sampling.model_copy(update={"max_tokens": length}))

    def _step(self) -> None:
        number, started = min(self.num_unfinished, self._slots), time.perf_counter()
        if self._ended is not None:
            self.between_s.append(started - self._ended)
        super()._step()
        ended = time.perf_counter()
        self.steps_s.setdefault(number, []).append(ended - started)
        self._ended = ended if self.num_unfinished else None


def response_length(seed: int, median: float, sigma: float, longest: int) -> int:
    length = median * np.exp(sigma * np.random.default_rng(seed).standard_normal())
    return int(np.clip(round(length), 1, longest))


def response_seed(prompt_ids: np.ndarray, index: int) -> int:
    digest = hashlib.blake2b(prompt_ids.astype("<i8").tobytes() + bytes([index]), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def lengths_of(work: Work, folder: Path) -> list[list[int]]:
    """Tokens of each response to each prompt of the run, in order."""
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
        Worker.__init__(self, config, context)
        assert config.max_context is not None
        self.max_context = config.max_context
        self.engine = LongTailedEngine(config, self.max_context)

    def _seed(self, group_id: int, draw: Sequence[int], prompt_ids: np.ndarray, index: int) -> int | None:
        return response_seed(prompt_ids, index)  # prompts differ; what number a group has, depends on the schedule

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def steps_s(self) -> dict[int, float]:
        """Responses in the batch -> mean seconds from one step to the next, of this rank."""
        assert isinstance(self.engine, LongTailedEngine)
        between = float(np.median(self.engine.between_s or [0.0]))
        return {number: float(np.mean(seconds)) + between for number, seconds in sorted(self.engine.steps_s.items())}


class PinnedActor(ActorWorker):
    Config = PinnedConfig

    def __init__(self, config: PinnedConfig, context: Context = Context()) -> None:
        pin(config.cores, context)
        super().__init__(config, context)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()


def pin(cores: Sequence[int], context: Context) -> None:
    """Keep this thread, and all that it starts, on the core of its rank."""
    os.sched_setaffinity(0, {cores[context.rank % len(cores)]})


def groups(work: Work, name: str, folder: Path) -> tuple[Any, Any, Any]:
    """rollout, actor, reward; rollout follows actor."""
    first, second, *_ = [*sorted(os.sched_getaffinity(0)), *sorted(os.sched_getaffinity(0))]
    apart = SCHEDULES[name][2]
    cores = {"rollout": (first,), "actor": (second,)} if apart else dict.fromkeys(APART, (first, second))
    model = str(folder / "model")
    actor = weft.group(PinnedActor, name="actor", model=model, learning_rate=1e-8, cores=cores["actor"])
    rollout = weft.group(
        LongTailedRollout,
        name="rollout",
        model=model,
        max_context=work.context,
        vllm=VllmSettings(max_num_seqs=work.slots),
        cores=cores["rollout"],
        median=work.median,
        sigma=work.sigma,
    )
    rollout.follows(actor)
    return rollout, actor, weft.group(weft.RewardWorker, name="reward", function=score, tokenizer=model)


def algorithm(work: Work, folder: Path, *, rollout: Any, actor: Any, reward: Any) -> Any:
    return grpo(
        weft.Prompts.read(folder / "prompts.jsonl", str(folder / "model")),
        rollout=rollout,
        reward=reward,
        actor=actor,
        n=work.samples,
        sampling=Sampling(max_tokens=work.longest, ignore_stop=True),
    )


def schedule_of(work: Work, name: str) -> Any:
    kind, staleness, _ = SCHEDULES[name]
    settings = {"steps": work.steps, "prompts_per_step": work.groups, "shuffle": False}
    if kind == "synchronous":
        return weft.Synchronous(**settings)
    if kind == "pipelined":
        return weft.Pipelined(**settings, groups_per_part=work.groups_per_part)
    return weft.Asynchronous(**settings, max_staleness=staleness, groups_per_part=work.groups_per_part)


def main(work: Work, name: str, folder: Path) -> None:
    turns = Turns()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by the `with` below
    _, bound, apart = SCHEDULES[name]
    rollout, actor, reward = groups(work, name, folder)
    if apart:
        pools = {group: weft.ResourcePool(f"the core of {group}") for group in APART}
        placement = {group: weft.Place(pools[group]) for group in APART}
    else:
        pool = weft.ResourcePool("both cores", cpus=2)
        placement = {group: weft.Place(pool, ranks=2) for group in APART}
    processes: dict[str, list[int]] = {"driver": [os.getpid()]}
    core_s: dict[str, list[float]] = {"driver": [], "rollout": [], "actor": []}
    machine: list[tuple[float, float]] = []

    def after_step(metrics: Mapping[str, float]) -> bool:
        for who, so_far in core_s.items():
            so_far.append(sum(map(cpu_s, processes[who])))
        machine.append(machine_cpu_s())
        return False

    with weft.Driver(
        algorithm(work, folder, rollout=rollout, actor=actor, reward=reward),
        placement=placement,
        schedule=schedule_of(work, name),
        backend=weft.RayBackend(),
        root=folder / "runs",
        progress=False,
        stop=after_step,
    ) as driver:
        processes |= {"rollout": driver.call(rollout, "process"), "actor": driver.call(actor, "process")}
        metrics = driver.run()
        steps_s = driver.call(rollout, "steps_s")[0]
        timeline = driver.directory.timeline
        path = driver.directory.path
    start, end = work.warm_up, work.warm_up + work.counted
    closed = [row["time_s"] for row in metrics]
    window = closed[start], closed[end]
    report = check_log(path / "buffer")
    busy, total = (b - a for a, b in zip(machine[start], machine[end], strict=True))
    turns.say(
        schedule=name,
        step_s=[after - before for before, after in zip(closed[start:end], closed[start + 1 : end + 1], strict=True)],
        busy_s={group: union(intervals(timeline, group), window) / work.counted for group in APART},
        nodes_s={node: union(intervals(timeline, node=node), window) / work.counted for node in NODES},
        idle=idle_gaps(timeline, window),
        ranks=1 if apart else 2,
        tokens=sum(row.get("rollout/tokens", 0.0) for row in metrics[start + 1 : end + 1]) / work.counted,
        trained_tokens=sum(row.get("actor/tokens", 0.0) for row in metrics[start + 1 : end + 1]) / work.counted,
        all_tokens=sum(row.get("actor/tokens", 0.0) for row in metrics),
        core_s={who: (so_far[end] - so_far[start]) / work.counted for who, so_far in core_s.items()},
        machine_busy=busy / total,
        max_staleness=max(row.get("actor/max_staleness", 0.0) for row in metrics),
        mean_staleness=float(np.mean([row.get("actor/mean_staleness", 0.0) for row in metrics[start + 1 : end + 1]])),
        violations=[str(violation) for violation in report.violations[:5]],
        stale_rows=rows_too_old(path / "buffer", bound)
        + sum(row.get("actor/max_staleness", 0.0) > bound for row in metrics),
        records=report.records,
        decode_step_s=steps_s,
        timeline=[c for c in timeline if c["end_s"] >= closed[0]],
        window=window,
    )


NODES = ("rollout.generate", "receive_weights", "reward.score", "group_advantages", "actor.update", "publish_weights")


def rows_too_old(buffer: Path, bound: int) -> int:
    """Rows that an update claimed though their oldest token was more than `bound` versions behind, by the log."""
    oldest: dict[int, int] = {}
    count = 0
    for record in LogReader(buffer / LOG):
        if record["do"] == "publish" and "versions" in record:
            oldest.update(zip(record["ids"], record["versions"], strict=True))
        elif record["do"] == "claim" and record["node"] == "actor.update":
            version = record["stale"][0]
            count += sum(version - oldest[id] > bound for id in record["ids"])
    return count


def intervals(timeline: Calls, group: str | None = None, *, node: str | None = None) -> list[tuple[float, float]]:
    return [(c["start_s"], c["end_s"]) for c in timeline if group in (None, c["group"]) and node in (None, c["node"])]


def merged(spans: Iterable[tuple[float, float]], window: tuple[float, float]) -> list[tuple[float, float]]:
    """The parts of a window that are covered, in order and without overlap.

    >>> merged([(0, 2), (1, 3), (5, 9)], (1, 8))
    [(1, 3), (5, 8)]
    """
    out: list[tuple[float, float]] = []
    for start, end in sorted((max(a, window[0]), min(b, window[1])) for a, b in spans):
        if end <= start:
            continue
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def union(spans: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    return sum(end - start for start, end in merged(spans, window))


def idle_gaps(timeline: Calls, window: tuple[float, float]) -> dict[str, dict[str, Any]]:
    """Group -> seconds of the window in which it had no call, and by which of its calls they ended.

    >>> calls = [{"group": "actor", "node": n, "start_s": a, "end_s": b} for n, a, b in (("u", 0, 2), ("p", 3, 4))]
    >>> idle_gaps(calls, (0.0, 5.0))["actor"]
    {'idle_s': 2.0, 'before': {'p': 1.0, 'the end': 1.0}}
    """
    found: dict[str, dict[str, Any]] = {}
    for group in APART:
        covered = merged(intervals(timeline, group), window)
        starts = {c["start_s"]: c["node"] for c in timeline if c["group"] == group}
        before: dict[str, float] = {}
        at = window[0]
        for start, end in [*covered, (window[1], window[1])]:
            if start > at:
                what = starts.get(start, "the end")
                before[what] = before.get(what, 0.0) + float(start - at)
            at = end
        found[group] = {"idle_s": float(sum(before.values())), "before": before}
    return found


def cpu_s(process: int) -> float:
    """Core-seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> tuple[float, float]:
    """Core-seconds that the machine was busy, and that there were, since it was started."""
    with open("/proc/stat") as file:
        numbers = [int(word) for word in file.readline().split()[1:9]]
    ticks = os.sysconf("SC_CLK_TCK")
    return (sum(numbers) - numbers[3] - numbers[4]) / ticks, sum(numbers) / ticks


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    chosen = given.pop("schedule")
    main(Work(**given), chosen, Path(sys.argv[1]))
