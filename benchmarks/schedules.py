"""One graph under every schedule, on real workers: what overlapping generation and training is worth; and what the driver takes.

    python benchmarks/schedules.py                       # half an hour, on two cores that nobody else uses
    python benchmarks/schedules.py --calibrate           # first finds how many responses at once balance the two stages
    python benchmarks/schedules.py --small               # a minute, to see that it works: not a measurement

docs/benchmarks.md says what is compared and what the keys mean. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from turns import System
from workloads import PROMPT_TOKENS, Workload, prepare

HERE = Path(__file__).resolve().parent
APART = ("rollout", "actor")
"""Groups that have a core each, or share both."""
SCHEDULES: dict[str, tuple[str, int, bool]] = {
    "synchronous": ("synchronous", 0, True),
    "pipelined": ("pipelined", 0, True),
    "asynchronous_1": ("asynchronous", 1, True),
    "asynchronous_2": ("asynchronous", 2, True),
    "colocated": ("synchronous", 0, False),
}
"""Name -> the schedule, its staleness, and whether rollout and actor have a core each or both of them in turns."""
DEVICES = (8, 32, 64, 256, 1024)
"""That are simulated."""
SLOTS = (12, 16, 24, 32, 48)
"""Responses at once that --calibrate tries."""

Measured = Mapping[str, Sequence[Mapping[str, Any]]]
"""Schedule -> what its runs said."""


@dataclass(frozen=True)
class Work:
    """What every schedule does. Generation and training alone take about the same time a step with these."""

    groups: int = 32
    samples: int = 8
    median: float = 32.0
    """Tokens of a response; lengths are log-normal."""
    sigma: float = 0.8
    longest: int = 192
    slots: int = 24
    """Responses that the engine works on at once: fewer take it longer, and do nothing to training."""
    groups_per_part: int = 2
    """Half of the tokens that a microbatch holds: the first part comes early."""
    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    mlp: int = 1024
    warm_up: int = 1
    counted: int = 6
    tail: int = 3
    """Steps after the counted ones, in which generation that runs ahead comes to its end: more than the staleness."""

    @property
    def steps(self) -> int:
        return self.warm_up + self.counted + self.tail

    @property
    def context(self) -> int:
        return PROMPT_TOKENS + self.longest

    def workload(self) -> Workload:
        """The model, and a prompt of its own for each group of the run."""
        return Workload(
            "schedules",
            num_prompts=self.groups * self.steps,
            num_samples=self.samples,
            max_tokens=self.longest,
            vocabulary=self.vocabulary,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            mlp=self.mlp,
        )

    def small(self) -> Work:
        return replace(
            self,
            groups=3,
            groups_per_part=1,
            samples=4,
            median=6.0,
            longest=24,
            slots=8,
            vocabulary=256,
            hidden=64,
            layers=2,
            heads=2,
            mlp=128,
            warm_up=1,
            counted=3,
            tail=3,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="runs of each schedule; default: 2 (--small: 1)")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="which of them; default: all")
    parser.add_argument(
        "--calibrate", action="store_true", help="first find the number of slots that balances the stages"
    )
    parser.add_argument("--steps", type=int, help="steps counted of each run; default: 6 (--small: 3)")
    parser.add_argument("--no-dispatch", action="store_true", help="leave the driver's overhead out")
    parser.add_argument("--no-peers", action="store_true", help="leave verl out")
    parser.add_argument("--small", action="store_true", help="tiny: not a measurement")
    parser.add_argument("--raw", type=Path, help="write all that the runs said to this file, as JSON")
    arguments = parser.parse_args()
    names = arguments.schedules.split(",")
    if unknown := set(names) - set(SCHEDULES):
        parser.error(f"no schedule {', '.join(unknown)}; there are {', '.join(SCHEDULES)}")
    work = Work().small() if arguments.small else Work()
    work = replace(work, counted=arguments.steps or work.counted)
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="weft-schedules-") as folder:
        if arguments.calibrate:
            work = calibrate(work, Path(folder))
        made = prepare(work.workload(), Path(folder) / "work")
        rounds = arguments.rounds or (1 if arguments.small else 2)
        measured = measure(work, made, names, rounds, at_once=2 if arguments.small else 1)
        if arguments.raw:
            arguments.raw.write_text(json.dumps(measured))
        from simulated_schedules import simulated  # imports Weft, which the processes above do for themselves

        predicted = simulated(work, made, measured, devices=(8,) if arguments.small else DEVICES)
    results: dict[str, Any] = summarize(measured) | predicted
    results |= {"load": [*load, os.getloadavg()[0]], "work": asdict(work)}
    print(table(results), flush=True)
    if not arguments.no_dispatch:
        from dispatch import run

        results |= run(arguments.small, not arguments.no_peers)
    print(json.dumps(results))


def calibrate(work: Work, folder: Path) -> Work:
    """The number of slots with which generation and training alone take the same time."""
    short = replace(work, counted=3, tail=1)
    made = prepare(short.workload(), folder / "calibration")
    apart: dict[int, float] = {}
    for slots in SLOTS:
        busy = run(replace(short, slots=slots), "synchronous", made, f"slots_{slots}")["busy_s"]
        apart[slots] = abs(busy["rollout"] - busy["actor"])
        print(f"  {slots} slots: generation {busy['rollout']:.2f} s, training {busy['actor']:.2f} s a step", flush=True)
    return replace(work, slots=min(apart, key=lambda slots: apart[slots]))


def measure(work: Work, folder: Path, names: Sequence[str], rounds: int, at_once: int) -> Measured:
    """Each schedule in a process of its own, one after the other, every other round in the opposite order: a slow minute of the
    machine is not always the same one's. (In turns, as in turns.py, those that run ahead would work in others' turns.)"""
    measured: dict[str, list[Mapping[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        order = names if number % 2 == 0 else names[::-1]
        with ThreadPoolExecutor(at_once) as threads:
            made = threads.map(lambda name: run(work, name, folder, f"{name}_{number}"), order)  # noqa: B023
            for name, facts in zip(order, made, strict=True):
                measured[name].append(facts)
                steps = ", ".join(f"{s:.2f}" for s in facts["step_s"])
                busy = ", ".join(f"{group} {s:.2f}" for group, s in facts["busy_s"].items())
                busy += "; core seconds " + ", ".join(f"{who} {s:.2f}" for who, s in facts["core_s"].items())
                print(
                    f"  {name}: {mean(facts['step_s']):.3f} s a step ({steps}); busy {busy}; "
                    f"cores busy {100 * facts['machine_busy']:.0f} %, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    return measured


def run(work: Work, name: str, folder: Path, log: str) -> dict[str, Any]:
    """One schedule from start to end."""
    settings = json.dumps({"schedule": name, **asdict(work)})
    system = System([sys.executable, HERE / "schedules_weft.py", folder, settings], folder / f"{log}.log")
    system.close()
    return system.facts


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def summarize(measured: Measured) -> dict[str, Any]:
    """Medians over the runs of a schedule, of the mean seconds of its counted steps: all have the same work to do in them.

    >>> def facts(*steps, rollout=1.0, actor=1.0):
    ...     return {"step_s": steps, "busy_s": {"rollout": rollout, "actor": actor}, "stale_rows": 0, "violations": [],
    ...             "idle": {"actor": {"idle_s": 1.0}}, "machine_busy": 1.0,
    ...             "core_s": {"driver": 0.1, "rollout": 1.0, "actor": 1.0}}
    >>> runs = {"synchronous": [facts(2.0, 4.0, rollout=1.4, actor=1.5)], "asynchronous_1": [facts(1.5, 1.9)]}
    >>> result = summarize(runs)
    >>> result["async_speedup"], result["share_of_bound"], result["pipelined_speedup"], result["staleness_violations"]
    (1.7647, 0.8824, None, 0)
    """
    seconds = {name: median(mean(facts["step_s"]) for facts in runs) for name, runs in measured.items()}
    alone = {
        stage: median(facts["busy_s"][group] for facts in measured.get("synchronous", ()))
        if measured.get("synchronous")
        else None
        for stage, group in (("generation", "rollout"), ("training", "actor"))
    }
    bound = max((s for s in alone.values() if s is not None), default=None)
    sync, async_s = seconds.get("synchronous"), seconds.get("asynchronous_1")
    runs = [facts for each in measured.values() for facts in each]
    return {
        "pipelined_speedup": ratio(sync, seconds.get("pipelined")),
        "async_speedup": ratio(sync, async_s),
        "async_2_speedup": ratio(sync, seconds.get("asynchronous_2")),
        "share_of_bound": ratio(bound, async_s),
        "async_over_colocated": ratio(seconds.get("colocated"), async_s),
        "staleness_violations": sum(facts["stale_rows"] for facts in runs),
        "log_violations": sum(len(facts["violations"]) for facts in runs),
        **{f"{name}_s": round(s, 4) for name, s in seconds.items()},
        "median_step_s": {
            name: round(median(s for facts in each for s in facts["step_s"]), 4) for name, each in measured.items()
        },
        "generation_alone_s": alone["generation"] and round(alone["generation"], 4),
        "training_alone_s": alone["training"] and round(alone["training"], 4),
        "busy_s": {
            name: {group: round(median(f["busy_s"][group] for f in each), 4) for group in APART}
            for name, each in measured.items()
        },
        "idle": {name: each[0]["idle"] for name, each in measured.items()},
        "core_s": {
            name: {who: round(median(f["core_s"][who] for f in each), 4) for who in ("driver", *APART)}
            for name, each in measured.items()
        },
        "machine_busy": {name: round(median(f["machine_busy"] for f in each), 3) for name, each in measured.items()},
    }


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else round(above / below, 4)


def table(results: Mapping[str, Any]) -> str:
    """For a person."""
    lines = [f"  {'schedule':<16}{'s/step':>8}{'rollout':>9}{'actor':>8}   busy seconds of a step"]
    for name, busy in results["busy_s"].items():
        lines.append(f"  {name:<16}{results[f'{name}_s']:>8.3f}{busy['rollout']:>9.3f}{busy['actor']:>8.3f}")
    alone = f"  alone: generation {results['generation_alone_s']} s, training {results['training_alone_s']} s a step"
    keys = ("pipelined_speedup", "async_speedup", "share_of_bound", "async_over_colocated", "staleness_violations")
    return "\n".join([*lines, alone, "  " + "  ".join(f"{key} {results[key]}" for key in keys)])


if __name__ == "__main__":
    main()
