"""Operations: what is attached to functions, and how the arguments of a recorded call are bound."""

from typing import Any

import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.column import REWARD
from weft.dataflow.errors import UserError
from weft.dataflow.operation import Operation, Shape, bind, declare, node, operation_of


class Loss:
    reads = ("advantages", "old_logprobs")


def test_templates_are_filled_in_from_the_arguments():
    operation = Operation("update")
    arguments = {"loss": Loss(), "into": "x", "columns": ["a", REWARD, "a"]}
    templates = ("prompt_ids", "{loss.reads}", "{into}", "{columns}", "{loss.may_read}")
    assert operation.columns(templates, arguments) == ("prompt_ids", "advantages", "old_logprobs", "x", "a", "reward")


def test_a_template_may_be_a_part_of_a_name():
    assert Operation("logprobs").columns(("{into}_chosen",), {"into": "reference"}) == ("reference_chosen",)


def test_a_node_is_the_function_itself_when_called_with_a_batch():
    @node(reads=(REWARD,), writes=("twice",))
    def twice(batch: Batch, factor: int = 2) -> Batch:
        """Doubles."""
        return batch.with_columns(twice=batch.numpy("reward") * factor)

    assert twice(Batch.of(reward=[1.0]), factor=3).to_rows() == [{"reward": 1.0, "twice": 3.0}]
    assert twice.__name__ == "twice" and twice.__doc__ == "Doubles."
    operation = operation_of(twice)
    assert operation == Operation("twice", Shape.MAP, ("reward",), (), ("twice",))


def test_a_group_always_sees_whole_groups_and_a_map_never():
    assert declare(test_a_group_always_sees_whole_groups_and_a_map_never, shape=Shape.GROUP).whole_groups
    with pytest.raises(UserError, match=r"a map that sees whole groups is declared with shape=Shape\.GROUP"):
        declare(Loss, whole_groups=True)


def takes(self: object, rows: object, n: int, *, sampling: str = "greedy", **rest: Any) -> None: ...
def takes_no_more(rows: object, n: int) -> None: ...
def takes_any(rows: object, *names: str) -> None: ...


def test_arguments_are_bound_by_name_with_their_defaults():
    assert bind(takes, 2, (3,), {}) == {"n": 3, "sampling": "greedy"}
    assert bind(takes, 2, (), {"n": 3, "extra": 1}) == {"n": 3, "sampling": "greedy", "extra": 1}


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"m": 1}, r"takes_no_more takes no argument 'm' \(value 1\); it takes n"),
        ((), {}, "takes_no_more: missing a required argument: 'n'; it takes n"),
        ((1, 2), {}, "takes_no_more: too many positional arguments; it takes n"),
        ((1,), {"n": 2}, "takes_no_more: multiple values for argument 'n'; it takes n"),
    ],
)
def test_wrong_arguments_are_answered_with_what_there_is(args: tuple[Any, ...], kwargs: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        bind(takes_no_more, 1, args, kwargs)


def test_the_nearest_argument_is_offered():
    with pytest.raises(UserError, match=r"takes no argument 'smapling' \(value 1\); did you mean 'sampling'"):
        bind(Sampler.generate, 2, (1,), {"smapling": 1})
    with pytest.raises(UserError, match=r"by name, not as \*names"):
        bind(takes_any, 1, ("a",), {})
    assert bind(takes_any, 1, (), {}) == {}


class Sampler:
    def generate(self, rows: object, n: int, sampling: int = 0) -> None: ...
