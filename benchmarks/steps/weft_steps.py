"""Weft for `grpo_step.py` and `algorithm_steps.py`: driver, Ray, workers, unmodified algorithms.

python benchmarks/steps/weft_steps.py {grpo,ppo,dpo} FOLDER SETTINGS      # a system of turns.py; SETTINGS is JSON
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from algorithm_workloads import EPOCHS, MINIBATCHES, num_tokens, read
from records import response_lengths
from turns import Turns
from workloads import Workload, reward

import weft
from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.ppo import ppo
from weft.algorithms.preference import dpo, reference_of_pairs
from weft.dataflow.batch import Batch
from weft.dataflow.column import RESPONSE_IDS, RESPONSE_LOGPROBS
from weft.dataflow.operation import Shape, node
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.log import LogReader

Placement = dict[str, weft.Place]


@node(
    shape=Shape.EXPAND,
    reads=("given_tokens", "given_logprobs"),
    writes=(RESPONSE_IDS, RESPONSE_LOGPROBS),
)
def given_responses(prompts: Batch) -> Batch:
    """Replace a rollout: return the given response of each prompt."""
    ids, logprobs = prompts["given_tokens"], prompts["given_logprobs"]
    return Batch.of(parent_id=prompts["sample_id"], response_ids=ids, response_logprobs=logprobs)


class Given:
    """A rollout that generates nothing."""

    def generate(self, prompts: Any, *, n: int, sampling: Any) -> Any:
        return given_responses(prompts)


def run_by_turns(
    turns: Turns,
    graph: Any,
    placement: Placement,
    prompts: int,
    folder: Path,
    facts: Callable[[Path], Mapping[str, Any]],
    up: Mapping[str, Any],
) -> None:
    """Run the graph until there are no more turns.

    Args:
        prompts: prompts per step.
        facts: returns the report on the last step, from the run's directory.
        up: report when the system is up.
    """
    started, seen = 0.0, 0

    def after_step(metrics: Mapping[str, float]) -> bool:
        """End a step; the driver starts the next one when this returns."""
        nonlocal started, seen
        now = time.perf_counter()
        of_step = facts(driver.directory.path)
        if metrics["step"] == 0:
            turns.say(**up)
        else:
            calls = driver.directory.timeline[seen:]
            seen += len(calls)
            turns.say(step_s=now - started, calls=calls, **of_step)
        ends = not turns.go_on()
        started = time.perf_counter()
        return ends

    with weft.Driver(
        graph,
        placement=placement,
        schedule=weft.Synchronous(steps=1_000_000, prompts_per_step=prompts, shuffle=False),
        backend=weft.RayBackend(),
        root=folder / "runs",
        progress=False,
        stop=after_step,
    ) as driver:
        driver.run()


def run_grpo(
    turns: Turns, folder: Path, workload: Workload, actor_ranks: int, rollout_ranks: int, cores: int
) -> None:
    model = str(folder / "model")
    pool = weft.ResourcePool("cores", cpus=cores)
    grpo_by_turns(
        turns,
        folder,
        workload,
        weft.group(weft.ActorWorker, model=model, learning_rate=1e-8),
        weft.group(weft.RolloutWorker, model=model, max_context=workload.context),
        {
            "actor": weft.Place(pool, ranks=actor_ranks),
            "rollout": weft.Place(pool, ranks=rollout_ranks),
        },
        {"placement": [actor_ranks, rollout_ranks]},
    )


def grpo_by_turns(
    turns: Turns,
    folder: Path,
    workload: Workload,
    actor: Any,
    rollout: Any,
    placement: Placement,
    up: Mapping[str, Any],
) -> None:
    """Run GRPO on the model and prompts in a folder; for `up` see `run_by_turns`."""
    model = str(folder / "model")
    rollout.follows(actor)
    graph = grpo(
        weft.Prompts.read(folder / "prompts.jsonl", model),
        rollout=rollout,
        reward=weft.group(weft.RewardWorker, function=reward, tokenizer=model),
        actor=actor,
        n=workload.num_samples,
        sampling=weft.Sampling(
            max_tokens=workload.max_tokens, stop=None if workload.mean_tokens is None else ()
        ),
    )
    log: LogReader | None = None

    def facts(run: Path) -> Mapping[str, Any]:
        nonlocal log
        log = log or LogReader(run / "buffer" / LOG)
        lengths = response_lengths(log)
        return {"tokens": sum(lengths), "lengths": lengths}

    run_by_turns(turns, graph, placement, workload.num_prompts, folder, facts, up)


def ppo_graph(folder: Path, place: weft.Place) -> tuple[Any, Placement]:
    model, scalar = str(folder / "model"), str(folder / "scalar")
    prompts = weft.Prompts.read(folder / "rows.jsonl", model)
    given = [row["given"] for row in read(folder / "rows.jsonl")]
    uniform = -math.log(json.loads((folder / "model" / "config.json").read_text())["vocab_size"])
    logprobs = [np.full(len(ids), uniform, np.float32) for ids in given]
    table = prompts.table.append_column("given_tokens", pa.array(given, pa.list_(pa.int32())))
    table = table.append_column("given_logprobs", pa.array(logprobs, pa.list_(pa.float32())))
    graph = ppo(
        weft.TableSource("rows", table),
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
    return graph, dict.fromkeys(("actor", "critic", "reference", "reward"), place)


def dpo_graph(folder: Path, place: weft.Place) -> tuple[Any, Placement]:
    model = str(folder / "model")
    pairs = weft.Prompts.read(folder / "pairs.jsonl", model)
    known = weft.precompute(
        reference_of_pairs(pairs, reference=weft.group(weft.ReferenceWorker, model=model)),
        placement={"reference": place},
        backend=weft.RayBackend(),
        root=folder / "runs",
        progress=False,
    )
    return dpo(known, actor=weft.group(weft.ActorWorker, model=model, learning_rate=1e-8)), {
        "actor": place
    }


def run_algorithm(turns: Turns, algorithm: str, folder: Path, ranks: int, cores: int) -> None:
    place = weft.Place(weft.ResourcePool("cores", cpus=cores), ranks=ranks)
    graph, placement = (ppo_graph if algorithm == "ppo" else dpo_graph)(folder, place)
    rows = read(folder / ("rows.jsonl" if algorithm == "ppo" else "pairs.jsonl"))
    tokens = {"tokens": num_tokens(rows)}
    run_by_turns(turns, graph, placement, len(rows), folder, lambda _: tokens, {"ranks": ranks})


if __name__ == "__main__":
    system = Turns()
    # run the exit of the driver's `with` block
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    kind, where, given = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    if kind == "grpo":
        run_grpo(system, where, Workload.of(given.pop("workload")), **given)
    else:
        run_algorithm(system, kind, where, **given)
