"""FunctionWorker: calls the pure functions of graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..dataflow.batch import Batch
from ..dataflow.column import GROUP_ID, PROMPT, PROMPT_IDS, RESPONSE, RESPONSE_IDS
from ..dataflow.config import Config
from ..dataflow.errors import UserError
from ..dataflow.operation import FINISHED_GROUPS, Shape
from ..dataflow.prompts.tokenizer import Tokenizer
from ..dataflow.runs.files import make_folder, replacing
from ..dataflow.runs.samples import note_checksum, sample_file_name
from .dispatch import Dispatch
from .worker import Worker, remote


class FunctionWorker(Worker):
    """A process next to the driver, for work that is too small for its own group. With several
    ranks, each gets a share of the rows, or of the groups if the function takes groups."""

    Config = Config
    replaceable = True

    @remote(dispatch=Dispatch.SPLIT_BY_DP)
    def apply(self, rows: Batch, *, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call the function of a node. Also return its metrics if it has a `measure`."""
        result = function(rows, **arguments)
        measure = getattr(function, "__measure__", None)
        return result if measure is None else (result, measure(rows, **arguments))


class RecorderConfig(Config):
    tokenizer: str | None = None
    """Model folder whose tokenizer turns recorded tokens into text."""


class RecorderWorker(Worker):
    """Writes a run's samples in a separate process, so that no step waits."""

    Config = RecorderConfig
    replaceable = True

    @remote(dispatch=Dispatch.SPLIT_BY_DP, shape=Shape.GROUP, takes=FINISHED_GROUPS)
    def record(
        self, rows: Batch, *, folder: Path, graph: str, token: int, steps: Mapping[int, int]
    ) -> None:
        """Write rows to Arrow files, one per step. Adds the text of tokens.

        Args:
            folder: the run's `samples`.
            token: number of the lease. The run's log records which leases were finished.
            steps: maps groups to steps. Rows of other groups are dropped.
        """
        step_of = np.array([steps.get(group, -1) for group in rows.numpy(GROUP_ID).tolist()], np.int64)
        make_folder(folder)
        for step in np.unique(step_of[step_of >= 0]).tolist():
            kept = rows.take(np.flatnonzero(step_of == step))
            for ids, text in ((PROMPT_IDS, PROMPT), (RESPONSE_IDS, RESPONSE)):
                if self._tokenizer is not None and ids in kept and text not in kept:
                    decoded = self._tokenizer.decode_ragged(*kept.ragged_numpy(ids))
                    kept = kept.with_columns(**{str(text): decoded})
            # Rows that are recorded again have another lease, and readers skip unfinished leases.
            path = folder / sample_file_name(graph, step, token, self.context.rank)
            with replacing(path) as partial:
                with pa.ipc.new_file(partial, kept.record.schema) as writer:
                    writer.write_batch(kept.record)
                # Note the checksum before the final name, so that every finished file has one.
                note_checksum(path, partial, self.context.rank)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        try:
            return Tokenizer.load(self.config.tokenizer) if self.config.tokenizer else None
        except UserError:  # without a tokenizer, record samples as tokens only
            return None
