"""Generation of synchronous steps on the simulator: the real driver, schedule and ledger.

Log-normal lengths with a mean of 2,000 tokens, sigma 1 and at most 16,384 tokens. The prompt
explains `PROMPT_SHARE` of the variance of their logarithm. Only generation takes time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from work import Work
from workloads import prepare
from workloads import reward as score

import weft
from weft.algorithms.grpo import grpo
from weft.controllers.simulation.costs import CostModel, Generation, LogNormal

PROMPTS, SAMPLES, EPOCH_STEPS, EPOCHS = 256, 8, 8, 3
REPLICAS, SLOTS = 16, 64
PROMPT_SHARE = 0.7
DECODE_STEP_S = ((1, 0.015), (256, 0.025))
LENGTHS = LogNormal(mean=2000, sigma=1.0, max_tokens=16384, prompt_share=PROMPT_SHARE)


class InOrder(weft.Synchronous):
    """Synchronous training that ignores forecasts: prompts in order, shares of equal prompts."""

    @property
    def longest_first(self) -> bool:
        return False


@dataclass(frozen=True)
class Generated:
    step_s: np.ndarray
    """[steps] Seconds of generation."""
    idle: np.ndarray
    """[steps] Share of this time in which a replica has no response left, mean over replicas."""
    error: float
    """Error of the forecasts in the last epoch."""


def measure() -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="weft-tail-") as root:
        work = Work(groups=PROMPTS, samples=SAMPLES, warm_up=0, counted=EPOCH_STEPS, tail=0)
        tiny = replace(work, longest=LENGTHS.max_tokens)
        tiny = replace(tiny, vocabulary=256, hidden=64, layers=2, heads=2, mlp=128)
        folder = prepare(tiny.workload(), Path(root) / "work")
        steps = {"steps": EPOCHS * EPOCH_STEPS, "prompts_per_step": PROMPTS}
        in_order, longest_first = (run(kind(**steps), folder) for kind in (InOrder, weft.Synchronous))
    first, later = slice(0, EPOCH_STEPS), slice(EPOCH_STEPS, None)
    for name, each in (("in order", in_order), ("longest first", longest_first)):
        seconds, idle = each.step_s[later].mean(), each.idle[later].mean()
        print(f"  {name}: {seconds:.1f} s, idle {idle:.1%}, forecast error {each.error:.2f}")
    return {
        "longest_first_speedup_256": ratio(in_order.step_s[later], longest_first.step_s[later]),
        "first_epoch_speedup_256": ratio(in_order.step_s[first], longest_first.step_s[first]),
    }


def ratio(before: np.ndarray, after: np.ndarray) -> float:
    return round(float(before.mean() / after.mean()), 3)


def run(schedule: Any, folder: Path, seed: int = 0) -> Generated:
    model = str(folder / "model")
    actor = weft.group(weft.ActorWorker, model=model)
    rollout = weft.group(weft.RolloutWorker, model=model, max_num_seqs=SLOTS)
    rollout.follows(actor)
    graph = grpo(
        weft.Prompts.read(folder / "prompts.jsonl", model),
        rollout=rollout,
        actor=actor,
        reward=weft.group(weft.RewardWorker, function=score, tokenizer=model),
        n=SAMPLES,
        sampling=weft.Sampling(max_tokens=LENGTHS.max_tokens),
    )
    costs = CostModel(
        nodes={"rollout.generate": Generation(lengths=LENGTHS, decode_step_s=DECODE_STEP_S)}
    )
    placement = {"rollout": weft.Place(weft.ResourcePool("generating", cpus=REPLICAS), REPLICAS)}
    with (
        tempfile.TemporaryDirectory() as root,
        weft.Driver(
            graph,
            schedule=schedule,
            placement=placement,
            backend=weft.Simulated(costs),
            root=root,
            seed=seed,
            record_every=0,
            progress=False,
            stop_on=(),
        ) as driver,
    ):
        metrics = driver.run()
        calls = [c for c in driver.directory.timeline if c["node"] == "rollout.generate"]
    step_s = np.array([c["end_s"] - c["start_s"] for c in calls])
    left_s = np.array([np.mean([c["end_s"] - one["end_s"] for one in c["by_rank"]]) for c in calls])
    errors = [row["rollout/forecast_error"] for row in metrics if row.get("rollout/forecast_error")]
    return Generated(step_s, left_s / step_s, float(np.mean(errors[-EPOCH_STEPS:] or [np.nan])))
