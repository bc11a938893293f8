"""Checks of a whole run before any process starts. Checks of graphs are in test_driver.py."""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saved_runs import SavingActor
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo

from weft.controllers.backends.local import Local
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.prechecks.checks import (
    check_capacity,
    check_followed,
    check_kinds,
    check_resumes,
    check_rows,
    check_transports,
)
from weft.controllers.recovery.checkpoints import CheckpointConfig, RunState
from weft.controllers.recovery.resume import ResumePoint
from weft.controllers.run_spec import RunSpec
from weft.controllers.schedule import Asynchronous, Synchronous
from weft.dataflow.buffer.sample_buffer import BufferConfig
from weft.dataflow.errors import UserError
from weft.dataflow.graph import Graph, Handle, group
from weft.dataflow.runs.log import Position
from weft.workers.actor import ActorWorker
from weft.workers.reference import ReferenceWorker
from weft.workers.rollout import RolloutWorker

SCHEDULE = Synchronous(steps=1, prompts_per_step=4)


def toy_graph(actor_class: Any = ToyActor, every: int = 1) -> tuple[Graph, Mapping[str, Handle]]:
    rollout, actor = group(ToyRollout, name="rollout"), group(actor_class, name="actor")
    rollout.follows(actor, every=every)
    graph = toy_grpo(prompts(4), rollout=rollout, reward=group(ToyReward, name="reward"), actor=actor)
    return graph, graph.handles


@pytest.mark.parametrize(
    ("argument", "value", "wanted"),
    [
        ("graph", toy_grpo, "the result of calling a @weft.graph function with a source"),
        ("schedule", Synchronous, "a value such as weft.Synchronous(steps=100)"),
        ("buffer", {"max_rows": 3}, "a weft.BufferConfig(...)"),
        ("checkpoint", 3, "a weft.CheckpointConfig(every=...)"),
        (
            "placement",
            {"actor": ResourcePool()},
            "a mapping of group names to weft.Place(pool, ranks=...)",
        ),
        ("backend", "ray", "weft.Local() or weft.RayBackend()"),
    ],
)
def test_an_argument_of_another_kind_is_answered_with_an_example(argument: str, value: Any, wanted: str):
    right: dict[str, Any] = {
        "graph": toy_graph()[0],
        "schedule": SCHEDULE,
        "buffer": BufferConfig(),
        "checkpoint": CheckpointConfig(),
        "placement": {"actor": Place(ResourcePool())},
        "backend": None,
    }
    check_kinds(**right)
    with pytest.raises(UserError) as caught:
        check_kinds(**{**right, argument: value})
    assert str(caught.value).startswith(f"Driver({argument}=...) takes {wanted}")
    assert str(caught.value).endswith(f"not {value!r}")


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        ({"seed": -1}, "Driver.seed: input should be greater than or equal to 0, not -1"),
        ({"seed": "x"}, "Driver.seed: input should be a valid integer, not 'x'"),
        ({"seed": True}, "Driver.seed: input should be a valid integer, not True"),
        ({"seed": 2**64}, "Driver.seed: input should be less than "),
        ({"record_every": -1}, "Driver.record_every: "),
        (
            {"call_timeout_s": float("nan")},
            "Driver.call_timeout_s: input should be a finite number, not nan",
        ),
        ({"call_timeout_s": "9"}, "Driver.call_timeout_s: input should be a valid number, not '9'"),
    ],
)
def test_numbers_of_the_driver_follow_the_rules_of_settings(
    number: dict[str, Any], wanted: str, tmp_path: Path
):
    with pytest.raises(UserError, match=re.escape(wanted)):
        Driver(toy_graph()[0], schedule=SCHEDULE, root=tmp_path, progress=False, **number)
    assert not [*tmp_path.iterdir()]


def test_a_step_that_the_buffer_cannot_hold_is_refused_with_both_numbers():
    graph, _ = toy_graph()
    check_capacity(graph, SCHEDULE, BufferConfig(max_rows=12))
    with pytest.raises(
        UserError, match=r"has 12 rows in flight at once \(3 a prompt\), but .*max_rows=11\) holds fewer"
    ):
        check_capacity(graph, SCHEDULE, BufferConfig(max_rows=11))


def test_a_rollout_follows_as_often_as_the_schedule_allows_its_rows_to_lag():
    graph, _ = toy_graph(every=3)
    loss = type("Loss", (), {"reads": ("response_logprobs",), "may_read": ()})()
    nodes = tuple(
        replace(n, arguments={**n.arguments, "loss": loss}) if n.operation.updates else n
        for n in graph.nodes
    )
    graph = replace(graph, nodes=nodes)
    check_followed(graph, Asynchronous(steps=1, prompts_per_step=4, max_staleness=2))
    with pytest.raises(
        UserError, match=r"every 3 updates, but Asynchronous allows a staleness of 1; take every=2"
    ):
        check_followed(graph, Asynchronous(steps=1, prompts_per_step=4, max_staleness=1))


def spec(graph: Graph, handles: Mapping[str, Handle], every: int = 1, seed: int = 0) -> RunSpec:
    backend: Any = None
    return RunSpec(
        {"train": graph},
        handles,
        {},
        backend,
        SCHEDULE,
        {},
        seed,
        0,
        1.0,
        1.0,
        BufferConfig(),
        CheckpointConfig(every=every),
        None,
        (),
    )


def test_a_run_that_saves_itself_needs_groups_that_can_be_saved():
    graph, handles = toy_graph()
    check_resumes(spec(graph, handles, every=0), handles, None)
    with pytest.raises(
        UserError,
        match=r"CheckpointConfig\(every=1\): worker group 'actor' is updated, but ToyActor has no method",
    ):
        check_resumes(spec(graph, handles), handles, None)
    graph, handles = toy_graph(SavingActor)
    check_resumes(spec(graph, handles), handles, None)


