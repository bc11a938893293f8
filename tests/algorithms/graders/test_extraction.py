"""Finding the final answer in a response."""

import pytest

from weft.algorithms.graders.extraction import (
    after_phrase,
    last_boxes,
    last_number,
    without_reasoning,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{\frac{1}{\sqrt{2}}} and so on", (r"\frac{1}{\sqrt{2}}",)),
        (r"\boxed{\{1, 2\}}", (r"\{1, 2\}",)),
        (r"\boxed{1}. Wait, that is wrong. \boxed{2}", ("2",)),
        (r"\boxed{1} and \boxed{2}", ("1", "2")),
        (r"\boxed{1} then \boxed{2}", ("2",)),
        (r"\boxed{\boxed{7}}", ("7",)),
        (r"\boxed{never closed", ()),
        (r"\fbox{7} \boxed 8", ("7", "8")),
        ("no box", ()),
        ("", ()),
    ],
)
def test_the_last_box_and_those_in_one_list_with_it(text: str, found: tuple[str, ...]):
    assert last_boxes(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 3.14. I hope it helps.", "3.14"),
        ("**Final Answer:** $42$.", "$42$"),
        ("Answer: 41\nNo.\nAnswer: 42", "42"),
        ("the answer is (B) Paris", "(B) Paris"),
        ("I have no idea", None),
    ],
)
def test_announced_final_answers_are_found(text: str, found: str | None):
    assert after_phrase(text) == found


def test_numbers_keep_their_sign_separators_and_denominator():
    found = [
        last_number(t)
        for t in ("-7", "10-3", "it is 1,234.50.", "3/4 of it", "x2", "a -.5", "2,74 $", "none")
    ]
    assert found == ["-7", "3", "1,234.50", "3/4", None, "-.5", "2,74", None]


def test_reasoning_is_left_out():
    assert (
        without_reasoning("<think>1</think> 2") == " 2"
        and without_reasoning("1</think> ") == "1</think> "
    )
