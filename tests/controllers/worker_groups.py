"""Worker groups without processes: they record each call, and a test answers it."""

from typing import Any

from toy import ToyActor, ToyRollout

from weft.controllers.group import Call, WorkerGroup
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.ranks.tasks import Reply, Task
from weft.dataflow.graph import group
from weft.workers.dispatch import Coordinates


class Asked:
    """The submitted calls as `group.method`, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def group(
        self, name: str, pool: ResourcePool, worker: Any = ToyActor, ranks: int = 1
    ) -> WorkerGroup:
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
    """Answer a call on every rank with this value."""
    for rank in call.ranks:
        call.take_reply(rank, Reply(done=True, value=value), 0.0)
    return call
