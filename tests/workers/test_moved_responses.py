"""A rollout worker gives up unfinished responses, and a second worker continues them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.column import BEGUN_NUMBER
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.worker import Children, Context, Unfinished

SAMPLES = 3
GREEDY = Sampling(max_tokens=24, temperature=0, stop=None)
TRUNCATED = Sampling(max_tokens=24, top_k=5, min_tokens=4)
COLUMNS = ("response_ids", "response_logprobs", "response_versions")


def prompts_of(lengths: list[int], **columns: Any) -> Batch:
    rng = np.random.default_rng(0)
    ids = np.arange(len(lengths)) + 100
    tokens = [rng.integers(3, 97, length) for length in lengths]
    return Batch.of(sample_id=ids, group_id=ids, parent_id=ids, prompt_ids=tokens, **columns)


def worker_of(model: Path, **settings: Any) -> RolloutWorker:
    return RolloutWorker(RolloutConfig(model=model, engine="transformers", **settings), Context(seed=5))


class Collected:
    """Responses by prompt and number, and how often each prompt was finished."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}
        self.finished: Counter[int] = Counter()
        self.unfinished: Unfinished | None = None

    def take(self, part: Any) -> None:
        if part is None:
            return
        children, metrics = part
        if isinstance(children, Unfinished):
            assert self.unfinished is None, "it gives up responses once"
            assert metrics["moved_responses"].value == len(children.numbers)
            self.unfinished = children
            return
        assert isinstance(children, Children)
        self.finished.update(children.finished.tolist())
        for row, number in zip(children.rows.to_rows(), children.numbers.tolist(), strict=True):
            assert (row["parent_id"], number) not in self.rows, "each response comes once"
            self.rows[row["parent_id"], number] = row


def generate(
    worker: RolloutWorker, prompts: Batch, sampling: Sampling, ask_after: int = -1
) -> Collected:
    found = Collected()
    for step, part in enumerate(worker.generate(prompts, n=SAMPLES, sampling=sampling)):
        found.take(part)
        if step == ask_after:
            worker.hand_over(parts=2, min_tokens=1)
    return found


def rows_to_continue(prompts: Batch, given: Unfinished) -> Batch:
    """Return the rows that the driver gives the next worker: a prompt for each response."""
    parents = given.rows.numpy("parent_id")
    rows = prompts.take((parents - 100).tolist())
    kept = [name for name in ("kept_counts", "kept_ids") if name in given.rows]
    so_far = {name: given.rows[name] for name in (*COLUMNS, *kept)}
    return rows.with_columns(**{str(BEGUN_NUMBER): given.numbers.astype(np.int32)}, **so_far)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("slots", [256, 4])
@pytest.mark.parametrize("sampling", [GREEDY, TRUNCATED], ids=["greedy", "truncated"])
def test_a_replica_continues_the_responses_that_another_one_gives_up(
    tiny_model: Path, sampling: Sampling, slots: int, ordered: bool
):
    settings = {"max_num_seqs": slots, "kept_sets": sampling is TRUNCATED}
    first, second = (worker_of(tiny_model, **settings) for _ in range(2))
    expected = {"expected_tokens": np.array([24.0, np.nan, 12.0, 30.0], np.float32)} if ordered else {}
    prompts = prompts_of([3, 5, 4, 3], **expected)
    whole = generate(second, prompts, sampling)
    begun = generate(first, prompts, sampling, ask_after=6)
    given = begun.unfinished
    assert given is not None and len(given.numbers) > 1
    rest = generate(second, rows_to_continue(prompts, given), sampling)
    assert not begun.rows.keys() & rest.rows.keys()
    found = begun.rows | rest.rows
    assert found.keys() == whole.rows.keys()
    for place, row in whole.rows.items():
        other = found[place]
        # The engine's random numbers depend on seed and position, so samples are the same.
        for column in row.keys() - {"response_logprobs"}:
            assert other[column] == row[column], column
        np.testing.assert_allclose(other["response_logprobs"], row["response_logprobs"], atol=5e-5)
    # A prompt is finished by each row that holds a part of its responses.
    holders = Counter(dict.fromkeys(range(100, 104), 1)) + Counter(
        given.rows.numpy("parent_id").tolist()
    )
    holders -= Counter(given.left.tolist())
    assert begun.finished + rest.finished == holders


def test_a_worker_gives_up_nothing_if_too_few_tokens_follow(tiny_model: Path):
    worker, found = worker_of(tiny_model), Collected()
    for part in worker.generate(prompts_of([3, 4]), n=SAMPLES, sampling=GREEDY):
        found.take(part)
        worker.hand_over(parts=2, min_tokens=1000)
    assert found.unfinished is None and len(found.rows) == 2 * SAMPLES


def test_a_request_to_give_up_responses_does_not_outlive_the_call(tiny_model: Path):
    worker = worker_of(tiny_model)
    worker.hand_over()
    assert generate(worker, prompts_of([3, 4]), GREEDY).unfinished is None
    generation = worker.generate(prompts_of([3]), n=1, sampling=GREEDY)
    next(generation)
    worker.hand_over()
    assert not any(isinstance(part and part[0], Unfinished) for part in generation), "the last one stays"
    assert generate(worker, prompts_of([3, 4]), GREEDY).unfinished is None
