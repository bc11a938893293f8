"""Arguments by name: binding of recorded calls, and answers to wrong names."""

import inspect
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from weft.dataflow.errors import UserError
from weft.dataflow.operation import bind, names_arguments, parameter_names


def takes(self: object, rows: object, n: int, *, sampling: str = "greedy", **rest: Any) -> None: ...
def takes_no_more(rows: object, n: int) -> None: ...
def takes_any(rows: object, *names: str) -> None: ...


class Sampler:
    def generate(self, rows: object, n: int, sampling: int = 0) -> None: ...


def test_arguments_are_bound_by_name_with_their_defaults():
    assert bind(takes, 2, (3,), {}) == {"n": 3, "sampling": "greedy"}
    assert bind(takes, 2, (), {"n": 3, "extra": 1}) == {"n": 3, "sampling": "greedy", "extra": 1}


def test_only_importable_functions_can_be_given_by_name():
    assert parameter_names(takes, 2) == ["n", "sampling"]
    assert parameter_names(takes_any) == ["rows"]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"m": 1}, r"takes_no_more takes no argument 'm' \(value 1\); it takes n"),
        ((), {}, "takes_no_more: missing a required argument: 'n'; it takes n"),
        ((1, 2), {}, "takes_no_more: too many positional arguments; it takes n"),
        ((1,), {"n": 2}, "takes_no_more: multiple values for argument 'n'; it takes n"),
    ],
)
def test_wrong_arguments_are_answered_with_the_valid_ones(
    args: tuple[Any, ...], kwargs: dict[str, Any], message: str
):
    with pytest.raises(UserError, match=message):
        bind(takes_no_more, 1, args, kwargs)


def test_the_nearest_argument_is_offered():
    with pytest.raises(
        UserError, match=r"takes no argument 'smapling' \(value 1\); did you mean 'sampling'"
    ):
        bind(Sampler.generate, 2, (1,), {"smapling": 1})
    with pytest.raises(UserError, match=r"by name, not as \*names"):
        bind(takes_any, 1, ("a",), {})
    assert bind(takes_any, 1, (), {}) == {}


@names_arguments
@dataclass(frozen=True)
class Chair:
    legs: int
    height: float = 0.5


def test_an_argument_that_is_missing_or_misspelt_is_named():
    misspelt: dict[str, Any] = {"heigth": 2}
    with pytest.raises(
        UserError, match=r"^Chair takes no argument 'heigth' \(value 2\); did you mean 'height'\?$"
    ):
        Chair(4, **misspelt)
    unknown: dict[str, Any] = {"xyz": 2}
    with pytest.raises(
        UserError, match=r"^Chair takes no argument 'xyz' \(value 2\); it takes legs, height$"
    ):
        Chair(4, **unknown)
    nothing: dict[str, Any] = {}
    with pytest.raises(
        UserError, match=r"^Chair: missing a required argument: 'legs'; it takes legs, height$"
    ):
        Chair(**nothing)


def test_a_class_that_names_its_arguments_is_otherwise_as_before():
    assert pickle.loads(pickle.dumps(Chair(4))) == Chair(legs=4, height=0.5)
    assert str(inspect.signature(Chair)) == "(legs: int, height: float = 0.5) -> None"
