"""Routers of a mixture of experts: find them, record which experts they choose, and replay choices.

The routers of `transformers` compute scores and choose experts with `torch.topk`. This module
intercepts only the `topk` call. For router replay (arXiv:2510.11370), it returns the generator's
experts with the model's own scores. There is no list of model families: `find_routers` observes a
pass, and `agreement.py` checks that the model follows replayed choices.
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

# Load-balancing loss: E * sum over experts e of f_e * P_e (arXiv:2101.03961, equations 4 to 6). f_e
# is the share of tokens sent to e, and P_e the mean probability of e. Both are means over all
# tokens of a step, all ranks and all layers, as in `load_balancing_loss_func` of `transformers`.
# With a known f, the loss is a sum over tokens. So Weft computes f first, from replayed routes or
# in a pass without gradients.


@dataclass(frozen=True)
class Balance:
    """Gradient of the load-balancing loss, which is linear in the router probabilities: coefficient
    * scale * sum over tokens, layers and experts e of count * frequencies[e] * probability[e]."""

    coefficient: float
    frequencies: Tensor
    """[experts] float64: how often each expert gets a token, on average."""
    scale: float = 1.0
    added: set[int] = field(default_factory=set)
    """Routers whose passes add the gradient of the loss."""
    reached: set[int] = field(default_factory=set)
    """Routers in `added` that a backward pass has reached."""

    @classmethod
    def of_step(cls, coefficient: float, loads: Tensor, *, chosen: int, weight: float) -> Balance:
        """Return the balance for the loss of one step. `loads` ([experts] float64, on the model's
        device) are the tokens sent to each expert in the step, summed over all layers and ranks;
        each token has `chosen` experts. `weight` is the divisor that the engine later applies to
        the gradient.

        >>> Balance.of_step(0.5, torch.tensor([3.0, 1.0]), chosen=1, weight=8.0)
        Balance(coefficient=0.5, frequencies=tensor([0.7500, 0.2500]), scale=4.0, added=set(), reached=set())
        """
        tokens = loads.sum() / chosen
        return cls(coefficient, loads / tokens, weight * len(loads) / tokens.item())

    def check_reached(self, model: str) -> None:
        """Check that the backward passes of a step reached every router."""
        if self.reached != self.added:
            raise UserError(
                f"router_loss={self.coefficient:g}: the gradient of this loss does not reach all routers of model {model!r}; leave it out"
            )


class _Tally:
    """Sums over the tokens of some passes. A token that several rows share counts once per row."""

    def __init__(self, routers: int, experts: int, device: torch.device, *, have_logits: bool) -> None:
        make = partial(torch.zeros, dtype=torch.float64, device=device)
        self.loads = make(routers, experts)
        """[routers, experts]: number of tokens sent to each expert."""
        self.probabilities = make(experts)
        """[experts]: router probabilities, summed over tokens and routers."""
        self.entropy = make(1)
        """Entropy of the router probabilities in nats, summed over tokens and routers."""
        self.tokens = make(1)
        self.moved = make(1)
        """Tokens with other replayed experts than the router's choice, over all routers."""
        self._have_logits = have_logits

    def add_taken(self, router: int, taken: Tensor, counts: Tensor) -> None:
        """Add the experts `taken` ([N, chosen]) by N tokens; `counts` ([N] float32) are rows per
        token."""
        counts = counts.to(self.loads)
        self.loads[router].index_add_(0, taken.flatten(), counts.repeat_interleave(taken.shape[-1]))
        self.tokens += counts.sum()

    def add_moved(self, taken: Tensor, own: Tensor, counts: Tensor) -> None:
        """Compare replayed experts with the router's own choice, both [N, chosen]."""
        counts = counts.to(self.moved)
        self.moved += counts @ (own.sort(-1).values != taken.sort(-1).values).any(-1).to(counts)

    @torch.no_grad()
    def add_logits(self, logits: Tensor, counts: Tensor) -> None:
        """Add a router's probabilities and entropies, from its logits [..., experts]."""
        logprobs = logits.float().log_softmax(-1).flatten(0, -2)
        self.probabilities += counts.to(self.loads) @ logprobs.exp().to(self.loads)
        self.entropy -= counts @ (logprobs.exp() * logprobs).sum(-1)

    def add_up(self, over_ranks: Callable[[Tensor], None]) -> None:
        """Sum the statistics over all ranks; `over_ranks` sums an [n] tensor in place."""
        sums = (self.loads, self.probabilities, self.entropy, self.tokens, self.moved)
        together = torch.cat([one.flatten() for one in sums])
        over_ranks(together)
        for own, found in zip(sums, together.split([one.numel() for one in sums]), strict=True):
            own.copy_(found.view_as(own))

    def metrics(self, *, replayed: bool) -> Metrics:
        tokens = self.tokens.item()
        if not tokens:
            return {}
        # Load of each router's busiest expert divided by the mean load.
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


