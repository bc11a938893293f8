"""Unmodified reward functions of other libraries: their arguments, and the meaning of their
results.

The files come from `benchmarks/tasks/signatures.py`. Each is written as a user of its library
would.
"""

import functools
import importlib.util
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.errors import SampleError, UserError
from weft.dataflow.metrics import merge
from weft.dataflow.source import TableSource
from weft.workers.reward import RewardConfig, RewardWorker
from weft.workers.rewards.function import Reward
from weft.workers.rewards.signature import SIGNATURES

FILES = Path(__file__).resolve().parents[3] / "benchmarks/tasks/peer_rewards"


@cache
def user(file: str) -> Any:
    """Import a user's file from its path, as the libraries do."""
    spec = importlib.util.spec_from_file_location(f"user_{file}", FILES / f"{file}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    words = ["<end>", "one", "two", "three", "ask", "="]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<end>")
    )
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def samples(**columns: Any) -> Batch:
    given = {
        "sample_id": [7, 8, 9],
        "group_id": [1, 1, 2],
        "prompt": ["ask", "ask", "ask"],
        "prompt_ids": [[4], [4], [4]],
        "response_ids": [[1, 2, 0], [3], [2]],
        "answer": ["one two", "two", "two"],
        **columns,
    }
    return Batch.of(**{name: values for name, values in given.items() if values is not None})


def scored(
    function: Any, model: Path, batch: Batch | None = None, **arguments: Any
) -> tuple[Batch, dict[str, Any]]:
    worker = RewardWorker(RewardConfig(function=function, tokenizer=model))
    try:
        given = list(worker.score(samples() if batch is None else batch, **arguments))
    finally:
        worker.close()
    rows = Batch.concat([part for part, _ in given])
    metrics = merge(metrics for _, metrics in given)
    return rows, {name: metric.value for name, metric in metrics.items()}


def rewards(function: Any, model: Path, batch: Batch | None = None) -> list[float]:
    return scored(function, model, batch)[0]["reward"].to_pylist()


def parts(rows: Batch) -> list[dict[str, float]]:
    return [json.loads(text) for text in rows["reward_parts"].to_pylist()]


def test_trl_gets_lists_of_completions_and_of_columns(model: Path):
    assert rewards(user("of_trl").accuracy_reward, model) == [1, 0, 1]
    (note,) = RewardConfig(function=user("of_trl").accuracy_reward, tokenizer=model).notes
    assert note.endswith(
        " has TRL's signature (prompts, completions, completion_ids), called with a batch"
    )
    own_column = samples(answer=None, solution=["x", "three", "y"])
    assert rewards(user("of_trl").accuracy_reward, model, own_column) == [0, 1, 0]
    assert rewards(
        user("of_trl").RepetitionPenalty(), model, samples(response_ids=[[1, 1], [1, 2], []])
    ) == [
        -0.5,
        0,
        0,
    ]


def test_trl_gets_messages_where_the_prompts_were_messages(model: Path):
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.append((prompts[0], completions[0], sorted(columns)))
        return [0.0] * len(prompts)

    messages = pa.array([[{"role": "user", "content": "ask", "name": None}]] * 3)
    rewards(reward, model, samples(prompt_messages=messages))
    prompt, completion, columns = seen[0]
    assert prompt == [{"role": "user", "content": "ask"}] and completion == [
        {"role": "assistant", "content": "one two"}
    ]
    assert columns == ["answer", "completion_ids", "log_extra", "log_metric"]
    assert rewards(user("of_trl").accuracy_reward, model, samples(prompt_messages=messages)) == [1, 0, 1]


def test_trl_may_be_asynchronous_log_metrics_and_say_that_it_does_not_apply(model: Path):
    both = (user("of_trl").only_sums, Reward(function=user("of_trl").short, weight=2.0))
    rows, metrics = scored(both, model, samples(task=["sum", "other", "sum"]))
    assert rows["reward"].to_pylist() == [2.0, 2.0, 3.0]
    assert rows["reward/only_sums"].to_pylist() == [1.0, None, 1.0]
    assert rows["reward/short"].to_pylist() == [0.5, 1.0, 1.0]
    assert (
        metrics["only_sums"] == 1.0
        and metrics["short"] == pytest.approx(2.5 / 3)
        and metrics["longest"] == 3
    )


def test_verl_gets_one_sample_or_a_batch(model: Path):
    extra = pa.array([{"index": 5}, {"index": 6}, {"index": 7}])
    batch = samples(data_source=["gsm8k"] * 3, extra_info=extra)
    rows, metrics = scored(user("of_verl").compute_score, model, batch)
    assert rows["reward"].to_pylist() == [1, -1, 1] and metrics["acc"] == pytest.approx(2 / 3)
    assert parts(rows)[1] == {"acc": 0.0, "index": 6.0}, "text is no part"
    bonus = functools.partial(user("of_verl").my_reward_fn, bonus=0.25)
    assert rewards(bonus, model) == [1.25, 0.25, 1.25]
    assert rewards(user("of_verl").compute_score_batched, model) == [1, 0, 1]


