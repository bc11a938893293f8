"""Layers on pipeline stages, against exhaustive search."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from weft.dataflow.errors import UserError
from weft.resharding.formulas import PipelineStages


def all_cuts(layers: int, pieces: int) -> list[tuple[int, ...]]:
    """Return the layers per stage for every cut without empty stages."""
    found = []
    for cuts in itertools.combinations(range(1, layers), pieces - 1):
        found.append(tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers))))
    return found


def of_pieces(layers: Sequence[int], costs: Sequence[float]) -> list[float]:
    """Sum the costs of layers over each piece."""
    ends = list(itertools.accumulate(layers))
    return [math.fsum(costs[end - own : end]) for end, own in zip(ends, layers, strict=True)]


@pytest.mark.parametrize(
    ("layers", "stages", "chunks"), [(1, 1, 1), (5, 3, 1), (7, 2, 2), (8, 4, 2), (9, 3, 1)]
)
def test_the_most_expensive_piece_is_as_cheap_as_can_be(layers: int, stages: int, chunks: int):
    chance = np.random.default_rng(layers)
    for costs in [
        np.ones(layers),
        *chance.integers(0, 9, size=(10, layers)),
        *chance.exponential(size=(10, layers)),
    ]:
        found = PipelineStages.balanced(costs.tolist(), stages, chunks)
        assert found.layers in all_cuts(layers, stages * chunks)
        cuts = [of_pieces(cut, costs) for cut in all_cuts(layers, stages * chunks)]
        best = min((round(max(each), 9), sum(own**2 for own in each)) for each in cuts)
        pieces = of_pieces(found.layers, costs)
        assert (max(pieces), sum(own**2 for own in pieces)) == pytest.approx(best)


def test_layers_know_their_piece_and_stage():
    stages = PipelineStages(2, (2, 1, 0, 3))
    assert stages.chunks == 2
    assert [stages.stage_of(layer) for layer in range(6)] == [0, 0, 1, 1, 1, 1]
    for wrong in (-1, 6):
        with pytest.raises(UserError, match=f"a pipeline of 6 layers has no layer {wrong}"):
            stages.stage_of(wrong)


def test_a_head_as_heavy_as_two_layers_leaves_the_last_stage_fewer():
    # In units of a layer, with a free embedding and a head of cost two: eight layers on four
    # stages.
    assert sorted(PipelineStages.balanced([1] * 7 + [3], 4).layers[:3]) == [2, 2, 3]
    assert PipelineStages.equal(8, 2, 2).layers == (2, 2, 2, 2)
    assert PipelineStages.equal(7, 3).layers == (3, 2, 2), "the first pieces have one more"


@pytest.mark.parametrize("wrong", [(2, (1, 1, 1)), (0, (1,)), (1, ()), (1, (-1,))])
def test_pieces_that_do_not_fit_the_stages_are_refused(wrong: tuple[int, tuple[int, ...]]):
    with pytest.raises(UserError, match="cannot distribute"):
        PipelineStages(*wrong)


def test_fewer_layers_than_pieces_are_not_balanced():
    with pytest.raises(UserError, match="3 layers are too few for 2 stages of 2 chunks"):
        PipelineStages.balanced([1, 1, 1], 2, 2)
