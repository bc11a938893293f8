"""Weft, a step at a time: the driver, Ray, FSDP2 ranks and vLLM replicas, with `grpo` as it stands."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from turns import Turns
from workloads import WORKLOADS, Workload, reward

import weft
from weft.algorithms.grpo import grpo
from weft.dataflow.buffer.log import LogReader
from weft.dataflow.buffer.sample_buffer import LOG


def main(workload: Workload, folder: Path, actor_ranks: int, rollout_ranks: int, cores: int) -> None:
    turns = Turns()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by the `with` below
    model = str(folder / "model")
    prompts = weft.Prompts.read(folder / "prompts.jsonl", model)
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=1e-8)
    rollout = weft.group(weft.RolloutWorker, model=model, max_context=workload.context)
    scorer = weft.group(weft.RewardWorker, function=reward, tokenizer=model)
    rollout.follows(actor)
    algorithm = grpo(
        prompts,
        rollout=rollout,
        reward=scorer,
        actor=actor,
        n=workload.num_samples,
        sampling=weft.Sampling(max_tokens=workload.max_tokens, ignore_stop=workload.mean_tokens is None),
    )
    pool = weft.ResourcePool("cores", cpus=cores)
    started = 0.0
    seen = 0
    log: LogReader | None = None

    def after_step(metrics: Mapping[str, float]) -> bool:
        """Told of each step's end by the driver; the next one begins when this returns."""
        nonlocal started, seen, log
        now = time.perf_counter()
        log = log or LogReader(driver.directory.path / "buffer" / LOG)
        if metrics["step"] == 0:
            turns.say(placement=[actor_ranks, rollout_ranks])
        else:
            calls = driver.directory.timeline[seen:]
            seen += len(calls)
            lengths = response_lengths(log)
            turns.say(step_s=now - started, tokens=sum(lengths), lengths=lengths, calls=calls)
        ends = not turns.go_on()
        started = time.perf_counter()
        return ends

    with weft.Driver(
        algorithm,
        placement={"actor": weft.Place(pool, ranks=actor_ranks), "rollout": weft.Place(pool, ranks=rollout_ranks)},
        schedule=weft.Synchronous(steps=1_000_000, prompts_per_step=workload.num_prompts, shuffle=False),
        backend=weft.RayBackend(),
        root=folder / "runs",
        progress=False,
        stop=after_step,
    ) as driver:
        driver.run()


def response_lengths(log: LogReader) -> list[int]:
    """Tokens of each response that was published since the last call, from the log of the run."""
    return [
        number for record in log if record["do"] == "publish" and "parents" in record for number in record["tokens"]
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--actor-ranks", type=int, required=True)
    parser.add_argument("--rollout-ranks", type=int, required=True)
    parser.add_argument("--cores", type=int, required=True)
    arguments = parser.parse_args()
    chosen = WORKLOADS[arguments.workload]
    main(
        chosen.small() if arguments.small else chosen,
        arguments.folder,
        arguments.actor_ranks,
        arguments.rollout_ranks,
        arguments.cores,
    )