def test_a_checkpoint_must_be_of_this_run(tmp_path: Path):
    graph, handles = toy_graph(SavingActor)
    point = ResumePoint(tmp_path, RunState(2, 0, 0.0, {}, Position(), "Synchronous"))
    (tmp_path / "critic").mkdir()
    with pytest.raises(UserError, match="has nothing of worker group 'actor'; it has critic"):
        check_resumes(spec(graph, handles), handles, point)
    (tmp_path / "actor").mkdir()
    check_resumes(spec(graph, handles), handles, point)
    with pytest.raises(UserError, match="is of a run with seed=0, not 1"):
        check_resumes(spec(graph, handles, seed=1), handles, point)


GPUS, OTHERS, CPUS = (
    ResourcePool("gpus", gpus=2),
    ResourcePool("others", gpus=2),
    ResourcePool("cpus", cpus=2),
)


@pytest.mark.parametrize(
    ("transport", "leader", "follower", "wanted"),
    [
        ("nccl", GPUS, CPUS, "pool 'cpus' of 'rollout' has none; take transport=\"auto\""),
        ("ipc", CPUS, CPUS, "pool 'cpus' of 'actor' has none"),
        ("nccl", GPUS, GPUS, 'cannot be used on one pool; take transport="ipc"'),
        ("ipc", GPUS, OTHERS, 'cannot be used on separate pools; take transport="nccl"'),
        ("nccl", GPUS, OTHERS, ""),
        ("ipc", GPUS, GPUS, "'actor' has 1 ranks for the 2 GPUs of pool 'gpus'; take ranks=2 or"),
        ("gloo", CPUS, CPUS, ""),
        ("vllm:nccl", GPUS, CPUS, "pool 'cpus' of 'rollout' has none; take transport=\"auto\""),
        ("vllm:nccl", GPUS, GPUS, 'cannot be used on one pool; take transport="vllm:ipc"'),
        ("vllm:ipc", GPUS, OTHERS, 'cannot be used on separate pools; take transport="vllm:nccl"'),
        ("vllm:ipc", GPUS, GPUS, "'actor' has 1 ranks for the 2 GPUs of pool 'gpus'; take ranks=2"),
        ("vllm:nccl", GPUS, OTHERS, ""),
    ],
)
def test_weights_go_from_gpu_to_gpu_where_there_are_gpus_that_allow_it(
    transport: Any, leader: ResourcePool, follower: ResourcePool, wanted: str
):
    actor: Any = group(ActorWorker, model="m", transport=transport, name="actor")
    rollout: Any = group(RolloutWorker, name="rollout", model="m")
    rollout.follows(actor)
    placement = {"actor": Place(leader), "rollout": Place(follower)}
    with pytest.raises(UserError, match=re.escape(wanted)) if wanted else nullcontext():
        check_transports([actor, rollout], placement)


def test_a_rank_on_each_gpu_sends_to_the_followers_there():
    actor: Any = group(ActorWorker, model="m", transport="ipc", name="actor")
    rollout: Any = group(RolloutWorker, name="rollout", model="m")
    rollout.follows(actor)
    placement = {"actor": Place(GPUS, ranks=2), "rollout": Place(GPUS)}
    check_transports([actor, rollout], placement)


class OwnEngine(RolloutWorker):
    def new_engine(self, **settings: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("worker", "settings", "wanted"),
    [
        (RolloutWorker, {"engine": "transformers"}, "its engine is 'transformers', not vLLM"),
        (
            RolloutWorker,
            {"double_buffer": True},
            "it has double_buffer=True, which vLLM's backends do not support",
        ),
        (OwnEngine, {}, "OwnEngine has a custom engine"),
        (ReferenceWorker, {}, "ReferenceWorker does not run vLLM"),
        (RolloutWorker, {"double_buffer": False}, ""),
    ],
)
def test_by_backends_of_vllms_weights_reach_engines_of_vllm(
    worker: Any, settings: dict[str, Any], wanted: str
):
    actor: Any = group(ActorWorker, model="m", transport="vllm:ipc", name="actor")
    follower: Any = group(worker, name="follower", model="m", **settings)
    follower.follows(actor)
    placement = {"actor": Place(GPUS, ranks=2), "follower": Place(GPUS)}
    who = "transport=\"vllm:ipc\" of 'actor', which 'follower' follows: "
    with pytest.raises(UserError, match=re.escape(who + wanted)) if wanted else nullcontext():
        check_transports([actor, follower], placement)
    with pytest.raises(
        UserError, match=r"Local\(\): transport=\"vllm:ipc\" of 'actor' needs processes that work at the"
    ):
        Local().check(placement, {"actor": actor, "follower": follower})


def test_more_rows_than_a_driver_can_hold_are_refused_with_the_settings_that_make_them():
    graph, _ = toy_graph()
    with pytest.raises(
        UserError, match=r"Synchronous\(prompts_per_step=4000000\) of graph .*: 12,000,000 rows"
    ) as caught:
        check_rows(graph, 4_000_000, "Synchronous(prompts_per_step=4000000)")
    assert "node 'rollout.generate' has n=2" in str(caught.value)
    for wrong in ({"prompts_per_step": 10**9}, {"prompts_per_step": 10**6 + 1}):
        with pytest.raises(UserError, match=r"Synchronous\.prompts_per_step"):
            Synchronous(**wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"Asynchronous\.max_staleness"):
        Asynchronous(max_staleness=10**9)
