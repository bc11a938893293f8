"""Elastic groups on a fake clock: ranks join when there is room, and leave with their leased
rows."""

import itertools
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_runs import Rollout, SimulatedCluster, costs, groups, prompts, toy_grpo

from weft.controllers.backends.backend import Event
from weft.controllers.driver import Driver
from weft.controllers.group import Call, WorkerGroup
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.ranks.tasks import Failure, FailureKind, Reply, Task
from weft.controllers.schedule import Asynchronous, Synchronous, Training
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import CostModel, LinearCost
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import DeadlineError, UserError
from weft.dataflow.graph import group

Room = Callable[[int, float], bool]
"""(rank, time) -> whether the cluster has room for the rank."""


class Independent(Rollout):
    replaceable = True


class Spot(SimulatedCluster):
    """A cluster with varying room for ranks of the rollout. Without room, a rank's process ends."""

    def __init__(
        self,
        room: Room,
        *,
        startup_s: float = 3.0,
        wait_s: float = 50.0,
        lengths: tuple[int, ...] = (10,),
    ):
        cost = costs((lengths,), step_s=((1, 0.2), (12, 2.4)))
        own = {
            "rollout.register": LinearCost(fixed_s=startup_s),
            "actor.update": LinearCost(fixed_s=2.0),
        }
        super().__init__(CostModel(nodes={**cost.nodes, **own}))
        self._room, self.wait_s = room, wait_s
        self.told: dict[int, list[tuple[str, int, int | None]]] = {}
        """Rank -> its calls, with the version of its group and the version that it received."""
        self.starts: list[tuple[float, int]] = []

    def start(self, setup: Any) -> dict[str, WorkerGroup]:
        self._groups = super().start(setup)
        rollout = self._groups["rollout"]
        rollout.absent = {
            rank for rank in range(len(rollout.mesh)) if not self._room(rank, self.clock())
        }
        return self._groups

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        assert rank not in call.group.absent, "nobody calls a rank that has no process"
        super()._submit(rank, task, call)
        if call.group.name == "rollout":
            weights = task.arguments.get("weights")
            given = weights.version if weights else None
            self.told.setdefault(rank, []).append((task.method, call.group.version, given))

    def wait(self, timeout_s: float) -> list[Event]:
        events = [*super().wait(timeout_s)]
        for call in self._groups["rollout"].calls:
            dead = [rank for rank in call.waiting if not self._room(rank, self.clock())]
            events += [
                Event(call, rank, Reply(failure=Failure("gone", kind=FailureKind.DIED))) for rank in dead
            ]
        return events

    def replace(self, group: WorkerGroup, rank: int) -> None:
        self.starts.append((self.clock(), rank))
        self.release(group, rank)

    def release(self, group: WorkerGroup, rank: int) -> None:
        self.told.pop(rank, None)
        before = self._replicas[group.name, rank]
        self._replicas[group.name, rank] = type(before)(
            before.cost, self._reply, self._invent, 256, at=self.clock()
        )

    def vacant(self, group: WorkerGroup) -> Collection[int]:
        return {rank for rank in group.absent if self._room(rank, self.clock())}

    def _result(
        self, call: Call, rank: int, task: Task, versions: Any, cost: Any, seconds: float
    ) -> Reply:
        reply = super()._result(call, rank, task, versions, cost, seconds)
        return replace(reply, value=call.group.mesh[rank]) if task.method == "register" else reply


class Dying(Spot):
    """Ranks other than the first die in calls of one method."""

    def __init__(self, room: Room, method: str, **settings: Any) -> None:
        super().__init__(room, **settings)
        self._method = method

    def wait(self, timeout_s: float) -> list[Event]:
        calls = [call for call in self._groups["rollout"].calls if call.method == self._method]
        failure = Failure("gone", kind=FailureKind.DIED)
        died = [
            Event(call, rank, Reply(failure=failure)) for call in calls for rank in call.waiting - {0}
        ]
        return [*died, *super().wait(timeout_s)]


class Silent(Spot):
    """The second rank stops answering."""

    def wait(self, timeout_s: float) -> list[Event]:
        return [
            e
            for e in super().wait(timeout_s)
            if (e.call.group.name, e.rank) != ("rollout", 1) or self.clock() < 20
        ]


