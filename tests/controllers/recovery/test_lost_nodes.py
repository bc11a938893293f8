"""Lost nodes on a fake clock: their ranks are replaced at once, with one log line per node."""

import math
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_runs import Rollout, SimulatedCluster, apart, costs, groups, prompts, toy_grpo

from weft.controllers.backends.backend import Event
from weft.controllers.driver import Driver
from weft.controllers.group import Call, WorkerGroup
from weft.controllers.ranks.tasks import Failure, FailureKind, Reply, Task
from weft.controllers.schedule import Pipelined
from weft.controllers.simulation.backend import NODE
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import WorkerDied
from weft.dataflow.graph import group


class Independent(Rollout):
    replaceable = True


class Nodes(SimulatedCluster):
    """A rollout with ranks 1 to 3 on nodes "b" and "c", which are lost at a given time."""

    def __init__(self, gone_at: float, *, says: bool, actor_on: str = NODE) -> None:
        super().__init__(costs(((10,),)))
        self._gone_at, self._says, self._actor_on = gone_at, says, actor_on
        self.replaced: list[tuple[float, int]] = []
        self._dead = {1, 2, 3}

    def start(self, setup: Any) -> dict[str, WorkerGroup]:
        self._groups = super().start(setup)
        return self._groups

    def node_of(self, group: WorkerGroup, rank: int) -> str:
        if group.name == "actor":
            return self._actor_on
        return {1: "b", 2: "c", 3: "c"}.get(rank, NODE) if rank in self._dead else NODE

    def lost_nodes(self, *, look: bool) -> Collection[str]:
        """Report the loss without a look if `says` is set, otherwise on a look."""
        return ("b", "c") if self.clock() >= self._gone_at and (look or self._says) else ()

    def wait(self, timeout_s: float) -> list[Event]:
        events = [*super().wait(timeout_s)]
        if self.clock() < self._gone_at or self._says:
            return events
        failure = Reply(failure=Failure("its process ended", kind=FailureKind.DIED))
        lost = [
            (c, rank) for c in self._groups["rollout"].calls for rank in sorted(c.waiting & self._dead)
        ]
        if self._actor_on != NODE:
            lost += [(c, 0) for c in self._groups["actor"].calls if c.waiting]
        return [Event(call, rank, failure) for call, rank in lost[:1]] + events

    def replace(self, group: WorkerGroup, rank: int) -> None:
        self.replaced.append((self.clock(), rank))
        self._dead.discard(rank)
        before = self._replicas[group.name, rank]
        self._replicas[group.name, rank] = type(before)(
            before.cost, self._reply, self._invent, 256, at=self.clock()
        )

    def _result(
        self, call: Call, rank: int, task: Task, versions: Any, cost: Any, seconds: float
    ) -> Reply:
        reply = super()._result(call, rank, task, versions, cost, seconds)
        return replace(reply, value=call.group.mesh[rank]) if task.method == "register" else reply


def run(root: Path, backend: Nodes) -> Driver:
    made = groups() | {"rollout": group(Independent, name="rollout")}
    made["rollout"].follows(made["actor"])
    driver = Driver(
        toy_grpo(prompts(40), n=2, **made),
        schedule=Pipelined(steps=6, prompts_per_step=8),
        placement=apart(4, 1),
        backend=backend,
        root=root,
        name="run",
        record_every=0,
    )
    with driver:
        driver.run()
    assert not check_log(driver.directory.path / "buffer").violations
    assert [row["samples"] for row in driver.directory.metrics[1:]] == [16.0] * 6
    return driver


@pytest.mark.parametrize("says", [True, False], ids=["by itself", "when it is looked at"])
def test_ranks_of_lost_nodes_are_replaced_together_and_each_line_counts_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], says: bool
):
    backend = Nodes(15.0, says=says)
    driver = run(tmp_path, backend)
    assert sorted(rank for _, rank in backend.replaced) == [1, 2, 3]
    assert len({at for at, _ in backend.replaced}) == 1, "one that is idle is not waited for"
    assert driver.directory.metrics[-1]["replaced_workers"] == 3
    said = capsys.readouterr().out
    assert re.findall(
        r"node (\w) is gone, with (\d) ranks; the run continues with the others", said
    ) == [
        ("b", "1"),
        ("c", "2"),
    ]


def test_a_node_known_to_be_lost_is_looked_up_once(tmp_path: Path):
    backend = Nodes(15.0, says=True)
    run(tmp_path, backend)
    assert len(backend.replaced) == 3 and backend.clock() > 50
    assert backend.replaced[0][0] < 15 + 2, "at once, though nobody was called on it"


def test_a_rank_that_cannot_be_replaced_takes_the_run_back_to_its_checkpoint(tmp_path: Path):
    backend = Nodes(15.0, says=False, actor_on="b")
    with pytest.raises(WorkerDied, match=r"actor.*its process ended"):
        run(tmp_path, backend)
    assert not backend.replaced, "and nothing is replaced before"


def test_nothing_happens_while_no_node_is_lost(tmp_path: Path):
    backend = Nodes(math.inf, says=True)
    run(tmp_path, backend)
    assert not backend.replaced
