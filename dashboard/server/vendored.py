"""Script files of others, which their wheels carry: nothing is copied into the repository, and nothing comes from the network."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

FILES = {
    "uPlot.js": ("uplot", "static/uPlot.iife.js"),
    "uPlot.css": ("uplot", "static/uPlot.min.css"),
}
"""Name under `/static/vendor/` -> package, and the place of the file in it."""


def vendored(name: str) -> Path | None:
    """Where a file lies; None: it is not known, or its package is not installed. The package is not imported."""
    if name not in FILES:
        return None
    package, place = FILES[name]
    spec = find_spec(package)
    roots = spec.submodule_search_locations if spec else None
    path = Path(next(iter(roots))) / place if roots else None
    return path if path is not None and path.is_file() else None
