"""Arguments with a wrong name are answered like every other mistake."""

import inspect
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from weft.dataflow.arguments import names_arguments
from weft.dataflow.errors import UserError


@names_arguments
@dataclass(frozen=True)
class Chair:
    legs: int
    height: float = 0.5


def test_an_argument_that_is_missing_or_misspelt_is_named():
    misspelt: dict[str, Any] = {"heigth": 2}
    with pytest.raises(UserError, match=r"^Chair takes no argument 'heigth' \(value 2\); did you mean 'height'\?$"):
        Chair(4, **misspelt)
    unknown: dict[str, Any] = {"xyz": 2}
    with pytest.raises(UserError, match=r"^Chair takes no argument 'xyz' \(value 2\); it takes legs, height$"):
        Chair(4, **unknown)
    nothing: dict[str, Any] = {}
    with pytest.raises(UserError, match=r"^Chair: missing a required argument: 'legs'; it takes legs, height$"):
        Chair(**nothing)


def test_a_class_that_names_its_arguments_is_otherwise_as_before():
    assert pickle.loads(pickle.dumps(Chair(4))) == Chair(legs=4, height=0.5)
    assert str(inspect.signature(Chair)) == "(legs: int, height: float = 0.5) -> None"
