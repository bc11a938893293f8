"""FunctionWorker: runs the pure functions of the graphs, and writes the samples of a run to its directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..dataflow.batch import Batch
from ..dataflow.column import PROMPT, PROMPT_IDS, RESPONSE, RESPONSE_IDS, SAMPLE_ID
from ..dataflow.config import Config
from ..dataflow.errors import UserError
from ..dataflow.operation import Shape
from ..dataflow.tokenizer import Tokenizer
from .dispatch import Dispatch
from .remote import remote
from .worker import Worker


class FunctionConfig(Config):
    tokenizer: str | None = None
    """Model folder whose tokenizer turns recorded tokens into text."""


class FunctionWorker(Worker):
    """One process beside the driver for what is too small for a group of its own."""

    Config = FunctionConfig
    replaceable = True

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def apply(self, rows: Batch, *, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Run the function of a node."""
        return function(rows, **arguments)

    @remote(dispatch=Dispatch.ONE_TO_ALL, shape=Shape.MAP)
    def record(self, rows: Batch, *, path: Path) -> None:
        """Write rows to an Arrow file, tokens also as text. Of a step that was refilled the rows come in parts: they are
        added to the file, and take the place of those that were written before the run was taken back."""
        texts = {
            str(text): self._decode(rows, ids)
            for ids, text in ((PROMPT_IDS, PROMPT), (RESPONSE_IDS, RESPONSE))
            if ids in rows and text not in rows
        }
        kept = rows.with_columns(**{name: column for name, column in texts.items() if column is not None})
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with pa.OSFile(str(path), "rb") as source:
                before = Batch.of_table(pa.ipc.open_file(source).read_all())
            others = ~np.isin(before.numpy(SAMPLE_ID), kept.numpy(SAMPLE_ID))
            kept = Batch.concat([before.take(np.flatnonzero(others)), kept])
        unfinished = path.with_name(f".{path.name}")  # a reader never sees half a file
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, kept.record.schema) as writer:
            writer.write_batch(kept.record)
        unfinished.rename(path)

    def _decode(self, rows: Batch, ids: object) -> list[str] | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(rows[ids].to_pylist())

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        try:
            return Tokenizer.load(self.config.tokenizer) if self.config.tokenizer else None
        except UserError:  # a model without a tokenizer of its own: its samples are recorded as tokens alone
            return None
