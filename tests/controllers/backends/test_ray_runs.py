"""Runs on Ray that need the shared cluster for themselves: placements, failures and slow starts."""

import ctypes
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ahead import RayAhead
from toy import (
    ToyActor,
    ToyLoss,
    ToyReward,
    ToyRollout,
    prompts,
    toy_grpo,
    toy_reinforce,
)

from weft.controllers.backends import ray_backend
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.prechecks import checks
from weft.controllers.schedule import Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.errors import DeadlineError, WorkerError
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics
from weft.dataflow.runs.alerts import read_alerts
from weft.dataflow.source import TableSource
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def handles(**rollout: Any) -> dict[str, Any]:
    made = {
        "rollout": group(ToyRollout, **rollout),
        "reward": group(ToyReward),
        "actor": group(ToyActor),
    }
    made["rollout"].follows(made["actor"])
    return made


def drive(root: Path, made: dict[str, Any], source: TableSource, **settings: Any) -> Driver:
    """Start a run with as few processes as possible: one per group."""
    schedule = Synchronous(steps=settings.pop("steps", 2), prompts_per_step=4)
    settings = {"backend": RayBackend(), "root": root, "progress": False, "record_every": 0, **settings}
    return Driver(toy_reinforce(source, **made), schedule=schedule, **settings)


def bare(**rollout: Any) -> dict[str, Any]:
    return {name: handle for name, handle in handles(**rollout).items() if name != "reward"}


class Computing(ToyActor):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()


def test_replicas_share_the_rows_and_ranks_of_a_replica_get_equal_copies(tmp_path: Path):
    actor = group(ToyActor, ranks_per_replica=2)
    rollout = group(ToyRollout)
    rollout.follows(actor)
    made = {"rollout": rollout, "actor": actor}
    pool = ResourcePool("cores", cpus=2)
    placement = {"actor": Place(pool, ranks=4), "rollout": Place(pool, ranks=2)}
    with drive(tmp_path, made, prompts(8), placement=placement, name="replicas") as driver:
        metrics = driver.run()
        seen = driver.call(actor, "seen_groups")
        assert driver.call(actor, "echo", value="a") == [(0, "a"), (1, "a"), (2, "a"), (3, "a")]
    assert seen[0] == seen[1] and seen[2] == seen[3], "the two ranks of a replica"
    for step in range(2):
        assert sorted(seen[0][step] + seen[2][step]) == [
            g for g in range(4 * step, 4 * step + 4) for _ in range(2)
        ]
    assert all(row["actor/rows"] == 8 and row["rollout/tokens"] == 12 for row in metrics[1:]), (
        "each row counts once"
    )


def test_a_rank_without_rows_takes_part_all_the_same(tmp_path: Path):
    made = handles()
    pool = ResourcePool("cores", cpus=2)
    placement = {
        name: Place(pool, ranks=ranks) for name, ranks in (("rollout", 2), ("reward", 3), ("actor", 3))
    }
    with Driver(
        toy_reinforce(prompts(1), **made),
        schedule=Synchronous(steps=2, prompts_per_step=1),
        placement=placement,
        backend=RayBackend(),
        root=tmp_path,
        record_every=0,
        progress=False,
    ) as driver:
        metrics = driver.run()
        seen = driver.call(made["actor"], "seen_groups")
    assert [row["actor/rows"] for row in metrics[1:]] == [2, 2]
    assert sorted(map(len, (ranks[0] for ranks in seen))) == [0, 1, 1] and [
        len(ranks) for ranks in seen
    ] == [2, 2, 2]


@pytest.mark.thorough
def test_a_placement_as_large_as_the_cluster_runs(tmp_path: Path):
    import ray

    everything = {
        "rollout": Place(ResourcePool("generation", cpus=14)),
        "actor": Place(ResourcePool("training", cpus=2)),
    }
    made = {
        "rollout": group(ToyRollout),
        "reward": group(ToyReward),
        "actor": group(Computing, name="actor"),
    }
    made["rollout"].follows(made["actor"])
    with Driver(
        toy_grpo(prompts(4), **made),
        schedule=Synchronous(steps=2, prompts_per_step=4),
        placement=everything,
        backend=RayBackend(ray.get_runtime_context().gcs_address, wait_s=120),
        root=tmp_path,
        record_every=0,
        progress=False,
    ) as driver:
        assert len(driver.run()) == 3, "rewards and functions are computed where others are idle"
        assert driver.call(made["actor"], "threads") == [2], (
            "as many as its place has CPUs, where Ray's own processes have one"
        )


