"""Parity with TRL and verl: values and gradients of functions on the same random inputs.

    python benchmarks/parity/parity.py [--seeds 3]

The peers' own functions run in their environment (`peers.py`, `make bench-peers`), in float32 on
padded rows with some masked tokens. Weft gets the same rows packed. Differences are absolute: the
largest over all entries of value and gradients, and over seeds.

The table explains differences that are on purpose, which do not count. The last line printed is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from inputs import BOUNDS, MAX_TOKENS, Function, alone, among_several, draw, draw_pairs, evaluate
from machine import PEERS
from preferences import COMPARED_OTHERWISE, PREFERENCES

from weft.algorithms import advantages as estimators
from weft.algorithms.aggregation import Aggregation, FixedLength, sequence_mean, token_mean
from weft.algorithms.corrections import Correction, Level, Rejection, TruncatedImportance
from weft.algorithms.kl import (
    AdaptiveCoefficient,
    KlPenalty,
    StraightThrough,
    absolute,
    full_kl,
    k1,
    k2,
    k3,
)
from weft.algorithms.loss import Loss, PackedRows
from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.algorithms.rewards import overlong_penalty, penalized_token_rewards
from weft.algorithms.surrogates import (
    Cispo,
    Clipped,
    PlainPolicyGradient,
    Sapo,
    sequence_product,
    sequence_ratio,
)
from weft.algorithms.values import ValueLoss, discounted_returns, generalized_advantages, whitened

ON_PURPOSE = {
    "verl gpg advantages, rewards of 0 and 1": "verl counts the rows of reward 0; the paper, and Weft, those of groups with equal rewards",
    **{
        f"verl {name}, groups of one row": "verl gives such a row its reward as advantage; in Weft it has none, having no baseline, and "
        "so it is in verl's own rloo_vectorized, which agrees"
        for name in (
            "grpo",
            "grpo_vectorized",
            "rloo",
            "opo",
            "reinforce_plus_plus_baseline",
            "gpg advantages",
        )
    },
    "verl grpo_passk, divided by the deviation": "verl divides by the group's deviation unless it is told not to; the paper, and Weft, "
    "take the lead itself",
    **{
        f"verl rejection {name}, the same bounds": "verl's bounds are of generator / trainer; Weft's, as those of IcePop and of verl's own "
        "weights, of trainer / generator: verl's [low, high] is Weft's [1 / high, 1 / low], which agrees"
        for name in ("token_k1", "seq_sum_k1", "seq_mean_k1")
    },
    "verl kl_penalty k3, far from the reference": "verl cuts the value off at 10, and with it the gradient; Weft at d = -20",
    "trl grpo, a row without a trained token": "TRL counts it in the mean over rows; Weft, and verl, do not",
}
"""Maps a function with a different definition to the reason."""


def packed(x: SimpleNamespace, *names: str, **renamed: str) -> tuple[PackedRows, torch.Tensor]:
    """Pack the rows, with these inputs as columns (COLUMN=INPUT to rename)."""
    real = torch.arange(MAX_TOKENS) < x.lengths[:, None]
    columns = {name: getattr(x, name) for name in names} | {
        k: getattr(x, name) for k, name in renamed.items()
    }
    columns = {
        name: (column[:, None].expand_as(real) if column.ndim == 1 else column)[real]
        for name, column in columns.items()
    }
    return PackedRows.of(x.lengths, response_mask=x.mask[real], **columns), real


def padded(values_T: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return torch.zeros(real.shape).masked_scatter(real, values_T)


def token_function(function: Callable[..., torch.Tensor], *names: str) -> Function:
    """Wrap a function of packed tokens and rows for padded rows."""

    def call(x: SimpleNamespace) -> Any:
        rows, real = packed(x, *names)
        return padded(function(*(rows[name] for name in names), rows), real)

    return call


def estimator(function: Callable[..., Any], *, whiten: bool = False) -> Function:
    """Wrap an advantage estimator; each trained token gets the advantage."""

    def call(x: SimpleNamespace) -> Any:
        outcomes = estimators.Outcomes.of(
            x.rewards, x.groups, x.mask.sum(1), baseline_reward=x.baselines
        )
        rows, real = packed(x)
        advantages = rows.per_token(function(outcomes))
        return padded(whitened(advantages, rows) if whiten else advantages, real)

    return call


def loss(value: Loss, advantages: str = "advantages", prediction: str = "logprobs") -> Function:
    """Divide a loss by its count."""

    def call(x: SimpleNamespace) -> Any:
        rows, real = packed(
            x,
            "values",
            "returns",
            "entropy",
            advantages=advantages,
            old_logprobs="old",
            response_logprobs="reference",
            reference_logprobs="reference",
        )
        total, _ = value(getattr(x, prediction)[real], rows)
        return total / value.count(rows)

    return call


def policy_loss(**settings: Any) -> PolicyLoss:
    return PolicyLoss(old="old_logprobs", **settings)


def likelihood(aggregation: Aggregation) -> Function:
    return loss(NegativeLogLikelihood(aggregation=aggregation))


def kl(function: Callable[..., torch.Tensor]) -> Function:
    return token_function(lambda p, q, _: function(p, q), "logprobs", "reference")


def correction(value: Correction) -> Function:
    def weights(old: torch.Tensor, generator: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        return value(torch.where(rows.trained > 0, old - generator, 0.0), rows)[0]

    return token_function(weights, "old", "reference")


def gae(index: int, *, whiten: bool) -> Function:
    def call(token_rewards: torch.Tensor, values: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        made = generalized_advantages(token_rewards, values, rows, gamma=0.99, lam=0.95)[index]
        return whitened(made, rows) if whiten else made

    return token_function(call, "token_rewards", "values")


def reinforce_plus_plus(token_rewards: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    return whitened(discounted_returns(token_rewards, rows, gamma=0.99), rows)


def kl_in_the_reward(x: SimpleNamespace) -> Any:
    rows, real = packed(x, "old", "reference")
    return padded(
        penalized_token_rewards(x.rewards, k1(rows["old"], rows["reference"]), rows, 0.1), real
    )


def adaptive(x: SimpleNamespace) -> Any:
    coefficient, values = AdaptiveCoefficient(value=0.2, target=6.0, horizon=10_000), []
    for observed in (8.0, 6.1, 2.0, 5.9):
        coefficient = coefficient.updated(observed, 256)
        values.append(coefficient.value)
    return torch.tensor(values)


def exact_kl(x: SimpleNamespace) -> Any:
    return full_kl(x.logits[x.mask > 0], x.reference_logits[x.mask > 0]).mean()


def right_or_wrong(x: SimpleNamespace) -> Any:
    x.rewards = (x.rewards > 0).float()
    return among_several(estimator(estimators.valid_groups_centred))(x)


def far(x: SimpleNamespace) -> Any:
    x.reference = x.reference + 4
    return kl(k3)(x)


def of_rows(**settings: Any) -> Function:
    """Return a policy loss with TRL's bounds, and one advantage per row as in TRL."""
    return loss(policy_loss(**{"surrogate": Clipped(high=0.28)} | settings), "row_advantages")


