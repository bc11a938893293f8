"""Benchmarks of several parts, each a module whose `measure()` returns figures by name."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Collection, Mapping

from machine import load


def run_parts(description: str | None, figures: Collection[str], parts: Mapping[str, str]) -> None:
    """Run the parts that the command line chooses, and print their figures as one JSON object, with
    null for the others. `parts` maps their names to modules."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    measured = dict.fromkeys(figures)
    for part in parser.parse_args().parts:
        found = importlib.import_module(parts[part]).measure()
        print(f"{part}: {found}; load {load()}", flush=True)
        measured |= found
    print(json.dumps(measured))
