"""Find the final answer of a response: after the reasoning, in a tag or a box, or at the end.

All functions process text in a single scan, so long responses stay cheap.
"""

from __future__ import annotations

import re
from itertools import pairwise

from ...dataflow.prompts.answers import boxes
from .numbers import NUMBER_IN_TEXT

_PHRASE = re.compile(
    r"(?:(?:final\s+answer|correct\s+answer|answer)\**\s*(?:(?:is|are|was|=)(?![a-z'’])\**\s*:?|[:：])"
    r"|答案\**\s*(?:[是为為]\s*[:：]?|[:：]))[*\s]*",
    re.IGNORECASE,
)
_END_OF_SENTENCE = re.compile(r"。|(?<=[^\d\s])(?<!\bi\.e)(?<!\be\.g)\.\s|\.\s+(?=[A-Z])|\.\s*$")
TAIL = 2000
"""[characters] Search the last characters of a response for an answer without a box."""

_CANDIDATE = (
    r"(?:\\boxed\s*\{[^{}]*\}|\$[^$\n]{1,100}\$|[*\\$]*[-+−]?\d(?:[\w.,/^%]*[\w%])?\**"
    r"|\**\(?(?-i:[A-Z])(?![\w'’])\)?\**|\**\([a-z]\)\**)"
)
_CANDIDATES = rf"{_CANDIDATE}(?:(?:,\s*{_CANDIDATE}){{0,9}},?\s+(?:or|and|nor)\s+{_CANDIDATE})?"
_FILLERS = r"(?:\s+(?:be|equal|equals|to|the|option|choice|answer|letter|number|value))*\s+"
_DENIED = re.compile(
    rf"(?:\b(?:not|cannot|never|neither|nor|rather\s+than|instead\s+of|other\s+than|as\s+opposed\s+to|no\s+longer)|n['’]t)"
    rf"{_FILLERS}{_CANDIDATES}(?![\w/^])",
    re.IGNORECASE,
)
"""A rejected candidate: "not 6", "isn't (C)", "rather than 9"."""
_NOT_BUT = re.compile(
    r"\bnot\s+(?!only\b|just\b|merely\b)[\w'’ ]{1,40}?,?\s+but\s+(?:rather\s+|instead\s+)?(?=[\w$\\])",
    re.IGNORECASE,
)
_MINUS = re.compile(
    r"(?:\bnegative|(?:(?<=\bis)|(?<=\bbe)|(?<=[=:])|(?<=\bequals))\s+minus)\s+(?=[\d$.])", re.IGNORECASE
)
_REFUTED = (
    r"(?:that|this|it|which)(?:(?:['’]s|\s+is|\s+was)\s+(?:\w+ly\s+)?(?:wrong|incorrect|not\s+(?:right|correct))"
    r"|(?:\s+isn['’]t|\s+wasn['’]t|\s+can(?:no|['’])t\s+be)\s+(?:right|correct))"
)
_WITHDRAWN = re.compile(
    r"\b(?:(?:wait|hold\s+on|hmm+|oh|actually|but|sorry)\W+no\b|no\W+wait\b|scratch\s+that|oops|on\s+second\s+thought|my\s+(?:mistake|bad)\b"
    rf"|(?:wait|no|hold\s+on|hmm+|actually|oh|sorry)\W+(?:\w+\W+){{0,3}}?{_REFUTED}"
    r"|I\s+(?:was\s+wrong|meant|misread|miscounted|miscalculated|made\s+an?\s+(?:\w+\s+)?(?:mistake|error)|take\s+(?:that|it)\s+back)"
    r"|correction\s*:|\b(?:sorry|I\s+mean|or\s+rather|make\s+that|no,)[,:]?\s+(?=[-$\\*(]*\d))",
    re.IGNORECASE,
)
_REFUTED_AT_ONCE = re.compile(rf"[^.!\n]{{0,30}}[.!,;:\s]\s*(?:but\s+)?{_REFUTED}", re.IGNORECASE)
_REDONE = re.compile(
    r"\b(?:wait|hold\s+on|hmm+|actually|let\s+me\s+(?:re-?compute|re-?do|re-?calculate|re-?consider|try\s+again))\b",
    re.IGNORECASE,
)
_CHECKED = re.compile(
    r"\b(?:check|verif\w+|correct|indeed|yes|confirm\w*|holds|works|matches|consistent)\b|✓|✔",
    re.IGNORECASE,
)
_RESULT = re.compile(r"(?:=|\b(?:is|so|be|gives|get))\s*[$*\\]*[-+−]?[.\d][^=\n]{0,30}$", re.IGNORECASE)
_TAG = re.compile(r"<(?P<close>/?)answer\s*>", re.IGNORECASE)
_CUT = re.compile(r"(?:[=+/×÷^(\[{]|(?<!\*)\*)\s*$")
_CUT_BOX = re.compile(r"\\(?:boxed|fbox|boxe?|fbo)\s*$")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def final_part(response: str) -> str | None:
    r"""Return the part of a response that states its answer; None if the response is cut off or
    withdraws its answer.

    Ignores reasoning in `<think>`, and rejected candidates ("not 6 but 5"). The last `<answer>`
    counts, unless a box follows it. Text after "Wait, no" replaces the answer before it.

    >>> final_part("<answer>2x + 3</answer>"), final_part("It is not 6 but 5."), final_part(r"\boxed{5}. No, wait: \boxed{6")
    ('2x + 3', 'It is 5.', None)
    """
    text = _MINUS.sub(" -", _DENIED.sub("", _NOT_BUT.sub("", without_reasoning(response)))).strip()
    found = boxes(text)
    tags = _tags(text)
    last_box, last_tag = found[-1][:2] if found else (-1, -1), tags[-1] if tags else (-1, -1)
    if _CUT_BOX.search(text) or _last_open(text, [start for start, _, _ in found]) > max(
        last_box[0], last_tag[0]
    ):
        return None
    if _CUT.search(text) and last_box[0] < 0 and last_tag[0] < 0:
        return None
    if last_tag[1] == len(text) + 1 and last_box[0] < last_tag[0]:
        return None
    said = max((phrase.end() for phrase in _PHRASE.finditer(text)), default=0)  # "the answer is"
    stated = max(last_box[1], min(last_tag[1], len(text)), text.rfind("####"), said)
    # The response withdraws its answer, so look for a new one after that.
    if (rest := _after_withdrawal(text, stated)) is not None:
        return final_part(rest) if re.search(r"\w", rest) else None
    if last_tag[0] < 0:
        return text
    if last_box[0] > last_tag[1]:
        return text[last_tag[1] :]
    return _TAG.sub(" ", text[last_tag[0] : last_tag[1]]).strip()


