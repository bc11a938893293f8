"""What the sample buffers of `buffer.py` work on: groups of rows of uneven length, one big rectangle, and the works themselves.

| work | settings | answer |
|---|---|---|
| `ragged_put` | `rows`, `groups_per_put` | `rows_per_s`, `gb_per_s`, `seconds` |
| `ragged_get` | `rows`, `claim`, `in_flight` | the same: rows are claimed, fetched and summed up by the consumer |
| `dense` | `bytes`, `rows` | `put_gb_per_s`, `get_gb_per_s`; Weft's also `memcpy_gb_per_s` of the same bytes |
| `claim` | `held`, `claims` | `claim_8_p50_ms`, `claim_8_p99_ms`, `claim_64_p50_ms`, `claim_64_p99_ms` |
| `stream` | `groups`, `group_ms`, `microbatch`, `train_ms` | `first_s`, `idle_share`, `total_s`, `microbatches` |

`stream` is generate -> reward -> update: the producer makes a group of 8 each `group_ms` on a fixed timetable, the reward node puts the
column `reward` beside it, and the trainer takes `microbatch` rows with all columns, sums them up and sleeps `train_ms`. `first_s` is from
the start of the timetable to the first microbatch in the trainer; `idle_share` is the trainer's time without one, from there on.
All answers have `work`, and `verified`: what came back has the content (`content_hash`) of what was put.

Rows are pure functions of a seed, made with numpy and pyarrow alone, for processes of Weft and of a peer in another environment.
Any process can make any group again and check what arrived:

    >>> batch = group(seed=0, number=3)
    >>> batch.num_rows, batch["response_ids"].lengths.tolist() == batch["advantages"].lengths.tolist()
    (8, True)
    >>> rows = list(batch.rows())
    >>> content_hash(rows[0]) == content_hash(next(group(seed=0, number=3).rows()))
    True
    >>> content_hash(rows[0]) == content_hash(rows[1])
    False
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

GROUP = 8
"""Rows in a group."""
MEAN_PROMPT, MEAN_RESPONSE, MAX_RESPONSE = 200, 1_800, 16_384
"""Tokens in a row: about 2,000 in the mean, log-normal, so that a few rows are several times longer."""
VOCABULARY = 150_000

DTYPES = {
    "prompt_ids": np.dtype(np.int32),
    "response_ids": np.dtype(np.int32),
    "response_logprobs": np.dtype(np.float32),
    "response_versions": np.dtype(np.int32),
    "advantages": np.dtype(np.float32),
    "reward": np.dtype(np.float32),
}
"""The columns of a row; `reward` is one number, the others are as long as the prompt or as the response."""
SCALARS = ("reward",)
GENERATED = ("prompt_ids", "response_ids", "response_logprobs", "response_versions")
"""What the producer of `stream` puts."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "ragged_put": {"rows": 512, "groups_per_put": 8},
    "ragged_get": {"rows": 512, "claim": 64, "in_flight": 4},
    "dense": {"bytes": 128 << 20, "rows": 64},
    "claim": {"held": 1000, "claims": 500},
    "stream": {"groups": 64, "group_ms": 25.0, "microbatch": 32, "train_ms": 100.0},
}
SMALL: dict[str, dict[str, Any]] = {
    "ragged_put": {"rows": 32, "groups_per_put": 2},
    "ragged_get": {"rows": 32, "claim": 16},
    "dense": {"bytes": 1 << 20, "rows": 8},
    "claim": {"held": 256, "claims": 2},
    "stream": {"groups": 8, "group_ms": 10.0, "train_ms": 10.0},
}


def settings(command: Mapping[str, Any], small: bool) -> tuple[str, dict[str, Any]]:
    """The work that a command names, and its settings: the defaults where the command leaves them out.

    >>> settings({"steps": 1, "work": "claim", "held": 5000}, small=False)
    ('claim', {'held': 5000, 'claims': 500})
    """
    asked = {name: value for name, value in command.items() if name not in ("steps", "work")}
    work = command["work"]
    return work, {**DEFAULTS[work], **(SMALL[work] if small else {}), **asked}


