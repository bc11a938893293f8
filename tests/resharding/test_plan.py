"""The plan against brute force: tensors hold their own indices, and copies are executed on
arrays."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.errors import UserError, WeightSyncError
from weft.resharding.formulas import (
    HYBRIDFLOW_ORDER,
    MEGATRON_ORDER,
    Parallelism,
    Parameter,
    PipelineStages,
    fully_sharded,
    generation,
    nodes_of,
    replicas,
    three_dimensional,
)
from weft.resharding.weights import Box, Layout, Piece, ReshardPlan, TensorLayout, Where


def a_model(layers: int = 3) -> list[Parameter]:
    """Column-parallel, row-parallel and replicated parameters, with embedding and head. Sizes are
    multiples of 8."""
    found = [Parameter("embed", (32, 8), 0, 0)]
    for layer in range(layers):
        found += [
            Parameter(f"{layer}.q", (16, 8), 0, layer),
            Parameter(f"{layer}.o", (8, 16), 1, layer),
            Parameter(f"{layer}.norm", (8,), None, layer),
        ]
    return [*found, Parameter("head", (32, 8), 0, layers - 1)]


def needed_and_had(plan: ReshardPlan, rank: int) -> tuple[int, int]:
    """Count the bytes that a destination rank needs, and those already in its device's memory."""
    needed = had = 0
    for name, wanted in plan.destination.tensors.items():
        wants, has = np.zeros(wanted.shape, bool), np.zeros(wanted.shape, bool)
        for box in wanted.boxes[rank]:
            wants[box.slices] = True
        for owner, where in enumerate(plan.source.ranks):
            if where.distance(plan.destination.ranks[rank]) == 0:
                for box in plan.source.tensors[name].boxes[owner]:
                    has[box.slices] = True
        needed += wanted.item_bytes * int(wants.sum())
        had += wanted.item_bytes * int((wants & has).sum())
    return needed, had


def check_against_brute_force(plan: ReshardPlan) -> None:
    """Execute the plan on arrays; compare results, traffic and senders with counts by element."""
    sent = np.zeros(len(plan.source.ranks), np.int64)
    for rank in range(len(plan.destination.ranks)):
        received = 0
        covered = {n: np.zeros(t.shape, np.int64) for n, t in plan.destination.tensors.items()}
        for name, copy in plan.received_by(rank):
            source, wanted = plan.source.tensors[name], plan.destination.tensors[name]
            held = source.boxes[copy.source][copy.source_piece]
            assert copy.box.intersection(held) == copy.box, "the source does not have what it is to give"
            assert any(copy.box.intersection(box) == copy.box for box in wanted.boxes[rank])
            covered[name][copy.box.slices] += 1
            near = plan.source.ranks[copy.source].distance(plan.destination.ranks[rank]) == 0
            assert copy.travels is not near
            if copy.travels:
                received += copy.box.numel * wanted.item_bytes
                sent[copy.source] += copy.box.numel * wanted.item_bytes
        for name, counts in covered.items():
            wants = np.zeros(counts.shape, np.int64)
            for box in plan.destination.tensors[name].boxes[rank]:
                wants[box.slices] = 1
            np.testing.assert_array_equal(counts, wants, err_msg=f"{name} on rank {rank}")
        needed, had = needed_and_had(plan, rank)
        assert received == plan.received_bytes[rank] == needed - had
        assert plan.in_place_bytes[rank] == had
    np.testing.assert_array_equal(sent, plan.sent_bytes)


def random_cut(rng: random.Random, box: Box, parts: int) -> list[Box]:
    """Cut a box into disjoint boxes, or fewer if it has too few elements."""
    boxes = [box]
    while len(boxes) < parts:
        whole = max(boxes, key=lambda b: b.numel)
        dims = [d for d, extent in enumerate(whole.shape) if extent > 1]
        if not dims:
            break
        dim = rng.choice(dims)
        at = rng.randrange(whole.starts[dim] + 1, whole.stops[dim])
        stops, starts = list(whole.stops), list(whole.starts)
        stops[dim] = starts[dim] = at
        boxes.remove(whole)
        boxes += [Box(whole.starts, tuple(stops)), Box(tuple(starts), whole.stops)]
    return boxes


