"""PPO and DPO steps of 1M and 25M parameters: Weft, plain `transformers`, and TRL, in turns.

    python benchmarks/steps/algorithm_steps.py             # `make bench-peers` first, for the comparison with TRL
    python benchmarks/steps/algorithm_steps.py --small --no-peers     # to see that it works: not a measurement

docs/benchmarks.md explains the comparison. The last line printed is one JSON object: `weft_s`,
`bound_s` and `trl_s` are median seconds of a step, and `tokens` counts prompts and responses of a
step. `ppo_ratio_to_bound`, `dpo_ratio_to_bound` and `dpo_ratio_to_trl` are the smallest over the
workloads.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from algorithm_workloads import ALGORITHM_WORKLOADS, AlgorithmWorkload, prepare
from machine import PEERS, cores, describe_machine, has_peers
from records import outside_workers, shares
from turns import Steps, System, take_turns

HERE = Path(__file__).resolve().parent


def main() -> None:
    arguments = parse_arguments()
    results: dict[str, Any] = {"machine": describe_machine()}
    print("  ".join(f"{name}: {value}" for name, value in results["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        for name in arguments.workloads:
            workload = (
                ALGORITHM_WORKLOADS[name].small() if arguments.small else ALGORITHM_WORKLOADS[name]
            )
            prepared = prepare(workload, Path(folder) / name)
            results[name] = {}
            for algorithm in arguments.algorithms:
                number = f"{workload.rows} rows" if algorithm == "ppo" else f"{workload.pairs} pairs"
                print(f"\n{name}, {algorithm}: {number}", flush=True)
                results[name][algorithm] = measure(algorithm, workload, prepared, arguments)
                print(json.dumps(results[name][algorithm]), flush=True)
    print(json.dumps(results | smallest([results[name] for name in arguments.workloads])))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=ALGORITHM_WORKLOADS, default=list(ALGORITHM_WORKLOADS)
    )
    parser.add_argument("--algorithms", nargs="+", choices=["ppo", "dpo"], default=["ppo", "dpo"])
    parser.add_argument(
        "--steps", type=int, default=8, help="counted steps per system; default: %(default)s"
    )
    parser.add_argument(
        "--ranks", type=int, default=cores(), help="ranks per group of Weft; default: one per core"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave TRL out")
    parser.add_argument("--small", action="store_true", help="tiny models: not a measurement")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, not {arguments.steps}")
    return arguments


def measure(
    algorithm: str, workload: AlgorithmWorkload, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the results of one algorithm on one workload."""

    def weft() -> System:
        settings = json.dumps({"ranks": arguments.ranks, "cores": cores()})
        return System(HERE / "weft_steps.py", algorithm, folder, settings, log=folder / "weft.log")

    def bound() -> System:
        return System(HERE / "algorithm_bound.py", algorithm, folder, log=folder / "bound.log")

    def trl() -> System:
        settings = json.dumps({"microbatch": workload.trl_microbatch})
        return System(
            HERE / "trl_steps.py", "dpo", folder, settings, log=folder / "trl.log", python=PEERS
        )

    starts: dict[str, Callable[[], System]] = {"weft": weft, "bound": bound}
    if algorithm == "dpo" and has_peers(not arguments.no_peers, "TRL"):
        starts["trl"] = trl
    measured, facts = take_turns(starts, arguments.steps)
    return summarize(measured) | {f"{system}_settings": fact for system, fact in facts.items()}


def summarize(measured: Mapping[str, Steps]) -> dict[str, Any]:
    """Return medians over steps, and Weft's speed relative to the others."""
    seconds = {name: median(step["step_s"] for step in steps) for name, steps in measured.items()}
    weft = measured["weft"]
    return {
        **{f"{name}_s": round(value, 4) for name, value in seconds.items()},
        "tokens": weft[0]["tokens"],
        "tokens_per_s": round(weft[0]["tokens"] / seconds["weft"], 1),
        **{
            f"ratio_to_{name}": round(value / seconds["weft"], 4)
            for name, value in seconds.items()
            if name != "weft"
        },
        "shares": shares(
            weft, {node: node for step in weft for node in sorted({c["node"] for c in step["calls"]})}
        ),
        "outside_workers": outside_workers(weft),
        "steps": len(weft),
    }


def smallest(results: list[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the worst workload's value of each ratio, or None if not measured.

    >>> smallest([{"dpo": {"ratio_to_bound": 0.9}}, {"dpo": {"ratio_to_bound": 0.8, "ratio_to_trl": 1.5}}])
    {'ppo_ratio_to_bound': None, 'dpo_ratio_to_bound': 0.8, 'dpo_ratio_to_trl': 1.5}
    """
    keys = (("ppo", "ratio_to_bound"), ("dpo", "ratio_to_bound"), ("dpo", "ratio_to_trl"))
    measured = {key: [r[key[0]][key[1]] for r in results if key[1] in r.get(key[0], {})] for key in keys}
    return {
        f"{algorithm}_{ratio}": min(each, default=None) for (algorithm, ratio), each in measured.items()
    }


if __name__ == "__main__":
    main()
