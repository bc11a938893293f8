"""Ranks in this process that take turns at random and die at random, on a fake clock. Their rollout
is Weft's, with an engine whose tokens are a function of prompt, sample and position."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from simulated_runs import SimulatedCluster
from toy import ToyActor, ToyConfig

from weft.algorithms.sampling import Sampling
from weft.controllers.backends.backend import Event, Setup, this_node
from weft.controllers.group import Call, WorkerGroup
from weft.controllers.ranks.executor import Executor
from weft.controllers.ranks.tasks import Failure, FailureKind, Reply, Task
from weft.dataflow.batch import Batch
from weft.dataflow.graph import Node
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import TrainingBatch
from weft.dataflow.source import Source
from weft.workers.dispatch import Coordinates, Dispatch
from weft.workers.generation.engine import GenerationRequest, Response
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.worker import Context, remote

DIED = Reply(failure=Failure("killed", kind=FailureKind.DIED))
LONGEST = 60
"""[tokens] Length of the longest response."""


def length_of(prompt: Sequence[int], seed: int) -> int:
    return min(LONGEST, 1 + int(np.random.default_rng([*prompt, seed]).lognormal(2.0, 1.0)))


def token_of(prompt: Sequence[int], seed: int, position: int) -> int:
    return (31 * sum(prompt) + seed + 7 * position) % 997


class CountingEngine:
    """Samples `token_of` for `length_of` tokens."""

    def __init__(self, step_s: float) -> None:
        self.version, self._step_s = 0, step_s
        self._tickets = 0
        self._running: dict[int, tuple[GenerationRequest, list[int], list[int]]] = {}
        """Ticket -> request, tokens and their versions."""

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        self._tickets += 1
        self._running[self._tickets] = request, [], []
        return self._tickets

    def step(self) -> list[Response]:
        time.sleep(self._step_s)
        found: list[Response] = []
        for ticket, (request, tokens, versions) in list(self._running.items()):
            ids, before = request.prompt_ids.tolist(), request.sampled
            prompt, given = ids[: len(ids) - before], ids[len(ids) - before :]
            assert request.seed is not None
            seed = request.seed % 997
            assert given == [token_of(prompt, seed, k) for k in range(before)], "its own first tokens"
            tokens.append(token_of(prompt, seed, before + len(tokens)))
            versions.append(self.version)
            if before + len(tokens) == length_of(prompt, seed):
                found.append(self._response(ticket, "stop"))
                del self._running[ticket]
        return found

    def take_unfinished(self, tickets: Collection[int]) -> list[Response]:
        taken = [self._response(ticket, "unfinished") for ticket in tickets if ticket in self._running]
        self.abort(tickets)
        return taken

    def abort(self, tickets: Collection[int]) -> None:
        for ticket in tickets:
            self._running.pop(ticket, None)

    def _response(self, ticket: int, reason: Any) -> Response:
        request, tokens, versions = self._running[ticket]
        seeds = np.full(len(tokens), request.seed % 997 if request.seed else 0, np.float32)
        ids, ages = np.array(tokens, np.int32), np.array(versions, np.int32)
        return Response(ticket, request.request_id, ids, seeds, ages, reason)

    def close(self) -> None: ...


class CountingConfig(RolloutConfig):
    step_s: float = 0.0
    """[s] Pause in each step of the engine."""


class CountingRollout(RolloutWorker):
    """Log-probabilities are the seeds of the tokens."""

    Config = CountingConfig

    def new_engine(self, **settings: Any) -> Any:
        assert isinstance(self.config, CountingConfig)
        return CountingEngine(self.config.step_s)

    @classmethod
    def check(cls, config: RolloutConfig, nodes: Sequence[Node], source: Source) -> None: ...

    @classmethod
    def check_machine(cls, config: RolloutConfig, ranks: int) -> None: ...

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Any, recompute: bool = False, policy: str = "") -> str:
        cast(Any, self.engine).version = weights.version
        return weights.checksum


class CheckingActor(ToyActor):
    """Checks that it is trained on whole groups of whole responses, each of the latest version."""

    Config = ToyConfig
    trained: list[tuple[int, int]]
    """(group, sample) of all rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trained, self.version = [], 0

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda loss: (
            *("prompt_ids", "response_ids", "response_logprobs", "response_versions"),
            *("finish_reason", *loss.reads),
        ),
        takes=TrainingBatch(),
    )
    def update(self, samples: Batch, *, loss: Any = None) -> Metrics:
        for row in samples.to_rows():
            prompt, tokens = row["prompt_ids"], row["response_ids"]
            (seed,) = {int(seed) for seed in row["response_logprobs"]}
            assert tokens == [token_of(prompt, seed, k) for k in range(length_of(prompt, seed))]
            assert row["response_versions"] == [self.version] * len(tokens)
            assert row["finish_reason"] == "stop"
            self.trained.append((row["group_id"], row["sample_id"]))
        self.version += 1
        return {}

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def rows_trained(self) -> list[tuple[int, int]]:
        return self.trained