def random_layout(
    rng: random.Random, shapes: dict[str, tuple[int, ...]], ranks: int, complete: bool
) -> Layout:
    """Place ranks on random devices, cut tensors at random, and deal boxes to one or several random
    ranks."""
    tensors: list[TensorLayout] = []
    for name, shape in shapes.items():
        held: list[list[Piece]] = [[] for _ in range(ranks)]
        for box in random_cut(rng, Box.full(shape), rng.randint(1, 2 * ranks)):
            owners = rng.sample(range(ranks), rng.randint(1, min(ranks, 3)))
            for owner in owners if complete or rng.random() < 0.8 else ():
                held[owner].append(Piece(box))
        tensors.append(TensorLayout(name, shape, "float32", tuple(map(tuple, held))))
    places = [Where(f"n{rng.randrange(2)}", f"d{rng.randrange(4)}") for _ in range(ranks)]
    return Layout.of(tensors, places)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_layouts_are_covered_once_and_move_only_missing_bytes(rng: random.Random):
    shapes = {
        f"t{n}": tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3)))
        for n in range(rng.randint(1, 4))
    }
    source = random_layout(rng, shapes, rng.randint(1, 8), complete=True)
    destination = random_layout(rng, shapes, rng.randint(1, 8), complete=False)
    check_against_brute_force(ReshardPlan(source, destination))


@pytest.mark.parametrize(
    "degrees", [(1, 1, 1, 1), (4, 1, 2, 2), (2, 2, 4, 1), (8, 1, 1, 8), (4, 2, 8, 1)]
)
def test_fully_sharded_training_gives_each_engine_its_shard(degrees: tuple[int, int, int, int]):
    sharded, tp, engine_tp, engines = degrees
    source = fully_sharded(a_model(), sharded, tp, nodes_of(sharded * tp, 4))
    destination = replicas(a_model(), engine_tp, engines, nodes_of(engine_tp * engines, 4, first_node=9))
    plan = ReshardPlan(source, destination)
    check_against_brute_force(plan)
    assert plan.in_place_bytes.sum() == 0, "other nodes have none of it"


@pytest.mark.parametrize(
    "degrees", [(1, 8, 1, 1, 2), (2, 4, 2, 1, 2), (4, 8, 2, 2, 4), (4, 2, 1, 4, 2), (8, 1, 1, 1, 1)]
)
def test_hybridflows_layouts_cost_the_same_as_in_its_table(degrees: tuple[int, int, int, int, int]):
    p, t, d, p_g, t_g = degrees
    training = Parallelism(p, t, d)
    parameters = [
        Parameter(f"{layer}.w", (64, 16), 0, layer) for layer in range(8)
    ]  # all split: the table counts no replicated ones
    model_bytes = 2 * 64 * 16 * 8
    source = three_dimensional(parameters, training)
    plan = ReshardPlan(source, generation(parameters, training, p_g, t_g))
    check_against_brute_force(plan)
    # Table 2 of arXiv:2409.19256: a rank receives M (t p - t_g p_g) / (t_g p_g t p), and holds M / (t_g p_g).
    received = model_bytes * (t * p - t_g * p_g) / (t_g * p_g * t * p)
    assert (plan.received_bytes == received).all()
    for rank in range(training.num_ranks):
        assert plan.redundant_bytes(rank) == 0
        assert plan.destination.num_bytes(rank) == model_bytes / (t_g * p_g)


def test_groups_of_consecutive_ranks_leave_redundant_weights_and_move_more():
    training = Parallelism(1, 8, 1)
    parameters = [Parameter("w", (64, 16), 0)]
    source = three_dimensional(parameters, training)
    plain = ReshardPlan(source, generation(parameters, training, 1, 2, regrouped=False))
    check_against_brute_force(plain)
    regrouped = ReshardPlan(source, generation(parameters, training, 1, 2))
    assert plain.received_bytes.sum() > regrouped.received_bytes.sum()
    assert (
        max(plain.redundant_bytes(rank) for rank in range(8)) == 2 * 64 * 16 // 8
    )  # M / tp, as in the table


