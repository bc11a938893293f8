"""`weft plan --fleet`: the cheapest GPUs of several kinds for a load."""

from __future__ import annotations

import tomllib
from pathlib import Path

from ..dataflow.errors import UserError
from .command_line import Answer


def fleet(path: Path) -> Answer:
    """Find the cheapest fleet for the load and the prices of a TOML file."""
    from ..controllers.planner.fleet import GpuKind, cheapest_fleet

    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        load = [float(rate) for rate in found["load"]]
        kinds = {
            name: GpuKind(float(each["price"]), [float(rate) for rate in each["rates"]])
            for name, each in found["kinds"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--fleet {path}: {error!r}; the file has load = [requests per second of each slice] and, for each kind of GPU, "
            "[kinds.NAME] with price = ... and rates = [requests per second that one GPU serves of each slice]"
        ) from None
    best = cheapest_fleet(kinds, load)
    counts = ", ".join(f"{number} {name}" for name, number in best.gpus.items() if number)
    slices = [
        f"  slice {k}: {rate:g} requests/s on {name}"
        for k, (rate, name) in enumerate(zip(load, best.kinds, strict=True))
    ]
    text = "\n".join([f"cheapest fleet: {counts} for {best.price:g}", *slices])
    return Answer({"price": best.price, "gpus": dict(best.gpus), "kinds": list(best.kinds)}, text)
