"""The driver on Ray: the same results as in one process, small messages, precise errors, clean
exit."""

import ctypes
import io
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ahead import RayAhead
from toy import (
    ToyActor,
    ToyLoss,
    ToyReward,
    ToyRollout,
    ToyWeights,
    prompts,
    toy_evaluation,
    toy_grpo,
    toy_reinforce,
)

from weft.controllers.backends import ray_backend
from weft.controllers.backends.backend import Backend
from weft.controllers.backends.local import Local
from weft.controllers.backends.rank import MAX_CALLS
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver, Evaluation
from weft.controllers.group import Call
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.ranks.tasks import RowTask, Task
from weft.controllers.schedule import Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.errors import DeadlineError, WorkerError
from weft.dataflow.graph import group
from weft.dataflow.metric_names import untimed
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import Shape, declaration_of
from weft.dataflow.runs.alerts import read_alerts
from weft.dataflow.runs.samples import recorded as recorded_parts
from weft.dataflow.source import TableSource
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

TOKEN = "hf_of_nobody_0123456789"


def handles(**rollout: Any) -> dict[str, Any]:
    made = {"rollout": group(ToyRollout, **rollout), "reward": group(ToyReward), "actor": group(ToyActor)}
    made["rollout"].follows(made["actor"])
    return made


def drive(root: Path, made: dict[str, Any], source: TableSource, **settings: Any) -> Driver:
    """Start a run with as few processes as possible: one per group."""
    schedule = Synchronous(steps=settings.pop("steps", 2), prompts_per_step=4)
    settings = {"backend": RayBackend(), "root": root, "progress": False, "record_every": 0, **settings}
    return Driver(toy_reinforce(source, **made), schedule=schedule, **settings)


def bare(**rollout: Any) -> dict[str, Any]:
    return {name: handle for name, handle in handles(**rollout).items() if name != "reward"}


class Weighing(RayBackend):
    """Measures the messages of the driver; a reference counts as its name."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[int] = []
        self.replies: list[int] = []

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        self.tasks.append(weight(task))
        super()._submit(rank, task, call)

    def wait(self, timeout_s: float) -> Any:
        events = super().wait(timeout_s)
        self.replies += [weight(event.reply) for event in events]
        return events


def weight(message: object) -> int:
    import ray
    import ray.cloudpickle

    class Pickler(ray.cloudpickle.CloudPickler):  # pyright: ignore[reportPrivateImportUsage]
        def persistent_id(self, obj: Any) -> Any:
            return obj.hex() if isinstance(obj, ray.ObjectRef) else None

    file = io.BytesIO()
    Pickler(file, protocol=5).dump(message)
    return file.tell()


class Patient(ToyRollout):
    """Without prompts, generates until new weights arrive."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=("prompt_ids",),
        writes=("response_ids", "response_logprobs", "response_versions"),
    )
    def generate(self, prompts: Batch, *, n: int = 2) -> Iterator[Any]:
        before = self.version
        while not len(prompts) and self.version == before:
            time.sleep(0.01)
            yield None
        yield from super().generate(prompts, n=n)


class Looking(ToyReward):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str | None]:
        names = (
            "CUDA_VISIBLE_DEVICES",
            "GLOO_SOCKET_IFNAME",
            "NCCL_SOCKET_IFNAME",
            "VLLM_HOST_IP",
            "HF_TOKEN",
        )
        return {name: os.environ.get(name) for name in names}


class Computing(ToyActor):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()


@dataclass
class Done:
    """A finished run with live processes."""

    driver: Driver
    backend: Backend
    rollout: Any
    reward: Any
    actor: Any
    metrics: list[dict[str, float]]
    processes: tuple[int, ...] = ()
    """Process ids of the reward and the actor."""
    tasks: tuple[int, ...] = ()
    replies: tuple[int, ...] = ()
    """[B] Sizes of the messages in the run."""

    @property
    def results(self) -> Any:
        """Metrics without times, and the rows that were trained on."""
        numbers = [untimed(row) for row in self.metrics]
        return numbers, self.driver.call(self.actor, "seen_groups")

    @property
    def samples(self) -> Any:
        """The recorded samples, which are complete when the run is closed."""
        files = recorded_parts(self.driver.directory.path)
        return [(part.graph, part.step, rows(part.path)) for part in files]


@contextmanager
def whole_run(root: Path, name: str, backend: Backend, length: int | None = None) -> Iterator[Done]:
    """A complete script: rewards, a function, an evaluation, recorded samples.

    Args:
        length: tokens per prompt.
    """
    made = {
        "rollout": group(Patient, name="rollout"),
        "reward": group(Looking, name="reward"),
        "actor": group(ToyActor),
    }
    made["rollout"].follows(made["actor"])
    source = prompts(8)
    if length is not None:
        ids = pa.array([[k] * length for k in range(1, 9)], pa.list_(pa.int32()))
        source = TableSource("prompts", pa.table({"prompt_ids": ids, "answer": ["x"] * 8}))
    held_out = toy_evaluation(prompts(5, "held_out"), rollout=made["rollout"], reward=made["reward"])
    with Driver(
        toy_grpo(source, **made),
        schedule=Synchronous(steps=3, prompts_per_step=4),
        evaluations=[Evaluation(held_out)],
        backend=backend,
        root=root,
        name=name,
        progress=False,
        call_timeout_s=120,
    ) as driver:
        done = Done(driver, backend, **made, metrics=driver.run())
        if isinstance(backend, Weighing):
            done.tasks, done.replies = tuple(backend.tasks), tuple(backend.replies)
            done.processes = tuple(driver.call(made[name], "process")[0] for name in ("reward", "actor"))
        yield done


