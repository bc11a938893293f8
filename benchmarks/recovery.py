"""What a run loses when its processes are killed, what a damaged checkpoint does, and what recovery costs.

    python benchmarks/recovery.py                       # an hour
    python benchmarks/recovery.py --parts kills,left    # some of kills, identical, damage, pause, times, left
    python benchmarks/recovery.py --small               # two minutes, to see that it works: not a measurement

Each run is a program of its own (`recovery_run.py`, or the example), and everything that is killed is a real process.
docs/benchmarks.md says what the keys mean. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from recovery_damage import SPARE, damage_all
from recovery_identical import resumed_runs
from recovery_left import ENDINGS, Left, end_one
from recovery_log import Account, account, incomplete_steps
from recovery_pause import make_model
from recovery_pause import measure as measure_pause
from recovery_processes import Run, RunEnded, RunStuck
from recovery_run import SAMPLES
from workloads import PROMPT_TOKENS, Workload, prepare

from weft.dataflow.buffer.sample_buffer import LOG

PROMPTS = 4
"""In a step of `recovery_run.py`."""
SOURCE = 64
"""Prompts that there are."""
CONTEXT = 128
"""Context of the model."""
SCHEDULES = ("synchronous", "pipelined", "asynchronous")
VICTIMS = ("driver", "rollout", "actor", "reward")
KEYS = (
    "kills",
    "lost",
    "duplicated",
    "resumed_identical",
    "damage_cases",
    "damage_found",
    "rollout_recovery_s",
    "actor_recovery_s",
    "checkpoint_pause_s",
    "left_behind",
)


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    kills: int = 50
    steps_per_kill: int = 10
    """Steps that a run of part `kills` has for each: it must not be over before they are through."""
    endings: int = 5
    resumed: int = 20
    """Runs that are killed and resumed, with each engine."""
    checkpoints: int = 10
    times: int = 3
    """Kills of a rollout and of an actor whose recovery is timed."""
    engines: tuple[str, ...] = ("transformers", "vllm")


SMALL = Size(kills=3, steps_per_kill=20, endings=2, resumed=2, engines=("transformers",), checkpoints=3, times=1)
Part = Callable[[Path, Path, Size, int], dict[str, Any]]


# Kills: real processes under Ray, at random moments


@dataclass
class Struck:
    """What a run went through."""

    kills: Counter[str]
    seconds: dict[str, list[float]]
    """Victim -> from each kill until the next step was over."""
    ended: list[str]
    """The last line of each driver that gave up, and was started again."""
    stuck: int = 0
    """Times that a run did not go on, and was ended and started again."""


def kill_one(run: Run, victim: str, rng: random.Random, struck: Struck) -> None:
    """Kill a process, and wait until the run is whole and a step further."""
    ranks, before = run.ranks(), run.step
    assert run.driver is not None
    names = sorted(name for name in ranks if name.startswith(f"{victim}_"))
    hit: psutil.Process = run.driver if victim == "driver" else ranks[rng.choice(names)]
    began = time.monotonic()
    hit.kill()
    struck.kills[victim] += 1
    if victim == "driver":
        run.finish()
        run.start("--resume", "latest")
    go_on(run, [*ranks.values()] if victim == "driver" else [hit], before, victim, struck)
    struck.seconds[victim].append(time.monotonic() - began)


def go_on(run: Run, gone: Sequence[psutil.Process], before: int, victim: str, struck: Struck) -> None:
    """Wait until a run has all of its processes, none of those that are gone, and a step more; start it again when it has ended."""
    while True:
        try:
            run.wait_until_whole(gone)
            run.wait_for_step(min(run.step, before))
            return
        except RunStuck:
            struck.stuck += 1
            print(f"  stuck after the kill of {victim}; the end of what it said:\n{run.said[-1500:]}", flush=True)
            gone = [*run.ranks().values()]
            run.signal_all(signal.SIGKILL)
            run.finish()
        except RunEnded:
            struck.ended.append(f"after {victim}: {last_words(run.said)}")
            print(f"  the driver gave up {struck.ended[-1]}", flush=True)
            gone = [*gone, *run.ranks().values()]
        run.start("--resume", "latest")


def last_words(said: str) -> str:
    """The last line of an error in what a program printed."""
    lines = [line for line in said.splitlines() if "Error" in line]
    return lines[-1][:300] if lines else said[-300:]


def kills(work: Path, root: Path, size: Size, seed: int) -> dict[str, Any]:
    struck = Struck(Counter(), {victim: [] for victim in VICTIMS}, [])
    rng = random.Random(seed)
    accounts: list[Account] = []
    wrong: list[str] = []
    for k, schedule in enumerate(SCHEDULES):
        share = size.kills // 3 + (k < size.kills % 3)
        steps = share * size.steps_per_kill
        began = time.monotonic()
        with Run(
            root, f"kills-{schedule}", "--folder", str(work), "--schedule", schedule, "--steps", str(steps)
        ) as run:
            done = kill_many(run, share, steps, rng, struck)
            if code := run.finish():
                wrong.append(f"{schedule} ended with {code}: {last_words(run.said)}")
        found = account(run.path / "buffer", samples=SAMPLES, source=SOURCE, seed=0)
        accounts.append(found)
        wrong += found.violations[:5] + incomplete_steps(run.path, steps, PROMPTS * SAMPLES)
        if found.trained != steps * PROMPTS * SAMPLES:
            wrong.append(f"{schedule}: {found.trained} samples trained on, not {steps * PROMPTS * SAMPLES}")
        print(
            f"{schedule:<13}{done:>3} kills, {steps} steps in {time.monotonic() - began:.0f} s: {found.prompts} prompts, "
            f"{found.trained} samples trained, {found.in_flight} in flight, {found.issued_again} prompts issued again, "
            f"{found.lost} lost, {found.duplicated} duplicated",
            flush=True,
        )
    recovery = {victim: summary(seconds) for victim, seconds in struck.seconds.items() if seconds}
    print(f"seconds from a kill to the end of the next step: {recovery}", flush=True)
    return {
        "kills": struck.kills.total(),
        "lost": sum(a.lost for a in accounts),
        "duplicated": sum(a.duplicated for a in accounts),
        "kills_by": dict(sorted(struck.kills.items())),
        "prompts": sum(a.prompts for a in accounts),
        "in_flight": sum(a.in_flight for a in accounts),
        "runs_ended": struck.ended,
        "runs_stuck": struck.stuck,
        "kills_wrong": wrong,
        "kill_to_next_step_s": recovery,
    }


def kill_many(run: Run, number: int, steps: int, rng: random.Random, struck: Struck) -> int:
    """Start a run, and kill one of its processes every few steps, at any moment of a step; returns how many."""
    run.start()
    run.wait_until_whole()
    run.wait_for_step(2)  # the first checkpoint: without one, an actor's death ends the run
    for done in range(number):
        pace = 0.0
        for _ in range(rng.randint(1, 3)):
            if run.step >= steps - 4:
                return done
            try:
                pace = run.wait_for_step(run.step)
            except (RunEnded, RunStuck):  # later than it seemed
                go_on(run, [], run.step, "some while ago", struck)
        time.sleep(rng.uniform(0, pace))
        kill_one(run, rng.choice(VICTIMS), rng, struck)
    return number


def summary(seconds: list[float]) -> dict[str, float]:
    return {"median": round(median(seconds), 2), "max": round(max(seconds), 2), "times": len(seconds)}


# Identical: a synchronous run in one process, killed and resumed, bit for bit


def identical(work: Path, root: Path, size: Size, seed: int) -> dict[str, Any]:
    found = {engine: resumed_runs(root, engine, size.resumed, seed, size is SMALL) for engine in size.engines}
    return {
        "resumed_identical": {
            engine: f"{sum(not one.differs for one in runs)} of {len(runs)}" for engine, runs in found.items()
        },
        "resumed_after_step": {engine: sorted(one.went_on_after for one in runs) for engine, runs in found.items()},
    }


# Damage: of every file that a run goes on from


def damage(work: Path, root: Path, size: Size, seed: int) -> dict[str, Any]:
    outcomes = damage_all(finished_run(work, root, 6).path, root / "damaged", seed)
    for file in dict.fromkeys(o.file for o in outcomes):
        ways = ", ".join(f"{o.kind} {'found' if o.found else 'not found'}" for o in outcomes if o.file == file)
        print(f"{file:<36}{ways}", flush=True)
    # Earlier checkpoints of the ledgers are removed in time, so that one is missing says nothing; the log replaces it.
    counted = [o for o in outcomes if (o.file, o.kind) != (SPARE, "missing")]
    return {
        "damage_cases": len(counted),
        "damage_found": sum(o.found for o in counted),
        "damage_not_found": [f"{o.file} {o.kind}: {o.said or 'nothing is said'}" for o in counted if not o.found],
        "missing_ledger_checkpoint_replaced": all(o.same_rows for o in outcomes if o not in counted),
    }


def finished_run(work: Path, root: Path, steps: int) -> Run:
    """In one process, with three checkpoints."""
    settings = ["--backend", "local", "--steps", str(steps), "--every", str(steps // 3), "--keep", "3"]
    with Run(root, "finished", "--folder", str(work), *settings) as run:
        run.start()
        if run.finish():
            raise RuntimeError(run.said[-3000:])
    return run


# Left behind: processes, shared memory and sockets, after each way to end


def left(work: Path, root: Path, size: Size, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    found: list[Left] = []
    for k, ending in enumerate(ENDINGS[: size.endings]):
        one = end_one(ending, work, root / str(k), rng)
        found.append(one)
        saved = "; saved" if one.saved else ""
        print(
            f"{ending.name:<29} exit code {one.code} (promised: {ending.code}) after {one.ended_s:.1f} s{saved}; "
            f"of {one.started} processes {len(one.processes)} are left, {len(one.shared_memory)} files of shared memory, "
            f"{len(one.ports)} ports; temporary: {', '.join(one.folders) or 'none'}",
            flush=True,
        )
        for what in (*one.processes, *one.shared_memory):
            print(f"  left: {what}", flush=True)
        if one.processes:
            print(f"  {f'gone after {one.gone_s:.0f} s' if one.gone_s else 'still there after a minute'}", flush=True)
        if one.code != ending.code:
            print(f"  the end of what it said:\n{one.said}", flush=True)
    return {
        "left_behind": sum(one.count for one in found),
        "left_by": {one.ending.name: one.count for one in found},
        "left_gone_s": {one.ending.name: one.gone_s and round(one.gone_s, 1) for one in found if one.processes},
        "left_folders": {one.ending.name: one.folders for one in found if one.folders},
        "exit_codes": {one.ending.name: one.code for one in found},
        "exit_codes_wrong": [one.ending.name for one in found if one.code != one.ending.code],
        "sigterm_saved": all(one.saved for one in found if one.ending.number == signal.SIGTERM),
    }


# Times: from a kill until the run goes on, with vLLM


def times(work: Path, root: Path, size: Size, seed: int) -> dict[str, Any]:
    engine, longest = ("transformers", 24) if size is SMALL else ("vllm", CONTEXT - PROMPT_TOKENS)
    settings = ["--folder", str(work), "--engine", engine, "--max-tokens", str(longest), "--prompts", "8"]
    rng, starts, rollouts = random.Random(seed), [engine_start(root, settings)], list[float]()
    struck = Struck(Counter(), {"actor": []}, [])
    with Run(root, "times", *settings, "--steps", "100000", "--every", "1") as run:
        run.start()
        run.wait_until_whole()
        run.wait_for_step(2)
        while len(rollouts) < size.times:
            run.wait_for_step(run.step)
            time.sleep(rng.uniform(0.1, 0.6))
            seconds, rows = replace_rollout(run, rng.randrange(2))
            print(
                f"rollout killed: its successor's first rows after {seconds:.1f} s; {rows} rows were with it",
                flush=True,
            )
            if rows:  # else it was killed between two calls
                rollouts.append(seconds)
        for _ in range(size.times):
            run.wait_for_step(run.step)
            time.sleep(rng.uniform(0.1, 0.6))
            kill_one(run, "actor", rng, struck)
            print(f"actor killed: the next step was over after {struck.seconds['actor'][-1]:.1f} s", flush=True)
    starts.append(engine_start(root, settings))
    print(f"a rollout worker alone is up after {starts}", flush=True)
    recovery = median(rollouts)
    return {
        "rollout_recovery_s": round(recovery, 2),
        "actor_recovery_s": round(median(struck.seconds["actor"]), 2),
        "engine_start_s": round(median(starts), 2),
        "rollout_recovery_over_start_s": round(recovery - median(starts), 2),
        "rollout_recoveries_s": [round(s, 2) for s in rollouts],
        "actor_recoveries_s": [round(s, 2) for s in struck.seconds["actor"]],
        "engine_starts_s": starts,
        "times_runs_ended": struck.ended,
    }


def engine_start(root: Path, settings: list[str]) -> float:
    """Seconds from the start of a process until the same worker is up in it, nothing else of ours running."""
    with Run(root, "engine", *settings, "--engine-start") as run:
        run.start()
        if run.finish():
            raise RuntimeError(run.said[-3000:])
    return float(run.said.rpartition("up after ")[2].split()[0])


def replace_rollout(run: Run, rank: int) -> tuple[float, int]:
    """Kill a rollout's process; seconds until rows of the one in its place are in the log, and rows that are requeued."""
    log = run.path / "buffer" / LOG
    process = run.ranks()[f"rollout_{rank}"]
    life = 1 + max((int(n) for n in re.findall(rf"rollout-{rank}-again(\d+)", log.read_text())), default=0)
    began = time.monotonic()
    process.kill()
    run.wait(lambda: f"rollout-{rank}-again{life}-" in log.read_text())
    seconds = time.monotonic() - began
    return seconds, int(re.findall(r"replaced after .*?, (\d+) rows are requeued", run.said)[-1])


