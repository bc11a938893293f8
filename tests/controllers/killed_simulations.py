"""Simulated runs, killed after any number of replies and resumed, with the steps in their logs."""

import inspect
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash
from simulated_runs import Actor, Rollout, apart
from toy import ToyCritic, ToyReward, prompts, toy_dapo, toy_evaluation, toy_grpo, toy_ppo

from weft.controllers.driver import Driver, Evaluation
from weft.controllers.group import Call
from weft.controllers.ranks.tasks import Task
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Asynchronous, Pipelined, Synchronous, Training
from weft.controllers.simulation.backend import NODE, Simulated
from weft.controllers.simulation.costs import CostModel, Generation, LinearCost
from weft.dataflow.buffer.sample_buffer import BufferConfig
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.graph import group
from weft.dataflow.runs.files import BUFFER, LOG, SEGMENTS
from weft.dataflow.runs.log import LogReader
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

STEPS = 12
LONGEST = 40
"""[tokens] Length of the longest response."""
FILE = f"{NODE}.0.000001.arrows"
"""The file with all columns of a simulated run."""


class KilledError(BaseException):
    """Kills the run. Weft catches no BaseException."""


class SavedActor(Actor):
    """An actor with checkpoints. The runs are simulated, so its methods are never called."""

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path) -> float:
        return 0.0

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        return True

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> None: ...


class SavedCritic(SavedActor, ToyCritic):
    """A second model with updates."""


class Dying(Simulated):
    """A simulation that dies after a number of replies.

    References to columns point at zeros, which recovery can read.

    Args:
        root: folder of the runs.
        life: index of this process; each resume starts the next one.
        replies: replies before the kill, or None to let the run finish.
    """

    def __init__(self, costs: CostModel, root: Path, life: int, replies: int | None) -> None:
        super().__init__(costs)
        self._folder, self._length = root / "run" / BUFFER / SEGMENTS / NODE, 0
        self._offset, self._left = life << 22, replies
        if life:
            self._extend(self._offset)

    def wait(self, timeout_s: float) -> Any:
        events = super().wait(timeout_s)
        if self._left is not None:
            self._left -= len(events)
            if self._left < 0:
                raise KilledError
        return events

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        if task.method == "save_checkpoint":
            path = Path(task.arguments["path"])
            path.mkdir(parents=True, exist_ok=True)
            (path / f"rank_{rank}.json").write_text("{}")
        super()._submit(rank, task, call)

    def _invent(self, num_bytes: int) -> Segment:
        self._offset += num_bytes
        self._extend(self._offset + num_bytes)
        return Segment(NODE, FILE, self._offset, num_bytes, xxhash.xxh3_64_intdigest(bytes(num_bytes)))

    def _extend(self, end: int) -> None:
        """Grow the sparse file of zeros to at least this length."""
        if end > self._length:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._length = end + (1 << 20)
            with (self._folder / FILE).open("ab") as sparse:
                sparse.truncate(self._length)


def random_schedule(chance: random.Random) -> Training:
    size = chance.randint(1, 6)
    stepwise: list[Training] = [
        Synchronous(steps=STEPS, prompts_per_step=size),
        Pipelined(steps=STEPS, prompts_per_step=size),
    ]
    if chance.random() < 0.15:
        return chance.choice(stepwise)
    return Asynchronous(
        steps=STEPS,
        prompts_per_step=size,
        max_staleness=chance.randint(1, 3),
        staleness_of=chance.choice(["oldest_token", "oldest_token", "newest_turn", "share"]),
        partial_rollouts=chance.choice(["continue", "continue", "finish", "requeue"]),
        groups_per_part=chance.choice([1, 1, 2]),
    )


