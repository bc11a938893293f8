"""Routers of a mixture of experts: where a model chooses the experts of each token, what it chose, and a choice that is made for it.

The routers of `transformers` compute scores, and `torch.topk` chooses among them. That call alone is answered differently: with the
experts that a generator took ("router replay", arXiv:2510.11370) and the model's own scores of these, so that weights and gradients
follow as from a choice of its own. No family is listed: `find_routers` watches a pass, and `agreement.py` tries whether experts follow the
answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...dataflow.errors import UserError
from ...dataflow.metrics import Max, Mean, Metric, Metrics
from ..models.model_folder import num_experts

# Router loss
#
# The loss that balances the routers of a mixture of experts, and the sums over passes that it and
# the metrics of routers are made of.
#
# It is E * sum over experts e of f_e * P_e (arXiv:2101.03961, equations 4 to 6). f_e (times that a
# token is sent to e) and P_e (its probability) are means over all tokens that the model reads of
# all rows of a step, on all ranks, and over all layers, as in `load_balancing_loss_func` of
# `transformers`. With f known, the loss is a sum over tokens; so f comes first: from the routes
# that are replayed, or from a pass without gradients.


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


def with_balance(
    carrier: Tensor, logits: Tensor, counts: Tensor, balance: Balance, router: int
) -> Tensor:
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
    def forward(
        ctx: Any, carrier: Tensor, logits: Tensor, counts: Tensor, balance: Balance, router: int
    ) -> Tensor:
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


_TOPK = (torch.topk, torch.Tensor.topk)
_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Router:
    """A module in whose forward pass the experts of a layer are chosen."""

    module: str
    """Its name in the model."""
    layer: int
    call: int
    """Which of its calls of `torch.topk` on a score for each expert it is; those before it choose groups of experts."""
    chosen: int
    """Experts of a token."""
    logits: int | None
    """Which of the module's outputs `transformers` declares to be the logits of all experts; None: it declares none."""


@dataclass(frozen=True)
class Routing:
    """What the routers of a pass are told of its N tokens."""

    counts: Tensor
    """[N] float32: how many rows have the token; 0 for one that only fills up."""
    routes: Tensor | None = None
    """[N, layers, chosen] integers: the experts to take; None: the routers choose."""

    def spread(self, slots: Tensor, places: int) -> Routing:
        """The same for tokens that stand at `slots` ([N]) of so many places; nobody reads the others."""
        counts = self.counts.new_zeros(places).index_put((slots,), self.counts)
        routes = None
        if self.routes is not None:
            routes = _any_experts(self.routes, places)
            routes[slots] = self.routes
        return Routing(counts, routes)

    def shard(self, share: Callable[[Tensor], Tensor], missing: int) -> Routing:
        """A rank's part, where ranks share tokens.

        Args:
            share: gives it of [N + missing, ...].
            missing: tokens that fill up.
        """
        routes = self.routes
        if routes is not None:
            routes = share(torch.cat([routes, _any_experts(routes, missing)]))
        return Routing(share(F.pad(self.counts, (0, missing))), routes)


def _any_experts(like: Tensor, tokens: int) -> Tensor:
    """[tokens, layers, chosen] different experts."""
    _, layers, chosen = like.shape
    return torch.arange(chosen, dtype=like.dtype, device=like.device).repeat(tokens, layers, 1)


