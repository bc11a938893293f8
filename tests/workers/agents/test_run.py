"""`RolloutWorker.run` opens episodes at a real gateway, and returns their rows."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.errors import SampleError, UserError
from weft.workers.agents.harness import Function, as_harness
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.worker import IDLE, Children, Context

from .served import Served, ask, chat, serve
from .toy_engine import ToyEngine


class ToyRollout(RolloutWorker):
    answer: Callable[[str], str] = staticmethod(lambda prompt: "x y")
    awake: threading.Event

    def new_engine(self, **settings: Any) -> Any:
        return ToyEngine(self.renderer, self.answer)  # pyright: ignore[reportAttributeAccessIssue]


async def _unused(row: Any, *, base_url: str, api_key: str) -> float:
    return 0.0


def new_worker(served: Served, folder: Path) -> ToyRollout:
    settings = {"model_type": "qwen2", "max_position_embeddings": 512, "vocab_size": 1000}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    made = type("Toy", (ToyRollout,), {"renderer": served.renderer})
    config = RolloutConfig(model=str(folder), engine="transformers", tool_parser="llama3_json")
    awake = threading.Event()
    context = Context(name="rollout", seed=3, gateway=served.address, wake=awake.set)
    made.awake = awake
    return made(config, context)


def prompts(number: int, **more: Any) -> Batch:
    ids = list(range(10, 10 + number))
    columns = {"sample_id": ids, "group_id": ids, "parent_id": ids}
    return Batch.of(**columns, task=[f"t{k}" for k in range(number)], **more)


def parts_of(
    worker: ToyRollout,
    rows: Batch,
    n: int,
    harness: Any = _unused,
    sampling: Sampling = Sampling(max_tokens=20),
) -> list[tuple[Children, Any]]:
    steps = worker.run(rows, harness=harness, n=n, sampling=sampling)
    parts: list[tuple[Children, Any]] = []
    for part in steps:
        if part == IDLE:  # as a rank, which gives an idle call a turn at least every second
            worker.awake.wait(1.0)
            worker.awake.clear()
        elif part is not None:
            parts.append(part)
    return parts


def test_each_episode_is_a_child_with_its_own_number(tmp_path: Path):
    seen: list[dict[str, Any]] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        seen.append(row)
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": row["task"]}])
            await ask(client, [{"role": "user", "content": "a helper's task"}])
        return 1.0

    async def main(served: Served) -> None:
        worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
        rows = prompts(2, made_before=[[0, 1], []])
        parts = await asyncio.to_thread(parts_of, worker, rows, 2)
        # The first prompt's first episode was made before: two rows, numbers 0 and 1.
        numbers = sorted(
            (parent, number)
            for children, _ in parts
            for parent, number in zip(
                children.rows["parent_id"].to_pylist(), children.numbers.tolist(), strict=True
            )
        )
        assert numbers == [(10, 2048), (10, 2049), (11, 0), (11, 1), (11, 2048), (11, 2049)]
        finished = [i for children, _ in parts for i in children.finished.tolist()]
        assert sorted(finished) == [10, 11]
        made = Batch.concat([children.rows for children, _ in parts])
        assert set(made["episode_rows"].to_pylist()) == {2}
        assert set(made["episode_tokens"].to_pylist()) == {6}
        assert made["reward"].to_pylist() == [1.0] * 6
        assert sum(metrics["retokenised"].value for _, metrics in parts) == 0
        assert [parsers for _, *parsers in served.loaded] == [["llama3_json", "auto"]]

    serve(tmp_path, harness, main)
    assert sorted(row["task"] for row in seen) == ["t0", "t1", "t1"]
    assert all(set(row) == {"task"} for row in seen), "a row's identity is not the harness's business"


def test_tokens_that_a_tool_gave_have_no_kept_set(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            task = {"role": "user", "content": row["task"]}
            reply = await ask(client, [task])
            await ask(client, [task, reply, {"role": "user", "content": "and then"}])
        return 1.0

    async def main(served: Served) -> None:
        worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
        cut = Sampling(max_tokens=20, top_k=2)
        parts = await asyncio.to_thread(parts_of, worker, prompts(2), 1, _unused, cut)
        for row in Batch.concat([children.rows for children, _ in parts]).to_rows():
            mask, ids = row["response_mask"], row["response_ids"]
            assert 0 in mask and mask.count(1) == 6, "two turns, and given tokens between them"
            assert row["kept_counts"] == [2 * own for own in mask]
            sampled = [id for id, own in zip(ids, mask, strict=True) if own]
            assert row["kept_ids"] == [token for id in sampled for token in (id, id + 1)]
        whole = await asyncio.to_thread(parts_of, worker, prompts(1), 1)
        assert "kept_ids" not in whole[0][0].rows

    serve(tmp_path, harness, main)


def test_seeds_do_not_depend_on_what_was_made_before(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": row["task"]}])
        return 1.0

    async def main(served: Served) -> None:
        found: list[set[int | None]] = []
        for made in ([], [0]):
            worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
            rows = prompts(1, made_before=[made])
            await asyncio.to_thread(parts_of, worker, rows, 2)
            engine: Any = worker.engine
            found.append({request.seed for request, _ in engine.requests})
        assert len(found[0]) == 2 and len(found[1]) == 1 and found[1] < found[0]

    serve(tmp_path, harness, main)


@pytest.mark.pitfall(13)
def test_a_discarded_episode_leaves_a_smaller_group(tmp_path: Path):
    tries: list[str] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float | None:
        tries.append(row["task"])
        is_second = len(tries) == 2
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": row["task"]}])
        return None if is_second else 1.0

    async def main(served: Served) -> None:
        worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
        parts = await asyncio.to_thread(parts_of, worker, prompts(1), 3)
        assert sum(len(children.rows) for children, _ in parts) == 2
        assert [i for children, _ in parts for i in children.finished.tolist()] == [10]
        assert sum(metrics["dropped_episodes"].value for _, metrics in parts) == 1
        assert sum(m["harness_failures"].value for _, m in parts if "harness_failures" in m) == 1

    serve(tmp_path, harness, main)


def test_a_prompt_without_any_episode_fails_with_the_reason(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        if row["task"] == "t1":
            raise RuntimeError("no such board")
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": row["task"]}])
        return 1.0

    async def main(served: Served) -> None:
        worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
        with pytest.raises(
            SampleError, match=r"sample 11: all of its 2 episodes failed.*no such board"
        ) as said:
            await asyncio.to_thread(parts_of, worker, prompts(2), 2)
        assert tuple(said.value.sample_ids) == (11,)

    serve(tmp_path, harness, main)


def test_a_gateway_that_dies_between_two_calls_fails_neither(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": row["task"]}])
        return 1.0

    async def run() -> None:
        served = Served(tmp_path)
        served.function = harness
        async with served.listening():
            worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
            await asyncio.to_thread(parts_of, worker, prompts(1), 1)
        async with served.listening(served.address.port):
            parts = await asyncio.to_thread(parts_of, worker, prompts(2), 1)
            assert sum(len(children.rows) for children, _ in parts) == 2

    asyncio.run(run())


def test_more_episodes_than_a_prompt_can_have_are_refused(tmp_path: Path):
    async def main(served: Served) -> None:
        worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
        with pytest.raises(UserError, match="n=5000: a prompt has at most 4096 episodes"):
            next(worker.run(prompts(1), harness=_unused, n=5000))

    serve(tmp_path, _unused, main)


def test_two_nodes_have_different_episodes_of_a_prompt(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": row["task"]}])
        return 1.0

    async def main(served: Served) -> None:
        worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
        ids: list[int] = []
        for draw in ([], [2]):
            parts = await asyncio.to_thread(parts_of, worker, prompts(1, draw_path=[draw]), 2)
            ids += [i for children, _ in parts for i in children.rows["episode_id"].to_pylist()]
        assert len(set(ids)) == 4

    serve(tmp_path, harness, main)


def test_rewards_of_turns_reach_the_turns_of_a_sub_agent(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> dict[str, Any]:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": row["task"]}]
            messages += [await ask(client, messages), {"role": "user", "content": "go on"}]
            await ask(client, [{"role": "user", "content": "a helper's task"}])
            await ask(client, messages)
        return {"reward": 1.0, "turn_rewards": [1.0, 2.0, 3.0]}

    async def main(served: Served) -> None:
        worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
        given = Function(function=_unused, writes=("reward", "turn_rewards"))
        ((children, _),) = await asyncio.to_thread(parts_of, worker, prompts(1), 1, given)
        helpers = [
            "helper's" in served.renderer.decode(ids) for ids in children.rows["prompt_ids"].to_pylist()
        ]
        rewards = dict(zip(helpers, children.rows["turn_rewards"].to_pylist(), strict=True))
        assert rewards == {True: [2.0], False: [1.0, 3.0]}

    serve(tmp_path, harness, main)


def test_the_gateway_gets_the_drivers_name_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []

    async def main(served: Served) -> None:
        worker = await asyncio.to_thread(new_worker, served, tmp_path / "model")
        worker._folder = tmp_path / "a copy on another node"
        open_it = worker._episodes.open

        def noted(call: Any) -> None:
            opened.append(call.model)
            open_it(call)

        monkeypatch.setattr(worker._episodes, "open", noted)
        steps = worker.run(prompts(1), harness=_unused, n=1)
        await asyncio.to_thread(next, steps)
        await asyncio.to_thread(steps.close)

    serve(tmp_path, _unused, main)
    assert opened == [str(tmp_path / "model")]


def test_the_driver_plans_a_harness_with_its_own_folder_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SEARCH_KEY", "known to the driver only")
    (tmp_path / "agent.py").write_text("")
    monkeypatch.chdir(tmp_path)
    harness = Function(function="agent.py:run", variables=("SEARCH_KEY",))
    plan = harness.plan()
    sent = pickle.dumps(RolloutWorker.sent_arguments({"harness": harness, "n": 2}))
    monkeypatch.chdir("/")
    monkeypatch.delenv("SEARCH_KEY")
    arguments = pickle.loads(sent)
    assert as_harness(arguments["harness"]).plan() == plan and arguments["n"] == 2