def placement(ranks: int, min_ranks: int | None) -> dict[str, Place]:
    return {
        "rollout": Place(ResourcePool("spot", cpus=ranks), ranks, min_ranks),
        "actor": Place(ResourcePool("training", cpus=1)),
    }


def run(
    root: Path,
    backend: Spot,
    ranks: int = 3,
    min_ranks: int = 1,
    schedule: Training | None = None,
    **settings: Any,
) -> Driver:
    made = groups() | {"rollout": group(Independent, name="rollout")}
    made["rollout"].follows(made["actor"])
    driver = Driver(
        toy_grpo(prompts(40), n=2, **made),
        schedule=schedule or Asynchronous(steps=12, prompts_per_step=6),
        placement=placement(ranks, min_ranks),
        backend=backend,
        root=root,
        name=f"run-{len(list(root.iterdir()))}",
        record_every=0,
        **settings,
    )
    with driver:
        driver.run()
    assert not check_log(driver.directory.path / "buffer").violations
    steps = driver.directory.metrics[1:]
    assert [row["samples"] for row in steps] == [12.0] * len(steps), (
        "no row is lost, and none is trained on twice"
    )
    for told in backend.told.values():
        held = None
        for method, version, given in told:
            held = given if method == "receive_weights" else held
            assert method != "generate" or held == version, (
                "it gets no rows before it has the weights of the others"
            )
    return driver


def numbers(driver: Driver) -> list[float]:
    """Return the live ranks of the rollout at the end of each step."""
    return [row["rollout/ranks"] for row in driver.directory.metrics]


def time_s(driver: Driver) -> float:
    return driver.directory.metrics[-1]["time_s"]


def test_a_run_starts_with_the_ranks_for_which_there_is_room_and_others_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    alone = run(tmp_path, Spot(lambda rank, now: rank == 0))
    backend = Spot(lambda rank, now: rank == 0 or now >= 60.0)
    joined = run(tmp_path, backend)
    assert [*numbers(alone)] == [1.0] * 13
    assert numbers(joined)[0] == 1 and numbers(joined)[-1] == 3 and time_s(joined) < time_s(alone)
    assert [rank for _, rank in backend.starts] == [1, 2] and all(
        60 <= at < 63 for at, _ in backend.starts
    )
    assert all("generate" in [method for method, *_ in backend.told[rank]] for rank in (0, 1, 2))
    said = capsys.readouterr().out
    assert re.search(r"worker rollout\[2\] joined after 3\.\d s; 3 of 3 ranks are up", said)
    assert "rollout x1 (of 3)" in said


