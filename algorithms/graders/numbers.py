"""Parse numbers in common notations: 1,000.5, $3, 28\\%, 3/4, 1 1/2, 1.5 \\times 10^3, 10 cm."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

# Normalization of short LaTeX answers


_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textnormal|textrm|mathrm|mathbf|mathit|boldsymbol|underline|mbox|operatorname|rm)\s*\{([^{}]*)\}"
)
_BARE_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s+(?=[A-Za-z]\b)")
_STYLE = re.compile(
    r"(?<!\\)\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle|limits|,|;|:|!|\s|quad|qquad)(?![a-zA-Z])"
)
_SHORT_FRACTION = re.compile(
    r"\\frac\s*(?:(?P<a>\d)|\{(?P<aa>[^{}]*)\})\s*(?:(?P<b>\d)|\{(?P<bb>[^{}]*)\})"
)
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z])(?![a-zA-Z{])")
_UNIT_TEXT = re.compile(
    r"(?:\\[ ,;!:])*\s*\\(?:text|mbox|mathrm|textnormal|textrm)\s*\{\s*(?!(?:and|or|if|for|where|when|with)\b)[A-Za-z./ ]+\}"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?\s*\.?\s*\$*\s*$"
)
_DEGREE = re.compile(r"\^?\s*\{?\s*\\circ\s*\}?|\\?°|\\degree\b")
_TEMPERATURE = re.compile(
    r"(?:\^?\s*\{?\s*\\circ\s*\}?|\\?°|\\degree)\s*(?:\\(?:text|mathrm|rm)\s*\{\s*)?(?P<scale>[CF])\b\s*\}?"
)
_DECORATION = re.compile(r"\\(?:color|textcolor|hspace|vspace|phantom)\*?\s*\{[^{}]*\}")
_FRACTIONS = "½⅓⅔¼¾⅕⅙⅛"
_SAME = (
    *(("−", "-"), ("–", "-"), ("\\%", "%"), ("\\$", "$"), ("\u00a0", " "), ("~", " ")),
    *(
        ("\\varnothing", "\\emptyset"),
        (r"\\frac", r"\frac"),
        (r"\\dfrac", r"\frac"),
        (r"\\sqrt", r"\sqrt"),
    ),
)
"""Notations and their replacements."""
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,\s*\\!\s*|\\,|\\!|\\ |['’\u2009\u202f])(?=\d{3}(?!\d))")


def plain(latex: str) -> str:
    r"""Remove dollar signs, styles and spacing; `\dfrac12` becomes `\frac{1}{2}`.

    >>> plain(r"$\left(\dfrac12,\ 3\right).$"), plain(r"\text{ (B) }"), plain(r"11,\! 111"), plain(r"45^\circ")
    ('(\\frac{1}{2}, 3)', '(B)', '11111', '45')
    """
    text = re.sub(r"\s+", " ", latex.strip())
    before = None
    # Wrappers may be nested.
    while text != before:
        before = text
        text = text.strip().rstrip(".;,").strip()
        text = re.sub(r"(?<!\\)\\$", "", text).strip()  # a command that was cut off
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if inner and opening not in inner and text == f"{opening}{inner}{closing}":
                text = inner
    text = re.sub(r"^\$([^$]+)\$(?=\s*[A-Za-z])", r"\1", text)  # such as $125$ miles
    for notation, other in _SAME:
        text = text.replace(notation, other)
    text = _DECORATION.sub("", _without_unicode(text))
    text = _SEPARATOR.sub("", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = _TEMPERATURE.sub(lambda m: {"C": " celsius", "F": " fahrenheit"}[m["scale"]], text)
    text = _DEGREE.sub("", text)
    text = _STYLE.sub(" ", text)
    text = _TEXT.sub(r" \1 ", _BARE_TEXT.sub("", text))
    text = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{m['a'] or m['aa']}}}{{{m['b'] or m['bb']}}}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    return re.sub(r"\s+", " ", re.sub(r"\(\s+|\s+\)", lambda m: m.group().strip(), text)).strip()


def _without_unicode(text: str) -> str:
    r"""Replace single-character fractions, powers and roots with LaTeX.

    >>> _without_unicode("2½, x² and 3√2")
    '2\\frac{1}{2}, x^{2} and 3\\sqrt{2}'
    """
    if text.isascii():
        return text
    for character in _FRACTIONS:
        value = Fraction(unicodedata.numeric(character)).limit_denominator(8)
        text = text.replace(character, rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    text = text.replace("π", r"\pi ")
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    return re.sub(r"√\s*(\w+|\([^()]*\))", lambda found: rf"\sqrt{{{found[1].strip('()')}}}", text)


def without_unit(latex: str) -> str:
    r"""Return a formula without the `\text` unit after it.

    >>> without_unit(r"36\pi \text{ in}^2"), without_unit(r"\text{odd}")
    ('36\\pi', '\\text{odd}')
    """
    found = _UNIT_TEXT.search(latex)
    return latex[: found.start()].rstrip() if found and latex[: found.start()].strip(" $\\(") else latex


def key(latex: str) -> str:
    r"""Return a key that is equal for answers that differ only in notation: `plain` without spaces,
    braces around one character, and the case of words.

    >>> key(r"4210_{7}") == key("$4210_7$"), key(r"\text{Even}") == key("even"), key("x") == key("X")
    (True, True, False)
    """
    text = re.sub(r"[_^]\{(\w)\}", lambda m: m.group().replace("{", "").replace("}", ""), plain(latex))
    text = re.sub(r"(?<!\\)\b[A-Za-z]{3,}\b", lambda m: m.group().lower(), text)
    text = re.sub(r"\s+", "", text)
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text


def is_words(latex: str) -> bool:
    r"""Return whether an answer is words rather than a formula: `\text{Evelyn}`, "no solution".

    >>> is_words(r"\text{odd}"), is_words("monday evening"), is_words("xy"), is_words(r"\sin x"), is_words("3 dogs")
    (True, True, False, False, False)
    """
    text = plain(latex)
    if not re.fullmatch(r"[A-Za-z][A-Za-z'’-]*(?:[ ,][ A-Za-z'’-]+)*", text):
        return False
    functions = ("sin", "cos", "tan", "log", "exp", "abs", "min", "max", "inf")
    return any(len(word) >= 3 and word not in functions for word in text.split())


# Numbers

LONGEST = 1000
"""[characters] Longest text that may be a number."""
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ ]\d{3})+(?!\d)|\d{1,3}(?:\.\d{3}){2,}(?![\d.])|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:(?:US)?(?P<currency>[$€£¥])\s*)?(?P<sign2>-?)\s*(?:
        (?P<once>\d*\.\d*)\\(?:overline|bar|dot)\s*\{{?\s*(?P<again>\d+)\s*\}}?
        | (?:(?P<whole>\d+)\s*)?\\frac\{{\s*(?P<over>-?\d+)\s*\}}\{{\s*(?P<under>-?\d+)\s*\}}
        | (?:(?P<whole2>\d+)\s+)?(?P<over2>\d+)\s*/\s*(?P<under2>\d+)
        | (?P<base>\d{{1,9}})\s*(?:\^|\*\*)\s*\{{?\s*\(?\s*(?P<raised>[-+]?\d{{1,3}})\s*\)?\s*\}}?(?!\s*[\d^!(])
        | (?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})
        | (?P<decimal>{_DECIMAL})
          (?:(?:\s*(?:\\times|\\cdot|×|·|\*|x)\s*10\s*(?:\^|\*\*)\s*\{{?\s*(?P<tens>[-+]?\d{{1,4}})\s*\}}?)|[eE](?P<tens2>[-+]?\d{{1,4}}))?
    )\s*(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
_PERCENT = re.compile(r"(?:%|percent(?:age)?(?:\s+points)?\b|pct\b)\s*", re.IGNORECASE)
_UNKNOWN_UNIT = re.compile(
    r"(?P<words>[$€£¥]|[^\W\d_]{2,}(?:(?:\s+|/)[^\W\d_]+){0,5}|[a-zA-Z])\s*(?:\^?\{?\s*[23²³]\s*\}?)?"
)
_UNITS = {
    "length": "1/1000 mm millimeter millimetre, 1/100 cm centimeter centimetre, 1 m meter metre, "
    "1000 km kilometer kilometre, 254/10000 in inch inches, 3048/10000 ft foot feet, 9144/10000 yd yard, "
    "1609344/1000 mi mile",
    "mass": "1/1000 mg milligram, 1 g gram, 1000 kg kilogram",
    "weight": "1 lb pound, 1/16 oz ounce",
    "ton": "1 ton tonne",
    "time": "1/1000 ms millisecond, 1 s sec second, 60 min minute, 3600 h hr hour, 86400 day, 604800 week",
    "month": "1 month, 12 year yr",
    "dollar": "1/100 cent, 1 $ dollar usd",
    "euro": "1 € euro eur",
    "volume": "1/1000 ml milliliter millilitre, 1 L liter litre",
    "gallon": "1 gallon, 1/4 quart, 1/8 pint",
    "angle": "1 degree deg",
    "radian": "1 radian rad",
    **{
        n: f"1 {n}"
        for n in ("celsius", "fahrenheit", "kelvin", "newton", "joule", "watt", "volt", "unit")
    },
}
"""Maps each dimension to its units, with their sizes and names. Pounds are not converted to grams,
nor months to days."""
_UNIT_OF_NAME: dict[str, tuple[str, Fraction]] = {}
for _dimension, _units in _UNITS.items():
    for _size, *_names in map(str.split, _units.split(", ")):
        for _name in _names:
            _UNIT_OF_NAME[_name] = _UNIT_OF_NAME[f"{_name}s"] = (_dimension, Fraction(_size))
_RATES = {"mph": "mile/hour", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "mps": "m/s"}
_AMBIGUOUS = {
    "in",
    "ins",
    "m",
    "ms",
    "g",
    "gs",
    "s",
    "ss",
    "h",
    "hs",
    "L",
    "Ls",
    "mi",
    "mis",
    "$",
    "$s",
    "€",
    "€s",
}
UNIT_NAMES = sorted(_UNIT_OF_NAME.keys() - _AMBIGUOUS | _RATES.keys(), key=len, reverse=True)
"""Units that are not also names of variables or words, longest first."""
_NAME = rf"(?:{'|'.join(map(re.escape, sorted(_UNIT_OF_NAME, key=len, reverse=True)))}|{'|'.join(_RATES)})(?![a-zA-Z])"
_TERM = re.compile(
    rf"(?P<shape>square|sq|cubic|cu)?\.?\s*(?:degrees?\s+(?=celsius|fahrenheit))?(?P<name>{_NAME})"
    r"(?:\s*\^?\s*(?P<power>\{\s*-?\s*[1-9]\s*\}|-?[1-9])(?![\d.,/])|\s+(?P<word>squared|cubed)\b)?",
    re.IGNORECASE,
)
_OVER = re.compile(r"\s*/\s*|\s+per\s+", re.IGNORECASE)
_TIMES = re.compile(r"\s*(?:\*|·|\\cdot|\\times)\s*|\s+|-(?=[a-z])")
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})\b\s*", re.IGNORECASE)
_FORMULA = re.compile(
    r"\b(?:pi|sqrt|sin|cos|tan|log|ln|exp|mod|or|and|to|choose|infinity|inf)\b", re.IGNORECASE
)
"""A number after one of these words is part of a formula or one of several answers."""


_THOUSANDS = r"\d{1,3}(?:(?:,|\{,\}|\\,|\\!|,\s*\\!\s*|['’\u2009\u202f\u00a0])\d{3})+(?!\d)|\d{1,3}(?:[ .]\d{3}){2,}(?![\d-])"
_EXPONENT = (
    r"[eE][-+−]?\d{1,4}(?!\w)|\s*(?:\\times|\\cdot|×|·|\*|x)\s*10\s*(?:(?:\^|\*\*)\s*\{?\s*\(?[-+−]?\d+\)?\s*\}?|[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)"
    r"|(?:\^|\*\*(?=\d))\{?\(?[-+−]?\d+\)?\}?|[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+"
)
_WORDED_UNIT = (
    rf"(?:(?:square|sq|cubic|cu)\.?\s+)?(?:{'|'.join(map(re.escape, UNIT_NAMES))}|m|g|h)(?![\w])"
    r"(?:\s*\^\s*\{?-?\d\}?|[²³]|\s+(?:squared|cubed)\b)?"
)
_NOT_RAISED = r"(?<![\w.,^])(?<!\^-)(?<!\^\{)(?<!\^\{-)"
NUMBER_IN_TEXT = re.compile(
    rf"(?:{_NOT_RAISED}[-+−]?(?:\d+\s\d+\s?/\s?\d+|(?:{_THOUSANDS}|\d+(?:,\d+)*)(?:\.\d+)?(?:{_EXPONENT})?(?:\s?/\s?\d+)?)"
    rf"|(?<![\w.])[-+−]?\.\d+(?:{_EXPONENT})?)"
    r"(?:\s*\\?%|\s*percent\b)?(?:\s+(?:thousand|million|billion|trillion)\b)?"
    rf"(?:[\s-]?\s*{_WORDED_UNIT}(?:\s*/\s*{_WORDED_UNIT}|\s+per\s+{_WORDED_UNIT})?)?",
)
"""A number within a text, with its exponent, denominator, percent sign and known unit."""

Unit = frozenset[tuple[str, int]]
"""Dimensions of a unit with their powers: miles per hour are {("length", 1), ("time", -1)}."""


def unit_of(text: str) -> tuple[Unit, Fraction, str]:
    r"""Return the dimensions and size of a unit at the start of a text, and the rest of the text.

    >>> unit_of("square feet of grass")[2], unit_of("m^2")[0] == unit_of("square feet")[0], unit_of("km/h")[0] == unit_of("mph")[0]
    (' of grass', True, True)
    """
    powers: dict[str, int] = {}
    size, place, sign = Fraction(1), 0, 1
    while term := _TERM.match(text, place):
        name = term["name"]
        if name.lower() in _RATES:
            parts, factor, _ = unit_of(_RATES[name.lower()])
        else:
            known = _UNIT_OF_NAME.get(name) or (len(name) > 1 and _UNIT_OF_NAME.get(name.lower()))
            known = known or (name == "l" and _UNIT_OF_NAME["L"])
            follows = text[term.end() :].strip() and not _OVER.match(text, term.end())
            is_word = name.lower() in ("in", "s") and follows and not (term["shape"] or term["power"])
            if not known or is_word:  # such as "5 in total"
                break
            parts, factor = frozenset({(known[0], 1)}), known[1]
        power = int(re.sub(r"[{}\s]", "", term["power"])) if term["power"] else 1
        shape = (term["shape"] or term["word"] or "").lower()
        power *= sign * (2 if shape[:2] == "sq" else 3 if shape[:2] == "cu" else 1)
        for base, exponent in parts:
            powers[base] = powers.get(base, 0) + exponent * power
        size *= factor**power
        place = term.end()
        joint = _OVER.match(text, place) or _TIMES.match(text, place)
        if joint is None or not _TERM.match(text, joint.end()):
            break
        sign = -1 if _OVER.match(text, place) else sign if "/" in text[:place] else 1
        place = joint.end()
    return frozenset((base, power) for base, power in powers.items() if power), size, text[place:]


def same_unit(one: Unit, other: Unit) -> bool:
    """Return whether two units may have the same dimensions; a missing unit matches every unit."""
    if not one or not other or one == other:
        return True
    generic = any({base for base, _ in unit} == {"unit"} for unit in (one, other))
    return generic and {power for _, power in one} == {power for _, power in other}


@dataclass(frozen=True)
class Quantity:
    value: Fraction
    percent: bool = False
    unit: Unit = frozenset()
    """Dimensions of the unit, if it is known. Unknown units such as "apples" are ignored."""
    size: Fraction = Fraction(1)
    """Size of the unit: 1/100 for centimeters."""
    rounded: bool = False
    """Whether it may be rounded: it has a decimal point."""

    @property
    def text(self) -> str:
        """The value in a form that is equal for equal values, without unit and percent sign.

        >>> quantity_of("0.50").text, quantity_of("1/2").text, quantity_of("1e9999").text == quantity_of("10e9998").text
        ('1/2', '1/2', True)
        """
        # Python refuses to write thousands of digits in decimal.
        return (
            str(self.value)
            if abs(self.value) < 10**100 and self.value.denominator < 10**100
            else (f"{self.value.numerator:#x}/{self.value.denominator:#x}")
        )

    def equals(self, other: Quantity) -> bool:
        """Return whether both may mean the same: 28% is 28 or 0.28; 0.333333 is 1/3, but 0.33 is
        not.

        >>> quantity_of("28\\\\%").equals(quantity_of("0.28")), quantity_of("10 cm").equals(quantity_of("10"))
        (True, True)
        >>> quantity_of("10 cm").equals(quantity_of("10 cm^2")), quantity_of("10 cm").equals(quantity_of("0.1 m"))
        (False, True)
        """
        if not same_unit(self.unit, other.unit):
            return False
        ratio = self.size / other.size if self.unit and self.unit == other.unit else 1
        # 28% may mean 28 or 0.28, unless both numbers are percentages.
        mine, theirs = {self.value}, {other.value}
        if self.percent != other.percent:
            mine |= {self.value / 100} if self.percent else set()
            theirs |= {other.value / 100} if other.percent else set()
        rounded = self.rounded or other.rounded
        return any(a * ratio == b or (rounded and _near(a * ratio, b)) for a in mine for b in theirs)


def _near(a: Fraction, b: Fraction) -> bool:
    largest = max(abs(a), abs(b))
    # Compare small numbers by their ratio: 0 is not 0.0000001.
    scale = largest if largest < Fraction(1, 10_000) else max(largest, Fraction(1))
    return abs(a - b) <= Fraction(1, 2_000_000) * scale


_ONES = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen",
)
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_IN_WORDS = re.compile(
    rf"(?:(?P<tens>{'|'.join(_TENS)})(?:[- ](?P<more>{'|'.join(_ONES[1:10])}))?|(?P<ones>{'|'.join(_ONES)}))\b(?!-|\s+(?:and|or)\b"
    r"|\s+(?:hal(?:f|ves)|third|fourth|quarter|fifth|sixth|seventh|eighth|ninth|tenth|hundredth)s?\b)",
    re.IGNORECASE,
)


def _in_digits(text: str) -> str:
    """Convert a leading number in words, such as "twenty-five apples", to digits."""
    found = _IN_WORDS.match(text)
    if found is None:
        return text
    words = {name: word.lower() for name, word in found.groupdict().items() if word}
    value = _ONES.index(words.get("more") or words.get("ones") or "zero")
    value += 10 * (_TENS.index(words["tens"]) + 2) if "tens" in words else 0
    return f"{value}{text[found.end() :]}"


def quantity_of(text: str) -> Quantity | None:
    """Return the value of a number with an optional unit or percent sign; None for other texts.

    >>> quantity_of("$1,234.50").value, quantity_of("1 1/2").value, quantity_of("2.5 \\\\times 10^{-3}").value, quantity_of("3 x")
    (Fraction(2469, 2), Fraction(3, 2), Fraction(1, 400), None)
    >>> quantity_of("0.1\\\\overline{6}").value
    Fraction(1, 6)
    """
    found = _NUMBER.fullmatch(_in_digits(plain(text))) if len(text) <= LONGEST else None
    if found is None or (found["sign"] and found["sign2"]):
        return None
    value, rest = _value(found), found["rest"]
    if value is None:
        return None
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else rest
    scale = _SCALE.match(rest)
    if scale:
        value, rest = value * _SCALES[scale[1].lower()], rest[scale.end() :]
    unit, size, after = unit_of(rest)
    words = _UNKNOWN_UNIT.fullmatch(after.strip())
    if after.strip() and (words is None or not _is_unit(words["words"], spaced=text.count(" ") > 0)):
        return None
    if found["currency"] in ("$", "€") and not unit:
        unit, size, _ = unit_of(found["currency"])
    value = -value if "-" in (found["sign"], found["sign2"]) else value
    return Quantity(value, percent is not None, unit, size, rounded="." in (found["decimal"] or ""))


def with_decimal_comma(text: str) -> Quantity | None:
    """Return a number whose comma must be a decimal comma ("2,74 $", "0,111"), or None.

    >>> with_decimal_comma("1000,99").value, with_decimal_comma("1,000")
    (Fraction(100099, 100), None)
    """
    found = re.fullmatch(r"(\D*)(\d+),(\d+)(\D*)", plain(text))
    if found is None or (len(found[3]) == 3 and len(found[2]) <= 3 and found[2] != "0"):
        return None
    return quantity_of(f"{found[1]}{found[2]}.{found[3]}{found[4]}")


def _is_unit(words: str, *, spaced: bool) -> bool:
    """Return whether words after a number are a unit: "cm" and "weeks", but not "x" or "sin x"."""
    if words in "$€£¥":
        return True
    return len(words) >= (3 if spaced else 4) and not _FORMULA.search(words)


def _value(found: re.Match[str]) -> Fraction | None:
    part = {name: re.sub("[, ]", "", text) for name, text in found.groupdict().items() if text}
    fractions = (("over", "under", "whole"), ("over2", "under2", "whole2"), ("top", "bottom", ""))
    for over, under, whole in fractions:
        if over in part:
            below = Fraction(part[under])
            return Fraction(part.get(whole, 0)) + Fraction(part[over]) / below if below else None
    if "base" in part:
        base, power = int(part["base"]), int(part["raised"])
        return Fraction(base) ** power if base or power > 0 else None
    if "again" in part:  # 0.1666... is 0.1 plus 6/9 of a tenth
        tenths = 10 ** len(part["once"].partition(".")[2])
        again = Fraction(int(part["again"]), (10 ** len(part["again"]) - 1) * tenths)
        return Fraction(f"0{part['once']}0") + again
    tens = int(part.get("tens") or part.get("tens2") or 0)
    decimal = part["decimal"].rstrip(".")
    if decimal.count(".") > 1:  # such as 1.250.000
        decimal = decimal.replace(".", "")
    return Fraction(decimal) * Fraction(10) ** tens
