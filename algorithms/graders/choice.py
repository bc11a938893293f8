"""MultipleChoice: grades the option that a response chooses."""

from __future__ import annotations

import re
from typing import ClassVar

from ...dataflow.errors import SampleError
from . import extraction
from .grader import Grader
from .numbers import plain

_CORRECT = r"(?:correct|right|best|true|accurate|valid|appropriate)"
_WRONG = (
    r"(?:wrong|incorrect|false|impossible|out|eliminated|excluded|invalid|ruled\s+out"
    r"|not\s+(?:the\s+)?(?:\w+\s+)?(?:correct|right|true|best|possible|an\s+option|answer|it)\b)"
)
_ADVERB = r"(?i:for\s+sure|definitely|clearly|thus|therefore|probably|most\s+likely|likely|indeed|option|choice|letter|number)"


def _patterns(keys: str) -> dict[str, re.Pattern[str]]:
    """Return the expressions that find an option; `keys` is a range of uppercase letters or
    digits."""
    bare = rf"(?-i:[{keys}])(?!\)?[\w'’]|[.,/:]\d|\s*[-+*/=^%]\s*\d)"
    small = rf"(?-i:[{keys.lower()}])"
    key = rf"\s*\**\s*\(?\s*\**(?P<key>{bare}|(?<=\(){small}(?=\))|{small}(?=\)|\**\s*(?:[.,;:!]?\s*$|[.,;:!]\s)))\)?\**"
    option = rf"(?:\(|\b(?:options?|choices?|answers?|letter|statement)\s+\(?|(?<![\w'’\\(]))(?P<key>{bare}|(?<=\(){small}(?=\)))\)?"
    any_option = option.replace("?P<key>", "?:")
    flags = re.IGNORECASE | re.MULTILINE
    return {
        "said": re.compile(
            r"(?:\b(?:answers?|(?:correct|right|best|final|my)\s+(?:option|choice|letter|statement|one)|choose|chose|pick|select|go(?:ing)?\s+with"
            r"|réponse|respuesta|antwort)\b|答案)\**"
            r"(?:\s+(?:to|for|of)\s+[^.\n:]{1,60}?(?=\s+(?:is|are|was)\b))?\s*\**\s*(?:(?:(?:is|are|was|est|es|ist)\b|(?:must|should|would|will|has\s+to)\s+be\b)|[是为為])?"
            rf"(?:\s*{_ADVERB})*\s*[:：=]?\s*\**\s*[:：=]?\s*{key}",
            flags,
        ),
        "right": re.compile(
            rf"{option}\**\s*(?:is|seems|must\s+be|looks)\s+(?:\w+ly\s+)?(?:the\s+|an?\s+)?(?:{_CORRECT}|only|answer)\b",
            flags,
        ),
        "named": re.compile(rf"\b(?:option|choice)\b\s*(?:is\b)?\s*[:=]?\s*{key}", flags),
        "its": re.compile(
            rf"\b(?:it['’]?s|it\s+is|is|be|so|with|therefore|thus|hence|leaves|leaving)\s*,?\s*:?\s*\**\s*(?:option|choice)?{key}",
            flags,
        ),
        "start": re.compile(rf"^\s*\**{key}\**\s*(?:[.):,;。、，—–-]|\s|$|[^\x00-\x7f])", flags),
        "alone": re.compile(
            rf"(?<![\w'’\\])\(?(?P<key>{bare}|(?<=\(){small}(?=\)))\)?(?![\w'’])", flags
        ),
        "wrong": re.compile(
            rf"(?:{any_option}(?:\s*,\s*|\s*,?\s+(?:and|or|nor)\s+)){{0,9}}{any_option}(?:\s+\([^)\n]*\))?\s+"
            rf"(?:(?:is|are|was|were|seems?|looks?|must\s+be|would\s+be|can\s+be)\s+(?:(?:also|both|all|\w+ly)\s+)?{_WRONG}"
            r"|(?:is|are|does|do|can|could|was|would|will)n['’]t\b|cannot|can\s+not|does\s+not|do\s+not|fails?\b|contradicts?\b|violates?\b|ignores?\b)",
            flags,
        ),
        "ruled_out": re.compile(
            r"\b(?:eliminat(?:e|es|ed|ing)|exclud(?:e|es|ed|ing)|reject(?:s|ed|ing)?|rul(?:e|es|ed|ing)\s+out|discard(?:s|ed|ing)?)\s+"
            rf"(?:{any_option}(?:\s*,\s*|\s*,?\s+(?:and|or)\s+)?){{1,9}}",
            flags,
        ),
    }


