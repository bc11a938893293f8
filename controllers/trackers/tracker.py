"""Tracker: what takes the metrics of a run, and the kinds of trackers that have names."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ...dataflow.errors import UserError, nearest

MOST_SAMPLES = 100
"""Samples of a step that trackers get at most."""
PROMETHEUS = "prometheus"
"""The endpoint of the Ray cluster, which the driver itself reports to: it has no process of its own."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for."""

    name: str
    folder: Path
    """`runs/NAME`; a tracker that writes files makes a folder there."""
    config: Mapping[str, Any]
    """The run's `config.json`, without secrets."""
    id: str = ""
    """What an earlier start of the run got from `Tracker.open`; empty: there was none."""
    after: int | None = None
    """The step after which the run goes on; None: it begins."""
    logged: int = 0
    """Number of calls of `Tracker.log` in earlier starts of the run."""


class Tracker(Protocol):
    """Takes the metrics of one run, in a separate process. An exception in a method ends only that process.

    A tracker may also have `log_samples(step, rows)`, which takes samples of a step: rows with the texts `prompt`, `response`, `answer` and
    `verdict`, and the number `reward`. It counts as a call of `log`.
    """

    overwrites: ClassVar[bool]
    """Whether steps after a checkpoint take the place of those that were sent before the run went back to it. Otherwise they are not sent
    again."""

    def open(self, run: TrackedRun) -> str:
        """Begin, or go on with what an earlier start of the run began; returns the id to go on with the next time."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics of a step. Steps may come again with other metrics, and evaluations come late."""
        ...

    def flush(self) -> None:
        """What was logged must survive the end of this process from here on."""
        ...

    def close(self, *, failed: bool) -> None:
        """The run is over, or its driver is gone."""
        ...


@dataclass(frozen=True)
class Kind:
    """A tracker that has a name."""

    place: str
    """Module and class, as `module:Class`."""
    package: str
    """What it imports."""


KINDS: Mapping[str, Kind] = {
    name: Kind(f"{__package__}.{name}_tracker:{tracker}", package)
    for name, tracker, package in (
        ("tensorboard", "TensorboardTracker", "tensorboardX"),
        ("wandb", "WandbTracker", "wandb"),
        ("mlflow", "MlflowTracker", "mlflow"),
        ("trackio", "TrackioTracker", "trackio"),
    )
}
_OWN = re.compile(r"[\w.]+:\w+")
"""A user's own tracker, as module:Class."""


def check_trackers(names: Sequence[str], *, has_endpoint: bool) -> None:
    """Check that each tracker is known and can be imported, without importing it.

    Args:
        names: as a user gave them.
        has_endpoint: whether the backend has an endpoint for Prometheus.

    Raises:
        UserError: naming the tracker, and the nearest right name or what to install.

    >>> check_trackers(["tensorbord"], has_endpoint=False)
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: trackers: there is no 'tensorbord'; did you mean 'tensorboard'? ...
    """
    if isinstance(names, str):
        raise UserError(f"trackers={names!r} is a text; it is a sequence of names: trackers=({names!r},)")
    known = [*KINDS, PROMETHEUS]
    for name in names:
        if not isinstance(name, str) or (name not in known and not _OWN.fullmatch(name)):
            raise UserError(
                f"trackers: there is no {name!r}{nearest(str(name), known)}? They are {', '.join(known)}, or 'module:Class' of your "
                "own".replace("??", "?")
            )
        if name == PROMETHEUS and not has_endpoint:
            raise UserError(f"trackers: {name!r} is the endpoint of a Ray cluster, so it needs backend=RayBackend()")
        if name in KINDS and importlib.util.find_spec(KINDS[name].package) is None:
            raise UserError(
                f"trackers: {name!r} needs the package {KINDS[name].package}, which is not installed: pip install 'weft[{name}]'"
            )
    if twice := [name for name in dict.fromkeys(names) if list(names).count(name) > 1]:
        raise UserError(f"trackers: {twice[0]!r} is named twice")


def new_tracker(name: str) -> Tracker:
    """The tracker of a name, or of a `module:Class`. Its package is imported here, or when it is opened."""
    module, _, tracker = (KINDS[name].place if name in KINDS else name).partition(":")
    return getattr(importlib.import_module(module), tracker)()


def plain(name: str) -> str:
    """A name of a metric or a setting with the characters that every tracker takes.

    >>> plain("eval/pass@8"), plain("reward/my own")
    ('eval/pass_at_8', 'reward/my_own')
    """
    return re.sub(r"[^\w./-]", "_", name.replace("@", "_at_"))
