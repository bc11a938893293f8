"""Execution plans: the GPUs and the parallelism of every call of a step (ReaLHF, arXiv:2406.14088).

    step = PlannedStep(calls, options, gpu_bytes=80e9, seconds=..., held_bytes=..., move_s=...)
    found = step.search(seed=0)
    found.seconds, found.plan["generate"]          Option(mesh=Mesh(first=0, gpus=8), strategy=...)

Calls of one model may run on different GPUs and with different parallelism. In Weft, such a call
belongs to a separate group that follows the trained one. The meshes of calls may overlap partly, so
calls take turns on GPUs, not on pools.

A simulation of a few steps gives the seconds of a plan:

- A call is ready when the calls that it needs have ended and, if its model is trained, the model's
  last call of the previous step has ended.
- Ready calls start first come, first served, once every GPU of their mesh is free.
- If the model's previous call had another mesh or strategy, its weights move first, on the GPUs of
  the call.

A plan fits if each GPU holds, for all models on it, the most that the model's calls there hold, plus
the most that one of the calls needs while it runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...dataflow.errors import UserError
from .options import Mesh, Option

STEPS = 3
"""Simulated steps of a plan: enough for calls of different steps to overlap."""
PENALTY = 3.0
"""Factor on the seconds of a plan that does not fit."""
_TOGETHER = 0.3
"""Share of proposals that change all calls of a model."""
_FIRST_BETA, _LAST_BETA = 10.0, 300.0
"""Inverse temperature at the start and at the end, for differences as shares of the present seconds."""


@dataclass(frozen=True)
class ModelCall:
    """A call of a step, such as generation or an update."""

    name: str
    model: str
    needs: tuple[str, ...] = ()
    """Calls of the same step that end first."""
    trains: bool = False


@dataclass(frozen=True)
class FoundPlan:
    seconds: float
    """[s] Seconds of all simulated steps."""
    plan: Mapping[str, Option]
    """Call -> its option."""
    fits: bool


class PlannedStep:
    """The calls of a step, and their options.

    >>> from weft.controllers.planner.options import Strategy
    >>> calls = [ModelCall("generate", "actor"), ModelCall("update", "actor", ("generate",), trains=True)]
    >>> options = [Option(Mesh(0, 2), Strategy(dp=2)), Option(Mesh(0, 2), Strategy(tp=2))]
    >>> step = PlannedStep(
    ...     calls, options, gpu_bytes=10, move_s=lambda model, old, new: 0.5,
    ...     seconds=lambda call, option: 4 / option.strategy.dp if call == "generate" else 4 / option.strategy.tp,
    ...     held_bytes=lambda call, option: 8 / option.strategy.tp,
    ... )
    >>> found = step.search()  # both at their best, and five moves in three steps
    >>> found.seconds, [found.plan[call.name].strategy.tp for call in calls]
    (14.5, [1, 2])

    Args:
        calls: each after the calls that it needs.
        options: the options of every call.
        gpu_bytes: usable memory of a GPU.
        seconds: returns the seconds of a call.
        held_bytes: returns the bytes of its model that a call keeps on each GPU between calls.
        active_bytes: returns the bytes that a call needs on each GPU while it runs.
        move_s: returns the seconds to move a model's weights from one option to another.

    Raises:
        UserError: a call needs an unknown or later call, or calls or options are missing.
    """

    def __init__(
        self,
        calls: Sequence[ModelCall],
        options: Sequence[Option],
        *,
        gpu_bytes: float,
        seconds: Callable[[str, Option], float],
        held_bytes: Callable[[str, Option], float],
        active_bytes: Callable[[str, Option], float] = lambda call, option: 0.0,
        move_s: Callable[[str, Option, Option], float] = lambda model, old, new: 0.0,
    ) -> None:
        names = [call.name for call in calls]
        for k, call in enumerate(calls):
            for name in call.needs:
                if name not in names[:k]:
                    raise UserError(
                        f"call {call.name!r} needs {name!r}, which does not come before it (calls: {', '.join(names)})"
                    )
        if not calls or not options:
            raise UserError("a plan needs at least one call and one option")
        self.calls, self.options = tuple(calls), tuple(options)
        self._gpu_bytes, self._move_s = gpu_bytes, move_s
        self._number = {option: k for k, option in enumerate(self.options)}
        # By call, then by option.
        self._seconds = [[seconds(name, option) for option in self.options] for name in names]
        self._held = [[held_bytes(name, option) for option in self.options] for name in names]
        self._active = [[active_bytes(name, option) for option in self.options] for name in names]
        self._moves: dict[tuple[str, int, int], float] = {}
        self._models = [call.model for call in calls]
        self._waits, self._wakes = self._dependencies(names)
        self._known: dict[tuple[int, ...], tuple[bool, float]] = {}

    def _dependencies(self, names: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Return, for each call of each step, how many calls it waits for, and which wait for it."""
        number = len(names)
        trained = {call.model for call in self.calls if call.trains}
        last = {call.model: k for k, call in enumerate(self.calls)}
        waits, wakes = [0] * (number * STEPS), [list[int]() for _ in range(number * STEPS)]
        for one in range(number * STEPS):
            step, k = divmod(one, number)
            call = self.calls[k]
            before = {step * number + names.index(name) for name in call.needs}
            if step and call.model in trained:
                before.add((step - 1) * number + last[call.model])
            waits[one] = len(before)
            for other in before:
                wakes[other].append(one)
        return waits, wakes

    # Seconds and memory of a plan

    def of(self, plan: Mapping[str, Option]) -> FoundPlan:
        """Simulate a plan. Raises a `UserError` if an option is not one of `options`."""
        try:
            chosen = tuple(self._number[plan[call.name]] for call in self.calls)
        except KeyError as error:
            raise UserError(f"the plan has no option for a call, or an unknown one: {error}") from None
        return self._found(chosen)

    def _found(self, chosen: tuple[int, ...]) -> FoundPlan:
        plan = {call.name: self.options[k] for call, k in zip(self.calls, chosen, strict=True)}
        return FoundPlan(self._simulated(chosen), plan, self._fits(chosen))

    def _simulated(self, chosen: Sequence[int]) -> float:
        number = len(chosen)
        meshes = [self.options[k].mesh for k in chosen]
        # A call keeps all GPUs of its mesh busy, so they are free when the last overlapping call has ended.
        overlaps = [[k for k in range(number) if mesh.overlaps(meshes[k])] for mesh in meshes]
        seconds = [own[k] for own, k in zip(self._seconds, chosen, strict=True)]
        free, at, waits = [0.0] * number, dict[str, int](), list(self._waits)
        ready_s = [0.0] * len(waits)
        ready = [(0.0, one) for one, count in enumerate(waits) if not count]
        last = 0.0
        while ready:
            start, one = heapq.heappop(ready)
            k = one % number
            for other in overlaps[k]:
                if free[other] > start:
                    start = free[other]
            model, option = self._models[k], chosen[k]
            before = at.get(model, option)
            if before != option:
                start += self._move(model, before, option)
            at[model] = option
            free[k] = end = start + seconds[k]
            last = max(last, end)
            for other in self._wakes[one]:
                ready_s[other] = max(ready_s[other], end)
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(ready, (ready_s[other], other))
        return last

    def _move(self, model: str, old: int, new: int) -> float:
        if (model, old, new) not in self._moves:
            seconds = self._move_s(model, self.options[old], self.options[new])
            self._moves[model, old, new] = seconds
        return self._moves[model, old, new]

    def _fits(self, chosen: Sequence[int]) -> bool:
        meshes = [self.options[k].mesh for k in chosen]
        # Memory changes only where a mesh begins.
        for gpu in {mesh.first for mesh in meshes}:
            held, active = dict[str, float](), 0.0
            for k, mesh in enumerate(meshes):
                if mesh.first <= gpu < mesh.first + mesh.gpus:
                    model, option = self._models[k], chosen[k]
                    held[model] = max(held.get(model, 0.0), self._held[k][option])
                    active = max(active, self._active[k][option])
            if sum(held.values()) + active > self._gpu_bytes:
                return False
        return True

    def _cost(self, chosen: tuple[int, ...]) -> tuple[bool, float]:
        """Return whether a plan does not fit, and its seconds: plans that fit come first."""
        if chosen not in self._known:
            self._known[chosen] = not self._fits(chosen), self._simulated(chosen)
        return self._known[chosen]

    def _penalised_s(self, chosen: tuple[int, ...]) -> float:
        too_large, seconds = self._cost(chosen)
        return seconds * PENALTY if too_large else seconds

    # Search

    def fastest(self, call: str) -> Option:
        """Return the option with the fewest seconds of a call alone."""
        own = self._seconds[[each.name for each in self.calls].index(call)]
        return self.options[min(range(len(own)), key=own.__getitem__)]

    def search(self, seed: int = 0, *, proposals: int = 3000, restarts: int = 4) -> FoundPlan:
        """Search for the plan with the fewest seconds.

        If there are at most as many plans as `proposals`, the search tries all. Otherwise, each
        restart anneals and then improves one call after the other. Starts are the fastest
        option of each call, and the best option for all calls alike; the result is never worse than
        these. A plan that does not fit counts with three times its seconds.

        Args:
            seed: seed of the random proposals. Equal seeds find equal plans.
            proposals: number of proposals of each annealing.
            restarts: number of annealings.

        Raises:
            UserError: no plan that the search has seen fits.
        """
        chance = random.Random(seed)
        fastest = tuple(self._number[self.fastest(call.name)] for call in self.calls)
        alike = ((option,) * len(self.calls) for option in range(len(self.options)))
        begins = sorted([fastest, min(alike, key=self._cost)], key=self._cost)
        best = begins[0]
        if len(self.options) ** len(self.calls) <= proposals:
            every = itertools.product(range(len(self.options)), repeat=len(self.calls))
            best, restarts = min(every, key=self._cost), 0
        for restart in range(restarts):
            found = self._improved(self._annealed(begins[restart % len(begins)], proposals, chance))
            best = min(best, found, key=self._cost)
        self._known.clear()
        if not self._fits(best):
            raise UserError(
                f"the search found no plan that fits in {self._gpu_bytes:,.0f} bytes of each GPU; use more GPUs, or smaller models"
            )
        return self._found(best)

    def _annealed(
        self, start: tuple[int, ...], proposals: int, chance: random.Random
    ) -> tuple[int, ...]:
        """Return the best plan on a random walk that accepts a worse plan less and less often."""
        current = best = start
        cost = self._penalised_s(start)
        for k in range(proposals):
            proposed = list(current)
            option, call = chance.randrange(len(self.options)), chance.randrange(len(current))
            together = chance.random() < _TOGETHER
            for other, model in enumerate(self._models):
                if other == call or (together and model == self._models[call]):
                    proposed[other] = option
            candidate = tuple(proposed)
            other_cost = self._penalised_s(candidate)
            beta = _FIRST_BETA * (_LAST_BETA / _FIRST_BETA) ** (k / proposals)
            worse = max(0.0, other_cost / cost - 1) if cost else 0.0
            if chance.random() < math.exp(-beta * worse):
                current, cost = candidate, other_cost
                best = min(best, current, key=self._cost)
        return best

    def _improved(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Change the option of one call, or of all calls of a model, while that helps."""
        groups = [(k,) for k in range(len(chosen))]
        for model in dict.fromkeys(self._models):
            own = tuple(k for k, each in enumerate(self._models) if each == model)
            groups += [own] if len(own) > 1 else []
        useful = [self._useful(k) for k in range(len(chosen))]
        since, turn = 0, 0
        while since < len(groups):
            group = groups[turn % len(groups)]
            # Also options of the model's other calls, which need no move.
            same = {chosen[k] for k in range(len(chosen)) if self._models[k] == self._models[group[0]]}
            options = sorted(same.union(*(useful[k] for k in group)))
            made = [
                tuple(option if k in group else other for k, other in enumerate(chosen))
                for option in options
            ]
            best = min(made, key=self._cost)
            since = 0 if self._cost(best) < self._cost(chosen) else since + 1
            chosen, turn = (chosen if since else best), turn + 1
        return chosen

    def _useful(self, call: int) -> set[int]:
        """Return the options of a call that no other one on the same mesh beats in seconds and
        memory."""
        own = list(zip(self._seconds[call], self._held[call], self._active[call], strict=True))
        on: dict[Mesh, list[int]] = {}
        for k in sorted(range(len(own)), key=own.__getitem__):
            kept = on.setdefault(self.options[k].mesh, [])
            # Sorted by seconds, so only an earlier option can beat a later one.
            if not any(own[other][1] <= own[k][1] and own[other][2] <= own[k][2] for other in kept):
                kept.append(k)
        return {k for kept in on.values() for k in kept}
