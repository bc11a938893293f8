"""Verifiable instructions: a text that follows each and one that does not."""

import json
import sys
from typing import Any

import pytest

from weft.algorithms.graders import instructions
from weft.algorithms.graders.instructions import CHECKS, Instructions
from weft.dataflow.errors import SampleError, UserError

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["sea", "sky"]}, "The SEA and the sky", "The sea"),
    "keywords:frequency": (
        {"keyword": "sea", "frequency": 2, "relation": "at least"},
        "sea, Sea",
        "one sea",
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["sea"]}, "a seal", "the Sea."),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 2, "let_relation": "less than"},
        "one",
        "Even these",
    ),
    "language:response_language": ({"language": "de"}, "Das Meer ist heute sehr ruhig.", "It is calm."),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "less than"},
        "Dr. No saw 3.5 ships.",
        "One. Two!",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    "length_constraints:number_words": (
        {"num_words": 2, "relation": "at least"},
        "don't",
        "done",
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "sea"},
        "Calm.\n\n**Sea** level",
        "Calm.\n\nThe sea",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] at [place]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye.\n**P. S.** Write!", "Bye."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n-\n\n", "* a\n- b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        "*one* and *two*",
        "*one* and ** **",
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    "detectable_format:json_format": ({}, '```json {"a": 1}```', "{a: 1}"),
    "detectable_format:title": ({}, "<<The sea>>\ncalm", "<< >>\ncalm"),
    "combination:two_responses": ({}, "******\none\n******\ntwo", "one\n******\n******\ntwo"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    "startend:end_checker": ({"end_phrase": "Any more?"}, 'So: "any more?"', "Any more? No."),
    "startend:quotation": ({}, '"Yes."', '"Yes".'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NO and YES",
        "NO and yes",
    ),
    "change_case:english_capital": ({}, "THE SEA, 1", "THE sea"),
    "change_case:english_lowercase": ({}, "the sea, 1", "the Sea"),
    "punctuation:no_comma": ({}, "one; two", "one, two"),
}


def test_each_instruction_has_a_case():
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_an_instruction_is_followed_or_not(name: str):
    if name.startswith("language"):
        pytest.importorskip("langdetect")
    settings, right, wrong = CASES[name]
    grade = Instructions()
    nulls = {"keywords": None, "num_words": None} | settings  # as a table of all rows has them
    assert grade(right, [name], [nulls]) == 1.0
    assert grade(f"<think>{wrong}</think>{right}", [name], [nulls]) == 1.0
    assert grade(wrong, [name], [settings]) == 0.0 == grade("", [name], [settings])


def test_all_instructions_of_a_row_must_be_followed():
    names = ["punctuation:no_comma", "change_case:english_lowercase"]
    assert Instructions()("one", names, [{}, {}]) == 1.0 == Instructions()("one", names)
    assert Instructions()("One", names, [{}, {}]) == 0.0
    assert Instructions()("one", json.dumps(names), json.dumps([{}, {}])) == 1.0


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["punctuation:no_coma"], [{}], "unknown instruction 'punctuation:no_coma'; did you mean 'punctuation:no_comma'"),
        (["keywords:existence"], [{}], "'keywords:existence' with {}: .*keywords"),
        (["keywords:existence"], [{"keywords": "sea"}], "'keywords:existence' with .* a list of words"),
        (["punctuation:no_comma"], ["x"], "'kwargs' of instruction 'punctuation:no_comma' must be an object"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 2, "relation": "around"}],
            "relation 'around' must be one of at least, less than",
        ),
        (["punctuation:no_comma"], [{}, {}], "a list of 1 objects"),
        ([], [], "must be a list of instructions"),
        ("no_comma", None, "must be a list of instructions"),
    ],
)  # fmt: skip
def test_a_row_with_wrong_instructions_is_not_graded(names: Any, settings: Any, message: str):
    with pytest.raises(SampleError, match=message):
        Instructions()("some text", names, settings)


def test_rows_are_checked_before_a_run(monkeypatch: pytest.MonkeyPatch):
    grade = Instructions()
    grade.check_ids([["punctuation:no_comma"], json.dumps(["startend:quotation"]), None])
    with pytest.raises(UserError, match="has 'no_coma', which is not an instruction"):
        grade.check_ids([["punctuation:no_comma"], ["no_coma"]])
    monkeypatch.setitem(sys.modules, "langdetect", None)
    monkeypatch.setattr(instructions, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install langdetect"):
        grade.check_ids([["language:response_language"]])
    with pytest.raises(SampleError, match="pip install langdetect"):
        grade("text", ["language:response_language"], [{"language": "en"}])


@pytest.mark.parametrize(
    "piece", ["!", ".", "Dr. ", "\n", "<", "*", "[", "-\n", "```json\n", "a ", "SECTION 1 "]
)
def test_long_responses_are_checked(piece: str):
    """With a check of quadratic or cubic time, this would take minutes."""
    text = (piece * 100_000)[:100_000] + "a"
    for name, (settings, *_) in CASES.items():
        if not name.startswith("language"):
            assert Instructions()(text, [name], [settings]) in (0.0, 1.0)
