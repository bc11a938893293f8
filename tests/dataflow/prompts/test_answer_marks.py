"""One rule finds boxes and `####` in worked solutions and in responses."""

import pytest

from weft.dataflow.prompts.answers import after_hashes, boxes


def test_nested_boxes_cost_no_more_than_their_length():
    deep = r"\boxed{" * 20_000
    assert boxes(deep) == [] and [inside for _, _, inside in boxes(deep + "1" + "}" * 20_000)] == ["1"]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed 4.5, so", ["4.5"]),
        (r"\boxed$7$ or \boxed-8", ["7", "-8"]),
        (r"\boxed{} \boxedone", [""]),
    ],
)
def test_a_box_may_lack_its_braces(text: str, inside: list[str]):
    assert [each for _, _, each in boxes(text)] == inside


@pytest.mark.parametrize(
    ("text", "found", "at_end"),
    [
        ("#### 1\n#### 2 \nend", "2", None),
        ("6 * 7\n####\n42\n", "42", "42"),
        ("#### 42\n####", "42", "42"),
        ("## 1", None, None),
        ("####", None, None),
    ],
)
def test_an_answer_follows_the_last_hashes(text: str, found: str | None, at_end: str | None):
    assert (after_hashes(text), after_hashes(text, at_end=True)) == (found, at_end)
