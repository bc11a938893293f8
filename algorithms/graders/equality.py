"""Equality of two mathematical answers. It imports `math-verify` and sympy, may take for ever, and belongs into a process that can be
killed (`math_process.py`); model text is parsed, never evaluated."""

from __future__ import annotations

import itertools
import logging
import math
import re
from functools import cache
from typing import Any

from ...dataflow.prompts.answer_marks import after_hashes
from . import choice, extraction
from .latex import is_words, key, plain, without_unit
from .numbers import UNIT_NAMES, quantity_of, with_decimal_comma

LOG = logging.getLogger(__name__)

LONGEST_ANSWER = 2000
"""Characters of an answer that is compared as a formula, and 20 more for each of the right one."""
LARGEST_DIGITS = 50_000
"""Digits of the largest power or factorial that is worked out."""
_TOWER = re.compile(r"(\d+)\s*(?:\^|\*\*)\s*[{(]*\s*(?=\d)")
_FACTORIAL = re.compile(r"(\d+)\s*(!+)")
_FACTORIAL_OF_FORMULA = re.compile(r"\^[^()]*\)\s*!|!\s*\)\s*!")
_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_FUNCTIONS = re.compile(
    r"(?<![\\a-zA-Z])(sqrt|pi|infinity|infty|sin|cos|tan|log|ln|exp|alpha|beta|theta|cdot|times|leq|geq|pm|cup)\b"
)
_UNIT = re.compile(
    rf"(?<=\\pi)\s*(?P<unit>(?:(?:square|cubic|sq|cu)\.?\s+)?(?:units?|m|{'|'.join(UNIT_NAMES)})\s*(?:\^\s*\{{?\s*[23]\s*\}}?)?)\s*$"
)
"""A unit after a multiple of pi; `numbers.quantity_of` knows those of numbers."""
_MULTIPLE_OF_PI = re.compile(r"([-−]?[\d.,/√()]*\s*π[^.\n]{0,20})\.?\s*$")
_CALL = re.compile(r"\\(sqrt|exp)\s*\(([^()]*)\)")


def is_right(response: str, answer: str) -> bool:
    r"""Whether the final answer of a response is the answer.

    Args:
        response: what the model wrote: a box, `#### 42`, "the answer is 42", or the bare answer.
        answer: the right one, bare or as a solution that ends with it.

    Raises:
        ValueError: the answer is empty, or the two cannot be compared because of their size.

    >>> is_right(r"So it is \boxed{\frac{2}{4}}.", "0.5"), is_right(r"\boxed{5}, no, \boxed{6}", "5")
    (True, False)
    """
    gold = _gold(answer)
    if not plain(gold):
        raise ValueError(f"the answer {answer[:100]!r} is empty")
    text = extraction.without_reasoning(response).strip()
    if not text or key(text[: 2 * len(gold) + 100]) == key(gold):
        return bool(text)
    boxed = extraction.last_boxes(text)
    if boxed:
        said = _said_in_box(boxed[-1])
        givens = (", ".join(boxed), boxed[-1], *([said] if said else []))
        return any(are_equal(gold, given) for given in dict.fromkeys(givens))
    if re.fullmatch(r"\(?[A-J]\)?", key(gold)) and (letter := choice.letter_of(text)):
        return letter == key(gold).strip("()")
    if extraction.is_cut_in_box(text):
        return False
    found = after_hashes(text) or extraction.after_phrase(text)
    if found is not None:
        return are_equal(gold, found) or _begins_with(gold, found)
    if _is_bare(text) and are_equal(gold, text):
        return True
    return (_has_words(text) or not _is_bare(text)) and _in_prose(gold, text[-extraction.TAIL :])


def are_equal(gold: str, given: str) -> bool:
    r"""Whether two bare answers mean the same: by their writing, as numbers, as words, or as formulas.

    >>> are_equal(r"\dfrac12", "0.5"), are_equal(r"\text{Odd}", "odd"), are_equal("10 cm", "10 m")
    (True, True, False)
    """
    mine, theirs = key(gold), key(given)
    if mine == theirs:
        return True
    if not theirs or len(theirs) > LONGEST_ANSWER + 20 * len(mine):
        return False
    # "3,4" and "4,3" are two numbers each.
    if _is_number(gold) and _is_number(given) and (quantity_of(gold) or quantity_of(given)):
        return _same_number(gold, given)
    if is_words(gold) or is_words(given):
        return is_words(gold) and is_words(given) and mine.lower() == theirs.lower()
    (gold, unit), (given, other) = _without_unit_of_pi(gold), _without_unit_of_pi(given)
    if unit and other and unit != other:
        return False
    bases = _in_base(gold), _in_base(given)
    if all(bases):
        return bases[0] == bases[1]
    sizes = _is_huge(gold), _is_huge(given)
    if all(sizes):
        raise ValueError("both answers are too large to be compared")
    return not any(sizes) and _verified(_parsed(_formula(gold)), _parsed(_formula(given)))


