"""Odd requests, results and harnesses: each fails alone, with its reason, and nothing waits for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from weft.dataflow.column import IDENTITY
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.workers.agents import gateway
from weft.workers.agents.failures import Discarded, InvalidResult, NoVerdict
from weft.workers.agents.harness import Function
from weft.workers.agents.messages import DEEPEST
from weft.workers.agents.protocol_fields import read_arguments
from weft.workers.agents.runner import kind_of, result_of
from weft.workers.rollout import RolloutWorker

from .served import Served, ask, chat, serve

USER = {"role": "user", "content": "a"}


# Requests


def body(**more: Any) -> str:
    return json.dumps({"model": "m", "messages": [USER], **more})


def call(arguments: str) -> str:
    function = {"name": "f", "arguments": arguments}
    said = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    return body(messages=[USER, said, {"role": "tool", "content": "b"}])


ODD = {
    "many choices": (body(n=1_000_000_000), 400, "n: 1000000000 is above 128"),
    "nesting": (body(z=None).replace("null", "[" * 100_000), 400, "nested too deeply"),
    "deep arguments": (call('{"a":' * 600 + "1" + "}" * 600), 200, ""),
    "half characters": (
        body(stop=["\ud800"], chat_template_kwargs={"x": "\ud800"}, model="\ud800"),
        200,
        "",
    ),
    "length": (body(z="x" * 5000), 400, "context_length_exceeded"),
}


def test_an_odd_request_is_answered_and_harms_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found: dict[str, tuple[int, str]] = {}

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            for name, (content, *_) in ODD.items():
                monkeypatch.setattr(gateway, "BODY_BYTES", 4000 if name == "length" else 1 << 20)
                reply = await client.post("/chat/completions", content=content)
                found[name] = reply.status_code, reply.text
            reply = await client.post(f"{base_url.removesuffix('/v1')}/chat/completions", json={})
            found["address"] = reply.status_code, reply.json()["error"]["message"]
            await ask(client, [{"role": "user", "content": "last"}])
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "b")
        rank.open(1)
        ended = await rank.outcome(1)
        assert (ended.failure, ended.turns) == ("", 3)
        assert len(rank._links) == 1, "no request may cut the link"

    serve(tmp_path, harness, main)
    for name, (_, status, said) in ODD.items():
        assert found[name][0] == status and said in found[name][1], found[name]
    assert found["address"][0] == 404 and "the base URL ends with /v1" in found["address"][1]


def test_arguments_that_are_too_deep_stay_text():
    deep = '{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1)
    assert read_arguments(deep) == deep
    assert read_arguments(deep[5:-1]) == json.loads(deep[5:-1])


# Rows


def test_a_call_learns_what_was_made_before_and_hides_columns_of_the_file_with_its_names():
    """Otherwise an episode that a lost worker has published would be run again."""
    table = pa.table({"q": ["a"], "sample_id": ["x"], "group_id": [5]})
    rollout = group(RolloutWorker, model="m", engine="transformers")

    @graph
    def play(prompts: Any, *, rollout: Any) -> Any:
        return rollout.run(prompts, harness=Function(function="m:run"))

    source = TableSource("rows", table, file_columns=frozenset(table.column_names))
    (node,) = play(source, rollout=rollout).nodes
    assert "q" in node.reads and not {"sample_id", "group_id"} & {*node.reads}
    assert {*map(str, IDENTITY)} <= {*map(str, node.operation.may_read)}


# Results


@pytest.mark.parametrize("reward", [1e39, float("nan"), "1", [1.0]])
def test_a_reward_is_a_finite_number_of_float32(reward: Any):
    with pytest.raises(InvalidResult, match="must be a finite number"):
        result_of(reward, ("reward",))


@pytest.mark.parametrize("value", [1 << 63, {"a": 1}, [1, "x"], [True, 2]])
def test_a_column_that_arrow_cannot_hold_is_refused_by_its_name(value: Any):
    with pytest.raises(InvalidResult, match=r"column 'steps' has .* give other values as JSON text"):
        kind_of("steps", value)


@pytest.mark.parametrize("name", ["response_mask", "prompt_ids", "sample_id", "token_rewards"])
def test_a_harness_cannot_write_what_describes_tokens(name: str):
    with pytest.raises(UserError, match=f"{name!r}, which Weft writes itself; rename it"):
        Function(function="m:run", writes=("reward", name))


# Failures


def test_a_full_context_hides_no_failure_of_the_machine(tmp_path: Path):
    """Only a harness that stops without another reason has failed by the policy's doing."""
    errors = {1: NoVerdict("no tests"), 2: Discarded("not this one"), 3: KeyError("choices")}

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            await ask(client, [USER])
            await client.post("/chat/completions", json={"messages": [{**USER, "content": "a " * 99}]})
        raise errors[row["id"]]

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "b")
        rank.open(*errors, max_context=30)
        found = [await rank.outcome(episode) for episode in errors]
        assert [(e.where, e.scored) for e in found] == [
            ("grader", False),
            ("harness", False),
            ("model", True),
        ]

    serve(tmp_path, harness, main)


def test_ever_new_conversations_end_an_episode_before_its_rows_are_too_many(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            for k in range(100):
                await ask(client, [{"role": "user", "content": f"n{k}"}])
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "b")
        rank.open(1, most_rows=3)
        ended = await rank.outcome(1)
        assert (len(ended.rows), ended.scored, ended.where) == (3, True, "model")

    serve(tmp_path, harness, main)


def test_a_machine_that_cannot_start_a_harness_once_may_later(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            await ask(client, [USER])
        return 1.0

    async def main(served: Served) -> None:
        start = served._start

        async def fail(*_: Any) -> Any:
            served.episodes._start = start
            raise OSError("Too many open files")

        served.episodes._start = fail
        rank = served.rank(lambda prompt: "b")
        rank.open(1)
        first = await rank.outcome(1)
        assert (first.scored, first.fatal) == (False, False) and "Too many open files" in first.failure
        rank.open(2)
        assert (await rank.outcome(2)).turns == 1

    serve(tmp_path, harness, main)
