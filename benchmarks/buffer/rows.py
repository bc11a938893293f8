"""Rows and works for every sample buffer of `buffer.py`: groups of ragged rows, and one large
rectangle.

| work | settings | answer |
|---|---|---|
| `ragged_put` | `rows`, `groups_per_put` | `rows_per_s`, `gb_per_s`, `seconds` |
| `ragged_get` | `rows`, `claim`, `in_flight` | the same; the consumer claims, fetches and sums the rows |
| `dense` | `bytes`, `rows` | `put_gb_per_s`, `get_gb_per_s`; from Weft also `memcpy_gb_per_s` of the same bytes |
| `claim` | `held`, `claims` | `claim_8_p50_ms`, `claim_8_p99_ms`, `claim_64_p50_ms`, `claim_64_p99_ms` |
| `stream` | `groups`, `group_ms`, `microbatch`, `train_ms` | `first_s`, `idle_share`, `total_s`, `microbatches` |

`stream` is generate -> reward -> update. The producer makes a group of 8 every `group_ms` on a
fixed timetable, and the reward node adds the column `reward`. The trainer takes `microbatch` rows
with all columns, sums them, and sleeps `train_ms`. `first_s` is the time from the start of the
timetable to the trainer's first microbatch; `idle_share` is the share of the trainer's time after
that without one. Every answer has `work` and `verified`: the returned rows have the content
(`content_hash`) that was put.

Rows are pure functions of a seed, made with numpy and pyarrow only, because the peer runs in
another environment. Any process can recreate any group and verify what arrived:

    >>> batch = group(seed=0, number=3)
    >>> batch.num_rows, batch["response_ids"].offsets == batch["advantages"].offsets
    (8, True)
    >>> len({*hashes([batch]), *hashes([group(seed=0, number=3)])})
    8
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

GROUP = 8
"""Rows per group."""
MEAN_PROMPT, MEAN_RESPONSE, MAX_RESPONSE = 200, 1_800, 16_384
"""[tokens] Mean of a row. Responses are log-normal, so a few rows are several times longer."""
VOCABULARY = 150_000

DTYPES = {
    "prompt_ids": np.dtype(np.int32),
    "response_ids": np.dtype(np.int32),
    "response_logprobs": np.dtype(np.float32),
    "response_versions": np.dtype(np.int32),
    "advantages": np.dtype(np.float32),
    "reward": np.dtype(np.float32),
}
"""Maps a column to its dtype. `reward` is a number per row; others are as long as the prompt or the
response."""
GENERATED = ("prompt_ids", "response_ids", "response_logprobs", "response_versions")
"""Columns that the producer of `stream` puts."""
REWARDED = (*GENERATED, "reward")
"""Columns that its trainer reads."""

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
CLAIMED = (8, 64)
"""Rows per timed claim in the work `claim`."""


def settings(command: Mapping[str, Any], small: bool) -> tuple[str, dict[str, Any]]:
    """Return the work of a command and its settings, with defaults for missing ones.

    >>> settings({"steps": 1, "work": "claim", "held": 5000}, small=False)
    ('claim', {'held': 5000, 'claims': 500})
    """
    asked = {name: value for name, value in command.items() if name not in ("steps", "work")}
    work = command["work"]
    return work, {**DEFAULTS[work], **(SMALL[work] if small else {}), **asked}


# Rows


def of_lists(values: NDArray[Any], lengths: Sequence[int] | NDArray[Any]) -> pa.ListArray:
    """Build a ragged column from concatenated values and the length of each row."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def numpy_of(column: pa.Array) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return concatenated values and offsets [rows + 1]; a number is a row of length 1."""
    if not pa.types.is_list(column.type):
        return column.to_numpy(), np.arange(len(column) + 1)
    offsets = column.offsets.to_numpy()
    return column.flatten().to_numpy(), offsets - offsets[0]


