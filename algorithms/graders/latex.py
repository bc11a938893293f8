"""LaTeX of short answers, brought to one way of writing: what changes only how an answer looks is taken away."""

from __future__ import annotations

import re

_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textnormal|textrm|mathrm|mathbf|mathit|boldsymbol|underline|mbox|operatorname|rm)\s*\{([^{}]*)\}"
)
_BARE_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s+(?=[A-Za-z]\b)")
_STYLE = re.compile(
    r"(?<!\\)\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle|limits|,|;|:|!|\s|quad|qquad)(?![a-zA-Z])"
)
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:(?P<a>\d)|\{(?P<aa>[^{}]*)\})\s*(?:(?P<b>\d)|\{(?P<bb>[^{}]*)\})")
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
_FRACTIONS = {"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅙": (1, 6), "⅛": (1, 8)}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,\s*\\!\s*|\\,|\\!|\\ |['’\u2009\u202f])(?=\d{3}(?!\d))")


def plain(latex: str) -> str:
    r"""An answer without dollar signs, styles, spacing commands and full stop; `\dfrac12` is `\frac{1}{2}`.

    >>> plain(r"$\left(\dfrac12,\ 3\right).$"), plain(r"\text{ (B) }"), plain(r"11,\! 111"), plain(r"45^\circ")
    ('(\\frac{1}{2}, 3)', '(B)', '11111', '45')
    """
    text = re.sub(r"\s+", " ", latex.strip())
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(".;,").strip()
        text = re.sub(r"(?<!\\)\\$", "", text).strip()  # a backslash that was cut off
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            wrapped = len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing)
            if wrapped and opening not in inner:
                text = inner
    text = re.sub(r"^\$([^$]+)\$(?=\s*[A-Za-z])", r"\1", text)  # $125$ miles
    text = text.replace("−", "-").replace("–", "-").replace("\\%", "%").replace("\\$", "$").replace("\u00a0", " ")
    text = text.replace("~", " ").replace("\\varnothing", "\\emptyset")
    text = text.replace("\\\\frac", "\\frac").replace("\\\\dfrac", "\\frac").replace("\\\\sqrt", "\\sqrt")
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
    r"""Fractions, powers and roots of one character as LaTeX.

    >>> _without_unicode("2½, x² and 3√2")
    '2\\frac{1}{2}, x^{2} and 3\\sqrt{2}'
    """
    if text.isascii():
        return text
    for character, (over, under) in _FRACTIONS.items():
        text = text.replace(character, rf"\frac{{{over}}}{{{under}}}")
    text = text.replace("π", r"\pi ")
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    return re.sub(r"√\s*(\w+|\([^()]*\))", lambda found: rf"\sqrt{{{found[1].strip('()')}}}", text)


def without_unit(latex: str) -> str:
    r"""A formula without the unit that stands behind it as text.

    >>> without_unit(r"36\pi \text{ in}^2"), without_unit(r"\text{odd}")
    ('36\\pi', '\\text{odd}')
    """
    found = _UNIT_TEXT.search(latex)
    return latex[: found.start()].rstrip() if found and latex[: found.start()].strip(" $\\(") else latex


def key(latex: str) -> str:
    r"""A key that is equal for answers that differ only in notation: `plain` without spaces, braces around one character, and case of
    words.

    >>> key(r"4210_{7}") == key("$4210_7$"), key(r"\text{Even}") == key("even"), key("x") == key("X")
    (True, True, False)
    """
    text = re.sub(r"[_^]\{(\w)\}", lambda m: m.group().replace("{", "").replace("}", ""), plain(latex))
    text = re.sub(r"(?<!\\)\b[A-Za-z]{3,}\b", lambda m: m.group().lower(), text)
    text = re.sub(r"\s+", "", text)
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text


def is_words(latex: str) -> bool:
    r"""Whether an answer is words and no formula: `\text{Evelyn}`, "no solution".

    >>> is_words(r"\text{odd}"), is_words("monday evening"), is_words("xy"), is_words(r"\sin x"), is_words("3 dogs")
    (True, True, False, False, False)
    """
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z'’-]*(?:[ ,][ A-Za-z'’-]+)*", text := plain(latex))) and any(
        len(word) >= 3 and word not in ("sin", "cos", "tan", "log", "exp", "abs", "min", "max", "inf")
        for word in text.split()
    )
