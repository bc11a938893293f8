"""Pipeline schedules against tables by hand, Megatron's closed forms, and an independent
simulation."""

import itertools

import numpy as np
import pytest

from weft.dataflow.errors import UserError
from weft.workers.training.pipeline_schedule import (
    Pass,
    PipelineSchedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
    run,
)

SIZES = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 8, 12)))
INTERLEAVED = [(p, p * rounds, v) for p in (1, 2, 3, 4) for rounds in (1, 2, 3) for v in (2, 3, 4)]


def schedules() -> list[PipelineSchedule]:
    plain = [make(p, m) for make in (gpipe, one_forward_one_backward) for p, m in SIZES]
    return plain + [interleaved(*sizes) for sizes in INTERLEAVED]


def relaxed(
    schedule: PipelineSchedule, forward: np.ndarray, backward: np.ndarray, transfer: np.ndarray
) -> float:
    """Compute the makespan independently, as a longest path (Bellman-Ford).

    Ends of passes start at 0 and rise until no rule is broken.
    """
    p, last = schedule.stages, schedule.stages * schedule.chunks - 1
    takes, edges = {}, []
    for stage, own in enumerate(schedule.passes):
        for number, one in enumerate(own):
            piece = one.chunk * p + stage
            takes[piece, one.microbatch, one.backward] = (backward if one.backward else forward)[
                piece, one.microbatch
            ]
            here = (piece, one.microbatch, one.backward)
            if number:
                before = own[number - 1]
                edges.append(((before.chunk * p + stage, before.microbatch, before.backward), here, 0.0))
            on_its_way = transfer[one.microbatch] if p > 1 else 0.0
            if not one.backward and piece:
                edges.append(((piece - 1, one.microbatch, False), here, on_its_way))
            if one.backward:
                edges.append(((piece, one.microbatch, False), here, 0.0))
            if one.backward and piece < last:
                edges.append(((piece + 1, one.microbatch, True), here, on_its_way))
    ends = dict(takes)
    changed = True
    while changed:
        changed = False
        for before, after, delay in edges:
            if (earliest := ends[before] + delay + takes[after]) > ends[after]:
                ends[after], changed = earliest, True
    return max(ends.values())


def test_tables_worked_by_hand():
    assert str(gpipe(2, 2)) == "stage 0: F0 F1 B0 B1\nstage 1: F0 F1 B0 B1"
    assert str(one_forward_one_backward(3, 4)).splitlines() == [
        "stage 0: F0 F1 F2 B0 F3 B1 B2 B3",
        "stage 1: F0 F1 B0 F2 B1 F3 B2 B3",
        "stage 2: F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    # Figure 4 of arXiv:2104.04473: microbatches 0 and 1 pass chunk 0, then chunk 1; then 2 and 3.
    assert str(interleaved(2, 4, 2)).splitlines() == [
        "stage 0: F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "stage 1: F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_passes_end_when_they_do_by_hand():
    # Forward 1 s, backward 2 s, transfer 1 s, two stages: stage 1 begins F0 at 2 and B0 at 3, and
    # its gradient reaches stage 0 at 6.
    found = run(one_forward_one_backward(2, 2), 1.0, 2.0, 1.0)
    assert found.ends_s[0] == {Pass(0): 1, Pass(1): 2, Pass(0, 0, True): 8, Pass(1, 0, True): 11}
    assert found.ends_s[1] == {Pass(0): 3, Pass(0, 0, True): 5, Pass(1): 6, Pass(1, 0, True): 8}
    assert (found.seconds, found.busy_s) == (11, (6, 6)) and found.bubble == pytest.approx(5 / 6)
    assert run(one_forward_one_backward(2, 3)).seconds == (3 + 1) * (1 + 2), (
        "a backward pass takes as long as two forward ones"
    )


@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_with_equal_costs_the_bubble_is_megatrons(backward: float):
    for each in schedules():
        p, m, v = each.stages, each.microbatches, each.chunks
        found = run(each, 1 / v, backward / v)
        assert found.bubble == pytest.approx((p - 1) / (v * m)) == each.bubble
        assert found.seconds == pytest.approx((m + (p - 1) / v) * (1 + backward))
        assert found.busy_s == pytest.approx([m * (1 + backward)] * p)


def test_activations_in_flight_are_those_of_the_closed_forms():
    for p, m in SIZES:
        assert [gpipe(p, m).in_flight(i) for i in range(p)] == [m] * p
        assert [one_forward_one_backward(p, m).in_flight(i) for i in range(p)] == [
            min(p - i, m) for i in range(p)
        ]
    for p, m, v in INTERLEAVED:
        found = [interleaved(p, m, v).in_flight(i) for i in range(p)]
        assert found == [min(2 * (p - i - 1) + (v - 1) * p + 1, m * v) for i in range(p)]
        # The first stage keeps 1 + (p - 1) / (p v) times the activations of 1F1B
        # (arXiv:2205.05198).
        if m > p:
            assert found[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_uneven_costs_take_as_long_as_the_longest_path():
    chance = np.random.default_rng(0)
    for each in [
        one_forward_one_backward(3, 5),
        gpipe(4, 3),
        interleaved(2, 4, 3),
        interleaved(3, 6, 2),
        gpipe(1, 3),
    ]:
        shape = (each.stages * each.chunks, each.microbatches)
        forward, backward = chance.exponential(size=(2, *shape))
        transfer = chance.exponential(size=each.microbatches) / 4
        found = run(each, forward, backward, transfer)
        assert found.seconds == pytest.approx(relaxed(each, forward, backward, transfer))
        of_stages = (forward + backward).reshape(each.chunks, each.stages, -1).sum((0, 2))
        assert found.busy_s == pytest.approx(of_stages)


def test_a_schedule_that_leaves_out_repeats_or_never_ends_is_refused():
    good = one_forward_one_backward(2, 2)
    first, second = good.passes
    with pytest.raises(UserError, match=r"stage 1 does not compute each pass once: B1$"):
        PipelineSchedule(2, 2, 1, (first, second[:-1]))
    with pytest.raises(UserError, match=r"stage 0 does not compute each pass once: F0$"):
        PipelineSchedule(2, 2, 1, ((*first, Pass(0)), second))
    with pytest.raises(UserError, match="has passes for 1"):
        PipelineSchedule(2, 2, 1, (first,))
    backwards_first = (Pass(0, 0, True), Pass(0), Pass(1), Pass(1, 0, True))
    with pytest.raises(UserError, match="stage 0 waits forever to compute B0"):
        PipelineSchedule(2, 2, 1, (first, backwards_first))


@pytest.mark.parametrize(
    ("make", "sizes"),
    [(gpipe, (0, 1)), (one_forward_one_backward, (2, 0)), (gpipe, (2, -1)), (interleaved, (2, 0, 2))],
)
def test_a_pipeline_has_a_stage_and_a_microbatch(make, sizes):
    with pytest.raises(UserError, match="both must be at least 1"):
        make(*sizes)


@pytest.mark.parametrize("sizes", [(2, 3, 2), (2, 2, 0)])
def test_interleaved_microbatches_come_in_rounds_of_the_stages(sizes: tuple[int, int, int]):
    with pytest.raises(UserError, match="a multiple of the stages"):
        interleaved(*sizes)
