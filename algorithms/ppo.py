"""PPO with a critic, as one graph of four models: actor, critic, reference and reward."""

from __future__ import annotations

from typing import Any, Protocol

from ..dataflow.column import OLD_LOGPROBS, REFERENCE_LOGPROBS, RESPONSE_LOGPROBS
from ..dataflow.tracing import graph
from .covariance import with_covariance
from .loss import Loss
from .policy_loss import PolicyLoss, needs_entropies, needs_forward_pass, old_logprobs
from .protocols import Policy, Rewarder, Rollout, Scorer, Trainable
from .rewards import outcome_rewards, token_rewards
from .sampling import Sampling
from .step_corrections import with_step_weights
from .values import LengthAdaptive, ValueLoss, critic_advantages


class _Critic(Trainable, Protocol):
    """A trainable model that predicts future rewards (`workers/critic.py`)."""

    def values(self, batch: Any) -> Any:
        """Add `values`: the predicted future reward at each response token."""
        ...


@graph
def ppo(
    prompts: Any,
    *,
    rollout: Rollout,
    reward: Rewarder,
    actor: Policy,
    critic: _Critic,
    reference: Scorer | None = None,
    n: int = 1,
    sampling: Sampling = Sampling(),
    kl: float | Any = 0.0,
    gamma: float = 1.0,
    lam: float | LengthAdaptive = 0.95,
    value_lam: float | None = None,
    whiten: bool = True,
    loss: Loss = PolicyLoss(),
    value_loss: Loss = ValueLoss(),
    epochs: int = 1,
    minibatches: int = 1,
) -> Any:
    """Proximal policy optimization (arXiv:1707.06347), applied to responses (arXiv:2203.02155).

    A KL penalty keeps the policy close to the reference: in the reward (`kl`, the reward lost per
    nat, or an `AdaptiveKlWorker` that adjusts it) or in the loss (`PolicyLoss(kl=KlPenalty(...))`).
    Critic and actor make `epochs` passes of `minibatches` optimizer steps each. The critic predicts
    the values for generalized advantages (arXiv:1506.02438) before the update.

    If the loss needs the actor's old log-probabilities, the graph computes them, and `kl` uses them
    too.
    """
    samples = rollout.generate(prompts, n=n, sampling=sampling)
    samples = reward.score(samples)
    if reference:
        samples = reference.logprobs(samples, into=str(REFERENCE_LOGPROBS))
    old = str(RESPONSE_LOGPROBS)
    if needs_forward_pass(loss, epochs=epochs, minibatches=minibatches):
        samples = old_logprobs(samples, actor=actor, entropies=needs_entropies(loss))
        old = str(OLD_LOGPROBS)
    if isinstance(kl, float | int):
        # `token_rewards` requires a reference's column; `outcome_rewards` does not.
        samples = token_rewards(samples, coefficient=kl, old=old) if kl else outcome_rewards(samples)
    else:
        # Penalize with the current coefficient before these rows change it.
        samples = kl.update(kl.token_rewards(samples, old=old), old=old)
    samples = critic.values(samples)
    samples = critic_advantages(samples, gamma=gamma, lam=lam, value_lam=value_lam, whiten=whiten)
    samples = with_step_weights(with_covariance(samples, loss=loss), loss=loss)
    samples = critic.update(samples, loss=value_loss, epochs=epochs, minibatches=minibatches)
    return actor.update(samples, loss=loss, epochs=epochs, minibatches=minibatches)
