"""Finds the final answer in a response: after the reasoning, in a box, after "the answer is", or last.

All are functions of text alone. They scan once, so that a response of 100,000 characters costs no more than its length. Boxes and
`####`, which worked solutions have too, are found by `dataflow/prompts/answer_marks.py`.
"""

from __future__ import annotations

import re
from itertools import pairwise

from ...dataflow.prompts.answer_marks import boxes

_PHRASE = re.compile(
    r"(?:(?:final\s+answer|correct\s+answer|answer)\**\s*(?:(?:is|are|was|=)\b\**\s*:?|[:：])"
    r"|答案\**\s*(?:[是为為]\s*[:：]?|[:：]))\**\s*(?P<answer>[^\n]+)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![\w.,])[-+−]?\d+(?:,\d+)*(?:\.\d+)?(?:\s?/\s?\d+)?|(?<![\w.])[-+−]?\.\d+")
_END_OF_SENTENCE = re.compile(r"。|(?<=[^\d\s])\.\s|\.\s+(?=[A-Z])|\.\s*$")
TAIL = 2000
"""Characters at the end of a response in which an answer without a box is looked for."""


def without_reasoning(response: str) -> str:
    """What follows the last `</think>`; all of it where there is none, or nothing follows.

    >>> without_reasoning("<think>41? No.</think> It is 42.")
    ' It is 42.'
    """
    _, found, rest = response.rpartition("</think>")
    return rest if found and rest.strip() else response


def last_boxes(text: str) -> tuple[str, ...]:
    r"""The last box, with those before it that stand in one list with it: `\boxed{1} and \boxed{2}`.

    >>> last_boxes(r"\boxed{3}? No. So \boxed{1} and \boxed{2}.")
    ('1', '2')
    """
    found = boxes(text)
    first = len(found) - 1
    for (_, end, _), (start, _, _) in reversed(list(pairwise(found))):
        between = text[end:start]
        words = re.findall(r"(?<!\\)\b[a-zA-Z]{2,}", between)
        if len(between) > 60 or len(words) > 5 or re.search(r"[.?!:]\s|\bthen\b|\bno\b|\bwait\b|\n\n", between, re.I):
            break
        first -= 1
    return tuple(content.strip() for _, _, content in found[max(first, 0) :])


def is_cut_in_box(text: str) -> bool:
    r"""Whether a response ends inside a box.

    >>> is_cut_in_box(r"so it is \boxed{42"), is_cut_in_box(r"\boxed{42}")
    (True, False)
    """
    return "}" not in text[text.rfind(r"\boxed{") :] if r"\boxed{" in text else False


def after_phrase(text: str) -> str | None:
    """What follows the last "the answer is" or "Answer:", to the end of the sentence.

    >>> after_phrase("So the answer is **$3.50**. I hope that helps.")
    '$3.50'
    """
    found = _PHRASE.findall(text[-TAIL:])
    if not found:
        return None
    sentence = _END_OF_SENTENCE.split(found[-1].strip(), maxsplit=1)[0]
    return sentence.strip().strip("*`\"' ").rstrip(".*") or None


_CONCLUSION = re.compile(r"\b(?:so|thus|hence|therefore)\b", re.IGNORECASE)
_RATIO = re.compile(r"(?<![\w.:])\d+(?:\s*:\s*\d+)+(?![\w:])")


def conclusion(text: str) -> str | None:
    """What follows the last "so", "thus", "hence" or "therefore", if it is a number, and at most a word.

    >>> conclusion("between 7 and 9, so 8"), conclusion("42, so 41 was wrong")
    (' 8', None)
    """
    *before, last = _CONCLUSION.split(text)
    return last if before and re.fullmatch(r"[\W_]*\d[^\sa-zA-Z]*(?:\s+\w+)?[\s.]*", last) else None


def last_ratio(text: str) -> str | None:
    """The last ratio of a text.

    >>> last_ratio("from 1:2 to 3 : 4.")
    '3 : 4'
    """
    found = _RATIO.findall(text[-TAIL:])
    return found[-1] if found else None


def first_number(text: str) -> str | None:
    """The first number of a text, written as `last_number` has it."""
    found = _NUMBER.search(text)
    return found.group().strip() if found else None


def last_number(text: str) -> str | None:
    """The last number, with its sign, separators and denominator.

    >>> last_number("12 of them cost $1,234.50, not $-3/4 each.")
    '-3/4'
    """
    found = [match.group() for match in _NUMBER.finditer(text[-TAIL:])]
    return found[-1].strip() if found else None
