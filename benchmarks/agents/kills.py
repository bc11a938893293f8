"""Kills of the processes of an agents' run at random moments: none may lose or repeat an episode.

    python benchmarks/agents/kills.py --seed 1 --runs 3

Each run (`killed_agents.py`) is real: a driver, its gateway, two rollout ranks and an actor under Ray,
harness processes and sandboxes. Each of its kills is of another kind, and happens in a random phase of
an episode. The step that a kill interrupts must end, a killed driver is resumed, and the run must
finish. Then `faults` checks what the run has recorded, and that it has left nothing behind.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent), str(HERE.parent / "recovery")]

KINDS = ("harness", "sandbox", "gateway", "rollout", "driver")
RUNS = 10
"""Runs; each has a kill of each kind."""
STEPS_PER_KILL = 2
MOMENTS = ("start", "model", "tool", "grade", "any")
"""Phases of an episode to kill in; "any" waits for none."""
MOMENT_S = 15.0
"""[s] Longest wait for an episode in the wanted phase, and for a victim."""
LATE_S = 0.25
"""[s] Longest time from then to the kill."""
STUCK_S = 600.0
"""[s] Longest time until a run starts, or makes a step."""
ENDED_S = 90.0
"""[s] Longest time after a run until all that it started is gone."""
CPUS = 8
PR_SET_CHILD_SUBREAPER = 36
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "synchronous"},
    {"schedule": "asynchronous", "partial-rollouts": "continue", "max-staleness": 1},
    {"schedule": "asynchronous", "partial-rollouts": "requeue", "max-staleness": 2},
    {"schedule": "asynchronous", "partial-rollouts": "finish", "max-staleness": 1},
    {"schedule": "asynchronous", "partial-rollouts": "recompute", "max-staleness": 2},
)


# Processes of a run


@dataclass(frozen=True)
class Found:
    """The processes of a run's agents."""

    gateway: list[Any]
    harness: dict[str, list[Any]]
    """Role -> processes."""
    sandboxes: list[Any]
    phases: list[str]
    """Phases of the episodes that run."""


def look(driver: Any) -> Found:
    """Return the processes below a driver."""
    import psutil

    found = Found([], {"guard": [], "fork server": [], "episode": []}, [], [])
    below: dict[int, str] = {}
    """Process -> its role."""
    with suppress(psutil.NoSuchProcess):
        for process in driver.children(recursive=True):  # parents come first
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
                above, command = below.get(process.ppid(), ""), " ".join(process.cmdline())
                role = _role(above, command)
                below[process.pid] = role
                if role == "gateway":
                    found.gateway.append(process)
                elif role == "sandbox":
                    found.sandboxes.append(process)
                elif role in found.harness:
                    found.harness[role].append(process)
                if role == "episode":
                    found.phases.append(Path(f"/proc/{process.pid}/comm").read_text().strip())
    return found


def _role(above: str, command: str) -> str:
    if "weft.workers.agents.gateway" in command:
        return "gateway"
    if "harness_process.py" in command:
        return {"gateway": "guard", "guard": "fork server", "fork server": "episode"}.get(above, "")
    # The sandbox's first process, not a program in it, whose end is the model's own doing.
    if above in ("episode", "sandbox") and ("bwrap" in command or "sandbox.py" in command):
        return "sandbox"
    return ""


# Kills


