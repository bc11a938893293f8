"""The old policy: the actor before its update, which the ratios of a loss compare with."""

from __future__ import annotations

from typing import Any

from ..dataflow.column import OLD_LOGPROBS
from .loss import Loss
from .protocols import Policy


def old_logprobs(samples: Any, *, actor: Policy, entropies: bool = False) -> Any:
    """Adds `old_logprobs`: what the actor itself, and not the generator, says of the samples' tokens before their update. To be
    called inside a `@graph` function, where it is a node.

    It costs a forward pass. `PolicyLoss` takes them for a ratio of whole responses and beside a correction that weighs, and
    otherwise with `PolicyLoss(old="old_logprobs")`, as in decoupled PPO (arXiv:2110.00641). `grpo` and `ppo` have this node
    where their loss needs it.

    Args:
        samples: rows with `prompt_ids` and `response_ids`.
        actor: the policy.
        entropies: add `entropies`, too, the entropy of each token's distribution, as a dashboard colours tokens by it.
    """
    if entropies:
        return actor.logprobs(samples, into=str(OLD_LOGPROBS), entropies=True)
    return actor.logprobs(samples, into=str(OLD_LOGPROBS))


def needs_old_logprobs(loss: Loss, *, epochs: int = 1, minibatches: int = 1) -> bool:
    """Whether an update with this loss must be given `old_logprobs`.

    It must where the loss reads them; and where it may, and would otherwise compare with the policy as it stands, if the
    update takes several optimizer steps: after the first of them the policy is no longer the old one.

    >>> from .policy_loss import PolicyLoss
    >>> from .ratios import sequence_ratio
    >>> gspo = PolicyLoss(ratio=sequence_ratio)
    >>> needs_old_logprobs(gspo), needs_old_logprobs(gspo, minibatches=4), needs_old_logprobs(PolicyLoss(), minibatches=4)
    (False, True, False)
    """
    column = str(OLD_LOGPROBS)
    return column in loss.reads or (column in loss.may_read and (epochs, minibatches) != (1, 1))
