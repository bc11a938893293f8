"""Numbers as people and models write them: 1,000.5, $3, 28\\%, 3/4, 1 1/2, 1.5 \\times 10^3, 10 cm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from .latex import plain

LONGEST = 1000
"""Characters of the longest text that may be a number."""
SMALL = Fraction(1, 10_000)
"""Numbers below it are compared by their ratio: 0 is not 0.0000001."""
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ ]\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:(?:US)?[$€£¥]\s*)?(?P<sign2>-?)\s*(?:
        (?P<once>\d*\.\d*)\\(?:overline|bar|dot)\s*\{{?\s*(?P<again>\d+)\s*\}}?
        | (?:(?P<whole>\d+)\s*)?\\frac\{{\s*(?P<over>-?\d+)\s*\}}\{{\s*(?P<under>-?\d+)\s*\}}
        | (?:(?P<whole2>\d+)\s+)?(?P<over2>\d+)\s*/\s*(?P<under2>\d+)
        | (?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})
        | (?P<decimal>{_DECIMAL})
          (?:(?:\s*(?:\\times|\\cdot|×|·|\*|x)\s*10\s*(?:\^|\*\*)\s*\{{?\s*(?P<tens>[-+]?\d{{1,4}})\s*\}}?)|[eE](?P<tens2>[-+]?\d{{1,4}}))?
    )\s*(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
_PERCENT = re.compile(r"(?:%|percent(?:age)?(?:\s+points)?\b|pct\b)\s*", re.IGNORECASE)
_UNIT = re.compile(
    r"(?:(?P<words>[$€£¥]|[^\W\d_]{2,}(?:(?:\s+|/)[^\W\d_]+){0,5}|[a-zA-Z])\s*(?:\^?\{?\s*[23²³]\s*\}?)?)?"
)
_UNITS = (
    ("mm", "millimeter", "millimetre"),
    ("cm", "centimeter", "centimetre"),
    ("m", "meter", "metre"),
    ("km", "kilometer", "kilometre"),
    ("inch", "inches"),
    ("ft", "foot", "feet"),
    ("mile", "mi"),
    ("g", "gram"),
    ("kg", "kilogram"),
    ("s", "sec", "second"),
    ("min", "minute"),
    ("h", "hr", "hour"),
    ("day",),
    ("week",),
    ("month",),
    ("year", "yr"),
    ("cent",),
    ("$", "dollar", "usd"),
)
_KNOWN_UNITS = {form: names[0] for names in _UNITS for name in names for form in (name, f"{name}s")}
UNIT_NAMES = sorted(_KNOWN_UNITS.keys() - {"m", "g", "s", "h", "$", "$s"}, key=len, reverse=True)
"""Units that are not also the name of a variable, the longest first."""
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_FORMULA = re.compile(r"\b(?:pi|sqrt|sin|cos|tan|log|ln|exp|mod|or|and|to|choose|infinity|inf)\b", re.IGNORECASE)
"""Words after a number with which it is a formula, or one of several answers."""


@dataclass(frozen=True)
class Quantity:
    """A number, and how it was written."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    """A unit that is known; units that are not, such as "apples", are left out."""
    rounded: bool = False
    """It was written with a decimal point, so that it may stand for a number nearby."""

    def equals(self, other: Quantity) -> bool:
        """Whether both can mean the same number: 28% is 28 and 0.28; 0.333333 is 1/3 and 0.33 is not.

        >>> quantity_of("28\\\\%").equals(quantity_of("0.28")), quantity_of("10 cm").equals(quantity_of("10"))
        (True, True)
        >>> quantity_of("10 cm").equals(quantity_of("10 m"))
        False
        """
        if self.unit and other.unit and self.unit != other.unit:
            return False
        mine = {self.value, self.value / 100} if self.percent else {self.value}
        theirs = {other.value, other.value / 100} if other.percent else {other.value}
        if self.percent and other.percent:
            mine, theirs = {self.value}, {other.value}
        rounded = self.rounded or other.rounded
        return any(a == b or (rounded and _near(a, b)) for a in mine for b in theirs)


def _near(a: Fraction, b: Fraction) -> bool:
    largest = max(abs(a), abs(b))
    return abs(a - b) <= Fraction(1, 2_000_000) * (largest if largest < SMALL else max(largest, Fraction(1)))


def quantity_of(text: str) -> Quantity | None:
    """The number that a text is, with nothing but a unit or a percent sign beside it; None: it is something else.

    >>> quantity_of("$1,234.50").value, quantity_of("1 1/2").value, quantity_of("2.5 \\\\times 10^{-3}").value, quantity_of("3 x")
    (Fraction(2469, 2), Fraction(3, 2), Fraction(1, 400), None)
    >>> quantity_of("0.1\\\\overline{6}").value
    Fraction(1, 6)
    """
    found = _NUMBER.fullmatch(plain(text)) if len(text) <= LONGEST else None
    if found is None or (found["sign"] and found["sign2"]):
        return None
    rest = found["rest"]
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else rest
    unit = _UNIT.fullmatch(rest)
    if unit is None or not _is_unit(unit["words"] or "", spaced=text.count(" ") > 0):
        return None
    value = _value(found)
    if value is None:
        return None
    scale, _, unit_words = (unit["words"] or "").lower().partition(" ")
    value, unit_words = (value * _SCALES[scale], unit_words) if scale in _SCALES else (value, f"{scale} {unit_words}")
    negative = "-" in (found["sign"], found["sign2"])
    return Quantity(
        -value if negative else value,
        percent=percent is not None,
        unit=_KNOWN_UNITS.get(unit_words.strip(), ""),
        rounded="." in (found["decimal"] or ""),
    )


def with_decimal_comma(text: str) -> Quantity | None:
    """The number of a text whose comma is a decimal comma: "2,74 $", "0,111"; None where it can only separate thousands.

    >>> with_decimal_comma("1000,99").value, with_decimal_comma("1,000")
    (Fraction(100099, 100), None)
    """
    found = re.fullmatch(r"(\D*)(\d+),(\d+)(\D*)", plain(text))
    if found is None or (len(found[3]) == 3 and len(found[2]) <= 3 and found[2] != "0"):
        return None
    return quantity_of(f"{found[1]}{found[2]}.{found[3]}{found[4]}")


def _is_unit(words: str, *, spaced: bool) -> bool:
    """Whether what follows a number is a unit: "cm" and "weeks" are, "x", "xy" and "sin x" are not."""
    if not words or words in "$€£¥" or words.lower() in _KNOWN_UNITS:
        return True
    return len(words) >= (3 if spaced else 4) and not _FORMULA.search(words)


def _value(found: re.Match[str]) -> Fraction | None:
    part = {name: text.replace(",", "").replace(" ", "") for name, text in found.groupdict().items() if text}
    for over, under, whole in (("over", "under", "whole"), ("over2", "under2", "whole2"), ("top", "bottom", "")):
        if over in part:
            below = Fraction(part[under])
            return Fraction(part.get(whole, 0)) + Fraction(part[over]) / below if below else None
    if "again" in part:  # 0.1666... is 0.1, and 6/9 of a tenth
        tenths = 10 ** len(part["once"].partition(".")[2])
        return Fraction(f"0{part['once']}0") + Fraction(int(part["again"]), (10 ** len(part["again"]) - 1) * tenths)
    tens = int(part.get("tens") or part.get("tens2") or 0)
    return Fraction(part["decimal"].rstrip(".")) * Fraction(10) ** tens
