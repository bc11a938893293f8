"""The workers page: where each rank is, its call, its memory over time, restarts, last error and log."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...dataflow.errors import UserError, nearest
from ...dataflow.metric_names import DRIVER
from ...dataflow.runs.alerts import Alert
from ...dataflow.runs.files import LOGS, PROCESSES, STREAM
from ...dataflow.runs.lock import Life
from ...dataflow.runs.tables import batches
from ...dataflow.untrusted_text import redacted
from .metrics import numbers, thinned
from .run_reader import nested

MOST_POINTS = 300
"""Most memory readings of one worker."""
MOST_LOG = 256 << 10
"""[bytes] Most of a log to send at once."""
TAIL = 64 << 10
"""[bytes] End of a log to send first."""


def workers_page(
    run: Path, live: Mapping[str, Any], config: Mapping[str, Any], alerts: Sequence[Alert], life: Life
) -> dict[str, Any]:
    """Return all ranks of all groups, and the driver.

    Args:
        live: the content of `live.json`.
    """
    memory, logs = _memory(run), _logs(run)
    where = {
        who: host for host in nested(live, "hosts") for who in nested(live, "hosts", host, "processes")
    }
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys([*nested(config, "placement"), *nested(live, "groups")]):
        group, place = nested(live, "groups", name), nested(config, "placement", name)
        number = group.get("ranks") or place.get("ranks") or 1
        for rank in range(number):
            worker = f"{name}[{rank}]"
            own = _state(group, rank, life, live)
            log = f"{name}_{rank}.log"
            found.append(
                {
                    "rank": worker,
                    "group": name,
                    "node": where.get(worker),
                    "device": _device(place, rank),
                    "version": group.get("version"),
                    **own,
                    **_of_memory(worker, live, where, memory),
                    **_troubles(worker, alerts),
                    "log": log if log in logs else None,
                    "log_bytes": logs.get(log),
                    "stack": nested(live, "stacks", worker).get("text"),
                    "stack_at": nested(live, "stacks", worker).get("at"),
                }
            )
    driver = {
        "rank": DRIVER,
        "group": None,
        "node": where.get(DRIVER),
        "device": None,
        "log": None,
        "log_bytes": None,
    }
    state = {"state": _of_life(life) or "busy", "call": None, "since_s": None}
    found.append(
        {
            **driver,
            **state,
            **_of_memory(DRIVER, live, where, memory),
            **_troubles(DRIVER, ()),
            "stack": None,
            "stack_at": None,
        }
    )
    return {
        "workers": found,
        "hosts": _hosts(live),
        "logs": [{"name": name, "bytes": size} for name, size in logs.items()],
        "at": live.get("at"),
    }


def _state(group: Mapping[str, Any], rank: int, life: Life, live: Mapping[str, Any]) -> dict[str, Any]:
    over = _of_life(life)
    if over:
        return {"state": over, "call": None, "since_s": None}
    for state, key in (("absent", "absent"), ("starting", "starting"), ("starting", "lacking")):
        if rank in group.get(key, ()):
            return {"state": state, "call": None, "since_s": None}
    # live.json may be some seconds old.
    late_s = max(0.0, time.time() - live.get("at", time.time()))
    for call in group.get("calls", ()):
        if rank in call.get("waits_for", ()):
            return {
                "state": "busy",
                "call": call["what"],
                "rows": call["rows"],
                "since_s": call["since_s"] + late_s,
            }
    return {"state": "idle" if group else "unknown", "call": None, "since_s": None}


def _of_life(life: Life) -> str | None:
    """Return the state of all workers if the run is over, or None."""
    return {Life.DEAD: "dead", Life.ENDED: "ended", Life.UNKNOWN: "unknown"}.get(life)


def _device(place: Mapping[str, Any], rank: int) -> str | None:
    pool = place.get("pool")
    gpus = pool.get("gpus") if isinstance(pool, Mapping) else None
    if gpus is None:
        return None
    return f"GPU {rank % gpus}" if gpus else "CPU"


def _of_memory(
    worker: str,
    live: Mapping[str, Any],
    where: Mapping[str, str],
    memory: Mapping[str, list[list[float]]],
) -> dict[str, Any]:
    host = nested(live, "hosts", where.get(worker, ""))
    now = nested(host, "processes").get(worker)
    return {
        "memory_bytes": now[0] if isinstance(now, list) else None,
        "shared_bytes": now[1] if isinstance(now, list) else None,
        "memory_limit_bytes": host.get("limit_bytes"),
        "memory": memory.get(worker, []),
    }


def _troubles(worker: str, alerts: Sequence[Alert]) -> dict[str, Any]:
    own = [alert for alert in alerts if worker in alert.text]
    last = own[-1] if own else None
    return {
        "restarts": len([alert for alert in own if alert.name == "replaced"]),
        "last_error": None
        if last is None
        else {"text": last.text, "step": last.step, "at": last.time, "name": last.name},
    }


def _hosts(live: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = ("used_bytes", "limit_bytes", "object_store_bytes")
    return [
        {"node": host, **{key: nested(live, "hosts", host).get(key) for key in names}}
        for host in nested(live, "hosts")
    ]


def _memory(run: Path) -> dict[str, list[list[float]]]:
    """Return worker -> [seconds, resident bytes], thinned."""
    times: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, list[np.ndarray]] = {}
    for batch in batches(run / f"{PROCESSES}{STREAM}"):
        workers = np.asarray(batch["worker"].to_pylist())
        for worker in dict.fromkeys(workers.tolist()):
            own = workers == worker
            times.setdefault(worker, []).append(batch["time_s"].to_numpy()[own])
            sizes.setdefault(worker, []).append(
                batch["resident_bytes"].to_numpy()[own].astype(np.float64)
            )
    found: dict[str, list[list[float]]] = {}
    for worker in times:
        x, y = thinned(np.concatenate(times[worker]), np.concatenate(sizes[worker]), MOST_POINTS)
        found[worker] = [[a or 0.0, b or 0.0] for a, b in zip(numbers(x), numbers(y, 12), strict=True)]
    return found


# Logs


def _logs(run: Path) -> dict[str, int]:
    """Return log name -> bytes."""
    try:
        with os.scandir(run / LOGS) as entries:
            return {
                entry.name: entry.stat().st_size
                for entry in sorted(entries, key=lambda e: e.name)
                if entry.is_file()
            }
    except OSError:
        return {}


def log_part(run: Path, name: str, after: int) -> dict[str, Any]:
    """Return the log after a byte offset.

    Args:
        name: the name of the log or worker. It is looked up among the logs, never used as a path.
        after: the byte offset; 0 returns the end of the log.

    Raises:
        UserError: there is no such log.
    """
    logs = _logs(run)
    file = name if name in logs else f"{name.removesuffix(']').replace('[', '_')}.log"
    if file not in logs:
        hint = nearest(name, logs)
        raise UserError(
            f"there is no log of {name!r}{hint}"
            + ("" if logs else "; workers of Local() write to the terminal")
        )
    size = logs[file]
    start = min(max(after, 0), size) if after else max(0, size - TAIL)
    with (run / LOGS / file).open("rb") as opened:
        opened.seek(start)
        data = opened.read(MOST_LOG)
    return {
        "log": file,
        "text": redacted(data.decode(errors="replace")),
        "start": start,
        "next": start + len(data),
        "bytes": size,
    }
