"""Stages of a pipeline: which layers of a model lie on which.

The model is cut into `stages * chunks` pieces of consecutive layers. Piece k lies on the stage `k % stages`: with several chunks, stages
take turns, as in Megatron-LM's interleaved schedule (arXiv:2104.04473, section 2.2.2).
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..dataflow.errors import UserError


@dataclass(frozen=True)
class PipelineStages:
    """How the layers of a model are cut.

    >>> PipelineStages.equal(num_layers=7, stages=3)
    PipelineStages(stages=3, layers=(3, 2, 2))
    >>> [PipelineStages(2, (1, 1, 1, 1)).stage_of(layer) for layer in range(4)]
    [0, 1, 0, 1]
    """

    stages: int
    layers: tuple[int, ...]
    """How many layers each piece has, in the order of the model; may be 0, for a stage of the head alone, say."""

    def __post_init__(self) -> None:
        if self.stages < 1 or not self.layers or len(self.layers) % self.stages or min(self.layers) < 0:
            raise UserError(f"{len(self.layers)} pieces of {self.layers} layers cannot lie on {self.stages} stages")

    @property
    def chunks(self) -> int:
        """Pieces of each stage."""
        return len(self.layers) // self.stages

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return sum(self.layers)

    def piece_of(self, layer: int) -> int:
        """The piece that has a layer."""
        if not 0 <= layer < self.num_layers:
            raise UserError(f"a pipeline of {self.num_layers} layers has no layer {layer}")
        return bisect.bisect_right(list(itertools.accumulate(self.layers)), layer)

    def stage_of(self, layer: int) -> int:
        """The stage that has a layer."""
        return self.piece_of(layer) % self.stages

    def of_pieces(self, layers: Sequence[float]) -> list[float]:
        """What each piece has of something that is known for each layer (seconds, bytes), in all."""
        ends = list(itertools.accumulate(self.layers))
        return [math.fsum(layers[end - own : end]) for end, own in zip(ends, self.layers, strict=True)]

    @classmethod
    def equal(cls, num_layers: int, stages: int, chunks: int = 1) -> PipelineStages:
        """Pieces of equally many layers; where that cannot be, the first ones have one more."""
        pieces = stages * chunks
        each, longer = divmod(num_layers, max(1, pieces))
        return cls(stages, (each + 1,) * longer + (each,) * (pieces - longer))

    @classmethod
    def balanced(cls, costs: Sequence[float], stages: int, chunks: int = 1) -> PipelineStages:
        """Pieces whose most expensive one is as cheap as consecutive layers allow, and of those the most even ones (whose costs have
        the least sum of squares): the classic partition of a line, by dynamic programming.

        Args:
            costs: [layers] of each layer, at least 0. Add those of the embedding to the first, and of the head to the last.
            stages: of the pipeline.
            chunks: pieces of each stage.

        Returns:
            Pieces of at least one layer each.

        Raises:
            UserError: there are more pieces than layers.

        >>> PipelineStages.balanced([1, 1, 1, 1, 1, 4], stages=3)
        PipelineStages(stages=3, layers=(2, 3, 1))
        """
        pieces, num_layers = stages * chunks, len(costs)
        if pieces > num_layers:
            raise UserError(f"{num_layers} layers are too few for {stages} stages of {chunks} chunks")
        sums = [0.0, *itertools.accumulate(costs)]
        limit, _ = _partition(sums, pieces, max, lambda cost: cost)
        rounding = 1e-12 * sums[-1]
        _, ends = _partition(sums, pieces, operator.add, lambda cost: cost**2 if cost <= limit + rounding else math.inf)
        bounds = [0, *ends]
        return cls(stages, tuple(after - before for before, after in itertools.pairwise(bounds)))


def _partition(
    sums: Sequence[float], pieces: int, joined: Callable[[float, float], float], price: Callable[[float], float]
) -> tuple[float, list[int]]:
    """The least price of cutting a line into pieces that are not empty, and where they end.

    Args:
        sums: [layers + 1] costs of all layers before each.
        pieces: how many.
        joined: the price of two parts of the line together.
        price: of a piece of this cost.
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