def denied_letters(text: str) -> set[str]:
    keys = (re.findall(r"\b[A-Za-z1-9]\b", match[0]) for match in _DENIED.finditer(text))
    return {key.upper() for found in keys for key in found}


def without_tag(text: str) -> str:
    """Return the content of the last `<answer>`, or the whole text if it has none."""
    tags = _tags(text)
    return _TAG.sub(" ", text[slice(*tags[-1])]) if tags else text


def _tags(text: str) -> list[tuple[int, int]]:
    """Return the start and end of each `<answer>`; an unclosed one ends one past the end of the
    text."""
    found: list[tuple[int, int]] = []
    opened = -1
    for tag in _TAG.finditer(text):
        if not tag["close"]:
            opened = tag.start()
        elif opened >= 0:
            found.append((opened, tag.end()))
            opened = -1
    return [*found, (opened, len(text) + 1)] if opened >= 0 else found


def _last_open(text: str, closed: list[int]) -> int:
    last = max((box.start() for box in _OPEN_BOX.finditer(text)), default=-1)
    if last in closed or last < 0:
        return -1
    depth = 0
    for brace in re.finditer(r"\\[{}]|[{}]", text[last:]):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if brace[0] == "}" and not depth:
            return -1
    return -1 if re.fullmatch(r"[^{}]*\{[^{}]*\\\}\W*", text[last:]) else last  # closed by \\} in error


def _after_withdrawal(text: str, stated: int) -> str | None:
    """Return the text after the withdrawal of a stated answer, or None."""
    ends = [match.end() for match in _WITHDRAWN.finditer(text, stated)]
    if stated and (refuted := _REFUTED_AT_ONCE.match(text, stated)):
        ends.append(refuted.end())
    if ends:
        return text[max(ends) :]
    redone = _REDONE.search(text, stated)
    if not stated or redone is None:
        return None
    rest = text[redone.end() :]
    return rest if _RESULT.search(rest) and not _CHECKED.search(rest) else None


def without_reasoning(response: str) -> str:
    """Return the text after the last `</think>`, or the whole response without one; empty if a
    `<think>` is not closed.

    >>> without_reasoning("<think>41? No.</think> It is 42."), without_reasoning("<think>41? Or 42")
    (' It is 42.', '')
    """
    _, found, rest = response.rpartition("</think>")
    if "<think>" in rest:
        return ""
    return rest if found and rest.strip() else response