def test_a_rank_that_leaves_costs_its_leased_rows_and_may_join_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    backend = Spot(lambda rank, now: rank != 1 or not 20.0 <= now < 90.0)
    driver = run(tmp_path, backend)
    assert min(numbers(driver)) == 2 and numbers(driver)[0] == numbers(driver)[-1] == 3
    assert [rank for _, rank in backend.starts] == [1] and backend.starts[0][0] >= 90
    (left,) = re.findall(
        r"worker rollout\[1\] left, (\d+) rows are requeued; 2 of 3 ranks are up; gone",
        capsys.readouterr().out,
    )
    assert 0 < int(left) == driver.directory.metrics[-1]["requeued_rows"] <= 6, (
        "those that it held, and no others"
    )
    assert "replaced_workers" not in driver.directory.metrics[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", [Synchronous, Asynchronous])
def test_ranks_may_come_and_go_at_any_moment_of_a_step_and_of_a_weight_sync(
    tmp_path: Path, schedule: Any
):
    """A step takes about ten seconds, a sync 0.75 s. Rank 1 leaves and returns, and rank 2 joins as
    soon as it is up."""
    for number in range(24):
        leaves, back = 12.0 + 0.45 * number, 25.0 + 0.7 * number

        def room(rank: int, now: float, leaves: float = leaves, back: float = back) -> bool:
            return rank == 0 or (not leaves <= now < back if rank == 1 else now >= leaves + 1)

        run(tmp_path, Spot(room, startup_s=0.25), schedule=schedule(steps=5, prompts_per_step=6))


@pytest.mark.thorough
@pytest.mark.parametrize("partial_rollouts", ["finish", "requeue"])
def test_ranks_may_come_and_go_under_any_policy_for_partial_rollouts(
    tmp_path: Path, partial_rollouts: Any
):
    for number in range(8):
        backend = Spot(
            lambda rank, now, n=number: rank == 0 or not 15.0 + n <= now < 32.0 + 1.3 * n,
            lengths=(4, 17),
        )
        run(
            tmp_path,
            backend,
            schedule=Asynchronous(steps=6, prompts_per_step=6, partial_rollouts=partial_rollouts),
        )


@pytest.mark.parametrize("schedule", [Synchronous, Asynchronous])
def test_a_group_without_any_rank_is_waited_for(
    tmp_path: Path, schedule: Any, capsys: pytest.CaptureFixture[str]
):
    backend = Spot(lambda rank, now: not 20.0 <= now < 60.0)
    driver = run(tmp_path, backend, ranks=2, schedule=schedule(steps=6, prompts_per_step=6))
    assert len(backend.starts) == 2 and time_s(driver) > 60
    said = capsys.readouterr().out
    assert (
        "'rollout' has 0 of at least 1 ranks; waiting for rollout[0] (no room for it), rollout[1] (no room for it), 50 s at most"
        in said
    )
    assert "'rollout' has enough ranks again" in said


def test_the_others_continue_while_a_rank_is_missing(tmp_path: Path):
    backend = Spot(lambda rank, now: rank == 0 or not 20.0 <= now < 60.0)
    driver = run(tmp_path, backend, ranks=2, min_ranks=2)
    assert any(row["rollout/ranks"] == 1 for row in driver.directory.metrics)


def test_too_few_ranks_for_too_long_end_the_run_and_are_named(
    tmp_path: Path,
):
    said = (
        r"group 'rollout' had 1 of at least 2 ranks for 15 s \(Place\(min_ranks=2\)\)\. Waited for: rollout\[1\] \(no room for it\), "
        r"rollout\[2\] \(no room for it\)\. RayBackend\(wait_s=\.\.\.\) waits longer"
    )
    with pytest.raises(DeadlineError, match=said):
        run(tmp_path, Spot(lambda rank, now: rank == 0 or now < 20.0, wait_s=15.0), min_ranks=2)


def test_a_rank_that_does_not_come_up_is_tried_again_after_longer_and_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    backend = Dying(lambda rank, now: rank == 0 or now > 2.0, "register")
    driver = run(tmp_path, backend, ranks=2, schedule=Synchronous(steps=8, prompts_per_step=6))
    assert set(numbers(driver)) == {1.0}
    tries = [at for at, _ in backend.starts]
    pauses = [b - a for a, b in itertools.pairwise(tries)]
    assert len(tries) > 4 and pauses == sorted(pauses) and pauses[-1] >= 16
    assert "worker rollout[1] did not start, and is retried later; gone" in capsys.readouterr().out


def test_ranks_that_die_while_they_take_weights_over_never_end_the_run(tmp_path: Path):
    backend = Dying(lambda rank, now: rank == 0 or now > 2.0, "receive_weights")
    driver = run(tmp_path, backend, ranks=2, schedule=Synchronous(steps=8, prompts_per_step=6))
    tries = [at for at, _ in backend.starts]
    assert len(tries) > 3 and tries[-1] - tries[-2] > tries[1] - tries[0], (
        "and it is not tried again all the time"
    )
    assert "generate" not in [method for method, *_ in backend.told.get(1, [])]
    assert driver.directory.metrics[-1]["step"] == 8


def test_a_rank_that_falls_silent_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    backend = Silent(lambda rank, now: rank == 0 or now < 20.0)
    run(
        tmp_path,
        backend,
        ranks=2,
        schedule=Synchronous(steps=8, prompts_per_step=6),
        call_timeout_s=30.0,
    )
    left = (
        r"worker rollout\[1\] left, 3 rows are requeued; 1 of 2 ranks are up; it did not answer for 30 s"
    )
    assert re.search(left, capsys.readouterr().out)


# Refused settings


def test_a_group_with_cooperating_ranks_cannot_be_elastic(tmp_path: Path):
    made = groups()
    with pytest.raises(
        UserError, match=r"group 'actor' has min_ranks=1, but the ranks of a Actor compute together and"
    ):
        Driver(
            toy_grpo(prompts(4), n=2, **made),
            schedule=Synchronous(steps=1, prompts_per_step=4),
            placement={"actor": Place(ResourcePool("spot", cpus=2), 2, 1)},
            backend=Simulated(costs(((10,),))),
            root=tmp_path,
        )
    assert not list(tmp_path.iterdir()), "nothing was started"
