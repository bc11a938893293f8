"""Weft's preference losses beside TRL's own: values and gradients on random pairs.

    python benchmarks/parity/preference_parity.py          # `make bench-peers` first

It prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from peer_process import outputs_of

from weft.algorithms.loss import Loss, PackedRows
from weft.algorithms.preference import reference_point
from weft.algorithms.preference_loss import (
    DesirabilityLoss,
    Hinge,
    Logistic,
    LogLikelihood,
    LogOdds,
    LogRatio,
    PreferenceLoss,
    RobustLogistic,
    Squared,
    bradley_terry,
)
from weft.dataflow.batch import Batch

LOSSES: dict[str, Loss] = {
    "dpo": PreferenceLoss(),
    "dpo, length-normalised": PreferenceLoss(beta=2, score=LogRatio(per_token=True)),
    "cdpo": PreferenceLoss(comparison=Logistic(label_smoothing=0.1)),
    "robust dpo": PreferenceLoss(comparison=RobustLogistic(label_smoothing=0.1)),
    "ipo": PreferenceLoss(beta=1, score=LogRatio(per_token=True), comparison=Squared(tau=0.1)),
    "hinge": PreferenceLoss(comparison=Hinge()),
    "dpo with likelihood (rpo)": PreferenceLoss(likelihood=1),
    "simpo": PreferenceLoss(beta=2, score=LogLikelihood(per_token=True), margin=1),
    "orpo, odds ratio": PreferenceLoss(beta=1, score=LogOdds(), weight=0.1),
    "kto": DesirabilityLoss(desirable_weight=1.5),
}
ON_PURPOSE = {
    "orpo": "TRL's likelihood term is over prompt and response and a mean over the tokens of a microbatch; Weft's is over the response, "
    "a mean over each pair's tokens. The odds ratio is compared",
    "rpo": "the same of TRL's likelihood term; compared on one pair at a time, where both means are one",
    "kto, divergence": "TRL takes the responses to other prompts by turns within a microbatch, Weft within a step; compared on given ones",
}
"""Function whose definition differs -> why."""


def random_inputs(seed: int, number: int = 64) -> dict[str, np.ndarray]:
    """Pairs: first all chosen rows, then all rejected ones."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 2 * number)
    tokens = int(lengths.sum())

    def near(values: np.ndarray) -> np.ndarray:
        return (values + 0.3 * rng.normal(size=len(values))).astype(np.float32)

    logprobs = -rng.exponential(1.5, tokens).astype(np.float32) - np.float32(0.01)
    others = -rng.exponential(1.5, tokens).astype(np.float32)
    return {
        "lengths": lengths,
        "logprobs": logprobs,
        "reference_logprobs": near(logprobs),
        "mismatched_logprobs": others,
        "mismatched_reference_logprobs": near(others) - np.float32(0.02),
        "rewards": rng.normal(size=2 * number).astype(np.float32),
        "margins": rng.random(number).astype(np.float32),
    }


def of_weft(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `trl_preferences.py` computes, under the same names."""
    lengths, number = given["lengths"], len(given["lengths"]) // 2
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    names = ("mismatched_logprobs", "mismatched_reference_logprobs")
    point = reference_point(Batch.of(**{name: (given[name], cu_seqlens) for name in names})).numpy("reference_point")
    rows = PackedRows.of(
        lengths.tolist(),
        group_id=np.tile(np.arange(number), 2),
        preferred=np.repeat([1, 0], number),
        reference_logprobs=given["reference_logprobs"],
        reference_point=torch.tensor(point),
    )
    found: dict[str, np.ndarray] = {}
    for name, loss in LOSSES.items():
        logprobs = torch.tensor(given["logprobs"], requires_grad=True)
        value = loss(logprobs, rows)[0] / loss.count(rows)
        keep(found, name, value, logprobs)
    for name, margin in (("bradley-terry", 0.0), ("bradley-terry with margin", torch.tensor(given["margins"]))):
        rewards = torch.tensor(given["rewards"], requires_grad=True)
        keep(found, name, bradley_terry(rewards[:number], rewards[number:], margin).mean(), rewards)
    return found


def keep(found: dict[str, np.ndarray], name: str, value: torch.Tensor, wanted: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(value, wanted)
    found[f"{name}/value"], found[f"{name}/gradient"] = value.detach().numpy(), gradient.numpy()


def compare(seed: int) -> dict[str, dict[str, float]]:
    """Function -> its value, and the largest differences from TRL's."""
    given = random_inputs(seed)
    mine, theirs = of_weft(given), outputs_of("trl_preferences.py", given)
    assert mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())
    rows: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(key.rpartition("/")[0] for key in mine):
        value, gradient = (
            float(np.abs(mine[f"{name}/{k}"] - theirs[f"{name}/{k}"]).max()) for k in ("value", "gradient")
        )
        norm = float(np.linalg.norm(theirs[f"{name}/gradient"]))
        rows[name] = {"of": float(mine[f"{name}/value"]), "value": value, "gradient": gradient, "gradient_norm": norm}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    arguments = parser.parse_args()
    rows = compare(arguments.seed)
    print(f"{'function':28}{'value':>12}{'difference':>14}{'of gradients':>14}{'gradient norm':>15}")
    for name, row in rows.items():
        print(f"{name:28}{row['of']:12.6f}{row['value']:14.1e}{row['gradient']:14.1e}{row['gradient_norm']:15.4f}")
    for name, why in ON_PURPOSE.items():
        print(f"{name}: {why}")
    largest = max(max(row["value"], row["gradient"]) for row in rows.values())
    print(json.dumps({"functions": len(rows), "largest_difference": largest, "on_purpose": list(ON_PURPOSE)}))


if __name__ == "__main__":
    main()
