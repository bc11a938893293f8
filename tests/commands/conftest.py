"""Runs for the tests of commands."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.sample_buffer import SampleBuffer
from weft.dataflow.operation import node
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph

sys.path.append(str(Path(__file__).parent))
import recorded_runs


@node(reads=("prompt",), writes=("length",))
def measure(batch):
    return batch


@graph
def train(prompts):
    measure(prompts)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs/tiny; of its three rows one is done, one leased and one waiting."""
    recorded = train(TableSource("prompts", pa.table({"prompt": ["a", "b", "c"]})))
    buffer = SampleBuffer.create(tmp_path / "runs" / "tiny" / "buffer", {"train": recorded})
    ledger = buffer.ledgers["train"]
    ledger.issue([0, 1, 2], [1, 1, 1], step=0)
    for _ in range(2):
        lease = ledger.claim(ledger.graph["measure"], max_rows=1, holder="rank 0")
        assert lease is not None
        if lease.ids[0] == 0:
            ledger.publish(lease, Published(lease.ids, np.zeros(1, np.int64)), None)
            ledger.finish(lease)
    buffer.commit()
    buffer.log.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with finished runs/one and runs/two; the second has another seed and checkpoints."""
    root = tmp_path_factory.mktemp("finished") / "runs"
    recorded_runs.run(root, "one")
    recorded_runs.run(root, "two", seed=1, every=2)
    return root


@pytest.fixture
def done(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of these runs, below the working directory."""
    monkeypatch.chdir(finished.parent)
    return finished
