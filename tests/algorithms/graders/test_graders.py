"""The graders that need no other process: answers as models write them."""

import pytest

from weft.algorithms.graders.choice import MultipleChoice, letter_of
from weft.algorithms.graders.form import LengthReward, TagFormat
from weft.algorithms.graders.gsm8k import Gsm8k
from weft.algorithms.graders.json_schema import JsonSchema
from weft.algorithms.graders.text import F1, Exact, RegularExpression
from weft.dataflow.errors import SampleError, UserError

RATIONALE = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs, for 9 * 2 = $18.\n#### 18"


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("#### 18", 1),
        ("The answer is **$18.00**. She has 7 left.", 1),
        (r"\boxed{\$18}", 1),
        ("9 * 2 = 18", 1),
        ("The answer is 9 * 2 = 18 dollars", 1),
        ("<think>#### 18</think> It is 17.", 0),
        ("#### -18", 0),
        ("1,800", 0),
        (r"It is 18, no: \boxed{19}", 0),
        ("no idea", 0),
        ("", 0),
    ],
)
def test_gsm8k(response: str, right: int):
    assert Gsm8k()(response, RATIONALE) == right and Gsm8k()(response, "18") == right


def test_gsm8k_may_insist_on_its_form_and_refuses_an_answer_without_a_number():
    assert Gsm8k(strict=True)("The answer is 18", "18") == 0 and Gsm8k(strict=True)("#### $18", "18") == 1
    with pytest.raises(SampleError, match="the answer 'none' has no number"):
        Gsm8k()("18", "none")


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(C) Paris", "C"),
        ("The correct answer is **(D)**, not A.", "D"),
        ("Answer: A\nNo, wait.\nAnswer: E", "E"),
        (r"\boxed{\text{(B)}}", "B"),
        ("A is wrong.\nC is too small.\nTherefore it's B", "B"),
        ("<think>The answer is A.</think>I pick option J.", "J"),
        ("A good question", None),
        ("The answer is not clear", None),
        ("I think it depends", None),
        ("BANANA", None),
    ],
)
def test_the_letter_that_a_response_settles_on(response: str, letter: str | None):
    assert letter_of(response) == letter


def test_multiple_choice():
    assert MultipleChoice()("The answer is B.", "(B) Rome") == 1 and MultipleChoice()("no letter", "B") == 0
    with pytest.raises(SampleError, match="the answer '42' names no letter"):
        MultipleChoice()("B", "42")


def test_text_is_compared_as_squad_does():
    assert Exact()("The Eiffel Tower.", "eiffel tower") == 1 and Exact()("The answer is Paris.", "Paris") == 1
    assert Exact()("Paris, Texas", "Paris") == 0 and Exact(normalize=False)(" Paris ", "Paris") == 1
    assert F1()("the cat sat", "a cat sat down") == pytest.approx(2 * 2 / (2 + 3)) and F1()("", "") == 1
    assert F1()("dog", "cat") == 0 and F1()("cat cat", "cat") == pytest.approx(2 / 3)


def test_regular_expressions():
    number = RegularExpression(pattern=r"^Result: (\d+)$")
    assert number("Result: 41\nResult: 42", "42") == 1 and number("Result: 42x", "42") == 0 and number("", "42") == 0
    assert RegularExpression(pattern="please")("yes, please") == 1
    for pattern, message in (("(", "no regular expression"), ("(a)(b)", "several groups")):
        with pytest.raises(UserError, match=message):
            RegularExpression(pattern=pattern)


def test_json_of_a_schema():
    person = JsonSchema(json_schema={"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})
    for response in ('{"age": 3}', '<think>hm</think>\n```json\n{"age": 3}\n```\nDone.', ' {"age": 3, "name": "x"} '):
        assert person(response) == 1
    for response in ('{"age": 3.5}', '{"age": NaN}', "[]", '{"age": 3', '{"age": 3} and more', "[" * 100_000):
        assert person(response) == 0
    assert JsonSchema(json_schema={})("[1]") == 1
    with pytest.raises(UserError, match="no JSON Schema: 'nothing' is not valid"):
        JsonSchema(json_schema={"type": "nothing"})


def test_tags_stand_in_their_order_once_and_are_not_empty():
    both = TagFormat(tags=("think", "answer"), rest=False)
    assert both("<think>a</think>\n<answer>b</answer>\n") == 1 and TagFormat(opened=True)("hm</think> 42") == 1
    for response in (
        "<answer>b</answer><think>a</think>",
        "<think>a</think><answer>b</answer> and more",
        "<think> </think><answer>b</answer>",
        "<think>a</think> so <answer>b</answer>",
        "<think>a<think></think><answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>b</answer>",
        "<think>a</think><answer>b",
    ):
        assert both(response) == 0, response


def test_length_by_hand():
    shorter = LengthReward(full_tokens=10, no_tokens=20)
    assert [shorter([1] * n) for n in (0, 10, 15, 20, 99)] == [1, 1, 0.5, 0, 0]
    with pytest.raises(UserError, match="no_tokens must be more than full_tokens=5, not 5"):
        LengthReward(full_tokens=5, no_tokens=5)


def test_long_runs_of_one_character_cost_no_more_than_their_length():
    for run in ("*", " ", "\n"):
        long = run * 100_000
        assert MultipleChoice()(f"The answer is{long}x, so it is{long}x", "A") == 0
        assert MultipleChoice()(rf"\boxed{{A{long}+}}", "A") == MultipleChoice()(rf"\boxed{{A{2 * run}+}}", "A")
