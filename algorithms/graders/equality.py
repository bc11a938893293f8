"""Equality of two mathematical answers, with `math-verify` and sympy.

A comparison may never end, so `math.py` runs it in a process that it can kill. Text from a model is
parsed, never evaluated.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from fractions import Fraction
from functools import cache
from typing import Any

from ...dataflow.prompts.answers import after_hashes
from . import choice, extraction
from .numbers import (
    UNIT_NAMES,
    Unit,
    is_words,
    key,
    plain,
    quantity_of,
    same_unit,
    unit_of,
    with_decimal_comma,
    without_unit,
)

LOG = logging.getLogger(__name__)

LONGEST_ANSWER = 2000
"""[characters] Longest answer to compare as a formula; more if the right answer is long."""
LARGEST_DIGITS = 50_000
"""Digits of the largest power or factorial to compute."""
_TOWER = re.compile(r"(\d+)\s*(?:\^|\*\*)\s*[{(]*\s*(?=\d)")
_FACTORIAL = re.compile(r"(\d+)\s*(!+)")
_FACTORIAL_OF_FORMULA = re.compile(r"\^[^()]*\)\s*!|!\s*\)\s*!")
_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_FUNCTIONS = re.compile(
    r"(?<![\\a-zA-Z])(sqrt|pi|infinity|infty|sin|cos|tan|log|ln|exp|alpha|beta|theta|cdot|times|leq|geq|pm|cup)\b"
)
_UNIT = re.compile(
    r"(?:\\text|\\mathrm|\\mbox|\\textrm|\\textnormal|\\rm)\s*\{\s*(?P<text>[A-Za-z./ ^0-9-]+)\}\s*"
    r"(?P<raised>\^\s*\{?\s*-?[1-9]\s*\}?)?\s*[.$]*\s*$"
    rf"|(?<=[\d}})iππ])\s*(?P<bare>(?:(?:square|cubic|sq|cu)\.?\s+)?(?:units?|m|{'|'.join(UNIT_NAMES)})(?![a-zA-Z])"
    r"\s*(?:\^\s*\{?\s*[23]\s*\}?|squared|cubed)?(?:\s*(?:/|per)\s*[a-z]+(?:\s*\^\s*\{?\s*[23]\s*\}?)?)?)\s*$"
)
"""A unit after a formula. `numbers.quantity_of` reads units after numbers."""
_MULTIPLE_OF_PI = re.compile(r"([-−]?[\d.,/√()]*\s*π[^.\n]{0,20})\.?\s*$")
_CALL = re.compile(r"\\(sqrt|exp)\s*\(([^()]*)\)")


MAX_REPORTS = 10
"""Maximum number of failed comparisons that a process reports."""
_reports = itertools.count(1)


def is_right(response: str, answer: str) -> bool:
    r"""Return whether the final answer of a response equals the answer, which may be bare or end a
    solution. Raises a ValueError if the answer is empty or a sentence, or if the two are too large
    to compare.

    >>> is_right(r"So it is \boxed{\frac{2}{4}}.", "0.5"), is_right(r"\boxed{5}, no, \boxed{6}", "5")
    (True, False)
    """
    boxed = extraction.last_boxes(answer)  # the answer may be a whole solution
    gold = ", ".join(boxed) if boxed else after_hashes(answer) or answer
    if not plain(gold):
        raise ValueError(f"the answer {answer[:100]!r} is empty")
    text = extraction.without_reasoning(response).strip()
    # Most right answers are written like the given answer, so compare their notation first.
    if not text or key(text[: 2 * len(gold) + 100]) == key(gold):
        return bool(text)
    final = extraction.final_part(response)
    if not final:
        return False
    if key(final[: 2 * len(gold) + 100]) == key(gold) or _states(gold, final):
        return True
    stated = _stated_by(gold)
    if stated is None and _is_sentence(gold):
        raise ValueError(
            f"the answer {answer[:100]!r} is a sentence; give the number or formula alone, or in \\boxed{{}}"
        )
    return stated is not None and _states(stated, final)


def _states(gold: str, text: str) -> bool:
    """Return whether a text states the answer, in one of the usual places."""
    boxed = extraction.last_boxes(text)
    if boxed:
        said = _said_in_box(boxed[-1])
        givens = (", ".join(boxed), boxed[-1], *([said] if said else []))
        return any(are_equal(gold, given) for given in dict.fromkeys(givens))
    if re.fullmatch(r"\(?[A-J]\)?", key(gold)) and (letter := choice.letter_of(text)):
        return letter == key(gold).strip("()")
    found = after_hashes(text) or extraction.after_phrase(text)
    if found is not None:
        return are_equal(gold, found) or _begins_with(gold, found)
    if _is_bare(text):
        if are_equal(gold, text):
            return True
        word = r"(?<![\\a-zA-Z])(?:[^\W\d_]{3,}|(?i:is|it|so|we|he|to|of|in)\b)"
        if not re.search(word, _FUNCTIONS.sub(" ", text)):
            return False
    return _in_prose(gold, text[-extraction.TAIL :])


_VERB = r"(?:is|are|was|were|has|have|had|equals?|gets?|makes?|takes?|costs?|earns?|weighs?|needs?|gives?|must\s+be|total|=)"
_STATEMENT = re.compile(
    rf"\b{_VERB}\s+(?:(?:about|exactly|equal\s+to|only|the|an?)\s+)*(?P<said>(?:[a-zA-Z]\s*=\s*)?[-−+$€]?[\d\\(\[{{][^;!?]*?)[.!]?\s*$",
    re.IGNORECASE,
)
_COMPARED = re.compile(
    r"\b(?:all|any|every|more|less|greater|fewer|smaller|larger|least|most|above|below|between|multiples?|divisible|except|from|or|not)\b",
    re.IGNORECASE,
)


def _is_sentence(gold: str) -> bool:
    prose = re.sub(r"\\[a-zA-Z]+|\$[^$]*\$", " ", gold)
    words = re.findall(r"(?<![A-Za-z])[A-Za-z]{2,}", prose)
    is_said = gold.rstrip().endswith(".") or re.search(rf"\b{_VERB}\b", prose)
    return len(words) >= 3 and bool(is_said) and bool(re.search(r"[\d$]", gold))


def _stated_by(answer: str) -> str | None:
    r"""Return the number or formula that a sentence states; None if there are several.

    >>> _stated_by("The answer is 10000"), _stated_by("She has 15 apples left."), _stated_by("all real numbers above 3")
    ('10000', '15 apples left', None)
    """
    said = extraction.after_phrase(answer)
    if said is None and not _is_sentence(answer):
        return None
    formulas = _formulas(said or answer)
    if len(formulas) == 1:
        return formulas[0]
    if said is None and (found := _STATEMENT.search(answer)):
        said = found["said"].strip()
    if said and (_is_number(said) or len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", said)) < 3):
        return said
    numbers = [match.group().strip() for match in extraction.NUMBER_IN_TEXT.finditer(said or answer)]
    return numbers[0] if len(numbers) == 1 and not _COMPARED.search(answer) else None


def are_equal(gold: str, given: str) -> bool:
    r"""Return whether two bare answers are equal in notation, as numbers, as words or as formulas.

    >>> are_equal(r"\dfrac12", "0.5"), are_equal(r"\text{Odd}", "odd"), are_equal("10 cm", "10 m")
    (True, True, False)
    """
    mine, theirs = key(gold), key(given)
    if mine == theirs:
        return True
    if not theirs or len(theirs) > LONGEST_ANSWER + 20 * len(mine):
        return False
    # "3,4" and "4,3" are two numbers each, so do not parse them as one.
    if _is_number(gold) and _is_number(given) and (quantity_of(gold) or quantity_of(given)):
        return _same_number(gold, given)
    if is_words(gold) or is_words(given):
        return is_words(gold) and is_words(given) and _words(gold) == _words(given)
    (gold, unit), (given, other) = _without_unit(gold), _without_unit(given)
    if not same_unit(*unit[:1], *other[:1]) or (unit[0] == other[0] and unit[1] != other[1]):
        return False
    # Numbers in a base need no parser.
    bases = _in_base(gold), _in_base(given)
    if all(bases):
        return bases[0] == bases[1]
    # sympy would try to compute huge powers and factorials.
    sizes = _is_huge(gold), _is_huge(given)
    if all(sizes):
        raise ValueError("both answers are too large to be compared")
    return not any(sizes) and _verified(_parsed(_formula(gold)), _parsed(_formula(given)))


def _said_in_box(box: str) -> str | None:
    r"""Return the answer that a boxed sentence states.

    >>> _said_in_box(r"\text{The answer is }42"), _said_in_box(r"\text{odd}")
    ('42', None)
    """
    sentence = plain(box)
    said = extraction.after_phrase(sentence) or sentence
    return extraction.conclusion(said) or (said if said != sentence else None)


def _words(text: str) -> list[str]:
    """Return words without articles and plural endings: "No solutions" equals "no solution"."""
    found = re.findall(r"[^\W_]+", plain(text).lower())
    words = [word for word in found if word not in ("a", "an", "the")]
    return [w.removesuffix("s") if len(w) > 3 and not w.endswith("ss") else w for w in words]


def _without_unit(text: str) -> tuple[str, tuple[Unit, Fraction]]:
    r"""Return a formula without the unit after it, and the unit with its size.

    >>> _without_unit(r"25\pi cm^2")[0], _without_unit(r"25\pi r")[0], _without_unit(r"6\sqrt{2}\text{ m}")[0]
    ('25\\pi', '25\\pi r', '6\\sqrt{2}')
    """
    for form in (text, plain(text)):
        found = _UNIT.search(form)
        if found is None or not form[: found.start()].strip(" $\\("):
            continue
        name = (found["text"] or found["bare"]).strip()
        unit, size, rest = unit_of(name + re.sub(r"\s", "", found["raised"] or ""))
        if unit and not rest.strip():
            return form[: found.start()].rstrip(), (unit, size)
    return text, (frozenset(), Fraction(1))


def _in_base(text: str) -> int | None:
    found = re.fullmatch(r"(\w+)_\{?(\d{1,2})\}?", key(text))
    try:
        return int(found[1], int(found[2])) if found else None
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    return (quantity_of(text) or with_decimal_comma(text)) is not None


def _same_number(gold: str, given: str) -> bool:
    """Return whether two numbers are equal. A comma may be a decimal comma if the other text has
    none."""
    one, other = quantity_of(gold), quantity_of(given)
    if one is not None and other is not None and one.equals(other):
        return True
    if ("," in gold) == ("," in given):
        return False
    one, other = with_decimal_comma(gold) or one, with_decimal_comma(given) or other
    return one is not None and other is not None and one.equals(other)


def _is_bare(text: str) -> bool:
    if len(text) > 300 or "\n\n" in text or after_hashes(text) or extraction.after_phrase(text):
        return False
    prose = re.sub(r"\\[a-zA-Z]+|\\text\s*\{[^{}]*\}", " ", text)
    return text.replace("$$", "$").count("$") <= 2 and not re.search(
        r"[A-Za-z]{2,}\s+[A-Za-z]{2,}\s+[A-Za-z]{2,}", prose
    )


def _begins_with(gold: str, said: str) -> bool:
    """Return whether an answer such as "42 apples in 3 boxes" begins with the right one."""
    formulas = _formulas(said)
    if any(are_equal(gold, given) for given in dict.fromkeys((", ".join(formulas), *formulas[:1]))):
        return True
    if not formulas:
        said = extraction.conclusion(said) or said
    if _is_number(gold) and not any(map(_is_number, formulas)):
        number = extraction.first_number(extraction.stated_part(_FORMULA.sub(" ", said)))
        return number is not None and _same_number(gold, number)
    return _in_prose(gold, said)


def _formulas(text: str) -> list[str]:
    found = _FORMULA.findall(text)
    return [part for parts in found for part in parts if part]


def _in_prose(gold: str, text: str) -> bool:
    """Return whether a text ends with the answer."""
    if is_words(gold):
        ending = re.escape(plain(gold)) + r"[\s.!*]*$"
        stated = rf"(?:\b(?:is|are|was|were|be)|[:=])\s+(?:(?:an?|the)\s+)?\**{ending}"
        return bool(re.search(stated, text, re.IGNORECASE))
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
    r"""Convert an answer to LaTeX: `2*sqrt(3)` becomes `2*\sqrt{3}`."""
    text = plain(without_unit(text)).replace("**", "^")
    if "=" in text and "," in text:
        text = re.sub(r"\s*\b(?:and|or)\b\s*", "; ", text)  # such as p=5, q=2 and p=7, q=2
    text = _FUNCTIONS.sub(lambda m: "\\" + m.group(1).replace("infinity", "infty"), text)
    return _CALL.sub(r"\\\1{\2}", text)


def _verified(gold: list[Any], given: list[Any]) -> bool:
    """Return whether a parse of the answer provably equals a parse of the given text. Raises
    MemoryError or RecursionError if the comparison is too large."""
    _, verify = _math_verify()
    try:
        right = bool(
            verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        )
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # this pair of readings is invalid; others may be valid
        right = bool(verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None))
        if not right and (number := next(_reports)) <= MAX_REPORTS:
            more = "; further ones are not reported" if number == MAX_REPORTS else ""
            wrong = "%.80r could not be compared with %.80r, and counts as wrong: %r%s"
            LOG.warning(wrong, given, gold, error, more)
    return right and not (gold and given and _differ(gold[0], given[0]))


DIGITS = 1500
"""Digits of precision for comparing constants; `verify` compares only 15."""


def _differ(one: Any, other: Any) -> bool:
    import sympy

    if isinstance(one, sympy.Eq) and isinstance(other, sympy.Eq):
        return one.lhs == other.lhs and _differ(one.rhs, other.rhs)
    one, other = (reading.rhs if isinstance(reading, sympy.Eq) else reading for reading in (one, other))
    if isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr):
        return _expressions_differ(one, other)
    several = sympy.Tuple | sympy.FiniteSet | sympy.Interval
    parts = [reading.args for reading in (one, other) if isinstance(reading, several)]
    if len(parts) < 2 or len(parts[0]) != len(parts[1]):
        return False
    if isinstance(one, sympy.FiniteSet) or isinstance(other, sympy.FiniteSet):
        return any(all(_differ(a, b) for b in parts[1]) for a in parts[0])
    return any(_differ(a, b) for a, b in zip(*parts, strict=True))


def _expressions_differ(one: Any, other: Any) -> bool:
    import sympy

    if one.has(sympy.UnevaluatedExpr) or other.has(sympy.UnevaluatedExpr):
        return False
    if one.free_symbols != other.free_symbols:
        return False
    # Compare the expressions at fixed rational values of their symbols.
    symbols = sorted(one.free_symbols, key=str)
    places = {symbol: sympy.Rational(7 + 2 * n, 5) for n, symbol in enumerate(symbols)}
    try:
        one, other = one.subs(places).doit(), other.subs(places).doit()
        if not (_is_finite_number(one) and _is_finite_number(other)):
            return False
        difference = one - other
        if difference.has(sympy.Float):
            size = max(abs(one.evalf(30)), abs(other.evalf(30)))
            return bool(size < 1e-4 and abs(difference.evalf(30)) > 1e-6 * size)
        if difference.is_Rational:
            return difference != 0
        value = difference.evalf(15, maxn=DIGITS)
        return any(part != 0 and part._prec > 1 for part in value.as_real_imag() if part.is_Float)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy cannot decide this, but `verify` could
        return False


def _is_finite_number(reading: Any) -> bool:
    return bool(getattr(reading, "is_number", False) and getattr(reading, "is_finite", False))


def _parsed(formula: str) -> list[Any]:
    parse, _ = _math_verify()
    return parse(f"$\\boxed{{{formula}}}$", parsing_timeout=None)


@cache
def _math_verify() -> tuple[Any, Any]:
    """Return `parse` and `verify` of math-verify."""
    import math_verify

    for name in ("math_verify", "math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return math_verify.parse, math_verify.verify


def _is_huge(text: str) -> bool:
    """Return whether a number in the text has too many digits to compute."""
    if _FACTORIAL_OF_FORMULA.search(text):
        return True
    # Nine digits are enough, and `int` rejects more than 4,300.
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
            # A float overflows beyond 308 digits.
            if exponent * math.log10(max(float(level[:300]), 1.5)) > 300:
                return True
            exponent = float(level[:300]) ** exponent
        if exponent * math.log10(max(float(levels[0][:300]), 1.5)) > LARGEST_DIGITS:
            return True
    return False
