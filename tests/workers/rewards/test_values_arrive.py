"""Reward functions of every signature receive the values of the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.prompts.prompts import Prompts
from weft.workers.reward import RewardConfig, RewardWorker
from weft.workers.rewards.function import Reward

VALUES: list[Any] = [
    5,
    1.0,
    2**70,
    True,
    [1, "a"],
    {"target": 98, "numbers": [1]},
    {"target": 5},
    '{"target": 98}',
    "[1]",
    "5",
]
SEEN: list[Any] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "one": 1}, unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def ours(response: str, answer: Any, extra_info: Any) -> float:
    SEEN.append((answer, extra_info))
    return 0.0


def ours_in_batches(response: list[str], answer: list[Any], extra_info: list[Any]) -> list[float]:
    SEEN.extend(zip(answer, extra_info, strict=True))
    return [0.0] * len(answer)


def trl(completions: list[str], solution: list[Any], extra_info: list[Any], **rest: Any) -> list[float]:
    SEEN.extend(zip(solution, extra_info, strict=True))
    return [0.0] * len(completions)


def verl(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    SEEN.append((ground_truth, extra_info))
    return 0.0


def verl_batch(
    data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any
) -> list[float]:
    SEEN.extend(zip(ground_truths, extra_infos, strict=True))
    return [0.0] * len(solution_strs)


def openrlhf(queries: Any, prompts: Any, labels: Any, extra_info: Any) -> list[float]:
    SEEN.extend(zip(labels, extra_info, strict=True))
    return [0.0] * len(queries)


async def slime(args: Any, sample: Any) -> float:
    SEEN.append((sample.label, sample.metadata))
    return 0.0


async def slime_batch(args: Any, samples: Any) -> list[float]:
    SEEN.extend((sample.label, sample.metadata) for sample in samples)
    return [0.0] * len(samples)


def rubric(completion: Any, answer: Any, info: Any) -> float:
    SEEN.append((answer, info))
    return 0.0


@pytest.mark.parametrize(
    "column", ["answer", "label", "solution", "ground_truth", "reward_model.ground_truth"]
)
@pytest.mark.parametrize(
    ("function", "extra"),
    [
        (ours, "extra_info"),
        (Reward(function=ours_in_batches, batch=True), "extra_info"),
        (trl, "extra_info"),
        (verl, "extra_info"),
        (verl_batch, "extra_info"),
        (openrlhf, "extra_info"),
        (slime, "metadata"),
        (slime_batch, "metadata"),
        (rubric, "info"),
    ],
    ids=lambda value: getattr(getattr(value, "function", value), "__name__", str(value)),
)
def test_a_reward_function_gets_the_values_of_the_file(
    function: Any, extra: str, column: str, model: Path, tmp_path: Path
) -> None:
    name, _, inner = column.partition(".")
    rows = [
        {"prompt": "one", name: {inner: value} if inner else value, extra: value} for value in VALUES
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = Batch.of_table(Prompts.read(file, model).table)
    number = len(VALUES)
    rows_of_run = batch.with_columns(
        sample_id=list(range(number)), group_id=list(range(number)), response_ids=[[1]] * number
    )
    SEEN.clear()
    worker = RewardWorker(RewardConfig(function=function, tokenizer=model))
    list(worker.score(rows_of_run))
    worker.close()
    assert sorted(map(json.dumps, SEEN)) == sorted(json.dumps((value, value)) for value in VALUES)
