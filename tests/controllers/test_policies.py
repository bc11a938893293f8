"""One rollout group samples with the adapters of several actors, which train in one graph."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_simulations import STEPS, lives, random_run, updates
from slots import Adapting, Slots, two_policies
from toy import ToyActor, ToyReward, ToyRollout, ToyTeacher, prompts, toy_evaluation

import weft
from weft.algorithms.advantages import group_advantages
from weft.controllers.driver import Driver, Evaluation
from weft.controllers.schedule import Asynchronous, Pipelined, Synchronous, Training
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import UserError
from weft.dataflow.graph import Graph, group
from weft.dataflow.runs.samples import recorded
from weft.dataflow.tracing import graph
from weft.workers.training.lora import Lora


def handles(actor: Any = Adapting, **settings: Any) -> dict[str, Any]:
    made = {
        "rollout": group(Slots, name="rollout"),
        "reward": group(ToyReward),
        "actor": group(actor, name="actor", **settings),
        "other": group(Adapting, name="other"),
    }
    made["rollout"].follows(made["actor"], made["other"])
    return made


def driver_of(graph: Graph, root: Path, schedule: Training | None = None, **settings: Any) -> Driver:
    schedule = schedule or Synchronous(steps=3, prompts_per_step=4)
    return Driver(graph, schedule=schedule, root=root, name="run", progress=False, **settings)


@pytest.mark.parametrize(
    "schedule",
    [
        Synchronous(steps=3, prompts_per_step=4),
        Pipelined(steps=3, prompts_per_step=4),
        Asynchronous(steps=3, prompts_per_step=4, max_staleness=1),
    ],
    ids=["synchronous", "pipelined", "asynchronous"],
)
def test_each_actor_trains_on_the_rows_of_its_own_adapter(tmp_path: Path, schedule: Training):
    with driver_of(two_policies(prompts(8), **handles()), tmp_path, schedule) as driver:
        rows = driver.run()[1:]
        versions = driver.groups["rollout"].versions
    assert versions == {"actor": 3, "other": 3}
    assert [row["samples"] for row in rows] == [16.0] * 3, "4 prompts, 2 responses, 2 actors"
    assert all(row[f"{name}/rows"] == 8 for row in rows for name in ("actor", "other"))
    found = [row for part in recorded(driver.directory.path) for row in part.rows().to_pylist()]
    for name in ("actor", "other"):
        own = [row for row in found if row["policy"] == name]
        assert len(own) == 3 * 8
        lags = [row["step"] - 1 - min(row["response_versions"]) for row in own]
        assert min(lags) >= 0 and max(lags) <= schedule.max_staleness
    assert not check_log(driver.directory.path / "buffer").violations


def test_the_calls_of_all_policies_share_the_engine_even_in_a_synchronous_step(tmp_path: Path):
    with driver_of(two_policies(prompts(8), **handles()), tmp_path) as driver:
        driver.run()
    timeline = driver.directory.timeline
    for step in (1, 2, 3):
        calls = [c for c in timeline if c["step"] == step and "rollout.generate" in c["node"]]
        assert sorted(call["node"] for call in calls) == ["rollout.generate", "rollout.generate_2"]
        first, second = calls
        assert max(first["start_s"], second["start_s"]) < min(first["end_s"], second["end_s"])


def test_an_evaluation_of_one_policy_measures_the_versions_of_each_step(tmp_path: Path):
    made = handles()
    evaluations = [
        Evaluation(
            toy_evaluation(
                prompts(3, "held_out"),
                rollout=weft.with_policy(made["rollout"], made[name]),
                reward=made["reward"],
            ),
            every=1,
            name=f"of_{name}",
        )
        for name in ("actor", "other")
    ]
    graph = two_policies(prompts(8), **made)
    assert set(evaluations[0].graph.handles) == {"rollout", "reward"}, "it does not hold up the actor"
    with driver_of(graph, tmp_path, evaluations=evaluations) as driver:
        rows = driver.run()
    assert all("of_actor/reward/mean" in row and "of_other/reward/mean" in row for row in rows)
    for name in ("actor", "other"):
        parts = [part for part in recorded(driver.directory.path) if part.graph == f"of_{name}"]
        found = [row for part in parts for row in part.rows().to_pylist()]
        assert len(found) == 4 * 3 and {row["policy"] for row in found} == {name}
        assert all(set(row["response_versions"]) == {row["step"]} for row in found)


@pytest.mark.parametrize(
    "seeds",
    [
        range(2),
        pytest.param(range(2, 30), marks=pytest.mark.thorough),
        pytest.param(range(30, 200), marks=pytest.mark.slow),
    ],
    ids=["two", "few", "many"],
)
def test_runs_killed_at_random_moments_update_each_policy_once_in_each_step(
    seeds: range, tmp_path: Path
):
    def groups() -> dict[str, Any]:
        made = handles()
        return {**made, "sampler": weft.with_policy(made["rollout"], made["other"])}

    for seed in seeds:
        chance = random.Random(seed)
        root = tmp_path / str(seed)
        root.mkdir()
        settings = random_run(chance) | {"graph": two_policies, "groups": groups}
        lives(root, chance, [chance.randint(3, 150) for _ in range(5)], **settings)
        steps = updates(root / "run")
        assert [step for step, _ in steps] == list(range(1, STEPS + 1))
        assert [dict(made) for _, made in steps] == [{"actor": 1, "other": 1}] * STEPS
        report = check_log(root / "run" / "buffer")
        assert not report.violations, (seed, settings, report.violations[:3])


# Refusals


def with_nodes(record: Callable[..., None], **made: Any) -> Graph:
    """Return a graph of these groups, whose nodes `record` adds."""

    @graph
    def several(prompts: Any, *, rollout: Any, reward: Any, actor: Any, other: Any) -> None:
        record(prompts, rollout=rollout, reward=reward, actor=actor, other=other)

    return several(prompts(8), **made)


def unnamed(prompts: Any, *, rollout: Any, reward: Any, actor: Any, other: Any) -> None:
    samples = rollout.generate(prompts)
    actor.update(samples, loss=toy_loss())
    other.update(samples, loss=toy_loss())


def toy_loss() -> Any:
    from toy import ToyLoss

    return ToyLoss(column="response_logprobs")


def unknown(prompts: Any, *, rollout: Any, reward: Any, actor: Any, other: Any) -> None:
    actor.update(rollout.generate(prompts, policy="actr"), loss=toy_loss())
    other.update(rollout.generate(prompts, policy=other), loss=toy_loss())


def not_an_actor(prompts: Any, *, rollout: Any, reward: Any, actor: Any, other: Any) -> None:
    actor.update(rollout.generate(prompts, policy=3), loss=toy_loss())
    other.update(rollout.generate(prompts, policy=other), loss=toy_loss())


def crossed(prompts: Any, *, rollout: Any, reward: Any, actor: Any, other: Any) -> None:
    actor.update(rollout.generate(prompts, policy=other), loss=toy_loss())
    other.update(rollout.generate(prompts, policy=actor), loss=toy_loss())


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            unnamed,
            "node 'rollout.generate' names no policy, and 'rollout' follows actor, other; add "
            "policy=actor",
        ),
        (
            unknown,
            "node 'rollout.generate': policy='actr', but 'rollout' follows actor, other; did you mean 'actor'?; name one of these, or "
            "add it to rollout.follows(...)",
        ),
        (
            not_an_actor,
            "node 'rollout.generate': policy=3 is not an actor; give the handle of one: policy=actor",
        ),
        (
            crossed,
            "node 'actor.update' trains 'actor' on rows that 'rollout.generate' samples with the adapter of 'other'; their versions "
            "count updates of 'other', so train on rows of policy=actor",
        ),
    ],
    ids=["unnamed", "unknown", "not_an_actor", "crossed"],
)
def test_samples_of_no_or_another_policy_are_refused(
    record: Callable[..., None], said: str, tmp_path: Path
):
    with pytest.raises(UserError) as caught:
        driver_of(with_nodes(record, **handles()), tmp_path)
    assert str(caught.value) == said
    assert not (tmp_path / "run").exists()


def test_a_policy_that_the_group_does_not_follow_is_refused(tmp_path: Path):
    made = handles()
    graph = with_nodes(
        lambda prompts, *, rollout, reward, actor, other: actor.update(
            rollout.generate(prompts, policy=actor), loss=toy_loss()
        ),
        **{**made, "rollout": group(Slots, name="rollout")},
    )
    with pytest.raises(UserError, match=r"policy='actor', but 'rollout' follows no group; name one"):
        driver_of(graph, tmp_path)


@pytest.mark.parametrize(
    ("actor", "settings", "said"),
    [
        (ToyActor, {}, "'actor' trains the whole model; give it lora=weft.Lora(...)"),
        (Adapting, {"lora": None}, "'actor' trains the whole model; give it lora=weft.Lora(...)"),
        (
            Adapting,
            {"lora": Lora(published="merged")},
            "'actor' publishes merged weights; leave Lora(published='merged') out",
        ),
        (
            Adapting,
            {"dtype": "bfloat16"},
            "'other' has dtype 'float32', and 'actor' has 'bfloat16'; give both the same dtype",
        ),
    ],
    ids=["no_adapter", "whole_model", "merged", "dtype"],
)
def test_several_leaders_without_adapters_of_one_model_are_refused(
    actor: Any, settings: dict[str, Any], said: str, tmp_path: Path
):
    with pytest.raises(UserError) as caught:
        driver_of(two_policies(prompts(8), **handles(actor, **settings)), tmp_path)
    first = "'rollout' follows 2 groups, so each must train an adapter of one model; "
    assert str(caught.value) == first + said


def test_the_reason_why_an_adapter_cannot_be_served_is_named(tmp_path: Path):
    for model, lora, said in (
        ("base", Lora(dora=True), "vLLM cannot serve adapters with dora=True"),
        ("base", Lora(rank=600), "vLLM serves adapters up to rank 512, and this one has rank 600"),
        ("another", Lora(), "it starts from the model base, and the adapter belongs to another"),
    ):
        rollout: Any = weft.group(weft.RolloutWorker, model="base")
        plain: Any = weft.group(weft.ActorWorker, name="plain", model="base", lora=Lora())
        odd: Any = weft.group(weft.ActorWorker, name="odd", model=model, lora=lora)
        rollout.follows(plain, odd)
        groups = {"rollout": rollout, "reward": group(ToyReward), "actor": plain, "other": odd}
        with pytest.raises(UserError) as caught:
            driver_of(two_policies(prompts(8), **groups), tmp_path)
        assert str(caught.value).endswith(
            f"'odd' has an adapter that 'rollout' cannot serve: {said}; change that"
        )


def test_workers_that_take_complete_weights_cannot_follow_several_leaders(tmp_path: Path):
    made = handles()
    teacher: Any = group(ToyTeacher, name="teacher")
    teacher.follows(made["actor"], made["other"])

    @graph
    def taught(prompts: Any, *, rollout: Any, teacher: Any, actor: Any, other: Any) -> None:
        for policy in (actor, other):
            policy.update(teacher.teach(rollout.generate(prompts, policy=policy)), loss=toy_loss())

    del made["reward"]
    with pytest.raises(UserError, match="'teacher' cannot serve: ToyTeacher takes complete weights"):
        driver_of(taught(prompts(8), **made, teacher=teacher), tmp_path)


def test_with_policy_takes_handles():
    rollout, actor = group(Slots), group(Adapting)
    for given, wrong in (((rollout, "actor"), "'actor'"), ((3, actor), "3")):
        with pytest.raises(UserError, match=f"takes the handles of a rollout group .*not {wrong}"):
            weft.with_policy(*given)


def test_responses_of_several_policies_cannot_move(tmp_path: Path):
    schedule = Synchronous(steps=3, prompts_per_step=4, migrate=True)
    with pytest.raises(
        UserError, match=r"migrate=True\): 'rollout' follows several actors \(actor, other\)"
    ):
        driver_of(two_policies(prompts(8), **handles()), tmp_path, schedule)


class Judge(ToyReward):
    @weft.remote(dispatch=weft.Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=("strictness",))
    def judge(self, samples: weft.Batch, *, policy: str = "lenient") -> weft.Batch:
        return samples.with_columns(strictness=[policy] * len(samples))


def test_an_argument_named_policy_of_a_method_that_does_not_sample_is_the_users_own(tmp_path: Path):
    @graph
    def judged(rows: Any, *, rollout: Any, judge: Any, actor: Any) -> Any:
        samples = judge.judge(rollout.generate(rows, n=2), policy="strict")
        return actor.update(group_advantages(judge.score(samples)))

    made = {"rollout": group(ToyRollout), "judge": group(Judge), "actor": group(ToyActor)}
    made["rollout"].follows(made["actor"])
    with driver_of(judged(prompts(8), **made), tmp_path) as driver:
        assert driver.run()[-1]["step"] == 3
