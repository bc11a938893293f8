"""The driver on Ray: the same results as in one process, small messages, honest failures, nothing left behind."""

import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from toy import (
    SlowRollout,
    ToyActor,
    ToyLoss,
    ToyReward,
    ToyRollout,
    ToyTeacher,
    ToyWeights,
    prompts,
    toy_distillation,
    toy_evaluation,
    toy_grpo,
)

from weft.controllers.backends.local import Local
from weft.controllers.backends.rank import MAX_CALLS
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver, Evaluation
from weft.controllers.group import Call
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.ranks.tasks import RowTask, Task
from weft.controllers.schedule import Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.samples import recorded as recorded_parts
from weft.dataflow.errors import WorkerError
from weft.dataflow.handle import group
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import declaration_of
from weft.dataflow.source import TableSource
from weft.workers.dispatch import Dispatch
from weft.workers.remote import remote

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def handles(**rollout: Any) -> dict[str, Any]:
    made = {"rollout": group(ToyRollout, **rollout), "reward": group(ToyReward), "actor": group(ToyActor)}
    made["rollout"].follows(made["actor"])
    return made


def drive(root: Path, made: dict[str, Any], source: TableSource, **settings: Any) -> Driver:
    schedule = Synchronous(steps=settings.pop("steps", 2), prompts_per_step=4)
    settings = {"backend": RayBackend(), "root": root, "progress": False, **settings}
    return Driver(toy_grpo(source, **made), schedule=schedule, **settings)


def test_the_same_script_gives_the_same_results_with_and_without_ray(tmp_path: Path):
    results = []
    for name, backend in (("local", Local()), ("ray", RayBackend())):
        made = handles()
        recorded = toy_grpo(prompts(8), **made)
        held_out = toy_evaluation(prompts(5, "held_out"), rollout=made["rollout"], reward=made["reward"])
        settings: dict[str, Any] = {
            "evaluations": [Evaluation(held_out)],
            "name": name,
            "root": tmp_path,
            "progress": False,
        }
        schedule = Synchronous(steps=3, prompts_per_step=4)
        with Driver(recorded, schedule=schedule, backend=backend, **settings) as driver:
            metrics = driver.run()
            trained = driver.call(made["actor"], "seen_groups")
        clocks = ("time_s", "step_s", "tokens_per_s")
        numbers = [{k: v for k, v in row.items() if k not in clocks} for row in metrics]
        files = recorded_parts(tmp_path / name)
        results.append((numbers, trained, [(part.graph, part.step, rows(part.path)) for part in files]))
        logs = sorted(p.name for p in (tmp_path / name / "logs").iterdir())
        assert logs == (
            [f"{n}_0.log" for n in ("actor", "functions", "recorder", "reward", "rollout")] if name == "ray" else []
        )
    assert results[0] == results[1]


def rows(file: Path) -> list[dict[str, Any]]:
    """Samples in the order of their prompts; ids differ where calls set numbers aside."""
    with pa.OSFile(str(file)) as source:
        table = pa.ipc.open_file(source).read_all()
    kept = table.drop_columns(["sample_id", "parent_id"]).to_pylist()
    return sorted(kept, key=lambda row: (row["group_id"], row["response_ids"]))


def test_replicas_share_the_rows_and_ranks_of_a_replica_get_equal_copies(tmp_path: Path):
    actor = group(ToyActor, ranks_per_replica=2)
    rollout, reward = group(ToyRollout), group(ToyReward)
    rollout.follows(actor)
    made = {"rollout": rollout, "reward": reward, "actor": actor}
    pool = ResourcePool("cores", cpus=2)
    placement = {"actor": Place(pool, ranks=4), "rollout": Place(pool, ranks=2)}
    with drive(tmp_path, made, prompts(8), placement=placement, name="replicas") as driver:
        metrics = driver.run()
        seen = driver.call(actor, "seen_groups")
        assert driver.call(actor, "echo", value="a") == [(0, "a"), (1, "a"), (2, "a"), (3, "a")]
    assert seen[0] == seen[1] and seen[2] == seen[3], "the two ranks of a replica"
    for step in range(2):
        assert sorted(seen[0][step] + seen[2][step]) == [g for g in range(4 * step, 4 * step + 4) for _ in range(2)]
    assert all(row["actor/rows"] == 8 and row["rollout/tokens"] == 12 for row in metrics[1:]), "each row counts once"


def test_a_rank_without_rows_takes_part_all_the_same(tmp_path: Path):
    made = handles() | {"teacher": group(ToyTeacher)}
    made["teacher"].follows(made["actor"])
    placement = {n: Place(ResourcePool("cores", cpus=2), ranks=3) for n in ("rollout", "actor", "teacher", "reward")}
    graph = toy_distillation(prompts(1), **made)
    schedule = Synchronous(steps=2, prompts_per_step=1)
    with Driver(
        graph, schedule=schedule, placement=placement, backend=RayBackend(), root=tmp_path, progress=False
    ) as driver:
        metrics = driver.run()
        seen = driver.call(made["actor"], "seen_groups")
    assert [row["actor/rows"] for row in metrics[1:]] == [2, 2]
    assert sorted(map(len, (ranks[0] for ranks in seen))) == [0, 1, 1] and [len(ranks) for ranks in seen] == [2, 2, 2]


def test_a_placement_as_large_as_the_cluster_runs(tmp_path: Path):
    import ray

    made = handles()
    everything = {
        "rollout": Place(ResourcePool("generation", cpus=12)),
        "actor": Place(ResourcePool("training", cpus=4)),
    }
    backend = RayBackend(ray.get_runtime_context().gcs_address)
    with drive(tmp_path, made, prompts(4), placement=everything, backend=backend, name="full") as driver:
        assert len(driver.run()) == 3, "rewards and functions are computed where others are idle"


