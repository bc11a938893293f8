"""Precomputed columns: each row gets its values, in whatever order they were computed."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo

from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.precompute import precompute
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.operation import Shape, node
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph


@node(reads=("prompt_ids",), writes=("total",))
def total(rows: Batch) -> Batch:
    return rows.with_columns(total=[sum(ids) for ids in rows["prompt_ids"].to_pylist()])


@node(reads=("prompt_ids", "total"), writes=("reversed_ids",))
def reverse(rows: Batch) -> Batch:
    return rows.with_columns(reversed_ids=[ids[::-1] for ids in rows["prompt_ids"].to_pylist()])


@node(shape=Shape.FILTER, reads=("prompt_ids",))
def without_first(rows: Batch) -> Batch:
    return rows.take([i for i, ids in enumerate(rows["prompt_ids"].to_pylist()) if ids != [0, 10]])


@graph
def both(rows: Any) -> Any:
    return reverse(total(rows))


@graph
def filtered(rows: Any) -> Any:
    return total(without_first(rows))


@graph
def nothing(rows: Any) -> Any:
    return without_first(rows)


SOURCE = TableSource(
    "numbers", pa.table({"prompt_ids": [[i, 10 + i] for i in range(11)], "kept": list("abcdefghijk")})
)


@pytest.mark.parametrize("rows_per_step", [4, 100])
def test_each_row_gets_its_columns(tmp_path: Path, rows_per_step: int):
    made = precompute(
        both(SOURCE), root=tmp_path, name="made", rows_per_step=rows_per_step, progress=False
    )
    assert made.name == "numbers" and made.columns == ("prompt_ids", "kept", "total", "reversed_ids")
    assert made.table.drop_columns(["total", "reversed_ids"]) == SOURCE.table
    assert made.table["total"].to_pylist() == [10 + 2 * i for i in range(11)]
    assert made.table["reversed_ids"].to_pylist() == [[10 + i, i] for i in range(11)]
    assert [p.name for p in tmp_path.iterdir()] == ["made"], "the files in between are gone"


@pytest.mark.thorough
@pytest.mark.ray
def test_ranks_share_the_rows_and_each_gets_its_columns(tmp_path: Path, cluster: None):
    two = {"functions": Place(ResourcePool("functions", cpus=2), ranks=2)}
    made = precompute(
        both(SOURCE), placement=two, backend=RayBackend(), root=tmp_path, rows_per_step=4, progress=False
    )
    assert made.table["total"].to_pylist() == [10 + 2 * i for i in range(11)]
    assert made.table["reversed_ids"].to_pylist() == [[10 + i, i] for i in range(11)]


def test_graphs_that_give_no_constant_column_are_refused(tmp_path: Path):
    with pytest.raises(
        UserError, match="no node of graph 'nothing' writes a column for the rows of 'numbers'"
    ):
        precompute(nothing(SOURCE), root=tmp_path)
    with pytest.raises(
        UserError, match="'filtered' dropped 1 of 11 rows, such as row 0; filter the source instead"
    ):
        precompute(filtered(SOURCE), root=tmp_path, progress=False)
    training = toy_grpo(
        prompts(4), rollout=group(ToyRollout), reward=group(ToyReward), actor=group(ToyActor)
    )
    with pytest.raises(UserError, match=r"node 'actor.update' of graph 'toy_grpo' updates weights"):
        precompute(training, root=tmp_path)
    with pytest.raises(UserError, match="rows_per_step=0"):
        precompute(both(SOURCE), rows_per_step=0)