def masked_row(x: SimpleNamespace) -> Any:
    x.mask[0] = 0
    return of_rows(aggregation=sequence_mean)(x)


GSPO = {"surrogate": Clipped(low=0.05, high=0.08), "ratio": sequence_ratio, "aggregation": sequence_mean}

GROUPED: dict[str, Function] = {
    "verl grpo": estimator(estimators.group_normalized),
    "verl grpo_vectorized": estimator(estimators.group_normalized),
    "verl rloo": estimator(estimators.leave_one_out),
    "verl opo": estimator(estimators.length_weighted),
    "verl reinforce_plus_plus_baseline": estimator(estimators.group_centred, whiten=True),
    "verl gpg advantages": estimator(estimators.valid_groups_centred),
}
"""Advantages whose definitions differ for single-row groups."""

LEVELS: dict[str, Level] = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
"""Maps verl's rejection rule to the level of the ratio that it bounds."""
LOW, HIGH = BOUNDS

WEFT: dict[str, Function] = {
    **{name: among_several(function) for name, function in GROUPED.items()},
    **{f"{name}, groups of one row": alone(function) for name, function in GROUPED.items()},
    "verl grpo without deviation": among_several(estimator(estimators.group_centred)),
    "verl rloo_vectorized": estimator(estimators.leave_one_out),
    "verl grpo_passk": among_several(estimator(estimators.best_of_group)),
    "verl grpo_passk, divided by the deviation": among_several(estimator(estimators.best_of_group)),
    **{
        f"verl rejection {rule}": correction(Rejection(keep=(1 / HIGH, 1 / LOW), level=level))
        for rule, level in LEVELS.items()
    },
    **{
        f"verl rejection {rule}, the same bounds": correction(Rejection(keep=(LOW, HIGH), level=level))
        for rule, level in LEVELS.items()
    },
    "verl gae, advantages": gae(0, whiten=True),
    "verl gae, returns": gae(1, whiten=False),
    "verl reinforce_plus_plus": token_function(reinforce_plus_plus, "token_rewards"),
    "verl remax": estimator(estimators.greedy_baseline),
    "verl masked_whiten": token_function(whitened, "advantages"),
    "verl masked_whiten without shift": token_function(partial(whitened, shift=False), "advantages"),
    "verl compute_rewards": kl_in_the_reward,
    "verl AdaptiveKLController": adaptive,
    "verl vanilla": loss(policy_loss()),
    "verl vanilla, clip-higher": loss(policy_loss(surrogate=Clipped(high=0.28))),
    "verl vanilla, dual clip": loss(policy_loss(surrogate=Clipped(dual=1.5))),
    "verl vanilla, sequence mean": loss(policy_loss(aggregation=sequence_mean)),
    "verl vanilla, corrected": loss(policy_loss(correction=TruncatedImportance(cap=1.2))),
    "verl gspo": loss(policy_loss(**GSPO), "row_advantages"),
    "verl sapo": loss(policy_loss(surrogate=Sapo(), aggregation=sequence_mean)),
    "verl cispo": loss(policy_loss(surrogate=Cispo(low=0.2, high=0.28))),
    "verl gpg": loss(policy_loss(surrogate=PlainPolicyGradient())),
    "verl reinforce": loss(policy_loss(surrogate=PlainPolicyGradient())),
    "verl agg_loss token-mean": likelihood(token_mean),
    "verl agg_loss seq-mean-token-mean": likelihood(sequence_mean),
    "verl agg_loss seq-mean-token-sum-norm": likelihood(FixedLength(MAX_TOKENS)),
    "verl kl_penalty k1": kl(k1),
    "verl kl_penalty abs": kl(absolute),
    "verl kl_penalty k2": kl(k2),
    "verl kl_penalty k3": kl(k3),
    "verl kl_penalty k1+": kl(StraightThrough(k1)),
    "verl kl_penalty abs+": kl(StraightThrough(absolute)),
    "verl kl_penalty k3+": kl(StraightThrough(k3)),
    "verl value loss": loss(ValueLoss(clip=0.2), prediction="new_values"),
    "verl value loss, sequence mean": loss(
        ValueLoss(clip=0.2, aggregation=sequence_mean), prediction="new_values"
    ),
    "verl correction weights token": correction(TruncatedImportance(cap=1.5)),
    "verl correction weights sequence": correction(TruncatedImportance(cap=1.5, level="sequence")),
    "verl gpg advantages, rewards of 0 and 1": right_or_wrong,
    "verl kl_penalty k3, far from the reference": far,
    "trl grpo": of_rows(aggregation=sequence_mean),
    "trl bnpo": of_rows(),
    "trl dapo": of_rows(),
    "trl dr_grpo": of_rows(aggregation=FixedLength(MAX_TOKENS)),
    "trl cispo": of_rows(surrogate=Cispo(high=0.2)),
    "trl sapo": of_rows(surrogate=Sapo(), aggregation=sequence_mean),
    "trl luspo": of_rows(ratio=sequence_ratio, aggregation=FixedLength(1)),
    "trl grpo, sequence level": of_rows(**GSPO),
    "trl grpo, two-sided": of_rows(surrogate=Clipped(high=0.28, dual=1.5), aggregation=sequence_mean),
    "trl grpo, kl": of_rows(aggregation=sequence_mean, kl=KlPenalty(coefficient=0.04)),
    "trl bnpo, entropy bonus": of_rows(entropy_coefficient=0.01),
    "trl rloo": of_rows(ratio=sequence_product, aggregation=sequence_mean),
    "trl soft overlong punishment": lambda x: overlong_penalty(
        x.lengths, max_tokens=40, buffer_tokens=16
    ),
    "trl gkd, reverse": exact_kl,
    "trl grpo, a row without a trained token": masked_row,
}
"""Maps the peer's function to Weft's."""


