"""Several reward functions, parts, asynchronous calls and the judge, all in this process."""

import asyncio
import functools
import json
import pickle
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.errors import SampleError, UserError
from weft.dataflow.metrics import Mean, merge
from weft.workers.reward import RewardConfig, RewardWorker
from weft.workers.rewards import calls, scoring
from weft.workers.rewards import judge as judge_module
from weft.workers.rewards.function import Reward
from weft.workers.rewards.judge import Judge


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>")
    ).save(str(folder / "tokenizer.json"))
    return folder


BATCH = Batch.of(sample_id=[7, 8], response_ids=[[1], [2]], answer=["one", "one"])


def worker(function: Any, model: Path, **settings: Any) -> RewardWorker:
    return RewardWorker(RewardConfig(function=function, tokenizer=model, **settings))


def scored(
    function: Any, model: Path, batch: Batch = BATCH, **arguments: Any
) -> tuple[Batch, dict[str, float]]:
    made = worker(function, model)
    try:
        given = list(made.score(batch, **arguments))
    finally:
        made.close()
    rows = Batch.concat([part for part, _ in given])
    metrics = merge(metrics for _, metrics in given)
    return rows, {name: metric.value for name, metric in metrics.items()}


def right(response: str, answer: str) -> float:
    return float(response == answer)


def short(response_ids: list[int]) -> float:
    return 1 / len(response_ids)


# Several functions, and parts


def test_several_functions_are_weighed_and_each_has_a_metric_and_a_column(model: Path):
    both = (right, Reward(function=short, weight=0.5, name="brevity"))
    config = RewardConfig(function=both, tokenizer=model)
    assert config.columns("reward") == ("reward", "reward/right", "reward/brevity") and config.needs == (
        "answer",
        "response_ids",
    )
    rows, metrics = scored(both, model)
    assert rows["reward"].to_pylist() == [1.5, 0.5] and rows["reward/right"].to_pylist() == [1, 0]
    assert metrics["mean"] == 1.0 and metrics["right"] == 0.5 and metrics["brevity"] == 1.0
    rows, metrics = scored(both, model, into="baseline_reward")
    assert (
        rows["baseline_reward/brevity"].to_pylist() == [1, 1]
        and metrics["baseline_reward_brevity"] == 1.0
    )


def test_a_dictionary_of_parts_is_summed_unless_one_of_them_is_the_reward(model: Path):
    def parts(response: str) -> dict[str, float]:
        return {"form": 0.5, "right": float(response == "one")}

    def with_total(response: str) -> dict[str, Any]:
        return {"reward": 3.0, "right": True, "why": "text", "unknown": None}

    rows, metrics = scored(parts, model)
    assert (
        rows["reward"].to_pylist() == [1.5, 0.5] and metrics["form"] == 0.5 and metrics["right"] == 0.5
    )
    assert json.loads(rows["reward_parts"][0].as_py()) == {"form": 0.5, "right": 1.0}
    rows, metrics = scored(with_total, model)
    assert rows["reward"].to_pylist() == [3.0, 3.0] and metrics["right"] == 1.0 and "why" not in metrics
    assert scored(Reward(function=parts, part="form"), model)[0]["reward"].to_pylist() == [0.5, 0.5]
    _, metrics = scored((parts, right), model)
    assert metrics["parts"] == 1.0 and metrics["parts/form"] == 0.5
    with pytest.raises(SampleError, match=r"returned \{'form': .*; its 'colour' is not a finite number"):
        scored(Reward(function=parts, part="colour"), model)


def test_an_optional_prompt_is_decoded_from_its_tokens_if_there_is_no_text(model: Path):
    def of_prompt(response: str, prompt: str = "") -> float:
        return float(prompt == "two")

    batch = Batch.of(sample_id=[7, 8], prompt_ids=[[1], [2]], response_ids=[[1], [2]])
    assert scored(of_prompt, model, batch)[0]["reward"].to_pylist() == [0.0, 1.0]


def test_none_of_one_function_leaves_the_others_and_none_of_all_is_a_failure(model: Path):
    def sometimes(response: str) -> float | None:
        return 1.0 if response == "one" else None

    rows, metrics = scored((sometimes, short), model)
    assert rows["reward"].to_pylist() == [2.0, 1.0] and rows["reward/sometimes"].to_pylist() == [
        1.0,
        None,
    ]
    assert metrics["sometimes"] == 1.0
    with pytest.raises(
        SampleError, match="each of the reward functions sometimes, never returned None"
    ) as caught:
        scored((sometimes, Reward(function=lambda response: None, name="never")), model)
    assert caught.value.sample_ids == (8,)


def test_a_function_of_our_own_form_may_take_a_batch(model: Path):
    def rank(response: list[str], answer: list[str]) -> list[float]:
        return [float(k) for k, _ in enumerate(zip(response, answer, strict=True))]

    assert scored(Reward(function=rank, batch=True), model)[0]["reward"].to_pylist() == [0, 1]


