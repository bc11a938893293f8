"""Reward functions: arguments, results, and error messages."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from weft.algorithms.graders.math import Math
from weft.algorithms.graders.text import Exact, RegularExpression
from weft.dataflow.batch import Batch
from weft.dataflow.errors import SampleError, UserError
from weft.dataflow.graph import group
from weft.dataflow.metrics import Max, Mean, Sum
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.workers.reward import RewardConfig, RewardWorker
from weft.workers.rewards.function import Reward


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer of one word per token. Token 0 is special."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"<end>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<end>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def samples() -> Batch:
    return Batch.of(
        sample_id=[7, 8, 9],
        response_ids=[[1, 2, 0], [3], []],
        answer=["one two", "two", ""],
        level=[1, 2, 3],
    )


def score(
    function: Callable[..., Any], model: Path, batch: Batch | None = None, **arguments: Any
) -> Any:
    worker = RewardWorker(RewardConfig(function=function, tokenizer=model))
    (part,) = worker.score(samples() if batch is None else batch, **arguments)
    return part


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def test_columns_come_by_name_and_the_response_as_text(model: Path):
    batch, metrics = score(exact, model)
    assert batch.numpy("reward").tolist() == [1.0, 0.0, 1.0]
    assert metrics["mean"] == Mean(2.0, 3) and metrics["max"] == Max(1.0)
    assert RewardConfig(function=exact, tokenizer=model).needs == ("answer",)


def test_metrics_count_an_episode_once_however_many_rows_it_has(model: Path):
    def scored(response: str, answer: str) -> dict[str, float]:
        return {"score": exact(response, answer), "form": 2.0 * exact(response, answer)}

    batch = samples().with_columns(episode_rows=[1, 2, 2], answer=["one two", "two", "three"])
    _, metrics = score(scored, model, batch)
    assert metrics["mean"] == Mean(1.0, 2.0) and metrics["std"].value == 0.5
    assert metrics["scored"] == Sum(2.0) and metrics["form"].value == 1.0

    @graph
    def graded(rows: Any, *, grader: Any) -> Any:
        return grader.score(rows)

    columns = {"response_ids": [[1]], "answer": ["a"], "episode_rows": [2]}
    source = TableSource("s", pa.table(columns))
    recorded = graded(source, grader=group(RewardWorker, function=exact, tokenizer=model, name="grader"))
    assert "episode_rows" in recorded["grader.score"].reads


def test_token_ids_may_be_requested_and_defaults_replace_missing_columns(model: Path):
    def length(response_ids: list[int], level: int, bonus: float = 0.5) -> float:
        return len(response_ids) * level + bonus

    batch, _ = score(length, model, into="length")
    assert batch.numpy("length").tolist() == [3.5, 2.5, 0.5] and "reward" not in batch


def test_a_parameter_with_a_default_gets_the_column_of_its_name(model: Path):
    def lenient(response: str, answer: str | None = None, style: str = "plain") -> float:
        assert style == "plain"
        return float(response == answer)

    batch, _ = score(lenient, model)
    assert batch.numpy("reward").tolist() == [1.0, 0.0, 1.0]
    assert RewardConfig(function=lenient, tokenizer=model).may_read == ("answer", "style")


def test_keywords_get_every_column_that_is_left_and_the_response(model: Path):
    seen: list[dict[str, Any]] = []

    def all_of(level: int, **columns: Any) -> float:
        seen.append(columns)
        return level

    def named(response: str, **columns: Any) -> float:
        seen.append({"response": response, **columns})
        return 1.0

    batch, _ = score(all_of, model)
    assert batch.numpy("reward").tolist() == [1.0, 2.0, 3.0]
    assert seen[0] == {"response": "one two", "response_ids": [1, 2, 0], "answer": "one two"}
    seen.clear()
    score(functools.partial(named, level=0), model)
    assert seen[1] == {"response": "three", "response_ids": [3], "answer": "two", "level": 0}


def test_optional_columns_of_a_function_are_read_if_the_graph_has_them(model: Path):
    def lenient(response: str, answer: str = "", style: str = "") -> float:
        return 0.0

    def greedy(response: str, **columns: Any) -> float:
        return 0.0

    @graph
    def scored(rows: Any, *, one: Any, two: Any) -> Any:
        return two.score(one.score(rows), into="second")

    source = TableSource("s", pa.table({"response_ids": [[1]], "answer": ["a"], "level": [1]}))
    one, two = (group(RewardWorker, function=f, tokenizer=model) for f in (lenient, greedy))
    recorded = scored(source, one=one, two=two)
    assert recorded["one.score"].reads == ("response_ids", "answer")
    assert recorded["two.score"].reads == ("response_ids", "answer", "level", "reward")


class Judge:
    def __call__(self, response: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    "function",
    [functools.partial(exact, answer="three"), Judge(), Judge().__call__, lambda response: True],
)
def test_anything_that_can_be_called_will_do(function: Any, model: Path):
    batch, _ = score(function, model)
    assert batch.numpy("reward").tolist()[1] == 1.0


@pytest.mark.parametrize("value", [np.float32(2.0), np.array(2.0), True + 1, pa.scalar(2.0).as_py()])
def test_any_number_is_a_reward(value: Any, model: Path):
    batch, _ = score(lambda response: value, model)
    assert batch.numpy("reward").tolist() == [2.0] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1.0", [1.0, 2.0], -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_the_sample(value: Any, model: Path):
    def odd(response: str) -> Any:
        return value if response == "three" else 0.0

    with pytest.raises(SampleError) as caught:
        score(odd, model)
    assert caught.value.sample_ids == (8,)
    assert re.search(rf"\.odd returned {re.escape(repr(value))}; .* finite number", str(caught.value))


def test_a_sample_that_fails_holds_back_no_other_and_is_shown(model: Path):
    def broken(response: str) -> float:
        return 1 / (len(response) - len("three"))

    batch = samples().with_columns(prompt=["1?", "2?", "3?"])
    parts: list[Any] = []
    with pytest.raises(ZeroDivisionError) as caught:
        parts += RewardWorker(RewardConfig(function=broken, tokenizer=model)).score(batch)
    ((scored, metrics),) = parts
    assert scored["sample_id"].to_pylist() == [7, 9] and metrics["mean"].weight == 2
    assert getattr(caught.value, "sample_ids", None) == (8,)
    line = broken.__code__.co_firstlineno + 1
    assert (
        getattr(caught.value, "sample", None) == f"prompt '2?', response 'three', at {__file__}:{line}"
    )


def test_an_exception_keeps_its_type_and_names_the_sample(model: Path):
    def broken(response: str) -> float:
        return 1 / len(response)

    with pytest.raises(ZeroDivisionError) as caught:
        score(broken, model)
    assert getattr(caught.value, "sample_ids", None) == (9,)


def no_response(answer: str) -> float: ...
def plural(responses: str) -> float: ...
def catch_all(*columns: str) -> float: ...
def unnamed(response: str, /) -> float: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_response, r"no_response\(answer: .*\) -> .* takes neither 'response' nor 'response_ids'"),
        (plural, r"did you mean 'response' for 'responses'\?"),
        (catch_all, r"catch_all\(\*columns: .* must name its parameters: each is a column"),
        (unnamed, "must name its parameters"),
        (functools.partial(no_response), r"no_response\(answer: .*takes neither"),
        ("exact", "RewardConfig.function: input should be callable, not 'exact'"),
    ],
)
def test_a_wrong_signature_is_reported_before_anything_starts(function: Any, message: str):
    with pytest.raises(UserError, match=message):
        RewardConfig(function=function, tokenizer="m")


def test_a_missing_tokenizer_is_reported_before_anything_starts(tmp_path: Path):
    config = RewardConfig(function=exact, tokenizer=tmp_path)
    with pytest.raises(UserError, match=r"tokenizer '.*' has no tokenizer.json"):
        RewardWorker.check(config, [], TableSource("s", pa.table({"x": [1]})))


def test_final_answers_are_those_of_the_only_grader(model: Path):
    rewards = (Exact(), Reward(function=exact))
    worker = RewardWorker(RewardConfig(function=rewards, tokenizer=model))
    assert worker.final_answers(samples())["final_answer"].to_pylist() == ["one two", "three", None]
    worker = RewardWorker(RewardConfig(function=exact, tokenizer=model))
    with pytest.raises(UserError, match="final_answers needs one grader"):
        worker.final_answers(samples())


def test_no_rows_have_no_reward(model: Path):
    batch, metrics = score(exact, model, samples().slice(0, 0))
    assert len(batch) == 0 and str(batch["reward"].type) == "float" and math.isnan(metrics["mean"].value)


def untyped(response: str, answer) -> float: ...  # pyright: ignore[reportMissingParameterType]
def lenient(response: str, answer: str | None) -> float: ...
def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float: ...
def of_verl_batch(solution_strs: list[str], ground_truths: list[str]) -> list[float]: ...
def of_trl(completions: list[str], solution: list[str]) -> list[float]: ...
def of_openrlhf(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]: ...


@pytest.mark.parametrize(
    "function", [exact, Math(), Exact(), of_verl, of_verl_batch, of_trl, of_openrlhf]
)
@pytest.mark.parametrize("column", ["answer", "ground_truth"])
def test_rows_without_an_answer_are_counted_before_anything_starts(
    function: Any, column: str, model: Path
):
    columns = {"answer": ["a", None, "b", None]}
    if column == "ground_truth" and "verl" in getattr(function, "__name__", ""):
        columns = {"ground_truth": ["a", None, "b", None], "answer": ["a"] * 4}
    source = TableSource("s", pa.table({"prompt": ["?"] * 4, **columns}))
    with pytest.raises(
        UserError, match=r"needs an answer for each row: 2 of 4 rows of 's' have none in column .*row 2"
    ):
        RewardWorker.check(RewardConfig(function=function, tokenizer=model), [], source)


@pytest.mark.parametrize(
    "function",
    [
        untyped,
        lenient,
        RegularExpression(pattern="a"),
        functools.partial(exact, answer="a"),
        lambda response: 1.0,
    ],
)
def test_a_function_that_takes_none_or_no_answer_gets_such_rows(function: Any, model: Path):
    source = TableSource("s", pa.table({"prompt": ["?"] * 2, "answer": ["a", None]}))
    RewardWorker.check(RewardConfig(function=function, tokenizer=model), [], source)


def test_a_grader_that_can_do_without_an_answer_does(model: Path):
    assert RegularExpression(pattern="one")("one", None) == 1.0  # pyright: ignore[reportArgumentType]
