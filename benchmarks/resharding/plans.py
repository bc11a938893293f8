"""Plans without weights: bytes against the minimum, planning time, and projected transfer times."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weft.resharding.formulas import (
    Parallelism,
    Parameter,
    fully_sharded,
    generation,
    nodes_of,
    replicas,
    three_dimensional,
)
from weft.resharding.weights import Layout, ReshardPlan

NVLINK = 450e9
"""[B/s] One GPU to others of its node, per direction: NVLink 4."""
NETWORK = 50e9
"""[B/s] One GPU to other nodes: one 400 Gb/s port each."""
HOST = 25e9
"""[B/s] Between a GPU and its host's memory: half of PCIe 5 x16, since the CPU reads what the GPU
writes."""
PUBLISHED = "235B on 4 nodes: 64.7 s (vLLM's nccl), 3.54 s (sharded_rdt), SkyRL#2090; 1T: about 20 s (checkpoint-engine), < 10 s (AWEX)"


def toy_model(layers: int = 8) -> list[Parameter]:
    """Return parameters of each kind per layer, small enough to count elements; sizes are multiples
    of 8."""
    kinds = (("q", (8, 4), 0), ("o", (4, 8), 1), ("norm", (8,), None))
    return [Parameter(f"{n}.{kind}", shape, dim, n) for n in range(layers) for kind, shape, dim in kinds]


def model_of(
    layers: int, hidden: int, heads: int, kv: int, mlp: int, vocabulary: int, experts: int = 0
) -> list[Parameter]:
    """Return a Llama or mixture of experts; `heads` and `kv` are sizes in elements."""
    found = [
        Parameter("embed", (vocabulary, hidden), 0, 0),
        Parameter("head", (vocabulary, hidden), 0, layers - 1),
    ]
    for n in range(layers):
        found += [Parameter(f"{n}.q", (heads, hidden), 0, n), Parameter(f"{n}.o", (hidden, heads), 1, n)]
        found += [Parameter(f"{n}.{name}", (kv, hidden), 0, n) for name in ("k", "v")]
        found += [Parameter(f"{n}.norm{i}", (hidden,), None, n) for i in range(2)]
        found += [Parameter(f"{n}.router", (experts, hidden), None, n)] if experts else []
        for expert in range(experts or 1):
            found += [Parameter(f"{n}.{expert}.{name}", (mlp, hidden), 0, n) for name in ("gate", "up")]
            found.append(Parameter(f"{n}.{expert}.down", (hidden, mlp), 1, n))
    return found


MODELS = {
    "8B": (32, 4096, 4096, 1024, 14336, 128256),
    "70B": (80, 8192, 8192, 1024, 28672, 128256),
    "235B, 128 experts": (94, 4096, 8192, 512, 1536, 151936, 128),
}
"""Arguments of `model_of`."""


def sources(degrees: Sequence[int]) -> Iterator[Layout]:
    model = toy_model()
    for sharded, tp in itertools.product(degrees, repeat=2):
        yield fully_sharded(model, sharded, tp)
    for pp, tp, dp in itertools.product(degrees, repeat=3):
        yield three_dimensional(model, Parallelism(pp, tp, dp))


def lower_bounds(source: Layout, destination: Layout) -> list[int]:
    """Return, for each destination rank, the number of bytes that it needs and its device lacks,
    counted element by element."""
    found: list[int] = []
    for rank, here in enumerate(destination.ranks):
        owners = [
            n for n, w in enumerate(source.ranks) if (w.node, w.device) == (here.node, here.device)
        ]
        missing = 0
        for name, tensor in destination.tensors.items():
            lacks = np.zeros(tensor.shape, bool)
            for box in tensor.boxes[rank]:
                lacks[box.slices] = True
            for box in itertools.chain.from_iterable(
                source.tensors[name].boxes[owner] for owner in owners
            ):
                lacks[box.slices] = False
            missing += tensor.item_bytes * int(lacks.sum())
        found.append(missing)
    return found


def plan_equals_bound(degrees: Sequence[int]) -> dict[str, Any]:
    """Check all pairs of layouts, on the same and on other devices: no rank receives a byte too
    many."""
    equal = pairs = 0
    destinations = [
        replicas(toy_model(), tp, engines, nodes_of(tp * engines, first_node=first_node))
        for tp, engines, first_node in itertools.product(degrees, degrees, (0, 1000))
    ]
    for source, destination in itertools.product(sources(degrees), destinations):
        equal += ReshardPlan(source, destination).received_bytes.tolist() == lower_bounds(
            source, destination
        )
        pairs += 1
    redundant = 0
    for pp, tp, dp in itertools.product(degrees, repeat=3):
        sizes = Parallelism(pp, tp, dp)
        for p_g, t_g in itertools.product(
            (d for d in degrees if pp % d == 0), (d for d in degrees if tp % d == 0)
        ):
            plan = ReshardPlan(
                three_dimensional(toy_model(), sizes), generation(toy_model(), sizes, p_g, t_g)
            )
            redundant += sum(map(plan.redundant_bytes, range(sizes.num_ranks)))
    return {
        "plan_equals_bound": True if equal == pairs else round(equal / pairs, 4),
        "plan_pairs": pairs,
        "hybridflow_redundant_bytes": redundant,
    }


def plan_70b_s(ranks: int = 64, model: str = "70B") -> float:
    """Return the seconds to plan from FSDP to TP 8 engines on other nodes, given the layouts."""
    parameters = model_of(*MODELS[model])
    layouts = (
        fully_sharded(parameters, ranks),
        replicas(parameters, 8, ranks // 8, nodes_of(ranks, first_node=1000)),
    )
    start = time.perf_counter()
    ReshardPlan(*layouts)
    return time.perf_counter() - start


def seconds_of(plan: ReshardPlan, *, through_host: bool = False) -> float:
    """Return the time of the busiest GPU: traffic between nodes, then within, optionally through
    host memory."""
    ranks = max(len(plan.source.ranks), len(plan.destination.ranks))
    crossing, inside = np.zeros((2, ranks)), np.zeros((2, ranks))
    shared = Counter(
        id(plan.copies(name)) for name in plan.destination.tensors
    )  # equal tensors have equal copies
    for name, tensor in plan.destination.tensors.items():
        count = shared.pop(id(plan.copies(name)), 0) * tensor.item_bytes
        for copy in plan.copies(name) if count else ():
            if copy.travels:
                near = (
                    plan.source.ranks[copy.source].node == plan.destination.ranks[copy.destination].node
                )
                for side, rank in enumerate((copy.source, copy.destination)):
                    (inside if near else crossing)[side, rank] += count * copy.box.numel
    if through_host:  # each byte goes to the sender's host memory, and comes from the receiver's
        return crossing.max() / NETWORK + 2 * (crossing + inside).max() / HOST
    return crossing.max() / NETWORK + inside.max() / NVLINK


PROJECTED = {"8B": (8, 32, 128), "70B": (32, 128, 512), "235B, 128 experts": (32, 128, 512)}
"""GPUs per model: half train and half generate. Up to 128 GPUs, also all of them alternating."""


def projection(gpus_of: Mapping[str, Sequence[int]] = PROJECTED) -> str:
    """Return a table of transfer times at link rates. No run has confirmed it."""
    lines = [
        "PROJECTION from plans and link rates (a GPU: 450 GB/s NVLink, 50 GB/s network, 25 GB/s to its host): nothing was run.",
        f"{'bfloat16 model':<20}{'GPUs':>5}{'apart':>9}{'via host':>10}{'colocated':>10}   seconds, FSDP to TP 8",
    ]
    for name, gpus in ((name, gpus) for name, sizes in gpus_of.items() for gpus in sizes):
        parameters = model_of(*MODELS[name])
        where, half = nodes_of(gpus), gpus // 2
        tp = min(8, half)
        engines = replicas(parameters, tp, half // tp, where[half:])
        apart = ReshardPlan(fully_sharded(parameters, half, ranks=where[:half]), engines)
        line = (
            f"{name:<20}{gpus:>5}{seconds_of(apart):>9.3f}{seconds_of(apart, through_host=True):>10.3f}"
        )
        if gpus <= 128:
            same = ReshardPlan(fully_sharded(parameters, gpus), replicas(parameters, 8, gpus // 8))
            line += f"{seconds_of(same):>10.3f}"
        lines.append(line)
    return "\n".join([*lines, f"published: {PUBLISHED}"])
