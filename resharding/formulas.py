"""Layouts from formulas, without modules: for planning, simulation, and tables of papers.

In HybridFlow (arXiv:2409.19256, section 5), a rank has these coordinates:

    rank = d_i * p * t  +  p_i * t  +  t_i          p pipeline stages, t tensor-parallel shards, d replicas

When generating with p_g stages and t_g shards, the rank takes stage `p_i // (p / p_g)` and shard
`t_i // (t / t_g)`. So its generation weights contain its training weights, without a second copy.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..dataflow.errors import UserError
from .weights import Box, Layout, Piece, TensorLayout, Where

# Pipeline stages: the model is cut into `stages * chunks` pieces of consecutive layers. Piece k
# belongs to stage `k % stages`, as in Megatron-LM's interleaved schedule (arXiv:2104.04473, section
# 2.2.2).


@dataclass(frozen=True)
class PipelineStages:
    """Assignment of layers to pipeline stages.

    >>> PipelineStages.equal(num_layers=7, stages=3)
    PipelineStages(stages=3, layers=(3, 2, 2))
    >>> [PipelineStages(2, (1, 1, 1, 1)).stage_of(layer) for layer in range(4)]
    [0, 1, 0, 1]
    """

    stages: int
    layers: tuple[int, ...]
    """Number of layers in each piece, in model order; 0 for a stage with only the head."""

    def __post_init__(self) -> None:
        if self.stages < 1 or not self.layers or len(self.layers) % self.stages or min(self.layers) < 0:
            raise UserError(
                f"cannot distribute {len(self.layers)} pieces of {self.layers} layers over {self.stages} stages"
            )

    @property
    def chunks(self) -> int:
        return len(self.layers) // self.stages

    def stage_of(self, layer: int) -> int:
        ends = list(itertools.accumulate(self.layers))
        if not 0 <= layer < ends[-1]:
            raise UserError(f"a pipeline of {ends[-1]} layers has no layer {layer}")
        return bisect.bisect_right(ends, layer) % self.stages

    @classmethod
    def equal(cls, num_layers: int, stages: int, chunks: int = 1) -> PipelineStages:
        """Cut the model into pieces of equal length. Leftover layers go to the first pieces."""
        pieces = stages * chunks
        each, longer = divmod(num_layers, max(1, pieces))
        return cls(stages, (each + 1,) * longer + (each,) * (pieces - longer))

    @classmethod
    def balanced(cls, costs: Sequence[float], stages: int, chunks: int = 1) -> PipelineStages:
        """Cut the model into nonempty pieces. Minimize the cost of the most expensive piece, then
        the sum of squared costs (linear partition problem, solved by dynamic programming). `costs`
        are [layers], at least 0; the first includes the embedding, the last the head. Raises
        UserError if there are more pieces than layers.

        >>> PipelineStages.balanced([1, 1, 1, 1, 1, 4], stages=3)
        PipelineStages(stages=3, layers=(2, 3, 1))
        """
        pieces, num_layers = stages * chunks, len(costs)
        if pieces > num_layers:
            raise UserError(f"{num_layers} layers are too few for {stages} stages of {chunks} chunks")
        sums = [0.0, *itertools.accumulate(costs)]
        limit, _ = _partition(sums, pieces, max, lambda cost: cost)
        rounding = 1e-12 * sums[-1]
        _, ends = _partition(
            sums, pieces, operator.add, lambda cost: cost**2 if cost <= limit + rounding else math.inf
        )
        bounds = [0, *ends]
        return cls(stages, tuple(after - before for before, after in itertools.pairwise(bounds)))


def _partition(
    sums: Sequence[float],
    pieces: int,
    joined: Callable[[float, float], float],
    price: Callable[[float], float],
) -> tuple[float, list[int]]:
    """Cut layers into nonempty pieces at the lowest price. Return the price, and each piece's end.

    `sums` are cumulative costs: the cost of all layers before each one. `price` maps a piece's cost
    to its price. `joined` combines the prices of two parts of the line.
    """
    num_layers = len(sums) - 1
    best: list[tuple[float, list[int]]] = [(price(sums[end]), [end]) for end in range(num_layers + 1)]
    for piece in range(1, pieces):
        best = [
            min(
                (
                    (joined(best[start][0], price(sums[end] - sums[start])), [*best[start][1], end])
                    for start in range(piece, end)
                ),
                default=(math.inf, []),
            )
            for end in range(num_layers + 1)
        ]
    return best[-1]


# Layouts


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    split_dim: int | None = None
    """Dimension that tensor parallelism splits; None if each shard holds the whole parameter."""
    layer: int = 0
    """Layer of the parameter. Embeddings belong to the first layer, the head to the last."""
    tied_layer: int | None = None
    """Another layer whose stage has a copy: the last layer, for an embedding tied to the head."""


HYBRIDFLOW_ORDER = ("tp", "pp", "dp")
"""Coordinates of ranks, fastest-changing first."""
MEGATRON_ORDER = ("tp", "dp", "pp")


@dataclass(frozen=True)
class Parallelism:
    """Degrees of parallelism: pipeline stages, tensor-parallel shards, and replicas."""

    pp: int = 1
    tp: int = 1
    dp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp

    def coordinates(self, order: Sequence[str] = HYBRIDFLOW_ORDER) -> list[dict[str, int]]:
        """Return each rank's "pp", "tp" and "dp" coordinates. `order` lists them, fastest-changing
        first."""
        if sorted(order) != ["dp", "pp", "tp"]:
            raise UserError(
                f"an order of ranks names 'tp', 'pp' and 'dp', each once, not {tuple(order)}"
            )
        ranges = [range(getattr(self, name)) for name in reversed(order)]
        return [
            dict(zip(reversed(order), indices, strict=True)) for indices in itertools.product(*ranges)
        ]

    def __str__(self) -> str:
        return f"PP {self.pp} x TP {self.tp} x DP {self.dp}"


def nodes_of(num_ranks: int, ranks_per_node: int = 8, first_node: int = 0) -> list[Where]:
    """Assign ranks to consecutive nodes. Layouts that share devices need the same `first_node`."""
    return [
        Where(f"node{first_node + rank // ranks_per_node}", f"device{rank % ranks_per_node}")
        for rank in range(num_ranks)
    ]


def three_dimensional(
    parameters: Iterable[Parameter],
    sizes: Parallelism,
    ranks: Sequence[Where] | None = None,
    dtype: str = "bfloat16",
    order: Sequence[str] = HYBRIDFLOW_ORDER,
    stages: PipelineStages | None = None,
) -> Layout:
    """Return a layout with pipeline, tensor and data parallelism, as in Megatron-LM training. By
    default, nodes have 8 devices, and stages are `PipelineStages.equal`. For `order`, see
    `Parallelism.coordinates`. Raises UserError if `stages` does not match `sizes`, or lacks a
    layer."""
    if stages is not None and stages.stages != sizes.pp:
        raise UserError(f"a layout of PP {sizes.pp} has a pipeline of {stages.stages} stages")
    parts = [(c["pp"], c["tp"]) for c in sizes.coordinates(order)]
    label = f"training, {sizes}"
    return _of_stages_and_shards(parameters, stages or sizes.pp, sizes.tp, parts, ranks, dtype, label)


def generation(
    parameters: Iterable[Parameter],
    training: Parallelism,
    pp: int,
    tp: int,
    ranks: Sequence[Where] | None = None,
    dtype: str = "bfloat16",
    regrouped: bool = True,
    order: Sequence[str] = HYBRIDFLOW_ORDER,
) -> Layout:
    """Return the layout of the same ranks for generation. `pp` and `tp` must divide those of
    training, and `order` is its order of ranks. If `regrouped`, groups follow HybridFlow: a rank's
    generation shard contains its training shard. Otherwise, a group is `pp * tp` consecutive ranks,
    shards fastest ("HybridFlow-V" in table 2 of the paper)."""
    grouped = generation_coordinates(training, pp, tp, order)
    parts = [(c["generation_pp"], c["generation_tp"]) for c in grouped]
    if not regrouped:
        parts = [(rank // tp % pp, rank % tp) for rank in range(training.num_ranks)]
    label = f"generation, PP {pp} x TP {tp}{'' if regrouped else ', not regrouped'}"
    return _of_stages_and_shards(parameters, pp, tp, parts, ranks, dtype, label)


def generation_coordinates(
    training: Parallelism, pp: int, tp: int, order: Sequence[str] = HYBRIDFLOW_ORDER
) -> list[dict[str, int]]:
    """Return the coordinates of each rank: "pp", "tp" and "dp" in training, "generation_pp" and
    "generation_tp" in generation, and "micro_dp".

    Ranks with equal "dp" and "micro_dp" share one model replica in generation, so they get the same
    rows. The paper's 3D_ALL_MICRO_DP protocol, read literally, would split the rows.

    >>> [c["micro_dp"] for c in generation_coordinates(Parallelism(tp=4), 1, 2)]
    [0, 1, 0, 1]
    """
    for name, mine, other in (("pp", pp, training.pp), ("tp", tp, training.tp)):
        if mine < 1 or other % mine:
            raise UserError(
                f"generation with {name}={mine}: it must divide the {name}={other} of training"
            )
    stages, shards = training.pp // pp, training.tp // tp
    return [
        c
        | {"generation_pp": c["pp"] // stages, "generation_tp": c["tp"] // shards}
        | {"micro_dp": c["pp"] % stages * shards + c["tp"] % shards}
        for c in training.coordinates(order)
    ]


def fully_sharded(
    parameters: Iterable[Parameter],
    sharded: int,
    tp: int = 1,
    ranks: Sequence[Where] | None = None,
    dtype: str = "bfloat16",
) -> Layout:
    """Return the layout of FSDP2 over tensor parallelism, which is the fastest coordinate and
    splits first. FSDP then splits dimension 0 over `sharded` ranks, in the sizes of
    `torch.chunk`."""
    shared: dict[tuple[object, ...], tuple[tuple[Piece, ...], ...]] = {}
    tensors: list[TensorLayout] = []
    for p in parameters:
        # Equal parameters share one tuple, because layouts and plans compare tensors by identity.
        if (key := (p.shape, p.split_dim)) not in shared:
            boxes = [_shard(p, tp, t) for _ in range(sharded) for t in range(tp)]
            chunks = [_chunk(box, sharded, rank // tp) for rank, box in enumerate(boxes)]
            shared[key] = tuple((Piece(box),) if box.numel else () for box in chunks)
        tensors.append(TensorLayout(p.name, p.shape, dtype, shared[key]))
    return Layout.of(tensors, ranks or nodes_of(sharded * tp), f"FSDP {sharded} x TP {tp}")


def replicas(
    parameters: Iterable[Parameter],
    tp: int,
    num_replicas: int,
    ranks: Sequence[Where] | None = None,
    dtype: str = "bfloat16",
) -> Layout:
    """Return the layout of independent engines of one tensor-parallel group each, as in vLLM."""
    parts = [(0, rank % tp) for rank in range(tp * num_replicas)]
    label = f"{num_replicas} replicas of TP {tp}"
    return _of_stages_and_shards(parameters, 1, tp, parts, ranks, dtype, label)


def _of_stages_and_shards(
    parameters: Iterable[Parameter],
    stages: PipelineStages | int,
    tp: int,
    parts: Sequence[tuple[int, int]],
    ranks: Sequence[Where] | None,
    dtype: str,
    label: str,
) -> Layout:
    """Return a layout of one shard per rank. `parts` lists each rank's (stage, shard)."""
    parameters = list(parameters)
    if isinstance(stages, int):
        layers = (layer for p in parameters for layer in (p.layer, p.tied_layer) if layer is not None)
        num_layers = 1 + max(layers, default=0)
        stages = PipelineStages.equal(num_layers, stages)
    shared: dict[tuple[object, ...], tuple[tuple[Piece, ...], ...]] = {}
    tensors: list[TensorLayout] = []
    for p in parameters:
        holding = {stages.stage_of(layer) for layer in (p.layer, p.tied_layer) if layer is not None}
        key = (p.shape, p.split_dim, frozenset(holding))
        if key not in shared:
            shared[key] = tuple((Piece(_shard(p, tp, t)),) if s in holding else () for s, t in parts)
        tensors.append(TensorLayout(p.name, p.shape, dtype, shared[key]))
    return Layout.of(tensors, ranks or nodes_of(len(parts)), label)


def _shard(parameter: Parameter, shards: int, index: int) -> Box:
    dim = parameter.split_dim
    if dim is None or shards == 1:
        return Box.full(parameter.shape)
    extent = parameter.shape[dim]
    if extent % shards:
        raise UserError(
            f"parameter {parameter.name!r} of shape {parameter.shape}: dimension {dim} cannot be split into {shards} equal shards"
        )
    return Box.along(parameter.shape, dim, index * extent // shards, (index + 1) * extent // shards)


def _chunk(box: Box, chunks: int, index: int) -> Box:
    """Return a chunk of a box along its first dimension, in the sizes of `torch.chunk`."""
    if not box.starts:
        return box if index == 0 else Box((0,), (0,))
    first, last = box.starts[0], box.stops[0]
    each = -(-(last - first) // chunks)
    start, stop = (min(first + i * each, last) for i in (index, index + 1))
    return Box((start, *box.starts[1:]), (stop, *box.stops[1:]))
