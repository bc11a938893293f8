"""Runs on a fake clock: times follow from the costs, and training is the same as on any backend."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_runs import (
    KNOWN,
    Rollout,
    SimulatedCluster,
    apart,
    calls,
    costs,
    groups,
    run,
    times,
    trained,
)
from toy import centred, prompts, toy_dapo, toy_evaluation, toy_grpo

import weft
from weft.__main__ import main
from weft.algorithms.grpo import first_of_group
from weft.controllers.backends.backend import Event
from weft.controllers.backends.local import Local
from weft.controllers.driver import Driver, Evaluation
from weft.controllers.group import MANY_RANKS, Call
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.ranks.tasks import Failure, FailureKind, Reply, Task
from weft.controllers.schedule import Asynchronous, Pipelined, Synchronous, Training
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import (
    CostModel,
    Generation,
    LinearCost,
    LogNormal,
    SequenceParallelCost,
    bound,
)
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import DeadlineError, UserError
from weft.dataflow.graph import group
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.log import LogReader
from weft.workers.actor import ActorWorker


def test_synchronous_by_hand(tmp_path: Path):
    schedule = Synchronous(steps=2, prompts_per_step=2, shuffle=False)
    driver = run(tmp_path, schedule, Simulated(costs(KNOWN)), number=2)
    # Weights take until 0.75 s. The longest response takes 7 s, the reward 1 s, the update 2 + 2.7
    # s, the next weights 0.75 s.
    assert calls(driver, "rollout.generate")[0] == pytest.approx((0.75, 7.75))
    assert calls(driver, "reward.score")[0] == pytest.approx((7.75, 8.75))
    assert calls(driver, "actor.update")[0] == pytest.approx((8.75, 13.45))
    assert times(driver) == pytest.approx([14.2, 14.2 + 13.45])


def test_pipelined_by_hand(tmp_path: Path):
    schedule = Pipelined(steps=1, prompts_per_step=2, shuffle=False)
    driver = run(tmp_path, schedule, Simulated(costs(KNOWN)), number=2)
    # Responses arrive at 2.75, 3.75, 5.75 and 7.75 s, and groups complete with the last two. The
    # first two wait a quarter of a second for the rest of their groups. The fixed cost of the
    # update falls on its last rows.
    scored = np.array([(3.0, 4.0), (4.0, 5.0), (5.75, 6.75), (7.75, 8.75)])
    assert calls(driver, "reward.score") == pytest.approx(scored)
    assert calls(driver, "actor.update") == pytest.approx(np.array([(6.75, 7.95), (8.75, 12.25)]))
    assert times(driver) == pytest.approx([13.0])


def test_asynchronous_by_hand(tmp_path: Path):
    schedule = Asynchronous(steps=2, prompts_per_step=2, shuffle=False)
    driver = run(tmp_path, schedule, Simulated(costs(KNOWN)), number=2)
    # Both steps are generated together. The first update uses the two groups that complete at 5.75
    # s. The second begins when the weights of the first have arrived.
    assert calls(driver, "rollout.generate") == pytest.approx(np.array([(0.75, 7.75)]))
    assert calls(driver, "actor.update") == pytest.approx(np.array([(6.75, 11.15), (11.9, 16.9)]))
    assert times(driver) == pytest.approx([11.15, 16.9])


@pytest.mark.parametrize(
    ("share", "ends_s", "versions"),
    [
        (None, [3.75, 13.0, 15.75], [[0], [1], [0]]),
        (0.5, [3.75, 8.0, 13.25], [[0], [1], [1]]),
        (0.3, [3.75, 8.0, 23.25], [[0], [1], [0], [2]]),
    ],
)
def test_weights_go_in_between_two_steps_and_the_oldest_token_or_a_share_of_tokens_counts(
    tmp_path: Path, share: float | None, ends_s: list[float], versions: list[list[int]]
):
    cost = costs(((1,), (10,)))
    cost = CostModel(
        nodes={**cost.nodes, "actor.update": LinearCost(fixed_s=2.0), "reward.score": LinearCost()}
    )
    counts: dict[str, Any] = {"staleness_of": "share", "stale_share": share} if share else {}
    schedule = Asynchronous(steps=3, prompts_per_step=1, shuffle=False, **counts)
    driver = run(tmp_path, schedule, Simulated(cost), number=2, n=1)
    # Weights arrive at 4.25 s and are loaded at 4.75 s. Partial responses end a quarter of a second
    # later, at 11 s. With a share, the second update does not wait for the long response: its weights
    # arrive after 4 tokens of version 0 and 4 of version 1, which is too stale for a share of 0.3.
    generated = np.array([(5.0, 6.0), (0.75, 11.25 if share else 11.0), (11.25, 21.25)])
    assert calls(driver, "rollout.generate") == pytest.approx(generated[: 3 if share == 0.3 else 2])
    assert calls(driver, "receive_weights")[1] == pytest.approx((4.25, 5.0))
    assert times(driver) == pytest.approx(ends_s)
    log = LogReader(driver.directory.path / "buffer" / LOG)
    assert [r["versions"] for r in log if r["do"] == "publish" and "versions" in r] == versions
    assert not check_log(driver.directory.path / "buffer").violations


def test_extra_responses_queue_and_prompts_are_prefilled_first(tmp_path: Path):
    schedule = Synchronous(steps=1, prompts_per_step=2, shuffle=False)
    cost = costs(KNOWN, ((0, 0.5), (2, 1.5)), prefill_s=0.25)
    driver = run(tmp_path, schedule, Simulated(cost), number=2, max_num_seqs=2)
    # Prefill 2 tokens; 3 steps of two responses; prefill 3 tokens; 2 steps of two; 7 steps of one.
    assert calls(driver, "rollout.generate") == pytest.approx(
        np.array([(0.75, 0.75 + 0.5 + 4.5 + 0.75 + 3.0 + 7.0)])
    )


def test_the_driver_makes_one_call_after_the_other(tmp_path: Path):
    schedule = Synchronous(steps=1, prompts_per_step=2, shuffle=False)
    free = run(tmp_path, schedule, Simulated(costs(KNOWN)), number=2)
    slow = run(tmp_path, schedule, Simulated(costs(KNOWN, dispatch_s=0.125)), number=2)
    assert times(slow)[0] - times(free)[0] == pytest.approx(0.125 * len(slow.directory.timeline))


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_rows_of_synchronous_are_those_of_workers(tmp_path: Path, ranks: int):
    schedule = Synchronous(steps=3, prompts_per_step=4)
    real = run(tmp_path, schedule, Local())
    lengths = LogNormal(mean=30, max_tokens=99)
    fake = run(tmp_path, schedule, Simulated(costs(lengths)), apart(ranks, ranks))
    assert trained(fake) == trained(real) and len(trained(real)) == 3
    assert [row["samples"] for row in fake.directory.metrics[1:]] == [8.0] * 3


@pytest.mark.parametrize("seed", range(3))
def test_asynchronous_is_no_slower_than_synchronous_and_nothing_beats_the_bound(
    tmp_path: Path, seed: int
):
    lengths = LogNormal(mean=60, max_tokens=400)
    cost = costs(lengths, ((0, 0.2), (8, 0.3)))
    cost = CostModel(nodes={**cost.nodes, "actor.update": LinearCost(fixed_s=1, per_token_s=0.05)})
    more: dict[str, Any] = {"max_num_seqs": 8, "seed": seed}
    common: dict[str, Any] = {"steps": 8, "prompts_per_step": 6}
    place = apart(2, 3)
    taken = {
        name: times(run(tmp_path, schedule, Simulated(cost), place, **more))[-1]
        for name, schedule in {
            "synchronous": Synchronous(**common),
            "pipelined": Pipelined(**common, groups_per_part=3),
            **{
                f"asynchronous {k}": Asynchronous(**common, groups_per_part=6, max_staleness=k)
                for k in (1, 2, 4)
            },
        }.items()
    }
    graph = toy_grpo(prompts(40), **groups(max_num_seqs=8))
    least = bound(cost, graph, place, prompts_per_step=6, steps=8, seed=seed)
    assert min(taken.values()) >= 8 * least.seconds > 0
    assert taken["pipelined"] < taken["synchronous"]
    assert all(taken[f"asynchronous {k}"] < 0.8 * taken["synchronous"] for k in (1, 2, 4))
    assert least.pools[least.pool] == least.seconds and set(least.pools) >= {"generating", "training"}


@pytest.mark.parametrize("partial_rollouts", ["continue", "finish", "requeue"])
def test_the_staleness_bound_holds_and_the_log_is_sound(tmp_path: Path, partial_rollouts: Any):
    for k in (1, 2, 3):
        schedule = Asynchronous(
            steps=12, prompts_per_step=4, max_staleness=k, partial_rollouts=partial_rollouts
        )
        cost = costs(LogNormal(mean=60, max_tokens=300), 0.1)
        driver = run(tmp_path, schedule, Simulated(cost), apart(2, 2), max_num_seqs=8)
        report = check_log(driver.directory.path / "buffer")
        assert not report.violations and not report.damage
        assert main(["buffer", "check", str(driver.directory.path)]) == 0
        worst = max(row["actor/max_staleness"] for row in driver.directory.metrics[1:])
        assert 1 <= worst <= k


@pytest.mark.thorough
def test_no_group_is_left_until_it_is_too_old(tmp_path: Path):
    for seed in range(8):
        schedule = Asynchronous(steps=8, prompts_per_step=4, max_staleness=2)
        cost = costs(LogNormal(mean=60, max_tokens=300))
        assert len(times(run(tmp_path, schedule, Simulated(cost), apart(3, 2), seed=seed))) == 8


@pytest.mark.thorough
def test_a_simulated_run_has_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    schedule = Asynchronous(steps=4, prompts_per_step=4)
    driver = run(tmp_path, schedule, Simulated(costs(LogNormal(mean=60, max_tokens=300))), apart(4, 2))
    assert main(["timeline", str(driver.directory.path)]) == 0
    assert "rollout" in capsys.readouterr().out
    assert (driver.directory.path / "timeline.png").stat().st_size > 1000


def test_the_same_seed_makes_the_same_run(tmp_path: Path):
    schedule = Asynchronous(steps=6, prompts_per_step=4)
    lengths = LogNormal(mean=60, max_tokens=300)

    def made(seed: int) -> tuple[Any, Any, list[Any]]:
        driver = run(tmp_path, schedule, Simulated(costs(lengths)), apart(3, 2), seed=seed)
        log = LogReader(driver.directory.path / "buffer" / LOG)
        return (
            driver.directory.metrics,
            driver.directory.timeline,
            [r for r in log if r["do"] != "epoch"],
        )

    first, again, other = made(0), made(0), made(1)
    assert first == again and first[0] != other[0]


def test_every_schedule_and_placement_gets_the_same_lengths(tmp_path: Path):
    cost = costs(LogNormal(mean=60, max_tokens=300), 0.1)
    drivers = [
        run(tmp_path, Synchronous(steps=4, prompts_per_step=4), Simulated(cost), apart(1, 1), number=10),
        run(
            tmp_path, Asynchronous(steps=4, prompts_per_step=4), Simulated(cost), apart(3, 2), number=10
        ),
    ]
    tokens = [
        sum(c["tokens"] for c in d.directory.timeline if c["node"] == "actor.update") for d in drivers
    ]
    assert tokens[0] == tokens[1]


def test_a_filter_keeps_its_share_of_groups(tmp_path: Path):
    cost = costs(LogNormal(mean=20, max_tokens=99))
    cost = CostModel(nodes={**cost.nodes, "odd_prompts": LinearCost(keep=0.5)})
    driver = run(tmp_path, Synchronous(steps=5, prompts_per_step=8), Simulated(cost), graph=toy_dapo)
    issued = [r for r in LogReader(driver.directory.path / "buffer" / LOG) if r["do"] == "issue"]
    assert 60 <= sum(len(r["positions"]) for r in issued) <= 110, "40 are trained on"
    assert all(row["samples"] == 16 for row in driver.directory.metrics[1:])


def test_replicas_of_several_ranks_and_evaluations(tmp_path: Path):
    cost = costs(LogNormal(mean=20, max_tokens=99))
    made = groups(rollout=4, actor=2)
    schedule = Asynchronous(steps=4, prompts_per_step=4)
    driver = Driver(
        toy_grpo(prompts(20), **made),
        schedule=schedule,
        evaluations=[
            Evaluation(
                toy_evaluation(prompts(5), rollout=made["rollout"], reward=made["reward"]), every=2
            )
        ],
        placement=apart(8, 4),
        backend=Simulated(cost),
        root=tmp_path,
        progress=False,
    )
    with driver:
        metrics = driver.run()
    assert sum("eval/rollout/response_length" in row for row in metrics) == 3
    assert not check_log(driver.directory.path / "buffer").violations


@pytest.mark.parametrize(("partial_rollouts", "mixed"), [("continue", True), ("finish", False)])
def test_an_evaluation_every_step_costs_asynchronous_training_only_its_rows(
    tmp_path: Path, partial_rollouts: Any, mixed: bool
):
    schedule = Asynchronous(
        steps=12, prompts_per_step=4, max_staleness=2, partial_rollouts=partial_rollouts
    )
    cost = costs(((40,),), 0.5)
    cost = CostModel(nodes={**cost.nodes, "actor.update": LinearCost(fixed_s=8.0)})

    def a_step(number: int) -> tuple[float, Driver]:
        driver = evaluated(tmp_path, schedule, number, cost)
        return times(driver)[-1] / 12, driver

    (alone, _), (with_one, driver) = a_step(0), a_step(1)
    assert with_one < 1.2 * alone, "it waits for nobody, and nobody waits for it"
    rows = driver.directory.metrics
    assert [row["eval/rollout/response_length"] for row in rows] == [40.0] * 13, (
        "each step has its evaluation"
    )
    for row in rows:
        assert row["step"] <= row["eval/oldest_version"] <= row["eval/newest_version"] <= row["step"] + 3
    spans = [row["eval/newest_version"] - row["eval/oldest_version"] for row in rows]
    assert any(spans) == mixed, "weights that come meanwhile are said"
    assert not check_log(driver.directory.path / "buffer").violations


def slow_updates() -> CostModel:
    return CostModel(
        nodes={
            **costs(((10,),), 1.0).nodes,
            "actor.update": LinearCost(fixed_s=20),
        }
    )


def evaluated(
    root: Path, schedule: Training, rows: int, cost: CostModel | None = None, **settings: Any
) -> Driver:
    """A run with an evaluation of this many rows after each step, or none for 0."""
    made = groups()
    graph = toy_evaluation(prompts(rows or 1), rollout=made["rollout"], reward=made["reward"])
    driver = Driver(
        toy_grpo(prompts(40), n=2, **made),
        schedule=schedule,
        evaluations=[Evaluation(graph, every=1)] if rows else [],
        placement=apart(1, 1),
        backend=Simulated(cost or slow_updates()),
        root=root,
        name=f"run-{rows}-{len(settings)}",
        progress=False,
        **settings,
    )
    with driver:
        driver.run()
    return driver


@pytest.mark.parametrize("kind", [Synchronous, Pipelined])
def test_an_evaluation_takes_the_rollout_while_it_would_be_idle_and_changes_no_update(
    tmp_path: Path, kind: Any
):
    schedule = kind(steps=6, prompts_per_step=4)
    alone, driver = evaluated(tmp_path, schedule, 0), evaluated(tmp_path, schedule, 3)
    # A step takes 10 s of generation, 1 s of rewards, 20 s of update. An evaluation of 11 s runs
    # during the update.
    assert times(driver)[-1] == pytest.approx(times(alone)[-1]), (
        "training waits for none but the last, after its end"
    )
    assert [len(ids) for ids in trained(driver)] == [len(ids) for ids in trained(alone)]
    assert sum("eval/rollout/response_length" in row for row in driver.directory.metrics) == 7
    log = LogReader(driver.directory.path / "buffer" / LOG)
    versions = [
        r["versions"] for r in log if r["do"] == "publish" and r["graph"] == "eval" and "versions" in r
    ]
    assert versions == [[step] * 3 for step in range(7)], "each is of the weights of its step alone"
    assert not check_log(driver.directory.path / "buffer").violations


def test_a_run_with_a_stop_condition_waits_for_its_metrics_before_each_step(tmp_path: Path):
    schedule = Synchronous(steps=6, prompts_per_step=4)
    driver = evaluated(
        tmp_path,
        schedule,
        3,
        stop=lambda row: "eval/rollout/response_length" in row and row["step"] == 3,
    )
    assert [row["step"] for row in driver.directory.metrics] == [0, 1, 2, 3]
    assert len(trained(driver)) == 3, "the model is the one that was evaluated"


def test_colocated_groups_with_devices_load_and_unload(tmp_path: Path):
    pool = ResourcePool("everything", gpus=8)
    cost = costs(KNOWN)
    cost = CostModel(
        nodes={
            **cost.nodes,
            "rollout.onload": LinearCost(fixed_s=3.0),
            "actor.offload": LinearCost(fixed_s=1.0),
        }
    )
    place = {"rollout": Place(pool, 8), "actor": Place(pool, 8)}
    driver = run(tmp_path, Synchronous(steps=1, prompts_per_step=8), Simulated(cost), place)
    (_, end), *_ = calls(driver, "rollout.generate")
    assert any(start >= end and stop - start == 0 for start, stop in calls(driver, "offload"))
    assert any(stop - start == pytest.approx(3.0) for start, stop in calls(driver, "onload"))


def test_a_wait_that_is_too_long_is_one_here_too(tmp_path: Path):
    with pytest.raises(DeadlineError, match=r"no answer for 50 s.*rollout.generate"):
        run(
            tmp_path,
            Synchronous(steps=1, prompts_per_step=2),
            Simulated(costs(((100,),))),
            call_timeout_s=50,
        )


def test_costs_that_fit_nothing_are_refused(tmp_path: Path):
    schedule = Synchronous(steps=1, prompts_per_step=2)
    with pytest.raises(UserError, match="no graph has; did you mean 'rollout'"):
        run(tmp_path, schedule, Simulated(CostModel(nodes={"rolout.generate": LinearCost()})))
    shared = SequenceParallelCost(ranks=2, memory_tokens=100)
    with pytest.raises(
        UserError, match="costs of 'actor': replicas of 2 ranks do not divide the 1 of 'actor'"
    ):
        run(tmp_path, schedule, Simulated(CostModel(nodes={"actor.update": shared})))
    with pytest.raises(UserError, match=r"'ranks_per_replica' .*; a replica has the ranks of the group"):
        CostModel(ranks_per_replica={"actor": 2})  # pyright: ignore[reportCallIssue]
    pair: Any = group(ActorWorker, model="m", tensor_parallel=2)
    with pytest.raises(
        UserError, match="configuration of 'actor': replicas of 2 ranks do not divide the 1"
    ):
        Simulated().check({"actor": Place(ResourcePool("a", cpus=1), ranks=1)}, {"actor": pair})
    with pytest.raises(
        UserError, match=r"node 'rollout.generate' generates: its cost must be a Generation"
    ):
        run(tmp_path, schedule, Simulated())
    with pytest.raises(UserError, match="decode_step_s must be seconds above 0"):
        Generation(lengths=KNOWN, decode_step_s=((4, 1.0), (1, 1.0)))


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_256_devices_are_simulated(tmp_path: Path, steps: int):
    cost = CostModel(
        nodes={
            "rollout.generate": Generation(
                lengths=LogNormal(mean=2000, max_tokens=16384), decode_step_s=((0, 0.015), (256, 0.025))
            ),
            "actor.update": LinearCost(fixed_s=1.0, per_token_s=1e-3),
        }
    )
    schedule = Asynchronous(steps=steps, prompts_per_step=256, groups_per_part=256)
    driver = run(tmp_path, schedule, Simulated(cost), apart(128, 128), number=1000, n=8)
    assert len(times(driver)) == steps


class Counting(Simulated):
    """Counts rows with prompts that were generated, and the replies that bring them."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__(costs)
        self.turns = self.replies = 0

    def wait(self, timeout_s: float) -> list[Event]:
        events = [*super().wait(timeout_s)]
        rows = [
            e for e in events if e.reply.published is not None and e.reply.published.parents is not None
        ]
        self.turns += bool(rows)
        self.replies += len(rows)
        return events


