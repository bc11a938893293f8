"""Episodes of several rows in a run: quorums, group advantages and masks on their way to the update."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from toy import ToyActor, ToyRollout, prompts

from weft.algorithms.advantages import group_advantages, group_centred
from weft.algorithms.grpo import first_of_group
from weft.controllers.driver import Driver
from weft.controllers.schedule import Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics, Sum
from weft.dataflow.operation import Shape, TrainingBatch
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

EPISODES = [(1.0, [[1, 0, 1], [0, 1]]), (0.0, [[0, 1]]), (1.0, [[1], [1]]), (1.0, [[0, 0]])]
"""Each episode's reward, and the masks of its rows."""


class Player(ToyRollout):
    """Plays the same episodes for each prompt. The last row has only given tokens."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        reads=("prompt_ids",),
        writes=("response_ids", "response_mask", "reward", "episode_id", "episode_rows"),
    )
    def play(self, prompts: Batch, *, order: tuple[int, ...]) -> Iterator[Batch]:
        for parent in prompts["sample_id"].to_pylist():
            rows = [(k, mask) for k in order for mask in EPISODES[k][1]]
            yield Batch.of(
                parent_id=[parent] * len(rows),
                response_ids=[[7] * len(mask) for _, mask in rows],
                response_mask=[mask for _, mask in rows],
                reward=[EPISODES[k][0] for k, _ in rows],
                episode_id=[10 * parent + k for k, _ in rows],
                episode_rows=[len(EPISODES[k][1]) for k, _ in rows],
            )


class Reverse(Player):
    """Plays the episodes in the other order."""

    @classmethod
    def sent_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**arguments, "order": arguments["order"][::-1]}


class Learner(ToyActor):
    """Notes masks and advantages."""

    noted: ClassVar[list[tuple[int, list[int], list[float]]]] = []

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=("response_ids", "advantages"),
        may_read=("response_mask", "episode_id"),
        takes=TrainingBatch(),
    )
    def learn(self, samples: Batch) -> Metrics:
        columns = ("episode_id", "response_mask", "advantages")
        self.noted.extend(tuple(row[c] for c in columns) for row in samples.to_rows())
        return {"rows": Sum(len(samples))}


@graph
def playing(prompts: Any, *, rollout: Any, actor: Any, order: tuple[int, ...], first: int) -> Any:
    samples = rollout.play(prompts, order=order)
    if first:
        samples = first_of_group(samples, first)
    return actor.learn(group_advantages(samples, estimator=group_centred))


def noted(
    root: Path, player: type[Player] = Player, **settings: Any
) -> list[tuple[int, list[int], list[float]]]:
    """Run two prompts, and return (episode's number, mask, advantages) of each trained row."""
    made = playing(prompts(2), rollout=group(player), actor=group(Learner), **settings)
    schedule = Synchronous(steps=1, prompts_per_step=2)
    with Driver(made, schedule=schedule, root=root, name="run", progress=False) as driver:
        driver.run()
    found, Learner.noted[:] = [*Learner.noted], []
    return sorted((id % 10, mask, advantages) for id, mask, advantages in found)


@pytest.mark.pitfall(10)
def test_masks_and_advantages_of_episodes_reach_the_update(tmp_path: Path):
    # Rewards 1, 0 and 1: the mean is 2/3. The masked episode does not vote.
    up, down = 1 - 2 / 3, -2 / 3
    wanted = [
        (0, [0, 1], [0, up]),
        (0, [1, 0, 1], [up, 0, up]),
        (1, [0, 1], [0, down]),
        (2, [1], [up]),
        (2, [1], [up]),
        (3, [0, 0], [0, 0]),
    ]
    found = noted(tmp_path, order=(0, 1, 2, 3), first=0)
    assert [row[:2] for row in found] == [row[:2] for row in wanted for _ in range(2)]
    for (*_, mine), (*_, expected) in zip(found, [w for w in wanted for _ in range(2)], strict=True):
        assert all(abs(a - b) < 1e-6 for a, b in zip(mine, expected, strict=True))


def test_a_quorum_of_rows_leaves_only_whole_episodes(tmp_path: Path):
    # The fourth row is the first of the two rows of episode 2.
    found = noted(tmp_path, order=(0, 1, 2), first=4)
    wanted = [(0, [0, 1], [0, 0.5]), (0, [1, 0, 1], [0.5, 0, 0.5]), (1, [0, 1], [0, -0.5])]
    assert found == [row for row in wanted for _ in range(2)]


def test_a_worker_class_chooses_what_its_ranks_get(tmp_path: Path):
    # The quorum of three rows has the two rows of episode 2, and episode 1.
    found = noted(tmp_path, Reverse, order=(0, 1, 2), first=3)
    assert [number for number, _, _ in found] == [1, 1, 2, 2, 2, 2]
