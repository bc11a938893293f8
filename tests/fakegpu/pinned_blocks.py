"""Allocate blocks of pinned memory, and print what torch took from the host, and the sizes of reused blocks."""

import json

import torch

torch.cuda.init()


def block(mib: int) -> torch.Tensor:
    return torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)


def taken() -> int:
    """[MiB]"""
    return torch.cuda.host_memory_stats()["allocated_bytes.current"] >> 20


blocks = [block(mib) for mib in (48, 192, 96, 1187)]
large = taken()
blocks.clear()
freed = taken()
small = block(17)
before = taken()
del small
larger = block(30)
print(json.dumps({"large": large, "freed": freed, "reuses_smaller": taken() == before}))
