"""The gateway serves models to harnesses, and gives their exact tokens to the ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft.algorithms.sampling import Sampling
from weft.dataflow.errors import GenerationError
from weft.workers.agents.harness import Function
from weft.workers.agents.link import Abort

from .served import DEADLINE_S, Rank, Served, ask, chat, serve


def test_an_episode_of_two_turns_becomes_one_row(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {row['id']}"}]
            messages.append(await ask(client, messages))
            messages.append({"role": "user", "content": "go on"})
            last = await ask(client, messages)
            return float(last["content"] == "second")

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "second" if "go on" in prompt else "first")
        rank.open(7)
        ended = await rank.outcome(7)
        assert (ended.result, ended.turns, ended.retokenised, ended.where) == (
            {"reward": 1.0},
            2,
            0,
            "",
        )
        (row,) = ended.rows
        words = served.renderer.decode
        assert words(row.prompt_ids.tolist()) == "<user> task 7 <end> <assistant>"
        assert words(row.response_ids.tolist()) == (
            "first <end> <user> go on <end> <assistant> second <end>"
        )
        assert row.mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 1]
        assert row.logprobs.tolist() == [-1, -2, 0, 0, 0, 0, 0, -1, -2]

    serve(tmp_path, harness, main)


def test_a_replica_that_dies_loses_only_the_turn_that_it_sampled(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
            for _ in range(3):
                messages += [await ask(client, messages), {"role": "user", "content": "more"}]
        return 1.0

    async def main(served: Served) -> None:
        first = served.rank(lambda prompt: "one " * (1 + prompt.count("more")), number=0)
        first.open(1)
        while len(first.engine.requests) < 2:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(first.die)
        second = served.rank(lambda prompt: "two", number=1)
        second.open(1)
        ended = await second.outcome(1)
        assert ended.turns == 3
        (row,) = ended.rows
        # The first turn is the dead replica's.
        assert served.renderer.decode(row.response_ids.tolist()).startswith("one <end> <user> more")
        assert len(second.engine.requests) in (1, 2)

    serve(tmp_path, harness, main)


def test_a_client_that_hangs_up_and_asks_again_gets_the_same_turn(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages = [{"role": "user", "content": "a"}]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ask(client, messages), 0.2)
            resumed.set()
            await ask(client, messages)
        return 1.0

    resumed = threading.Event()

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "b")
        rank.open(1)
        rank.paused.set()
        await asyncio.to_thread(resumed.wait, DEADLINE_S)
        rank.paused.clear()
        ended = await rank.outcome(1)
        assert (ended.turns, len(ended.rows), len(rank.engine.requests)) == (1, 1, 1)

    serve(tmp_path, harness, main)


@pytest.mark.pitfall(15)
def test_a_key_of_an_earlier_attempt_is_refused(tmp_path: Path):
    urls: list[str] = []
    codes: list[int] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        urls.append(base_url)
        async with chat(urls[0]) as client:
            messages = [{"role": "user", "content": "a"}]
            reply = await client.post("/chat/completions", json={"model": "m", "messages": messages})
            codes.append(reply.status_code)
        if len(urls) == 1:
            raise RuntimeError("a broken tool")
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": "again"}])
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "b")
        rank.open(1)
        ended = await rank.outcome(1)
        assert (ended.result, ended.turns) == ({"reward": 1.0}, 1)
        assert codes == [200, 401] and urls[0] != urls[1]
        (row,) = ended.rows
        prompt = served.renderer.decode(row.prompt_ids.tolist())
        assert prompt == "<user> again <end> <assistant>", "the rows are those of the last attempt"

    serve(tmp_path, harness, main)


def test_a_harness_that_always_fails_is_dropped_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tries: list[int] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        tries.append(1)
        raise RuntimeError("no such tool")

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "b")
        rank.open(1)
        ended = await rank.outcome(1)
        assert (ended.scored, ended.where, ended.rows) == (False, "harness", ())
        assert "no such tool" in ended.failure and len(tries) == 3
        logged = [r.message for r in caplog.records if r.name == "weft.gateway"]
        assert len(logged) == 3
        assert logged[1].endswith("attempt 2: HarnessRaised: RuntimeError: no such tool")

    serve(tmp_path, harness, main)


def test_a_full_context_is_the_policys_doing_and_scored(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
            while True:
                messages += [await ask(client, messages), {"role": "user", "content": "more"}]

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "word " * 5)
        rank.open(1, max_context=30)
        ended = await rank.outcome(1)
        assert (ended.scored, ended.where, dict(ended.result)) == (True, "model", {})
        assert ended.turns >= 2 and len(ended.rows) == 1
        total = len(ended.rows[0].prompt_ids) + len(ended.rows[0].response_ids)
        assert total <= 30

    serve(tmp_path, harness, main)


def test_parameters_that_would_bias_training_are_overridden_and_noted_once(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            for text in ("a", "b"):
                messages = [{"role": "user", "content": text}]
                await ask(client, messages, temperature=0.1, max_tokens=2, stop=["x"])
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "1 2 3 4 5")
        rank.open(1)
        ended = await rank.outcome(1)
        assert [row.finish_reason for row in ended.rows] == ["length", "length"]
        _, sampling = rank.engine.requests[0]
        assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (1.0, 2, ("x",))
        assert [note for note in served.notes if "temperature" in note] == served.notes
        assert len(served.notes) == 1

    serve(tmp_path, harness, main)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/chat/completions", "response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("/responses", "text", {"format": {"type": "json_schema", "name": "n", "schema": {}}}),
    ],
)
def test_structured_output_is_ignored_and_noted_once(
    tmp_path: Path, path: str, field: str, value: dict[str, Any]
):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            for text in ("a", "b"):
                content = [{"role": "user", "content": text}]
                body = {"model": "m", "messages": content, "input": content, field: value}
                assert (await client.post(path, json=body)).status_code == 200
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "x y")
        rank.open(1)
        assert (await rank.outcome(1)).result["reward"] == 1.0
        assert all(request.structure is None for request, _ in rank.engine.requests)
        assert ["response_format" in note for note in served.notes] == [True]

    serve(tmp_path, harness, main)


def test_an_image_is_refused_with_its_place_and_the_episode_goes_on(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
        async with chat(base_url) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": [image]}]}
            reply = await client.post("/chat/completions", json=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["message"].startswith("messages[0].content[0]: a part of type 'image_url'")
            await ask(client, [{"role": "user", "content": "a"}])
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "x y")
        rank.open(1)
        ended = await rank.outcome(1)
        assert (ended.result["reward"], ended.turns) == (1.0, 1)

    serve(tmp_path, harness, main)


def test_many_episodes_on_two_replicas_end_once_each(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"n{row['id']}"}]
            for k in range(1 + row["id"] % 3):
                messages += [await ask(client, messages), {"role": "user", "content": f"more {k}"}]
        return float(row["id"])

    async def main(served: Served) -> None:
        ranks = [served.rank(lambda prompt: "x y", number) for number in range(2)]
        for number, rank in enumerate(ranks):
            rank.open(*range(number * 6, number * 6 + 6))
        for number, rank in enumerate(ranks):
            for episode in range(number * 6, number * 6 + 6):
                ended = await rank.outcome(episode)
                assert (ended.result["reward"], ended.turns) == (episode, 1 + episode % 3)
                assert ended.retokenised == 0
        assert all(rank.engine.requests for rank in ranks)

    serve(tmp_path, harness, main)


def test_a_rank_that_rests_gives_back_the_turns_of_other_ranks(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        if row["id"] == 2:
            await asyncio.sleep(DEADLINE_S)
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": f"n{row['id']}"}])
        return 1.0

    async def main(served: Served) -> None:
        first = served.rank(lambda prompt: "x", 0, capacity=1)
        second = served.rank(lambda prompt: "x " * 100, 1)
        first.paused.set()
        first.open(1, 3)
        second.open(2)
        # The first rank has room for one turn, so the other one waits at the second rank.
        while not second.engine.requests:
            await asyncio.sleep(0.001)
        second.give_up(2)
        first.paused.clear()
        assert (await first.outcome(1)).turns == (await first.outcome(3)).turns == 1

    serve(tmp_path, harness, main)


@pytest.mark.parametrize("waits_for", ("may_load", "may_start"))
def test_an_episode_that_is_given_up_before_it_begins_holds_up_no_other(waits_for: str, tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": "hello"}])
        return 1.0

    async def main(served: Served) -> None:
        getattr(served, waits_for).clear()
        rank = served.rank(lambda prompt: "x")
        episodes = served.episodes._episodes
        rank.open(1, 2)
        begun = served.episodes._runners if waits_for == "may_start" else served.episodes._renderers
        while len(episodes) < 2 or not begun:
            await asyncio.sleep(0.001)
        rank.give_up(1)
        while len(episodes) == 2:
            await asyncio.sleep(0.001)
        getattr(served, waits_for).set()
        assert (await rank.outcome(2)).result == {"reward": 1.0}
        rank.open(3)
        assert (await rank.outcome(3)).result == {"reward": 1.0}

    serve(tmp_path, harness, main)


@pytest.mark.parametrize("last", ("the rank with the lease", "the rank without"))
def test_a_rank_without_a_lease_gives_up_only_its_own_part_in_an_episode(last: str, tmp_path: Path):
    began: set[int] = set()
    go = asyncio.Event()

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        began.add(row["id"])
        await go.wait()
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": "hello"}])
        return 1.0

    async def opened(rank: Rank, *ids: int) -> None:
        rank.open(*ids)
        while ids[-1] not in began:  # then the gateway knows the others too
            await asyncio.sleep(0.001)

    async def main(served: Served) -> None:
        before, now = served.rank(lambda prompt: "x", 0), served.rank(lambda prompt: "x", 1)
        await opened(before, 7)
        await opened(now, 7, 8)  # the driver has given it the prompt
        if last == "the rank without":  # for example at a new gateway
            await opened(before, 7, 9)
        before.give_up(7)
        await opened(before, 10)
        go.set()
        assert (await now.outcome(7)).result == {"reward": 1.0}

    serve(tmp_path, harness, main)


@pytest.mark.parametrize("how", ("path", "bearer", "x-api-key", "x-session-id"))
def test_a_client_may_show_its_key_in_four_places(how: str, tmp_path: Path):
    codes: list[int] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        start = base_url if how == "path" else base_url.partition("/e/")[0] + "/v1"
        headers = {
            "path": {},
            "bearer": {"Authorization": f"Bearer {api_key}"},
            "x-api-key": {"x-api-key": api_key},
            "x-session-id": {"X-Session-ID": api_key},
        }[how]
        async with httpx.AsyncClient(base_url=start, headers=headers, timeout=DEADLINE_S) as client:
            codes.append((await client.get("/models")).status_code)
            await ask(client, [{"role": "user", "content": "a"}])
        async with httpx.AsyncClient(base_url=base_url.partition("/e/")[0] + "/v1") as client:
            codes.append((await client.get("/models")).status_code)
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "b")
        rank.open(1)
        assert (await rank.outcome(1)).turns == 1
        assert codes == [200, 401]

    serve(tmp_path, harness, main)


def test_the_token_route_returns_and_keeps_ids(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with httpx.AsyncClient(
            base_url=base_url.removesuffix("/v1"), timeout=DEADLINE_S
        ) as client:
            ids = [2, 7, 0, 3]
            for _ in range(2):
                body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1}}
                reply = (await client.post("/inference/v1/generate", json=body)).json()
                (choice,) = reply["choices"]
                content = choice["logprobs"]["content"]
                assert [f"token_id:{i}" for i in choice["token_ids"]] == [c["token"] for c in content]
                assert [c["logprob"] for c in content] == [-1.0, -2.0]
                ids = [*ids, *choice["token_ids"], 2, 0, 3]
        return 1.0

    async def main(served: Served) -> None:
        served.renderer.ids("p q r")
        rank = served.rank(lambda prompt: "q")
        rank.open(1)
        ended = await rank.outcome(1)
        (row,) = ended.rows
        assert row.prompt_ids.tolist() == [2, 7, 0, 3]
        assert row.response_ids.tolist() == [6, 0, 2, 0, 3, 6, 0]
        assert row.mask.tolist() == [1, 1, 0, 0, 0, 1, 1]
        assert ended.retokenised == 0

    serve(tmp_path, harness, main)


@pytest.mark.parametrize("rewards", ([1.0, 2.0], [1.0, 2.0, 3.0], "many"))
def test_rewards_of_turns_must_be_as_many_as_the_turns(rewards: Any, tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> dict[str, Any]:
        async with chat(base_url) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
            messages += [await ask(client, messages), {"role": "user", "content": "more"}]
            await ask(client, messages)
        return {"reward": 1.0, "turn_rewards": rewards}

    async def main(served: Served) -> None:
        plan = Function(function=harness, writes=("reward", "turn_rewards")).plan()
        rank = served.rank(lambda prompt: "b")
        rank.open(1, plan=plan)
        ended = await rank.outcome(1)
        assert ended.scored == (rewards == [1.0, 2.0])
        assert ended.scored or "each of the 2 sampled turns" in ended.failure

    serve(tmp_path, harness, main)


def test_a_turn_that_the_engine_refuses_has_no_row(tmp_path: Path):
    codes: list[int] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            for text in ("refused", "a"):
                body = {"model": "m", "messages": [{"role": "user", "content": text}]}
                codes.append((await client.post("/chat/completions", json=body)).status_code)
        return 1.0

    def answer(prompt: str) -> str:
        if "refused" in prompt:
            raise GenerationError("not with this engine")
        return "b"

    async def main(served: Served) -> None:
        rank = served.rank(answer)
        rank.open(1)
        ended = await rank.outcome(1)
        assert (codes, len(ended.rows), ended.turns) == ([400, 200], 1, 1)

    serve(tmp_path, harness, main)


def test_a_stop_string_of_a_client_ends_the_turn_and_is_not_in_the_reply(tmp_path: Path):
    said: list[dict[str, Any]] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
            for path, name in (("/chat/completions", "stop"), ("/messages", "stop_sequences")):
                said.append((await client.post(path, json={**body, name: ["END"]})).json())
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "1 2 END 3")
        rank.open(1)
        ended = await rank.outcome(1)
        (choice,) = said[0]["choices"]
        assert choice["message"]["content"].strip() == "1 2"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
        assert said[1]["content"][0]["text"].strip() == "1 2"
        assert (said[1]["stop_reason"], said[1]["stop_sequence"]) == ("stop_sequence", "END")
        for row in ended.rows:
            assert served.renderer.decode(row.response_ids.tolist()) == "1 2 END"

    serve(tmp_path, harness, main)


def test_the_last_turn_of_a_context_may_be_shorter_than_min_tokens(tmp_path: Path):
    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": "a b c"}])
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "1 2 3 4 5 6 7 8")
        rank.open(1, max_context=10, sampling=Sampling(max_tokens=50, min_tokens=6))
        ended = await rank.outcome(1)
        ((_, sampling),) = rank.engine.requests
        assert (sampling.min_tokens, sampling.max_tokens) == (4, 4)
        assert ended.rows[0].finish_reason == "length"

    serve(tmp_path, harness, main)


def test_a_request_whose_body_comes_after_its_attempt_is_refused(tmp_path: Path):
    begun: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    replies: list[str] = []
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "late"}]})

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        if not begun:
            url = httpx.URL(base_url)
            begun.append(await asyncio.open_connection(url.host, url.port))
            head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            begun[0][1].write(f"{head}Content-Length: {len(body)}\r\n\r\n{body[:5]}".encode())
            async with chat(base_url) as client:  # the gateway has read the head before this reply
                await client.get("/models")
            raise RuntimeError("a broken tool")
        reader, writer = begun[0]
        writer.write(body[5:].encode())
        replies.append((await asyncio.wait_for(reader.readline(), DEADLINE_S)).decode())
        writer.close()
        async with chat(base_url) as client:
            await ask(client, [{"role": "user", "content": "in time"}])
        return 1.0

    async def main(served: Served) -> None:
        rank = served.rank(lambda prompt: "b")
        rank.open(1)
        ended = await rank.outcome(1)
        assert (ended.turns, len(rank.engine.requests)) == (1, 1)
        assert replies == ["HTTP/1.1 401 Unauthorized\r\n"]

    serve(tmp_path, harness, main)


def test_a_turn_that_ends_while_another_is_aborted_does_not_fail_the_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from weft.workers.agents import replicas

    send = replicas.send

    async def slow_send(websocket: Any, record: Any) -> bool:
        if isinstance(record, Abort):
            for _ in range(300):  # other turns may end now
                await asyncio.sleep(0.001)
        return await send(websocket, record)

    monkeypatch.setattr(replicas, "send", slow_send)
    asked: list[asyncio.Task[Any]] = []

    async def harness(row: Any, *, base_url: str, api_key: str) -> float:
        async def ask_for(text: str) -> None:
            async with chat(base_url) as client:
                with contextlib.suppress(httpx.HTTPError):
                    await ask(client, [{"role": "user", "content": text}])

        asked.extend(asyncio.create_task(ask_for(text)) for text in ("long", "short"))
        while len(rank.engine.requests) < 2:
            await asyncio.sleep(0.001)
        return 1.0

    async def main(served: Served) -> None:
        nonlocal rank
        rank = served.rank(lambda prompt: "x " * (45 if "long" in prompt else 20))
        rank.open(1)
        ended = await rank.outcome(1)
        assert (ended.failure, ended.result) == ("", {"reward": 1.0})
        await asyncio.gather(*asked)

    rank: Any = None
    serve(tmp_path, harness, main)
