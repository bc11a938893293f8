"""The cheapest fleet of GPUs of several kinds for a load (Mélange, arXiv:2404.14527).

A load consists of slices, such as the requests of one range of lengths. Each slice goes to one kind
of GPU, because kinds differ in the requests that they serve well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...dataflow.errors import UserError

_ROUNDING = 1e-9


@dataclass(frozen=True)
class GpuKind:
    price: float
    """Price of a GPU, in any unit."""
    rates: Sequence[float]
    """Requests per second that one GPU serves, for each slice; 0 if it cannot serve the slice."""


@dataclass(frozen=True)
class Fleet:
    price: float
    gpus: Mapping[str, int]
    """Kind -> number of GPUs."""
    kinds: tuple[str, ...]
    """Kind of GPU that serves each slice."""


def cheapest_fleet(kinds: Mapping[str, GpuKind], load: Sequence[float]) -> Fleet:
    """Return the cheapest fleet, by an exact search.

    >>> small, large = GpuKind(1.01, (2, 1)), GpuKind(3.67, (20, 20))
    >>> cheapest_fleet({"A10G": small, "A100": large}, load=(2, 20))
    Fleet(price=4.68, gpus={'A10G': 1, 'A100': 1}, kinds=('A10G', 'A100'))

    Args:
        kinds: name -> kind of GPU.
        load: requests per second of each slice.

    Raises:
        UserError: the rates of a kind are not one for each slice, or no kind serves a slice.
    """
    for name, kind in kinds.items():
        if len(kind.rates) != len(load):
            raise UserError(
                f"kind {name!r} has {len(kind.rates)} rates for {len(load)} slices; give one for each"
            )
    names, prices = list(kinds), np.array([kind.price for kind in kinds.values()])
    rates = np.array([kind.rates for kind in kinds.values()], float).T
    # [slices, kinds] GPUs that each slice needs, as fractions.
    needs = np.full(rates.shape, np.inf)
    np.divide(np.array(load, float)[:, None], rates, out=needs, where=rates > 0)
    cheapest = needs * prices
    for k in np.flatnonzero(np.isinf(cheapest.min(axis=1))).tolist():
        raise UserError(f"no kind of GPU serves slice {k}; add one whose rate is above 0")
    # The GPUs of each kind for the slices so far, and the kind of each slice.
    gpus, chosen = np.zeros((1, len(names))), np.zeros((1, 0), int)
    for k, row in enumerate(needs):
        usable = np.flatnonzero(np.isfinite(row))
        gpus = (gpus[:, None] + np.eye(len(names))[usable] * row[usable, None]).reshape(-1, len(names))
        chosen = np.column_stack([np.repeat(chosen, len(usable), axis=0), np.tile(usable, len(chosen))])
        rest = needs[k + 1 :]
        # Later slices at their cheapest: a fleet that works, and a bound without rounding.
        at = cheapest[k + 1 :].argmin(axis=1)
        ends = gpus + np.bincount(at, rest[np.arange(len(at)), at], minlength=len(names))
        within = ends @ prices <= (np.ceil(ends - _ROUNDING) @ prices).min() + _ROUNDING
        gpus, chosen = gpus[within], chosen[within]
    counts = np.ceil(gpus - _ROUNDING).astype(int)
    best = int((counts @ prices).argmin())
    fleet = dict(zip(names, counts[best].tolist(), strict=True))
    return Fleet(float(counts[best] @ prices), fleet, tuple(names[k] for k in chosen[best]))
