"""Configuration classes: frozen pydantic models, defined next to the classes they configure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

import numpy as np
import pydantic

from .errors import SettingError, nearest
from .peer_names import peer_hint


class Config(pydantic.BaseModel):
    """Base of all configuration classes: frozen and strict, with hints for unknown settings.

    Fields reject text for numbers and numbers for text. Numbers must be finite unless the field
    sets `Field(allow_inf_nan=True)`. Fields accept lists for tuples, mappings for nested settings,
    and numpy numbers for Python numbers.

    >>> class Toy(Config):
    ...     rate: float = pydantic.Field(1.0, gt=0)
    >>> Toy(rtae=2)
    Traceback (most recent call last):
    weft.dataflow.errors.SettingError: Toy has no setting 'rtae' (value 2); did you mean 'rate'?
    >>> Toy(rate=-1)
    Traceback (most recent call last):
    weft.dataflow.errors.SettingError: Toy.rate: input should be greater than 0, not -1
    """

    retired: ClassVar[Mapping[str, str]] = {}
    """Maps former names of settings to advice on what to use instead."""
    free_on_resume: ClassVar[frozenset[str]] = frozenset()
    """Settings that a resumed run may change, because they do not affect results."""
    fixed_on_resume: ClassVar[frozenset[str]] = frozenset()
    """Settings that a resumed run may not change, because checkpoints depend on them."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except pydantic.ValidationError as error:
            problems = error.errors()
            told = [(".".join(map(str, each["loc"])), self.problem(each)) for each in problems]
            text = "\n".join(self._explain(problem) for problem in problems)
            raise SettingError(text, type(self).__name__, told) from None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_equal_types(cls, settings: Any) -> Any:
        """Convert lists, mappings and numpy numbers to the types that strict mode requires."""
        if not isinstance(settings, Mapping):
            return settings
        return {name: _of_kind(value, cls.model_fields.get(name)) for name, value in settings.items()}

    @classmethod
    def _explain(cls, problem: Any) -> str:
        path = ".".join(str(part) for part in problem["loc"])
        match problem["type"]:
            case "extra_forbidden":
                hint = cls.hint(path)
                return f"{cls.__name__} has no setting {path!r} (value {problem['input']!r}){hint}"
            case "missing":
                return f"{cls.__name__}.{path} {cls.problem(problem)}"
            case _:
                return f"{cls.__name__}{'.' + path if path else ''}: {cls.problem(problem)}"

    @classmethod
    def resume_rules(cls) -> tuple[frozenset[str], frozenset[str]]:
        """Return (`free_on_resume`, `fixed_on_resume`) of the class and its parents."""
        # An attribute of `cls` hides those of its parents, so read each class's own value.
        parents = [vars(each) for each in cls.__mro__]
        free, fixed = (
            frozenset().union(*(each.get(name, ()) for each in parents))
            for name in ("free_on_resume", "fixed_on_resume")
        )
        return free, fixed

    @classmethod
    def hint(cls, name: str) -> str:
        """Return a suffix for the error about an unknown setting: what to use instead."""
        # A subclass's `retired` hides its parent's, so check each class.
        for each in cls.__mro__:
            if gone := vars(each).get("retired", {}).get(name):
                return f"; {gone}"
        known = list(cls.model_fields)
        return peer_hint(name, known) or nearest(name, known) or f"; it has {', '.join(known)}"

    @staticmethod
    def problem(problem: Any) -> str:
        """Return the message for pydantic's validation error, with the rejected value and, for a
        choice, the closest allowed value."""
        message, value = problem["msg"][:1].lower() + problem["msg"][1:], problem["input"]
        match problem["type"]:
            case "missing":
                return "must be given"
            case "value_error":  # raised by a validator of Weft, whose message is complete
                return str(problem["ctx"]["error"])
            case "literal_error":
                # pydantic lists the allowed values as text: "'a', 'b' or 'c'".
                allowed = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
                return f"{message}, not {value!r}{nearest(str(value), allowed)}"
            case _:
                return f"{message}, not {value!r}"


def _of_kind(value: Any, field: Any) -> Any:
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    if kinds and get_origin(kinds[0]) is dict:  # the names are data
        return value
    if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    # Strict mode rejects text for a path.
    if isinstance(value, str) and Path in kinds and str not in kinds:
        return Path(value)
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if isinstance(value, Mapping):
        inner = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)), None
        )
        return value if inner is None else inner(**value)
    return value


def flattened(settings: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one mapping with dotted names, which start with `name`.

    >>> flattened({"schedule": {"steps": 3}, "seed": 0, "graphs": ["a"]})
    {'schedule.steps': 3, 'seed': 0, 'graphs': ['a']}
    """
    if not isinstance(settings, Mapping):
        return {name: settings}
    found: dict[str, Any] = {}
    for key, inner in settings.items():
        found |= flattened(inner, f"{name}.{key}" if name else key)
    return found