class Routers:
    """The routers of a model, told before each pass what to do in it, and in its backward pass, which may compute layers again.

    Args:
        causal_lm: the forward methods of its routers are replaced.
        routers: what `find_routers` found.
    """

    def __init__(self, causal_lm: Any, routers: tuple[Router, ...]) -> None:
        settings = causal_lm.config.get_text_config()
        self.routers = routers
        self.layers = int(settings.num_hidden_layers)
        """Of the model, with and without routers."""
        self.chosen = routers[0].chosen
        self.experts = num_experts(settings) or 0
        self.tally: Tally | None = None
        """To which the next passes are added; None: to none."""
        self.balance: Balance | None = None
        """Whose gradient is added to those of the next passes."""
        self.taken: list[Tensor | None] | None = None
        """[tokens, chosen] of each layer of the last pass; filled if it is a list."""
        self._routing: Routing | None = None
        self._seen: set[int] = set()
        self._modules: list[Any] = [causal_lm.get_submodule(router.module) for router in routers]
        for number, (router, module) in enumerate(zip(routers, self._modules, strict=True)):
            module.forward = partial(self._route, number, router, module.forward)

    def remove(self) -> None:
        """Give the routers their own forward methods back."""
        for module in self._modules:
            del module.forward

    @property
    def have_logits(self) -> bool:
        """Whether the logits of all routers are known."""
        return all(router.logits is not None for router in self.routers)

    def begin(self, routing: Routing | None) -> None:
        """A pass begins, of tokens of which the routers are told this."""
        self._routing = routing
        self._seen.clear()
        if self.taken is not None:
            self.taken = [None for _ in range(self.layers)]

    @contextmanager
    def watched(self, device: torch.device, balance: Balance | None = None) -> Iterator[Tally]:
        """Tally passes, and add the gradient of a balance to theirs."""
        tally = Tally(len(self.routers), self.experts, device, have_logits=self.have_logits)
        self.tally, self.balance = tally, balance
        try:
            yield tally
        finally:
            self.tally = self.balance = None

    @contextmanager
    def recorded(self) -> Iterator[Routers]:
        """Keep what the next pass takes, for `routes`."""
        self.taken = []
        self.begin(None)
        try:
            yield self
        finally:
            self.taken = None

    @property
    def routes(self) -> Tensor:
        """[tokens, layers, chosen] int64: the experts of the last pass that was recorded; 0 in layers that have no router."""
        assert self.taken is not None
        like = next(found for found in self.taken if found is not None)
        return torch.stack(
            [torch.zeros_like(like) if found is None else found for found in self.taken], 1
        )

    def loads(self, routes: Iterable[np.ndarray]) -> np.ndarray:
        """Tokens that are sent to each expert, [experts] int64, over all layers that have a router.

        Args:
            routes: [tokens, layers, chosen] of each row.
        """
        layers = [router.layer for router in self.routers]
        taken = [
            np.empty(0, np.int64),
            *(of_row[:, layers].ravel().astype(np.int64) for of_row in routes),
        ]
        return np.bincount(np.concatenate(taken), minlength=self.experts)

    def _route(
        self, number: int, router: Router, forward: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        again = number in self._seen  # activations are computed a second time
        self._seen.add(number)
        with _TopkOverride(self.experts, router.call, partial(self._choose, number, router, again)):
            outputs = forward(*args, **named)
        if router.logits is None or (self.balance is None and self.tally is None):
            return outputs
        whole = outputs if isinstance(outputs, tuple) else (outputs,)
        logits, counts = whole[router.logits], self._counts(whole[router.logits])
        if self.tally is not None and not again:
            self.tally.add_logits(logits, counts)
        if self.balance is None or not logits.requires_grad:
            return outputs
        # The gradient takes the way of what the layer goes on with: nothing else is sure to be reached by the backward pass.
        others = (at for at, x in enumerate(whole) if at != router.logits and x.requires_grad)
        carrier = next(others, router.logits)
        carried = with_balance(whole[carrier], logits, counts, self.balance, number)
        whole = (*whole[:carrier], carried, *whole[carrier + 1 :])
        return whole if isinstance(outputs, tuple) else whole[0]

    def _choose(
        self, number: int, router: Router, again: bool, scores: Tensor, topk: Callable[[], Any]
    ) -> Any:
        """The answer of `torch.topk`: [..., chosen] scores and numbers of experts, of [..., experts] scores."""
        routes = None if self._routing is None else self._routing.routes
        if routes is None:
            found = topk()
            indices: Tensor = found.indices
        else:
            indices = routes[:, router.layer].long().view(*scores.shape[:-1], router.chosen)
            found = torch.return_types.topk((scores.gather(-1, indices), indices))  # pyright: ignore[reportAttributeAccessIssue]
        if again:
            return found
        of_tokens = indices.flatten(0, -2)
        if self.taken is not None:
            self.taken[router.layer] = of_tokens
        if self.tally is not None:
            counts = self._counts(scores)
            self.tally.add_taken(number, of_tokens, counts)
            if routes is not None:
                with (
                    torch.no_grad()
                ):  # what is kept for the backward pass must be the same the second time
                    own = topk().indices.flatten(0, -2)
                self.tally.add_moved(of_tokens, own, counts)
        return found

    def _counts(self, of_experts: Tensor) -> Tensor:
        """[N] float32, for [..., experts] of N tokens."""
        if self._routing is None:
            return torch.ones(of_experts.shape[:-1].numel(), device=of_experts.device)
        return self._routing.counts


class _TopkOverride(TorchFunctionMode):
    """Answers one call of `torch.topk` on scores of all experts, by its number."""

    def __init__(
        self, experts: int, call: int, answer: Callable[[Tensor, Callable[[], Any]], Any]
    ) -> None:
        super().__init__()
        self._experts, self._call, self._answer, self._calls = experts, call, answer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if not _is_choice(func, args, kwargs, self._experts):
            return call()
        self._calls += 1
        return self._answer(_scores(args, kwargs), call) if self._calls - 1 == self._call else call()


class _TopkObserver(TorchFunctionMode):
    """Says whenever `torch.topk` is called on scores of all experts, and what it chose."""

    def __init__(self, experts: int, seen: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._experts, self._seen = experts, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if _is_choice(func, args, kwargs, self._experts):
            self._seen(found.indices)
        return found


def _is_choice(func: Any, args: Any, kwargs: Any, experts: int) -> bool:
    return func in _TOPK and _scores(args, kwargs).shape[-1] == experts


def _scores(args: Any, kwargs: Any) -> Tensor:
    return args[0] if args else kwargs["input"]


def find_routers(causal_lm: Any, run: Callable[[], object]) -> tuple[tuple[Router, ...], Tensor]:
    """The routers of a model, in the order of its layers, and what they chose in a pass.

    Args:
        run: one pass of T tokens.

    Returns:
        (none where a layer chooses in several modules, or its number is in no name; [T, layers, chosen] int64 as in `Routers.routes`)
    """
    settings = causal_lm.config.get_text_config()
    experts, nothing = num_experts(settings), ((), torch.zeros(0, 0, 0, dtype=torch.int64))
    if experts is None:
        return nothing
    names = {module: name for name, module in causal_lm.named_modules()}
    inside: list[nn.Module] = []
    calls: dict[nn.Module, list[Tensor]] = {}
    hooks: list[Any] = []

    def leave(*_: Any) -> None:
        inside.pop()

    for module in names:
        hooks.append(module.register_forward_pre_hook(lambda module, _: inside.append(module)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with _TopkObserver(
            experts, lambda chosen: calls.setdefault(inside[-1], []).append(chosen.flatten(0, -2))
        ):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[int, tuple[Router, Tensor]] = {}
    for module, chosen in calls.items():
        layer = _NUMBER.search(names[module])
        if layer is None or int(layer[1]) in found:
            return nothing
        logits = _logits_of(causal_lm, module)
        router = Router(names[module], int(layer[1]), len(chosen) - 1, chosen[-1].shape[-1], logits)
        found[router.layer] = router, chosen[-1]
    if len({taken.shape for _, taken in found.values()}) != 1:
        return nothing
    none = torch.zeros_like(next(iter(found.values()))[1])
    taken = [found[layer][1] if layer in found else none for layer in range(settings.num_hidden_layers)]
    return tuple(found[layer][0] for layer in sorted(found)), torch.stack(taken, 1)


def _logits_of(causal_lm: Any, module: nn.Module) -> int | None:
    """Which output of a router `transformers` records as `router_logits`."""
    for part in causal_lm.modules():
        recorded: Any = getattr(part, "_can_record_outputs", None)
        recorder: Any = recorded.get("router_logits") if isinstance(recorded, dict) else None
        kind = getattr(recorder, "target_class", None)
        if kind is not None and isinstance(module, kind) and kind is not nn.Linear:
            return int(recorder.index)
    return None
