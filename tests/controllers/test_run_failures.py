"""Errors that end a run, and their messages: worker, node, samples, and the broken rule."""

import re
from pathlib import Path
from typing import Any

import pytest
from toy import (
    prompts,
)
from toy_runs import drive, handles, training

from weft.controllers.backends.local import Local
from weft.controllers.group import Call
from weft.controllers.ranks.tasks import Task
from weft.controllers.schedule import Share, Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.errors import DeadlineError, StalledError, UserError, WorkerError
from weft.dataflow.operation import Shape, node
from weft.dataflow.tracing import graph


def test_a_failing_worker_is_named_with_node_samples_and_its_own_traceback(tmp_path: Path):
    with (
        drive(training(rollout={"fail_on": 31}), tmp_path) as driver,
        pytest.raises(WorkerError) as caught,
    ):
        driver.run()
    text = str(caught.value)
    assert re.match(
        r"worker rollout\[0\], node 'rollout.generate', samples [\d, ]+: RuntimeError: token 31 is not to my taste\n",
        text,
    )
    assert "in generate\n" in text and "toy.py" in text and 'raise RuntimeError(f"token' in text
    assert "executor.py" not in text and "driver.py" not in text


def test_a_failing_function_is_named_by_its_node(tmp_path: Path):
    @node(shape=Shape.GROUP, reads=("reward",), writes=("advantages",))
    def broken(samples: Batch) -> Batch:
        raise ZeroDivisionError("no deviation")

    @graph
    def breaking(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
        return actor.update(broken(reward.score(rollout.generate(prompts))))

    with (
        drive(breaking(prompts(8), **handles()), tmp_path) as driver,
        pytest.raises(WorkerError) as caught,
    ):
        driver.run()
    assert "node 'broken', samples" in str(caught.value) and "ZeroDivisionError: no deviation" in str(
        caught.value
    )


WRONG_RESULTS = [
    (
        lambda rows: rows.select(["reward"]),
        "TypeError: wrong must write column 'advantages', but returned reward",
    ),
    (lambda rows: [1, 2], "TypeError: wrong must return a Batch, metrics, or both as a pair, not list"),
    (
        lambda rows: (rows, 1.0),
        r"TypeError: wrong must return a Batch, metrics, or both as a pair, not (Batch, float)",
    ),
    (
        lambda rows: (rows, {"loss": 1.0}),
        "TypeError: wrong: metric 'loss' must be a Mean, Max, Sum or Std",
    ),
    (
        lambda rows: Batch.of(advantages=[[1.0]]),
        "TypeError: wrong returned 1 rows without sample_id for the 8 that it was given",
    ),
]


@pytest.mark.parametrize(("function", "message"), WRONG_RESULTS)
def test_a_wrong_return_value_of_a_node_is_refused_with_the_expected_one(
    tmp_path: Path, function: Any, message: str
):
    @node(reads=("reward",), writes=("advantages",))
    def wrong(samples: Batch) -> Any:
        return function(samples)

    @graph
    def going_wrong(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
        return actor.update(wrong(reward.score(rollout.generate(prompts))))

    with (
        drive(going_wrong(prompts(8), **handles()), tmp_path) as driver,
        pytest.raises(RuntimeError) as caught,
    ):
        driver.run()
    assert message in str(caught.value)


BROKEN_RULES = [
    (
        lambda rows: rows.take([0]).with_columns(advantages=[[]]),
        "it must return every row that it was given, but lost 7 of 8 (samples 5, 4100, 4101, 8196, ...). "
        "Declare an operation that leaves rows out with shape=Shape.FILTER",
    ),
    (
        lambda rows: None,
        "it must return every row that it was given, but lost 8 of 8 (samples 4, 5, 4100, 4101, ...)",
    ),
    (
        lambda rows: rows.take([0, *range(8)]).with_columns(advantages=[[]] * 9),
        "it must return each row once, but returned sample 4 twice",
    ),
    (
        lambda rows: rows.with_columns(sample_id=list(range(8)), advantages=[[]] * 8),
        "it must return rows that it was given, with their sample_id, but returned sample_id 0",
    ),
]


@pytest.mark.parametrize(("function", "message"), BROKEN_RULES)
def test_a_node_that_loses_or_repeats_rows_is_named_with_the_rows_and_the_rule(
    tmp_path: Path, function: Any, message: str
):
    @node(reads=("reward",), writes=("advantages",))
    def wrong(samples: Batch) -> Any:
        return function(samples)

    @graph
    def losing(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
        return actor.update(wrong(reward.score(rollout.generate(prompts))))

    with drive(losing(prompts(8), **handles()), tmp_path) as driver, pytest.raises(UserError) as caught:
        driver.run()
    where = "worker functions[0], node 'wrong', samples 4, 5, 4100, 4101: wrong is declared with shape=Shape.MAP: "
    assert str(caught.value).startswith(where + message)


def test_an_expansion_names_a_parent_that_it_was_not_given(tmp_path: Path):
    @node(shape=Shape.EXPAND, reads=("prompt_ids",), writes=("advantages", "response_ids"))
    def wrong(rows: Batch) -> Batch:
        return Batch.of(parent_id=[999], advantages=[[1.0]], response_ids=[[1]])

    @graph
    def making(prompts: Any, *, actor: Any) -> Any:
        return actor.update(wrong(prompts))

    recorded = making(prompts(8), actor=handles()["actor"])
    with (
        drive(recorded, tmp_path) as driver,
        pytest.raises(UserError, match="sample_id of a row that it was given, but it made a row of 999"),
    ):
        driver.run()


class Stubborn(Synchronous):
    def share(self, train: Any, node: Any, version: int, replicas: int = 1) -> Share | None:
        return None if node.name == "centred" else super().share(train, node, version)


def test_a_stalled_run_names_the_nodes_its_rows_wait_for(tmp_path: Path):
    with (
        drive(training(), tmp_path, schedule=Stubborn(prompts_per_step=2)) as driver,
        pytest.raises(StalledError) as caught,
    ):
        driver.run()
    assert "graph 'toy_grpo', group 0:" in str(caught.value)
    assert "centred: 2 of 2 rows to do; ready, not claimed" in str(caught.value)
    assert "actor.update: 2 of 2 rows to do; waits for centred" in str(caught.value)


class Silent(Local):
    """Workers that stop answering at the first `score`."""

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        if task.method != "score":
            super()._submit(rank, task, call)


def test_a_wait_has_a_deadline_and_names_the_missing_ranks(tmp_path: Path):
    with (
        drive(
            training(), tmp_path, backend=Silent(), call_timeout_s=1e-9
        ) as driver,  # waited out: nobody answers
        pytest.raises(DeadlineError) as caught,
    ):
        driver.run()
    assert re.fullmatch(
        r"no answer for \S+ s\. Waited for: worker reward\[0\], node 'reward\.score', on '\S+', "
        r"samples \d+, \d+, \d+, \d+ and 4 more "
        r"\(called [01] s ago\)",
        str(caught.value),
    )


def test_a_user_error_in_a_worker_stays_the_users(tmp_path: Path):
    @node(reads=("reward",), writes=("advantages",))
    def picky(samples: Batch) -> Batch:
        return samples.select(["rewards"])

    @graph
    def being_picky(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
        return actor.update(picky(reward.score(rollout.generate(prompts))))

    with (
        drive(being_picky(prompts(8), **handles()), tmp_path) as driver,
        pytest.raises(UserError) as caught,
    ):
        driver.run()
    assert "node 'picky'" in str(caught.value) and "did you mean 'reward'?" in str(caught.value)
