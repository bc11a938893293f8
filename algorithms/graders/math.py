"""Math and Gsm8k: grade the final answer of a response as a formula or a number."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from typing import ClassVar

from ...dataflow.child_process import ChildProcess
from ...dataflow.errors import SampleError
from ...dataflow.prompts.answers import after_hashes
from . import extraction
from .grader import Grader
from .numbers import Quantity, key, quantity_of

# Comparing formulas
#
# Each grading process compares formulas in a child process (`math_program.py`), because math-verify
# may not terminate. The child starts at the first comparison, and is replaced after a kill. Time
# limits use no signals, so any thread may grade.

DEADLINE_S = 10.0
"""[s] Time limit of a comparison."""
START_S = 120.0
"""[s] Time limit for importing math-verify."""
LONGEST_VOTE = 1000
"""[characters] Longest part of a final answer that counts in a vote."""
MAX_CHARACTERS = 200_000
"""Characters to read at the end of a response."""


class _MathProcess:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None

    def compare(self, response: str, answer: str, deadline_s: float) -> bool:
        """Compare with `equality.is_right`. Raises a SampleError if the comparison took too long or
        failed, or if the process ended."""
        request = {"response": response[-MAX_CHARACTERS:], "answer": answer, "deadline_s": deadline_s}
        with self._lock:
            child = self._child or self._start()
            try:
                reply = child.ask(request, deadline_s)
            except TimeoutError:
                self.kill()
                raise SampleError(
                    f"the comparison with {_short(answer)} took longer than {deadline_s:g} s"
                ) from None
            except (EOFError, OSError):
                status = self.kill()
                raise SampleError(
                    f"the process that compares formulas ended ({status}) at {_short(answer)}"
                ) from None
            except BaseException:  # interrupted: the next request must not read this reply
                self.kill()
                raise
        if "error" in reply:
            raise SampleError(reply["error"])
        return bool(reply["right"])

    def kill(self) -> str:
        child, self._child = self._child, None
        return "not started" if child is None else child.kill()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def _start(self) -> ChildProcess:
        name = f"{__package__}.math_program"
        self._child = child = ChildProcess(name)
        try:
            child.receive(START_S)
        except (TimeoutError, EOFError, OSError):
            raise SampleError(
                f"`{sys.executable} -m {name}` did not start: {self.kill()}; is math-verify installed?"
            ) from None
        return child


PROCESS = _MathProcess()
atexit.register(PROCESS.kill)
# A fork must not use its parent's process.
os.register_at_fork(after_in_child=lambda: PROCESS.__init__())


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


class Math(Grader):
    r"""1 if the final answer of the response equals the answer, otherwise 0.

    Rules compare numbers, units and words; `math-verify` compares formulas. The final answer is in
    the last `\boxed{}`, after `####`, after "the answer is", or at the end. The `answer`
    column may hold only the answer (`\frac{1}{2}`), or a solution that ends with it.

    Comparisons run in a child process, which is replaced if one takes too long or too much memory.
    """

    is_verdict: ClassVar[bool] = True

    retired: ClassVar[Mapping[str, str]] = {"deadline_s": f"a comparison may take {DEADLINE_S:g} s"}

    def prepare(self) -> None:
        """Start the process, so that the first response does not wait for it."""
        PROCESS.compare("1", "1", START_S)

    def __call__(self, response: str, answer: str) -> float:
        r"""Grade a response. Raises a SampleError, which a reward worker counts as a failed sample,
        if the comparison took too long, the process ended, or the answer is empty."""
        return float(PROCESS.compare(response, answer, DEADLINE_S))

    def final_answer(self, response: str) -> str | None:
        r"""Formulas are equal if they differ only in notation.

        >>> [Math().final_answer(text) for text in (r"So \boxed{\frac12}.", "The answer is 0.5.", r"\boxed{ x + 1 }")]
        ['1/2', '1/2', 'x+1']
        """
        text = extraction.final_part(response[-MAX_CHARACTERS:]) or ""
        boxed = extraction.last_boxes(text)
        said = ", ".join(boxed) if boxed else after_hashes(text) or extraction.after_phrase(text)
        if said is None:
            said = extraction.last_number(text) or ""
        said = extraction.stated_part(said[:LONGEST_VOTE])
        quantity = quantity_of(said)
        return quantity.text if quantity else key(said) or None


class Gsm8k(Grader):
    """1 if the final number of the response equals the answer's, otherwise 0 (arXiv:2110.14168).

    The final number is in the last box, after `####` or "the answer is", or is the last number. The
    answer is a number, or GSM8K's rationale with the number after `####`.
    """

    is_verdict: ClassVar[bool] = True

    strict: bool = False
    """Accept only a number after `####`, the format of GSM8K's answers. Set it to teach that
    format."""

    def __call__(self, response: str, answer: str) -> float:
        """Compare the two numbers. Raises a SampleError if the answer has no number.

        >>> Gsm8k()("18 - 5 = 13, so she has $13.00.", "She has 18 - 5 = 13\\n#### 13")
        1.0
        >>> Gsm8k(strict=True)("The answer is 13.", "13"), Gsm8k(strict=True)("#### 13", "13")
        (0.0, 1.0)
        """
        right = final_number(answer)
        if right is None:
            raise SampleError(f"the answer {answer[:100]!r} has no number")
        found = self._number(response)
        return float(found is not None and right.equals(found))

    def final_answer(self, response: str) -> str | None:
        """
        >>> Gsm8k().final_answer("5 + 8 = 13, so it is $13.00.")
        '13'
        """
        found = self._number(response)
        return None if found is None else found.text

    def _number(self, response: str) -> Quantity | None:
        text = extraction.final_part(response) or ""
        return _number_in(after_hashes(text)) if self.strict else final_number(text)


def final_number(text: str) -> Quantity | None:
    """Return the number that a text gives as its answer, or None.

    >>> final_number("It is not 7. The answer is 1,200 apples, 3 of them green.").value
    Fraction(1200, 1)
    """
    for box in reversed(extraction.last_boxes(text)):
        return _number_in(box)
    for found in (after_hashes(text), extraction.after_phrase(text)):
        # Texts such as "#### none" have no number here.
        if (number := _number_in(found)) is not None:
            return number
    return quantity_of(extraction.last_number(text) or "")


def _number_in(text: str | None) -> Quantity | None:
    part = extraction.stated_part(text or "")
    return quantity_of(part) or quantity_of(extraction.first_number(part) or "")