_ABOUT = re.compile(r"\b(?:about|approximately|roughly)\b|≈|\\approx", re.IGNORECASE)


def last_boxes(text: str) -> tuple[str, ...]:
    r"""Return the contents of the last boxes, several if they form a list: `\boxed{1} and
    \boxed{2}`.

    >>> last_boxes(r"\boxed{3}? No. So \boxed{1} and \boxed{2}.")
    ('1', '2')
    """
    found = boxes(text)
    first = len(found) - 1
    for (_, end, _), (start, _, _) in reversed(list(pairwise(found))):
        between = text[end:start]
        # A rounded value repeats the answer of the box before it.
        if _ABOUT.search(between[-60:]):
            first -= 1
            continue
        is_long = len(between) > 60 or len(re.findall(r"(?<!\\)\b[a-zA-Z]{2,}", between)) > 5
        if is_long or re.search(r"[.?!:]\s|\bthen\b|\bno\b|\bwait\b|\n\n", between, re.I):
            break
        first -= 1
    shown = found[max(first, 0) :]
    rounded = [bool(_ABOUT.search(text[one[1] : other[0]])) for one, other in pairwise(shown)]
    kept = zip(shown, [False, *rounded], strict=False)
    return tuple(content.strip() for (_, _, content), is_rounded in kept if not is_rounded)


def after_phrase(text: str) -> str | None:
    """Return the rest of the sentence after the last "the answer is" or "Answer:".

    >>> after_phrase("So the answer is **$3.50**. I hope that helps.")
    '$3.50'
    """
    text = text[-TAIL:]
    for phrase in reversed(list(_PHRASE.finditer(text))):
        sentence = _END_OF_SENTENCE.split(text[phrase.end() :].partition("\n")[0].strip(), maxsplit=1)[0]
        if sentence := sentence.strip().strip("*`\"' ").rstrip(".*"):
            return sentence
    return None


_CONCLUSION = re.compile(r"\b(?:so|thus|hence|therefore)\b", re.IGNORECASE)
_RATIO = re.compile(r"(?<![\w.:])\d+(?:\s*:\s*\d+)+(?![\w:])")


def conclusion(text: str) -> str | None:
    """Return the number, and at most one word, after the last "so", "thus", "hence" or "therefore".

    >>> conclusion("between 7 and 9, so 8"), conclusion("42, so 41 was wrong")
    (' 8', None)
    """
    *before, last = _CONCLUSION.split(text)
    return last if before and re.fullmatch(r"[\W_]*\d[^\sa-zA-Z]*(?:\s+\w+)?[\s.]*", last) else None


def last_ratio(text: str) -> str | None:
    """Return the last ratio of a text.

    >>> last_ratio("from 1:2 to 3 : 4.")
    '3 : 4'
    """
    found = _RATIO.findall(text[-TAIL:])
    return found[-1] if found else None


def first_number(text: str) -> str | None:
    found = NUMBER_IN_TEXT.search(text)
    return found.group().strip() if found else None


def last_number(text: str) -> str | None:
    """Return the last number, with its sign, separators, exponent, denominator and known unit.

    >>> last_number("12 of them cost $1,234.50, not $-3/4 each."), last_number("It weighs 3.2e-5 kg.")
    ('-3/4', '3.2e-5 kg')
    """
    found = [match.group() for match in NUMBER_IN_TEXT.finditer(text[-TAIL:])]
    return found[-1].strip() if found else None


def stated_part(text: str) -> str:
    """Return the part of a short text with the answer, such as one side of an equals sign.

    >>> stated_part("10 (x=3)"), stated_part("2 * 5 = 10 apples"), stated_part("10, since x = 3"), stated_part("10 = 2 * 5")
    ('10  ', ' 10 apples', '10', '10')
    """
    outside = re.sub(r"\([^()]*=[^()]*\)", " ", text)
    before, equals, after = outside.rpartition("=")
    if not equals:
        return outside if first_number(outside) else text
    if number := NUMBER_IN_TEXT.match(before := before.strip()):
        rest = before[number.end() :]
        if (not rest.strip() and _OPERATION.search(after)) or _REASON.match(rest):
            return number.group()
    return after


_REASON = re.compile(r"\s*(?:[,;]|\b(?:as|since|because|for|with|when|where|if)\b)")
_OPERATION = re.compile(r"\d\s*[-+*/×·÷]\s*\d")
