"""Math: whether the final answer of a response equals the answer, as formulas are compared."""

from __future__ import annotations

from typing import ClassVar

import pydantic

from . import math_process
from .grader import Grader


class Math(Grader):
    r"""1 when the final answer of the response equals the answer, otherwise 0; by `math-verify`, after rules for numbers, units and words.

    The final answer stands in the last `\boxed{}`, after `####`, after "the answer is", or last. The answer may be bare (`\frac{1}{2}`)
    or a solution that ends with it.

    The work is done in a process of its own, which each process that grades has one of. It starts at the first use, and is ended and
    replaced when it takes too long or too much memory.
    """

    is_verdict: ClassVar[bool] = True

    deadline_s: float = pydantic.Field(default=10.0, gt=0)
    """[s] Time that a comparison may take. Raise it for answers that take long to simplify."""

    def prepare(self) -> None:
        """Start the process, so that the first response does not wait for it."""
        math_process.compare("1", "1", math_process.START_S)

    def __call__(self, response: str, answer: str) -> float:
        r"""Grade a response.

        Raises:
            SampleError: the comparison took too long, its process ended, or the answer is empty. It is no verdict: a reward worker
                counts a failed sample.
        """
        return float(math_process.compare(response, answer, self.deadline_s))
