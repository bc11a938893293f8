"""`weft diff`: differences between two runs, down to the first token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ..dataflow.untrusted_text import beginning
from .command import Answer, Command, find_run

if TYPE_CHECKING:
    from ..dashboard.reading.comparison import SampleDifference

MOST = 12
"""Most metrics to list."""


@dataclass(frozen=True, kw_only=True)
class Diff(Command):
    """Show how two runs differ: settings, package versions, data, metrics, and the first different
    sample, token by token."""

    run_a: Annotated[
        Positional[str], arg(metavar="RUN_A", help="A run's directory, or its name under runs/.")
    ]
    run_b: Annotated[Positional[str], arg(metavar="RUN_B", help="The run to compare it with.")]

    def answer(self) -> Answer:
        from ..dashboard.reading.comparison import (
            compare_configs,
            compare_metrics,
            first_difference,
            metrics_of,
        )
        from ..dataflow.runs.facts import facts_of

        a, b = find_run(self.run_a), find_run(self.run_b)
        notes = list[str]()
        facts = facts_of(a), facts_of(b)
        notes += [f"damaged: {what}" for one in facts for what in one.damage]
        settings, versions, data = compare_configs(facts[0].config, facts[1].config)
        measured = metrics_of(a, notes), metrics_of(b, notes)
        step, metrics = compare_metrics(*measured)
        sample = first_difference(a, b, notes)
        found = {
            "settings": settings,
            "versions": versions,
            "data": data,
            "metrics": {
                "steps": len(set(measured[0]) & set(measured[1])),
                "first_step": step,
                "values": metrics,
            },
            "sample": sample.for_programs if sample else None,
        }
        return Answer(found, _text(found, sample), notes)


def _text(found: Mapping[str, Any], sample: SampleDifference | None) -> str:
    lines: list[str] = []
    for part in ("settings", "versions", "data"):
        lines += _part(part, found[part])
    metrics = found["metrics"]
    if not metrics["steps"]:
        lines.append("metrics: not compared, because the runs have no readable step in common")
    elif metrics["first_step"] is None:
        lines.append("metrics: the same")
    else:
        lines.append(
            f"metrics: {len(metrics['values'])} differ at step {metrics['first_step']}, and none before it"
        )
        shown = list(metrics["values"].items())
        lines += [f"  {name}: {a:.9g} | {b:.9g}" for name, (a, b) in shown[:MOST]]
        lines += [f"  ... {len(shown) - MOST} more"] if len(shown) > MOST else []
    return "\n".join(
        [
            *lines,
            f"samples: {sample}" if sample else "samples: the same, as far as both have recorded them",
        ]
    )


def _part(name: str, pairs: Mapping[str, Any]) -> Iterator[str]:
    if not pairs:
        yield f"{name}: the same"
        return
    yield f"{name}: {len(pairs)} differ"
    for key, (a, b) in pairs.items():
        yield f"  {key}: {_value(a)} | {_value(b)}"


def _value(value: Any) -> str:
    from ..dashboard.reading.comparison import MISSING

    text = value if value is MISSING else json.dumps(value, default=str)
    return beginning(text, 100)
