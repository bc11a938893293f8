"""Placement files: `weft plan --search` writes one, and the option `--placement FILE` of a script that
calls `launch` reads it. The script's drivers then use its places."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ..dataflow.errors import UserError
from .placement import Place, Placement, ResourcePool

OPTION = "--placement"

_CHOSEN: ContextVar[Placement | None] = ContextVar("_CHOSEN", default=None)


def write_placement(path: Path, placement: Placement, about: Mapping[str, Any]) -> None:
    """Write a placement as JSON. `about` describes it for people; reading ignores it."""
    pools = {place.pool.name: place.pool for place in placement.values()}
    found = {
        **about,
        "pools": {
            name: {"cpus": pool.cpus, "gpus": pool.gpus, "nodes": pool.nodes}
            for name, pool in pools.items()
        },
        "groups": {
            name: {"pool": place.pool.name, "ranks": place.ranks} for name, place in placement.items()
        },
    }
    path.write_text(json.dumps(found, indent=2) + "\n")


def read_placement(path: Path) -> dict[str, Place]:
    """Read a placement. Raises a `UserError` if the file is not a placement file, or if its numbers
    do not fit together."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        pools = {name: ResourcePool(name, **sizes) for name, sizes in found["pools"].items()}
        return {
            name: Place(pools[each["pool"]], each["ranks"]) for name, each in found["groups"].items()
        }
    except UserError as error:
        raise UserError(f"{OPTION} {path}: {error}") from None
    except FileNotFoundError:
        raise UserError(f"{OPTION} {path}: there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{OPTION} {path}: this is not a placement file ({error!r}); `weft plan --search` writes one"
        ) from None


@contextmanager
def chosen_placement(path: Path | None) -> Iterator[None]:
    """In the block, drivers take the places of a placement file; None changes nothing."""
    before = _CHOSEN.set(read_placement(path) if path is not None else None)
    try:
        yield
    finally:
        _CHOSEN.reset(before)


def with_chosen(placement: Placement | None, groups: Collection[str]) -> Placement | None:
    """Return the placement with the groups of the chosen placement file replaced. Ignores groups of the
    file that this driver's graphs do not have."""
    chosen = {name: place for name, place in (_CHOSEN.get() or {}).items() if name in groups}
    return {**(placement or {}), **chosen} if chosen else placement