@pytest.mark.parametrize("replicas", [4 * MANY_RANKS, MANY_RANKS // 4])
def test_where_many_ranks_are_at_work_rows_are_taken_together(tmp_path: Path, replicas: int):
    lengths = LogNormal(mean=2000, sigma=0.5, max_tokens=4000)
    backend = Counting(
        CostModel(nodes={"rollout.generate": Generation(lengths=lengths, decode_step_s=0.0011)})
    )
    schedule = Asynchronous(steps=2, prompts_per_step=replicas // 2, max_staleness=1)
    driver = run(tmp_path, schedule, backend, apart(replicas, 1), number=400, n=4)
    assert len(times(driver)) == 2 and not check_log(driver.directory.path / "buffer").violations
    together = backend.replies / backend.turns
    assert together > 2 if replicas > MANY_RANKS else together < 1.5, together
    joined = [r for r in LogReader(driver.directory.path / "buffer" / LOG) if "segments" in r]
    assert joined or replicas < MANY_RANKS, "rows of several ranks are one record"


class Replaceable(Rollout):
    replaceable = True


class Mortal(SimulatedCluster):
    """The process of a replica dies at a given time, and its replacement starts slowly."""

    def __init__(self, costs: CostModel, at: float) -> None:
        super().__init__(costs)
        self._at = at
        self.told: list[tuple[str, int, int | None]] = []
        """Calls to the second rank, with the version of any weights it received."""

    def start(self, setup: Any) -> dict[str, Any]:
        self._groups = super().start(setup)
        return self._groups

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        super()._submit(rank, task, call)
        if call.group.name == "rollout" and rank == 1:
            weights = task.arguments.get("weights")
            self.told.append((task.method, call.group.version, weights.version if weights else None))

    def wait(self, timeout_s: float) -> list[Event]:
        events = [*super().wait(timeout_s)]
        rollout = self._groups["rollout"]
        if self.clock() >= self._at and (lost := [c for c in rollout.calls if 1 in c.waiting]):
            self._at = math.inf
            self.told.clear()
            failure = Failure("its process ended", kind=FailureKind.DIED)
            events.append(Event(lost[0], 1, Reply(failure=failure)))
        return events

    def replace(self, group: Any, rank: int) -> None:
        self._replicas[group.name, rank] = type(self._replicas[group.name, rank])(
            self._replicas[group.name, rank].cost, self._reply, self._invent, 256, at=self.clock()
        )

    def _result(
        self, call: Call, rank: int, task: Task, versions: Any, cost: Any, seconds: float
    ) -> Reply:
        reply = super()._result(call, rank, task, versions, cost, seconds)
        return replace(reply, value=call.group.mesh[rank]) if task.method == "register" else reply


@pytest.mark.parametrize("partial_rollouts", [None, "continue", "finish", "requeue"])
def test_the_siblings_of_a_dead_rank_continue_during_its_replacement(
    tmp_path: Path, partial_rollouts: Any
):
    cost = costs(((10,),))
    common: dict[str, Any] = {"steps": 12, "prompts_per_step": 4}
    schedule = (
        Asynchronous(**common, partial_rollouts=partial_rollouts)
        if partial_rollouts
        else Synchronous(**common)
    )

    def run_for(startup_s: float) -> tuple[Driver, Mortal]:
        backend = Mortal(
            CostModel(nodes={**cost.nodes, "rollout.register": LinearCost(fixed_s=startup_s)}), at=5.0
        )
        made = groups() | {"rollout": group(Replaceable, name="rollout")}
        made["rollout"].follows(made["actor"])
        driver = Driver(
            toy_grpo(prompts(40), n=2, **made),
            schedule=schedule,
            placement=apart(2, 1),
            backend=backend,
            root=tmp_path,
            name=f"run-{startup_s:g}",
            progress=False,
            call_timeout_s=1e6,
        )
        with driver:
            driver.run()
        assert driver.directory.metrics[-1]["replaced_workers"] == 1
        assert not check_log(driver.directory.path / "buffer").violations
        return driver, backend

    driver, backend = run_for(1e5)
    assert times(driver)[-1] < 1000, "nobody waited for the rank that is not up"
    assert [method for method, *_ in backend.told] == ["register"]
    driver, backend = run_for(40.0)
    methods = [method for method, *_ in backend.told]
    assert methods[:2] == ["register", "receive_weights"] and "generate" in methods
    held = None
    for method, version, given in backend.told:
        held = given if method == "receive_weights" else held
        assert method != "generate" or held == version, (
            "it gets no rows before it has the weights of the others"
        )


# Stragglers


@weft.graph
def over_issued(prompts, *, rollout, reward, actor, n, first=2):
    samples = reward.score(rollout.generate(prompts, n=n))
    return actor.update(centred(first_of_group(samples, first, deadline_s=5.0)))


@pytest.mark.parametrize("schedule", [Pipelined, Asynchronous])
def test_a_step_does_not_wait_for_a_straggler_that_its_quorum_does_without(
    tmp_path: Path, schedule: Any
):
    settings: dict[str, Any] = {"steps": 3, "prompts_per_step": 2, "shuffle": False}
    straggling = ((9, 400, 6), (8, 7, 11))
    swift = ((9, 6), (8, 7))
    taken = {
        n: run(
            tmp_path, schedule(**settings), Simulated(costs(lengths)), graph=over_issued, number=2, n=n
        )
        for n, lengths in ((3, straggling), (2, swift))
    }
    assert times(taken[3])[-1] <= times(taken[2])[-1] + 3.0, "three steps"
    proof = check_log(taken[3].directory.path / "buffer")
    assert not proof.violations
    log = [
        r
        for r in LogReader(taken[3].directory.path / "buffer" / LOG)
        if r["do"] == "publish" and "parents" in r
    ]
    made = sum(len(r["ids"]) for r in log)
    assert 12 <= made <= 15, "the straggler is never made"


def test_responses_that_end_in_one_step_are_one_message(tmp_path: Path):
    same = ((5, 5, 3),)
    driver = run(tmp_path, Pipelined(steps=1, prompts_per_step=4), Simulated(costs(same)), n=3, number=4)
    log = [
        r
        for r in LogReader(driver.directory.path / "buffer" / LOG)
        if r["do"] == "publish" and "parents" in r
    ]
    assert [(len(r["ids"]), len(r["finished"])) for r in log] == [(4, 0), (8, 4)]


def test_a_rank_that_dies_loses_only_the_responses_that_it_had_not_handed_over(tmp_path: Path):
    cost = costs(((4, 30, 5),))
    made = groups() | {"rollout": group(Replaceable, name="rollout")}
    made["rollout"].follows(made["actor"])
    driver = Driver(
        toy_grpo(prompts(4), n=3, **made),
        schedule=Synchronous(steps=1, prompts_per_step=4),
        placement=apart(2, 1),
        backend=Mortal(cost, at=10.0),
        root=tmp_path,
        name="run",
        progress=False,
        record_every=0,
    )
    with driver:
        driver.run()
    assert not check_log(driver.directory.path / "buffer").violations
    log = list(LogReader(driver.directory.path / "buffer" / LOG))
    claims = {
        r["lease"]: r["ids"] for r in log if r["do"] == "claim" and r["node"] == "rollout.generate"
    }
    first, again = claims.values()
    assert len(first) == 4 and len(again) == 2, "those of the rank that died"
    of_lease = {
        token: [(r["ids"], r["parents"]) for r in log if r["do"] == "publish" and r["lease"] == token]
        for token in claims
    }
    counts = [sum(len(ids) for ids, _ in published) for published in of_lease.values()]
    assert counts == [10, 2], "two of three were there of each, and the third alone was made again"
    assert {parent for _, parents in list(of_lease.values())[1] for parent in parents} == set(again)
    assert [len(ids) for ids in trained(driver)] == [12]
