"""Reward functions: what they may take, what they may return, and how a mistake is told."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.errors import SampleError, UserError
from weft.dataflow.graph import TableSource
from weft.dataflow.metrics import Max, Mean
from weft.workers.reward import RewardConfig, RewardWorker


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer of one word per token; token 0 is special."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"<end>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<end>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def samples() -> Batch:
    return Batch.of(
        sample_id=[7, 8, 9], response_ids=[[1, 2, 0], [3], []], answer=["one two", "two", ""], level=[1, 2, 3]
    )


def score(function: Callable[..., Any], model: Path, batch: Batch | None = None, **arguments: Any) -> Any:
    worker = RewardWorker(RewardConfig(function=function, tokenizer=model))
    (part,) = worker.score(samples() if batch is None else batch, **arguments)
    return part


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def test_columns_come_by_name_and_the_response_as_text(model: Path):
    batch, metrics = score(exact, model)
    assert batch.numpy("reward").tolist() == [1.0, 0.0, 1.0]
    assert metrics["mean"] == Mean(2.0, 3) and metrics["max"] == Max(1.0)
    assert RewardConfig(function=exact, tokenizer=model).reads == ("answer",)


def test_token_ids_may_be_asked_for_and_defaults_are_the_functions_own(model: Path):
    def length(response_ids: list[int], level: int, bonus: float = 0.5, **rest: Any) -> float:
        assert not rest
        return len(response_ids) * level + bonus

    batch, _ = score(length, model, into="length")
    assert batch.numpy("length").tolist() == [3.5, 2.5, 0.5] and "reward" not in batch


class Judge:
    def __call__(self, response: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    "function", [functools.partial(exact, answer="three"), Judge(), Judge().__call__, lambda response: True]
)
def test_anything_that_can_be_called_will_do(function: Any, model: Path):
    batch, _ = score(function, model)
    assert batch.numpy("reward").tolist()[1] == 1.0


@pytest.mark.parametrize("value", [np.float32(2.0), np.array(2.0), True + 1, pa.scalar(2.0).as_py()])
def test_any_number_is_a_reward(value: Any, model: Path):
    batch, _ = score(lambda response: value, model)
    assert batch.numpy("reward").tolist() == [2.0] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1.0", [1.0, 2.0], -math.inf])
def test_what_is_no_finite_number_is_refused_with_the_sample(value: Any, model: Path):
    def odd(response: str) -> Any:
        return value if response == "three" else 0.0

    with pytest.raises(SampleError) as caught:
        score(odd, model)
    assert caught.value.sample_ids == (8,)
    assert f".odd returned {value!r}; a reward is a finite number" in str(caught.value)


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
def test_a_wrong_signature_is_told_before_anything_starts(function: Any, message: str):
    with pytest.raises(UserError, match=message):
        RewardConfig(function=function, tokenizer="m")


def test_a_tokenizer_that_is_not_there_is_told_before_anything_starts(tmp_path: Path):
    config = RewardConfig(function=exact, tokenizer=tmp_path)
    with pytest.raises(UserError, match=r"tokenizer '.*' has no tokenizer.json"):
        RewardWorker.check(config, [], TableSource("s", pa.table({"x": [1]})))


def test_no_rows_have_no_reward(model: Path):
    batch, metrics = score(exact, model, samples().slice(0, 0))
    assert len(batch) == 0 and str(batch["reward"].type) == "float" and math.isnan(metrics["mean"].value)
