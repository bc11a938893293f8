"""RunSpec: what a driver was asked to run, checked. RunHistory: what the starts of a run have in common besides."""

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
from .schedule import AMONG, BESIDE, BETWEEN, EvaluationRules, Training
from .signals import StopOnSignal


@names_arguments
@dataclass(frozen=True)
class Evaluation:
    """A graph over held-out rows, run before the first step, after each `every`-th, and after the last. A run may have several, each
    with its own rows, name and times.

    It begins when the weights of its step have arrived, and goes on beside the next step. Under `Synchronous` and `Pipelined` it takes
    the groups that this step leaves idle, such as the rollout during an update. Groups keep the weights that it evaluates until it is
    over, and the step ends no earlier. (With `Driver(stop=...)`, which decides by what was measured, no step begins before it is over.)
    Under `Asynchronous` its rows take their place among those of training. Responses that are unfinished when the next weights come are
    treated as those of training are (`partial_rollouts`), and the metrics `oldest_version` and `newest_version` name the versions of its
    tokens. Its metrics stand beside those of the step that it evaluates, whenever it is over.
    """

    graph: Graph
    every: int = 10
    """Steps from one evaluation to the next; 0: none but those at the start and the end."""
    name: str = "eval"
    """Its metrics are `NAME/...`."""
    at_start: bool = True
    """Whether the model is evaluated before the first step."""
    at_end: bool = True
    """Whether it is evaluated after the last step, whichever that is."""

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(f"Evaluation(every={self.every!r}): every must be an integer of at least 0")
        if not (self.every or self.at_start or self.at_end):
            raise UserError("Evaluation(every=0, at_start=False, at_end=False) never evaluates anything")

    def is_due(self, step: int, *, over: bool) -> bool:
        """Whether a step is evaluated.

        Args:
            step: that is over; 0 is the start of the run.
            over: no step comes after it.

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
    """Name in the run -> graph; the training graph is TRAIN."""
    handles: Mapping[str, Handle]
    """Every worker group, those that each run has among them."""
    placement: Mapping[str, Place]
    backend: Backend
    schedule: Training
    evaluations: Mapping[str, Evaluation]
    seed: int
    record_every: int
    """Samples of each so-many-th step are kept; 0 keeps none."""
    start_timeout_s: float
    """Longest wait for the workers of a group to be up."""
    call_timeout_s: float
    """Longest silence of a rank that was called."""
    buffer: BufferConfig
    checkpoint: CheckpointConfig
    stop: Callable[[Mapping[str, float]], bool] | None
    stop_on: Collection[str]
    """Names of the symptoms that end the run."""

    @cached_property
    def recorded(self) -> tuple[dict[str, str], dict[str, Rule]]:
        """The settings that a resumed run is compared by, and the rule of each."""
        of_graphs = {
            name: handle for graph in self.graphs.values() for name, handle in graph.handles.items()
        }
        return recorded_settings(self.graphs, of_graphs, self.schedule)

    @property
    def evaluation_rules(self) -> EvaluationRules:
        """What evaluations and training wait for of each other. Where `stop` decides by what was measured, the model is to be the one that
        it decided by; where generation runs ahead, the next step has begun anyway."""
        if self.schedule.overlaps:
            return AMONG
        return BESIDE if self.stop is None or isinstance(self.stop, StopOnSignal) else BETWEEN

    def is_evaluated_for_best(self, step: int, *, over: bool) -> bool:
        """Whether the weights of a step are evaluated by what the best checkpoint is chosen by.

        Args:
            step: that is over.
            over: no step comes after it.
        """
        source = self.evaluations.get(self.checkpoint.best_source)
        return source is not None and source.is_due(step, over=over)

    @cached_property
    def follows(self) -> tuple[ParameterEdge, ...]:
        """The parameter edges of all graphs."""
        return tuple(dict.fromkeys(edge for graph in self.graphs.values() for edge in graph.follows))


@dataclass(frozen=True)
class RunHistory:
    """What a run shows and has counted over all of its starts."""

    progress: Progress
    disk: FullDisk
    trackers: TrackerThreads
    watch: Watch = field(default_factory=Watch)
    failures: FailureCounts = field(default_factory=FailureCounts)