@pytest.mark.parametrize("order", [HYBRIDFLOW_ORDER, MEGATRON_ORDER])
@pytest.mark.parametrize(
    ("training", "degrees", "moved", "moved_regrouped"),
    [
        (Parallelism(1, 4, 2), (1, 2), 3, 2),
        (Parallelism(2, 4, 1), (2, 2), 7 / 4, 1),
        (Parallelism(4, 2, 1), (2, 2), 3 / 2, 1),
    ],
)
def test_the_volume_of_consecutive_groups_and_of_regrouped_ones(
    training: Parallelism,
    degrees: tuple[int, int],
    moved: float,
    moved_regrouped: float,
    order: Sequence[str],
):
    """In model sizes, over all ranks. In these cases both orders give each rank the same shard."""
    parameters = [Parameter(f"{layer}.w", (64, 16), 0, layer) for layer in range(8)]
    source = three_dimensional(parameters, training, order=order)
    for regrouped, expected in ((False, moved), (True, moved_regrouped)):
        plan = ReshardPlan(
            source, generation(parameters, training, *degrees, regrouped=regrouped, order=order)
        )
        check_against_brute_force(plan)
        assert plan.received_bytes.sum() == expected * 2 * 64 * 16 * 8


def test_regrouping_follows_the_order_of_ranks():
    training = Parallelism(pp=2, tp=2, dp=2)
    parameters = [Parameter(f"{layer}.w", (64, 16), 0, layer) for layer in range(8)]
    for order in (HYBRIDFLOW_ORDER, MEGATRON_ORDER):
        source = three_dimensional(parameters, training, order=order)
        plan = ReshardPlan(source, generation(parameters, training, 1, 2, order=order))
        check_against_brute_force(plan)
        assert (plan.received_bytes == 2 * 64 * 16 * 8 / 4).all(), "the other stage, of its shard"


@pytest.mark.parametrize(
    ("old", "new", "first", "models"),
    [((1, 4, 2), (1, 2, 4), 0, 3), ((1, 8, 1), (1, 2, 4), 0, 3.5), ((1, 4, 1), (1, 4, 1), 4, 1)],
)
def test_reallocations_move_at_most_realhfs_number_of_models(
    old: tuple[int, int, int], new: tuple[int, int, int], first: int, models: float
):
    parameters, devices = [Parameter("a", (64, 8), 0)], nodes_of(8)
    source, destination = (Parallelism(*old), Parallelism(*new))
    plan = ReshardPlan(
        three_dimensional(parameters, source, devices[: source.num_ranks]),
        three_dimensional(parameters, destination, devices[first : first + destination.num_ranks]),
    )
    assert plan.received_bytes.sum() == models * 64 * 8 * 2


