"""Recovery: seconds from a kill until the run continues, and training's wait for a checkpoint.

    python benchmarks/recovery/recovery.py                    # a quarter of an hour
    python benchmarks/recovery/recovery.py --parts pause      # some of times, pause, async_kills
    python benchmarks/recovery/recovery.py --small            # two minutes, to see that it works: not a measurement

It also checks that each step of a killed asynchronous run is one update. Each run is a separate
program (`killed_run.py`), and its killed ranks are real processes. tests/controllers/recovery/
tests kills of all kinds of runs. The last line printed is one JSON object:

    rollout_recovery_s, engine_start_s: from SIGKILL until the successor's rows are in the log;
        start of the same worker alone. Medians.
    actor_recovery_s: from SIGKILL of an actor's rank, through a restart of all groups, to the
        end of the next step; median.
    async_kills, async_runs_stalled: SIGKILLs at random moments, each followed by a resume; runs
        that did not end.
    async_steps_with_other_than_one_update, async_runs_faulty: steps with no update or several;
        runs that break a rule of weft buffer check, train on a group twice, or lose one.
    checkpoint_pause_s, checkpoint_copy_s: how long training waits for a checkpoint, median
        without the first (checkpoint_first_pause_s); the plain copy. checkpoint_two_ranks: the
        same with two ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from async_kills import async_kills
from machine import load
from pause import make_model
from pause import measure as measure_pause
from run_process import RunProcess
from workloads import PROMPT_TOKENS, Workload, prepare

PROMPTS = 64
CONTEXT = 128
"""[tokens] Context of the model."""
KILLS = 3
"""Kills of a rollout and of an actor; 1 with --small."""
CHECKPOINTS = 10
"""Checkpoints; 3 with --small."""


def times(root: Path, small: bool, rng: random.Random) -> dict[str, Any]:
    """Kill ranks of a run with vLLM while they work, and wait each time until the run continues."""
    engine, longest = ("transformers", 24) if small else ("vllm", CONTEXT - PROMPT_TOKENS)
    work = Workload(
        "r", num_prompts=PROMPTS, max_tokens=12, vocabulary=256, hidden=64, layers=2, heads=2, mlp=128
    )
    folder = prepare(work, root / "work")
    settings = [
        "--folder",
        str(folder),
        "--engine",
        engine,
        "--max-tokens",
        str(longest),
        "--prompts",
        "8",
    ]
    kills = 1 if small else KILLS
    starts, rollouts, actors = [engine_start(root, settings)], list[float](), list[float]()
    with RunProcess(root, "times", *settings, "--steps", "100000", "--every", "1") as run:
        run.wait_for_ranks()
        run.wait_for_step(2)
        while len(rollouts) < kills:
            run.wait_for_moment(rng)
            seconds, rows = replace_rollout(run, rng.randrange(2))
            print(
                f"rollout killed with {rows} rows: its successor's first rows after {seconds:.1f} s",
                flush=True,
            )
            if rows:  # otherwise it was killed between two calls
                rollouts.append(seconds)
        for _ in range(kills):
            run.wait_for_moment(rng)
            actors.append(replace_actor(run, rng.randrange(2)))
            print(f"actor killed: the next step was over after {actors[-1]:.1f} s", flush=True)
    starts.append(engine_start(root, settings))
    print(f"a rollout worker alone is up after {starts}", flush=True)
    return {
        "rollout_recovery_s": round(median(rollouts), 2),
        "actor_recovery_s": round(median(actors), 2),
        "engine_start_s": round(median(starts), 2),
        "rollout_recovery_over_start_s": round(median(rollouts) - median(starts), 2),
        "rollout_recoveries_s": [round(s, 2) for s in rollouts],
        "actor_recoveries_s": [round(s, 2) for s in actors],
        "engine_starts_s": starts,
    }


def engine_start(root: Path, settings: list[str]) -> float:
    """Return the seconds from process start until the same worker is up, on an otherwise idle
    machine."""
    with RunProcess(root, "engine", *settings, "--engine-start") as run:
        if run.finish():
            raise RuntimeError(run.output[-3000:])
    return float(run.output.rpartition("up after ")[2].split()[0])


def replace_rollout(run: RunProcess, rank: int) -> tuple[float, int]:
    """Kill a rollout's process. Return the seconds until rows of its replacement are in the log,
    and the number of requeued rows."""
    process = run.ranks()[f"rollout_{rank}"]
    life = 1 + max(
        (int(n) for n in re.findall(rf"rollout-{rank}-again(\d+)", run.log.read_text())), default=0
    )
    began = time.monotonic()
    process.kill()
    run.wait(lambda: f"rollout-{rank}-again{life}-" in run.log.read_text())
    seconds = time.monotonic() - began
    return seconds, int(re.findall(r"replaced after .*?, (\d+) rows are requeued", run.output)[-1])


def replace_actor(run: RunProcess, rank: int) -> float:
    """Kill an actor's process; return the seconds until all processes are back and one more step is
    done."""
    process, before = run.ranks()[f"actor_{rank}"], run.step
    began = time.monotonic()
    process.kill()
    run.wait_for_ranks(gone=process)
    run.wait_for_step(before)
    return time.monotonic() - began


def pause(root: Path, small: bool, rng: random.Random) -> dict[str, Any]:
    parameters = make_model(root / "model", small)
    one, two = (measure_pause(root, ranks, 3 if small else CHECKPOINTS) for ranks in (1, 2))
    for ranks, measured in ((1, one), (2, two)):
        print(f"{parameters / 1e6:.0f} M parameters on {ranks} rank(s): {measured}", flush=True)
    return {
        "checkpoint_pause_s": one["pause_s"],
        "checkpoint_first_pause_s": one["first_pause_s"],
        "checkpoint_copy_s": one["copy_s"],
        "checkpoint_pause_over_copy": one["over_copy"],
        "checkpoint_two_ranks": two,
        "checkpoint_parameters": parameters,
    }


PARTS: Mapping[str, Callable[[Path, bool, random.Random], dict[str, Any]]] = {
    "times": times,
    "pause": pause,
    "async_kills": async_kills,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--small", action="store_true", help="few of everything: not a measurement")
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed for victims and moments; default: 0"
    )
    arguments = parser.parse_args()
    names = arguments.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run the exits of all `with` blocks
    result: dict[str, Any] = {"load": load()}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="weft-r", ignore_cleanup_errors=True) as folder:
            print(f"== {name}", flush=True)
            result |= PARTS[name](Path(folder), arguments.small, random.Random(arguments.seed))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
