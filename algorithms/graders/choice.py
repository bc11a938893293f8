"""MultipleChoice: the letter that a response settles on."""

from __future__ import annotations

import re

from ...dataflow.errors import SampleError
from . import extraction
from .grader import Grader
from .latex import plain

_LETTER = r"\(?\s*\**\(?(?P<letter>[A-J])\)?\**(?![a-zA-Z'’0-9])"
_ADVERB = r"(?i:for sure|definitely|clearly|thus|therefore|probably|most likely|likely|indeed|option|choice|letter)"
_SAID = re.compile(
    r"\b(?:answers?|option|choice|choose|pick|select|réponse|respuesta|antwort)\b\**\s*(?:(?i:is|are|was|est|es|ist)\b)?"
    rf"(?:\s*{_ADVERB})*\s*[:=]?\s*\**\s*[:=]?\s*{_LETTER}",
    re.IGNORECASE,
)
_ITS = re.compile(rf"\b(?:it['’]?s|it is|is|be|so|with|therefore|thus|hence|choose|pick|select)\s*:?\s*\**\s*{_LETTER}")
_START = re.compile(rf"^\s*\**{_LETTER}\**\s*(?:[.):,。、，]|\s|$|[^\x00-\x7f])")
_ALONE = re.compile(r"(?<![\w'’\\])\(?(?P<letter>[A-J])\)?(?![\w'’])")


def letter_of(response: str) -> str | None:
    r"""The letter, A to J, that a response gives as its answer; None: it gives none.

    A box counts most, then "the answer is C", then a letter that begins or ends the response.

    >>> letter_of(r"It cannot be B, so \boxed{\text{(C)}}."), letter_of("The answer is (D) Paris."), letter_of("A good question")
    ('C', 'D', None)
    """
    text = _in_short_runs(extraction.without_reasoning(response).strip())
    for content in reversed(extraction.last_boxes(text)):
        return _at_start(plain(content))
    for letter in reversed(_SAID.findall(text)):
        if letter.isupper():
            return letter
    if (letter := _at_start(text)) is not None:
        return letter
    lines = [line for line in text.splitlines() if line.strip()]
    if its := _ITS.findall(lines[-1] if lines else ""):
        return its[-1]
    for line in reversed(lines[-3:]):
        if (letter := _at_start(line)) is not None:
            return letter
    if its := _ITS.findall(text):
        return its[-1]
    alone = _ALONE.findall(lines[-1]) if lines else []
    return alone[-1] if len(set(alone)) == 1 and alone[-1] not in "AI" else None


def _in_short_runs(text: str) -> str:
    """The text without long runs of spaces and of stars, at which the expressions above would take for ever."""
    return re.sub(r"\*{3,}", "**", re.sub(r"\s+", lambda run: "\n" if "\n" in run[0] else " ", text))


def _at_start(text: str) -> str | None:
    found = _START.match(text + " ")
    if found is None:
        return None
    letter, rest = found["letter"], text[found.end("letter") :]
    if letter in "AI" and re.match(r"\s+[a-z]", rest):  # "A good question", "I think"
        return None
    return letter


class MultipleChoice(Grader):
    """1 when the response settles on the answer's letter, A to J; 0 when on another, or on none."""

    def __call__(self, response: str, answer: str) -> float:
        """Compare the letter of a response with that of the answer: "C", "(C)" or "(C) Paris".

        Raises:
            SampleError: the answer has no letter.

        >>> MultipleChoice()("Answer: (B)", "B"), MultipleChoice()("I would say that it is C.", "(B) Rome")
        (1.0, 0.0)
        """
        right = letter_of(answer)
        if right is None:
            raise SampleError(f"the answer {answer[:100]!r} names no letter from A to J")
        return float(letter_of(response) == right)
