"""TransferQueue 0.1.11, a measurement at a time: it does the works of `rows.py`, in the same words as `weft_buffer.py`, in .venv-peers.

    system = System(HERE / "queue_peer.py", log=log, python=PEERS)      # turns.py
    [answer] = system.run(1, work="ragged_put", rows=512, groups_per_put=8)

Further settings are `units` (storage units), `in_flight` (puts), `poll_ms` and `prefetch` (of the trainer of `stream`). Setting up, making
rows and verifying are not timed. The defaults are the fastest that were found, on 2 shared cores and rows of 2,000 tokens (28.7 kB):

- Ragged columns are *strided* nested tensors, twice as fast as the jagged ones of its documentation.
- Several calls are in flight through its asynchronous methods, as `PUT_SETTINGS` says: up to twice as fast as one call after another.
- One storage unit is best for puts of few groups and for the rectangle, in rows of 2 MiB; two for puts of 32 groups and for gets.
- The trainer of `stream` claims one microbatch ahead; without that it is idle for 8 to 12 % of its time.
- `TQ_NUM_THREADS=1`: its 8 are more than there are cores, which it says in each call. Serialization without copies is always on.
- `polling_mode`: without it the controller, one thread for all, *sleeps 5 s* when a consumer asks for more rows than are ready. For the
  same reason `stream` does not use its `StreamingDataLoader`, which sleeps whole seconds; consumers ask each `poll_ms`.

Rows count as consumed when they are claimed, so the rows of a consumer that dies never come back, and `GRPOGroupNSampler` takes any n
consecutive ready rows for a group. Row numbers are used again after a `clear_partition`, and rows are handed out by number: they may
come in another order than they were put.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import rows as rows_module
from rows import (
    DTYPES,
    GENERATED,
    Batch,
    Ragged,
    content_hash,
    dense,
    joined,
    ragged,
    reward_of,
    settings,
    short,
    touch,
)
from turns import Turns

PUT_SETTINGS = {1: (1, 8), 8: (1, 4), 32: (2, 2)}
"""Groups in a put: storage units, and puts in flight."""
STREAM = {"poll_ms": 2.0, "prefetch": 1}


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


class Bound:
    """The methods of a class on an object of a derived class that overrides them: the synchronous client hides the asynchronous one."""

    def __init__(self, methods: type, instance: Any) -> None:
        self._methods, self._instance = methods, instance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._methods, name).__get__(self._instance)


class Queue:
    """TransferQueue with its controller and storage units, in a Ray of its own."""

    def __init__(self) -> None:
        import ray
        from ray.cloudpickle import register_pickle_by_value

        self._folder = Path(tempfile.mkdtemp(prefix="tq", dir="/tmp"))
        os.chdir(self._folder)  # Ray puts it on the path of its processes
        register_pickle_by_value(rows_module)
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
        import transfer_queue as tq  # pyright: ignore[reportMissingImports]

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
        import transfer_queue as tq  # pyright: ignore[reportMissingImports]

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
        import transfer_queue as tq  # pyright: ignore[reportMissingImports]

        tq.init()  # finds the controller that is there
        self._client = tq.get_client()

    def ready(self) -> None: ...

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
        raise ValueError(f"{rows} rows are not complete claims of {claim}")
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
        "put_gb_per_s": bytes / (middle - start) / 1e9,
        "get_gb_per_s": bytes / (end - middle) / 1e9,
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
        raise ValueError(f"{groups} groups of 8 are not complete microbatches of {microbatch}")
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


WORKS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "ragged_put": ragged_put,
    "ragged_get": ragged_get,
    "dense": rectangle,
    "claim": claim,
    "stream": stream,
}


def full_settings(command: Mapping[str, Any], small: bool) -> tuple[str, dict[str, Any]]:
    """The settings that were fastest, where a command leaves them out."""
    work, asked = settings(command, small)
    own: dict[str, Any] = {"units": 1 if work == "dense" else 2}
    if work == "ragged_put":
        units, in_flight = PUT_SETTINGS[max(known for known in PUT_SETTINGS if known <= asked["groups_per_put"])]
        own = {"units": units, "in_flight": in_flight}
    elif work == "stream":
        own |= STREAM
    elif work == "claim":
        asked["claims"] = min(asked["claims"], 50)
    return work, {**own, **asked}


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
        turns.say(works=sorted(WORKS))
        while turns.go_on():
            work, asked = full_settings(turns.command, small)
            units = asked.pop("units")
            queue.have(units)
            turns.say(work=work, **WORKS[work](queue, **asked))
    finally:
        queue.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few rows: not a measurement")
    main(parser.parse_args().small)
