"""Trainer ranks and vLLM engines as processes without Ray, with weight transfers between them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch

TIMEOUT_S = 1800.0


def train(
    pipe: Any, folder: Path, rank: int, ranks: int, meeting: Any, settings: dict[str, Any]
) -> None:
    """Run a trainer rank that obeys messages of method names and arguments."""
    from weft.workers.actor import ActorConfig, ActorWorker
    from weft.workers.rendezvous import LOOPBACK
    from weft.workers.worker import Context

    torch.set_num_threads(1)
    context = Context("actor", rank, ranks, meeting if ranks > 1 else None, address=LOOPBACK)
    worker = ActorWorker(ActorConfig(model=str(folder), **settings), context)
    while (asked := pipe.recv()) is not None:
        method, argument = asked
        if method == "logprobs":
            pipe.send(worker.logprobs(_batch(argument), into="said").ragged("said")[0].numpy())
        else:
            pipe.send(getattr(worker, method)(*argument))
    worker.close()


def generate(pipe: Any, folder: Path, ranks: int, machine: str) -> None:
    """Run a vLLM engine that answers each weights record with the checksum and samples."""
    from weft.algorithms.sampling import Sampling
    from weft.resharding import sources
    from weft.workers.generation.engine import GenerationRequest, generate
    from weft.workers.generation.vllm_engine import VllmEngine
    from weft.workers.generation.vllm_settings import VllmSettings

    if machine:
        sources.this_machine = lambda: machine
    settings = VllmSettings(max_num_seqs=8, kv_cache_gib=0.05, tensor_parallel=ranks)
    engine = VllmEngine(str(folder), settings, max_context=64, dtype="float32")
    pipe.send("is there")
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 4, 9)]
    while (weights := pipe.recv()) is not None:
        checksum = engine.update_weights(weights)
        requests = [GenerationRequest(number, prompt) for number, prompt in enumerate(prompts)]
        found = [r for step in generate(engine, requests, Sampling(max_tokens=8)) for r in step]
        rows = [(prompts[r.request_id].tolist(), r.token_ids.tolist()) for r in found]
        pipe.send((checksum, rows, np.concatenate([r.logprobs for r in found])))
    engine.close()


def _batch(rows: list[tuple[list[int], list[int]]]) -> Any:
    from weft.dataflow.batch import Batch

    return Batch.of(
        prompt_ids=[prompt for prompt, _ in rows], response_ids=[response for _, response in rows]
    )


def _told(target: Callable[..., None], pipe: Any, *arguments: Any) -> None:
    """Run a process, and send its error as the last answer."""
    try:
        target(pipe, *arguments)
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


class Processes:
    """Processes that obey commands over pipes."""

    def __init__(self) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._started: list[Any] = []

    def start(self, target: Callable[..., None], *arguments: Any) -> Any:
        here, there = self._spawn.Pipe()
        process = self._spawn.Process(target=_told, args=(target, there, *arguments))
        process.start()
        there.close()
        self._started.append(process)
        return here

    def close(self) -> None:
        """Kill the processes that have not ended by themselves."""
        for process in self._started:
            process.join(20)
            process.kill()
            process.join()


def answer(pipe: Any) -> Any:
    """Return the next answer. Raises TimeoutError if none came in time, and RuntimeError if the
    command failed in the process."""
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"a process has not answered for {TIMEOUT_S:.0f} s")
    if isinstance(found := pipe.recv(), Exception):
        raise found
    return found


def all_of(pipes: list[Any], method: str, *argument: Any) -> list[Any]:
    """Return the answers of all trainer ranks."""
    for pipe in pipes:
        pipe.send((method, argument))
    return [answer(pipe) for pipe in pipes]


def gap(trainer: list[Any], engines: dict[str, Any], names: tuple[str, ...], version: int) -> float:
    """Send a version from trainer ranks to engines. Return the mean difference in nats between
    engine and trainer log-probabilities on new samples, largest over all engines. Raises
    RuntimeError if an engine has other weights than were sent."""
    weights = reduce(add, all_of(trainer, "publish_weights", version, list(names)))
    for name in names:
        engines[name].send(weights.to(name))
    taken = [answer(engines[name]) for name in names]
    given = reduce(add, all_of(trainer, "finish_publishing", version))
    gaps: list[float] = []
    for name, (checksum, rows, logprobs) in zip(names, taken, strict=True):
        if checksum != given.checksum:
            raise RuntimeError(f"{name} has checksum {checksum}, but the trainer sent {given.checksum}")
        for pipe in trainer:
            pipe.send(("logprobs", rows))
        said = [answer(pipe) for pipe in trainer]
        gaps.append(float(np.abs(said[0] - logprobs).mean()))
    return max(gaps)