_LETTERS, _NUMBERS = _patterns("A-J"), _patterns("1-9")


def letter_of(response: str, *, numbers: bool = False) -> str | None:
    r"""Return the option that a response gives as its answer, in upper case, or None. Options are
    the letters A to J or the numbers 1 to 9.

    Looks in boxes and `<answer>` first, then for "the answer is C", then at the start and end of
    the response. Ignores options that the response rejects ("it isn't C", "B is wrong").

    >>> letter_of(r"It cannot be B, so \boxed{\text{(C)}}."), letter_of("The answer is (d) Paris."), letter_of("A good question")
    ('C', 'D', None)
    """
    patterns = _NUMBERS if numbers else _LETTERS
    text = extraction.final_part(_in_short_runs(response))
    if text is None:
        return None
    for content in reversed(extraction.last_boxes(text)):
        inside = plain(content)
        return (
            _at_start(inside, patterns)
            # Looking into a box that is the whole text would never end.
            or (inside != text and letter_of(inside, numbers=numbers))
            or None
        )
    denied = extraction.denied_letters(response)
    text = patterns["ruled_out"].sub("", patterns["wrong"].sub("", text))
    for name in ("said", "right", "named"):
        if key := _last(name, text, patterns):
            return key
    if (key := _at_start(text, patterns)) is not None:
        return key
    lines = [line for line in text.splitlines() if line.strip()]
    if key := _last("its", lines[-1] if lines else "", patterns):
        return key
    for line in reversed(lines[-3:]):
        if (key := _at_start(line, patterns)) is not None:
            return key
    if key := _last("its", text, patterns):
        return key
    found = patterns["alone"].finditer(lines[-1]) if lines else ()
    alone = [match["key"].upper() for match in found if _is_key(match, lines[-1])]
    alone = [key for key in alone if key not in denied]
    # A lone A or I is more often a word than an option.
    return alone[-1] if len(set(alone)) == 1 and alone[-1] not in "AI" else None


def _in_short_runs(text: str) -> str:
    """Shorten long runs of spaces and stars, which would make the expressions slow."""
    return re.sub(r"\*{3,}", "**", re.sub(r"\s+", lambda run: "\n" if "\n" in run[0] else " ", text))


def _is_key(found: re.Match[str], text: str) -> bool:
    """Return whether a matched character names an option, unlike in "A good question" and "3
    apples"."""
    key, rest = found["key"], text[found.end("key") :]
    if key in "AI" or key.isdigit():
        return not re.match(r"\s+(?!because|since|as|for|by|and|is)[a-z]", rest)
    return True


def _last(name: str, text: str, patterns: dict[str, re.Pattern[str]]) -> str | None:
    found = [match["key"] for match in patterns[name].finditer(text) if _is_key(match, text)]
    return found[-1].upper() if found else None


def _at_start(text: str, patterns: dict[str, re.Pattern[str]]) -> str | None:
    found = patterns["start"].match(text + " ")
    return found["key"].upper() if found and _is_key(found, text) else None


class MultipleChoice(Grader):
    """1 for the answer's option, otherwise 0. Options: A to J, or 1 to 9."""

    is_verdict: ClassVar[bool] = True

    def __call__(self, response: str, answer: str) -> float:
        """Compare a response with an answer such as "C", "(c)", "(C) Paris" or "3".

        >>> MultipleChoice()("Answer: (B)", "B"), MultipleChoice()("I would say that it is C.", "(B) Rome")
        (1.0, 0.0)
        >>> MultipleChoice()("The answer is (3).", "3")
        1.0
        """
        right, numbers = letter_of(answer), False
        if right is None:
            right, numbers = letter_of(answer, numbers=True), True
        if right is None:
            raise SampleError(
                f"the answer {answer[:100]!r} names no option: no letter from A to J and no number from 1 to 9"
            )
        return float(letter_of(response, numbers=numbers) == right)

    def final_answer(self, response: str) -> str | None:
        return letter_of(response) or letter_of(response, numbers=True)
