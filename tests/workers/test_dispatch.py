"""Dispatch protocols: rows per rank, and the results that are kept."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.controllers.backends.local import Local
from weft.controllers.group import WorkerGroup
from weft.controllers.placement import Place, ResourcePool
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.config import Config
from weft.dataflow.errors import UserError
from weft.dataflow.graph import Graph, Handle, Node
from weft.dataflow.operation import Shape, declaration_of
from weft.dataflow.source import TableSource
from weft.resharding.formulas import Parallelism, Parameter, generation, generation_coordinates
from weft.workers.dispatch import Coordinates, Dispatch, RowSizes, balance, one_per_replica
from weft.workers.worker import Worker, dispatch_of, remote


def mesh(dp: int, tp: int = 1, pp: int = 1) -> list[Coordinates]:
    return [Coordinates(d, t, p) for p in range(pp) for d in range(dp) for t in range(tp)]


def sizes(tokens: Sequence[int], groups: Sequence[int] | None = None) -> RowSizes:
    return RowSizes(
        np.asarray(tokens),
        np.asarray(range(len(tokens)) if groups is None else groups),
        groups is not None,
    )


# Protocols


def test_one_to_all_gives_everybody_everything_and_keeps_one():
    assert Dispatch.ONE_TO_ALL.distribute(sizes([1, 2]), mesh(2, 2)) == [[0, 1]] * 4
    assert Dispatch.ONE_TO_ALL.collect(mesh(2, 2)) == [0]


def test_rows_are_split_over_replicas_and_copied_within_them():
    ranks = mesh(dp=2, tp=2)
    shares = Dispatch.SPLIT_BY_DP.distribute(sizes([5, 1, 1, 3]), ranks)
    assert shares == [[0], [0], [1, 2, 3], [1, 2, 3]]
    assert Dispatch.SPLIT_BY_DP.collect(ranks) == [0, 2]


def test_the_last_pipeline_stage_answers():
    ranks = mesh(dp=2, tp=2, pp=2)
    kept = one_per_replica(ranks)
    assert [ranks[r] for r in kept] == [Coordinates(0, 0, 1), Coordinates(1, 0, 1)]


def test_whole_groups_stay_together():
    shares = Dispatch.SPLIT_BY_DP.distribute(sizes([9, 1, 9, 1, 5], groups=[4, 2, 4, 2, 3]), mesh(2))
    assert shares == [[0, 2], [1, 3, 4]]


def test_ranks_may_go_without_rows():
    assert Dispatch.SPLIT_BY_DP.distribute(sizes([3]), mesh(3)) == [[0], [], []]
    assert Dispatch.SPLIT_BY_DP.distribute(sizes([]), mesh(2)) == [[], []]
    assert Dispatch.SPLIT_BY_DP.distribute(sizes([], groups=[]), mesh(2)) == [[], []]


@pytest.mark.parametrize(
    ("p", "t", "d", "p_g", "t_g"), [(1, 4, 2, 1, 2), (2, 4, 1, 1, 2), (4, 2, 2, 2, 1), (2, 2, 1, 2, 2)]
)
def test_ranks_that_generate_with_one_model_get_equal_rows_and_others_get_others(
    p: int, t: int, d: int, p_g: int, t_g: int
):
    training = Parallelism(p, t, d)
    found = generation_coordinates(training, p_g, t_g)
    ranks = [Coordinates(c["dp"], c["tp"], c["pp"], c["micro_dp"]) for c in found]
    shares = Dispatch.SPLIT_BY_GENERATION_DP.distribute(sizes(range(1, 50)), ranks)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, share in enumerate(shares):
        groups.setdefault(tuple(share or ()), []).append(rank)
    # disjoint between groups
    assert sorted(row for rows in groups for row in rows) == list(range(49))
    assert len(groups) == d * p * t // (p_g * t_g)
    layout = generation([Parameter(f"{n}", (8, 2), 0, n) for n in range(8)], training, p_g, t_g)
    for members in groups.values():  # together they hold each element of each tensor once
        for tensor in layout.tensors.values():
            counts = np.zeros(tensor.shape, int)
            for rank in members:
                for box in tensor.boxes[rank]:
                    counts[box.slices] += 1
            assert (counts == 1).all()
    kept = Dispatch.SPLIT_BY_GENERATION_DP.collect(ranks)
    assert sorted(rank in members for rank in kept for members in groups.values()).count(True) == len(
        groups
    )
    last = [(found[rank]["generation_pp"], found[rank]["generation_tp"]) for rank in kept]
    assert (
        set(last) == {(p_g - 1, 0)}
        and pickle.loads(pickle.dumps(Dispatch.SPLIT_BY_GENERATION_DP)) is not None
    )


@given(tokens=st.lists(st.integers(0, 1000), max_size=40), parts=st.integers(1, 6))
def test_a_balanced_split_has_every_row_once_and_no_part_far_above_the_mean(
    tokens: list[int], parts: int
):
    split = balance(tokens, parts)
    assert sorted(i for part in split for i in part) == list(range(len(tokens)))
    assert all(part == sorted(part) for part in split)
    heaviest = max(sum(tokens[i] for i in part) for part in split)
    assert heaviest <= sum(tokens) / parts + max(tokens, default=0)


@given(
    data=st.data(), dp=st.integers(1, 4), tp=st.integers(1, 3), pp=st.integers(1, 3), whole=st.booleans()
)
def test_collected_ranks_hold_each_row_exactly_once(
    data: st.DataObject, dp: int, tp: int, pp: int, whole: bool
):
    groups = data.draw(st.lists(st.integers(0, 4), max_size=20))
    ranks = data.draw(st.permutations(mesh(dp, tp, pp)))
    rows = sizes(
        data.draw(st.lists(st.integers(0, 50), min_size=len(groups), max_size=len(groups))), groups
    )
    rows = RowSizes(rows.num_tokens, rows.group_ids, whole)
    shares = [s or () for s in Dispatch.SPLIT_BY_DP.distribute(rows, ranks)]
    kept = Dispatch.SPLIT_BY_DP.collect(ranks)
    assert sorted(i for r in kept for i in shares[r]) == list(range(len(groups)))
    assert all(
        shares[a] == shares[b]
        for a in range(len(ranks))
        for b in range(len(ranks))
        if ranks[a].dp == ranks[b].dp
    )
    if whole:
        homes = [{groups[i] for i in shares[r]} for r in kept]
        assert sum(map(len, homes)) == len(set(groups))


# Rows that share a prompt


def sharing(prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> RowSizes:
    """Return rows that cost their tokens, in groups with these prompts and responses."""
    groups = np.repeat(np.arange(len(prompts)), [len(own) for own in responses])
    shared = np.asarray(prompts, float)[groups]
    tokens = np.array([length for own in responses for length in own]) + shared
    return RowSizes(tokens, groups, costs=tokens, prompt_costs=shared)


def loads(rows: RowSizes, shares: Sequence[Sequence[int] | None]) -> list[float]:
    """Return the cost of each share, with each prompt once."""
    assert rows.costs is not None and rows.prompt_costs is not None
    found = []
    for share in shares:
        own = np.array(share, int)
        _, first = np.unique(rows.group_ids[own], return_index=True)
        prompts = rows.prompt_costs[own]
        found.append(float((rows.costs[own] - prompts).sum() + prompts[first].sum()))
    return found


@pytest.mark.parametrize("ranks", [2, 8, 32, 64])
def test_rows_of_a_prompt_stay_together(ranks: int):
    rows = sharing([1024] * 64, [[2048] * 8] * 64)
    shares = Dispatch.SPLIT_BY_DP.distribute(rows, mesh(ranks))
    assert all(len(set(rows.group_ids[list(share or ())])) == 64 // ranks for share in shares)
    assert set(loads(rows, shares)) == {64 // ranks * (1024 + 8 * 2048)}


def test_a_prompt_is_split_where_that_balances_better():
    one = sharing([10], [[40, 30, 20, 10]])
    assert Dispatch.SPLIT_BY_DP.distribute(one, mesh(2)) == [[0, 3], [1, 2]]
    # Three groups on two ranks: the third is split, and no other.
    three = sharing([10] * 3, [[25] * 4] * 3)
    shares = Dispatch.SPLIT_BY_DP.distribute(three, mesh(2))
    assert loads(three, shares) == [170, 170]
    assert sorted(len(set(three.group_ids[list(share or ())])) for share in shares) == [2, 2]


def test_rows_that_share_little_are_dealt_one_by_one():
    rows = sharing([1] * 6, [[50] * 3] * 6)
    alone = replace(rows, prompt_costs=None)
    split = Dispatch.SPLIT_BY_DP.distribute
    assert split(rows, mesh(4)) == split(alone, mesh(4)) == split(sizes([51] * 18), mesh(4))


def test_a_row_longer_than_an_equal_share_gets_a_rank_of_its_own():
    rows = sharing([10, 10], [[1000, 5, 5], [5, 5, 5]])
    shares = Dispatch.SPLIT_BY_DP.distribute(rows, mesh(2))
    assert shares == [[0], [1, 2, 3, 4, 5]]


def test_whole_groups_are_balanced_with_their_prompt_counted_once():
    # One by one, the rows of the first group cost 4 x 110; together 100 + 4 x 10.
    rows = replace(sharing([100, 5, 5, 5], [[10] * 4, [90], [90], [90]]), whole_groups=True)
    shares = Dispatch.SPLIT_BY_DP.distribute(rows, mesh(2))
    assert shares == [[0, 1, 2, 3, 6], [4, 5]] and loads(rows, shares) == [235, 190]


@given(
    prompts=st.lists(st.integers(0, 500), min_size=1, max_size=12),
    dp=st.integers(1, 9),
    data=st.data(),
)
def test_rows_that_share_prompts_are_dealt_once_and_about_evenly(
    prompts: list[int], dp: int, data: st.DataObject
):
    lengths = st.lists(st.integers(1, 1000), min_size=1, max_size=20)
    rows = sharing(prompts, [data.draw(lengths) for _ in prompts])
    shares = Dispatch.SPLIT_BY_DP.distribute(rows, mesh(dp))
    assert sorted(row for share in shares for row in share or ()) == list(range(len(rows)))
    assert shares == Dispatch.SPLIT_BY_DP.distribute(rows, mesh(dp)), "the same rows, the same split"
    assert rows.costs is not None and rows.prompt_costs is not None
    by_rows = Dispatch.SPLIT_BY_DP.distribute(replace(rows, prompt_costs=None), mesh(dp))
    assert max(loads(rows, shares)) <= max(loads(rows, by_rows)) + rows.costs.max()


# Protocols as values


def first_rank_only(rows: RowSizes, mesh: Sequence[Coordinates]) -> Any:
    return [list(range(len(rows)))] + [None] * (len(mesh) - 1)


def zeroth(mesh: Sequence[Coordinates]) -> list[int]:
    return [0]


def test_named_protocols_survive_a_pickle_as_themselves():
    for name in ("ONE_TO_ALL", "SPLIT_BY_DP"):
        named = getattr(Dispatch, name)
        assert repr(named) == f"Dispatch.{name}"
        for module in (pickle, cloudpickle):
            assert module.loads(module.dumps(named)) is named


def test_a_users_protocol_survives_a_pickle_even_under_a_known_name():
    for name in ("mine", "SPLIT_BY_DP"):
        mine = cloudpickle.loads(cloudpickle.dumps(Dispatch(name, first_rank_only, zeroth)))
        assert mine.name == name and mine.distribute(sizes([1, 2]), mesh(2)) == [[0, 1], None]


def test_remote_returns_the_method_unchanged_and_overrides_inherit_the_protocol():
    def method(self: object) -> int:
        """Return three."""
        return 3

    assert remote(dispatch=Dispatch.ONE_TO_ALL)(method) is method and method(None) == 3

    class Parent(Worker):
        three = method

    class Child(Parent):
        def three(self) -> int:
            return 4

    assert (
        dispatch_of(Child, "three") is Dispatch.ONE_TO_ALL
        and dispatch_of(Child, "onload") is Dispatch.ONE_TO_ALL
    )
    assert dispatch_of(Child, "four") is None


# On a group


class Counter(Worker):
    Config = Config

    @remote(dispatch=Dispatch("mine", first_rank_only, zeroth))
    def mine(self, rows: Any) -> None: ...

    @remote(dispatch=Dispatch("lossy", lambda rows, mesh: [[0], [0]], lambda mesh: [0, 1]))
    def lossy(self, rows: Any) -> None: ...

    @remote(dispatch=Dispatch("short", lambda rows, mesh: [[0]], zeroth))
    def short(self, rows: Any) -> None: ...

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def all(self, value: int) -> int:
        return value


class Quiet(Local):
    """Notes tasks instead of running them."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[tuple[int, Any]] = []

    def _submit(self, rank: int, task: Any, call: Any) -> None:
        self.tasks.append((rank, task))