# Asynchronous functions


def many(number: int) -> Batch:
    return Batch.of(sample_id=list(range(number)), response_ids=[[1]] * number, k=list(range(number)))


def test_asynchronous_calls_are_in_flight_together_up_to_a_limit(model: Path):
    in_flight, most = 0, 0
    all_here = asyncio.Event()

    async def meet(response: str, k: int) -> float:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 8:
            all_here.set()
        await asyncio.wait_for(all_here.wait(), 30)
        await asyncio.sleep(0)
        in_flight -= 1
        return float(k)

    rows, _ = scored(Reward(function=meet, concurrency=8), model, many(20))
    assert rows["reward"].to_pylist() == list(range(20)) and most == 8


def test_an_asynchronous_call_is_retried_and_only_final_failures_are_blamed(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calls, "PAUSE_S", 0)
    tries: dict[int, int] = {}

    async def shaky(response: str, k: int) -> float:
        tries[k] = tries.get(k, 0) + 1
        if k == 1 or tries[k] <= k:
            raise ConnectionError(f"try {tries[k]}")
        return 1.0

    made = worker(Reward(function=shaky, retries=2), model)
    done: list[Any] = []
    with pytest.raises(ConnectionError, match="try 3"):
        done += made.score(many(3))
    assert tries == {0: 1, 1: 3, 2: 3} and [
        id for rows, _ in done for id in rows["sample_id"].to_pylist()
    ] == [0, 2]
    assert merge(metrics for _, metrics in done)["failure_rate"] == Mean(1.0, 3.0)
    made.close()


def test_metrics_of_calls_that_yield_in_parts_count_once(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scoring, "PART_S", -1.0)

    def logging(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("seen", 3.0)
        return [1.0] * len(completions)

    def plain(response: str) -> float:
        return 1.0

    made = worker((Reward(function=logging), Reward(function=plain)), model)
    parts = [metrics for _, metrics in made.score(many(3))]
    made.close()
    assert len(parts) > 1 and merge(parts)["seen"] == Mean(3.0, 1.0)
    assert "failure_rate" not in merge(parts)


def test_calls_begin_no_faster_than_allowed(model: Path):
    began: list[float] = []

    async def noted(response: str) -> float:
        began.append(asyncio.get_running_loop().time())
        return 1.0

    made = worker(Reward(function=noted, per_second=10), model)
    # From here and not from the first call, which a busy machine may begin late.
    asked = time.monotonic()
    for _ in made.score(many(4)):
        pass
    made.close()
    assert began == sorted(began) and began[-1] - asked >= 3 / 10 * 0.99


@pytest.mark.thorough
def test_an_asynchronous_call_past_its_deadline_is_cancelled_and_blamed(model: Path):
    cancelled: list[int] = []

    async def slow(response: str, k: int) -> float:
        if k == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(k)
                raise
        return 1.0

    made = worker(slow, model, deadline_s=3)  # waited out: the others return at once
    with pytest.raises(TimeoutError, match=r"slow took longer than 3 s") as caught:
        list(made.score(many(3)))
    assert cancelled == [1] and caught.value.sample_ids == (1,)  # pyright: ignore[reportAttributeAccessIssue]
    made.close()


# The judge


class OpenAI(BaseHTTPRequestHandler):
    """An OpenAI-compatible server with scripted replies of (status, text)."""

    replies: ClassVar[list[tuple[int, Any]]] = []
    requests: ClassVar[list[tuple[str, dict[str, str], Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, dict(self.headers), body))
        status, said = self.replies.pop(0) if self.replies else (200, "Score: 5")
        reply = {"choices": [{"message": {"content": said}}]} if isinstance(said, str) else said
        payload = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    OpenAI.replies, OpenAI.requests = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), OpenAI) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join(60)


