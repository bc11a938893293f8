r"""Final answers in worked solutions, after `####` or in `\boxed{}`, and the count of rows with
one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.dataflow.prompts.answers import final_answer
from weft.dataflow.prompts.prompts import Prompts


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She sells 9 eggs.\n#### 18", "18"),
        ("It costs $70,000.\n####  70,000\n", "70000"),
        ("####-1,234.5", "-1234.5"),
        ("#### 1,2 and 3", "1,2 and 3"),  # a list, not thousands
        (
            "#### Step 1\nAdd.\n#### Step 2\nIt is 4.",
            None,
        ),  # headings: no text follows the last one
        (r"So $\boxed{12}$, thus \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"The set is \boxed{\{1, 2\}}.", r"\{1, 2\}"),
        (r"Put it into \boxed{}: \boxed{7} it is, not \boxed{", "7"),
        (r"Hence \boxed 4.", "4"),
        (r"\fbox{A}", "A"),
        (r"Not \boxed{5}." + "\n#### 6", "6"),
        ("42", None),
        ("", None),
    ],
)
def test_the_final_answer_of_a_worked_solution(text: str, answer: str | None) -> None:
    assert final_answer(text)[1] == answer


def read(base: Path, *answers: Any, **settings: Any) -> Prompts:
    return Prompts.from_rows(
        [{"question": "2 + 2?", "answer": answer} for answer in answers], base, **settings
    )


def test_a_worked_solution_is_kept_with_its_final_answer(base: Path) -> None:
    worked = "2 + 2 = <<2+2=4>>4\n#### 4"
    prompts = read(base, worked, "5", None, r"\boxed{6}")
    assert prompts.table["answer"].to_pylist() == ["4", "5", None, "6"]
    assert prompts.table["full_answer"].to_pylist() == [worked, "5", None, r"\boxed{6}"]
    assert prompts.understood is not None
    assert prompts.understood.extraction == (
        r"what follows ####, in 1 of 4 rows; what \boxed{} holds, in 1 of 4 rows; as written in 1, the first rows, row 2; "
        "none in 1 of 4 rows, the first rows, row 3"
    )


def test_answers_that_mark_nothing_and_extraction_that_is_turned_off_leave_the_text(base: Path) -> None:
    plain = read(base, "4", "5")
    assert (
        "full_answer" not in plain.columns
        and plain.understood
        and plain.understood.extraction == "as written"
    )
    off = read(base, "It is\n#### 4", extract_answer=False)
    assert off.table["answer"].to_pylist() == ["It is\n#### 4"] and "full_answer" not in off.columns
    assert off.understood and off.understood.extraction == "as written (extract_answer=False)"
    # Lists and objects stay whole, as values or as JSON text: a test case may hold anything.
    for data in (["#### 4"], '["#### 4"]', r'{"gold": "\\boxed{4}"}'):
        assert read(base, data).table["answer"].to_pylist() == [data]


@pytest.mark.parametrize("extract", [True, False])
def test_rows_without_an_answer_are_counted(base: Path, extract: bool) -> None:
    understood = read(base, "4", None, 5, None, extract_answer=extract).understood
    assert understood and understood.extraction.endswith("; none in 2 of 4 rows, the first rows, row 2")
    assert "none in 2 of 4 rows" in str(understood)


def test_many_rows_keep_their_order_and_their_answers(base: Path) -> None:
    rows = [{"question": f"{k} + 0?", "answer": f"It is\n#### {k}"} for k in range(20_000)]
    table = Prompts.from_rows(rows, base).table
    assert table["answer"].to_pylist() == [str(k) for k in range(20_000)]
    assert table["prompt"].to_pylist() == [row["question"] for row in rows]
