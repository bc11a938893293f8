"""`weft diff`: where two runs differ, down to the first token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from .command import Answer, Command
from .run_folder import find_run

if TYPE_CHECKING:
    from ..dashboard.reading.sample_difference import SampleDifference

OF_ONE_START = ("origin", "starts", "versions", "sources", "data")
"""Parts of a configuration that are compared by themselves, or not at all."""
OF_THE_CLOCK = ("_s", "idle_share", "_bytes")
"""Ends of the names of metrics that differ from run to run by themselves."""
MOST = 12
"""Metrics that are listed."""
MISSING = "(not there)"


@dataclass(frozen=True, kw_only=True)
class Diff(Command):
    """Say where two runs differ: settings, versions of packages, data, metrics, and the first sample that differs, token by token."""

    run_a: Annotated[Positional[str], arg(metavar="RUN_A", help="A run's directory, or its name under runs/.")]
    run_b: Annotated[Positional[str], arg(metavar="RUN_B", help="The run that it is compared with.")]

    def answer(self) -> Answer:
        from ..dashboard.reading.run_facts import facts_of
        from ..dashboard.reading.sample_difference import first_difference

        a, b = find_run(self.run_a), find_run(self.run_b)
        notes = list[str]()
        facts = facts_of(a), facts_of(b)
        notes += [f"damaged: {what}" for one in facts for what in one.damage]
        settings, versions, data = compare_configs(facts[0].config, facts[1].config)
        measured = _metrics(a, notes), _metrics(b, notes)
        step, metrics = compare_metrics(*measured)
        sample = first_difference(a, b, notes)
        found = {
            "settings": settings,
            "versions": versions,
            "data": data,
            "metrics": {"steps": len(set(measured[0]) & set(measured[1])), "first_step": step, "values": metrics},
            "sample": sample.for_programs if sample else None,
        }
        return Answer(found, _text(found, sample), notes)


def compare_configs(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What differs between two configurations: (settings, versions, data), each as name -> both values."""
    own = [{key: value for key, value in one.items() if key not in OF_ONE_START} for one in (a, b)]
    data = [{"sources": one.get("sources", {}), "data": one.get("data", {})} for one in (a, b)]
    return (
        dict(_differences(own[0], own[1])),
        dict(_differences(a.get("versions", {}), b.get("versions", {}))),
        dict(_differences(data[0], data[1])),
    )


def _differences(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The name, with dots, and both values of whatever differs. What one run lacks altogether, such as a held-out set, is one value.

    >>> dict(_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": {"e": 4, "f": 5}}))
    {'a.b': [1, 3], 'd': ['(not there)', {'e': 4, 'f': 5}]}
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _differences(a.get(key, MISSING), b.get(key, MISSING), f"{name}.{key}" if name else str(key))
    elif a != b:
        yield name, [a, b]


def compare_metrics(
    a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]
) -> tuple[int | None, dict[str, list[float]]]:
    """The first step of which a metric differs, and the metrics that differ then, the largest differences first.

    Args:
        a, b: step -> metric -> value; what a clock measures is passed over.
    """
    for step in sorted(set(a) & set(b)):
        names = [name for name in a[step] if name in b[step] and not name.endswith(OF_THE_CLOCK)]
        pairs = {name: [a[step][name], b[step][name]] for name in names if not _same(a[step][name], b[step][name])}
        if pairs:
            return step, dict(sorted(pairs.items(), key=lambda item: -_relative(*item[1])))
    return None, {}


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _relative(a: float, b: float) -> float:
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if math.isfinite(a - b) else math.inf


def _metrics(run: Path, notes: list[str]) -> dict[int, dict[str, float]]:
    import pyarrow as pa

    from ..dataflow.buffer.run_tables import present, read_metrics

    try:
        table = read_metrics(run)
    except (OSError, pa.ArrowException) as error:
        notes.append(f"damaged: metrics of {run}: {error}")
        return {}
    if table is None or "step" not in table.column_names:
        return {}
    return {int(row["step"]): present(row) for row in table.to_pylist() if row["step"] is not None}


def _text(found: Mapping[str, Any], sample: SampleDifference | None) -> str:
    lines: list[str] = []
    for part in ("settings", "versions", "data"):
        lines += _part(part, found[part])
    metrics = found["metrics"]
    if not metrics["steps"]:
        lines.append("metrics: not compared, because the runs have no step in common that can be read")
    elif metrics["first_step"] is None:
        lines.append("metrics: the same")
    else:
        lines.append(f"metrics: {len(metrics['values'])} differ at step {metrics['first_step']}, and none before it")
        shown = list(metrics["values"].items())
        lines += [f"  {name}: {a:.9g} | {b:.9g}" for name, (a, b) in shown[:MOST]]
        lines += [f"  ... {len(shown) - MOST} more"] if len(shown) > MOST else []
    return "\n".join(
        [*lines, f"samples: {sample}" if sample else "samples: the same, as far as both have recorded them"]
    )


def _part(name: str, pairs: Mapping[str, Any]) -> Iterator[str]:
    if not pairs:
        yield f"{name}: the same"
        return
    yield f"{name}: {len(pairs)} differ"
    for key, (a, b) in pairs.items():
        yield f"  {key}: {_value(a)} | {_value(b)}"


def _value(value: Any) -> str:
    text = value if value is MISSING else json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:97]}..."