# Pause: how long training waits for a checkpoint


def pause(work: Path, root: Path, size: Size, seed: int) -> dict[str, Any]:
    parameters = make_model(root / "model", size is SMALL)
    found: dict[int, dict[str, Any]] = {}
    for ranks in (1, 2):
        one = found[ranks] = measure_pause(root, ranks, size.checkpoints)
        print(
            f"{parameters / 1e6:.0f} M parameters on {ranks} rank(s), {one['bytes'] / 1e6:.0f} MB each: pause {one['pause_s']} s "
            f"(first {one['first_pause_s']} s), plain copy {one['copy_s']} s, ratio {one['over_copy']}",
            flush=True,
        )
    one, two = found[1], found[2]
    return {
        "checkpoint_pause_s": one["pause_s"],
        "checkpoint_first_pause_s": one["first_pause_s"],
        "checkpoint_copy_s": one["copy_s"],
        "checkpoint_pause_over_copy": one["over_copy"],
        "checkpoint_two_ranks": two,
        "checkpoint_parameters": parameters,
    }


PARTS: Mapping[str, Part] = {
    "kills": kills,
    "identical": identical,
    "damage": damage,
    "times": times,
    "pause": pause,
    "left": left,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which of {', '.join(PARTS)}; default: all")
    parser.add_argument("--small", action="store_true", help="few of everything: not a measurement")
    parser.add_argument("--seed", type=int, default=0, help="of victims, moments and damage; default: 0")
    arguments = parser.parse_args()
    names = arguments.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by the `with` below
    result: dict[str, Any] = dict.fromkeys(KEYS) | {"load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="weft-r", ignore_cleanup_errors=True) as folder:
        work = prepare_work(Path(folder) / "work")
        for name in names:
            began = time.monotonic()
            root = Path(folder) / name
            root.mkdir()
            print(f"== {name}", flush=True)
            result |= PARTS[name](work, root, SMALL if arguments.small else Size(), arguments.seed)
            result[f"{name}_part_s"] = round(time.monotonic() - began, 1)
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(result))


def prepare_work(folder: Path) -> Path:
    workload = Workload("r", num_prompts=SOURCE, max_tokens=12, vocabulary=256, hidden=64, layers=2, heads=2, mlp=128)
    return prepare(workload, folder)


if __name__ == "__main__":
    main()