def test_a_judge_is_asked_and_its_last_score_is_the_reward(
    address: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", "secret-7")
    judge = Judge(address=address, model="m", key_variable="JUDGE_KEY", scale=(1, 5))
    OpenAI.replies = [(200, "At first score: 1. Then again... **Score: 4**")]
    batch = Batch.of(sample_id=[7], prompt=["What is {answer}?"], response_ids=[[1]], answer=["one"])
    rows, metrics = scored((judge, right), model, batch)
    assert (
        rows["reward/judge"].to_pylist() == [0.75]
        and metrics["judge"] == 0.75
        and metrics["right"] == 1.0
    )
    path, headers, body = OpenAI.requests[0]
    assert (
        path == "/v1/chat/completions"
        and headers["Authorization"] == "Bearer secret-7"
        and body["model"] == "m"
    )
    asked = body["messages"][0]["content"]
    assert (
        "What is {answer}?" in asked
        and "<response>\none\n" in asked
        and "from 1 (useless) to 5" in asked
    )
    assert "secret-7" not in repr(judge) and pickle.loads(pickle.dumps(judge)) == judge


def test_a_judge_weighs_the_criteria_that_are_met_and_is_asked_once(address: str, model: Path):
    judge = Judge(address=address, model="m", criteria={"right": 2, "short": 1, "rude": -1})
    OpenAI.replies = [
        (200, "1: no, wait...\n**1**: yes\n2. No\n3: yes"),
        (200, "1: yes\n2: yes\n3: no\n4: no"),
    ]
    batch = Batch.of(
        sample_id=[7, 8, 9],
        prompt=["?"] * 3,
        response_ids=[[1]] * 3,
        rubric=[None, '{"kind": 1}', None],
    )
    rows = [scored(judge, model, batch.slice(k, 1))[0]["reward"].to_pylist() for k in range(3)]
    assert rows == [[pytest.approx(1 / 3)], [0.75], [pytest.approx(1 / 3)]]
    assert len(OpenAI.requests) == 2, "equal questions are asked once"
    asked = OpenAI.requests[1][2]["messages"][0]["content"]
    assert "1. right\n2. short\n3. rude\n4. kind" in asked
    OpenAI.replies = [(200, "1: yes\n3: no")]
    with pytest.raises(RuntimeError, match="gave no verdict on 'short'"):
        scored(judge, model, many(1))
    for criteria in ({"rude": -1}, {"right": float("nan")}):
        with pytest.raises(UserError, match=r"above 0|a finite number"):
            Judge(address=address, model="m", criteria=criteria)
    with pytest.raises(UserError, match=r"question lacks \{criteria\}"):
        Judge(address=address, model="m", criteria={"right": 1}, question="Is {response} right?")


def test_a_judge_is_asked_again_when_it_is_busy_and_its_failure_is_the_samples(
    address: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(judge_module, "LONGEST_PAUSE_S", 0)
    judge = Judge(address=address, model="m")
    OpenAI.replies = [(429, "busy"), (503, "busy"), (200, "Score: 10")]
    assert scored(judge, model, many(1))[0]["reward"].to_pylist() == [1.0] and len(OpenAI.requests) == 3
    cases: list[tuple[list[tuple[int, Any]], str]] = [
        ([(401, {"error": "bad key"})], r"answered 401: .*bad key"),
        ([(500, "no")] * 4, r"answered 500: .* \(4 times\)"),
        ([(200, "I cannot say")], "gave no score: 'I cannot say'"),
        ([(200, {"choices": []})], "did not answer in OpenAI's format"),
    ]
    for number, (replies, message) in enumerate(cases):
        judge = Judge(address=address, model=f"m{number}")  # the first one remembers its verdict
        OpenAI.replies = list(replies)
        with pytest.raises(RuntimeError, match=message) as caught:
            scored(judge, model, many(1))
        assert caught.value.sample_ids == (0,)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_missing_or_misconfigured_judge_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge_module, "LONGEST_PAUSE_S", 0)
    with pytest.raises(RuntimeError, match=r"did not answer: ConnectError .* \(4 times\)"):
        scored(Judge(address="http://127.0.0.1:9/v1", model="m"), model, many(1))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = RewardConfig(
        function=Judge(address="http://h/v1", model="m", key_variable="NO_SUCH_KEY"), tokenizer=model
    )
    from weft.dataflow.source import TableSource

    with pytest.raises(UserError, match="the environment has no NO_SUCH_KEY"):
        RewardWorker.check(config, [], TableSource("s", pa.table({"prompt": ["x"]})))
    for settings, message in (
        ({"address": "host:8000"}, "must be like http://host:port/v1"),
        ({"address": "http://user:pass@host/v1"}, "must not contain a password"),
        (
            {"address": "http://h", "scale": (0.0, 0.0)},
            r"scale must rise, from the worst score to the best; \(0.0, 0.0\) does not",
        ),
        ({"address": "http://h", "score": "score"}, "must have one group"),
    ):
        with pytest.raises(UserError, match=message):
            Judge(model="m", **settings)  # pyright: ignore[reportArgumentType]


def test_an_asynchronous_function_that_exits_fails_its_own_sample(model: Path):
    async def leaves(response: str) -> float:
        if response == "one":
            raise SystemExit(3)
        return 1.0

    with pytest.raises(RuntimeError, match=r"ended with SystemExit\(3\)") as caught:
        scored(leaves, model)
    assert caught.value.sample_ids == (7,)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_decorator_may_make_a_function_asynchronous(model: Path):
    @functools.wraps(right)
    async def later(*args: Any, **columns: Any) -> float:
        return right(*args, **columns)

    assert scored(later, model)[0]["reward"].to_pylist() == scored(right, model)[0]["reward"].to_pylist()


def test_a_reward_that_float32_cannot_hold_is_refused(model: Path):
    for value in (1e39, 10**400):
        with pytest.raises(SampleError, match="a finite number that float32 can hold"):
            scored(lambda response, value=value: value, model)