class Weighing(RayBackend):
    """Weighs what passes through the driver, each reference as what it is: a name."""

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


def test_the_drivers_bytes_do_not_grow_with_the_batch(tmp_path: Path):
    weights = []
    for length in (10, 100_000):
        ids = pa.array([[k] * length for k in range(1, 5)], pa.list_(pa.int32()))
        source = TableSource("long", pa.table({"prompt_ids": ids, "answer": ["x"] * 4}))
        backend = Weighing()
        with drive(tmp_path, handles(), source, backend=backend, steps=1, name=f"rows_of_{length}") as driver:
            assert driver.run()[1]["actor/prompt_tokens"] == 2 * 4 * length
        weights.append((sum(backend.tasks), sum(backend.replies), len(backend.replies)))
    (tasks, replies, number), (tasks_long, replies_long, number_long) = weights
    assert tasks < 30_000 and replies < 30_000
    assert abs(tasks_long - tasks) < 200, "task sizes differ by a few digits at most"
    assert number == number_long and abs(replies_long - replies) < 200


def test_a_failing_worker_is_named_without_a_frame_of_ray(tmp_path: Path):
    with (
        drive(tmp_path, handles(fail_on=31), prompts(4), name="failing") as driver,
        pytest.raises(WorkerError) as caught,
    ):
        driver.run()
    text = str(caught.value)
    assert text.startswith("worker rollout[0], node 'rollout.generate', samples ")
    assert "RuntimeError: token 31 is not to my taste\n" in text
    assert "toy.py" in text and "in generate\n" in text
    assert "/ray/" not in text and not any(
        name in text for name in ("ray_backend.py", "rank.py", "executor.py", "executor_thread.py")
    )


def test_a_killed_worker_is_reported_by_name_in_bounded_time(tmp_path: Path):
    made = handles()
    with drive(tmp_path, made, prompts(4), name="killed") as driver:
        driver.run()
        (pid,) = driver.call(made["actor"], "process")
        assert pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=r"worker actor\[0\], call 'seen_groups': its process ended"):
            driver.call(made["actor"], "seen_groups")
        assert time.monotonic() - started < 60, "long before anybody's deadline"


class Looking(ToyReward):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str | None]:
        names = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")
        return {name: os.environ.get(name) for name in names}


def test_a_rank_on_a_pool_without_gpus_sees_none_and_talks_over_its_nodes_interface(tmp_path: Path):
    made = handles() | {"reward": group(Looking)}
    with drive(tmp_path, made, prompts(4), name="looking") as driver:
        (found,) = driver.call(made["reward"], "environment")
    assert found == {
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "VLLM_HOST_IP": "127.0.0.1",
    }


class Unwilling(ToyReward):
    def __init__(self, *args: Any) -> None:
        raise FileNotFoundError("/no/such/model")


def test_a_worker_that_cannot_start_says_why(tmp_path: Path):
    made = handles() | {"reward": group(Unwilling)}
    with pytest.raises(WorkerError) as caught, drive(tmp_path, made, prompts(4), name="unwilling"):
        pass
    text = str(caught.value)
    assert text.startswith("worker reward[0] could not start: FileNotFoundError: /no/such/model\n")
    assert "test_ray_backend.py" in text and "/ray/" not in text


def test_a_closed_run_leaves_no_process(tmp_path: Path):
    made = handles()
    with drive(tmp_path, made, prompts(4), name="closed") as driver:
        driver.run()
        (pid,) = driver.call(made["actor"], "process")
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        os.sched_yield()
    assert not Path(f"/proc/{pid}").exists()


class EndlessRollout(SlowRollout):
    """Generates until new weights come."""

    def generate(self, prompts: Batch, *, n: int = 2) -> Iterator[Any]:
        while not self.version:
            yield None


def test_weights_arrive_at_a_rank_however_many_calls_it_has_open(tmp_path: Path):
    made = handles() | {"rollout": group(EndlessRollout, name="rollout")}
    backend = RayBackend()
    declaration = declaration_of(EndlessRollout.generate) or declaration_of(SlowRollout.generate)
    assert declaration is not None
    nobody = np.zeros(0, np.int64)
    with drive(tmp_path, made, prompts(8), backend=backend, call_timeout_s=10) as driver:
        rows = RowTask(declaration.called_with({}), (), nobody, nobody, nobody)
        calls = [Task("generate", rows=rows, number=-number) for number in range(1, MAX_CALLS + 8)]
        rank = backend._processes["rollout", 0].actor
        streams = [rank.call.options(num_returns="streaming").remote(task) for task in calls]
        (checksum,) = driver.call(made["rollout"], "receive_weights", weights=ToyWeights(1))
        assert checksum == ToyWeights(1).checksum
        del streams


class SlowActor(ToyActor):
    """An update takes longer than a rank may be silent, and is not silent."""

    def update(self, samples: Batch, *, loss: ToyLoss = ToyLoss()) -> Metrics:
        for _ in range(15):
            time.sleep(0.2)
            self.context.advance()
        return super().update(samples, loss=loss)


@pytest.mark.slow
def test_an_update_may_take_longer_than_a_rank_may_be_silent(tmp_path: Path):
    made = {"rollout": group(ToyRollout), "reward": group(ToyReward), "actor": group(SlowActor)}
    made["rollout"].follows(made["actor"])
    with drive(tmp_path, made, prompts(8), call_timeout_s=2, steps=1) as driver:
        assert driver.run()[-1]["step"] == 1