def counting_model(folder: Path) -> Path:
    """Write the configuration of a model, which has no weights."""
    folder.mkdir()
    config = {"model_type": "qwen2", "vocab_size": 1000, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class RandomRanks(SimulatedCluster):
    """Ranks that take turns at random.

    Args:
        kills: number of busy ranks of the rollout to kill.
    """

    def __init__(self, chance: random.Random, kills: int = 0) -> None:
        super().__init__()
        self._chance, self.kills = chance, kills
        self.moved = 0
        self._clock_s = 0.0
        self._executors: dict[tuple[str, int], Executor] = {}
        self._calls: dict[tuple[str, int], dict[int, Call]] = {}
        """Unfinished calls of each rank."""
        self._dead: set[tuple[str, int]] = set()
        self._events: deque[Event] = deque()
        self._number = 0

    def check(self, placement: Any, handles: Any = None) -> None: ...

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        self._setup = setup
        groups: dict[str, WorkerGroup] = {}
        for name, handle in setup.handles.items():
            place = setup.placement[name]
            for rank in range(place.ranks):
                self._start(name, rank)
            mesh = [Coordinates(dp=rank) for rank in range(place.ranks)]
            groups[name] = WorkerGroup(name, handle, place, mesh, self._submit)
        return groups

    def _start(self, name: str, rank: int) -> None:
        setup, handle = self._setup, self._setup.handles[name]
        self._number += 1
        context = Context(
            name=name,
            rank=rank,
            world_size=setup.placement[name].ranks,
            run_dir=setup.run_dir,
            seed=setup.seed,
        )
        data = setup.files.access(this_node(), f"{name}-{rank}-{self._number}")
        worker = handle.worker_class(handle.config, context)
        self._executors[name, rank] = Executor(worker, data, self.clock)
        self._calls[name, rank] = {}

    @property
    def nodes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (this_node(),)

    def clock(self) -> float:
        return self._clock_s

    def rest(self, seconds: float) -> None:
        self._clock_s += seconds

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        own = call.group.name, rank

        def reply(one: Reply) -> None:
            if self._calls[own].get(task.number) is call:
                self.moved += 0 if one.handed_over is None else len(one.handed_over.ids)
                self._events.append(Event(call, rank, one))
                if one.is_last:
                    del self._calls[own][task.number]

        if own in self._dead:
            self._events.append(Event(call, rank, DIED))
            return
        self._calls[own][task.number] = call
        self._executors[own].add_task(task, reply)

    def cancel(self, call: Call) -> None:
        for rank in call.ranks:
            self._executors[call.group.name, rank].cancel_call(call.number)

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        for rank in call.ranks:
            self._executors[call.group.name, rank].give_up_rows(call.number, sample_ids)

    def replace(self, group: WorkerGroup, rank: int) -> None:
        self._start(group.name, rank)
        self._dead.discard((group.name, rank))

    def wait(self, timeout_s: float) -> list[Event]:
        self._clock_s += 0.001
        while not self._events and (busy := self._busy):
            own = self._chance.choice(busy)
            if self.kills and own[0] == "rollout" and self._chance.random() < 0.01:
                self.kills -= 1
                self._kill(own)
            else:
                self._executors[own].take_turn()
        if not self._events:
            self._clock_s += timeout_s
        # The driver may see some replies later than others, but gets all replies of a rank in order.
        number = self._chance.randint(1, max(1, len(self._events)))
        return [self._events.popleft() for _ in range(min(number, len(self._events)))]

    @property
    def _busy(self) -> list[tuple[str, int]]:
        busy = [own for own, executor in self._executors.items() if executor.busy]
        return [own for own in busy if own not in self._dead]

    def _kill(self, own: tuple[str, int]) -> None:
        self._dead.add(own)
        calls, self._calls[own] = self._calls[own], {}
        self._events += [Event(call, own[1], DIED) for call in calls.values()]

    def close(self) -> None:
        for executor in self._executors.values():
            executor.worker.close()
        self._executors.clear()