def counters(ranks: int) -> tuple[WorkerGroup, Quiet]:
    backend, handle = Quiet(), Handle(Counter, Config(), "counters")
    place = Place(ResourcePool(), ranks=ranks)
    return WorkerGroup("counters", handle, place, mesh(ranks), backend._submit), backend


def lease(method: str, rows: int) -> tuple[Ledger, Any]:
    declaration = declaration_of(getattr(Counter, method))
    assert declaration is not None and declaration.shape is Shape.MAP
    operation = declaration.called_with({})
    node = Node(
        f"counters.{method}",
        "counters",
        operation,
        getattr(Counter, method),
        {},
        (),
        (),
        (),
        0,
        None,
        {},
        (),
    )
    ledger = Ledger(Graph("g", TableSource("s", None), (node,)))  # pyright: ignore[reportArgumentType]
    ledger.issue(range(rows), [1] * rows, step=0)
    return ledger, ledger.claim(node)


def test_a_protocol_of_the_users_own_decides_who_is_called():
    group, backend = counters(2)
    call = group.call_node(*lease("mine", 3))
    assert call.ranks == (0,)
    ((rank, task),) = backend.tasks
    assert rank == 0 and task.keep and task.rows.ids.tolist() == [0, 1, 2]


def test_a_protocol_that_loses_or_doubles_rows_is_refused():
    group, backend = counters(2)
    with pytest.raises(
        UserError,
        match=r"Dispatch\.lossy on 'counters': the collected ranks hold 2 rows of 3; each must be held exactly once",
    ):
        group.call_node(*lease("lossy", 3))
    with pytest.raises(UserError, match="hold 2 rows of 2; each must be held exactly once"):
        group.call_node(*lease("lossy", 2))
    with pytest.raises(
        UserError, match=r"Dispatch\.short returned 1 shares for the 2 ranks of 'counters'"
    ):
        group.call_node(*lease("short", 1))
    assert not backend.tasks


def test_a_list_as_long_as_the_group_is_not_dealt_out_to_its_ranks():
    group, backend = counters(3)
    group.call("all", value=(5, 6, 7))
    assert [task.arguments["value"] for _, task in backend.tasks] == [(5, 6, 7)] * 3
    with pytest.raises(UserError, match="Counter has no remote method 'oll'; did you mean 'all'"):
        group.call("oll")