def _said_in_box(box: str) -> str | None:
    r"""The answer of a sentence in a box.

    >>> _said_in_box(r"\text{The answer is }42"), _said_in_box(r"\text{odd}")
    ('42', None)
    """
    sentence = plain(box)
    said = extraction.after_phrase(sentence) or sentence
    return extraction.conclusion(said) or (said if said != sentence else None)


def _without_unit_of_pi(text: str) -> tuple[str, str]:
    r"""A multiple of pi, and its unit.

    >>> _without_unit_of_pi(r"25\pi cm^2"), _without_unit_of_pi(r"25\pi r")
    (('25\\pi', 'cm^2'), ('25\\pi r', ''))
    """
    bare = plain(text)
    found = _UNIT.search(bare)
    return (bare[: found.start()].rstrip(), re.sub(r"[\s{}]", "", found["unit"])) if found else (text, "")


def _in_base(text: str) -> int | None:
    """The value of digits with a base, such as `204_5`."""
    found = re.fullmatch(r"(\w+)_\{?(\d{1,2})\}?", key(text))
    try:
        return int(found[1], int(found[2])) if found else None
    except ValueError:  # digits that the base does not have
        return None


def _is_number(text: str) -> bool:
    return (quantity_of(text) or with_decimal_comma(text)) is not None


def _same_number(gold: str, given: str) -> bool:
    """Whether two texts that are numbers are the same one. A comma may be a decimal comma where the other has none."""
    one, other = quantity_of(gold), quantity_of(given)
    if one is not None and other is not None and one.equals(other):
        return True
    if ("," in gold) == ("," in given):
        return False
    one, other = with_decimal_comma(gold) or one, with_decimal_comma(given) or other
    return one is not None and other is not None and one.equals(other)


def _gold(answer: str) -> str:
    """The answer in a solution."""
    boxed = extraction.last_boxes(answer)
    return ", ".join(boxed) if boxed else after_hashes(answer) or answer


def _is_bare(text: str) -> bool:
    """Whether a response is an answer and nothing else."""
    if len(text) > 300 or "\n\n" in text or after_hashes(text) or extraction.after_phrase(text):
        return False
    prose = re.sub(r"\\[a-zA-Z]+|\\text\s*\{[^{}]*\}", " ", text)
    return text.replace("$$", "$").count("$") <= 2 and not re.search(
        r"[A-Za-z]{2,}\s+[A-Za-z]{2,}\s+[A-Za-z]{2,}", prose
    )


def _has_words(text: str) -> bool:
    return bool(re.search(r"(?<![\\a-zA-Z])(?:[^\W\d_]{3,}|(?i:is|it|so|we|he|to|of|in)\b)", _FUNCTIONS.sub(" ", text)))


def _begins_with(gold: str, said: str) -> bool:
    """Whether what was said to be the answer, "42 apples in 3 boxes", begins with it."""
    formulas = _formulas(said)
    if any(are_equal(gold, given) for given in dict.fromkeys((", ".join(formulas), *formulas[:1]))):
        return True
    if not formulas:
        said = extraction.conclusion(said) or said
    if _is_number(gold) and not any(map(_is_number, formulas)):
        number = extraction.first_number(_FORMULA.sub(" ", said).rpartition("=")[2])
        return number is not None and _same_number(gold, number)
    return _in_prose(gold, said)


def _formulas(text: str) -> list[str]:
    """What stands between dollar signs, or in brackets of LaTeX."""
    found = _FORMULA.findall(text)
    return [part for parts in found for part in parts if part]


