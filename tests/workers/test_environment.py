"""Parts of environments make their turns while the model works for others. Each action reaches its own
environment, in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fake_clock
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.errors import UserError
from weft.workers.agents.failures import EpisodeFailure, InvalidResult
from weft.workers.environment import EnvConfig, EnvWorker, Episode, play
from weft.workers.worker import Context


class Counters:
    """Environments that count their turns, and note what reaches them. Row: {"id": 7, "turns": 3}."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[Mapping[str, Any]] = []
        self.turns: list[int] = []
        self.heard: dict[int, list[str]] = {}
        self.step_s = 0.0
        """[s] Time of a step on the fake clock."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[list[str], dict[str, Any]]:
        self.rows, self.turns = list(options["rows"]), [0] * self.width
        assert len(self.rows) == self.width
        return self._texts(), {}

    def step(self, actions: Sequence[str]) -> tuple[Any, ...]:
        assert len(actions) == self.width
        ended: list[bool] = []
        for k, (row, action) in enumerate(zip(self.rows, actions, strict=True)):
            self.turns[k] += 1
            if action:
                self.heard.setdefault(row["id"], []).append(action)
            ended.append(self.turns[k] >= row["turns"])
        rewards = [10.0 * row["id"] + turn for row, turn in zip(self.rows, self.turns, strict=True)]
        cut = [end and row["id"] % 2 == 1 for end, row in zip(ended, self.rows, strict=True)]
        terminated = [end and not c for end, c in zip(ended, cut, strict=True)]
        return self._texts(), rewards, terminated, cut, {}

    def _texts(self) -> list[str]:
        return [f"{row['id']} sees {turn}" for row, turn in zip(self.rows, self.turns, strict=True)]


async def here(function: Callable[[], Any]) -> Any:
    return function()


def echo(delays: Callable[[], float] = lambda: 0.0) -> Any:
    """Return a model whose action names the episode and the last observation."""

    async def generate(episodes: Sequence[Episode]) -> list[str | None]:
        return await asyncio.gather(*(ask(episode) for episode in episodes))

    async def ask(episode: Episode) -> str:
        await asyncio.sleep(delays())
        action = f"go {episode.messages[-1]['content']}"
        episode.messages.append({"role": "assistant", "content": action})
        return action

    return generate


def episodes_of(turns: Sequence[int]) -> list[Episode]:
    return [Episode(f"key {k}", {"id": k, "turns": number}) for k, number in enumerate(turns)]


# Time


async def steps_of(parts: int, steps: int = 80, envs: int = 8) -> None:
    """Play one episode in each of some environments. A step of all of them takes 2 s of the one
    generator and 2 s of the one simulator."""
    generator, simulator = asyncio.Lock(), asyncio.Lock()
    width = envs // parts

    async def generate(episodes: Sequence[Episode]) -> Sequence[str | None]:
        async with generator:
            await asyncio.sleep(2.0 * len(episodes) / envs)
            return ["go"] * len(episodes)

    async def simulate(function: Callable[[], Any]) -> Any:
        async with simulator:
            result = function()
            await asyncio.sleep(2.0 * width / envs if len(result) == 5 else 0.0)
            return result

    async with asyncio.TaskGroup() as tasks:
        for _ in range(parts):
            episodes = episodes_of([steps] * width)
            tasks.create_task(play(Counters(width), episodes, width, steps, generate, simulate))


@pytest.mark.parametrize(("parts", "seconds"), [(1, 320.0), (2, 161.0), (4, 160.5)])
def test_parts_keep_simulator_and_model_busy_at_the_same_time(parts: int, seconds: float):
    assert fake_clock.run(steps_of(parts))[1] == pytest.approx(seconds)


# Actions


@settings(deadline=None, max_examples=60)
@given(
    turns=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    parts=st.integers(1, 4),
    spare=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_every_action_reaches_its_own_environment_in_order(
    turns: list[int], parts: int, spare: int, seed: int
):
    draw = random.Random(seed)
    episodes = episodes_of(turns)
    envs: list[Counters] = []
    turn = asyncio.Lock()

    async def simulate(function: Callable[[], Any]) -> Any:
        async with turn:
            await asyncio.sleep(draw.random())
            return function()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for part in range(parts):
                if own := episodes[part::parts]:
                    width = len(own) + spare
                    envs.append(Counters(width))
                    model = echo(draw.random)
                    tasks.create_task(play(envs[-1], own, width, 10, model, simulate))

    fake_clock.run(main())
    heard = {id: actions for env in envs for id, actions in env.heard.items()}
    for k, number in enumerate(turns):
        assert heard[k] == [f"go {k} sees {turn}" for turn in range(number)]
        assert episodes[k].rewards == [10.0 * k + turn for turn in range(1, number + 1)]
        said = [message["content"] for message in episodes[k].messages]
        # The observation after the last action is not shown to the model.
        assert said == [
            text for turn in range(number) for text in (f"{k} sees {turn}", f"go {k} sees {turn}")
        ]


def test_an_episode_ends_after_its_last_turn():
    episodes, env = episodes_of([9, 2]), Counters(2)
    asyncio.run(play(env, episodes, 2, 3, echo(), here))
    assert [len(episode.rewards) for episode in episodes] == [3, 2]
    assert [len(env.heard[id]) for id in (0, 1)] == [3, 2]


def test_an_episode_without_an_answer_ends_and_the_others_go_on():
    answers = echo()

    async def generate(episodes: Sequence[Episode]) -> list[str | None]:
        found = await answers(episodes)
        full = [episode.row["id"] == 0 and len(episode.rewards) == 1 for episode in episodes]
        return [None if each else text for each, text in zip(full, found, strict=True)]

    episodes, env = episodes_of([3, 3, 3]), Counters(3)
    asyncio.run(play(env, episodes, 3, 10, generate, here))
    assert [len(episode.rewards) for episode in episodes] == [1, 3, 3]
    assert env.heard[0] == ["go 0 sees 0"]


def test_a_part_ends_without_a_step_if_the_model_answers_nobody():
    async def generate(episodes: Sequence[Episode]) -> list[str | None]:
        return [None] * len(episodes)

    episodes, env = episodes_of([3, 3]), Counters(2)
    asyncio.run(play(env, episodes, 2, 10, generate, here))
    assert env.turns == [0, 0]


class Wrong(Counters):
    """Environments whose results are replaced."""

    def __init__(self, width: int, **results: Any) -> None:
        super().__init__(width)
        self.results = results

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        right = super().reset(options=options)
        return self.results.get("reset", right)

    def step(self, actions: Sequence[str]) -> Any:
        right = super().step(actions)
        return self.results.get("step", right)


WRONG: dict[str, tuple[str, Any, str]] = {
    "no infos": ("reset", (["a", "b"],), r"reset\(\) must return \(observations, infos\), not"),
    "one text": ("reset", ("ab", {}), "must return 2 observations, one for each environment, not text"),
    "too few": ("reset", (["a"], {}), "must return 2 observations, one for each environment, not 1"),
    "no texts": ("reset", ([1, 2], {}), "must return texts as observations, not 1"),
    "four values": (
        "step",
        (["a", "b"], [0, 0], [False] * 2, {}),
        "rewards, terminations, truncations, infos",
    ),
    "one flag": ("step", (["a", "b"], [0, 0], False, [False] * 2, {}), "must return 2 terminations"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_result_that_breaks_the_protocol_is_named(name: str):
    method, result, said = WRONG[name]
    env = Wrong(2, **{method: result})
    with pytest.raises(InvalidResult, match=said) as caught:
        asyncio.run(play(env, episodes_of([3, 3]), 2, 10, echo(), here))
    assert isinstance(caught.value, EpisodeFailure) and not caught.value.scored


@pytest.mark.parametrize("reward", [float("nan"), None, 1e39])
def test_a_wrong_reward_fails_its_own_episode_only(reward: Any):
    env = Wrong(2, step=(["a", "b"], [reward, 1.0], [False] * 2, [False] * 2, {}))
    episodes = episodes_of([9, 9])
    asyncio.run(play(env, episodes, 2, 3, echo(), here))
    assert f"finite numbers as rewards, not {reward}" in str(episodes[0].failure)
    assert (episodes[1].failure, episodes[1].rewards) == (None, [1.0, 1.0, 1.0])


# Settings


def test_parts_must_be_equal():
    with pytest.raises(
        UserError,
        match="parts=3 does not divide num_envs=8 evenly; the nearest smaller number that does is 2",
    ):
        EnvConfig(make=Counters, num_envs=8, parts=3)
    assert EnvConfig(make=Counters, num_envs=9, parts=3).parts == 3


def test_environments_need_a_node_that_plays():
    with pytest.raises(
        UserError, match=r"'env' has environments, but no node plays .* rollout.interact"
    ):
        EnvWorker(EnvConfig(make=Counters), Context(name="env"))