class _Balanced(torch.autograd.Function):
    """Returns the tensor `carrier`. The backward pass also adds the gradient of a balance to
    `logits` ([..., experts] for N tokens, with counts [N] float32)."""

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, logits: Tensor, counts: Tensor, balance: Balance, router: int
    ) -> Tensor:
        balance.added.add(router)
        ctx.save_for_backward(logits, counts)
        ctx.balance, ctx.router = balance, router
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, counts = ctx.saved_tensors
        ctx.balance.reached.add(ctx.router)
        return gradients[0], balance_gradient(logits, counts, ctx.balance), None, None, None


def balance_gradient(logits: Tensor, counts: Tensor, balance: Balance) -> Tensor:
    """Return the gradient of the load-balancing loss with respect to the router logits,
    [..., experts]: p_j (f_j - sum_e f_e p_e), times the factors of `balance` and the counts [N]."""
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
    module: str
    layer: int
    call: int
    """Number of the `torch.topk` call that chooses experts; earlier calls choose groups of
    experts."""
    chosen: int
    logits: int | None
    """Index of the module's output that `transformers` declares as its logits; None if
    undeclared."""


@dataclass(frozen=True)
class Routing:
    """Instructions for the routers in a pass over N tokens."""

    counts: Tensor
    """[N] float32: number of rows that contain the token; 0 for padding."""
    routes: Tensor | None = None
    """[N, layers, chosen] integers: the experts to use; None lets the routers choose."""

    def spread(self, slots: Tensor, places: int) -> Routing:
        """Return the routing for `places` positions: these tokens at `slots` ([N]), padding
        elsewhere."""
        counts = self.counts.new_zeros(places).index_put((slots,), self.counts)
        routes = None
        if self.routes is not None:
            routes = _any_experts(self.routes, places)
            routes[slots] = self.routes
        return Routing(counts, routes)

    def shard(self, share: Callable[[Tensor], Tensor], missing: int) -> Routing:
        """Return this rank's part of the routing. `share` returns the rank's part of a
        [N + missing, ...] tensor."""
        routes = self.routes
        if routes is not None:
            routes = share(torch.cat([routes, _any_experts(routes, missing)]))
        return Routing(share(F.pad(self.counts, (0, missing))), routes)


def _any_experts(like: Tensor, tokens: int) -> Tensor:
    _, layers, chosen = like.shape
    return torch.arange(chosen, dtype=like.dtype, device=like.device).repeat(tokens, layers, 1)


