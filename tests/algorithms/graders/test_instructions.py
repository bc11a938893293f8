"""Verifiable instructions: a text that follows each and one that does not."""

import json
from typing import Any

import pytest

from weft.algorithms.graders.instructions import CHECKS, Instructions
from weft.dataflow.errors import SampleError

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
        "well-known facts",
        "well-known",
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "sea"},
        "Calm.\n\n**Sea** level",
        "Calm.\n\nThe sea",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] at [place]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye.\nP. S. Write!", "Bye."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        "*one* and **two**",
        "*one* and ** **",
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<The sea>>\ncalm", "<< >>\ncalm"),
    "combination:two_responses": ({}, "one\n******\ntwo", "one\n******\none"),
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
        (["punctuation:no_coma"], [{}], "no instruction 'punctuation:no_coma'; did you mean 'punctuation:no_comma'"),
        (["keywords:existence"], [{}], "'keywords:existence' with {}: .*keywords"),
        (["keywords:existence"], [{"keywords": 5}], "'keywords:existence' with"),
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


def test_a_language_needs_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "langdetect", None)
    with pytest.raises(SampleError, match="pip install langdetect"):
        Instructions()("text", ["language:response_language"], [{"language": "en"}])
