"""An agent learns to walk: a tiny model moves through grids of text, turn by turn.

python examples/agent_gridworld.py                  with Ray and vLLM
python examples/agent_gridworld.py --backend local  in one process without Ray and vLLM, so that breakpoints work

The model sees a grid of 4 x 4 cells, and answers with a direction until @ is at *:

    ....        ....        ....
    .@..  down  ....  down  ....  right
    ....        .@..        ....
    ..*.        ..*.        .@*.

After the warm start it mostly walks down, because most demonstrations do. An `EnvWorker` steps 64 such
worlds in two parts: while the model answers for one part, the other one moves.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import tiny_agents

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo

SIZE = 4
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MOST_TURNS, SHOWN_TURNS = 8, 4
HELD_OUT, DEMONSTRATIONS, WARM_STEPS = 60, 4000, 500
HABIT, RIGHT = 0.5, 0.35
"""Shares of the moves in demonstrations: down by habit, and towards the goal. Others are random."""
Cell = tuple[int, int]
"""Row and column."""


# The world


def moved(at: Cell, action: str) -> Cell:
    """Return the cell after an action. Walls and unknown actions leave the agent where it is.

    >>> moved((0, 0), "down"), moved((0, 0), "up"), moved((0, 0), "jump")
    ((1, 0), (0, 0), (0, 0))
    """
    down, right = MOVES.get(action, (0, 0))
    row, column = at[0] + down, at[1] + right
    return (row, column) if 0 <= row < SIZE and 0 <= column < SIZE else at


def picture(at: Cell, goal: Cell) -> str:
    """Return the grid as text: @ is the agent, and * the goal.

    >>> print(picture((1, 1), (3, 2)))
    ....
    .@..
    ....
    ..*.
    """
    marks = {goal: "*", at: "@"}
    cells = [[marks.get((row, column), ".") for column in range(SIZE)] for row in range(SIZE)]
    return "\n".join("".join(row) for row in cells)


class GridWorlds:
    """Several worlds, with Gymnasium's vector protocol."""

    def __init__(self, num_envs: int) -> None:
        self.at: list[Cell] = []
        self.goals: list[Cell] = []

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[list[str], dict[str, Any]]:
        rows = (options or {})["rows"]
        self.at = [divmod(row["start"], SIZE) for row in rows]
        self.goals = [divmod(row["goal"], SIZE) for row in rows]
        return self._pictures(), {}

    def step(
        self, actions: Sequence[str]
    ) -> tuple[list[str], list[float], list[bool], list[bool], dict[str, Any]]:
        self.at = [moved(at, action) for at, action in zip(self.at, actions, strict=True)]
        there = [at == goal for at, goal in zip(self.at, self.goals, strict=True)]
        return self._pictures(), [float(each) for each in there], there, [False] * len(there), {}

    def _pictures(self) -> list[str]:
        return [picture(at, goal) for at, goal in zip(self.at, self.goals, strict=True)]


# Data and model


def boards(seed: int) -> tuple[pa.Table, pa.Table]:
    """Return start and goal of boards for training, and of the others."""
    cells = range(SIZE * SIZE)
    rows = [{"start": start, "goal": goal} for start in cells for goal in cells if start != goal]
    random.Random(seed).shuffle(rows)
    return pa.Table.from_pylist(rows[HELD_OUT:]), pa.Table.from_pylist(rows[:HELD_OUT])


def demonstration(start: int, goal: int, draw: random.Random) -> dict[str, Any]:
    """Return a conversation of a walk, mostly downwards."""
    at, there = divmod(start, SIZE), divmod(goal, SIZE)
    messages: list[dict[str, str]] = []
    while at != there and len(messages) < 2 * SHOWN_TURNS:
        chance = draw.random()
        if chance < HABIT:
            action = "down"
        elif chance < HABIT + RIGHT:
            distance = {each: _distance(moved(at, each), there) for each in MOVES}
            action = min(distance, key=lambda each: distance[each])
        else:
            action = draw.choice(list(MOVES))
        messages.append({"role": "user", "content": picture(at, there)})
        messages.append({"role": "assistant", "content": action})
        at = moved(at, action)
    return {"messages": messages}


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def main(settings: tiny_agents.Settings) -> None:
    """Train an agent that walks through grids."""
    train, held_out = boards(settings.seed)
    draw, rows = random.Random(settings.seed), train.to_pylist()
    shown = [demonstration(**draw.choice(rows), draw=draw) for _ in range(DEMONSTRATIONS)]
    texts = [message["content"] for row in shown[:300] for message in row["messages"]]
    model = tiny_agents.prepare(
        settings, "agent_gridworld", texts=texts, demonstrations=shown, warm_steps=WARM_STEPS
    )

    # Workers
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=1e-3, warmup_steps=5)
    rollout = weft.group(weft.RolloutWorker, model=model, engine=settings.generator, max_context=512)
    rollout.follows(actor)
    env = weft.group(
        weft.EnvWorker, name="env", make=GridWorlds, num_envs=64, parts=2, max_turns=MOST_TURNS
    )

    # Graph and run
    sampling = weft.Sampling(max_tokens=8)
    prompts = weft.TableSource("boards", train)
    others = weft.TableSource("held_out", held_out)
    training = grpo(prompts, rollout=rollout, env=env, actor=actor, n=8, sampling=sampling)
    accuracy = evaluate(others, rollout=rollout, env=env, sampling=sampling.greedy, solved=1.0)
    tiny_agents.learn(settings, training, accuracy, actor=actor, title="Gridworld agent")


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
