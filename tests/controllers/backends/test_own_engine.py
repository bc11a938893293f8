"""A user's training engine in the driver: a pipeline of two ranks takes the same steps as
FsdpEngine."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.algorithms.methods import supervised
from weft.dataflow.source import TableSource

EXAMPLES = Path(__file__).parents[3] / "examples"


def steps(root: Path, model: Path, backend: Any, ranks: int, **engine: Any) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of supervised training."""
    ragged = pa.list_(pa.int32())
    columns = {
        "prompt_ids": [[1, 3 + n % 5, 9] for n in range(8)],
        "response_ids": [[4 + k for k in range(1 + n)] for n in range(8)],
    }
    rows = TableSource(
        "rows", pa.table({name: pa.array(each, ragged) for name, each in columns.items()})
    )
    actor = weft.group(
        weft.ActorWorker, model=str(model), learning_rate=1e-2, microbatch_tokens=16, **engine
    )
    with weft.Driver(
        supervised(rows, actor=actor),
        schedule=weft.Synchronous(steps=3, prompts_per_step=8),
        placement={"actor": weft.Place(weft.ResourcePool("cores", cpus=ranks), ranks=ranks)},
        backend=backend,
        root=root,
        record_every=0,
        progress=False,
    ) as driver:
        return [(row["actor/loss"], row["actor/grad_norm"]) for row in driver.run()[1:]]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_pipeline_of_two_ranks_takes_the_steps_of_fsdp_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from arithmetic import make_model  # pyright: ignore[reportMissingImports]
    from pipeline_engine import PipelineEngine  # pyright: ignore[reportMissingImports]

    make_model(tmp_path / "model", seed=0)
    alone = steps(tmp_path / "alone", tmp_path / "model", weft.Local(), 1)
    both = steps(
        tmp_path / "both",
        tmp_path / "model",
        weft.RayBackend(),
        2,
        engine=PipelineEngine,
        pipeline_parallel=2,
    )
    for mine, its in zip(both, alone, strict=True):
        assert mine == pytest.approx(its, rel=1e-5, abs=1e-5)
    assert alone[2][0] < alone[0][0] and len(alone) == 3
