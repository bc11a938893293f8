"""RunSpec: a checked description of a run. RunHistory: state that survives its restarts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..dataflow.buffer.sample_buffer import BufferConfig
from ..dataflow.errors import UserError
from ..dataflow.graph import Graph, Handle, ParameterEdge
from ..dataflow.operation import names_arguments
from .backends.backend import Backend
from .placement import Place
from .recovery.changed_settings import Rule, recorded_settings
from .recovery.checkpoints import CheckpointConfig
from .recovery.failures import FailureCounts
from .recovery.full_disk import FullDisk
from .reports.progress import Progress
from .reports.symptoms import Watch
from .reports.tracker_threads import TrackerThreads
from .schedule import Training
from .signals import StopOnSignal


@names_arguments
@dataclass(frozen=True)
class Evaluation:
    """Evaluate a graph on held-out rows: before the first step, after every `every` steps, and
    after the last.

    An evaluation begins when its groups have the weights of its step, and its metrics belong to
    that step.

    - `Synchronous` and `Pipelined`: an evaluation runs during the next step, on idle groups, such
      as the rollout during an update. The groups keep the evaluated weights, and the next step
      cannot end before the evaluation.
    - With `Driver(stop=...)`, the next step begins after the evaluation, whose metrics `stop`
      reads.
    - `Asynchronous`: evaluation rows are mixed with training rows, and `partial_rollouts` applies
      to them. The metrics `oldest_version` and `newest_version` show the weights that were used.
    """

    graph: Graph
    every: int = 10
    """[steps] Interval between evaluations; 0 evaluates only at the start and the end."""
    name: str = "eval"
    """Prefix of its metrics, `NAME/...`."""
    at_start: bool = True
    """Evaluate the model before the first step."""
    at_end: bool = True
    """Evaluate after the last step, also if the run ends early."""

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(f"Evaluation(every={self.every!r}): every must be an integer of at least 0")
        if not (self.every or self.at_start or self.at_end):
            raise UserError("Evaluation(every=0, at_start=False, at_end=False) never evaluates anything")

    def is_due(self, step: int, *, over: bool) -> bool:
        """Whether to evaluate after a step (0: the start of the run; `over`: the last step).

        >>> graph: Any = None
        >>> [step for step in range(6) if Evaluation(graph, every=2, at_start=False).is_due(step, over=step == 5)]
        [2, 4, 5]
        """
        if step == 0:
            return self.at_start
        return (bool(self.every) and step % self.every == 0) or (self.at_end and over)


@dataclass(frozen=True)
class RunSpec:
    """A run as its user described it, with defaults filled in."""

    graphs: Mapping[str, Graph]
    """Graph name -> graph; the training graph is TRAIN."""
    handles: Mapping[str, Handle]
    """Every worker group, including those that Weft adds."""
    placement: Mapping[str, Place]
    backend: Backend
    schedule: Training
    evaluations: Mapping[str, Evaluation]
    seed: int
    record_every: int
    """[steps] Save the samples of every n-th step; 0 saves none."""
    start_timeout_s: float
    """[s] Longest time for a group's workers to start."""
    call_timeout_s: float
    """[s] Longest time without progress in a call of a rank."""
    buffer: BufferConfig
    checkpoint: CheckpointConfig
    stop: Callable[[Mapping[str, float]], bool] | None
    stop_on: Collection[str]
    """Names of the symptoms that end the run."""

    @cached_property
    def recorded(self) -> tuple[dict[str, str], dict[str, Rule]]:
        """Settings to compare when a run is resumed: name -> value (as text), and name -> rule."""
        of_graphs = {
            name: handle for graph in self.graphs.values() for name, handle in graph.handles.items()
        }
        return recorded_settings(self.graphs, of_graphs, self.schedule)

    @property
    def evaluations_hold_training(self) -> bool:
        """Whether steps wait for evaluations, because `stop` reads their metrics."""
        # `StopOnSignal` ignores the metrics.
        reads = self.stop is not None and not isinstance(self.stop, StopOnSignal)
        return reads and not self.schedule.overlaps

    def is_evaluated_for_best(self, step: int, *, over: bool) -> bool:
        """Whether a step is evaluated for the metric that selects the best checkpoint."""
        source = self.evaluations.get(self.checkpoint.best_source)
        return source is not None and source.is_due(step, over=over)

    @cached_property
    def follows(self) -> tuple[ParameterEdge, ...]:
        # Graphs that share groups may repeat an edge.
        return tuple(dict.fromkeys(edge for graph in self.graphs.values() for edge in graph.follows))


@dataclass(frozen=True)
class RunHistory:
    progress: Progress
    disk: FullDisk
    trackers: TrackerThreads
    watch: Watch = field(default_factory=Watch)
    failures: FailureCounts = field(default_factory=FailureCounts)