class Killed:
    """One run and its kills."""

    def __init__(self, root: Path, name: str, settings: dict[str, Any], rng: random.Random) -> None:
        self.root, self.name, self.rng = root, name, rng
        self.settings = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        self.run: Any = None

    def start(self) -> None:
        from run_process import RunProcess  # pyright: ignore[reportMissingImports]

        program = HERE / "killed_agents.py"
        given = self.root, self.name, *self.settings
        self.run = RunProcess(*given, program=program, stuck_s=STUCK_S)

    def victim(self, kind: str, found: Found) -> tuple[str, Any] | None:
        """Choose a process. Return what it is, and None if there is none."""
        if kind == "driver":
            return kind, self.run.driver
        if kind == "rollout":
            ranks = sorted(item for item in self.run.ranks().items() if kind in item[0])
            return self.rng.choice(ranks) if ranks else None
        if kind == "harness":
            [role] = self.rng.choices([*found.harness], weights=[1, 1, 3])
            return (role, self.rng.choice(found.harness[role])) if found.harness[role] else None
        processes = found.gateway if kind == "gateway" else found.sandboxes
        return (kind, self.rng.choice(processes)) if processes else None

    def kill(self, kind: str) -> str:
        """Kill a process of this kind at a random moment. Return what was killed, and when.

        Raises:
            RuntimeError: the run has ended, is stuck, or has no such process.
        """
        import psutil

        wanted, late_s = self.rng.choice(MOMENTS), self.rng.uniform(0, LATE_S)
        until = time.monotonic() + MOMENT_S

        def has_come() -> bool:
            phases = look(self.run.driver).phases
            return wanted == "any" or time.monotonic() > until or any(wanted in p for p in phases)

        self.run.wait(has_come)
        time.sleep(late_s)
        while time.monotonic() < until + MOMENT_S:
            found = look(self.run.driver)
            chosen = self.victim(kind, found)
            if chosen is None:
                self.run.wait(lambda: True)  # raises if the run has ended
                continue
            role, process = chosen
            phase = Path(f"/proc/{process.pid}/comm")
            try:
                doing = f' in "{phase.read_text().strip()}"' if role == "episode" else ""
                process.kill()
            except (psutil.NoSuchProcess, OSError):
                continue
            phases = Counter(phase.split()[0] for phase in found.phases)
            shown = ", ".join(f"{number} in {phase}" for phase, number in sorted(phases.items()))
            return f"{role}{doing}, in step {self.run.step + 1}; episodes: {shown or 'none'}"
        raise RuntimeError(f"{self.name} has no process of kind {kind!r} to kill")


@dataclass
class Outcome:
    """The kills of a run, by kind, and why the run is at fault."""

    survived: list[str]
    faults: list[str]


def killed_run(killed: Killed, count: Iterator[int]) -> Outcome:
    """Run to the end, with a kill of each kind."""
    kinds = killed.rng.sample(KINDS, len(KINDS))
    survived: list[str] = []
    killed.start()
    try:
        for number, kind in enumerate(kinds):
            killed.run.wait_for_step(number * STEPS_PER_KILL)
            time.sleep(killed.rng.uniform(0, 1.0))
            said, step = killed.kill(kind), killed.run.step
            began = time.monotonic()
            if kind == "driver":
                killed.run.finish()
                killed.start()
            killed.run.wait_for_step(step)
            survived.append(kind)
            took = f"the step was over after {time.monotonic() - began:.1f} s"
            print(f"kill {next(count)}, {killed.name}: {kind}: {said}; {took}", flush=True)
        code = killed.run.finish()
        if code:
            raise RuntimeError(f"{killed.name} ended with {code}:\n{killed.run.output[-3000:]}")
    except Exception as error:
        print(f"{killed.name}: {error}", flush=True)
        return Outcome([], [f"{type(error).__name__}: {error}"[:300]])
    finally:
        killed.run.__exit__()
    return Outcome(survived, [])


# Leftovers of a run


def left_running(run: Path, cluster: set[int]) -> list[str]:
    """Return the processes that a run has left. All orphans are children of this process.

    Args:
        cluster: processes of the Ray cluster, which stay. Ray's workers may stay too, but not as
            ranks, whose output is in the run's directory.
    """
    import psutil

    found: list[str] = []
    stays: dict[int, bool] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
            command = " ".join(process.cmdline())
            is_rays = command.startswith("ray::") or "ray_workers.py" in command
            stays[process.pid] = process.pid in cluster or is_rays or stays.get(process.ppid(), False)
            is_rank = os.readlink(f"/proc/{process.pid}/fd/1").startswith(f"{run.resolve()}/")
            if process.status() != psutil.STATUS_ZOMBIE and (is_rank or not stays[process.pid]):
                found.append(f"process {process.pid}: {command[:120]}")
    return found


