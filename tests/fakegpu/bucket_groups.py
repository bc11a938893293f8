"""Two ranks of a trainer publish three versions to two receivers, each on a GPU of two.

`TRANSPORT` is "nccl" or "ipc". The parts are float32 on the host, as of an offloaded trainer, and travel as
bfloat16. Prints, for each process, the groups it made, the bytes that it copied to its GPU and back in the last
version, and the memory that it then holds there. Numbers are garbage, so the checksums are replaced.
"""

import ctypes
import json
import multiprocessing
import os
from functools import reduce
from operator import add
from typing import Any

import torch

from weft.resharding import incoming, publisher, sources, transfer
from weft.resharding.bucket_group import BucketGroup
from weft.resharding.weights import Box, TensorPart

SHAPES = {"a": (24_576, 1024), "b": (64, 1024)}
VERSIONS = 3
shim: Any = ctypes.CDLL(os.environ["SHIM"])


def counter(name: str) -> int:
    return ctypes.c_long.in_dll(shim, name).value


def parts(number: int, dtype: torch.dtype, device: str) -> list[TensorPart]:
    """Return half of the rows of each tensor."""
    found: list[TensorPart] = []
    for name, shape in SHAPES.items():
        box = Box.along(shape, 0, shape[0] * number // 2, shape[0] * (number + 1) // 2)
        found.append(TensorPart(name, shape, box, torch.zeros(box.shape, dtype=dtype, device=device)))
    return found


def groups() -> list[str]:
    names: list[str] = []
    made = BucketGroup.__init__

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        names.append(type(self._group).__name__)

    BucketGroup.__init__ = noted  # type: ignore[method-assign]
    return names


def report(names: list[str], copied: tuple[int, int]) -> dict[str, Any]:
    to_gpu, from_gpu = (
        counter(name) - before for name, before in zip(("shim_h2d", "shim_d2h"), copied, strict=True)
    )
    held = torch.cuda.memory_allocated()
    return {"groups": names, "to_gpu": to_gpu, "from_gpu": from_gpu, "held": held}


def give(pipe: Any, number: int, transport: Any) -> None:
    torch.cuda.set_device(number)
    names, copied = groups(), (0, 0)
    sender = publisher.WeightPublisher(transport=transport, rank=number, ranks=2)
    own = [part._replace(dtype=torch.bfloat16) for part in parts(number, torch.float32, "cpu")]
    for version in range(VERSIONS):
        copied = counter("shim_h2d"), counter("shim_d2h")
        pipe.send(sender.publish(own, version, ["left", "right"]))
        pipe.recv()
        sender.finish()
    pipe.send(report(names, copied))


def take(pipe: Any, number: int, transport: Any) -> None:
    torch.cuda.set_device(number)
    names, mapped, copied = groups(), [], (0, 0)

    def open_memory(said: Any) -> torch.Tensor:
        mapped.append(said["device"])
        return torch.empty(said["fields"][2], dtype=torch.uint8, device="cuda")

    sources.open_device_memory = open_memory  # the fake GPU cannot map another process's memory
    own = parts(number, torch.bfloat16, "cuda")
    for _ in range(VERSIONS):
        weights = pipe.recv()
        copied = counter("shim_h2d"), counter("shim_d2h")
        with incoming.IncomingWeights(weights.to(("left", "right")[number])) as coming:
            incoming.receive_parts(coming, own, None, lambda sums: sums)
        del coming
        pipe.send(None)
    is_own = [str(torch.cuda.get_device_properties(number).uuid) == device for device in mapped]
    pipe.send({**report(names, copied), "maps_own_gpu": is_own})


def main(transport: str) -> None:
    nothing: Any = lambda sums: [0 for _ in sums]  # noqa: E731
    transfer.read_sums = incoming.read_sums = nothing
    processes: Any = multiprocessing.get_context("fork")
    pipes: list[Any] = []
    started: list[Any] = []
    for function in (give, take):
        for number in range(2):
            here, there = processes.Pipe()
            started.append(processes.Process(target=function, args=(there, number, transport)))
            started[-1].start()
            pipes.append(here)
    givers, takers = pipes[:2], pipes[2:]
    for _ in range(VERSIONS):
        weights = reduce(add, [pipe.recv() for pipe in givers])
        for pipe in takers:
            pipe.send(weights)
        for pipe in takers:
            pipe.recv()
        for pipe in givers:
            pipe.send(None)
    print(json.dumps({"trainer": [p.recv() for p in givers], "receivers": [p.recv() for p in takers]}))
    for process in started:
        process.kill()


if __name__ == "__main__":
    main(os.environ["TRANSPORT"])
