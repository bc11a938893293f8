"""Weft's side of `algorithm_steps.py`: the driver, Ray and FSDP2 ranks of each model, with the graphs `ppo` and `dpo` as they stand."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from algorithm_workloads import EPOCHS, MINIBATCHES, num_tokens, read
from turns import Turns

import weft
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.ppo import ppo
from weft.algorithms.preference import dpo, reference_of_pairs
from weft.dataflow.batch import Batch
from weft.dataflow.column import RESPONSE_IDS, RESPONSE_LOGPROBS
from weft.dataflow.operation import Shape, node


@node(shape=Shape.EXPAND, reads=("given_tokens", "given_logprobs"), writes=(RESPONSE_IDS, RESPONSE_LOGPROBS))
def given_responses(prompts: Batch) -> Batch:
    """In the place of a rollout: the response that stands beside each prompt."""
    return Batch.of(
        parent_id=prompts["sample_id"],
        response_ids=prompts["given_tokens"],
        response_logprobs=prompts["given_logprobs"],
    )


class Given:
    """The role of a rollout."""

    def generate(self, prompts: Any, *, n: int, sampling: Any) -> Any:
        return given_responses(prompts)


def ppo_graph(folder: Path, placement: dict[str, weft.Place], place: weft.Place) -> Any:
    model, scalar = str(folder / "model"), str(folder / "scalar")
    rows = weft.Prompts.read(folder / "rows.jsonl", model)
    given = [row["given"] for row in read(folder / "rows.jsonl")]
    uniform = -math.log(json.loads((folder / "model" / "config.json").read_text())["vocab_size"])
    table = rows.table.append_column("given_tokens", pa.array(given, pa.list_(pa.int32())))
    logprobs = [np.full(len(ids), uniform, np.float32) for ids in given]
    source = weft.TableSource("rows", table.append_column("given_logprobs", pa.array(logprobs, pa.list_(pa.float32()))))
    placement |= dict.fromkeys(("actor", "critic", "reference", "reward"), place)
    return ppo(
        source,
        rollout=Given(),
        reward=weft.group(weft.RewardModelWorker, model=scalar),
        actor=weft.group(weft.ActorWorker, model=model, learning_rate=1e-8),
        critic=weft.group(weft.CriticWorker, model=scalar, learning_rate=1e-8),
        reference=weft.group(weft.ReferenceWorker, model=model),
        kl=0.01,
        loss=PolicyLoss(),
        epochs=EPOCHS,
        minibatches=MINIBATCHES,
    )


def dpo_graph(folder: Path, placement: dict[str, weft.Place], place: weft.Place) -> Any:
    model = str(folder / "model")
    pairs = weft.Prompts.read(folder / "pairs.jsonl", model)
    reference = weft.group(weft.ReferenceWorker, model=model)
    known = weft.precompute(
        reference_of_pairs(pairs, reference=reference),
        placement={"reference": place},
        backend=weft.RayBackend(),
        root=folder / "runs",
        progress=False,
    )
    placement |= {"actor": place}
    return dpo(known, actor=weft.group(weft.ActorWorker, model=model, learning_rate=1e-8))


def main(algorithm: str, folder: Path, ranks: int, cores: int) -> None:
    turns = Turns()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by the `with` below
    placement: dict[str, weft.Place] = {}
    place = weft.Place(weft.ResourcePool("cores", cpus=cores), ranks=ranks)
    graph = (ppo_graph if algorithm == "ppo" else dpo_graph)(folder, placement, place)
    started, seen = 0.0, 0

    def after_step(metrics: Mapping[str, float]) -> bool:
        """Told of each step's end by the driver; the next one begins when this returns."""
        nonlocal started, seen
        now = time.perf_counter()
        if metrics["step"] == 0:
            turns.say(ranks=ranks)
        else:
            calls = driver.directory.timeline[seen:]
            seen += len(calls)
            turns.say(step_s=now - started, tokens=tokens, calls=calls)
        ends = not turns.go_on()
        started = time.perf_counter()
        return ends

    rows = read(folder / ("rows.jsonl" if algorithm == "ppo" else "pairs.jsonl"))
    tokens = num_tokens(rows)
    with weft.Driver(
        graph,
        placement=placement,
        schedule=weft.Synchronous(steps=1_000_000, prompts_per_step=len(rows), shuffle=False),
        backend=weft.RayBackend(),
        root=folder / "runs",
        progress=False,
        stop=after_step,
    ) as driver:
        driver.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithm", choices=["ppo", "dpo"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--cores", type=int, required=True)
    arguments = parser.parse_args()
    main(arguments.algorithm, arguments.folder, arguments.ranks, arguments.cores)