@dataclass(frozen=True)
class Ragged:
    """A column of rows of uneven length, end to end in one array."""

    values: NDArray[np.generic]
    offsets: NDArray[np.int32]
    """[rows + 1] where each row starts, and where the last ends."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.diff(self.offsets)

    def __getitem__(self, row: int) -> NDArray[np.generic]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True)
class Batch:
    """Rows as columns, from which each system makes its own batches without a copy."""

    ragged: Mapping[str, Ragged]
    scalars: Mapping[str, NDArray[np.generic]]

    def __getitem__(self, name: str) -> Ragged:
        return self.ragged[name]

    @property
    def num_rows(self) -> int:
        return len(self.scalars["reward"])

    @property
    def num_bytes(self) -> int:
        return sum(c.values.nbytes for c in self.ragged.values()) + sum(c.nbytes for c in self.scalars.values())

    @property
    def num_tokens(self) -> int:
        return len(self["prompt_ids"].values) + len(self["response_ids"].values)

    def rows(self, names: Sequence[str] = tuple(DTYPES)) -> Iterator[dict[str, NDArray[np.generic]]]:
        """Row by row, each column an array of its own (a number has one element)."""
        for row in range(self.num_rows):
            yield {n: self.ragged[n][row] if n in self.ragged else self.scalars[n][row : row + 1] for n in names}

    def to_arrow(self) -> pa.RecordBatch:
        """The same memory as an Arrow record batch: list columns, and `reward` as a plain one."""
        arrays: list[pa.Array] = []
        for name in DTYPES:
            if name in self.ragged:
                column = self.ragged[name]
                arrays.append(pa.ListArray.from_arrays(pa.array(column.offsets), pa.array(column.values)))
            else:
                arrays.append(pa.array(self.scalars[name]))
        return pa.RecordBatch.from_arrays(arrays, names=list(DTYPES))


def group(seed: int, number: int) -> Batch:
    """The rows of one prompt; every process makes the same ones of a seed and a number."""
    random = np.random.default_rng([seed, number])
    prompt = np.full(GROUP, max(1, random.poisson(MEAN_PROMPT)))
    # A log-normal with sigma s has the mean exp(mu + s² / 2); 0.6 puts one row in twenty beyond twice the mean.
    sigma = 0.6
    lengths = random.lognormal(np.log(MEAN_RESPONSE) - sigma**2 / 2, sigma, GROUP)
    response = np.clip(lengths.astype(np.int64), 1, MAX_RESPONSE)
    prompts, responses = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (prompt, response))
    one_prompt = random.integers(0, VOCABULARY, prompt[0], dtype=np.int32)
    tokens = int(responses[-1])
    reward = random.random(GROUP, dtype=np.float32)
    ragged = {
        "prompt_ids": Ragged(np.tile(one_prompt, GROUP), prompts),
        "response_ids": Ragged(random.integers(0, VOCABULARY, tokens, dtype=np.int32), responses),
        "response_logprobs": Ragged(-random.random(tokens, dtype=np.float32), responses),
        "response_versions": Ragged(np.full(tokens, number // 16, np.int32), responses),
        "advantages": Ragged(np.repeat(reward - reward.mean(), response), responses),
    }
    return Batch(ragged, {"reward": reward})


def ragged(rows: int, seed: int = 0) -> list[Batch]:
    """The groups 0, 1, ..., `rows` rows in all."""
    if rows % GROUP:
        raise ValueError(f"{rows} rows are not complete groups of {GROUP}")
    return [group(seed, number) for number in range(rows // GROUP)]


def short(rows: int, seed: int = 0) -> Batch:
    """Rows of the same columns with a few tokens each, for works in which only their number matters."""
    random = np.random.default_rng(seed)
    prompts = np.arange(0, 2 * rows + 1, 2, dtype=np.int32)
    responses = np.concatenate([[0], np.cumsum(random.integers(1, 8, rows))]).astype(np.int32)
    tokens = int(responses[-1])
    ragged = {
        name: Ragged(
            np.zeros(2 * rows if name == "prompt_ids" else tokens, dtype),
            prompts if name == "prompt_ids" else responses,
        )
        for name, dtype in DTYPES.items()
        if name not in SCALARS
    }
    return Batch(ragged, {"reward": random.random(rows, dtype=np.float32)})


def joined(batches: Sequence[Batch]) -> Batch:
    """Several groups as one batch."""

    def join(name: str) -> Ragged:
        parts = [batch[name] for batch in batches]
        lengths = np.concatenate([part.lengths for part in parts])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return Ragged(np.concatenate([part.values for part in parts]), offsets)

    return Batch(
        {name: join(name) for name in batches[0].ragged},
        {name: np.concatenate([batch.scalars[name] for batch in batches]) for name in batches[0].scalars},
    )


def dense(num_bytes: int = 128 << 20, seed: int = 0) -> NDArray[np.float32]:
    """A rectangle of numbers, 64 KiB a row."""
    columns = 16_384
    if num_bytes % (4 * columns):
        raise ValueError(f"{num_bytes} bytes are not complete rows of {4 * columns} bytes")
    return np.random.default_rng(seed).random((num_bytes // (4 * columns), columns), dtype=np.float32)


def touch(batch: Batch) -> float:
    """Read every byte of a batch, as a consumer does."""
    columns = [*(column.values for column in batch.ragged.values()), *batch.scalars.values()]
    return sum(float(np.sum(column)) for column in columns)


def content_hash(row: Mapping[str, NDArray[np.generic]]) -> str:
    """A hash of one row's columns: their names, types and bytes. Rows with the same hash are the same."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(row):
        column = np.ascontiguousarray(row[name])
        digest.update(f"{name} {column.dtype.str} {column.size};".encode())
        digest.update(column.data)
    return digest.hexdigest()


def reward_of(response_ids: NDArray[np.generic]) -> np.float32:
    """What the reward node of `stream` computes: cheap, from every token."""
    return np.float32(np.mean(np.bitwise_and(response_ids.view(np.int32), 1)))
