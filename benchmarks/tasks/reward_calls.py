"""Reward calls: 64 asynchronous rewards of 100 ms each on one rank, in parallel and in sequence."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

import tokenizers

from weft.dataflow.batch import Batch
from weft.workers.reward import RewardConfig, RewardWorker
from weft.workers.rewards.function import Reward

NUMBER = 64
CALL_S = 0.1


async def answered(response_ids: list[int]) -> float:
    """A reward that waits for a remote answer."""
    await asyncio.sleep(CALL_S)
    return 1.0


def seconds(concurrency: int, folder: Path) -> float:
    """Return the seconds of a worker for all samples, with this many concurrent calls."""
    reward = Reward(function=answered, concurrency=concurrency)
    worker = RewardWorker(RewardConfig(function=reward, tokenizer=folder))
    samples = Batch.of(sample_id=list(range(NUMBER)), response_ids=[[0]] * NUMBER)
    list(worker.score(samples.slice(0, 1)))  # start the thread with the event loop
    began = time.perf_counter()
    scored = sum(len(rows) for rows, _ in worker.score(samples))
    took = time.perf_counter() - began
    worker.close()
    assert scored == NUMBER
    return took


def reward_calls() -> tuple[float, float]:
    """Return the seconds in parallel, and in sequence."""
    with tempfile.TemporaryDirectory() as folder:
        words = tokenizers.models.WordLevel({"one": 0}, unk_token="one")
        tokenizers.Tokenizer(words).save(str(Path(folder) / "tokenizer.json"))
        return seconds(NUMBER, Path(folder)), seconds(1, Path(folder))


if __name__ == "__main__":
    together_s, in_turn_s = reward_calls()
    print(json.dumps({"reward_calls_s": together_s, "one_after_the_other_s": in_turn_s}))
