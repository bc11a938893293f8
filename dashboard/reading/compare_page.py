"""Two runs beside each other: settings, versions, data, metrics, and the first sample that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...dataflow.errors import UserError
from .cards import meaning
from .comparison import at_last_common_step, compare_configs, compare_metrics, metrics_of
from .run_reader import RunReader
from .sample_difference import SampleDifference, first_difference

READ_S = 5.0
"""Longest wait for the samples of a run to be read, when one of them is shown."""


def compare_page(a: RunReader, b: RunReader) -> dict[str, Any]:
    """Where two runs differ."""
    notes: list[str] = []
    facts = a.facts, b.facts
    settings, versions, data = compare_configs(facts[0].config, facts[1].config)
    measured = metrics_of(a.path, notes), metrics_of(b.path, notes)
    step, metrics = at_last_common_step(*measured)
    parts, _ = compare_metrics(*measured)
    found = first_difference(a.path, b.path, notes)
    return {
        "a": a.name,
        "b": b.name,
        "settings": _pairs(settings),
        "versions": _pairs(versions),
        "data": _pairs(data),
        "metrics": [{**row, "unit": meaning(row["name"])["unit"]} for row in metrics],
        "metrics_step": step,
        "first_step": parts,
        "first_difference": None if found is None else _difference(found, a, b),
        "notes": [*facts[0].damage, *facts[1].damage, *notes],
    }


def _pairs(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "a": a, "b": b} for name, (a, b) in found.items()]


def _difference(found: SampleDifference, a: RunReader, b: RunReader) -> dict[str, Any]:
    return {
        "step": found.step,
        "graph": found.graph,
        "why": found.what,
        "token": found.place,
        "tokens": [vars(pair) for pair in found.tokens],
        "a": _sample(a, found.sample_id),
        "b": _sample(b, found.sample_id),
    }


def _sample(reader: RunReader, id: int) -> dict[str, Any] | None:
    reader.samples.wait(READ_S)
    try:
        return reader.sample_pages.sample(id, {})
    except UserError:
        return None