def random_costs(chance: random.Random, *, critic: bool, keep: float = 1.0) -> CostModel:
    lengths = tuple(tuple(chance.choice([1, 2, 3, 5, 20, LONGEST]) for _ in range(2)) for _ in range(11))
    update = LinearCost(fixed_s=chance.choice([0.5, 2.0, 5.0]), per_token_s=0.01)
    generation = Generation(lengths=lengths, decode_step_s=1.0)
    nodes: dict[str, Any] = {
        "rollout.generate": generation,
        "rollout.generate_2": generation,
        "reward.score": LinearCost(fixed_s=chance.choice([0.1, 1.0, 4.0])),
        "actor.update": update,
        "actor.publish_weights": LinearCost(fixed_s=0.5),
        "rollout.receive_weights": LinearCost(fixed_s=0.25),
        "odd_prompts": LinearCost(keep=keep),
    }
    if critic:
        nodes |= {
            "critic.update": LinearCost(fixed_s=chance.choice([0.5, 7.0])),
            "critic.values": LinearCost(fixed_s=1.0),
        }
    return CostModel(nodes=nodes)


def random_run(chance: random.Random) -> dict[str, Any]:
    """Draw arguments for `lives`: a schedule, a graph, and the policy for stale groups."""
    return {
        "schedule": random_schedule(chance),
        "graph": chance.choice([toy_grpo, toy_grpo, toy_dapo, toy_ppo]),
        "on_stale": chance.choice(["wait", "mask", "requeue", "drop"]),
        "evaluate": chance.random() < 0.3,
        "ranks": chance.choice([(1, 1), (2, 1), (2, 2)]),
    }


def lives(
    root: Path,
    chance: random.Random,
    kills: Sequence[int],
    *,
    schedule: Training,
    graph: Callable[..., Any] = toy_grpo,
    on_stale: Any = "wait",
    evaluate: bool = False,
    ranks: tuple[int, int] = (1, 1),
    keep: float = 1.0,
    between: Callable[[Path], None] = lambda run: None,
    first: int = 0,
    groups: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Kill a run after each of these numbers of replies, then let it finish.

    Args:
        groups: returns handles of the graph's groups. The evaluation samples with `sampler`, if there
            is one, instead of `rollout`.
        keep: share of the groups that the filter `odd_prompts` keeps.
        between: called with the run's folder before each resume.
        first: index of the first life. Pass more than 0 to continue an existing run.
    """
    has_critic = "critic" in inspect.signature(graph).parameters
    for life, replies in enumerate([*kills, None], first):
        if groups is not None:
            made = groups()
        else:
            made = {"rollout": group(Rollout), "reward": group(ToyReward), "actor": group(SavedActor)}
            made["rollout"].follows(made["actor"])
        sampler = made.pop("sampler", made["rollout"])
        evaluation = Evaluation(
            toy_evaluation(prompts(3, "held_out"), rollout=sampler, reward=made["reward"]), every=2
        )
        if has_critic:
            made["critic"] = group(SavedCritic, name="critic")
        placement = None if has_critic else apart(*ranks)
        backend = Dying(random_costs(chance, critic=has_critic, keep=keep), root, life, replies)
        try:
            with Driver(
                graph(prompts(40), n=2, **made),
                schedule=schedule,
                evaluations=[evaluation] * evaluate,
                backend=backend,
                buffer=BufferConfig(on_stale=on_stale),
                placement=placement,
                checkpoint=CheckpointConfig(every=chance.choice([1, 1, 2, 3])),
                root=root,
                name="run",
                resume="latest",
                progress=False,
            ) as driver:
                driver.run()
        except KilledError:
            between(root / "run")


def updates(run: Path) -> list[tuple[int, Counter[str]]]:
    """Return (step, groups per version) of each update in the run's log."""
    steps: list[tuple[int, Counter[str]]] = []
    made: Counter[str] = Counter()
    for record in LogReader(run / BUFFER / LOG):
        if record["do"] != "note":
            continue
        if record["key"].startswith("version/"):
            made[record["key"].removeprefix("version/")] += 1
        elif record["key"] == "step":
            steps.append((record["value"], made))
            made = Counter()
    return steps
