"""TransferQueue 0.1.11, a measurement at a time. Runs in an environment of its own (`make bench-peers`), never in Weft's.

    system = System([".venv-peers/bin/python", "benchmarks/transfer_queue.py"], log)      # turns.py
    [answer] = system.run(1, work="ragged_put", rows=512, groups_per_put=8)

Every command is one line `{"steps": 1, "work": ..., ...}`, and every step of it one measurement and one line of answer. What a
command leaves out is in `DEFAULTS`, or with `--small` in `SMALL`. Setting up, making rows and verifying are not timed.

| work | arguments | answer |
|---|---|---|
| `ragged_put` | `rows`, `groups_per_put`, `in_flight` | `rows_per_s`, `gb_per_s`, `seconds` |
| `ragged_get` | `rows`, `claim`, `in_flight` | `rows_per_s`, `gb_per_s`, `seconds`; claimed, fetched and summed up by the consumer |
| `dense` | `bytes`, `rows` | `put_gb_per_s`, `get_gb_per_s` (claimed, fetched, summed up), `put_s`, `get_s`, `in_order` |
| `claim` | `held`, `claims` | `claim_8_p50_ms`, `claim_8_p99_ms`, `claim_64_p50_ms`, `claim_64_p99_ms`: `get_meta` alone |
| `stream` | `groups`, `group_ms`, `microbatch`, `train_ms`, `poll_ms`, `prefetch` | `first_s`, `idle_share`, `total_s`, `microbatches` |
| `failures` | `wait_s` | `lost_rows` of `claimed_rows`, `sampled_group` where `group_of` is `[0, 0, 0, 0, 1, 1, 1, 1]` |

All answers repeat the arguments, and have `units` (storage units, also an argument) and `verified`:
what came back has the content (`buffer_work.content_hash`) of what was put.

`stream` is generate -> reward -> update, each an actor: the producer makes a group of 8 each `group_ms`, on a fixed timetable; the
reward node claims 8 rows by `response_ids` and puts the column `reward` to them; the trainer claims `microbatch` rows with all
columns, sums them up and sleeps `train_ms`. `first_s` is from the start of the timetable to the first microbatch in the trainer's
hands; `idle_share` is the trainer's time without a microbatch, from there to the end of its last.

Its settings are the fastest that were found, on 2 shared cores and rows of 2,000 tokens (28.7 kB). Numbers are medians, of 6 runs
where not said otherwise; runs of one setting differ by a factor of up to 3, so what lies closer together than a third is undecided.

- Ragged columns as *strided* nested tensors, though its documentation uses jagged ones: 1.5k / 4.9k / 7.6k rows/s at 1 / 8 / 32 groups a
  put, two units and one put after another; jagged 0.7k / 2.5k / 4.6k (3 runs); NumPy rows in a `NonTensorStack` 1.4k / 3.5k / 5.3k
  (3 runs). A put unbinds each column several times, which is slow in jagged ones. These three were not interleaved, the rest was.
- Several calls in flight through its asynchronous methods, as `PUT_SETTINGS` says: 3.4k / 7.7k / 8.6k rows/s put; got in claims of 16 / 64
  with 4 in flight 3.3k / 5.5k, one after another 2.2k / 4.6k.
- Storage units, 1 / 2 / 4 of them, in a second series on a busier machine: put 2.9k / 2.6k / 2.0k rows/s at 1 group, 7.3k / 6.0k / 4.8k at
  8, 3.9k / 5.0k / 6.7k at 32 (two or four: undecided; runs went from 2.5k to 8.4k); get of 64 rows 4.2k / 5.8k / 5.1k.
- The rectangle in rows of 2 MiB, on 1 / 2 / 4 units: put 1.28 / 1.01 / 1.00 GB/s, get 0.90 / 1.09 / 1.12. No number of units is best at
  both; put and get together take the same on one and two. One is the default: ask with `units` 1 and 2 for the better of each. In rows
  of 64 KiB: put 1.18 / 0.77 / 0.97, get 0.45 / 0.71 / 0.71.
- The trainer of `stream` claims one microbatch ahead (`prefetch`): idle for 0.2 to 4 % of its time
  when rows are always ready, 8 to 12 % without.
- `TQ_NUM_THREADS=1`: its 8 are more than there are cores, and it says so in each call. Serialization without copies is always on.
- `polling_mode`: without it the controller, one thread for all, *sleeps 5 s* when a consumer asks for more rows than are ready. For the
  same reason `stream` does not use its `StreamingDataLoader`, which sleeps whole seconds; consumers ask each `poll_ms`.

What it gets wrong, shown by `failures`: rows count as consumed when they are claimed, so those of a consumer that dies never come back
(`reset_consumption` gives all rows of the task back, trained or not). And `GRPOGroupNSampler` takes any n consecutive ready
rows for a group: while one row of a group is unfinished it hands out a "group" of two prompts. Row numbers are used again after a
`clear_partition`, and rows are handed out by number: they may then come in another order than they were put (`in_order` of `dense`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from buffer_work import DTYPES, Batch, Ragged, content_hash, dense, joined, ragged, reward_of, short, touch
from turns import Turns

if __name__ == "__main__":
    # This file has the name of the package: from here on, here and in Ray's processes, the name means the package.
    sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

DEFAULTS: dict[str, dict[str, Any]] = {
    "ragged_put": {"rows": 512, "groups_per_put": 8},
    "ragged_get": {"rows": 512, "claim": 64, "in_flight": 4},
    "dense": {"bytes": 128 << 20, "rows": 64},
    "claim": {"held": 1000, "claims": 50},
    "stream": {"groups": 64, "group_ms": 25.0, "microbatch": 32, "train_ms": 100.0, "poll_ms": 2.0, "prefetch": 1},
    "failures": {"wait_s": 5.0},
}
SMALL = {
    "ragged_put": {"rows": 32, "groups_per_put": 2},
    "ragged_get": {"rows": 32, "claim": 16},
    "dense": {"bytes": 1 << 20, "rows": 8},
    "claim": {"held": 256, "claims": 2},
    "stream": {"groups": 8, "group_ms": 10.0, "train_ms": 10.0},
    "failures": {"wait_s": 0.5},
}
PUT_SETTINGS = {1: (1, 8), 8: (1, 4), 32: (2, 2)}
"""Groups in a put: storage units, and puts in flight."""
GENERATED = [name for name in DTYPES if name not in ("advantages", "reward")]
"""What the producer of `stream` puts."""


def tensors(batch: Batch, names: Iterable[str] = tuple(DTYPES)) -> Any:
    """A batch in the form that is fastest to put."""
    import torch
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

    columns: dict[str, Any] = {}
    for name in names:
        if name in batch.ragged:
            rows = torch.from_numpy(batch[name].values).split(batch[name].lengths.tolist())
            columns[name] = torch.nested.as_nested_tensor(list(rows), layout=torch.strided)
        else:
            columns[name] = torch.from_numpy(batch.scalars[name])
    return TensorDict(columns, batch_size=batch.num_rows)


def arrays(data: Any) -> Batch:
    """What a get returned, as arrays over the same memory."""
    columns, scalars = {}, {}
    for name, column in data.items():
        if column.is_nested:
            columns[name] = Ragged(column.values().numpy(), column.offsets().numpy())
        else:
            scalars[name] = column.numpy()
    return Batch(columns, scalars)


def same_rows(put: Sequence[Batch], got: Sequence[Batch], names: Sequence[str] = tuple(DTYPES)) -> bool:
    """Whether each row came back once, in whichever order, with the same bytes."""

    def hashes(batches: Sequence[Batch]) -> list[str]:
        return sorted(
            content_hash({name: row[name] for name in names}) for batch in batches for row in batch.rows(names)
        )

    return hashes(put) == hashes(got)


def package() -> Any:
    """TransferQueue, where this file of the same name is the program."""
    return importlib.import_module("transfer_queue")


class Bound:
    """The methods of a class on an object of a derived class that overrides them: there the synchronous client hides the other."""

    def __init__(self, methods: type, instance: Any) -> None:
        self._methods, self._instance = methods, instance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._methods, name).__get__(self._instance)


class Queue:
    """TransferQueue with its controller and storage units, in a Ray of its own."""

    def __init__(self) -> None:
        import buffer_work
        import ray
        from ray.cloudpickle import register_pickle_by_value

        self._folder = Path(tempfile.mkdtemp(prefix="tq", dir="/tmp"))
        os.chdir(self._folder)  # Ray puts it on the path of its processes
        register_pickle_by_value(buffer_work)
        # Logical processors: each of its actors asks for one, and they mostly wait.
        ray.init(
            num_cpus=16,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _temp_dir=str(self._folder),
            namespace="peer",
        )
        self._units = 0
        self._nodes: dict[str, Any] = {}
        self._partitions = 0

    def have(self, units: int) -> None:
        """Start it with that many storage units, or start it again."""
        tq = package()

        if units != self._units:
            self._stop()
            storage = {"SimpleStorage": {"num_data_storage_units": units}}
            tq.init({"controller": {"polling_mode": True}, "backend": storage})
            self._units = units
            self.client = tq.get_client()
            for _ in range(2):  # connections, and the first use of everything
                ragged_get(self, rows=64, claim=16, in_flight=4)

    def partition(self) -> str:
        self._partitions += 1
        return f"partition_{self._partitions}"

    def node(self, name: str) -> Any:
        """The process of a node of the stream; it stays."""
        import ray

        if name not in self._nodes:
            self._nodes[name] = ray.remote(num_cpus=1)(Node).remote()
            ray.get(self._nodes[name].ready.remote())
        return self._nodes[name]

    def has_node(self, name: str) -> bool:
        return name in self._nodes

    def kill(self, name: str) -> None:
        import ray

        ray.kill(self._nodes.pop(name))

    def in_flight(self, calls: Iterable[Callable[[Any], Coroutine[Any, Any, Any]]], limit: int) -> list[Any]:
        """Make calls of the asynchronous client, so many at a time, on the event loop where it keeps its connections."""
        asynchronous = importlib.import_module("transfer_queue.client").AsyncTransferQueueClient
        client = Bound(asynchronous, self.client)

        async def all_of_them() -> list[Any]:
            turns = asyncio.Semaphore(limit)

            async def one(call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
                async with turns:
                    return await call(client)

            return await asyncio.gather(*(one(call) for call in calls))

        return self.client._run_coroutine(all_of_them())

    def _stop(self) -> None:
        tq = package()

        for name in list(self._nodes):
            self.kill(name)
        if self._units:
            tq.close()
            self._units = 0

    def close(self) -> None:
        import ray

        self._stop()
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


class Node:
    """A process of the stream."""

    def __init__(self) -> None:
        tq = package()

        tq.init()  # finds the controller that is there
        self._client = tq.get_client()

    def ready(self) -> None: ...

    def claim(self, partition: str, task: str, names: Sequence[str], rows: int) -> list[int]:
        return self._client.get_meta(
            data_fields=list(names), batch_size=rows, partition_id=partition, task_name=task
        ).global_indexes

    def generate(self, partition: str, groups: int, start: float, group_s: float) -> None:
        batches = [tensors(batch, GENERATED) for batch in ragged(groups * 8)]
        for number, batch in enumerate(batches):
            sleep_until(start + (number + 1) * group_s)
            self._client.put(data=batch, partition_id=partition)

    def reward(self, partition: str, groups: int, poll_s: float) -> None:
        import torch
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

        for _ in range(groups):
            metadata = self._wait(partition, "reward", ["response_ids"], 8, poll_s)
            responses = arrays(self._client.get_data(metadata))["response_ids"]
            rewards = torch.tensor([reward_of(responses[row]) for row in range(8)], dtype=torch.float32)
            self._client.put(data=TensorDict({"reward": rewards}, batch_size=8), metadata=metadata)

    def train(
        self, partition: str, microbatches: int, rows: int, start: float, train_s: float, poll_s: float, prefetch: int
    ) -> dict[str, Any]:
        names = [*GENERATED, "reward"]
        batches: list[Batch] = []

        def get() -> Batch:
            metadata = self._wait(partition, "update", names, rows, poll_s)
            return arrays(self._client.get_data(metadata))

        first = idle_since = idle = 0.0
        with ThreadPoolExecutor(1) as thread:
            ahead = deque(thread.submit(get) for _ in range(min(1 + prefetch, microbatches)))
            for number in range(microbatches):
                batches.append(ahead.popleft().result())
                touch(batches[-1])
                now = time.monotonic()
                if number:
                    idle += now - idle_since
                else:
                    first = now
                if prefetch and number + 1 + prefetch < microbatches:
                    ahead.append(thread.submit(get))
                time.sleep(train_s)
                idle_since = time.monotonic()
                if not prefetch and number + 1 < microbatches:
                    ahead.append(thread.submit(get))
        made = ragged(microbatches * rows)
        for batch in made:
            rewards = [reward_of(batch["response_ids"][row]) for row in range(8)]
            batch.scalars["reward"][:] = rewards  # pyright: ignore[reportIndexIssue]
        return {
            "first_s": first - start,
            "idle_share": idle / (idle_since - first),
            "total_s": idle_since - start,
            "verified": same_rows(made, batches, names),
        }

    def _wait(self, partition: str, task: str, names: list[str], rows: int, poll_s: float) -> Any:
        while True:
            metadata = self._client.get_meta(data_fields=names, batch_size=rows, partition_id=partition, task_name=task)
            if metadata.size:
                return metadata
            time.sleep(poll_s)


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def get_all(queue: Queue, partition: str, rows: int, claim: int, in_flight: int) -> list[Batch]:
    async def get(client: Any) -> Batch:
        metadata = await client.async_get_meta(
            data_fields=list(DTYPES), batch_size=claim, partition_id=partition, task_name="update"
        )
        batch = arrays(await client.async_get_data(metadata))
        touch(batch)
        return batch

    return queue.in_flight([get] * (rows // claim), in_flight)


def put_all(queue: Queue, partition: str, batches: Sequence[Any], in_flight: int) -> None:
    def put(batch: Any) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        return lambda client: client.async_put(data=batch, partition_id=partition)

    queue.in_flight(map(put, batches), in_flight)


def throughput(batches: Sequence[Batch], seconds: float) -> dict[str, float]:
    rows, num_bytes = sum(b.num_rows for b in batches), sum(b.num_bytes for b in batches)
    return {"seconds": seconds, "rows_per_s": rows / seconds, "gb_per_s": num_bytes / seconds / 1e9}


def ragged_put(queue: Queue, *, rows: int, groups_per_put: int, in_flight: int) -> dict[str, Any]:
    partition, groups = queue.partition(), ragged(rows)
    batches = [joined(groups[i : i + groups_per_put]) for i in range(0, len(groups), groups_per_put)]
    ready = [tensors(batch) for batch in batches]
    start = time.perf_counter()
    put_all(queue, partition, ready, in_flight)
    seconds = time.perf_counter() - start
    verified = same_rows(groups, get_all(queue, partition, rows, 8, 1))
    queue.client.clear_partition(partition)
    return {**throughput(batches, seconds), "verified": verified}


def ragged_get(queue: Queue, *, rows: int, claim: int, in_flight: int) -> dict[str, Any]:
    if rows % claim:
        raise ValueError(f"{rows} rows are no whole claims of {claim}")
    partition, groups = queue.partition(), ragged(rows)
    put_all(queue, partition, [tensors(batch) for batch in groups], 1)
    start = time.perf_counter()
    got = get_all(queue, partition, rows, claim, in_flight)
    seconds = time.perf_counter() - start
    verified = same_rows(groups, got)
    queue.client.clear_partition(partition)
    return {**throughput(got, seconds), "verified": verified}


def rectangle(queue: Queue, *, bytes: int, rows: int) -> dict[str, Any]:
    import torch
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

    partition, numbers = queue.partition(), dense(bytes)
    data = TensorDict({"numbers": torch.from_numpy(numbers).view(rows, -1)}, batch_size=rows)
    start = time.perf_counter()
    queue.client.put(data=data, partition_id=partition)
    middle = time.perf_counter()
    metadata = queue.client.get_meta(
        data_fields=["numbers"], batch_size=rows, partition_id=partition, task_name="update"
    )
    column = queue.client.get_data(metadata)["numbers"]
    got = (column.values() if column.is_nested else column).numpy()
    np.sum(got)
    end = time.perf_counter()
    queue.client.clear_partition(partition)
    wanted, got = numbers.reshape(rows, -1), got.reshape(rows, -1)

    def hashes(rectangle: Any) -> list[str]:
        return sorted(content_hash({"numbers": row}) for row in rectangle)

    return {
        "put_s": middle - start,
        "get_s": end - middle,
        "put_gb_per_s": bytes / (middle - start) / 1e9,
        "get_gb_per_s": bytes / (end - middle) / 1e9,
        "in_order": bool(np.array_equal(got, wanted)),
        "verified": hashes(wanted) == hashes(got),
    }


def claim(queue: Queue, *, held: int, claims: int) -> dict[str, Any]:
    partition, batch = queue.partition(), short(held)
    # In pieces: one message of everything would hold the controller up for seconds.
    put_all(queue, partition, [tensors(short(min(2000, held - i), i)) for i in range(0, held, 2000)], 1)
    answer: dict[str, Any] = {}
    claimed = set()
    for rows in (8, 64):
        seconds = []
        for _ in range(min(claims, held // rows)):
            start = time.perf_counter()
            metadata = queue.client.get_meta(
                data_fields=list(DTYPES), batch_size=rows, partition_id=partition, task_name=f"update_{rows}"
            )
            seconds.append(time.perf_counter() - start)
            claimed.update((rows, index) for index in metadata.global_indexes)
        answer[f"claim_{rows}_p50_ms"] = 1e3 * float(np.percentile(seconds, 50))
        answer[f"claim_{rows}_p99_ms"] = 1e3 * float(np.percentile(seconds, 99))
    queue.client.clear_partition(partition)
    wanted = sum(rows * min(claims, held // rows) for rows in (8, 64))
    return {**answer, "verified": len(claimed) == wanted and batch.num_rows == held}


def stream(
    queue: Queue, *, groups: int, group_ms: float, microbatch: int, train_ms: float, poll_ms: float, prefetch: int
) -> dict[str, Any]:
    import ray

    if groups * 8 % microbatch:
        raise ValueError(f"{groups} groups of 8 are no whole microbatches of {microbatch}")
    partition, microbatches, poll_s = queue.partition(), groups * 8 // microbatch, poll_ms / 1e3
    if not queue.has_node("trainer"):
        for name in ("producer", "reward", "trainer"):
            queue.node(name)
        stream(queue, groups=8, group_ms=5, microbatch=32, train_ms=5, poll_ms=poll_ms, prefetch=0)  # not counted
    producer, reward, trainer = (queue.node(name) for name in ("producer", "reward", "trainer"))
    start = time.monotonic() + 0.5  # by then all three are waiting
    ends = [
        producer.generate.remote(partition, groups, start, group_ms / 1e3),
        reward.reward.remote(partition, groups, poll_s),
        trainer.train.remote(partition, microbatches, microbatch, start, train_ms / 1e3, poll_s, prefetch),
    ]
    answer = ray.get(ends)[2]
    queue.client.clear_partition(partition)
    return {"microbatches": microbatches, **answer}


def failures(queue: Queue, *, wait_s: float) -> dict[str, Any]:
    import ray

    partition = queue.partition()
    queue.client.put(data=tensors(short(16)), partition_id=partition)
    claimed = ray.get(queue.node("mortal").claim.remote(partition, "update", list(DTYPES), 8))
    queue.kill("mortal")
    time.sleep(wait_s)
    left: list[int] = []
    while more := queue.client.get_meta(
        data_fields=list(DTYPES), batch_size=8, partition_id=partition, task_name="update"
    ).global_indexes:
        left += more
    queue.client.clear_partition(partition)
    # Two groups of 4, the first row of the first is not yet there.
    sampled, _ = package().GRPOGroupNSampler(n_samples_per_prompt=4).sample([1, 2, 3, 4, 5, 6, 7], 4)
    return {
        "claimed_rows": len(claimed),
        "lost_rows": len(set(claimed) - set(left)),
        "group_of": [0, 0, 0, 0, 1, 1, 1, 1],
        "sampled_group": sampled,
        "verified": len(left) == 8,
    }


WORKS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "ragged_put": ragged_put,
    "ragged_get": ragged_get,
    "dense": rectangle,
    "claim": claim,
    "stream": stream,
    "failures": failures,
}


def settings(work: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was fastest; a command may say otherwise.

    >>> settings("ragged_put", {"groups_per_put": 16}), settings("stream", {})
    ({'units': 1, 'in_flight': 4}, {'units': 2})
    """
    if work == "ragged_put":
        groups = asked.get("groups_per_put", DEFAULTS[work]["groups_per_put"])
        units, in_flight = PUT_SETTINGS[max(known for known in PUT_SETTINGS if known <= max(groups, 1))]
        return {"units": units, "in_flight": in_flight}
    return {"units": 1 if work == "dense" else 2}


def main(small: bool) -> None:
    turns = Turns()
    # Before Ray is imported: no cluster of others is joined, and nobody else joins this one.
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"TQ_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    os.environ.pop("RAY_ADDRESS", None)
    import torch

    torch.set_num_threads(1)
    queue = Queue()
    try:
        queue.have(2)
        turns.say(peer="TransferQueue 0.1.11", works=sorted(WORKS))
        while turns.go_on():
            asked = {k: v for k, v in turns.command.items() if k != "steps"}
            work = asked.pop("work")
            arguments = {**settings(work, asked), **DEFAULTS[work], **(SMALL[work] if small else {}), **asked}
            units = arguments.pop("units")
            queue.have(units)
            turns.say(work=work, units=units, **arguments, **WORKS[work](queue, **arguments))
    finally:
        queue.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--small", action="store_true", help="few rows where a command does not say how many: to see that it works"
    )
    main(parser.parse_args().small)
