"""Generation of synchronous steps on the simulator: the real driver, schedule and ledger.

Log-normal lengths with a mean of 2,000 tokens, sigma 1 and at most 16,384 tokens. The prompt
explains `PROMPT_SHARE` of the variance of their logarithm. Only generation takes time, and a moved
response takes the prefill of its tokens so far.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from workloads import Workload, prepare
from workloads import reward as score

import weft
from weft.algorithms.grpo import grpo
from weft.controllers.simulation.costs import CostModel, Generation, LogNormal
from weft.dataflow.runs.files import BUFFER, LOG
from weft.dataflow.runs.log import LogReader

PROMPTS, SAMPLES, EPOCH_STEPS, EPOCHS = 256, 8, 8, 3
REPLICAS, SLOTS = 16, 64
PROMPT_SHARE = 0.7
DECODE_STEP_S = ((1, 0.015), (256, 0.025))
PREFILL_S = 1 / 40_000
"""[s] Prefill time per token, of prompts and of moved responses."""
OTHER_SHARES = (0.5, 0.9)
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
    idle_s: np.ndarray
    """[steps] Seconds without work of a replica, mean over replicas."""
    prompt_tokens: np.ndarray
    """[groups] Mean length of the responses of each group, from the second epoch on."""
    longest_s: np.ndarray
    """[steps] Seconds of the longest response if nothing else is in its batch."""
    moved: float
    """Responses that moved, mean over steps."""
    error: float
    """Error of the forecasts in the last epoch."""


def measure() -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="weft-tail-") as root:
        sizes: dict[str, Any] = {"vocabulary": 256, "hidden": 64, "layers": 2, "heads": 2, "mlp": 128}
        prompts = PROMPTS * EPOCH_STEPS
        workload = Workload("tail", num_prompts=prompts, max_tokens=LENGTHS.max_tokens, **sizes)
        folder = prepare(workload, Path(root) / "work")
        steps: dict[str, Any] = {"steps": EPOCHS * EPOCH_STEPS, "prompts_per_step": PROMPTS}
        in_rounds: dict[str, Any] = {**steps, "rounds": EPOCH_STEPS}
        schedules = {
            "in order": InOrder(**steps),
            "longest first": weft.Synchronous(**steps),
            "with migration": weft.Synchronous(**steps, migrate=True),
            "with rounds": weft.Synchronous(**in_rounds),
            "with both": weft.Synchronous(**in_rounds, migrate=True),
        }
        runs = {name: run(schedule, folder) for name, schedule in schedules.items()}
        sampled = run(InOrder(**steps), folder, seed=1)
        others = {
            share: [run(schedules[name], folder, share=share) for name in ("in order", "with both")]
            for share in OTHER_SHARES
        }
    first, later = slice(0, EPOCH_STEPS), slice(EPOCH_STEPS, None)
    for name, each in runs.items():
        seconds, idle_s = each.step_s[later].mean(), each.idle_s[later].mean()
        said = f"{seconds:.1f} s, idle {idle_s:.1f} s, moved {each.moved:.0f}, forecast error {each.error:.2f}"
        print(f"  {name}: {said}; last epoch {each.step_s[-EPOCH_STEPS:].round().tolist()}")
    in_order, longest_first, migration, rounds, both = runs.values()
    idle_change, migration_change = (
        float(each.idle_s[later].mean() / in_order.idle_s[later].mean() - 1)
        for each in (both, migration)
    )
    others |= {PROMPT_SHARE: [in_order, both]}
    by_share = {share: ratio(*(each.step_s[later] for each in own)) for share, own in others.items()}
    return {
        "sync_speedup_256": by_share[PROMPT_SHARE],
        "sync_speedup_by_share": {share: by_share[share] for share in sorted(by_share)},
        "longest_first_speedup_256": ratio(in_order.step_s[later], longest_first.step_s[later]),
        "migration_speedup_256": ratio(in_order.step_s[later], migration.step_s[later]),
        "rounds_speedup_256": ratio(in_order.step_s[later], rounds.step_s[later]),
        "longest_alone_speedup_256": ratio(in_order.step_s[later], both.longest_s[later]),
        "first_epoch_speedup_256": ratio(in_order.step_s[first], longest_first.step_s[first]),
        "tail_idle_change": round(idle_change, 3),
        "migration_idle_change": round(migration_change, 3),
        "length_bias": bias(rounds.prompt_tokens, sampled.prompt_tokens),
    }


def bias(trained: np.ndarray, sampled: np.ndarray) -> list[float]:
    """Return a 95 % interval of the relative difference of two means, from independent groups."""
    mean = sampled.mean()
    error = np.sqrt(trained.var() / len(trained) + sampled.var() / len(sampled))
    low, high = (trained.mean() - mean + sign * 1.96 * error for sign in (-1, 1))
    return [round(float(low / mean), 4), round(float(high / mean), 4)]


def ratio(before: np.ndarray, after: np.ndarray) -> float:
    return round(float(before.mean() / after.mean()), 3)


def run(schedule: Any, folder: Path, *, seed: int = 0, share: float = PROMPT_SHARE) -> Generated:
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
    lengths = LENGTHS.model_copy(update={"prompt_share": share})
    costs = CostModel(
        nodes={
            "rollout.generate": Generation(
                lengths=lengths, decode_step_s=DECODE_STEP_S, prefill_s=PREFILL_S
            )
        }
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
        tokens: dict[int, list[int]] = {}
        longest: dict[int, int] = {}
        for record in LogReader(driver.directory.path / BUFFER / LOG):
            if record["do"] == "publish" and record.get("parents"):
                for parent, own in zip(record["parents"], record["tokens"], strict=True):
                    tokens.setdefault(parent, []).append(own)
                longest[record["lease"]] = max(longest.get(record["lease"], 0), *record["tokens"])
    step_s = np.array([c["end_s"] - c["start_s"] for c in calls])
    busy_s = np.array([np.mean([one["worker_s"] for one in c["by_rank"]]) for c in calls])
    errors = [row["rollout/forecast_error"] for row in metrics if row.get("rollout/forecast_error")]
    of_groups = np.array([np.mean(own) for _, own in sorted(tokens.items())])
    later = of_groups[PROMPTS * EPOCH_STEPS :]
    return Generated(
        step_s,
        step_s - busy_s,
        later,
        longest_s=DECODE_STEP_S[0][1] * np.array([longest[lease] for lease in sorted(longest)]),
        moved=float(np.mean([row.get("rollout/moved_responses") or 0 for row in metrics[1:]])),
        error=float(np.mean(errors[-EPOCH_STEPS:] or [np.nan])),
    )