def _in_prose(gold: str, text: str) -> bool:
    """Whether the formula, number or words that a text ends with are the answer."""
    if is_words(gold):
        ending = re.escape(plain(gold)) + r"[\s.!*]*$"
        return (
            re.search(rf"(?:\b(?:is|are|was|were|be)|[:=])\s+(?:(?:an?|the)\s+)?\**{ending}", text, re.IGNORECASE)
            is not None
        )
    parse, _ = _math_verify()
    last = next(reversed(_formulas(text)), None)
    if last is not None and are_equal(gold, last):
        return True
    if re.fullmatch(r"\d+(?::\d+)+", key(gold)) and (ratio := extraction.last_ratio(text)) is not None:
        return key(ratio) == key(gold)
    if last is None and (multiple := _MULTIPLE_OF_PI.search(text)) and r"\pi" in key(gold):
        return are_equal(gold, multiple[1])
    number = extraction.last_number(text)
    if last is None and number is not None and _is_number(gold):
        return _same_number(gold, number)
    return not _is_huge(text) and _verified(_parsed(_formula(gold)), parse(text, parsing_timeout=None))


def _formula(text: str) -> str:
    r"""An answer as LaTeX: `2*sqrt(3)` is `2*\sqrt{3}`."""
    text = plain(without_unit(text)).replace("**", "^")
    if "=" in text and "," in text:
        text = re.sub(r"\s*\b(?:and|or)\b\s*", "; ", text)  # p=5, q=2 and p=7, q=2
    text = _FUNCTIONS.sub(lambda m: "\\" + m.group(1).replace("infinity", "infty"), text)
    return _CALL.sub(r"\\\1{\2}", text)


def _verified(gold: list[Any], given: list[Any]) -> bool:
    """Whether any reading of the answer can be shown to equal any reading of what was given.

    Raises:
        MemoryError, RecursionError: it cannot be known.
    """
    _, verify = _math_verify()
    if _are_small_and_differ(gold, given):  # which `verify` rounds to 0
        return False
    try:
        return bool(verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # one pair of readings makes no sense; the others may
        right = bool(verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None))
        if not right:
            _report_failed(gold, given, error)
        return right


MAX_REPORTS = 10
"""Comparisons that failed in math-verify and are reported; later ones of the process are not."""
_reports = itertools.count(1)


def _report_failed(gold: list[Any], given: list[Any], error: Exception) -> None:
    """Report, in the log of the process that grades, that a response counts as wrong because it could not be compared."""
    if (number := next(_reports)) <= MAX_REPORTS:
        more = "; further ones are not reported" if number == MAX_REPORTS else ""
        LOG.warning("%.80r could not be compared with %.80r, and counts as wrong: %r%s", given, gold, error, more)


def _are_small_and_differ(gold: list[Any], given: list[Any]) -> bool:
    if not gold or not given or not all(_is_finite_number(readings[0]) for readings in (gold, given)):
        return False
    one, other = gold[0], given[0]
    largest = max(abs(one.evalf(30)), abs(other.evalf(30)))
    return bool(largest < 1e-4 and abs((one - other).evalf(30)) > 1e-6 * largest)


def _is_finite_number(reading: Any) -> bool:
    return bool(getattr(reading, "is_number", False) and getattr(reading, "is_finite", False))


def _parsed(formula: str) -> list[Any]:
    parse, _ = _math_verify()
    return parse(f"$\\boxed{{{formula}}}$", parsing_timeout=None)


@cache
def _math_verify() -> tuple[Any, Any]:
    """`parse` and `verify`. Their own time limits are signals, and are off: the process has one."""
    import math_verify

    for name in ("math_verify", "math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return math_verify.parse, math_verify.verify


def _is_huge(text: str) -> bool:
    """Whether a number in the text has too many digits to be worked out."""
    if _FACTORIAL_OF_FORMULA.search(text):
        return True
    if any(len(marks) > 1 or int(n[:9]) > LARGEST_DIGITS // 4 for n, marks in _FACTORIAL.findall(text)):
        return True
    place = 0
    while found := _TOWER.search(text, place):
        levels, place = [found[1]], found.end()
        while more := _TOWER.match(text, place):
            levels, place = [*levels, more[1]], more.end()
        top = re.match(r"\d+", text[place:])
        levels.append(top[0] if top else "1")
        exponent = 1.0
        for level in reversed(levels[1:]):
            if exponent * math.log10(max(float(level[:300]), 1.5)) > 300:
                return True
            exponent = float(level[:300]) ** exponent
        if exponent * math.log10(max(float(levels[0][:300]), 1.5)) > LARGEST_DIGITS:
            return True
    return False
