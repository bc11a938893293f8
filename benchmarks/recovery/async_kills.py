"""SIGKILLs of asynchronous runs: each step must be one update, without lost or repeated rows.

    python benchmarks/recovery/recovery.py --parts async_kills

The workers only count, under Local. Each run is a fork of this process, so a resume takes a
fraction of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

import weft
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import StalledError
from weft.dataflow.metrics import Metrics, Sum
from weft.dataflow.operation import Shape, TrainingBatch
from weft.dataflow.runs.files import BUFFER, CHECKPOINTS, LOG
from weft.dataflow.runs.log import LogReader
from weft.dataflow.runs.samples import samples as recorded_samples
from weft.workers.dispatch import Dispatch
from weft.workers.worker import Worker, remote

KILLS = 200
KILLS_PER_RUN = 12
STEPS = 30
PROMPTS = 50
PROMPTS_PER_STEP = 4
SAMPLES = 2
"""Responses per prompt."""
TURN_S = 0.0005
"""[s] One turn of generation."""
SLOWEST = 40
"""Longest response, in turns."""
PARTIAL: tuple[Literal["continue", "finish", "requeue"], ...] = (
    "continue",
    "continue",
    "finish",
    "requeue",
)
"""Values of `partial_rollouts`; each run draws one."""
MOST_STEPS = 3
"""Most steps of a process before its kill."""
LATE_S = 0.2
"""[s] Longest time from the last of these steps, or from the start of the process, to the kill."""
STUCK_S = 180.0
"""[s] Longest time to the end of a run after its last kill."""
STALLED = 3
"""Exit code of a stalled run."""


class NoSettings(weft.Config):
    """Counting workers have no settings."""


class Counted:
    """Weights that are a single number."""

    num_bytes = 8

    def __init__(self, version: int) -> None:
        self.version, self.checksum = version, f"{version:016x}"

    def __add__(self, other: Counted) -> Counted:
        return self


class CountingRollout(Worker):
    """Answers each prompt after a number of turns, with tokens of the current version."""

    Config = NoSettings
    version = 0

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=("prompt_ids",),
        writes=("response_ids", "response_logprobs", "response_versions"),
    )
    def generate(
        self, prompts: weft.Batch, *, n: int = SAMPLES
    ) -> Iterator[tuple[weft.Batch, Metrics] | None]:
        chance = np.random.default_rng(prompts.numpy("sample_id").tolist())
        left = {k: int(chance.integers(1, SLOWEST + 1)) for k in range(len(prompts))}
        versions: dict[int, list[int]] = {k: [] for k in left}
        while left:
            time.sleep(TURN_S)
            for k in left:
                left[k] -= 1
                versions[k].append(self.version)
            done = [k for k, turns in left.items() if not turns]
            for k in done:
                del left[k]
            rows = [k for k in done for _ in range(n)]
            if not rows:
                yield None
                continue
            batch = weft.Batch.of(
                parent_id=[prompts["sample_id"][k].as_py() for k in rows],
                response_ids=[[7] * len(versions[k]) for k in rows],
                response_logprobs=[[-1.0] * len(versions[k]) for k in rows],
                response_versions=[versions[k] for k in rows],
            )
            yield batch, {"rows": Sum(len(rows))}

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Any) -> str:
        self.version = weights.version
        return weights.checksum


class CountingActor(Worker):
    """An actor whose weights are the groups it was trained on."""

    Config = NoSettings

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.groups: list[int] = []

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids",), takes=TrainingBatch(accumulates=True)
    )
    def update(self, samples: weft.Batch, *, last: bool = True) -> Metrics:
        self.groups += dict.fromkeys(samples["group_id"].to_pylist())
        return {"rows": Sum(len(samples))}

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int, receivers: Any = ()) -> Counted:
        return Counted(version)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def finish_publishing(self, version: int) -> Counted:
        return Counted(version)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path) -> float:
        path.mkdir(parents=True, exist_ok=True)
        (path / "groups.json").write_text(json.dumps(self.groups))
        return 0.0

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        return True

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> None:
        self.groups = json.loads((path / "groups.json").read_text())


@weft.graph
def counting(prompts: Any, *, rollout: Any, actor: Any) -> Any:
    return actor.update(rollout.generate(prompts, n=SAMPLES))


def live(root: Path, name: str, schedule: weft.Asynchronous) -> None:
    rollout, actor = weft.group(CountingRollout, name="rollout"), weft.group(CountingActor, name="actor")
    rollout.follows(actor)
    table = pa.table({"prompt_ids": pa.array([[k] for k in range(PROMPTS)], pa.list_(pa.int32()))})
    with weft.Driver(
        counting(weft.TableSource("prompts", table), rollout=rollout, actor=actor),
        schedule=schedule,
        backend=weft.Local(),
        checkpoint=weft.CheckpointConfig(every=2),
        resume="latest",
        root=root,
        name=name,
        progress=False,
    ) as driver:
        driver.run()


def begin(root: Path, name: str, schedule: weft.Asynchronous) -> int:
    """Fork a process that runs or resumes a run, and return its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        with (root / f"{name}.out").open("ab") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        live(root, name, schedule)
        code = 0
    except StalledError:
        traceback.print_exc()
        code = STALLED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """Return the exit code of a process, or None if it still runs after this time."""
    until = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if (left := until - time.monotonic()) <= 0:
            return None
        time.sleep(min(left, 0.01))


