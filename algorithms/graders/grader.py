"""Grader: what all graders are."""

from __future__ import annotations

from ...dataflow.config import Config


class Grader(Config):
    """A frozen value that grades one response. A reward worker calls it like any other function, with the columns that its parameters
    name: `response`, the text, and `answer`, the ground truth that came with the prompt.

    >>> class Shouts(Grader):
    ...     mark: str = "!"
    ...
    ...     def __call__(self, response: str) -> float:
    ...         return float(response.endswith(self.mark))
    >>> Shouts()("Eureka!")
    1.0
    """
