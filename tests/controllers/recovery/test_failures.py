"""Failing samples are retried, then dropped and counted; too many end the run."""

import math
import pdb
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_runs import SavingActor, trained
from toy import ToyActor, ToyLoss, ToyRollout, prompts, toy_evaluation

from weft.controllers.driver import Driver, Evaluation
from weft.controllers.schedule import Asynchronous, Synchronous, Training
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.logged_rows import GraphCounts
from weft.dataflow.errors import RunError, SampleError, UserError, WorkerError
from weft.dataflow.graph import Node, group
from weft.dataflow.operation import Shape, node
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.tracing import graph
from weft.workers.reward import RewardWorker


@node(shape=Shape.GROUP, reads=("reward", "response_ids"), writes=("advantages",))
def advantages(samples: Batch) -> Batch:
    """Reward minus the mean of the remaining group."""
    reward = samples.numpy("reward")
    _, index = samples.groups()
    mean = np.bincount(index, reward) / np.bincount(index)
    return samples.with_columns(
        advantages=[
            [r] * n for r, n in zip(reward - mean[index], samples.lengths("response_ids"), strict=True)
        ]
    )


@graph
def grpo(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    return actor.update(advantages(reward.score(rollout.generate(prompts, n=2))))


SYNCHRONOUS = Synchronous(steps=4, prompts_per_step=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that writes token 7 as `t7`."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    words = tokenizers.models.WordLevel({f"t{k}": k for k in range(200)}, unk_token="t0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder


def run(
    root: Path,
    model: Path,
    function: Callable[..., float],
    schedule: Training = SYNCHRONOUS,
    **settings: Any,
) -> tuple[list[dict[str, float]], list[Any], dict[str, GraphCounts]]:
    rollout, actor = (
        group(settings.pop("rollout", ToyRollout), name="rollout"),
        group(SavingActor, name="actor"),
    )
    reward = group(RewardWorker, name="reward", function=function, tokenizer=model, **settings)
    rollout.follows(actor)
    train = grpo(prompts(10), rollout=rollout, reward=reward, actor=actor)
    held_out = Evaluation(toy_evaluation(prompts(5), rollout=rollout, reward=reward), every=2)
    driver = Driver(
        train, schedule=schedule, evaluations=[held_out], root=root, name="run", progress=False
    )
    with driver:
        metrics = driver.run()
        weights = driver.call(actor, "weights")[0]
    report = check_log(root / "run" / "buffer")
    assert not report.violations
    return metrics, weights, report.graphs


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, Asynchronous(steps=4, prompts_per_step=4)])
@pytest.mark.parametrize("how", ["raises", "is not finite", "exits"])
def test_a_sample_that_always_fails_is_dropped_with_its_reason(
    tmp_path: Path, model: Path, schedule: Training, how: str
):
    asked: list[int] = []

    def length(response_ids: list[int], answer: str) -> float:
        if answer == "3" and len(response_ids) == 1:
            asked.append(len(asked))
            if how == "raises":
                raise ConnectionError("the judge does not answer")
            if how == "exits":
                sys.exit(3)
            return math.nan
        return float(len(response_ids))

    metrics, weights, graphs = run(tmp_path, model, length, schedule)
    dropped = {name: graph.dropped["failed at reward.score"] for name, graph in graphs.items()}
    assert (metrics[-1]["failed_rows"], metrics[-1]["eval/failed_rows"]) == (
        dropped["train"],
        dropped["eval"],
    )
    assert len(asked) == 3 * sum(dropped.values()), (
        "each was tried three times, and no other rows were scored again"
    )
    assert len(trained(weights)) == 4 * 4, "every group is trained on, one of them over its other sample"
    assert len(weights) == 2 * 16 - dropped["train"]
    assert metrics[-1]["requeued_rows"] == len(asked)
    assert all("eval/reward/mean" in row for row in metrics[::2])


def test_a_failure_at_all_samples_ends_the_run_with_prompt_and_response(tmp_path: Path, model: Path):
    def broken(response: str, answer: str) -> float:
        return 1 / 0

    with pytest.raises(WorkerError) as caught:
        run(tmp_path, model, broken)
    text = str(caught.value)
    assert "worker reward[0], node 'reward.score' failed 3 times at sample " in text
    assert re.search(
        r"\(row (\d) of source 'prompts'; prompt 't\1[01] .*', response 't\1[01]', at .*test_failures\.py:\d+\)",
        text,
    ), text
    assert "So did 8 of 8 rows so far, which is more than max_failed=0.05 allows" in text
    assert "ZeroDivisionError: division by zero" in text and "in broken" in text
    assert "weft.Local()" not in caught.value.text, "it is the backend already"


@pytest.mark.parametrize("result", [[1.0], "1.0", {"right": [1.0]}], ids=repr)
def test_a_result_that_is_no_reward_ends_the_run_at_the_first_sample(
    tmp_path: Path, model: Path, result: Any
):
    asked: list[int] = []

    def odd(response: str) -> Any:
        asked.append(len(asked))
        return result

    with pytest.raises(UserError, match=r"reward function .*odd returned .*response 't\d") as caught:
        run(tmp_path, model, odd)
    assert len(asked) == 1 and "Traceback" not in str(caught.value)


