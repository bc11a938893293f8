"""Every loss on the real engine: splits, order, padding and ranks change neither loss nor gradient.

Gradients are compared relative to their norm, and losses relative to max(1, loss), with a tolerance
of 1e-6. Float32 rounds to 6e-8, and each split adds the thousand terms of a step in another order.
Sequence-level ratios get 3e-6: they are exponentials of sums of up to 60 nats. Real errors are 1e-2
or more.
"""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from loss_ranks import LOSSES, Case, main, step, worker
from ranks import run_processes
from training_rows import make_pairs, make_rows

from weft import algorithms
from weft.algorithms.loss import Loss
from weft.dataflow.batch import Batch
from weft.dataflow.metrics import Metrics, merge
from weft.workers.dispatch import Coordinates, Dispatch, RowSizes

Found = tuple[dict[str, torch.Tensor], Metrics]


def with_masked_tails(rows: Batch) -> Batch:
    """Append 0 to 3 masked tokens to each response, with garbage in them, and nan where
    possible."""
    rng = np.random.default_rng(5)
    lengths, tails = rows.lengths("response_ids"), rng.integers(0, 4, len(rows))
    longer = np.concatenate([[0], np.cumsum(lengths + tails)])
    kept = np.concatenate([np.arange(n + t) < n for n, t in zip(lengths, tails, strict=True)])
    columns = {}
    for name in rows.record.schema.names:
        if pa.types.is_list(rows[name].type) and name != "prompt_ids":
            values, _ = rows.ragged_numpy(name)
            of_token = np.repeat(kept, len(values) // kept.sum())
            filled = np.full(len(of_token), np.nan if values.dtype.kind == "f" else 0, values.dtype)
            if name == "response_ids":
                filled = rng.integers(0, 97, len(kept)).astype(values.dtype)
            filled[of_token] = values
            columns[name] = (filled, longer * (len(of_token) // len(kept)))
    return rows.with_columns(**columns)


def padded(trained: Any) -> Any:
    """Make the engine pad rows instead of packing them."""
    model = trained.engine.model
    assert model.packs
    model.packs = False
    model.causal_lm.set_attn_implementation("sdpa")
    return trained


def check_same(found: Found, whole: Found, tolerance: float) -> None:
    gradient, metrics = whole
    assert found[0].keys() == gradient.keys() and found[1].keys() == metrics.keys()
    squares = sum(float((found[0][n].double() - gradient[n].double()).square().sum()) for n in gradient)
    assert (
        squares / sum(float(g.double().square().sum()) for g in gradient.values())
    ) ** 0.5 < tolerance
    assert found[1]["loss"].value == pytest.approx(metrics["loss"].value, rel=tolerance, abs=tolerance)
    for name, metric in metrics.items():
        assert found[1][name].value == pytest.approx(metric.value, rel=1e-4, abs=1e-5), name


@pytest.fixture(scope="module")
def trained(tiny_model: Path) -> Callable[..., Any]:
    """Return the cached worker for a head and settings."""

    @cache
    def made(head: Any, *, pads: bool = False, **settings: Any) -> Any:
        one = worker(str(tiny_model), head, **settings)
        return padded(one) if pads else one

    return made


@pytest.fixture(scope="module")
def pairs() -> Batch:
    return make_pairs(make_rows(23))


@pytest.fixture(scope="module")
def whole(trained: Callable[..., Any], pairs: Batch) -> Callable[[str], Found]:
    """Loss and gradient of all pairs at once."""

    @cache
    def found(name: str) -> Found:
        case = LOSSES[name]
        return step(trained(case.head, microbatch_tokens=100_000), pairs, case.loss)

    return found


def test_every_loss_of_the_library_is_here():
    members = [name for name in vars(Loss) if not name.startswith("_") or name == "__call__"]
    found: set[type] = set()
    for module in pkgutil.iter_modules(algorithms.__path__, "weft.algorithms."):
        classes = [
            one for _, one in inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        ]
        found |= {c for c in classes if all(any(m in vars(base) for base in c.__mro__) for m in members)}
    assert "__call__" in members and "count" in members
    assert found - {Loss} == {type(case.loss) for case in LOSSES.values()}


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_depends_on_splits_order_or_padding(
    trained: Callable[..., Any], whole: Callable[[str], Found], pairs: Batch, name: str
):
    """Take three steps: small microbatches with masked tails; reordered in three calls; padded with
    tails."""
    case, (gradient, metrics) = LOSSES[name], whole(name)
    assert np.isfinite(metrics["loss"].value) and metrics["tokens"].value > 0
    assert all(float(g.norm()) > 0 for g in gradient.values())
    longer = pairs if case.reads_last else with_masked_tails(pairs)
    assert case.reads_last or longer.lengths("response_ids").sum() > pairs.lengths("response_ids").sum()
    check_same(
        step(trained(case.head, microbatch_tokens=15), longer, case.loss), whole(name), case.tolerance
    )
    mixed = pairs.take(np.random.default_rng(2).permutation(len(pairs)))
    groups = mixed.numpy("group_id")
    calls = [[100], [101, 107], [*range(102, 107), *range(108, 111)]]
    parts = [np.flatnonzero(np.isin(groups, some)).tolist() for some in calls]
    check_same(
        step(trained(case.head, microbatch_tokens=60), mixed, case.loss, parts),
        whole(name),
        case.tolerance,
    )
    check_same(
        step(trained(case.head, microbatch_tokens=60, pads=True), longer, case.loss),
        whole(name),
        case.tolerance,
    )


def shares_of(case: Case, rows: Batch, ranks: int) -> list[list[int]]:
    """Split rows as the driver does. With three ranks, one gets none."""
    sizes = RowSizes(
        rows.lengths("response_ids"), rows.numpy("group_id"), whole_groups=case.loss.whole_groups
    )
    shares = Dispatch.SPLIT_BY_DP.distribute(sizes, [Coordinates(dp=r) for r in range(ranks)])
    found = [list(share or ()) for share in shares]
    return [sorted([*found[0], *found[1]]), [], found[2]] if ranks == 3 else found


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """Results of each rank for each loss."""
    folder, rows = tmp_path_factory.mktemp("ranks"), make_pairs(make_rows(23))
    with pa.ipc.new_file(folder / "rows.arrow", rows.record.schema) as file:
        file.write_batch(rows.record)
    shares = {name: shares_of(case, rows, request.param) for name, case in LOSSES.items()}
    (folder / "case.json").write_text(
        json.dumps({"model": str(tiny_model), "ranks": request.param, "shares": shares})
    )
    run_processes(main, folder, request.param)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(request.param)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_depends_on_ranks(ranks: list[Any], whole: Callable[[str], Found], name: str):
    check_same(
        (ranks[0][name][0], merge(found[name][1] for found in ranks)),
        whole(name),
        LOSSES[name].tolerance,
    )