def left_behind(run: Path, cluster: set[int]) -> list[str]:
    """Return processes and temporary files that are there a while after the end of a run. Temporary
    files are in the folder of the runs."""
    until = time.monotonic() + ENDED_S
    while True:
        found = left_running(run, cluster)
        found += [f"temporary file {path.name}" for path in run.parent.glob("weft-*")]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.2)


# The cluster and the runs


@contextmanager
def cluster(root: Path) -> Iterator[str]:
    """Start a Ray cluster of one node in a new folder, and yield its address."""
    # Ray reads these when it is imported.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_TMPDIR": str(root)}
    os.environ |= {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
    # On a busy machine, ranks with a lower priority would starve.
    os.environ |= {"RAY_worker_niceness": "0"}
    (root / "ray").mkdir()  # Ray expects it, and notes the address of the cluster there
    from ray.cluster_utils import Cluster

    node = {"num_cpus": CPUS, "object_store_memory": 200 << 20, "temp_dir": str(root / "r")}
    settings: dict[str, Any] = {"include_dashboard": False, "include_log_monitor": False}
    settings["worker_path"] = str(HERE / "ray_workers.py")
    started = Cluster(initialize_head=True, head_node_args={**node, **settings})
    assert started.address is not None
    # Run the exits of all `with` blocks. Ray has just installed its own handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield started.address
    finally:
        started.shutdown()


def run_all(root: Path, seed: int, runs: int) -> dict[str, Any]:
    import psutil
    from faults import faults

    began = time.monotonic()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder, place = root / "work", root / "runs"
    for path in (folder, place):
        path.mkdir()
    os.environ |= {"TMPDIR": str(place), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(HERE / "killed_agents.py"), "--folder", str(folder)]
    subprocess.run([*program, "--make-model"], check=True)
    steps = STEPS_PER_KILL * len(KINDS) + 2
    survived: Counter[str] = Counter()
    count = iter(range(1, runs * len(KINDS) + 1))
    with cluster(root) as address:
        rays = {process.pid for process in psutil.Process().children()}
        for number in range(runs):
            settings = {**SCHEDULES[number % len(SCHEDULES)], "steps": steps}
            given = {**settings, "folder": folder, "address": address}
            killed = Killed(place, f"run{number}", given, random.Random(f"{seed} {number}"))
            outcome = killed_run(killed, count)
            path = place / killed.name
            found = outcome.faults or [
                *faults(path, folder, steps, int(settings.get("max-staleness", 0))),
                *left_behind(path, rays),
            ]
            how = " ".join(map(str, settings.values()))
            print(f"{killed.name} ({how}): {found or 'sound'}", flush=True)
            if not found:
                survived.update(outcome.survived)
    print(f"survived: {dict(survived)}", flush=True)
    return {"kills": survived.total(), "kills_s": round(time.monotonic() - began, 1)}


def measure(seed: int = 0, runs: int = RUNS) -> dict[str, Any]:
    """Return `kills` and `kills_s`. Runs in a new process, which adopts all orphans."""
    command = [sys.executable, __file__, "--seed", str(seed), "--runs", str(runs)]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if last:
                print(last, end="", flush=True)
            last = line
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return json.loads(last)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"default: {RUNS}")
    parser.add_argument("--keep", type=Path, help="folder for all files, which stay there")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir()
        print(json.dumps(run_all(arguments.keep.resolve(), arguments.seed, arguments.runs)))
        return
    with tempfile.TemporaryDirectory(prefix="weft-k", ignore_cleanup_errors=True) as folder:
        print(json.dumps(run_all(Path(folder), arguments.seed, arguments.runs)))


if __name__ == "__main__":
    main()
