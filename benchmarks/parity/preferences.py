"""Weft's preference losses for `parity.py`, against `trl_preferences.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from inputs import PAIRS, Function

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

COMPARED_OTHERWISE = {
    "trl orpo": "TRL's likelihood term is over prompt and response and a mean over the tokens of a microbatch; Weft's is over the "
    "response, a mean over each pair's tokens. The odds ratio is compared",
    "trl rpo": "TRL's likelihood term is a mean over the tokens of a microbatch; compared on one pair at a time, where both means are one",
    "trl kto": "TRL takes the responses to other prompts by turns within a microbatch, Weft within a step; compared on given ones",
}
"""Maps a function to the reason why it is compared only in part, or only on some inputs."""


def pair_loss(value: Loss) -> Function:
    """Divide a loss of rows (all chosen, then all rejected) by its count."""

    def call(x: SimpleNamespace) -> Any:
        cu_seqlens = np.concatenate([[0], np.cumsum(x.lengths.numpy())])
        names = ("mismatched_logprobs", "mismatched_reference_logprobs")
        mismatched = Batch.of(**{name: (getattr(x, name).numpy(), cu_seqlens) for name in names})
        rows = PackedRows.of(
            x.lengths.tolist(),
            group_id=np.tile(np.arange(PAIRS), 2),
            preferred=np.repeat([1, 0], PAIRS),
            reference_logprobs=x.reference_logprobs,
            reference_point=reference_point(mismatched).tensor("reference_point"),
        )
        return value(x.logprobs, rows)[0] / value.count(rows)

    return call


def reward_loss(x: SimpleNamespace, margin: Any = 0.0) -> Any:
    return bradley_terry(x.scores[:PAIRS], x.scores[PAIRS:], margin).mean()


PREFERENCES: dict[str, Function] = {
    "trl dpo": pair_loss(PreferenceLoss()),
    "trl dpo, length-normalised": pair_loss(PreferenceLoss(beta=2, score=LogRatio(per_token=True))),
    "trl cdpo": pair_loss(PreferenceLoss(comparison=Logistic(label_smoothing=0.1))),
    "trl robust dpo": pair_loss(PreferenceLoss(comparison=RobustLogistic(label_smoothing=0.1))),
    "trl ipo": pair_loss(
        PreferenceLoss(beta=1, score=LogRatio(per_token=True), comparison=Squared(tau=0.1))
    ),
    "trl hinge": pair_loss(PreferenceLoss(comparison=Hinge())),
    "trl dpo with likelihood (rpo)": pair_loss(PreferenceLoss(likelihood=1)),
    "trl simpo": pair_loss(PreferenceLoss(beta=2, score=LogLikelihood(per_token=True), margin=1)),
    "trl orpo, odds ratio": pair_loss(PreferenceLoss(beta=1, score=LogOdds(), weight=0.1)),
    "trl kto": pair_loss(DesirabilityLoss(weights=(1.5, 1.0))),
    "trl bradley-terry": reward_loss,
    "trl bradley-terry with margin": lambda x: reward_loss(x, x.margins),
}
"""Maps TRL's function to Weft's."""