@pytest.fixture(scope="module")
def under_ray(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """The run that tests inspect until one of them closes it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_TOKEN", TOKEN)
        with whole_run(tmp_path_factory.mktemp("runs"), "ray", Weighing()) as done:
            yield done


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    with whole_run(tmp_path_factory.mktemp("runs"), "local", Local()) as done:
        yield done


def test_the_same_script_gives_the_same_results_with_and_without_ray(
    under_ray: Done, in_one_process: Done
):
    assert in_one_process.results == under_ray.results
    assert not any((in_one_process.driver.directory.path / "logs").iterdir())
    logs = sorted(p.name for p in (under_ray.driver.directory.path / "logs").iterdir())
    assert logs == [f"{n}_0.log" for n in ("actor", "functions", "recorder", "reward", "rollout")]


def rows(file: Path) -> list[dict[str, Any]]:
    """Return samples in the order of their prompts, without ids, which differ between runs."""
    with pa.OSFile(str(file)) as source:
        table = pa.ipc.open_file(source).read_all()
    kept = table.drop_columns(["sample_id", "parent_id"]).to_pylist()
    return sorted(kept, key=lambda row: (row["group_id"], row["response_ids"]))


def test_the_drivers_bytes_do_not_grow_with_the_batch(under_ray: Done, tmp_path: Path):
    short = under_ray
    with whole_run(tmp_path, "long", Weighing(), length=100_000) as long:
        assert long.metrics[1]["actor/prompt_tokens"] == 2 * 4 * 100_000
    # The prompts in one message of the long run would be a megabyte. Timing changes a message by 2
    # kB.
    for sent in (short.tasks, short.replies, long.tasks, long.replies):
        assert sum(sent) < 90_000 and max(sent) < 20_000


def test_a_rank_on_a_pool_without_gpus_sees_none_and_talks_over_its_nodes_interface(under_ray: Done):
    (found,) = under_ray.driver.call(under_ray.reward, "environment")
    assert found == {
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_TOKEN": TOKEN,
    }


def session_logs() -> Path:
    from ray._private import worker

    node = worker.global_worker.node
    assert node is not None
    return Path(node.get_logs_dir_path())


def content(path: Path) -> bytes:
    """Return the bytes of a file; empty for folders and for files that have vanished."""
    with suppress(FileNotFoundError):
        return path.read_bytes() if path.is_file() else b""
    return b""


def test_a_token_of_the_drivers_environment_is_in_no_log_of_ray(under_ray: Done):
    logs = list(session_logs().rglob("*"))
    assert any(b"RankProcess" in content(p) for p in logs), "they are those of the ranks"
    logs += under_ray.driver.directory.path.rglob("*")
    assert not [p for p in logs if TOKEN.encode() in content(p)]


def test_weights_arrive_at_a_rank_however_many_calls_it_has_open(under_ray: Done):
    driver, backend = under_ray.driver, under_ray.backend
    assert isinstance(backend, RayBackend)
    declaration = declaration_of(Patient.generate) or declaration_of(ToyRollout.generate)
    assert declaration is not None
    nobody = np.zeros(0, np.int64)
    rows = RowTask(declaration.called_with({}), (), nobody, nobody, nobody)
    calls = [Task("generate", rows=rows, number=-number) for number in range(1, MAX_CALLS + 8)]
    rank = backend._processes["rollout", 0].actor
    streams = [rank.call.options(num_returns="streaming").remote(task) for task in calls]
    (checksum,) = driver.call(under_ray.rollout, "receive_weights", weights=ToyWeights(99))
    assert checksum == ToyWeights(99).checksum
    del streams


def test_a_killed_worker_is_reported_by_name_in_bounded_time(under_ray: Done):
    assert os.getpid() not in under_ray.processes
    os.kill(under_ray.processes[-1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"worker actor\[0\], call 'seen_groups': its process ended \(.*SIGKILL"
    ):
        under_ray.driver.call(under_ray.actor, "seen_groups")
    assert time.monotonic() - started < 60, "long before anybody's deadline"


def test_a_closed_run_leaves_no_process(under_ray: Done):
    under_ray.driver.close()
    left = [Path(f"/proc/{pid}") for pid in under_ray.processes]
    deadline = time.monotonic() + 60
    while any(process.exists() for process in left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(process.exists() for process in left)


def test_the_samples_that_are_kept_are_the_same(under_ray: Done, in_one_process: Done):
    for done in (under_ray, in_one_process):
        done.driver.close()
    assert in_one_process.samples == under_ray.samples


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
        # Processes of earlier tests may still be leaving the shared cluster.
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
    assert "test_ray_backend.py" in text and "/ray/" not in text


class Stuck(ToyReward):
    """Hangs in C while it holds the GIL."""

    def score(self, samples: Batch) -> Any:
        assert self.context.run_dir is not None
        (self.context.run_dir / "hangs").touch()
        ctypes.PyDLL(None).sleep(600)
        return super().score(samples)


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
        r"reward\[0\]: stack \(innermost call first\)\n  File \".*test_ray_backend\.py\", line \d+, in score\n"
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
        fetching, told = (self._run_dir / name for name in ("fetching", "asked"))
        # a busy machine may be slow here
        if asked != [("reward", 0)] or not fetching.exists() or told.exists():
            return True
        answer = super()._some_advanced(asked)
        told.touch()
        return answer


def test_a_worker_that_fetches_a_model_may_take_longer_than_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_backend, "ADVANCED_TIMEOUT_S", 60.0)
    made = {"rollout": group(ToyRollout), "reward": group(Fetching), "actor": group(ToyActor)}
    with drive(
        tmp_path, made, prompts(8), backend=Asking(), start_timeout_s=2.0, name="long"
    ) as driver:  # waited out
        assert (driver.directory.path / "asked").exists()
        assert [row["actor/rows"] for row in driver.run()[1:]] == [8, 8]
