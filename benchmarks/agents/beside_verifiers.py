"""Turns per second of verifiers' own training client, over those through Weft's chat API.

    python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers
    python benchmarks/agents.py --parts beside_verifiers

Both clients are the real ones, in one process for all sessions as in verifiers' interception server
(`verifiers_clients.py`), and share the engine, its rank, the gateway, and the lengths of turns. The
training client renders messages itself and sends token ids; the other one sends messages, which the
gateway renders. The model samples random tokens, and verifiers' client tokenises some turns again,
because their text does not keep all of them. That lengthens its prompts.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from throughput import DEADLINE_S, SESSIONS, Setting, episodes, in_a_process

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parents[1] / ".venv-verifiers" / "bin" / "python"
ROUNDS = 5
TURNS = 4
"""Turns of a session. Text that is tokenised again becomes longer, and must fit into the context."""


def hand_over(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """Harness: give the key of an episode away, and wait until its turns have been made."""
    folder = Path(row["folder"])
    (folder / f"{row['number']}.part").write_text(json.dumps([base_url, api_key]))
    (folder / f"{row['number']}.part").rename(folder / f"{row['number']}.key")
    until_s = time.monotonic() + DEADLINE_S
    while not (folder / "done").exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"no {folder / 'done'}")
        time.sleep(0.05)
    return 1.0


def turns_per_s(setting: Setting, client: str, rows: list[dict[str, Any]]) -> float:
    """Make the turns of all rows with a client. Return turns per second."""
    from weft.workers.agents.harness import Function

    harness = Function(function=hand_over, concurrency=SESSIONS, deadline_s=DEADLINE_S)
    with tempfile.TemporaryDirectory() as folder:
        rows = [{**row, "folder": folder} for row in rows]
        result: list[float] = []
        made = threading.Thread(target=lambda: result.append(_made(setting, client, rows, Path(folder))))
        made.start()
        for _ in setting.run(rows, harness, exact=client == "eval"):
            pass
        made.join()
    return result[0]


def _made(setting: Setting, client: str, rows: list[dict[str, Any]], folder: Path) -> float:
    try:
        until_s, keys = time.monotonic() + DEADLINE_S, []
        while len(keys) < len(rows):
            assert time.monotonic() < until_s, f"{len(rows) - len(keys)} episodes did not start"
            time.sleep(0.05)
            keys = sorted(folder.glob("*.key"), key=lambda path: int(path.stem))
        given = [json.loads(path.read_text()) for path in keys]
        sessions = [
            {"key": key, "tokens": row["tokens"]} for (_, key), row in zip(given, rows, strict=True)
        ]
        base_url = f"{given[0][0].partition('/e/')[0]}/v1"
        asked = {"client": client, "base_url": base_url, "model": setting.model, "sessions": sessions}
        done = subprocess.run(
            ["taskset", "-c", ",".join(map(str, setting.others)), PYTHON, HERE / "verifiers_clients.py"],
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            check=True,
            env={**os.environ, "WEFT_BENCHMARK_KEY": "any"},
        )
        return json.loads(done.stdout.splitlines()[-1])["turns_per_s"]
    finally:
        (folder / "done").touch()


def figures() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, closing(Setting(Path(folder))) as setting:
        rows = [{**row, "tokens": row["tokens"][:TURNS]} for row in episodes(SESSIONS, seed=0)]
        turns_per_s(setting, "eval", rows[:8])  # warm up
        pairs: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            pairs.append((turns_per_s(setting, "train", rows), turns_per_s(setting, "eval", rows)))
            theirs, ours = pairs[-1]
            print(f"  verifiers' client {theirs:.1f} turns/s, ours {ours:.1f}", flush=True)
    return {"beside_verifiers": round(median(theirs / ours for theirs, ours in pairs), 3)}


def measure() -> dict[str, Any]:
    """Return `beside_verifiers`, measured in a new process; None without verifiers."""
    if not PYTHON.is_file():
        print(f"beside_verifiers needs verifiers in {PYTHON.parent.parent}", flush=True)
        return {"beside_verifiers": None}
    return in_a_process(__file__)


if __name__ == "__main__":
    print(json.dumps(figures()))