@pytest.mark.parametrize(("tp", "consecutive", "regrouped"), [(2, 3.5, 3), (4, 1.75, 1)])
def test_regrouped_engines_receive_less_from_fully_sharded_training(
    tp: int, consecutive: float, regrouped: float
):
    parameters, devices, engines = [Parameter("a", (64, 8), 0)], nodes_of(8), 8 // tp
    source = fully_sharded(parameters, 8)
    apart = [devices[rank % tp * engines + rank // tp] for rank in range(8)]
    for ranks, shards in ((devices, consecutive), (apart, regrouped)):
        plan = ReshardPlan(source, replicas(parameters, tp, engines, ranks))
        assert plan.received_bytes.mean() == shards * 64 * 8 * 2 / 8


def test_ranks_in_megatrons_order_have_their_replicas_side_by_side():
    sizes, megatron = Parallelism(pp=2, tp=2, dp=2), MEGATRON_ORDER
    found = [tuple(c[name] for name in ("pp", "dp", "tp")) for c in sizes.coordinates(megatron)]
    assert found == [(p, d, t) for p in range(2) for d in range(2) for t in range(2)]
    layout = three_dimensional(a_model(4), sizes, order=megatron)
    holders = [rank for rank, boxes in enumerate(layout.tensors["3.q"].boxes) if boxes]
    assert holders == [4, 5, 6, 7]  # the second stage is the second half
    check_against_brute_force(ReshardPlan(layout, replicas(a_model(4), 2, 2, nodes_of(4, 4, 9))))


def test_layers_that_do_not_divide_go_to_the_first_stages():
    layout = three_dimensional([Parameter(str(n), (2,), None, n) for n in range(7)], Parallelism(pp=3))
    stages = [next(rank for rank, boxes in enumerate(t.boxes) if boxes) for t in layout.tensors.values()]
    assert stages == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("layers", [(2, 2, 1), (0, 4, 1), (1, 1, 1, 1, 1, 0)])
def test_a_pipeline_with_uneven_stages_or_chunks_gives_each_engine_its_shard(layers: tuple[int, ...]):
    stages = PipelineStages(3, layers)
    tied = [dataclasses.replace(p, tied_layer=4) if p.name == "embed" else p for p in a_model(5)]
    sizes = Parallelism(pp=3, tp=2, dp=2)
    source = three_dimensional(tied, sizes, nodes_of(12, 4), stages=stages)
    for name, tensor in source.tensors.items():
        pieces = {p % 3 for p, held in enumerate(layers) for _ in range(held) if held}
        holders = {rank // 2 % 3 for rank, boxes in enumerate(tensor.boxes) if boxes}
        wanted = {0, 4} if name == "embed" else {4} if name == "head" else {int(name[0])}
        of_layer = [piece % 3 for piece, held in enumerate(layers) for _ in range(held)]
        assert holders == {of_layer[layer] for layer in wanted} <= pieces
    plan = ReshardPlan(source, replicas(tied, 2, 2, nodes_of(4, 4, first_node=9)))
    check_against_brute_force(plan)


def test_layers_are_counted_up_to_the_last_one_whichever_a_parameter_is_tied_to():
    layout = three_dimensional([Parameter("a", (2,), None, layer=3, tied_layer=1)], Parallelism(pp=2))
    assert all(
        boxes for boxes in layout.tensors["a"].boxes
    )  # four layers, two per stage: both stages have it


def test_a_layout_of_other_stages_or_layers_than_the_pipeline_is_refused():
    with pytest.raises(UserError, match="a layout of PP 2 has a pipeline of 3 stages"):
        three_dimensional(a_model(3), Parallelism(pp=2), stages=PipelineStages(3, (1, 1, 1)))
    with pytest.raises(UserError, match="a pipeline of 2 layers has no layer 2"):
        three_dimensional(a_model(3), Parallelism(pp=2), stages=PipelineStages(2, (1, 1)))


def test_equal_sources_send_equal_amounts():
    parameters = [Parameter(f"{n}.w", (8, 8), None, n) for n in range(40)]
    source = three_dimensional(parameters, Parallelism(dp=4), nodes_of(4))
    plan = ReshardPlan(source, replicas(parameters, 1, 1, nodes_of(1, first_node=5)))
    assert plan.sent_bytes.tolist() == [10 * 2 * 64] * 4


def test_the_nearest_of_equal_sources_is_taken():
    shape = (4, 4)
    both = (Piece(Box.full(shape)),)
    source = Layout.of(
        [TensorLayout("w", shape, "float32", (both, both, both))],
        [Where("a", "0"), Where("b", "0"), Where("b", "1")],
    )
    destination = Layout.of(
        [TensorLayout("w", shape, "float32", (both, both))], [Where("b", "1"), Where("c", "0")]
    )
    plan = ReshardPlan(source, destination)
    first, second = plan.copies("w")
    assert (first.source, first.travels) == (2, False)
    assert second.travels


def test_a_box_that_a_rank_holds_twice_travels_once():
    shape = (4, 4)
    piece = Piece(Box.full(shape))
    source = Layout.of([TensorLayout("w", shape, "float32", ((piece,),))], [Where("a")])
    destination = Layout.of([TensorLayout("w", shape, "float32", ((piece, piece),))], [Where("b")])
    plan = ReshardPlan(source, destination)
    (copy,) = plan.copies("w")
    assert copy.box == piece.box
    assert plan.received_bytes.tolist() == [64]


def test_a_box_that_no_rank_has_is_named():
    shape = (8, 2)
    source = Layout.of(
        [TensorLayout("w", shape, "float32", ((Piece(Box((0, 0), (5, 2))),),))],
        [Where("a")],
        "the trainer",
    )
    destination = Layout.of(
        [TensorLayout("w", shape, "float32", ((), (Piece(Box.full(shape)),)))],
        [Where("b"), Where("c")],
        "vLLM",
    )
    with pytest.raises(
        WeightSyncError,
        match=r"'w': no rank of the trainer has Box\(\[5:8, 0:2\]\), which rank 1 of vLLM needs",
    ):
        ReshardPlan(source, destination)


def test_tensors_of_another_name_or_shape_are_refused():
    source = replicas([Parameter("a.weight", (4, 4))], 1, 1)
    with pytest.raises(WeightSyncError, match=r"'a.wieght'.*did you mean 'a.weight'"):
        ReshardPlan(source, replicas([Parameter("a.wieght", (4, 4))], 1, 1))
    with pytest.raises(WeightSyncError, match=r"'a.weight' has the shape \(4, 4\).*\(4, 5\)"):
        ReshardPlan(source, replicas([Parameter("a.weight", (4, 5))], 1, 1))


def test_reports_of_ranks_that_disagree_are_refused():
    whole = Piece(Box.full((4,)))
    first = Layout.of([TensorLayout("w", (4,), "float32", ((whole,),))], [Where("a")])
    for other in (
        TensorLayout("w", (4,), "bfloat16", ((whole,),)),
        TensorLayout("w", (5,), "float32", ((),)),
    ):
        with pytest.raises(UserError, match=r"'w' is float32 .4,. on rank 0"):
            Layout.of_ranks([first, Layout.of([other], [Where("b")])], "vLLM")
    layout = Layout.of_ranks([first, Layout.of([], [Where("b")])])
    assert layout.tensors["w"].boxes == ((whole.box,), ())


def test_mistakes_in_layouts_are_named():
    with pytest.raises(UserError, match="'w': dtype 'bflaot16' is not known; did you mean 'bfloat16'"):
        TensorLayout("w", (4,), "bflaot16", ())
    with pytest.raises(UserError, match=r"'w', rank 0: Box\(\[2:6\]\) is outside"):
        Layout.of([TensorLayout("w", (4,), "float32", ((Piece(Box((2,), (6,))),),))], [Where()])
    tensor = TensorLayout("w", (4,), "float32", ((),))
    with pytest.raises(UserError, match="'w' occurs twice"):
        Layout.of([tensor, dataclasses.replace(tensor)], [Where()])
    with pytest.raises(UserError, match="covers 1 ranks, but the layout has 2"):
        Layout.of([tensor], [Where(), Where()])
    with pytest.raises(UserError, match="pp=3: it must divide"):
        generation([], Parallelism(pp=4), 3, 1)
    with pytest.raises(UserError, match=r"'w' of shape .6, 4.: dimension 0 cannot be split into 4"):
        replicas([Parameter("w", (6, 4), 0)], 4, 1)


def test_the_explanation_lists_the_boxes_of_each_rank():
    parameters = [Parameter("w", (500, 1000), 0)]
    plan = ReshardPlan(
        three_dimensional(parameters, Parallelism(tp=4)), generation(parameters, Parallelism(tp=4), 1, 2)
    )
    text = plan.explain()
    assert "from training, PP 1 x TP 4 x DP 1 (4 ranks) to generation, PP 1 x TP 2 (4 ranks)" in text
    lines = [line.split() for line in text.splitlines()]
    assert lines[3 + 3] == ["3", "0.000", "GB", "0.2500", "0.000", "GB", "0.001", "GB", "0.000", "GB"]
    assert lines[8 + 1] == [
        "1",
        "0.000",
        "GB",
        "1",
        "1",
    ]  # rank 1 sends its quarter to rank 0, and rank 0 to rank 1


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_cut_box_and_its_remainder_make_up_the_box(rng: random.Random):
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))

    def any_box() -> Box:
        pairs = [sorted(rng.choices(range(extent + 1), k=2)) for extent in shape]
        return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))

    first, second = any_box(), any_box()
    counts = np.zeros(shape, np.int64)
    for part in first.minus(second):
        counts[part.slices] += 1
    if common := first.intersection(second):
        counts[common.slices] += 1
        assert common.shape == np.zeros(shape)[common.slices].shape
        assert math.prod(common.shape) == common.numel
    expected = np.zeros(shape, np.int64)
    expected[first.slices] = 1
    np.testing.assert_array_equal(counts, expected)
