"""Options of a call: its GPUs, and the parallelism of its model.

Tensor parallelism stays within a node. On several nodes, the GPUs of a pipeline stage are an even part
of a node or whole nodes, so that a data-parallel group does not mix links within a node and between
nodes.

>>> [len(strategies(gpus, node_gpus=8)) for gpus in (4, 8, 16)]
[6, 10, 14]
>>> meshes(nodes=1, node_gpus=4, smallest=2)
(Mesh(first=0, gpus=2), Mesh(first=2, gpus=2), Mesh(first=0, gpus=4))
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Strategy(NamedTuple):
    """Degrees of parallelism: pipeline stages, tensor-parallel shards and data-parallel replicas."""

    pp: int = 1
    tp: int = 1
    dp: int = 1

    @property
    def gpus(self) -> int:
        return self.pp * self.tp * self.dp

    def __str__(self) -> str:
        return f"PP {self.pp} x TP {self.tp} x DP {self.dp}"


class Mesh(NamedTuple):
    """Consecutive GPUs of a cluster."""

    first: int
    gpus: int

    def overlaps(self, other: Mesh) -> bool:
        return self.first < other.first + other.gpus and other.first < self.first + self.gpus


class Option(NamedTuple):
    mesh: Mesh
    strategy: Strategy


def strategies(
    gpus: int, node_gpus: int, pipelines: Collection[int] | None = None
) -> tuple[Strategy, ...]:
    """Return the strategies that use exactly `gpus` GPUs.

    Tensor parallelism is a power of two and at most a node. On more than a node, stages are even parts
    of a node or whole nodes, if any strategy has such stages.

    Args:
        gpus: number of GPUs of the model.
        node_gpus: number of GPUs of a node.
        pipelines: allowed numbers of pipeline stages; all by default.
    """
    found: list[Strategy] = []
    for pp in range(1, gpus + 1) if pipelines is None else sorted(pipelines):
        for tp in (1 << k for k in range(min(node_gpus, gpus).bit_length())):
            if gpus % (pp * tp) == 0 and tp <= node_gpus:
                found.append(Strategy(pp, tp, gpus // (pp * tp)))
    even = [
        each
        for each in found
        if node_gpus % (each.tp * each.dp) == 0 or each.tp * each.dp % node_gpus == 0
    ]
    return tuple(even if even and gpus > node_gpus else found)


def meshes(nodes: int, node_gpus: int, smallest: int = 1) -> tuple[Mesh, ...]:
    """Return the meshes of a cluster: aligned powers of two of at least `smallest` GPUs within a
    node, and consecutive whole nodes."""
    found: list[Mesh] = []
    for gpus in (1 << k for k in range(node_gpus.bit_length())):
        if smallest <= gpus < node_gpus and node_gpus % gpus == 0:
            found += [Mesh(first, gpus) for first in range(0, nodes * node_gpus, gpus)]
    for number in range(1, nodes + 1):
        found += [Mesh(k * node_gpus, number * node_gpus) for k in range(nodes - number + 1)]
    return tuple(found)


def options(nodes: int, node_gpus: int, smallest: int = 1) -> tuple[Option, ...]:
    """Return every mesh with every strategy on it."""
    return tuple(
        Option(mesh, strategy)
        for mesh in meshes(nodes, node_gpus, smallest)
        for strategy in strategies(mesh.gpus, node_gpus)
    )
