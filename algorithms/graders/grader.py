"""Grader: base class of graders, and helpers that they share."""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any, ClassVar, Protocol, runtime_checkable

from ...dataflow.config import Config
from ...dataflow.errors import SampleError
from ...dataflow.tracing import refusing_rows


class Grader(Config):
    """Base class of graders: immutable callables that grade one response.

    A reward worker calls it with the columns that its parameters name: `response`, the text, and
    `answer`, the ground truth of the prompt. The answer is always text: `5` for the number 5, JSON
    for a list or an object.

    >>> class Shouts(Grader):
    ...     mark: str = "!"
    ...
    ...     def __call__(self, response: str) -> float:
    ...         return float(response.endswith(self.mark))
    >>> Shouts()("Eureka!")
    1.0
    >>> class Same(Grader):
    ...     def __call__(self, response: str, answer: str) -> float:
    ...         return float(response == answer)
    >>> Same()("5", 5), Same()("[1, 2]", [1, 2])
    (1.0, 1.0)
    """

    is_verdict: ClassVar[bool] = False
    """Whether grades are 1 or 0, so that an evaluation can report pass@k."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        _take_any_answer(cls)
        refusing_rows(cls)


@runtime_checkable
class FindsAnswers(Protocol):
    """A grader that finds final answers, so that an evaluation can count votes (maj@k)."""

    def final_answer(self, response: str) -> str | None:
        """Return the final answer of a response, in a form that is equal for equal answers; None if
        it has none."""
        ...


def from_json(value: Any) -> Any:
    """Return the value of JSON text; other values, and text that is not JSON, stay as they are.

    >>> from_json("[1]"), from_json("a"), from_json(None)
    ([1], 'a', None)
    """
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _take_any_answer(cls: type[Grader]) -> None:
    own: Any = vars(cls).get("__call__")
    if own is None or "answer" not in inspect.signature(own).parameters:
        return
    signature = inspect.signature(own)

    # A reward worker reads the required columns from the signature, which `wraps` keeps.
    @functools.wraps(own)
    def graded(*arguments: Any, **named: Any) -> float:
        given = signature.bind(*arguments, **named)
        has_default = signature.parameters["answer"].default is not inspect.Parameter.empty
        # A null in the column selects the default of an answer that has one.
        if given.arguments.get("answer", "") is None and has_default:
            del given.arguments["answer"]
        if "answer" in given.arguments:
            given.arguments["answer"] = answer_text(given.arguments["answer"])
        return own(*given.args, **given.kwargs)

    cls.__call__ = graded  # pyright: ignore[reportAttributeAccessIssue]


def answer_text(answer: object) -> str:
    """Return an answer as text. Raises a SampleError if it is missing.

    >>> answer_text(5), answer_text(0.5), answer_text(True), answer_text({"a": [1]})
    ('5', '0.5', 'True', '{"a": [1]}')
    """
    if answer is None:
        raise SampleError("the row has no answer")
    return json.dumps(answer) if isinstance(answer, list | dict) else str(answer)
