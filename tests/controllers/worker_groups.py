"""Worker groups without processes: what they are asked to do is written down, and a test answers."""

from typing import Any

from toy import ToyActor, ToyRollout

from weft.controllers.group import Call, WorkerGroup
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.ranks.tasks import Reply, Task
from weft.dataflow.graph import group
from weft.workers.dispatch import Coordinates


class Asked:
    """Calls that were submitted, as `group.method`, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def group(self, name: str, pool: ResourcePool, worker: Any = ToyActor, ranks: int = 1) -> WorkerGroup:
        def submit(rank: int, task: Task, call: Call) -> None:
            self.calls.append(f"{name}.{task.method}")

        mesh = [Coordinates(dp=rank) for rank in range(ranks)]
        return WorkerGroup(name, group(worker, name=name), Place(pool, ranks), mesh, submit)


def rollout_and_actor(asked: Asked) -> dict[str, WorkerGroup]:
    return {
        "actor": asked.group("actor", ResourcePool()),
        "rollout": asked.group("rollout", ResourcePool(), ToyRollout),
    }


def answer(call: Call, value: Any = None) -> Call:
    """Every rank of a call returns a value."""
    for rank in call.ranks:
        call.take(rank, Reply(done=True, value=value), 0.0)
    return call
