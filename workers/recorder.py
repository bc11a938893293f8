"""RecorderWorker: writes the samples of a run to its directory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..dataflow.batch import Batch
from ..dataflow.buffer.disk import make_folder, replacing
from ..dataflow.buffer.samples import note_checksum, sample_file_name
from ..dataflow.column import GROUP_ID, PROMPT, PROMPT_IDS, RESPONSE, RESPONSE_IDS
from ..dataflow.config import Config
from ..dataflow.errors import UserError
from ..dataflow.operation import Shape
from ..dataflow.prompts.tokenizer import Tokenizer
from ..dataflow.takes import FINISHED_GROUPS
from .dispatch import Dispatch
from .remote import remote
from .worker import Worker


class RecorderConfig(Config):
    tokenizer: str | None = None
    """Model folder whose tokenizer turns recorded tokens into text."""


class RecorderWorker(Worker):
    """Writes behind the run, in its own process: no step waits for it."""

    Config = RecorderConfig
    replaceable = True

    @remote(dispatch=Dispatch.SPLIT_BY_DP, shape=Shape.GROUP, takes=FINISHED_GROUPS)
    def record(self, rows: Batch, *, folder: Path, graph: str, token: int, steps: Mapping[int, int]) -> None:
        """Write rows to Arrow files, one for each step, with tokens also as text.

        Args:
            folder: the folder `samples` of the run.
            graph: name of the rows' graph in the run.
            token: number of the lease under which they are written; the log says which leases were finished.
            steps: group -> the step that its rows are filed under. Rows of other groups are not kept.
        """
        step_of = np.array([steps.get(group, -1) for group in rows.numpy(GROUP_ID).tolist()], np.int64)
        make_folder(folder)
        for step in np.unique(step_of[step_of >= 0]).tolist():
            kept = self._with_texts(rows.take(np.flatnonzero(step_of == step)))
            path = folder / sample_file_name(graph, step, token, self.context.rank)
            with replacing(path) as partial:
                with pa.ipc.new_file(partial, kept.record.schema) as writer:
                    writer.write_batch(kept.record)
                note_checksum(path, partial, self.context.rank)

    def _with_texts(self, rows: Batch) -> Batch:
        if self._tokenizer is None:
            return rows
        wanted = [(i, t) for i, t in ((PROMPT_IDS, PROMPT), (RESPONSE_IDS, RESPONSE)) if i in rows and t not in rows]
        texts = {str(text): self._tokenizer.decode_ragged(*rows.ragged_numpy(ids)) for ids, text in wanted}
        return rows.with_columns(**texts)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        try:
            return Tokenizer.load(self.config.tokenizer) if self.config.tokenizer else None
        except UserError:  # without a tokenizer, samples are recorded as tokens only
            return None
