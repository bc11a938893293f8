"""Graders without a separate process: answers as models write them."""

import pytest

from weft.algorithms.graders.choice import MultipleChoice, letter_of
from weft.algorithms.graders.math import Gsm8k
from weft.algorithms.graders.text import (
    F1,
    Exact,
    JsonSchema,
    LengthReward,
    RegularExpression,
    TagFormat,
)
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
    assert (
        Gsm8k(strict=True)("The answer is 18", "18") == 0 and Gsm8k(strict=True)("#### $18", "18") == 1
    )
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
        ("It isn't C.", None),
        ("The answer cannot be D because D is negative.", None),
        ("It is neither A nor D. The answer is C.", "C"),
        ("A is wrong, B is wrong, and C contradicts the text. So D.", "D"),
        ("Both A and C can be eliminated. B is correct.", "B"),
        ("I would go with A, not B.", "A"),
        ("(b)", "B"),
        ("b", "B"),
        ("My answer: c", "C"),
        ("Answer: b) photosynthesis", "B"),
        ("<answer>(d) a comet</answer>", "D"),
        ("Answer: C\n\nWait, no, it is A.", "A"),
    ],
)
def test_the_letter_that_a_response_settles_on(response: str, letter: str | None):
    assert letter_of(response) == letter


def test_multiple_choice():
    assert (
        MultipleChoice()("The answer is B.", "(B) Rome") == 1 and MultipleChoice()("no letter", "B") == 0
    )
    with pytest.raises(
        SampleError, match="the answer '42' names no option: no letter from A to J and no number"
    ):
        MultipleChoice()("B", "42")


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("3", 1),
        ("The answer is (3).", 1),
        ("(3) copper", 1),
        ("Option 4 is wrong. I choose 3 because it conducts.", 1),
        ("The answer is 4.", 0),
        ("It isn't 3.", 0),
        ("There are 3 apples.", 0),
        ("3.5", 0),
        ("C", 0),
    ],
)
def test_options_may_be_numbered(response: str, right: int):
    assert MultipleChoice()(response, "3") == right


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("#### 10 (x=3)", "10"),
        ("#### 10, since x = 3", "10"),
        ("#### x = 10", "10"),
        ("#### 2 * 5 = 10 apples", "10"),
        ("The mass is about 3.2e-5", "0.000032"),
        ("The charge is 1.6 × 10⁻¹⁹ C.", "1.6e-19"),
        ("There are 2^10 subsets.", "1024"),
        ("There are not 6 but 5 apples left.", "5"),
        ("There are 5 apples left, not 6.", "5"),
        ("He has 8 marbles rather than 9.", "8"),
        ("The answer is 20. Wait, no, I added wrong. The answer is 24.", "24"),
        ("The answer is 7... sorry, 8.", "8"),
        (r"\boxed{48}. Wait, that is only April. In total \boxed{72}.", "72"),
        ("He drinks 3 1/2 liters.", "3.5"),
        ("The temperature dropped to negative 5 degrees.", "-5"),
        ("<think>16 - 7 = 9</think><answer>18</answer>", "18"),
        ("The answer is twenty-five.", "25"),
        ("The city has 6 million people.", "6000000"),
    ],
)
def test_the_number_that_a_response_settles_on(response: str, number: str):
    assert Gsm8k()(response, number) == 1


@pytest.mark.parametrize(
    "response",
    [
        "12 * 3 =",
        r"\boxed{36}. Wait, no: \boxed{3",
        "<answer>36",
        "It is 36. No, that is wrong.",
        "<think>so 36",
    ],
)
def test_a_response_that_is_cut_off_or_withdrawn_states_no_number(response: str):
    assert Gsm8k()(response, "36") == Gsm8k()(response, "3") == 0


def test_the_answer_tag_is_read_by_graders_of_text_too():
    assert (
        Exact()("<think>hm</think><answer>Paris</answer>", "paris")
        == F1()("<answer>Paris</answer>", "Paris")
        == 1
    )
    assert JsonSchema(json_schema={"type": "array"})("<answer>[1, 2]</answer>") == 1


def test_text_is_compared_as_squad_does():
    assert (
        Exact()("The Eiffel Tower.", "eiffel tower") == 1
        and Exact()("The answer is Paris.", "Paris") == 1
    )
    assert Exact()("Paris, Texas", "Paris") == 0 and Exact(normalize=False)(" Paris ", "Paris") == 1
    assert F1()("the cat sat", "a cat sat down") == pytest.approx(2 * 2 / (2 + 3)) and F1()("", "") == 1
    assert F1()("dog", "cat") == 0 and F1()("cat cat", "cat") == pytest.approx(2 / 3)


def test_regular_expressions():
    number = RegularExpression(pattern=r"^Result: (\d+)$")
    assert (
        number("Result: 41\nResult: 42", "42") == 1
        and number("Result: 42x", "42") == 0
        and number("", "42") == 0
    )
    assert RegularExpression(pattern="please")("yes, please") == 1
    for pattern, message in (("(", "not a regular expression"), ("(a)(b)", "several groups")):
        with pytest.raises(UserError, match=message):
            RegularExpression(pattern=pattern)


def test_json_of_a_schema():
    person = JsonSchema(
        json_schema={"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    )
    for response in (
        '{"age": 3}',
        '<think>hm</think>\n```json\n{"age": 3}\n```\nDone.',
        ' {"age": 3, "name": "x"} ',
    ):
        assert person(response) == 1
    for response in (
        '{"age": 3.5}',
        '{"age": NaN}',
        "[]",
        '{"age": 3',
        '{"age": 3} and more',
        "[" * 100_000,
    ):
        assert person(response) == 0
    assert JsonSchema(json_schema={})("[1]") == 1
    with pytest.raises(UserError, match="not a JSON Schema: 'nothing' is not valid"):
        JsonSchema(json_schema={"type": "nothing"})


def test_tags_appear_once_in_order_and_are_not_empty():
    both = TagFormat(tags=("think", "answer"), rest=False)
    assert (
        both("<think>a</think>\n<answer>b</answer>\n") == 1
        and TagFormat()("hm</think> 42", "<|assistant|>\n<think>\n") == 1
        and TagFormat()("hm</think> 42", "Use <think>!") == 0
        and TagFormat()("<think>hm</think> 42", "<|assistant|>\n") == 1
    )
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
        assert MultipleChoice()(rf"\boxed{{A{long}+}}", "A") == MultipleChoice()(
            rf"\boxed{{A{2 * run}+}}", "A"
        )
