"""Instructions: checks that a response follows instructions that a program can verify."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

from ...dataflow.errors import SampleError, UserError, nearest
from .extraction import without_reasoning
from .grader import Grader, from_json

_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "more than": operator.gt,
    "exactly": operator.eq,
}
IFEVAL_IDS = "instruction_id_list"
"""Column of the instructions of a row."""
_LANGUAGE = "language:response_language"
_MISSING = "which needs the package langdetect: `pip install langdetect`, or leave these rows out"
_WORD = re.compile(r"\w+")
_SENTENCE = re.compile(r"(?<![.!?])[.!?]+[\"'”’)\]]*(?=\s|$)")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e)\.$")
_FENCES = ("```json", "```Json", "```JSON", "```")


class Instructions(Grader):
    """1 if the response follows all instructions of its row, otherwise 0 (IFEval, arXiv:2311.07911,
    table 1; the strict, prompt-level accuracy). For rows with IFEval's columns
    `instruction_id_list` and `kwargs`.

    Instructions on the language of a response need the package `langdetect`; without it, such rows
    fail. Sentences are counted by their punctuation, so counts may differ from IFEval's tokenizer
    at abbreviations. Upper and lower case are checked in any language.
    """

    is_verdict: ClassVar[bool] = True

    def check_ids(self, rows: Iterable[Any]) -> None:
        """Check the instructions of all rows before a run. Raises a UserError for an unknown instruction,
        or if `langdetect` is needed and missing."""
        names = {name for ids in map(from_json, rows) if isinstance(ids, list | tuple) for name in ids}
        if unknown := sorted(map(str, names - CHECKS.keys())):
            raise UserError(
                f"'instruction_id_list' has {unknown[0]!r}, which is not an instruction{nearest(unknown[0], CHECKS)}"
            )
        if _LANGUAGE in names and find_spec("langdetect") is None:
            raise UserError(f"rows have the instruction {_LANGUAGE!r}, {_MISSING}")

    def __call__(self, response: str, instruction_id_list: Any, kwargs: Any = None) -> float:
        """Check a response after its reasoning. Raises a SampleError for an unknown instruction, or one
        without its parameters.

        >>> Instructions()("No pause here", ["punctuation:no_comma"], [{}])
        1.0
        >>> Instructions()("One two", ["length_constraints:number_words"], [{"num_words": 3, "relation": "at least"}])
        0.0
        """
        text = without_reasoning(response).strip()
        ids, settings = from_json(instruction_id_list), from_json(kwargs)
        if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
            raise SampleError(f"'instruction_id_list' must be a list of instructions, not {ids!r}")
        settings = [{}] * len(ids) if settings is None else settings
        if not isinstance(settings, Sequence) or len(settings) != len(ids):
            raise SampleError(f"'kwargs' must be a list of {len(ids)} objects, one per instruction")
        # Check all, so that a wrong instruction is found whatever the response is.
        followed = [_follows(text, *each) for each in zip(ids, map(from_json, settings), strict=True)]
        return float(all(followed))


def _follows(text: str, name: str, settings: Mapping[str, Any] | None) -> bool:
    if name not in CHECKS:
        raise SampleError(f"unknown instruction {name!r}{nearest(str(name), CHECKS)}")
    if settings is not None and not isinstance(settings, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SampleError(f"'kwargs' of instruction {name!r} must be an object, not {settings!r}")
    # In a table, each row has the parameters of all instructions, most of them null.
    given = {key: value for key, value in (settings or {}).items() if value is not None}
    if not text:
        return False
    try:
        return bool(CHECKS[name](text, **given))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise SampleError(f"instruction {name!r} with {given}: {error}") from None


def _related(number: int, relation: str, wanted: float) -> bool:
    if relation not in _RELATIONS:
        raise ValueError(f"relation {relation!r} must be one of {', '.join(_RELATIONS)}")
    return _RELATIONS[relation](number, int(wanted))


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _listed(words: object) -> Sequence[str]:
    if not isinstance(words, list | tuple):
        raise ValueError(f"a list of words is needed, not {words!r}")
    return words


def _keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(word.casefold() in text.casefold() for word in _listed(keywords))


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    found = re.findall(re.escape(keyword), text, re.IGNORECASE)
    return _related(len(found), relation, frequency)


def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(_has_word(text, word) for word in _listed(forbidden_words))


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _related(text.lower().count(letter.lower()), let_relation, let_frequency)


def _is_in(text: str, language: str) -> bool:
    try:
        from langdetect import DetectorFactory, LangDetectException, detect  # pyright: ignore
    except ImportError:
        raise SampleError(f"instruction {_LANGUAGE!r}, {_MISSING}") from None
    DetectorFactory.seed = 0
    try:
        return detect(text) == language
    except LangDetectException:  # no letters, which IFEval accepts
        return True


def _count_sentences(text: str) -> int:
    """
    >>> _count_sentences("Dr. No came. He saw 3.5 ships! And left"), _count_sentences("")
    (3, 0)
    """
    number, start = 0, 0
    for found in _SENTENCE.finditer(text):
        if not _ABBREVIATION.search(text[max(start, found.start() - 10) : found.start() + 1]):
            number, start = number + 1, found.end()
    return number + bool(text[start:].strip())


def _sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _related(_count_sentences(text), relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = [part for k, part in enumerate(parts) if part.strip() or 0 < k < len(parts) - 1]
    return len(inner) == num_paragraphs and all(part.strip() for part in inner)


def _words(text: str, num_words: int, relation: str) -> bool:
    return _related(len(_WORD.findall(text)), relation, num_words)


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    found = _WORD.search(parts[int(nth_paragraph) - 1])
    return found is not None and found.group().casefold() == first_word.strip().casefold()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]*\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    # Spaces between the letters do not matter: "P. S." is "P.S.".
    marker = r"\s?".join(re.escape(each) for each in postscript_marker if not each.isspace())
    return re.search(marker, text, re.IGNORECASE) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-)", text, re.MULTILINE)) == num_bullets


_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _highlights(text: str, num_highlights: int) -> bool:
    # As in IFEval, single and double stars count separately.
    found = [*re.findall(r"\*[^*\n]*\*", text), *re.findall(r"\*\*[^*\n]*\*\*", text)]
    return sum(bool(each.strip("*").strip()) for each in found) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    found = re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)
    return len(found) >= num_sections


def _json(text: str) -> bool:
    fence = next((each for each in _FENCES if text.startswith(each)), "")
    try:
        json.loads(text.removeprefix(fence).removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    for line in text.splitlines():
        start, end = line.find("<<"), line.rfind(">>")
        if end > start >= 0 and line[start:end].strip("<> \t"):
            return True
    return False


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    given = [part for k, part in enumerate(parts) if part or 0 < k < len(parts) - 1]
    return len(given) == 2 and all(given) and given[0] != given[1]


def _repeats(text: str, prompt_to_repeat: str) -> bool:
    return text.casefold().startswith(prompt_to_repeat.strip().casefold())


def _ends(text: str, end_phrase: str) -> bool:
    return text.strip("\"' \n").casefold().endswith(end_phrase.strip().casefold())


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    number = sum(word.isupper() for word in _WORD.findall(text))
    return _related(number, capital_relation, capital_frequency)


CHECKS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    _LANGUAGE: _is_in,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text: any(each in text for each in _CHOICES),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats,
    "startend:end_checker": _ends,
    "startend:quotation": lambda text: len(text) > 1 and text[0] == '"' == text[-1],
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Maps each instruction to its check, a function of the text and the parameters in `kwargs`."""