def outputs_of_peers(seed: int) -> dict[str, np.ndarray]:
    """Return the outputs of the peers, or exit if they are missing or fail."""
    if not PEERS.exists():
        sys.exit("the peers are not installed: `make bench-peers` makes .venv-peers")
    with tempfile.TemporaryDirectory(prefix="weft-parity-") as folder:
        made = Path(folder) / "outputs.npz"
        command = [str(PEERS), str(Path(__file__).with_name("peers.py")), str(seed), str(made)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"peers.py failed:\n{done.stderr[-4000:]}")
        with np.load(made) as outputs:
            return dict(outputs)


def differences(seed: int) -> dict[str, dict[str, float]]:
    """Return a mapping from function and value or leaf to the largest absolute difference."""
    ours, theirs = (
        evaluate(WEFT, draw(seed)) | evaluate(PREFERENCES, draw_pairs(seed)),
        outputs_of_peers(seed),
    )
    if ours.keys() != theirs.keys():
        sys.exit(f"not in both: {sorted(ours.keys() ^ theirs.keys())}")
    found: dict[str, dict[str, float]] = {name: {} for name in WEFT | PREFERENCES}
    for key, expected in theirs.items():
        name, part = key.rsplit("/", 1)
        if not np.isfinite(expected).all() or expected.shape != ours[key].shape:
            sys.exit(f"{key}: {ours[key].shape} here and {expected.shape} there, or not finite")
        found[name][part] = float(np.abs(ours[key] - expected).max())
    return found


