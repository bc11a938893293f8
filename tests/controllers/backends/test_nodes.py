"""A run over several Ray nodes: columns travel by Arrow Flight, once per node, and results are
equal."""

import time
from pathlib import Path
from typing import Any

import pytest
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_reinforce

from weft.controllers.driver import Driver
from weft.controllers.schedule import Synchronous
from weft.dataflow.graph import group

pytestmark = pytest.mark.ray


def until_empty(folder: Path) -> None:
    """Wait until a folder is empty: the last processes of a run may still be shutting down."""
    deadline = time.monotonic() + 60
    while list(folder.iterdir()):
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.2)


@pytest.mark.slow
def test_groups_on_three_nodes_read_each_others_rows(scenes: Any, tmp_path: Path):
    result = scenes["nodes"]
    made = {"rollout": group(ToyRollout), "reward": group(ToyReward), "actor": group(ToyActor)}
    schedule = Synchronous(steps=2, prompts_per_step=4)
    with Driver(
        toy_reinforce(prompts(8), **made), schedule=schedule, root=tmp_path, name="one", progress=False
    ) as driver:
        metrics = driver.run()
        seen = driver.call(made["actor"], "seen_groups")
    assert result["seen"] == seen and result["rewards"] == [row.get("reward/mean") for row in metrics]

    here, second, third = sorted(result["wrote"])
    wrote = {node: {w.rsplit("-", 2)[0] for w in writers} for node, writers in result["wrote"].items()}
    assert "sources" in wrote[here] and {*wrote[second], *wrote[third]} >= {"rollout", "reward"}
    assert {*wrote[here], *wrote[second], *wrote[third]} == {"sources", "rollout", "reward"}
    assert result["fetched"][second] > 0 and result["fetched"][third] > 0, (
        "each node that works reads rows of another"
    )
    waits = {"0": "it is idle: it waits for a call", "1": "it is idle: it waits for a call"}
    assert result["stand"] == {"rollout": waits, "reward": waits}, (
        "ranks of all nodes say where they stand"
    )
    measured = sorted(who for found in result["measured"].values() for who in found)
    assert measured == ["actor[0]", "driver", "reward[0]", "reward[1]", "rollout[0]", "rollout[1]"]
    assert "driver" in result["measured"][here]
    assert result["killed"] == 3, "the servers of segments were killed between two steps"
    assert "the last words of a reward" in result["said"], "a log that lies on another machine is quoted"
    assert {"rollout_0.log", "reward_0.log"} <= {*result["kept_apart"]} <= {*result["brought"]}
    until_empty(scenes.root / "nodes" / "scratch")
    assert result["recorder_here"], "samples are written where the run's directory is"
    assert (
        result["hidden"].startswith("worker actor[0]: node '")
        and "does not see the run's directory, " in result["hidden"]
    )
    assert (
        "'actor' has checkpoints or samples to write there; choose a root that all nodes see"
        in result["hidden"]
    )

    assert result["nodes_left"] == 2 and result["starts"] == 0, (
        "a node was lost, and the run went on without it"
    )
    assert result["replaced"] >= 1, "the reward came up on another node"
    assert result["steps"] == list(range(7)) and not result["violations"]
    assert result["rows"] == 2 * result["trained"] == 2 * 6 * 4, (
        "nothing is lost, and nothing trained on twice"
    )
