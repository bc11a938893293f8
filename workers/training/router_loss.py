"""The loss that balances the routers of a mixture of experts, and the sums over passes that it and the metrics of routers are made of.

It is E * sum over experts e of f_e * P_e (arXiv:2101.03961, equations 4 to 6). f_e (times that a token is sent to e) and P_e (its
probability) are means over all tokens that the model reads of all rows of a step, on all ranks, and over all layers, as in
`load_balancing_loss_func` of `transformers`. With f known, the loss is a sum over tokens; so f comes first: from the routes that are
replayed, or from a pass without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...dataflow.errors import UserError
from ...dataflow.metrics import Max, Mean, Metric, Metrics


@dataclass(frozen=True)
class Balance:
    """The gradient of a loss that is linear in the probabilities of routers: coefficient * scale * sum over tokens, layers and experts e of
    count * frequencies[e] * probability[e]."""

    coefficient: float
    frequencies: Tensor
    """[experts] float64: times that a token, in the mean over tokens and layers, is sent to each."""
    scale: float = 1.0
    added: set[int] = field(default_factory=set)
    """Routers to whose passes it was added."""
    reached: set[int] = field(default_factory=set)
    """Those of them that a backward pass has reached."""

    @classmethod
    def of(cls, coefficient: float, loads: Tensor, *, chosen: int, weight: float) -> Balance:
        """That of the loss of a step.

        Args:
            coefficient: of the loss.
            loads: [experts] float64, on the device of the model: tokens that are sent to each in the step, over all layers and ranks.
            chosen: experts of a token.
            weight: of the loss in the gradient that a backward pass makes, which is divided by it afterwards.

        >>> Balance.of(0.5, torch.tensor([3.0, 1.0]), chosen=1, weight=8.0)
        Balance(coefficient=0.5, frequencies=tensor([0.7500, 0.2500]), scale=4.0, added=set(), reached=set())
        """
        tokens = loads.sum() / chosen
        return cls(coefficient, loads / tokens, weight * len(loads) / tokens.item())

    def check_reached(self, model: str) -> None:
        """Check, after the backward passes of a step, that they reached what it was added to.

        Raises:
            UserError: they did not.
        """
        if self.reached != self.added:
            raise UserError(
                f"router_loss={self.coefficient:g}: the gradient of this loss does not reach all routers of model {model!r}; leave it out"
            )


class Tally:
    """What routers did in some passes. All sums are over tokens, each as often as rows have it.

    Args:
        routers: number of them.
        have_logits: whether the logits of all of them are known.
    """

    def __init__(self, routers: int, experts: int, device: torch.device, *, have_logits: bool) -> None:
        make = partial(torch.zeros, dtype=torch.float64, device=device)
        self.loads = make(routers, experts)
        """[routers, experts]: tokens that were sent to each."""
        self.probabilities = make(experts)
        """[experts], over all routers."""
        self.entropy = make(1)
        """Of these probabilities, in nats, over all routers."""
        self.tokens = make(1)
        """Over all routers."""
        self.moved = make(1)
        """Tokens, over all routers, for which other experts were taken than the router would have chosen."""
        self._have_logits = have_logits

    def add_taken(self, router: int, taken: Tensor, counts: Tensor) -> None:
        """The experts of N tokens.

        Args:
            router: its number.
            taken: [N, chosen] experts.
            counts: [N] float32: how many rows have each token.
        """
        counts = counts.to(self.loads)
        self.loads[router].index_add_(0, taken.flatten(), counts.repeat_interleave(taken.shape[-1]))
        self.tokens += counts.sum()

    def add_moved(self, taken: Tensor, own: Tensor, counts: Tensor) -> None:
        """Experts that a router was told to take.

        Args:
            taken, own: [N, chosen] experts, and those that the router would have chosen.
            counts: [N] float32.
        """
        counts = counts.to(self.moved)
        self.moved += counts @ (own.sort(-1).values != taken.sort(-1).values).any(-1).to(counts)

    @torch.no_grad()
    def add_logits(self, logits: Tensor, counts: Tensor) -> None:
        """What a router says of the experts.

        Args:
            logits: [..., experts] of N tokens.
            counts: [N] float32.
        """
        logprobs = logits.float().log_softmax(-1).flatten(0, -2)
        self.probabilities += counts.to(self.loads) @ logprobs.exp().to(self.loads)
        self.entropy -= counts @ (logprobs.exp() * logprobs).sum(-1)

    def add_up(self, over_ranks: Callable[[Tensor], None]) -> None:
        """Take the sums over ranks.

        Args:
            over_ranks: adds up a tensor [n] in place, by all ranks together.
        """
        sums = (self.loads, self.probabilities, self.entropy, self.tokens, self.moved)
        together = torch.cat([one.flatten() for one in sums])
        over_ranks(together)
        for own, found in zip(sums, together.split([one.numel() for one in sums]), strict=True):
            own.copy_(found.view_as(own))

    def metrics(self, *, replayed: bool) -> Metrics:
        """What they did, as metrics; none where they had no token.

        Args:
            replayed: whether they were told which experts to take.
        """
        tokens = self.tokens.item()
        if not tokens:
            return {}
        loads = self.loads.amax(1) / self.loads.mean(1)
        metrics: dict[str, Metric] = {
            "expert_load": Mean(float(loads.mean()) * tokens, tokens),
            "max_expert_load": Max(float(loads.max())),
        }
        if replayed:
            metrics["moved_routes"] = Mean(self.moved.item(), tokens)
        if self._have_logits:
            metrics["router_entropy"] = Mean(self.entropy.item(), tokens)
            balance = len(self.probabilities) * float(self.loads.sum(0) @ self.probabilities) / tokens
            metrics["router_loss"] = Mean(balance, tokens)
        return metrics


def with_balance(carrier: Tensor, logits: Tensor, counts: Tensor, balance: Balance, router: int) -> Tensor:
    """A tensor whose backward pass also gives logits the gradient of a balance.

    Args:
        carrier: it; of any shape.
        logits: [..., experts] of N tokens.
        counts: [N] float32.
        router: its number.
    """
    balance.added.add(router)
    return _Balanced.apply(carrier, logits, counts, balance, router)  # pyright: ignore[reportReturnType]


class _Balanced(torch.autograd.Function):
    """Passes a tensor on, and adds the gradient of a `Balance` to that of logits."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, logits: Tensor, counts: Tensor, balance: Balance, router: int) -> Tensor:
        ctx.save_for_backward(logits, counts)
        ctx.balance, ctx.router = balance, router
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, counts = ctx.saved_tensors
        ctx.balance.reached.add(ctx.router)
        return gradients[0], balance_gradient(logits, counts, ctx.balance), None, None, None


def balance_gradient(logits: Tensor, counts: Tensor, balance: Balance) -> Tensor:
    """[..., experts]: the gradient of a `Balance` with respect to logits, p_j (f_j - sum_e f_e p_e), times its factors and counts [N]."""
    own = logits if logits.dtype == torch.float64 else logits.float()
    probabilities = own.softmax(-1)
    frequencies = balance.frequencies.to(own)
    centred = frequencies - (probabilities @ frequencies)[..., None]
    weights = (balance.coefficient * balance.scale * counts).to(own).view(*logits.shape[:-1], 1)
    return (weights * probabilities * centred).to(logits.dtype)