def group(seed: int, number: int) -> pa.RecordBatch:
    """Return the rows of one prompt, a pure function of seed and number."""
    random = np.random.default_rng([seed, number])
    prompt = np.full(GROUP, max(1, random.poisson(MEAN_PROMPT)))
    # A log-normal distribution has the mean exp(mu + sigma² / 2). With 0.6, one row in twenty
    # exceeds twice the mean.
    sigma = 0.6
    lengths = random.lognormal(np.log(MEAN_RESPONSE) - sigma**2 / 2, sigma, GROUP)
    response = np.clip(lengths.astype(np.int64), 1, MAX_RESPONSE)
    one_prompt = random.integers(0, VOCABULARY, prompt[0], dtype=np.int32)
    tokens = int(response.sum())
    reward = random.random(GROUP, dtype=np.float32)
    columns = {
        "prompt_ids": of_lists(np.tile(one_prompt, GROUP), prompt),
        "response_ids": of_lists(random.integers(0, VOCABULARY, tokens, dtype=np.int32), response),
        "response_logprobs": of_lists(-random.random(tokens, dtype=np.float32), response),
        "response_versions": of_lists(np.full(tokens, number // 16, np.int32), response),
        "advantages": of_lists(np.repeat(reward - reward.mean(), response), response),
        "reward": pa.array(reward),
    }
    return pa.RecordBatch.from_pydict(columns)


def ragged(rows: int, seed: int = 0) -> list[pa.RecordBatch]:
    """Return groups 0, 1, ... with `rows` rows in total."""
    if rows % GROUP:
        raise ValueError(f"{rows} rows are not complete groups of {GROUP}")
    return [group(seed, number) for number in range(rows // GROUP)]


def joined(batches: Sequence[pa.RecordBatch], each: int) -> list[pa.RecordBatch]:
    """Concatenate the batches, `each` at a time."""
    return [pa.concat_batches(batches[i : i + each]) for i in range(0, len(batches), each)]


def short(rows: int, seed: int = 0) -> pa.RecordBatch:
    """Return rows of the same columns with one token each, for works that depend only on their
    number."""
    columns = {
        name: of_lists(np.zeros(rows, dtype), [1] * rows)
        for name, dtype in DTYPES.items()
        if name != "reward"
    }
    reward = np.random.default_rng(seed).random(rows, dtype=np.float32)
    return pa.RecordBatch.from_pydict({**columns, "reward": pa.array(reward)})


def dense(num_bytes: int = 128 << 20, seed: int = 0) -> NDArray[np.float32]:
    """Return a rectangle of numbers with 64 KiB per row."""
    columns = 16_384
    if num_bytes % (4 * columns):
        raise ValueError(f"{num_bytes} bytes are not complete rows of {4 * columns} bytes")
    return np.random.default_rng(seed).random((num_bytes // (4 * columns), columns), dtype=np.float32)


def rewards_of(responses: pa.Array) -> NDArray[np.float32]:
    """Compute the reward of `stream` from every token, cheaply."""
    values, offsets = numpy_of(responses)
    return (np.add.reduceat(values & 1, offsets[:-1]) / np.diff(offsets)).astype(np.float32)


def rewarded(rows: int) -> list[pa.RecordBatch]:
    """Return the rows that the trainer of `stream` must read."""
    batches = (batch.select(GENERATED) for batch in ragged(rows))
    return [
        batch.append_column("reward", pa.array(rewards_of(batch["response_ids"]))) for batch in batches
    ]


# Reading, verification and timing


def touch(batch: pa.RecordBatch, names: Iterable[str]) -> float:
    """Read every byte of these columns, as a consumer does."""
    return sum(float(np.sum(numpy_of(batch[name])[0])) for name in names)


def content_hash(row: Mapping[str, NDArray[Any]]) -> str:
    """Hash names, types and bytes of one row's columns."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(row):
        column = np.ascontiguousarray(row[name])
        digest.update(f"{name} {column.dtype.str} {column.size};".encode())
        digest.update(column.data)
    return digest.hexdigest()


def rows_of(batch: pa.RecordBatch, names: Iterable[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield row by row, with one array per column; a number has one element."""
    columns = {name: numpy_of(batch[name]) for name in names}
    for row in range(batch.num_rows):
        yield {
            name: values[offsets[row] : offsets[row + 1]] for name, (values, offsets) in columns.items()
        }


def hashes(batches: Iterable[pa.RecordBatch], names: Sequence[str] = tuple(DTYPES)) -> list[str]:
    """Return the sorted hashes of the rows, equal for equal rows in any order."""
    return sorted(content_hash(row) for batch in batches for row in rows_of(batch, names))


def throughput(batches: Sequence[pa.RecordBatch], seconds: float) -> dict[str, float]:
    rows, num_bytes = sum(b.num_rows for b in batches), sum(b.nbytes for b in batches)
    return {"seconds": seconds, "rows_per_s": rows / seconds, "gb_per_s": num_bytes / seconds / 1e9}


def claim_times(seconds: Mapping[int, Sequence[float]]) -> dict[str, float]:
    """Return percentiles of claim times, by rows per claim."""
    return {
        f"claim_{rows}_p{share}_ms": 1e3 * float(np.percentile(times, share))
        for rows, times in seconds.items()
        for share in (50, 99)
    }


class TrainerClock:
    """Measures when the trainer of `stream` has a microbatch, and when it waits."""

    def __init__(self) -> None:
        self._first = self._since = self._idle = 0.0

    def begin(self) -> None:
        now = time.monotonic()
        if self._first:
            self._idle += now - self._since
        else:
            self._first = now

    def end(self) -> None:
        self._since = time.monotonic()

    def figures(self, start: float) -> dict[str, float]:
        """Return the answer of `stream`; `start` is when its timetable starts on the monotonic
        clock [s]."""
        share = self._idle / (self._since - self._first)
        return {"first_s": self._first - start, "idle_share": share, "total_s": self._since - start}


def sleep_until(moment: float) -> None:
    """Sleep until this time of the monotonic clock."""
    time.sleep(max(0.0, moment - time.monotonic()))