def test_openrlhf_gets_queries_prompts_and_labels_and_returns_tensors(model: Path):
    rows, metrics = scored(user("of_openrlhf").reward_func, model)
    assert rows["reward"].to_pylist() == [1, 0, 1] and metrics["math_accuracy"] == pytest.approx(2 / 3)
    assert parts(rows)[1] == {"scores": 0.0, "math_accuracy": pytest.approx(2 / 3)}


def test_slime_gets_its_arguments_and_samples(model: Path):
    batch = samples(finish_reason=["stop", "stop", "length"])
    fixed = functools.partial(user("of_slime").reward_func, args=SimpleNamespace(wrong=-1.0))
    assert rewards(fixed, model, batch) == [1.0, -1.0, -0.5]
    with pytest.raises(
        UserError, match=r"no setting 'settings' .*; fix arguments with functools\.partial"
    ):
        Reward(function=user("of_slime").reward_func, settings={"wrong": -1.0})  # pyright: ignore[reportCallIssue]
    rows, _ = scored(user("of_slime").reward_group, model, batch)
    assert rows["reward"].to_pylist() == pytest.approx([1, 1 / 3, 1 / 3]) and parts(rows)[0] == {
        "length": 3.0
    }


def test_verifiers_gets_a_completion_and_its_answer(model: Path):
    assert rewards(user("of_verifiers").exact, model) == [1, 0, 1]


def test_the_recognized_signature_is_reported(model: Path):
    functions = (user("of_trl").accuracy_reward, user("of_verl").compute_score, user("of_weft").exact)
    notes = RewardConfig(function=functions, tokenizer=model).notes
    assert (
        len(notes) == 2
        and "reward function accuracy_reward" in notes[0]
        and "of_trl.py:4) has TRL's" in notes[0]
    )
    assert "has verl's signature (data_source, solution_str, ground_truth, extra_info)" in notes[1]
    assert {signature.library for signature in SIGNATURES} == {
        "TRL",
        "verl",
        "OpenRLHF",
        "slime",
        "verifiers",
    }


def test_impossible_arguments_are_reported_before_anything_starts(model: Path):
    def of_trainer(completions: Any, trainer_state: Any) -> Any: ...

    with pytest.raises(
        UserError, match=r"of_trainer\(.*takes 'trainer_state', which only TRL's own trainer has"
    ):
        RewardConfig(function=of_trainer, tokenizer=model)
    with pytest.raises(UserError, match="two reward functions are called 'exact'; give one a name"):
        RewardConfig(function=(user("of_weft").exact, user("of_verifiers").exact), tokenizer=model)
    source = TableSource("s", pa.table({"prompt": ["ask"], "solutions": ["x"]}))
    for function in (user("of_trl").accuracy_reward, user("of_verl").compute_score):
        with pytest.raises(
            UserError, match=r"takes '(solution|ground_truth)', and 's' has no ground truth"
        ):
            RewardWorker.check(RewardConfig(function=function, tokenizer=model), [], source)


@pytest.mark.parametrize("result", [[1.0], None, {"rewards": [1.0]}, "one", 1])
def test_a_result_that_is_no_list_of_rewards_is_refused_for_all(result: Any, model: Path):
    def wrong(completions: Any, **columns: Any) -> Any:
        return result

    with pytest.raises(
        SampleError, match="for 3 samples; it must return a list with a reward for each"
    ) as caught:
        scored(wrong, model)
    assert caught.value.sample_ids == (7, 8, 9)


def test_a_reward_in_a_list_that_is_no_number_is_that_samples(model: Path):
    with pytest.raises(SampleError, match="returned 'x'; a reward must be a finite number") as caught:
        scored(lambda completions, **columns: [1.0, "x", 2.0], model)
    assert caught.value.sample_ids == (8,)


def test_only_the_failing_samples_of_a_batch_are_blamed(model: Path):
    def picky(completions: list[str], **columns: Any) -> list[float]:
        return [1 / (len(text) - len("three")) for text in completions]

    worker = RewardWorker(RewardConfig(function=picky, tokenizer=model))
    done: list[Any] = []
    with pytest.raises(ZeroDivisionError) as caught:
        done += worker.score(samples())
    assert [id for rows, _ in done for id in rows["sample_id"].to_pylist()] == [7, 9]
    assert caught.value.sample_ids == (8,)  # pyright: ignore[reportAttributeAccessIssue]
    assert caught.value.sample.endswith(  # pyright: ignore[reportAttributeAccessIssue]
        f"response 'three', at {__file__}:{picky.__code__.co_firstlineno + 1}"
    )
