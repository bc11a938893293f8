"""What the dashboard adds to the wheel: its files, compressed as they are in one."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[2] / "dashboard"


def measure(large: Path | None, folder: Path) -> dict[str, Any]:
    """`wheel_added_mb`."""
    files = [path for path in DASHBOARD.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {
        "wheel_added_mb": round(sum(len(zlib.compress(path.read_bytes())) for path in files) / 1e6, 3)
    }