def steps_of(run: Path) -> int:
    """Return the number of finished steps, from the run's log and its cut tails."""
    steps = 0
    for log in (run / BUFFER).glob(f"{LOG}*"):
        with contextlib.suppress(FileNotFoundError):  # the run has just moved its log
            steps += log.read_bytes().count(b'"key":"step"')
    return steps


def wait_for_moment(pid: int, run: Path, rng: random.Random) -> int | None:
    """Wait for a random moment for a kill; return the exit code if the process ends earlier."""
    steps = steps_of(run) + rng.randint(0, MOST_STEPS)
    until = time.monotonic() + STUCK_S
    while steps_of(run) < steps and time.monotonic() < until:
        if (code := wait(pid, 0.01)) is not None:
            return code
    return wait(pid, rng.uniform(0, LATE_S))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def wrong_steps(run: Path, steps: int = STEPS) -> int:
    """Return the number of steps in the log without exactly one update."""
    wrong = updates = step = 0
    if not (run / BUFFER / LOG).exists():
        return steps
    for record in LogReader(run / BUFFER / LOG):
        if record["do"] == "note" and record["key"] == "version/actor":
            updates += 1
        elif record["do"] == "note" and record["key"] == "step":
            wrong += updates != 1 or record["value"] != step + 1
            updates, step = 0, record["value"]
    return wrong + abs(steps - step)


def faults(run: Path) -> list[str]:
    """Return the faults of a finished run, apart from its steps."""
    trained = json.loads((run / CHECKPOINTS / f"step_{STEPS:06d}" / "actor" / "groups.json").read_text())
    samples = recorded_samples(run)
    ids = [] if samples is None else samples["sample_id"].to_pylist()
    found = [str(one) for one in check_log(run / BUFFER).violations]
    if len(set(trained)) != len(trained) or len(trained) != STEPS * PROMPTS_PER_STEP:
        found.append(f"trained on {len(trained)} groups, {len(set(trained))} of them different")
    if len(set(ids)) != len(ids) or len(ids) != STEPS * PROMPTS_PER_STEP * SAMPLES:
        found.append(f"recorded {len(ids)} samples, {len(set(ids))} of them different")
    times = Counter(
        p for r in LogReader(run / BUFFER / LOG) if r["do"] == "issue" for p in r["positions"]
    )
    if len(times) != PROMPTS or max(times.values()) - min(times.values()) > 1:
        found.append(
            f"prompts were issued between {min(times.values(), default=0)} and {max(times.values(), default=0)} times"
        )
    return found


def async_kills(root: Path, small: bool, rng: random.Random) -> dict[str, Any]:
    """Kill runs at random moments, resume them, and check the results."""
    wanted, kills, runs = 24 if small else KILLS, 0, 0
    stalled = wrong = faulty = 0
    began = time.monotonic()
    while kills < wanted:
        partial, name = rng.choice(PARTIAL), f"run-{runs}"
        schedule = weft.Asynchronous(
            steps=STEPS,
            prompts_per_step=PROMPTS_PER_STEP,
            max_staleness=rng.randint(1, 2),
            partial_rollouts=partial,
        )
        runs += 1
        code: int | None = None
        for _ in range(min(KILLS_PER_RUN, wanted - kills)):
            pid = begin(root, name, schedule)
            code = wait_for_moment(pid, root / name, rng)
            if code is not None:
                break
            kill(pid)
            kills += 1
        if code is None:
            pid = begin(root, name, schedule)
            code = wait(pid, STUCK_S)
            if code is None:
                kill(pid)
        if code:
            print((root / f"{name}.out").read_text(errors="replace")[-3000:], flush=True)
        stalled += code in (None, STALLED)
        wrong += wrong_steps(root / name)
        found = faults(root / name) if code == 0 else [f"ended with {code}"]
        faulty += bool(found)
        print(
            f"{name} ({schedule.max_staleness}, {partial}): {kills} kills so far; {found or 'sound'}",
            flush=True,
        )
    return {
        "async_kills": kills,
        "async_runs": runs,
        "async_runs_stalled": stalled,
        "async_runs_faulty": faulty,
        "async_steps_with_other_than_one_update": wrong,
        "async_kills_s": round(time.monotonic() - began, 1),
    }
