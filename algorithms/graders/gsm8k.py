"""Gsm8k: the number that a response ends with, against the number of the answer (arXiv:2110.14168)."""

from __future__ import annotations

from typing import ClassVar

from ...dataflow.errors import SampleError
from ...dataflow.prompts.formats import after_hashes
from . import extraction
from .grader import Grader
from .numbers import Quantity, quantity_of


class Gsm8k(Grader):
    """1 when the number of the response is the answer's, otherwise 0; a response without a number has 0.

    The number of a response stands in its last box, after `####`, after "the answer is", or last. The answer is a number, or GSM8K's
    own rationale with the number after `####`.
    """

    is_verdict: ClassVar[bool] = True

    strict: bool = False
    """Only a number after `####` counts, as the data set writes it. Set it so that the form is learned, too."""

    def __call__(self, response: str, answer: str) -> float:
        """Compare the two numbers.

        Raises:
            SampleError: the answer has no number.

        >>> Gsm8k()("18 - 5 = 13, so she has $13.00.", "She has 18 - 5 = 13\\n#### 13")
        1.0
        >>> Gsm8k(strict=True)("The answer is 13.", "13"), Gsm8k(strict=True)("#### 13", "13")
        (0.0, 1.0)
        """
        right = final_number(answer)
        if right is None:
            raise SampleError(f"the answer {answer[:100]!r} has no number")
        text = extraction.final_part(response) or ""
        found = _number_in(after_hashes(text)) if self.strict else final_number(text)
        return float(found is not None and right.equals(found))


def final_number(text: str) -> Quantity | None:
    """The number that a text gives as its answer; None: it has none.

    >>> final_number("It is not 7. The answer is 1,200 apples, 3 of them green.").value
    Fraction(1200, 1)
    """
    for box in reversed(extraction.last_boxes(text)):
        return _number_in(box)
    for found in (after_hashes(text), extraction.after_phrase(text)):
        if (number := _number_in(found)) is not None:
            return number
    return _last(text)


def _number_in(text: str | None) -> Quantity | None:
    """The number of a short text that states an answer."""
    if text is None:
        return None
    part = extraction.stated_part(text)
    return quantity_of(part) or (quantity_of(number) if (number := extraction.first_number(part)) else None)


def _last(text: str) -> Quantity | None:
    number = extraction.last_number(text)
    return quantity_of(number) if number else None
