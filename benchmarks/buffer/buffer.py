"""The sample buffer: Weft and TransferQueue in turns on the same bytes, with memcpy as the limit.

    .venv/bin/python benchmarks/buffer/buffer.py                 # all, ten minutes; `make bench-peers` first
    .venv/bin/python benchmarks/buffer/buffer.py --works ragged_put,dense --rounds 3
    .venv/bin/python benchmarks/buffer/buffer.py --small         # a minute, only to see that it works

`rows.py` defines the works, and docs/benchmarks.md explains the comparison. Ratios are of medians
over the rounds. The last line printed is one JSON object: `*_ratio` is Weft's speed over
TransferQueue's, `dense_over_memcpy` the throughput of dense columns over memcpy's, and `claim_p99_ms` the
99th percentile of a claim, by groups held.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from machine import PEERS, has_peers
from turns import System

HERE = Path(__file__).resolve().parent
Answer = Mapping[str, Any]
COMMANDS: dict[str, list[dict[str, Any]]] = {
    "ragged_put": [{"rows": 2048, "groups_per_put": n} for n in (1, 8, 32)],
    "ragged_get": [{"rows": 2048, "claim": n} for n in (16, 64)],
    "dense": [{}],
    "claim": [{"held": n} for n in (1_000, 5_000, 20_000, 60_000, 100_000, 1_000_000)],
    "stream": [{}],
}
SMALL: dict[str, list[dict[str, Any]]] = {
    "ragged_put": [{"groups_per_put": n} for n in (1, 2)],
    "ragged_get": [{}],
    "dense": [{}],
    "claim": [{"held": n} for n in (256, 1_024)],
    "stream": [{}],
}
PEER_HOLDS = 60_000
"""[rows] Largest size for the peer's claims, which slow down with the number of rows."""


def main() -> None:
    arguments = parse_arguments()
    answers: dict[str, list[tuple[dict[str, Any], dict[str, list[Answer]]]]] = {}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        small = ["--small"] if arguments.small else []
        systems = {"weft": System(HERE / "weft_buffer.py", *small, log=Path(folder) / "weft.log")}
        stack.callback(systems["weft"].close)
        if has_peers(not arguments.no_peers, "TransferQueue"):
            systems["peer"] = System(
                HERE / "queue_peer.py", *small, log=Path(folder) / "peer.log", python=PEERS
            )
            stack.callback(systems["peer"].close)
        for work in arguments.works:
            answers[work] = [
                (
                    command,
                    measure(
                        systems, work, command, 1 if work in ("claim", "stream") else arguments.rounds
                    ),
                )
                for command in (SMALL if arguments.small else COMMANDS)[work]
            ]
            print(json.dumps({work: answers[work]}), flush=True)
    print(json.dumps(summary(answers)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--works", default=",".join(COMMANDS), help=f"some of {', '.join(COMMANDS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, help="measurements of each; default: 5 (--small: 1)")
    parser.add_argument("--no-peers", action="store_true", help="leave TransferQueue out")
    parser.add_argument("--small", action="store_true", help="few rows: not a measurement")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.small else 5)
    arguments.works = arguments.works.split(",")
    for work in arguments.works:
        if work not in COMMANDS:
            parser.error(f"there is no work {work!r}; there are {', '.join(COMMANDS)}")
    return arguments


def measure(
    systems: Mapping[str, System], work: str, command: dict[str, Any], rounds: int
) -> dict[str, list[Answer]]:
    """Measure the systems in turns, each once per round."""
    answers: dict[str, list[Answer]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, system in systems.items():
            if name == "peer" and command.get("held", 0) > PEER_HOLDS:
                continue
            [answer] = system.run(1, work=work, **command)
            if not answer["verified"]:
                raise SystemExit(f"{name}: {work} {command}: what came back is not what was put")
            answers[name].append(answer)
    return answers


def middle(answers: Sequence[Answer], key: str) -> float:
    return median(a[key] for a in answers) if answers else float("nan")


def summary(
    answers: Mapping[str, Sequence[tuple[dict[str, Any], dict[str, list[Answer]]]]],
) -> dict[str, Any]:
    """Return the last line of the output. Ratios are Weft's over the peer's."""
    result: dict[str, Any] = {}
    for work, name in (("ragged_put", "groups_per_put"), ("ragged_get", "claim")):
        by_size = {}
        for command, measured in answers.get(work, ()):
            ratio = middle(measured["weft"], "rows_per_s") / middle(
                measured.get("peer", []), "rows_per_s"
            )
            by_size[str(command.get(name, "default"))] = None if ratio != ratio else ratio
        if by_size:
            result[f"{work}_ratio_by_{name}"] = by_size
            # Puts have one group, because groups finish one by one. Gets claim 64 rows.
            result[f"{work}_ratio"] = by_size.get(
                "1" if work == "ragged_put" else "64", next(iter(by_size.values()))
            )
    for _, measured in answers.get("dense", ()):
        rate = {name: dense_rate(each) for name, each in measured.items()}
        result["dense_ratio"] = rate["weft"] / rate.get("peer", float("nan"))
        result["dense_over_memcpy"] = rate["weft"] / middle(measured["weft"], "memcpy_gb_per_s")
    for system in ("weft", "peer"):
        held = {
            str(command["held"]): middle(measured[system], "claim_64_p99_ms")
            for command, measured in answers.get("claim", ())
            if measured.get(system)
        }
        if held:
            result["claim_p99_ms" if system == "weft" else "claim_p99_ms_peer"] = held
    for _, measured in answers.get("stream", ()):
        for name, each in measured.items():
            end = "" if name == "weft" else "_peer"
            result |= {f"stream_{key}{end}": middle(each, key) for key in ("first_s", "idle_share")}
    return {k: None if v != v else v for k, v in result.items()}


def dense_rate(answers: Sequence[Answer]) -> float:
    """Return the rate of a put followed by a get. [GB/s]"""
    return 1 / (1 / middle(answers, "put_gb_per_s") + 1 / middle(answers, "get_gb_per_s"))


if __name__ == "__main__":
    main()
