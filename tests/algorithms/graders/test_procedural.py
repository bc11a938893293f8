"""Tasks of reasoning-gym, which is an extra: rows, difficulty, and the task's own check."""

import pytest

import weft
from weft.algorithms.graders.procedural import ReasoningGym
from weft.dataflow.prompts.procedural_tasks import task_rows
from weft.dataflow.prompts.tokenizer import Tokenizer

pytest.importorskip("reasoning_gym.factory", exc_type=ImportError)


def letters() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    return Tokenizer(Backend(models.BPE({chr(c): i for i, c in enumerate(range(32, 127))}, [])))


def test_rows_can_be_graded_and_held_out_rows_are_others():
    prompts = weft.Prompts.reasoning_gym(
        "chain_sum", letters(), size=300, level=0, difficulty={"max_terms": 2}
    )
    assert prompts.name == "chain_sum" and 100 < len(prompts) < 300, "equal questions are kept once"
    train, held_out = prompts.hold_out(40)
    asked = [{*source.table["prompt"].to_pylist()} for source in (train, held_out)]
    assert not asked[0] & asked[1] and len(asked[1]) == 40
    grader = ReasoningGym()
    for row in held_out.table.to_pylist():
        same = {name: row[name] for name in ("task", "task_settings", "task_number")}
        assert grader(f"<think>1</think> <answer> {row['answer']} </answer>", **same) == 1
        assert grader(row["answer"], **same) == 1
        assert grader("<answer>12345</answer>", **same) < 0.5


def test_questions_of_another_seed_are_no_held_out_set():
    asked = [{row["prompt"] for row in task_rows("chain_sum", 50, seed, None, {})} for seed in (0, 1)]
    assert len(asked[0] & asked[1]) >= 48, "docs/data.md says so"


def test_several_answers_may_be_right():
    row = task_rows("countdown", 3, 7, None, {})[1]
    same = {name: row[name] for name in ("task", "task_settings", "task_number")}
    for right in (row["answer"], f"({row['answer']})"):
        assert ReasoningGym(exact=True)(right, **same) == 1
    assert ReasoningGym(exact=True)("no idea", **same) == 0


@pytest.mark.parametrize(
    ("task", "level", "difficulty", "says"),
    [
        ("chain_summ", None, {}, "did you mean 'chain_sum'?"),
        ("chain_sum", None, {"max_term": 2}, "refuses its settings"),
        ("chain_sum", None, {"min_terms": 0}, "min_terms must be positive"),
        ("chain_sum", -1, {}, "level must be at least 0"),
    ],
)
def test_mistakes_are_named(task: str, level: int | None, difficulty: dict[str, int], says: str):
    with pytest.raises(weft.UserError, match=says.replace("?", r"\?")):
        task_rows(task, 3, 0, level, difficulty)
