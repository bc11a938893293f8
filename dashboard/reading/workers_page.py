"""The workers page: each rank's node, call, memory, restarts, last error and log."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...dataflow.errors import UserError, nearest
from ...dataflow.metric_names import DRIVER
from ...dataflow.runs.files import LOGS, PROCESSES, STREAM
from ...dataflow.runs.lock import Life
from ...dataflow.runs.tables import batches
from ...dataflow.untrusted_text import redacted
from .metrics import numbers, thinned
from .run_reader import RunReader, nested, read_live

MOST_POINTS = 300
"""Maximum number of memory readings of a worker to send."""
MOST_LOG = 256 << 10
"""[bytes] Maximum part of a log to send at once."""
TAIL = 64 << 10
"""[bytes] End of a log to send first."""
OVER = {Life.DEAD: "dead", Life.ENDED: "ended", Life.UNKNOWN: "unknown"}
"""Maps the life of a run that is over to the state of its workers."""


def workers_page(run: RunReader) -> dict[str, Any]:
    live, facts = read_live(run.path), run.facts
    memory, logs = _memory(run.path), _logs(run.path)
    hosts = nested(live, "hosts")
    where = {who: name for name in hosts for who in nested(hosts, name, "processes")}

    def worker(name: str) -> dict[str, Any]:
        host = nested(hosts, where.get(name, ""))
        own = [alert for alert in facts.alerts if name in alert.text] if name != DRIVER else []
        return {
            "rank": name,
            "node": where.get(name),
            "memory_bytes": nested(host, "processes").get(name, [None])[0],
            "memory_limit_bytes": host.get("limit_bytes"),
            "memory": memory.get(name, []),
            "restarts": sum(alert.name == "replaced" for alert in own),
            "last_error": {"text": own[-1].text} if own else None,
            "stack": nested(live, "stacks", name).get("text"),
        }

    found: list[dict[str, Any]] = []
    for name in dict.fromkeys([*nested(facts.config, "placement"), *nested(live, "groups")]):
        group, place = nested(live, "groups", name), nested(facts.config, "placement", name)
        gpus = nested(place, "pool").get("gpus")
        for rank in range(group.get("ranks") or place.get("ranks") or 1):
            device = None if gpus is None else f"GPU {rank % gpus}" if gpus else "CPU"
            log = f"{name}_{rank}.log"
            state = {"state": OVER[facts.life]} if facts.life in OVER else _state(group, rank, live)
            own = {"device": device, "log": log if log in logs else None}
            found.append({**worker(f"{name}[{rank}]"), **state, **own})
    found.append({**worker(DRIVER), "state": OVER.get(facts.life, "busy")})
    return {"workers": found}


def _state(group: Mapping[str, Any], rank: int, live: Mapping[str, Any]) -> dict[str, Any]:
    for key, state in (("absent", "absent"), ("starting", "starting"), ("lacking", "starting")):
        if rank in group.get(key, ()):
            return {"state": state}
    late_s = max(0.0, time.time() - live.get("at", time.time()))
    for call in group.get("calls", ()):
        if rank in call["waits_for"]:
            return {"state": "busy", "call": call["what"], "since_s": call["since_s"] + late_s}
    return {"state": "idle" if group else "unknown"}


def _memory(run: Path) -> dict[str, list[list[float]]]:
    """Map workers to lists of [seconds, resident bytes], thinned."""
    readings: dict[str, list[np.ndarray]] = {}
    for batch in batches(run / f"{PROCESSES}{STREAM}"):
        workers = np.asarray(batch["worker"].to_pylist())
        points = np.stack(
            [batch["time_s"].to_numpy(), batch["resident_bytes"].to_numpy().astype(np.float64)]
        )
        for worker in dict.fromkeys(workers.tolist()):
            readings.setdefault(worker, []).append(points[:, workers == worker])
    found: dict[str, list[list[float]]] = {}
    for worker, parts in readings.items():
        times, sizes = np.concatenate(parts, axis=1)
        x, y = thinned(times, sizes, MOST_POINTS)
        found[worker] = [[a or 0.0, b or 0.0] for a, b in zip(numbers(x), numbers(y, 12), strict=True)]
    return found


# Logs


def _logs(run: Path) -> dict[str, int]:
    try:
        with os.scandir(run / LOGS) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except OSError:
        return {}


def log_part(run: Path, name: str, after: int) -> dict[str, Any]:
    """Return the part of a log after a byte offset, or the log's end for offset 0. `name`, of a log
    or worker, is never used as a path. Raises UserError if there is no such log."""
    logs = _logs(run)
    file = name if name in logs else f"{name.removesuffix(']').replace('[', '_')}.log"
    if file not in logs:
        local = "" if logs else "; workers of Local() write to the terminal"
        raise UserError(f"there is no log of {name!r}{nearest(name, sorted(logs))}{local}")
    size = logs[file]
    start = min(max(after, 0), size) if after else max(0, size - TAIL)
    with (run / LOGS / file).open("rb") as opened:
        opened.seek(start)
        data = opened.read(MOST_LOG)
    return {"text": redacted(data.decode(errors="replace")), "next": start + len(data)}
