"""A run directory of 10,000 steps and 100,000 samples, made by the writers of real runs.

    python benchmarks/dashboard/large_run.py FOLDER [--steps 10000] [--samples 100000]
    python benchmarks/dashboard/large_run.py FOLDER --rows 1000000     # with a log of this many rows; minutes

Its numbers are invented, its graph never ran, and it has no log. With `--rows`, the real driver
runs the graph in the simulator, with four generating and two training ranks. Then only the samples
are invented: log, graph, timeline and metrics come from the driver.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))

import pyarrow as pa

import weft
from weft.controllers.simulation.costs import CostModel, Generation, LinearCost, LogNormal
from weft.dataflow.batch import Batch
from weft.dataflow.graph import Graph
from weft.dataflow.runs.directory import RunDirectory
from weft.workers.function import RecorderConfig, RecorderWorker
from weft.workers.worker import Context

GROUP = 5
"""Responses per prompt."""
CALLS = (
    ("rollout", "rollout.generate", 0.0, 0.5),
    ("reward", "reward.score", 0.5, 0.55),
    ("functions", "center", 0.56, 0.58),
    ("actor", "actor.update", 0.6, 0.93),
    ("actor", "publish_weights", 0.94, 0.97),
    ("rollout", "receive_weights", 0.95, 1.0),
)
WORDS = [
    "so",
    "the",
    "answer",
    "is",
    "then",
    "we",
    "add",
    "both",
    "and",
    "carry",
    "one",
    "which",
    "gives",
    "four",
]


class Settings(weft.Config):
    pass


class Rollout(weft.Worker):
    Config = Settings

    @weft.remote(
        dispatch=weft.Dispatch.SPLIT_BY_DP,
        shape=weft.Shape.EXPAND,
        reads=("prompt_ids",),
        writes=("response_ids", "response_logprobs"),
    )
    def generate(self, prompts: Batch, *, n: int = GROUP) -> Batch:
        raise NotImplementedError


class Reward(weft.Worker):
    Config = Settings

    @weft.remote(dispatch=weft.Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=("reward",))
    def score(self, samples: Batch) -> Batch:
        raise NotImplementedError


class Actor(weft.Worker):
    Config = Settings

    @weft.remote(dispatch=weft.Dispatch.SPLIT_BY_DP, reads=("advantages",), takes=weft.TrainingBatch())
    def update(self, samples: Batch) -> None:
        raise NotImplementedError


@weft.node(shape=weft.Shape.GROUP, reads=("reward",), writes=("advantages",))
def center(samples: Batch) -> Batch:
    raise NotImplementedError


@weft.graph
def train(prompts, *, rollout, reward, actor):
    return actor.update(center(reward.score(rollout.generate(prompts))))


def graph() -> Graph:
    """Return the graph that the run would have had."""
    rollout, reward, actor = (
        weft.group(kind, name=kind.__name__.lower()) for kind in (Rollout, Reward, Actor)
    )
    source = weft.TableSource(
        "prompts", pa.table({"prompt_ids": pa.array([[1, 2]], pa.list_(pa.int32()))})
    )
    return train(source, rollout=rollout, reward=reward, actor=actor)


def make(path: Path, steps: int = 10_000, samples: int = 100_000) -> Path:
    directory = RunDirectory.create(path.parent, path.name)
    schedule = {
        "kind": "Asynchronous",
        "steps": steps,
        "prompts_per_step": samples // steps // GROUP,
        "max_staleness": 2,
    }
    placement = {
        name: {"ranks": 1, "pool": {"gpus": 0, "name": name}} for name in ("rollout", "reward", "actor")
    }
    config = {
        "schedule": schedule,
        "seed": 0,
        "graphs": {"train": [], "eval": []},
        "placement": placement,
    }
    directory.write_config(config, {"train": graph()})
    chance = np.random.default_rng(0)
    for step in range(steps + 1):
        directory.add_metrics(_metrics(step, steps, chance))
        for group, node, start, end in CALLS:
            times = {"start_s": step + start, "end_s": step + end, "worker_s": 0.9 * (end - start)}
            directory.add_call(
                step=step,
                graph="train",
                group=group,
                node=node,
                rows=10,
                tokens=1000,
                last=True,
                **times,
            )
        if step % 100 == 0:
            directory.flush()
    _write_samples(path, steps, samples // steps, chance)
    directory.close()
    assert directory.lock is not None
    directory.lock.release()
    return path


def make_with_rows(path: Path, rows: int, samples: int = 100_000) -> Path:
    """Make a run with a log of this many rows, and return its directory."""
    steps = 100
    training = weft.ResourcePool("training", cpus=2)
    generating = weft.ResourcePool("generating", cpus=4)
    costs = CostModel(
        nodes={
            "rollout.generate": Generation(
                lengths=LogNormal(mean=200, sigma=0.6, max_tokens=1000), decode_step_s=0.02
            ),
            "reward.score": LinearCost(fixed_s=0.5),
            "actor.update": LinearCost(fixed_s=2.0, per_token_s=1e-5),
            "center": LinearCost(fixed_s=0.01),
        }
    )
    with weft.Driver(
        graph(),
        schedule=weft.Asynchronous(
            steps=steps, prompts_per_step=rows // steps // GROUP, max_staleness=1
        ),
        placement={"rollout": weft.Place(generating, ranks=4), "actor": weft.Place(training, ranks=2)},
        backend=weft.Simulated(costs),
        root=path.parent,
        name=path.name,
        progress=False,
        record_every=0,
    ) as driver:
        driver.run()
    _write_samples(path, steps, samples // steps, np.random.default_rng(0))
    return path


def _metrics(step: int, steps: int, chance: np.random.Generator) -> dict[str, float]:
    learnt = 1 - math.exp(-3 * step / steps)
    noise = chance.normal(0, 1, 32)
    names = (
        "loss",
        "grad_norm",
        "clip_fraction",
        "approx_kl",
        "entropy",
        "mean_logprob_gap",
        "max_logprob_gap",
    )
    row = {
        "step": float(step),
        "time_s": float(step + 1),
        "step_s": 1.0,
        "samples": 10.0,
        "tokens_per_s": 1e4 + 300 * noise[0],
    }
    row |= {
        "reward/mean": 0.2 + 0.6 * learnt + 0.04 * noise[1],
        "reward/std": 0.3 + 0.02 * noise[2],
        "groups_without_signal": 0.3,
    }
    row |= {f"actor/{name}": abs(0.1 + 0.02 * noise[3 + k]) for k, name in enumerate(names)}
    row |= {
        "rollout/response_length": 200 + 90 * learnt + 9 * noise[10],
        "rollout/truncation_rate": 0.05,
        "actor/mean_staleness": 1.0,
    }
    row |= {
        f"{group}/idle_share": abs(0.2 + 0.05 * noise[11 + k])
        for k, group in enumerate(("rollout", "reward", "actor"))
    }
    row |= {
        f"{group}/resident_bytes": 2e9 + 1e6 * noise[14 + k]
        for k, group in enumerate(("rollout", "reward", "actor", "driver"))
    }
    row |= {f"reward/part_{k}/mean": 0.5 + 0.1 * noise[18 + k] for k in range(8)}
    row |= {
        "rollout/weights_transfer_s": 0.05,
        "rollout/weights_pause_s": 0.02,
        "actor/weights_bytes": 5e8,
        "segment_bytes": 1e6,
        "host_free_bytes": 1e10,
    }
    if step % 50 == 0:
        row |= {
            "eval/avg@1": 0.3 + 0.4 * learnt,
            "eval/avg@1_low": 0.27 + 0.4 * learnt,
            "eval/avg@1_high": 0.33 + 0.4 * learnt,
        }
    return row


def _write_samples(path: Path, steps: int, each: int, chance: np.random.Generator) -> None:
    recorder = RecorderWorker(RecorderConfig(), Context("recorder"))
    for step in range(1, steps + 1):
        ids = np.arange(each, dtype=np.int64) + step * each
        groups = ids // GROUP
        lengths = chance.integers(40, 160, each)
        prompts = [
            f"Problem {int(group) % 2000}: {int(group) % 97} + {int(group) % 89} = ?" for group in groups
        ]
        tokens = [chance.integers(0, 5000, n).astype(np.int32) for n in lengths]
        rows = Batch.of(
            sample_id=ids,
            group_id=groups,
            parent_id=groups,
            prompt=prompts,
            prompt_ids=[[int(group) % 97, int(group) % 89] for group in groups],
            response=[" ".join(WORDS[t % len(WORDS)] for t in own) for own in tokens],
            response_ids=tokens,
            response_logprobs=[(-chance.exponential(0.7, n)).astype(np.float32) for n in lengths],
            response_versions=[
                np.full(n, max(0, step - 1 - int(chance.integers(0, 3))), np.int32) for n in lengths
            ],
            advantages=[np.full(n, chance.normal(), np.float32) for n in lengths],
            finish_reason=["stop" if n < 150 else "length" for n in lengths],
            reward=chance.random(each).astype(np.float32),
        )
        filed = dict.fromkeys(groups.tolist(), step)
        recorder.record(rows, folder=path / "samples", graph="train", token=step, steps=filed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rows", type=int, help="rows of the log, in 100 steps")
    given = parser.parse_args()
    began = time.monotonic()
    if given.rows:
        made = make_with_rows(given.folder, given.rows, given.samples)
    else:
        made = make(given.folder, given.steps, given.samples)
    print(f"{made} in {time.monotonic() - began:.0f} s")
