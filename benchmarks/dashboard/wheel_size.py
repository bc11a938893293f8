"""The dashboard's share of the wheel: its files, compressed as in a wheel."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[2] / "dashboard"


def measure(large: Path | None, folder: Path) -> dict[str, Any]:
    """Return `wheel_added_mb`."""
    files = [path for path in DASHBOARD.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {
        "wheel_added_mb": round(sum(len(zlib.compress(path.read_bytes())) for path in files) / 1e6, 3)
    }
