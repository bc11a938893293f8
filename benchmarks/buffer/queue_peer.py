"""TransferQueue 0.1.11 on the works of `rows.py`, one measurement at a time, in .venv-peers.

    system = System(HERE / "queue_peer.py", log=log, python=PEERS)      # turns.py
    [answer] = system.run(1, work="ragged_put", rows=512, groups_per_put=8)

It takes the commands of `weft_buffer.py`, plus `units` (storage units) and `in_flight` (puts). The
times exclude setup, generating rows and verification. The defaults were the fastest on 2 shared
cores with rows of 2,000 tokens (28.7 kB):

- Ragged columns are *strided* nested tensors, twice as fast as the documented jagged ones.
- Several asynchronous calls are in flight (`PUT_SETTINGS`), up to twice as fast as sequential
  calls.
- One storage unit is best for puts of few groups and for the rectangle, in rows of 2 MiB; two for
  puts of 32 groups and for gets.
- The trainer of `stream` claims one microbatch ahead. Without that it idles for 8 to 12 % of its
  time.
- `TQ_NUM_THREADS=1`: the default of 8 exceeds the cores, and each call warns about it. Zero-copy
  serialization is always on.
- `polling_mode`: without it, the single-threaded controller *sleeps 5 s* when a consumer asks for
  more rows than are ready. `StreamingDataLoader` sleeps whole seconds as well, so `stream` does not
  use it. Consumers ask every 2 ms.

A claim consumes its rows, so rows of a dead consumer are lost. `GRPOGroupNSampler` takes any n
consecutive ready rows as a group. `clear_partition` frees row numbers for reuse. Consumers get rows
by number, possibly not in the order of the puts.
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
import pyarrow as pa
import rows as rows_module
from rows import (
    CLAIMED,
    DTYPES,
    GENERATED,
    GROUP,
    REWARDED,
    TrainerClock,
    claim_times,
    content_hash,
    dense,
    hashes,
    joined,
    numpy_of,
    of_lists,
    ragged,
    rewarded,
    rewards_of,
    settings,
    short,
    sleep_until,
    throughput,
    touch,
)
from turns import Turns

ALL = tuple(DTYPES)
PUT_SETTINGS = {1: (1, 8), 8: (1, 4), 32: (2, 2)}
"""Maps groups per put to (storage units, puts in flight)."""
POLL_S = 0.002
"""[s] Pause of a consumer after a claim that found too few rows."""


def tensors(batch: pa.RecordBatch) -> Any:
    """Convert a batch to the form that is fastest to put."""
    import torch
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

    columns: dict[str, Any] = {}
    for name in batch.schema.names:
        values, offsets = numpy_of(batch[name])
        columns[name] = torch.from_numpy(values.copy())
        if pa.types.is_list(batch[name].type):
            rows = columns[name].split(np.diff(offsets).tolist())
            columns[name] = torch.nested.as_nested_tensor(list(rows), layout=torch.strided)
    return TensorDict(columns, batch_size=batch.num_rows)


def arrays(data: Any) -> pa.RecordBatch:
    """Convert the result of a get to arrays on the same memory."""
    columns: dict[str, pa.Array] = {}
    for name, column in data.items():
        if column.is_nested:
            columns[name] = of_lists(column.values().numpy(), column.offsets().diff().numpy())
        else:
            columns[name] = pa.array(column.numpy())
    return pa.RecordBatch.from_pydict(columns)


class Bound:
    """Calls methods of a base class on an object of a derived class: TransferQueue's synchronous
    client overrides the methods of the asynchronous one."""

    def __init__(self, methods: type, instance: Any) -> None:
        self._methods, self._instance = methods, instance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._methods, name).__get__(self._instance)


class Queue:
    """TransferQueue with controller and storage units, in a separate Ray."""

    def __init__(self) -> None:
        import ray
        from ray.cloudpickle import register_pickle_by_value

        self._folder = Path(tempfile.mkdtemp(prefix="tq", dir="/tmp"))
        os.chdir(self._folder)  # Ray adds the working directory to the path of its processes
        register_pickle_by_value(rows_module)
        # Logical CPUs: each actor reserves one, and mostly waits.
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
        """Start it with this many storage units, or restart it."""
        import transfer_queue as tq  # pyright: ignore[reportMissingImports]

        if units != self._units:
            self._stop()
            storage = {"SimpleStorage": {"num_data_storage_units": units}}
            tq.init({"controller": {"polling_mode": True}, "backend": storage})
            self._units = units
            self.client = tq.get_client()
            for _ in range(2):  # warm up connections and caches
                ragged_get(self, rows=64, claim=16, in_flight=4)

    def partition(self) -> str:
        self._partitions += 1
        return f"partition_{self._partitions}"

    def node(self, name: str) -> Any:
        """Return the process of a stream node, which stays alive."""
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

    def in_flight(
        self, calls: Iterable[Callable[[Any], Coroutine[Any, Any, Any]]], limit: int
    ) -> list[Any]:
        """Make asynchronous calls, `limit` at a time, on the event loop of the client's
        connections."""
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
    """One process of the stream."""

    def __init__(self) -> None:
        import transfer_queue as tq  # pyright: ignore[reportMissingImports]

        tq.init()  # finds the running controller
        self._client = tq.get_client()

    def ready(self) -> None: ...

    def generate(self, partition: str, groups: int, start: float, group_s: float) -> None:
        batches = [tensors(batch.select(GENERATED)) for batch in ragged(groups * GROUP)]
        for number, batch in enumerate(batches):
            sleep_until(start + (number + 1) * group_s)
            self._client.put(data=batch, partition_id=partition)

    def reward(self, partition: str, groups: int) -> None:
        import torch
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

        for _ in range(groups):
            metadata = self._wait(partition, "reward", ["response_ids"], GROUP)
            rewards = torch.from_numpy(
                rewards_of(arrays(self._client.get_data(metadata))["response_ids"])
            )
            self._client.put(data=TensorDict({"reward": rewards}, batch_size=GROUP), metadata=metadata)

    def train(
        self, partition: str, microbatches: int, rows: int, start: float, train_s: float
    ) -> dict[str, Any]:
        batches: list[pa.RecordBatch] = []
        clock = TrainerClock()

        def fetch() -> pa.RecordBatch:
            metadata = self._wait(partition, "update", list(REWARDED), rows)
            return arrays(self._client.get_data(metadata))

        with ThreadPoolExecutor(1) as thread:
            ahead = deque(thread.submit(fetch) for _ in range(min(2, microbatches)))
            for number in range(microbatches):
                batches.append(ahead.popleft().result())
                touch(batches[-1], REWARDED)
                clock.begin()
                if number + 2 < microbatches:
                    ahead.append(thread.submit(fetch))
                time.sleep(train_s)
                clock.end()
        verified = hashes(rewarded(microbatches * rows), REWARDED) == hashes(batches, REWARDED)
        return {**clock.figures(start), "verified": verified}

    def _wait(self, partition: str, task: str, names: list[str], rows: int) -> Any:
        while True:
            metadata = self._client.get_meta(
                data_fields=names, batch_size=rows, partition_id=partition, task_name=task
            )
            if metadata.size:
                return metadata
            time.sleep(POLL_S)


def get_all(queue: Queue, partition: str, rows: int, claim: int, in_flight: int) -> list[pa.RecordBatch]:
    async def get(client: Any) -> pa.RecordBatch:
        metadata = await client.async_get_meta(
            data_fields=list(ALL), batch_size=claim, partition_id=partition, task_name="update"
        )
        batch = arrays(await client.async_get_data(metadata))
        touch(batch, ALL)
        return batch

    return queue.in_flight([get] * (rows // claim), in_flight)


def put_all(queue: Queue, partition: str, batches: Sequence[Any], in_flight: int) -> None:
    def put(batch: Any) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        return lambda client: client.async_put(data=batch, partition_id=partition)

    queue.in_flight(map(put, batches), in_flight)


def ragged_put(queue: Queue, *, rows: int, groups_per_put: int, in_flight: int) -> dict[str, Any]:
    partition, groups = queue.partition(), ragged(rows)
    ready = [tensors(batch) for batch in joined(groups, groups_per_put)]
    start = time.perf_counter()
    put_all(queue, partition, ready, in_flight)
    seconds = time.perf_counter() - start
    verified = hashes(groups) == hashes(get_all(queue, partition, rows, GROUP, 1))
    queue.client.clear_partition(partition)
    return {**throughput(groups, seconds), "verified": verified}


def ragged_get(queue: Queue, *, rows: int, claim: int, in_flight: int) -> dict[str, Any]:
    if rows % claim:
        raise ValueError(f"{rows} rows are not complete claims of {claim}")
    partition, groups = queue.partition(), ragged(rows)
    put_all(queue, partition, [tensors(batch) for batch in groups], 1)
    start = time.perf_counter()
    got = get_all(queue, partition, rows, claim, in_flight)
    seconds = time.perf_counter() - start
    queue.client.clear_partition(partition)
    return {**throughput(groups, seconds), "verified": hashes(groups) == hashes(got)}


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
    put, back = (
        sorted(content_hash({"numbers": row}) for row in each.reshape(rows, -1))
        for each in (numbers, got)
    )
    return {
        "put_gb_per_s": bytes / (middle - start) / 1e9,
        "get_gb_per_s": bytes / (end - middle) / 1e9,
        "verified": put == back,
    }


def claim(queue: Queue, *, held: int, claims: int) -> dict[str, Any]:
    partition, claims = queue.partition(), min(claims, 50)
    # Put in pieces: a single message would block the controller for seconds.
    put_all(queue, partition, [tensors(short(min(2000, held - i), i)) for i in range(0, held, 2000)], 1)
    seconds: dict[int, list[float]] = {rows: [] for rows in CLAIMED}
    claimed = set()
    for rows in CLAIMED:
        for _ in range(min(claims, held // rows)):
            start = time.perf_counter()
            metadata = queue.client.get_meta(
                data_fields=list(ALL),
                batch_size=rows,
                partition_id=partition,
                task_name=f"update_{rows}",
            )
            seconds[rows].append(time.perf_counter() - start)
            claimed.update((rows, index) for index in metadata.global_indexes)
    queue.client.clear_partition(partition)
    wanted = sum(rows * min(claims, held // rows) for rows in CLAIMED)
    return {**claim_times(seconds), "verified": len(claimed) == wanted}


def stream(
    queue: Queue, *, groups: int, group_ms: float, microbatch: int, train_ms: float
) -> dict[str, Any]:
    import ray

    if groups * GROUP % microbatch:
        raise ValueError(f"{groups} groups of {GROUP} are not complete microbatches of {microbatch}")
    partition, microbatches = queue.partition(), groups * GROUP // microbatch
    if not queue.has_node("trainer"):
        for name in ("producer", "reward", "trainer"):
            queue.node(name)
        stream(queue, groups=8, group_ms=5, microbatch=32, train_ms=5)  # warm-up
    producer, reward, trainer = (queue.node(name) for name in ("producer", "reward", "trainer"))
    start = time.monotonic() + 0.5  # by then all three are waiting
    ends = [
        producer.generate.remote(partition, groups, start, group_ms / 1e3),
        reward.reward.remote(partition, groups),
        trainer.train.remote(partition, microbatches, microbatch, start, train_ms / 1e3),
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
    """Return the settings of a command, with the fastest values as defaults."""
    work, asked = settings(command, small)
    own: dict[str, Any] = {"units": 1 if work == "dense" else 2}
    if work == "ragged_put":
        units, in_flight = PUT_SETTINGS[
            max(known for known in PUT_SETTINGS if known <= asked["groups_per_put"])
        ]
        own = {"units": units, "in_flight": in_flight}
    return work, {**own, **asked}


def main(small: bool) -> None:
    turns = Turns()
    # Before the import of Ray: isolate this cluster from all others.
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a few rows: not a measurement")
    main(parser.parse_args().small)
