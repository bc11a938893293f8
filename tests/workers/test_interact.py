"""A graph may give a node another worker group: `rollout.interact(prompts, env=env)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.prechecks.checks import check_partners
from weft.controllers.ranks.row_io import gather
from weft.controllers.ranks.tasks import RowTask
from weft.dataflow.buffer.segments import SegmentReader
from weft.dataflow.errors import UserError
from weft.dataflow.graph import Graph, group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.environment import EnvWorker
from weft.workers.rollout import RolloutWorker


def groups() -> dict[str, Any]:
    return {
        "rollout": group(RolloutWorker, model="model", engine="transformers"),
        "actor": group(ActorWorker, model="model"),
    }


def boards() -> TableSource:
    return TableSource("boards", pa.table({"start": [1, 2]}))


def played() -> Graph:
    return grpo(boards(), **groups(), env=group(EnvWorker, make=dict))


def test_the_node_knows_the_environments_by_their_name():
    graph = played()
    node = graph["rollout.interact"]
    assert (node.arguments["env"], node.uses) == ("env", ("env",))
    assert list(graph.handles) == ["rollout", "actor", "env"]
    assert "       uses env\n" in f"{graph}\n"
    assert "start" in node.reads and {"reward", "turn_rewards", "episode_id"} <= {*node.writes}
    assert graph.handles["rollout"].worker_class.needs_gateway([node])


def test_an_evaluation_plays_in_the_same_environments():
    env = group(EnvWorker, name="worlds", make=dict)
    graph = evaluate(boards(), rollout=groups()["rollout"], env=env, solved=1.0)
    assert graph["rollout.interact"].uses == ("worlds",)


@pytest.mark.parametrize("way", ["run", "interact"])
def test_a_requeued_prompt_comes_with_the_episodes_that_it_has(tmp_path: Path, way: str):
    """Otherwise they would be played again, and rows of two attempts be mixed."""
    given = {"harness": print} if way == "run" else {"env": group(EnvWorker, make=dict)}
    operation = grpo(boards(), **groups(), **given)[f"rollout.{way}"].operation
    assert {"draw_path", "made_before"} <= {*operation.may_read}
    one = np.array([7])
    task = RowTask(operation, (), one, one, one, draws=[[2]], made=[[0, 1]])
    (row,) = gather(task, SegmentReader(tmp_path, "node")).to_rows()
    assert (row["draw_path"], row["made_before"]) == ([2], [0, 1])


@pytest.mark.parametrize("wrong", ["another group", "a class", "a name"])
def test_only_a_group_of_environments_can_play(wrong: str):
    given = groups()
    env = {"another group": given["actor"], "a class": EnvWorker, "a name": "env"}[wrong]
    with pytest.raises(
        UserError, match=r"interact\(env=...\) takes a group of environments, weft.group\(weft.EnvWorker"
    ):
        grpo(boards(), **given, env=env)


def test_rows_are_scored_in_one_way():
    with pytest.raises(UserError, match=r"give one of .*; there are none"):
        grpo(boards(), **groups())
    with pytest.raises(UserError, match=r"there are harness=\.\.\., env=\.\.\."):
        grpo(boards(), **groups(), harness=print, env=group(EnvWorker, make=dict))


def test_environments_on_a_shared_gpu_have_their_turn_with_the_rollout():
    one, other = ResourcePool("one", gpus=1), ResourcePool("other", gpus=1)
    graph = played()
    together = {"rollout": Place(one), "env": Place(one), "actor": Place(one)}
    check_partners([graph], together)
    check_partners([graph], {**together, "env": Place(other)})
    with pytest.raises(
        UserError,
        match=r"needs 'rollout' and 'env' at the same time.* place it on the pool of 'rollout'",
    ):
        check_partners([graph], {**together, "rollout": Place(other)})
