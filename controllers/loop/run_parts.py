"""RunParts: what the verbs of a run's loop (admit, dispatch, close) work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...dataflow.buffer.sample_buffer import SampleBuffer
from ..graph_run import GraphRuns, TrainingRun
from ..group import WorkerGroup
from ..schedule import EvaluationRules, Training
from ..weight_sync import WeightSync
from .calls import Calls
from .recording import Recording


@dataclass(frozen=True)
class RunParts:
    """The parts of one life of a run. No part holds this record: the verbs do."""

    schedule: Training
    buffer: SampleBuffer
    groups: Mapping[str, WorkerGroup]
    graph_runs: GraphRuns
    weights: WeightSync
    recording: Recording
    calls: Calls
    evaluation_rules: EvaluationRules

    @property
    def train(self) -> TrainingRun:
        """The training graph of the run."""
        return self.graph_runs.train
