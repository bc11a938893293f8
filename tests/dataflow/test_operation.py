"""Operations: declarations next to functions, and the effect of calls."""

import pickle
from typing import Any

import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.column import REWARD
from weft.dataflow.errors import UserError
from weft.dataflow.operation import (
    FINISHED_GROUPS,
    GROUPS,
    ROWS,
    Declaration,
    Operation,
    Quorum,
    Shape,
    Takes,
    TrainingBatch,
    declaration_of,
    node,
)
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote


class Loss:
    reads = ("advantages", REWARD, "advantages")
    whole_groups = True


def function(rows: object, loss: object = Loss(), *, into: str = "x", n: int = 1) -> None: ...
def method(self: object, rows: object, loss: object = Loss(), *, epochs: int = 1) -> None: ...


def test_declarations_may_be_functions_of_call_arguments():
    declaration = Declaration(
        "update",
        reads=lambda loss: ("prompt_ids", *loss.reads),
        may_read=lambda config: (config,),
        writes=lambda into: (f"{into}_chosen",),
        takes=lambda loss, epochs: TrainingBatch(loss.whole_groups, accumulates=epochs == 1),
        interruptible=True,
    )
    arguments = {"loss": Loss(), "into": "reference", "epochs": 2, "config": "of_the_group", "other": 1}
    assert declaration.called_with(arguments) == Operation(
        "update",
        reads=("prompt_ids", "advantages", "reward"),
        may_read=("of_the_group",),
        writes=("reference_chosen",),
        takes=TrainingBatch(whole_groups=True),
        interruptible=True,
    )
    assert declaration.called_with(arguments | {"epochs": 1}).accumulates


def test_constant_declarations_need_no_arguments():
    declaration = Declaration("score", reads=("prompt_ids", REWARD), writes=("score",))
    assert declaration.called_with({}) == Operation(
        "score", reads=("prompt_ids", "reward"), writes=("score",)
    )


def test_an_operation_is_plain_data():
    operation = Declaration("first", Shape.FILTER, lambda by: (by,), takes=Quorum).called_with(
        {"by": "reward", "n": 2, "deadline_s": 5.0}
    )
    assert operation.quorum == Quorum(2, 5.0)
    assert pickle.loads(pickle.dumps(operation)) == operation


@pytest.mark.parametrize(
    ("shape", "takes", "groups", "whole", "updates", "behind"),
    [
        (Shape.MAP, None, False, False, False, False),
        (Shape.EXPAND, ROWS, False, False, False, False),
        (Shape.GROUP, None, True, True, False, False),
        (Shape.EXPAND, GROUPS, True, True, False, False),
        (Shape.FILTER, Quorum(2), True, True, False, False),
        (Shape.GROUP, FINISHED_GROUPS, True, True, False, True),
        (Shape.MAP, TrainingBatch(), True, False, True, False),
        (Shape.MAP, TrainingBatch(whole_groups=True), True, True, True, False),
    ],
)
def test_the_input_kind_of_an_operation_determines_its_claims(
    shape: Shape, takes: Takes | None, groups: bool, whole: bool, updates: bool, behind: bool
):
    operation = Declaration("some", shape, takes=takes).called_with({})
    said = (operation.takes_groups, operation.whole_groups, operation.updates, operation.behind)
    assert said == (groups, whole, updates, behind)
    assert (operation.quorum is not None) == isinstance(takes, Quorum)
    assert not operation.accumulates


def test_only_a_declared_update_accumulates():
    assert Operation("update", takes=TrainingBatch(accumulates=True)).accumulates
    assert not Operation("update", takes=GROUPS).accumulates


def test_a_method_with_rows_is_a_node_and_any_other_is_not():
    assert not Declaration("save").is_node
    parts: list[dict[str, Any]] = [
        {"reads": ("a",)},
        {"may_read": ("a",)},
        {"writes": lambda into: (into,)},
    ]
    parts += [{"takes": TrainingBatch()}, {"shape": Shape.FILTER}]
    for declared in parts:
        assert Declaration("some", **declared).is_node


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"reads": lambda los: los.reads},
            "function: reads depends on 'los', which is not one of its arguments; did you mean 'loss'?",
        ),
        (
            {"may_read": lambda of: (of,)},
            "function: may_read depends on 'of', which is not one of its arguments; there are loss, into, n",
        ),
        (
            {"writes": lambda config: config.into},
            "function: writes depends on 'config', which is not one of its arguments",
        ),
        (
            {"takes": TrainingBatch},
            "function: takes depends on 'whole_groups', which is not one of its arguments",
        ),
        (
            {"takes": True},
            "function: takes is True; it must be ROWS, GROUPS, a Quorum or a TrainingBatch",
        ),
        (
            {"reads": "reward"},
            "function: reads must be a tuple of columns, such as ('reward',), not 'reward'",
        ),
        (
            {"writes": REWARD},
            "function: writes must be a tuple of columns, such as ('reward',), not Column",
        ),
        (
            {"takes": GROUPS},
            "function: a map of complete groups must be declared with shape=Shape.GROUP",
        ),
        (
            {"takes": ROWS, "shape": Shape.GROUP},
            "function: a node of shape GROUP takes groups, not Unit.ROWS",
        ),
        (
            {"takes": Quorum(2)},
            "function: a quorum drops the other rows of its group; declare it with shape=Shape.FILTER",
        ),
    ],
)
def test_a_mistake_in_a_declaration_shows_when_the_function_is_declared(
    declared: dict[str, Any], message: str
):
    with pytest.raises(UserError) as error:
        node(**declared)(function)
    assert str(error.value).startswith(message)


def test_a_method_also_knows_the_configuration_of_its_group():
    declared: Any = remote(
        dispatch=Dispatch.SPLIT_BY_DP, reads=lambda config, epochs: config.reads * epochs
    )(method)
    declaration = declaration_of(declared)
    assert declared is method and declaration is not None
    assert declaration.called_with({"config": Loss(), "epochs": 2}).reads == ("advantages", "reward")
    with pytest.raises(
        UserError,
        match="reads depends on 'rows', which is not one of its arguments; there are loss, epochs, config",
    ):
        remote(dispatch=Dispatch.SPLIT_BY_DP, reads=lambda rows: rows)(method)


def test_wrong_arguments_are_shown_with_their_types():
    declaration = Declaration("update", reads=lambda loss: loss.reads, takes=lambda n: n)
    with pytest.raises(
        UserError,
        match="update: reads cannot be computed from loss=3: 'int' object has no attribute 'reads'",
    ):
        declaration.called_with({"loss": 3, "n": ROWS})
    with pytest.raises(UserError, match="update: takes is 3; it must be ROWS"):
        declaration.called_with({"loss": Loss(), "n": 3})
    with pytest.raises(
        UserError,
        match="update: reads depends on 'loss', which is not one of its arguments; did you mean 'loos'",
    ):
        declaration.called_with(
            {"loos": Loss(), "n": ROWS}
        )  # an overriding method may have other parameters


def test_a_node_is_the_function_itself_when_called_with_a_batch():
    @node(reads=(REWARD,), writes=("twice",))
    def twice(batch: Batch, factor: int = 2) -> Batch:
        """Doubles."""
        return batch.with_columns(twice=batch.numpy("reward") * factor)

    assert twice(Batch.of(reward=[1.0]), factor=3).to_rows() == [{"reward": 1.0, "twice": 3.0}]
    assert twice.__name__ == "twice" and twice.__doc__ == "Doubles."
    declaration = declaration_of(twice)
    assert declaration is not None and declaration.called_with({}) == Operation(
        "twice", Shape.MAP, ("reward",), (), ("twice",)
    )
