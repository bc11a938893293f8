"""One rank of a trainer that sends its weights, by four methods."""

from __future__ import annotations

import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.workers.rendezvous import LOOPBACK, Rendezvous, take_port

RANKS = 2
SECRET = "of this benchmark"
Entry = tuple[str, tuple[int, ...], int]
"""Name, shape, and byte offset of a tensor that rank 0 wrote."""


class Timed:
    """Measures functions by replacing them in their modules; seconds by label."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.of_processor: defaultdict[str, float] = defaultdict(float)
        """The same in CPU time of the calling thread."""

    def watch(self, label: str, module: Any, *names: str) -> None:
        for name in names:
            setattr(module, name, self._timed(label, getattr(module, name)))

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start, start_cpu = time.perf_counter(), time.thread_time()
            found = function(*arguments)
            self.seconds[label] += time.perf_counter() - start
            self.of_processor[label] += time.thread_time() - start_cpu
            return found

        return timed


class Trainer:
    """One of two trainer ranks with one thread each: FSDP2 over gloo, like `ActorWorker`."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._file = os.memfd_create("weft-gathered")
        self._taken = take_port(LOOPBACK)

    def port(self) -> int:
        """Return the rendezvous port if this is rank 0."""
        return self._taken.getsockname()[1]

    def start(self, model: str, rank: int, port: int) -> None:
        from weft.resharding import transfer
        from weft.workers.actor import ActorConfig, ActorWorker
        from weft.workers.worker import Context

        meeting = Rendezvous(LOOPBACK, port, SECRET) if rank else Rendezvous.at(self._taken, SECRET)
        self._first = rank == 0
        self._worker = ActorWorker(ActorConfig(model=model), Context("actor", rank, RANKS, meeting))
        self._engine: Any = self._worker.engine
        self._publishers: dict[str, Any] = {}
        self._timed = Timed()
        self._timed.watch("checksums", transfer, "start_sum")
        self._timed.watch("copies", transfer.Transfer, "_fill")

    def change(self) -> None:
        """Change the weights, as a step does."""
        for part in self._engine.published_parts():
            part.tensor.mul_(1.0001)

    def publish(self, version: int, transport: str = "auto") -> Any:
        """Publish with Weft, and return the record that receivers need."""
        self._timed.seconds.clear()
        self._timed.of_processor.clear()
        if transport not in self._publishers:
            self._worker.config = self._worker.config.model_copy(update={"transport": transport})
            self._publishers[transport] = self._worker._new_publisher()
        self._worker._publisher = self._publishers[transport]
        return self._worker.publish_weights(version, ["rollout[0]"])

    def finish(self, version: int) -> tuple[Any, dict[str, float], dict[str, float]]:
        """Finish after receipt; return the report, and wall and CPU seconds of copies and
        checksums."""
        given = self._worker.finish_publishing(version)
        seconds, cpu = dict(self._timed.seconds), dict(self._timed.of_processor)
        for spent in (seconds, cpu):
            spent["copies"] -= spent["checksums"]
        return given, seconds, cpu

    def gather(self) -> tuple[str, int, list[Entry], int]:
        """Write all tensors to shared memory on rank 0; return its name, size, entries and
        CRC-32."""
        found: list[Entry] = []
        end = checksum = 0
        for name, tensor in self._engine.named_tensors():
            if self._first:
                content = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
                os.pwrite(self._file, content, end)
                checksum = zlib.crc32(content, checksum)
                found.append((name, tuple(tensor.shape), end))
                end += len(content)
        return f"/proc/{os.getpid()}/fd/{self._file}", end, found, checksum

    def put(self) -> list[Any]:
        """Put the full state as arrays into Ray's object store."""
        import ray

        state = self._state()
        return [ray.put({name: tensor.numpy() for name, tensor in state.items()})] if self._first else []

    def save(self, folder: str) -> None:
        """Save the full state as safetensors, without a sync to disk."""
        from safetensors.torch import save_file

        state = self._state()
        if self._first:
            save_file(state, Path(folder) / "model.safetensors")

    def _state(self) -> dict[str, torch.Tensor]:
        """Gather all tensors on both ranks, and keep them on the first."""
        tensors = self._engine.named_tensors()
        return {name: tensor.detach().clone() for name, tensor in tensors if self._first}
