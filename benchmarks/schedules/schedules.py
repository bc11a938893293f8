"""One graph under every schedule on real workers: the benefit of overlap, and the cost of the
driver.

    python benchmarks/schedules/schedules.py                       # half an hour, on two idle cores
    python benchmarks/schedules/schedules.py --small               # a minute, to see that it works: not a measurement

docs/benchmarks.md explains the comparison. The last line printed is one JSON object:

    *_s: seconds a step: synchronous, pipelined, asynchronous_1, asynchronous_2 (staleness 1, 2)
        apart; colocated (synchronous).
    pipelined_speedup, async_speedup, async_2_speedup: over synchronous_s.
    generation_alone_s, training_alone_s: seconds a step that each stage is busy in the
        synchronous run.
    share_of_bound: the larger of the two / asynchronous_1_s; above 1 is possible, because
        vLLM's batch stays full without step ends.
    async_over_colocated: colocated_s / asynchronous_1_s.
    staleness_violations, log_violations: violations of the rules for staleness and for rows.
    busy_s, idle: of rollout and actor: seconds a step with a call in progress, and without one
        by the call that ended the gap.
    core_s, machine_busy: CPU seconds a step of driver, rollout and actor; share of the
        machine's cores in use.
    simulated_error, simulated_errors: the simulator's largest relative error, and each
        schedule's, with costs from those runs.
    simulated_error_from_synchronous: the same with costs from the synchronous runs.
    simulated_256_*: staleness 1 on 256 devices: speedup over Synchronous apart, over_colocated,
        and share_of_bound (the slowest pool's work, perfectly balanced).
    simulated: seconds of a step and the bound, for each number of devices and schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from machine import load
from turns import System, ratio
from work import APART, SCHEDULES, Measured, Work, mean
from workloads import prepare

HERE = Path(__file__).resolve().parent
DEVICES = (8, 32, 64, 256, 1024)
"""Numbers of simulated devices."""


def main() -> None:
    arguments = parse_arguments()
    names, small = arguments.schedules.split(","), arguments.small
    work = Work().small() if small else Work()
    work = replace(work, counted=arguments.steps or work.counted)
    loads = [load()]
    with tempfile.TemporaryDirectory(prefix="weft-schedules-") as folder:
        made = prepare(work.workload(), Path(folder) / "work")
        rounds = arguments.rounds or (1 if small else 2)
        measured = measure(work, made, names, rounds, at_once=2 if small else 1)
        results: dict[str, Any] = summarize(measured)
        if not arguments.no_simulation:
            # imports Weft, which the processes above import themselves
            from simulated import simulated

            results |= simulated(work, made, measured, devices=(8,) if small else DEVICES)
    results |= {"load": [*loads, load()], "work": asdict(work)}
    print(json.dumps(results))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="runs of each schedule; default: 2 (--small: 1)")
    parser.add_argument(
        "--schedules", default=",".join(SCHEDULES), help=f"some of {', '.join(SCHEDULES)}; default: all"
    )
    parser.add_argument("--steps", type=int, help="counted steps per run; default: 6 (--small: 3)")
    parser.add_argument("--no-simulation", action="store_true", help="leave the simulator out")
    parser.add_argument("--small", action="store_true", help="tiny: not a measurement")
    arguments = parser.parse_args()
    if unknown := set(arguments.schedules.split(",")) - set(SCHEDULES):
        parser.error(f"no schedule {', '.join(unknown)}; there are {', '.join(SCHEDULES)}")
    return arguments


def measure(work: Work, folder: Path, names: Sequence[str], rounds: int, at_once: int) -> Measured:
    """Run each schedule in a separate process, one after another.

    Every other round has the opposite order, so that slow phases of the machine do not always hit
    the same schedule. Turns as in turns.py would not work: schedules that run ahead would work
    during others' turns.
    """
    measured: dict[str, list[Mapping[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        order = names if number % 2 == 0 else names[::-1]
        with ThreadPoolExecutor(at_once) as threads:
            made = threads.map(lambda name: run(work, name, folder, f"{name}_{number}"), order)  # noqa: B023
            for name, facts in zip(order, made, strict=True):
                measured[name].append(facts)
                busy = ", ".join(f"{group} {s:.2f}" for group, s in facts["busy_s"].items())
                core = ", ".join(f"{who} {s:.2f}" for who, s in facts["core_s"].items())
                steps = ", ".join(f"{s:.2f}" for s in facts["step_s"])
                cores = f"cores busy {100 * facts['machine_busy']:.0f} %, load {os.getloadavg()[0]:.1f}"
                said = f"{mean(facts['step_s']):.3f} s a step ({steps}); busy {busy}; core seconds {core}; {cores}"
                print(f"  {name}: {said}", flush=True)
    return measured


def run(work: Work, name: str, folder: Path, log: str) -> dict[str, Any]:
    settings = json.dumps({"schedule": name, **asdict(work)})
    system = System(HERE / "weft_run.py", folder, settings, log=folder / f"{log}.log")
    system.close()
    return system.facts


def summarize(measured: Measured) -> dict[str, Any]:
    """Return medians over the runs of a schedule of mean seconds per counted step.

    All schedules have the same work in these steps.

    >>> def facts(*steps, rollout=1.0, actor=1.0):
    ...     return {"step_s": steps, "busy_s": {"rollout": rollout, "actor": actor}, "staleness_violations": 0, "violations": [],
    ...             "idle": {"actor": {"idle_s": 1.0}}, "machine_busy": 1.0,
    ...             "core_s": {"driver": 0.1, "rollout": 1.0, "actor": 1.0}}
    >>> runs = {"synchronous": [facts(2.0, 4.0, rollout=1.4, actor=1.5)], "asynchronous_1": [facts(1.5, 1.9)]}
    >>> result = summarize(runs)
    >>> result["async_speedup"], result["share_of_bound"], result["pipelined_speedup"], result["staleness_violations"]
    (1.7647, 0.8824, None, 0)
    """
    seconds = {name: median(mean(facts["step_s"]) for facts in runs) for name, runs in measured.items()}
    synchronous, async_s, sync = (
        measured.get("synchronous", ()),
        seconds.get("asynchronous_1"),
        seconds.get("synchronous"),
    )
    alone = {
        stage: median(facts["busy_s"][group] for facts in synchronous) if synchronous else None
        for stage, group in (("generation", "rollout"), ("training", "actor"))
    }
    bound = max((s for s in alone.values() if s is not None), default=None)
    runs = [facts for each in measured.values() for facts in each]

    def middle(key: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
        return {
            schedule: {name: round(median(facts[key][name] for facts in each), 4) for name in names}
            for schedule, each in measured.items()
        }

    return {
        "pipelined_speedup": ratio(sync, seconds.get("pipelined")),
        "async_speedup": ratio(sync, async_s),
        "async_2_speedup": ratio(sync, seconds.get("asynchronous_2")),
        "share_of_bound": ratio(bound, async_s),
        "async_over_colocated": ratio(seconds.get("colocated"), async_s),
        "staleness_violations": sum(facts["staleness_violations"] for facts in runs),
        "log_violations": sum(len(facts["violations"]) for facts in runs),
        **{f"{name}_s": round(s, 4) for name, s in seconds.items()},
        **{f"{stage}_alone_s": s and round(s, 4) for stage, s in alone.items()},
        "busy_s": middle("busy_s", APART),
        "idle": {name: each[0]["idle"] for name, each in measured.items()},
        "core_s": middle("core_s", ("driver", *APART)),
        "machine_busy": {
            name: round(median(f["machine_busy"] for f in each), 3) for name, each in measured.items()
        },
    }


if __name__ == "__main__":
    main()
