"""The worker for pure functions."""

from weft.dataflow.batch import Batch
from weft.workers.function import FunctionWorker


def doubled(rows: Batch, *, factor: int) -> Batch:
    return rows.with_columns(x=rows.numpy("x") * factor)


def test_a_function_is_called_with_its_arguments():
    result = FunctionWorker(FunctionWorker.Config()).apply(
        Batch.of(x=[1, 2]), function=doubled, arguments={"factor": 3}
    )
    assert result.numpy("x").tolist() == [3, 6]
