"""Configuration: errors give the place, the rule, the value and the nearest correct name."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from pydantic import Field

from weft.dataflow.config import Config
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group


class Inner(Config):
    depth: int = Field(default=1, ge=1)


class Outer(Config):
    learning_rate: float = Field(default=1e-3, gt=0)
    """Step size."""
    model: str | Path
    mode: Literal["fast", "slow"] = "fast"
    inner: Inner = Inner()
    flag: bool = False
    pair: tuple[float, float] | None = None

    @pydantic.field_validator("model")
    @classmethod
    def _not_empty(cls, model: str) -> str:
        if not model:
            raise ValueError("give a folder")
        return model


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"model": "m", "learning_rat": 1},
        "Outer has no setting 'learning_rat' (value 1); did you mean 'learning_rate'?",
    ),
    (
        {"model": "m", "xyz": 1},
        "Outer has no setting 'xyz' (value 1); it has learning_rate, model, mode, inner, flag, pair",
    ),
    ({"model": "m", "learning_rate": -1}, "Outer.learning_rate: input should be greater than 0, not -1"),
    (
        {"model": "m", "learning_rate": "big"},
        "Outer.learning_rate: input should be a valid number, not 'big'",
    ),
    (
        {"model": "m", "learning_rate": "1.0"},
        "Outer.learning_rate: input should be a valid number, not '1.0'",
    ),
    (
        {"model": "m", "learning_rate": True},
        "Outer.learning_rate: input should be a valid number, not True",
    ),
    (
        {"model": "m", "learning_rate": math.inf},
        "Outer.learning_rate: input should be a finite number, not inf",
    ),
    (
        {"model": "m", "learning_rate": math.nan},
        "Outer.learning_rate: input should be a finite number, not nan",
    ),
    ({"model": "m", "flag": 1}, "Outer.flag: input should be a valid boolean, not 1"),
    ({"model": "m", "pair": ("0.9", 0.5)}, "Outer.pair.0: input should be a valid number, not '0.9'"),
    ({"model": "m", "inner": {"depth": True}}, "Inner.depth: input should be a valid integer, not True"),
    ({}, "Outer.model must be given"),
    ({"model": ""}, "Outer.model: give a folder"),
    ({"model": "m", "mode": "fsat"}, "Outer.mode: input should be 'fast' or 'slow', not 'fsat'"),
    (
        {"model": "m", "inner": {"deph": 1}},
        "Inner has no setting 'deph' (value 1); did you mean 'depth'?",
    ),
    (
        {"model": "m", "inner": {"depth": 0}},
        "Inner.depth: input should be greater than or equal to 1, not 0",
    ),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES)
def test_a_mistake_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(UserError) as caught:
        Outer(**settings)
    assert message in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_equal_values_of_other_types_are_taken():
    taken = Outer(model="m", learning_rate=np.float32(0.5), inner={"depth": np.int64(2)}, pair=[1, 2])  # pyright: ignore[reportArgumentType]
    assert (taken.learning_rate, taken.inner.depth, taken.pair) == (0.5, 2, (1.0, 2.0))


def test_every_mistake_is_named_at_once():
    settings: dict[str, Any] = {"learning_rate": -1, "mdoel": "m"}
    with pytest.raises(UserError) as caught:
        Outer(**settings)
    assert len(str(caught.value).splitlines()) == 3


def test_a_configuration_is_frozen_and_travels():
    config = Outer(model="m", inner=Inner(depth=3))
    with pytest.raises(pydantic.ValidationError):
        config.learning_rate = 2.0  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_the_text_under_a_field_is_its_description():
    assert Outer.model_fields["learning_rate"].description == "Step size."


def test_a_worker_class_without_settings_is_refused_with_advice():
    class Bare:
        pass

    for given, named in ((Bare, "Bare"), (Bare(), "<.*Bare object.*>")):
        with pytest.raises(
            UserError,
            match=rf"weft\.group\({named}\): .* derive it from weft.Worker and set `Config = MyConfig`",
        ):
            group(given)  # pyright: ignore[reportArgumentType]
