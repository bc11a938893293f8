"""Small real workers without a model. They count calls, so that tests know what must have happened."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import without_pandas as without_pandas

from weft.dataflow.batch import Batch
from weft.dataflow.config import Config
from weft.dataflow.metrics import Max, Mean, Metrics, Sum
from weft.dataflow.operation import GROUPS, Shape, TrainingBatch, node
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Coordinates, Dispatch
from weft.workers.worker import Worker, remote


class ToyConfig(Config):
    fail_on: int = -1
    """Prompt token at which generate raises."""
    ranks_per_replica: int = 1
    max_num_seqs: int = 256
    skip_update_at: int = -1
    """Version of the weights that is received but not loaded."""
    garble: bool = False
    """Receive weights with a wrong checksum."""
    model: str | None = None
    """Folder with a tokenizer.json."""

    @property
    def replica_ranks(self) -> int:
        return self.ranks_per_replica


class ToyRollout(Worker):
    """Answers each prompt with its tokens counted up; the response has `sample index` tokens."""

    Config = ToyConfig
    version = 0

    @property
    def coordinates(self) -> Coordinates:
        each = self.config.ranks_per_replica
        return Coordinates(dp=self.context.rank // each, tp=self.context.rank % each)

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        reads=("prompt_ids",),
        writes=("response_ids", "response_logprobs", "response_versions"),
    )
    def generate(self, prompts: Batch, *, n: int = 2) -> Iterator[tuple[Batch, Metrics]]:
        for k in range(len(prompts)):
            ids = prompts["prompt_ids"][k].as_py()
            if self.config.fail_on in ids:
                raise RuntimeError(f"token {self.config.fail_on} is not to my taste")
            responses = [[ids[0] + j for j in range(i + 1)] for i in range(n)]
            yield (
                Batch.of(
                    parent_id=[prompts["sample_id"][k].as_py()] * n,
                    response_ids=responses,
                    response_logprobs=[[-1.0] * len(r) for r in responses],
                    response_versions=[[self.version] * len(r) for r in responses],
                ),
                {"tokens": Sum(sum(map(len, responses)))},
            )

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: ToyWeights) -> str:
        if weights.version != self.config.skip_update_at:
            self.version = weights.version
        return "garbled" if self.config.garble else weights.checksum


class ToyWeights:
    def __init__(self, version: int) -> None:
        self.version = version
        self.checksum = f"{zlib.crc32(str(version).encode()):08x}"
        self.num_bytes = 8

    def __add__(self, other: ToyWeights) -> ToyWeights:
        return self


class ToyLoss(Config):
    """A user-defined loss: a value with settings, which declares the columns it reads."""

    scale: float = 1.0
    column: str = "advantages"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.column,)


class ToyActor(Worker):
    """Remembers the rows it was trained on."""

    Config = ToyConfig
    seen: list[list[int]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen = []

    @property
    def coordinates(self) -> Coordinates:
        each = self.config.ranks_per_replica
        return Coordinates(dp=self.context.rank // each, tp=self.context.rank % each)

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda loss: ("prompt_ids", "response_ids", *loss.reads),
        may_read=("response_versions",),
        takes=TrainingBatch(),
    )
    def update(self, samples: Batch, *, loss: ToyLoss = ToyLoss()) -> Metrics:
        self.seen.append(samples["group_id"].to_pylist())
        per_token = isinstance(samples[loss.column], pa.ListArray)
        values = samples.ragged_numpy(loss.column)[0] if per_token else samples.numpy(loss.column)
        prompt_tokens = int(samples.lengths("prompt_ids").sum())
        return {
            "rows": Sum(len(samples)),
            "prompt_tokens": Sum(prompt_tokens),
            "largest": Max(loss.scale * float(values.max(initial=0.0))),
        }

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=lambda into: (into,))
    def logprobs(self, samples: Batch, *, into: str = "old_logprobs") -> Batch:
        values, offsets = samples.ragged_numpy("response_ids")
        return samples.with_columns(**{into: (values.astype(np.float32) * 0.5, offsets)})

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int, receivers: Sequence[str] = ()) -> ToyWeights:
        return ToyWeights(version)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def finish_publishing(self, version: int) -> ToyWeights:
        return ToyWeights(version)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def seen_groups(self) -> list[list[int]]:
        return self.seen

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def echo(self, value: object) -> object:
        return (self.context.rank, value)


class SlowConfig(ToyConfig):
    slowest: int = 6
    """Longest response, in turns."""
    seed: int = 0


class SlowRollout(Worker):
    """Answers each prompt after a varying number of turns, with tokens of the current version."""

    Config = SlowConfig
    version = 0

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=("prompt_ids",),
        writes=("response_ids", "response_logprobs", "response_versions"),
    )
    def generate(self, prompts: Batch, *, n: int = 2) -> Iterator[tuple[Batch, Metrics] | None]:
        chance = np.random.default_rng((self.config.seed, *prompts.numpy("sample_id").tolist()))
        left = {k: int(chance.integers(1, self.config.slowest + 1)) for k in range(len(prompts))}
        versions: dict[int, list[int]] = {k: [] for k in left}
        while left:
            done = [k for k, turns in left.items() if turns == 1]
            for k in left:
                left[k] -= 1
                versions[k].append(self.version)
            for k in done:
                del left[k]
            if not done:
                yield None
                continue
            ids = [
                [prompts["prompt_ids"][k].as_py()[0]] * len(versions[k]) for k in done for _ in range(n)
            ]
            yield (
                Batch.of(
                    parent_id=[prompts["sample_id"][k].as_py() for k in done for _ in range(n)],
                    response_ids=ids,
                    response_logprobs=[[-1.0] * len(r) for r in ids],
                    response_versions=[versions[k] for k in done for _ in range(n)],
                ),
                {"tokens": Sum(sum(map(len, ids)))},
            )

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Any) -> str:
        self.version = weights.version
        return weights.checksum


class PartsActor(ToyActor):
    """Notes the rows of each part. Its version is the number of its steps."""

    parts: list[tuple[list[int], bool]]
    version = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts = []

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda loss: ("response_ids", *loss.reads),
        may_read=("response_versions",),
        takes=lambda epochs: TrainingBatch(accumulates=epochs == 1),
    )
    def update(
        self, samples: Batch, *, loss: ToyLoss = ToyLoss(), epochs: int = 1, last: bool = True
    ) -> Metrics:
        values, _ = samples.ragged_numpy("response_versions")
        self.parts.append((samples["group_id"].to_pylist(), last))
        lag = self.version - int(values.min(initial=self.version))
        self.version += last
        return {"rows": Sum(len(samples)), "lag": Max(float(lag))}

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def seen_parts(self) -> list[tuple[list[int], bool]]:
        return self.parts


class ToyCritic(ToyActor):
    """A second model with updates."""

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=("values",))
    def values(self, samples: Batch) -> Batch:
        ids, offsets = samples.ragged_numpy("response_ids")
        return samples.with_columns(values=(ids.astype(np.float32), offsets))


class ToyTeacher(Worker):
    """Scores with the version of the weights that it received last."""

    Config = ToyConfig
    received: list[int]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.received = []

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids",), writes=("taught",))
    def teach(self, samples: Batch) -> tuple[Batch, Metrics]:
        version = self.received[-1]
        return samples.with_columns(taught=[float(version)] * len(samples)), {"version": Max(version)}

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: ToyWeights) -> str:
        self.received.append(weights.version)
        return weights.checksum


class ToyReward(Worker):
    """Rewards a response with its length."""

    Config = ToyConfig

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids", "answer"), writes=("reward",))
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        reward = samples.lengths("response_ids").astype(np.float32)
        return samples.with_columns(reward=reward), {"mean": Mean(float(reward.sum()), len(samples))}


@node(shape=Shape.GROUP, reads=("reward", "response_ids"), writes=("advantages",))
def centred(samples: Batch) -> Batch:
    """Reward minus the group mean, repeated over the tokens."""
    reward = samples.numpy("reward")
    _, index = samples.groups()
    mean = np.bincount(index, reward) / np.bincount(index)
    lengths = samples.lengths("response_ids")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    assert all(np.bincount(index) == np.bincount(index)[0]), "groups must be whole"
    return samples.with_columns(
        advantages=(np.repeat((reward - mean[index]).astype(np.float32), lengths), offsets)
    )


@node(shape=Shape.FILTER, reads=("prompt_ids",), takes=GROUPS)
def odd_prompts(samples: Batch) -> Batch:
    """Keep groups whose prompt starts with an odd token."""
    return samples.take([k for k, ids in enumerate(samples["prompt_ids"].to_pylist()) if ids[0] % 2])


@graph
def toy_grpo(prompts, *, rollout, reward, actor, n=2, loss=ToyLoss()):
    samples = rollout.generate(prompts, n=n)
    samples = reward.score(samples)
    samples = centred(samples)
    return actor.update(samples, loss=loss)


@graph
def toy_reinforce(prompts, *, rollout, actor, reward=None, n=2, column="response_logprobs"):
    """The smallest graph that trains.

    It has no function, so under Ray a run takes fewer processes than `toy_grpo`.
    """
    samples = rollout.generate(prompts, n=n)
    if reward is None:
        return actor.update(samples, loss=ToyLoss(column=column))
    return actor.update(reward.score(samples), loss=ToyLoss(column="reward"))


@graph
def toy_ppo(prompts, *, rollout, reward, critic, actor, n=2):
    samples = critic.values(reward.score(rollout.generate(prompts, n=n)))
    samples = centred(samples)
    return critic.update(samples), actor.update(samples)


@graph
def toy_distillation(prompts, *, rollout, reward, teacher, actor):
    samples = teacher.teach(reward.score(rollout.generate(prompts)))
    return actor.update(centred(samples))


@graph
def toy_dapo(prompts, *, rollout, reward, actor, n=2):
    samples = rollout.generate(prompts, n=n)
    samples = odd_prompts(samples)
    samples = reward.score(samples)
    samples = centred(samples)
    return actor.update(samples)


@graph
def toy_evaluation(prompts, *, rollout, reward):
    return reward.score(rollout.generate(prompts, n=1))


def prompts(number: int = 8, name: str = "prompts") -> TableSource:
    return TableSource(
        name,
        pa.table(
            {
                "prompt_ids": pa.array(
                    [[10 * k + 1] * 3 if k % 2 else [10 * k] * 2 for k in range(number)],
                    pa.list_(pa.int32()),
                ),
                "answer": [str(k) for k in range(number)],
            }
        ),
    )
