"""The driver on Ray: the same results as in one process, small messages, precise errors, clean
exit."""

import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from toy import (
    ToyActor,
    ToyReward,
    ToyRollout,
    ToyWeights,
    prompts,
    toy_evaluation,
    toy_grpo,
)

from weft.controllers.backends.backend import Backend
from weft.controllers.backends.local import Local
from weft.controllers.backends.rank import MAX_CALLS
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver, Evaluation
from weft.controllers.group import Call
from weft.controllers.ranks.tasks import RowTask, Task
from weft.controllers.schedule import Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.errors import WorkerError
from weft.dataflow.graph import group
from weft.dataflow.metric_names import untimed
from weft.dataflow.operation import Shape, declaration_of
from weft.dataflow.runs.samples import recorded as recorded_parts
from weft.dataflow.source import TableSource
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

TOKEN = "hf_of_nobody_0123456789"


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
