"""Methods by name: graphs with the arguments that define each method. To add a method, add an entry
to `METHODS`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..dataflow.column import REFERENCE_LOGPROBS
from ..dataflow.errors import UserError, nearest
from ..dataflow.graph import Graph
from ..dataflow.tracing import graph
from .advantages import (
    best_of_group,
    greedy_baseline,
    group_centred,
    leave_one_out,
    length_weighted,
    valid_groups_centred,
)
from .aggregation import FixedLength, sequence_mean
from .covariance import ClipCov, KlCov
from .distillation import distillation
from .grpo import grpo
from .kl import KlPenalty
from .loss import Loss
from .policy_loss import NegativeLogLikelihood, PolicyLoss
from .ppo import ppo
from .preference import bco, dpo, kto, online_dpo
from .preference_loss import LogLikelihood, LogOdds, LogRatio, PreferenceLoss, Squared
from .protocols import Trainable
from .surrogates import Cispo, Clipped, PlainPolicyGradient, Unclipped, sequence_product, sequence_ratio


@graph
def supervised(rows: Any, *, actor: Trainable, loss: Loss = NegativeLogLikelihood()) -> Any:
    """Supervised training on given responses (`prompt_ids`, `response_ids`)."""
    return actor.update(rows, loss=loss)


@dataclass(frozen=True)
class Method:
    graph: Callable[..., Graph]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the graph."""
    learning_rate: float = 1e-6
    """Default for full-parameter training of models with 0.5B to 8B parameters. Tiny models and
    adapters need a higher rate."""
    without: tuple[str, ...] = ()
    """Groups that the graph can take, but does not need."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the worker groups, which are parameters of the graph.

        >>> METHODS["grpo"].groups, METHODS["dpo"].groups, METHODS["simpo"].groups
        (('rollout', 'reward', 'actor'), ('actor', 'reference'), ('actor',))
        >>> METHODS["distillation"].groups, METHODS["distillation"].with_reward().groups
        (('rollout', 'teacher', 'actor'), ('rollout', 'reward', 'teacher', 'actor'))
        """
        parameters = inspect.signature(self.graph).parameters
        known = ("rollout", "reward", "teacher", "actor", "critic")
        needed = [name for name in known if name in parameters and name not in self.without]
        # A reference group is needed only if the loss or a KL penalty reads its log-probabilities.
        reads = () if self._loss is None else self._loss.reads
        compares = str(REFERENCE_LOGPROBS) in reads or bool(self.settings.get("kl"))
        return (*needed, "reference") if compares else tuple(needed)

    @property
    def _loss(self) -> Any:
        return self.settings.get("loss", inspect.signature(self.graph).parameters["loss"].default)

    @property
    def samples(self) -> bool:
        return "rollout" in self.groups

    @property
    def compares(self) -> bool:
        """Whether the method trains on given pairs of responses."""
        return not self.samples and self.graph is dpo

    def with_reward(self) -> Method:
        """Return the method with a reward, if it can do without."""
        return replace(self, without=tuple(name for name in self.without if name != "reward"))

    def with_kl(self, coefficient: float) -> Method:
        """Return the method with a KL penalty. Raises a UserError if this is not a policy-gradient
        method.

        >>> METHODS["rloo"].with_kl(0.04).groups
        ('rollout', 'reward', 'actor', 'reference')
        """
        loss = self._loss
        if not isinstance(loss, PolicyLoss):
            raise UserError(
                f"kl={coefficient}: only policy-gradient methods have a KL penalty; preference methods have "
                "`beta` of their loss instead; set it in a program (explain=True prints one)"
            )
        if self.graph is ppo:  # its penalty is an argument of the graph
            return replace(self, settings={**self.settings, "kl": coefficient})
        with_kl = loss.model_copy(update={"kl": KlPenalty(coefficient=coefficient)})
        return replace(self, settings={**self.settings, "loss": with_kl})


PAIRED = 5e-7

_PLAIN = PolicyLoss(surrogate=PlainPolicyGradient())
_DR_GRPO = PolicyLoss(aggregation=FixedLength(1024))
# Ratios are means over a response, so they stay much closer to 1 than token ratios.
_GSPO = PolicyLoss(
    surrogate=Clipped(low=3e-4, high=4e-4), ratio=sequence_ratio, aggregation=sequence_mean
)
_RLOO = PolicyLoss(ratio=sequence_product, aggregation=sequence_mean)
_IPO = PreferenceLoss(beta=1, score=LogRatio(per_token=True), comparison=Squared(tau=0.1))
_SIMPO = PreferenceLoss(beta=2, score=LogLikelihood(per_token=True), margin=1)
_CPO = PreferenceLoss(score=LogLikelihood(), likelihood=1)
_ORPO = PreferenceLoss(beta=1, score=LogOdds(), weight=0.1, likelihood=1)

METHODS: Mapping[str, Method] = {
    "grpo": Method(grpo),
    "dr_grpo": Method(grpo, {"advantages": group_centred, "loss": _DR_GRPO}),
    "dapo": Method(grpo, {"loss": PolicyLoss(surrogate=Clipped(high=0.28))}),
    "gspo": Method(grpo, {"loss": _GSPO}),
    "cispo": Method(grpo, {"loss": PolicyLoss(surrogate=Cispo(high=4.0))}),
    "clip_cov": Method(grpo, {"loss": PolicyLoss(covariance=ClipCov())}),
    "kl_cov": Method(grpo, {"loss": PolicyLoss(covariance=KlCov(), surrogate=Unclipped())}),
    "rloo": Method(grpo, {"advantages": leave_one_out, "loss": _RLOO}),
    "remax": Method(grpo, {"advantages": greedy_baseline, "loss": _PLAIN}),
    "opo": Method(grpo, {"advantages": length_weighted, "loss": _PLAIN}),
    "gpg": Method(grpo, {"advantages": valid_groups_centred, "loss": _PLAIN}),
    "pass_at_k": Method(grpo, {"advantages": best_of_group}),
    "ppo": Method(ppo),
    "distillation": Method(distillation, without=("reward",)),
    "online_dpo": Method(online_dpo, learning_rate=PAIRED),
    "dpo": Method(dpo, learning_rate=PAIRED),
    "rpo": Method(dpo, {"loss": PreferenceLoss(likelihood=1)}, PAIRED),
    "ipo": Method(dpo, {"loss": _IPO}, PAIRED),
    "simpo": Method(dpo, {"loss": _SIMPO}, PAIRED),
    "cpo": Method(dpo, {"loss": _CPO}, PAIRED),
    "orpo": Method(dpo, {"loss": _ORPO}, PAIRED),
    "kto": Method(kto, learning_rate=PAIRED),
    "bco": Method(bco, learning_rate=PAIRED),
    "sft": Method(supervised, learning_rate=1e-5),
}
"""Methods by name. For the papers, see docs/algorithms.md and docs/preferences.md."""


def method_of(name: str) -> Method:
    """Return the method with this name. The UserError for an unknown name suggests the closest one.

    >>> method_of("grop")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: method='grop'; did you mean 'grpo'?
    """
    if name not in METHODS:
        known = nearest(name, METHODS) or f"; there are {', '.join(METHODS)}"
        raise UserError(f"method={name!r}{known}")
    return METHODS[name]
