"""Graders accept answers that are numbers, booleans or lists in the data."""

import inspect
from typing import Any

import pytest

from weft.algorithms.graders.choice import MultipleChoice
from weft.algorithms.graders.math import Gsm8k, Math
from weft.algorithms.graders.text import F1, Exact, RegularExpression
from weft.dataflow.errors import SampleError

GRADERS: tuple[Any, ...] = (Gsm8k(), Math(), Exact(), F1(), RegularExpression(pattern=r"(\S+)$"))


@pytest.mark.parametrize("answer", [5, -3, 0.5, 10**30])
@pytest.mark.parametrize("grader", GRADERS, ids=lambda grader: type(grader).__name__)
def test_a_number_is_compared_in_its_written_form(grader: Any, answer: float) -> None:
    assert grader(str(answer), answer) == 1.0 and grader("#### 7", answer) == 0.0


def test_a_boolean_and_a_list_are_compared_as_text() -> None:
    exact, math = GRADERS[2], GRADERS[1]
    assert exact("The answer is true.", True) == 1.0 and math(r"\boxed{[1, 2]}", [1, 2]) == 1.0


@pytest.mark.parametrize(
    "grader", [*GRADERS, MultipleChoice()], ids=lambda grader: type(grader).__name__
)
def test_a_row_without_an_answer_is_no_verdict(grader: Any) -> None:
    with pytest.raises(SampleError, match="the row has no answer"):
        grader("5", None)


def test_the_signature_is_that_of_the_grader() -> None:
    assert list(inspect.signature(RegularExpression(pattern="a")).parameters) == ["response", "answer"]
    assert RegularExpression(pattern="a")("a") == 1.0