def test_failed_rows_count_among_the_rows_in_the_message(tmp_path: Path, model: Path):
    def broken(response_ids: list[int], answer: str) -> float:
        return 1 / (len(response_ids) - 1)

    with pytest.raises(WorkerError, match=r"So did \d+ of \d+ rows") as caught:
        run(tmp_path, model, broken)
    failed, seen = map(int, re.findall(r"So did (\d+) of (\d+) rows", str(caught.value))[0])
    assert (failed, seen) == (8, 16)


@pytest.mark.parametrize(
    ("value", "kind"), [(math.nan, UserError), (ConnectionError("no answer"), WorkerError)]
)
def test_with_max_failed_of_nothing_the_first_that_fails_for_good_ends_the_run(
    tmp_path: Path, model: Path, value: Any, kind: type[Exception]
):
    def judge(response: str, answer: str) -> float:
        if answer != "3":
            return 1.0
        if isinstance(value, Exception):
            raise value
        return value

    with pytest.raises(
        kind,
        match=r"node 'reward.score' failed 3 times at sample \d+ \(row 3 of source .*more than max_failed=0.0 ",
    ):
        run(tmp_path, model, judge, max_failed=0)


class PickyRollout(ToyRollout):
    """Fails to read one of the prompts."""

    replaceable = True

    def generate(self, prompts: Batch, *, n: int = 2) -> Any:
        ids = prompts["prompt_ids"].to_pylist()
        bad = [prompts["sample_id"][k].as_py() for k, own in enumerate(ids) if own[0] == 31]
        yield from super().generate(prompts.take([k for k, own in enumerate(ids) if own[0] != 31]), n=n)
        if bad:
            raise SampleError("the prompt is too long", bad)


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, Asynchronous(steps=4, prompts_per_step=4)])
def test_a_prompt_that_cannot_be_answered_is_dropped_and_another_takes_its_place(
    tmp_path: Path, model: Path, schedule: Training
):
    metrics, weights, graphs = run(tmp_path, model, lambda response: 1.0, schedule, rollout=PickyRollout)
    assert graphs["train"].dropped.get("failed at rollout.generate", 0) >= 1
    assert len(trained(weights)) == 16 and len(weights) == 32
    assert metrics[-1]["failed_rows"] == sum(graphs["train"].dropped.values())
    assert metrics[-1]["eval/failed_rows"] == sum(graphs["eval"].dropped.values())


class ShortSighted(ToyRollout):
    @classmethod
    def longest_prompt(cls, config: Any, nodes: Sequence[Node]) -> int:
        return 2


def test_prompts_that_the_generator_cannot_read_are_left_out_by_choice_and_counted(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
):
    reward, actor = group(RewardWorker, function=lambda response: 1.0, tokenizer=model), group(ToyActor)
    source = Prompts("train", prompts(10).table, too_long="drop")
    recorded = grpo(source, rollout=group(ShortSighted), reward=reward, actor=actor)
    with Driver(recorded, schedule=SYNCHRONOUS, root=tmp_path) as driver:
        driver.run()
        (seen,) = driver.call(actor, "seen_groups")
    assert sum(map(len, seen)) == 2 * 16
    generated = [call for call in driver.directory.timeline if call["node"] == "rollout.generate"]
    assert generated and all(call["tokens"] == 2 * call["rows"] for call in generated)
    assert "5 of 10 prompts of 'train' are left out: they are too long" in capfd.readouterr().out


class Stops(ToyActor):
    """Exits. It is not replaceable, so this ends the run."""

    def update(self, samples: Batch, *, loss: ToyLoss = ToyLoss()) -> Any:
        sys.exit(7)


def test_sys_exit_in_a_worker_ends_the_run_with_a_message(tmp_path: Path, model: Path):
    rollout, reward = (
        group(ToyRollout),
        group(RewardWorker, function=lambda response: 1.0, tokenizer=model),
    )
    train = grpo(prompts(10), rollout=rollout, reward=reward, actor=group(Stops, name="actor"))
    with (
        pytest.raises(
            WorkerError, match=r"worker actor\[0\], node 'actor.update', .*it called sys.exit\(7\)"
        ),
        Driver(train, schedule=SYNCHRONOUS, root=tmp_path, progress=False) as driver,
    ):
        driver.run()


def test_a_breakpoint_without_a_terminal_explains_how_to_get_one(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    with Path("/dev/null").open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)

        def stopping(response: str) -> float:
            pdb.Pdb(nosigint=True).set_trace()  # breakpoint() itself opens pytest's debugger
            return 1.0

        with pytest.raises(
            UserError, match=r"breakpoint\(\) found no terminal to stop at; run in a terminal"
        ) as caught:
            run(tmp_path, model, stopping)
    assert not isinstance(caught.value, RunError)