def run(seeds: int) -> dict[str, Any]:
    largest: dict[str, dict[str, float]] = {name: {} for name in WEFT | PREFERENCES}
    for seed in range(seeds):
        for name, parts in differences(seed).items():
            largest[name] |= {
                part: max(value, largest[name].get(part, 0.0)) for part, value in parts.items()
            }
    for name, parts in largest.items():
        shown = ", ".join(f"{part} {value:.1e}" for part, value in parts.items())
        print(
            f"  {name:44} {shown}{'  on purpose: ' + ON_PURPOSE[name] if name in ON_PURPOSE else ''}",
            flush=True,
        )
    reasons = ON_PURPOSE | COMPARED_OTHERWISE
    return {
        **agreement(
            {name: parts for name, parts in largest.items() if name in WEFT and name not in ON_PURPOSE}
        ),
        "preferences": agreement(
            {name: parts for name, parts in largest.items() if name in PREFERENCES}
        ),
        "on_purpose": [f"{name}: {why}" for name, why in reasons.items()],
    }


def agreement(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Summarize: `functions` counts the peers' functions, `cases` each setting of a function."""
    gradients = [value for parts in found.values() for part, value in parts.items() if part != "value"]
    return {
        "functions": len({name.split(",")[0] for name in found}),
        "cases": len(found),
        "cases_with_gradients": sum(len(parts) > 1 for parts in found.values()),
        "largest_difference": max(max(parts.values()) for parts in found.values()),
        "largest_gradient_difference": max(gradients),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of random inputs")
    print(json.dumps(run(parser.parse_args().seeds)))
