"""Graders of text: the same words, the same bag of words (F1), or what a regular expression finds."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import ClassVar

import pydantic

from ...dataflow.errors import SampleError
from ...dataflow.prompts.formats import after_hashes
from . import extraction
from .grader import Grader

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation + "«»“”‘’¿¡")


def normalized(text: str) -> str:
    """Words in lower case without punctuation and articles, as SQuAD compares them (arXiv:1606.05250, §6.1).

    >>> normalized("  The Eiffel-Tower, Paris! ")
    'eiffeltower paris'
    """
    return " ".join(_ARTICLES.sub(" ", text.casefold().translate(_PUNCTUATION)).split())


class Exact(Grader):
    """1 when the final answer of the response is the answer, otherwise 0.

    The final answer is what follows the reasoning: a box, what stands after "the answer is", or all of it.
    """

    is_verdict: ClassVar[bool] = True

    normalize: bool = True
    """Case, punctuation, articles and spaces do not matter. Set it to False where they do."""

    def __call__(self, response: str, answer: str) -> float:
        """Compare the texts.

        >>> Exact()("The answer is Paris.", "paris"), Exact(normalize=False)("paris", "Paris")
        (1.0, 0.0)
        """
        brought = normalized if self.normalize else str.strip
        return float(any(brought(text) == brought(answer) for text in _candidates(response)))


class F1(Grader):
    """Harmonic mean of precision and recall of the response's words against the answer's (SQuAD, arXiv:1606.05250, §6.1)."""

    def __call__(self, response: str, answer: str) -> float:
        """The best F1 of the final answer, 0 to 1.

        >>> F1()("in Paris, France", "Paris")
        0.5
        """
        return max(self._of(text, answer) for text in _candidates(response))

    def _of(self, text: str, answer: str) -> float:
        mine, theirs = Counter(normalized(text).split()), Counter(normalized(answer).split())
        if not mine or not theirs:
            return float(mine == theirs)
        common = (mine & theirs).total()
        return 2 * common / (mine.total() + theirs.total())


class RegularExpression(Grader):
    """1 when a regular expression is found in the response, otherwise 0. A group that it has must be the answer."""

    is_verdict: ClassVar[bool] = True

    pattern: str
    """Python's syntax. With a group, its last match is compared with the answer. Give it; there is no default."""

    @pydantic.field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            if re.compile(pattern).groups > 1:
                raise ValueError(
                    f"{pattern!r} has several groups; one is compared with the answer: write (?:...) for the others"
                )
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return pattern

    def __call__(self, response: str, answer: str = "") -> float:
        r"""Look for the pattern.

        >>> RegularExpression(pattern=r"Answer: (\w+)")("Answer: B", "B"), RegularExpression(pattern=r"^\d+$")("about 7")
        (1.0, 0.0)
        """
        found = list(re.finditer(self.pattern, response, re.MULTILINE))
        if not found:
            return 0.0
        if not found[-1].re.groups:
            return 1.0
        if not answer.strip():
            raise SampleError("the row has no answer")
        return float((found[-1][1] or "").strip() == answer.strip())


def _candidates(response: str) -> tuple[str, ...]:
    """Possible final answers, at least one."""
    text = (extraction.final_part(response) or "").strip()
    if boxed := extraction.last_boxes(text):
        return (", ".join(boxed),)
    said = after_hashes(text) or extraction.after_phrase(text)
    return (text, said) if said else (text,)