class Routers:
    """The routers of a model, found by `find_routers`. The constructor replaces their forward
    methods, which then follow instructions for each forward pass, also when its backward pass
    recomputes layers."""

    def __init__(self, causal_lm: Any, routers: tuple[Router, ...]) -> None:
        settings = causal_lm.config.get_text_config()
        self.routers = routers
        self.layers = int(settings.num_hidden_layers)
        self.chosen = routers[0].chosen
        self.experts = num_experts(settings) or 0
        self.tally: _Tally | None = None
        """If set, collects statistics of the next passes."""
        self.balance: Balance | None = None
        """If set, adds its gradient to those of the next passes."""
        self.taken: list[Tensor | None] | None = None
        """If a list, the last pass records each layer's experts here, [tokens, chosen]."""
        self._routing: Routing | None = None
        self._seen: set[int] = set()
        self._modules: list[Any] = [causal_lm.get_submodule(router.module) for router in routers]
        for number, (router, module) in enumerate(zip(routers, self._modules, strict=True)):
            module.forward = partial(self._route, number, router, module.forward)

    def remove(self) -> None:
        for module in self._modules:
            del module.forward

    @property
    def have_logits(self) -> bool:
        return all(router.logits is not None for router in self.routers)

    def begin_pass(self, routing: Routing | None) -> None:
        self._routing = routing
        self._seen.clear()
        if self.taken is not None:
            self.taken = [None for _ in range(self.layers)]

    @contextmanager
    def watched(self, device: torch.device, balance: Balance | None = None) -> Iterator[_Tally]:
        """Inside the context, collect statistics of passes, and add the gradient of `balance` to
        theirs."""
        tally = _Tally(len(self.routers), self.experts, device, have_logits=self.have_logits)
        self.tally, self.balance = tally, balance
        try:
            yield tally
        finally:
            self.tally = self.balance = None

    @contextmanager
    def recorded(self) -> Iterator[Routers]:
        """Inside the context, record the experts of the next pass, for `routes`."""
        self.taken = []
        self.begin_pass(None)
        try:
            yield self
        finally:
            self.taken = None

    @property
    def routes(self) -> Tensor:
        """[tokens, layers, chosen] int64: experts of the recorded pass; 0 for layers without a
        router."""
        assert self.taken is not None
        like = next(found for found in self.taken if found is not None)
        none = torch.zeros_like(like)
        return torch.stack([none if found is None else found for found in self.taken], 1)

    def loads(self, routes: Iterable[np.ndarray]) -> np.ndarray:
        """Return the number of tokens sent to each expert over all routers, [experts] int64.
        `routes` has the routes of each row, [tokens, layers, chosen]."""
        layers = [router.layer for router in self.routers]
        taken = [of_row[:, layers].ravel().astype(np.int64) for of_row in routes]
        return np.bincount(np.concatenate([np.empty(0, np.int64), *taken]), minlength=self.experts)

    def _route(
        self, number: int, router: Router, forward: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        again = number in self._seen  # the backward pass is recomputing activations
        self._seen.add(number)

        def choose(call: int, scores: Tensor, topk: Callable[[], Any]) -> Any:
            return self._choose(number, router, again, scores, topk) if call == router.call else topk()

        with _TopkOverride(self.experts, choose):
            outputs = forward(*args, **named)
        if router.logits is None or (self.balance is None and self.tally is None):
            return outputs
        whole = outputs if isinstance(outputs, tuple) else (outputs,)
        logits, counts = whole[router.logits], self._counts(whole[router.logits])
        if self.tally is not None and not again:
            self.tally.add_logits(logits, counts)
        if self.balance is None or not logits.requires_grad:
            return outputs
        # Attach the gradient to the output that the layer uses; the backward pass may not reach
        # others.
        others = (at for at, x in enumerate(whole) if at != router.logits and x.requires_grad)
        carrier = next(others, router.logits)
        carried: Any = _Balanced.apply(whole[carrier], logits, counts, self.balance, number)
        whole = (*whole[:carrier], carried, *whole[carrier + 1 :])
        return whole if isinstance(outputs, tuple) else whole[0]

    def _choose(
        self, number: int, router: Router, again: bool, scores: Tensor, topk: Callable[[], Any]
    ) -> Any:
        """Return the result for `torch.topk`: [..., chosen] scores and indexes of experts."""
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
                with torch.no_grad():  # a recomputed pass must save the same tensors as the first one
                    own = topk().indices.flatten(0, -2)
                self.tally.add_moved(of_tokens, own, counts)
        return found

    def _counts(self, of_experts: Tensor) -> Tensor:
        if self._routing is None:
            return torch.ones(of_experts.shape[:-1].numel(), device=of_experts.device)
        return self._routing.counts


class _TopkOverride(TorchFunctionMode):
    """Passes each `torch.topk` call over all experts to `answer`, with its number and scores, and
    returns the answer."""

    def __init__(self, experts: int, answer: Callable[[int, Tensor, Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._experts, self._answer, self._calls = experts, answer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if func not in _TOPK:
            return call()
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._experts:
            return call()
        self._calls += 1
        return self._answer(self._calls - 1, scores, call)


def find_routers(causal_lm: Any, run: Callable[[], object]) -> tuple[tuple[Router, ...], Tensor]:
    """Find the routers of a model, in the order of its layers, and the experts that they choose in
    `run`, a pass over T tokens: [T, layers, chosen] int64, as in `Routers.routes`. Both results are
    empty if a layer has several modules that choose, or if a module's name has no layer number."""
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

    def note(_: int, scores: Tensor, topk: Callable[[], Any]) -> Any:
        found = topk()
        calls.setdefault(inside[-1], []).append(found.indices.flatten(0, -2))
        return found

    for module in names:
        hooks.append(module.register_forward_pre_hook(lambda module, _: inside.append(module)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with _TopkOverride(experts, note):
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
    """Return the index of the module's output that `transformers` records as `router_logits`."""
    for part in causal_lm.modules():
        recorded: Any = getattr(part, "_can_record_outputs", None)
        recorder: Any = recorded.get("router_logits") if isinstance(recorded, dict) else None
        kind = getattr(recorder, "target_class", None)
        if kind is not None and isinstance(module, kind) and kind is not nn.Linear:
            return int(recorder.index)
    return None