def test_a_failing_worker_is_named_without_a_frame_of_ray(tmp_path: Path):
    with (
        drive(tmp_path, bare(fail_on=31), prompts(4), name="failing") as driver,
        pytest.raises(WorkerError) as caught,
    ):
        driver.run()
    text = str(caught.value)
    assert text.startswith("worker rollout[0], node 'rollout.generate', samples ")
    assert "RuntimeError: token 31 is not to my taste\n" in text
    assert "toy.py" in text and "in generate\n" in text
    assert "/ray/" not in text and not any(
        name in text for name in ("ray_backend.py", "rank.py", "executor.py")
    )


class Unwilling(ToyActor):
    def __init__(self, *args: Any) -> None:
        raise FileNotFoundError("/no/such/model")


def test_a_worker_that_cannot_start_reports_the_reason(tmp_path: Path):
    actor, rollout = group(Unwilling, name="actor"), group(ToyRollout)
    rollout.follows(actor)
    with (
        pytest.raises(WorkerError) as caught,
        drive(tmp_path, {"rollout": rollout, "actor": actor}, prompts(4)),
    ):
        pass
    text = str(caught.value)
    assert text.startswith("worker actor[0] could not start: FileNotFoundError: /no/such/model\n")
    assert "test_ray_runs.py" in text and "/ray/" not in text


class Stuck(ToyReward):
    """Hangs in C while it holds the GIL."""

    def score(self, samples: Batch) -> Any:
        assert self.context.run_dir is not None
        (self.context.run_dir / "hangs").touch()
        ctypes.PyDLL(None).sleep(600)
        return super().score(samples)


@pytest.mark.thorough
def test_a_hanging_rank_is_named_with_node_rows_and_stack(tmp_path: Path):
    made = {**handles(), "reward": group(Stuck, name="reward")}
    backend = RayAhead((tmp_path / "stuck" / "hangs").exists)
    with (
        drive(tmp_path, made, prompts(4), backend=backend, name="stuck") as driver,
        pytest.raises(DeadlineError) as caught,
    ):
        driver.run()
    assert re.search(
        r"no answer for 600 s\. Waited for: worker reward\[0\], node 'reward\.score', on '\S+', samples \d+, .* "
        r"\(called \d+ s ago\)\n"
        r"reward\[0\]: stack \(innermost call first\)\n  File \".*test_ray_runs\.py\", line \d+, in score\n"
        r"\(all threads are at the end of logs/reward_0\.log\)$",
        str(caught.value),
    ), str(caught.value)
    assert (tmp_path / "stuck" / "logs" / "reward_0.log").read_text().count("Thread 0x") > 1
    assert read_alerts(tmp_path / "stuck")[-1].name == "failed"


class SlowActor(ToyActor):
    """An update that takes longer than a rank may be silent, but reports progress."""

    def update(self, samples: Batch, *, loss: ToyLoss = ToyLoss()) -> Metrics:
        for _ in range(15):
            time.sleep(0.2)
            self.context.advance()
        return super().update(samples, loss=loss)


@pytest.mark.slow
def test_an_update_may_take_longer_than_a_rank_may_be_silent(tmp_path: Path):
    made = {"rollout": group(ToyRollout), "actor": group(SlowActor)}
    made["rollout"].follows(made["actor"])
    with drive(tmp_path, made, prompts(8), call_timeout_s=2, steps=1) as driver:
        assert driver.run()[-1]["step"] == 1


class Fetching(ToyReward):
    """Starts more slowly than the deadline, like a model download, but reports progress."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.context.run_dir is not None
        while not (self.context.run_dir / "asked").exists():
            time.sleep(0.1)
            self.context.advance()
            (self.context.run_dir / "fetching").touch()


class Asking(RayBackend):
    def _some_advanced(self, ranks: Iterable[tuple[str, int]]) -> bool:
        asked = [*ranks]
        self.looks = getattr(self, "looks", 0) + 1
        assert self.looks < 100, f"these ranks did not start: {asked}"
        fetching, told = (self._setup.run_dir / name for name in ("fetching", "asked"))
        # a busy machine may be slow here
        if asked != [("reward", 0)] or not fetching.exists() or told.exists():
            return True
        answer = super()._some_advanced(asked)
        told.touch()
        return answer


@pytest.mark.thorough
def test_a_worker_that_fetches_a_model_may_take_longer_than_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_backend, "ADVANCED_TIMEOUT_S", 60.0)
    monkeypatch.setattr(checks, "START_TIMEOUT_S", 2.0)  # waited out
    made = {"rollout": group(ToyRollout), "reward": group(Fetching), "actor": group(ToyActor)}
    with drive(tmp_path, made, prompts(8), backend=Asking(), name="long") as driver:
        assert (driver.directory.path / "asked").exists()
        assert [row["actor/rows"] for row in driver.run()[1:]] == [8, 8]
