"""RunReader: one run, as the dashboard reads it. After the first read, it reads only new data."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from ...controllers.recovery.checkpoints import complete_checkpoints
from ...dataflow.buffer.staleness import VersionOf
from ...dataflow.config import flattened
from ...dataflow.graph import TRAIN
from ...dataflow.metric_names import score_label
from ...dataflow.runs.facts import RunFacts, facts_of
from ...dataflow.runs.files import CHECKPOINTS, GRAPH, LIVE
from ...dataflow.runs.follow import PARTS, state_of
from ...dataflow.runs.lock import Life
from ...dataflow.safe_files import read_json
from ..timeline import CallLog
from .episodes import EpisodePages
from .metrics import Axis, MetricLog, axis_of, cards, curve, marks, numbers
from .sample_index import SampleIndex
from .sample_pages import SamplePages

# Types of the fields of `live.json` and `graph.json` that pages rely on. Files may have more
# fields; a damaged file counts as missing.

MOST_BYTES = 32 << 20
"""[bytes] Largest file to read. Drivers write far less."""


class _Lease(TypedDict):
    lease: int
    node: str
    left: int


class _OldGroup(TypedDict):
    group: int
    step: int
    waits: list[str]


class _NodeState(TypedDict):
    todo: float
    leased: float
    done: float
    held: float


class _Call(TypedDict):
    what: str
    waits_for: list[int]
    since_s: float


class _Host(TypedDict):
    processes: dict[str, tuple[int, int]]


class _Stack(TypedDict):
    text: str


class _Source(TypedDict):
    name: str
    columns: list[str]


class _Edge(TypedDict):
    follower: str
    leader: str


class _GraphState(TypedDict):
    nodes: dict[str, _NodeState]
    issued: int
    in_flight: int
    done: int
    dropped: dict[str, int]
    steps: dict[str, tuple[int, float]]
    leases: list[_Lease]
    oldest: list[_OldGroup]


class _GroupState(TypedDict):
    version: int
    versions: NotRequired[dict[str, int]]
    ranks: int
    calls: list[_Call]
    absent: list[int]
    starting: list[int]
    lacking: list[int]


class _Live(TypedDict):
    at: float
    time_s: float
    graphs: dict[str, _GraphState]
    groups: dict[str, _GroupState]
    hosts: dict[str, _Host]
    stacks: dict[str, _Stack]


class _Node(TypedDict):
    name: str
    group: str | None
    reads: list[str]
    writes: list[str]
    writers: dict[str, str]
    after: list[str]


class _Graph(TypedDict):
    source: _Source
    nodes: list[_Node]
    follows: list[_Edge]


_LIVE, _GRAPHS = TypeAdapter(_Live), TypeAdapter(dict[str, _Graph])


def read_live(run: Path) -> dict[str, Any]:
    """Return the driver's last report, or an empty mapping."""
    return _read(run / LIVE, _LIVE)


def read_graphs(run: Path) -> dict[str, Any]:
    """Return the graphs of the run by name, or an empty mapping."""
    return _read(run / GRAPH, _GRAPHS)


def _read(path: Path, fields: TypeAdapter[Any]) -> dict[str, Any]:
    try:
        found = read_json(path, MOST_BYTES)
        fields.validate_python(found)
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return {}
    return found


def nested(value: Any, *names: str) -> dict[str, Any]:
    """Return a nested mapping, or an empty one if any level is missing or not a mapping.

    >>> nested({"a": {"b": {"c": 1}}}, "a", "b"), nested({"a": 1}, "a", "b")
    ({'c': 1}, {})
    """
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return dict(value) if isinstance(value, Mapping) else {}


# Run reader

SPARK = 40
"""Points of the small curve in the list of runs."""


class RunReader:
    """Reads one run. Methods are thread-safe."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._lock = threading.Lock()
        self._metrics, self._calls = MetricLog(path), CallLog(path)
        self._summary: tuple[dict[str, object], dict[str, Any]] | None = None
        """(state of the run's files, summary of them)."""
        self.samples = SampleIndex(path, lambda: self.version_of)
        self.sample_pages = SamplePages(self.samples)
        self.episode_pages = EpisodePages(self.samples)

    @contextmanager
    def parts(self) -> Iterator[tuple[MetricLog, CallLog]]:
        """Yield refreshed metrics and calls, locked against other threads."""
        with self._lock:
            self._metrics.refresh()
            self._calls.refresh()
            yield self._metrics, self._calls

    @property
    def facts(self) -> RunFacts:
        with self._lock:
            self._metrics.refresh()
            last = self._metrics.last
        return facts_of(self.path, last)

    @property
    def version_of(self) -> VersionOf:
        """The part of an episode whose policy version counts."""
        schedule = nested(self.facts.config, "schedule")
        match schedule.get("staleness_of"), schedule.get("stale_share"):
            case "share", float(share):
                return share
            case "newest_turn", _:
                return "newest_turn"
            case _:
                return "oldest_token"

    @property
    def summary(self) -> dict[str, Any]:
        """The run's entry in the list of runs."""
        state = state_of(self.path)
        if self._summary is not None and self._summary[0] == state:
            return self._summary[1]
        made = self._new_summary()
        # Do not cache a running run, which changes all the time.
        self._summary = None if made["status"] == "running" else (state, made)
        return made

    def _new_summary(self) -> dict[str, Any]:
        facts, last_alert = self.facts, None
        shown = {card["id"]: card["names"][0] for card in cards(self.metric_names, _evaluations(facts))}
        held_out = shown.get("accuracy", "")
        with self._lock:
            _, lost = self._metrics.series(f"{held_out.partition('/')[0]}/prompts_lost")
            _, score = self._metrics.series(held_out)
            _, took = self._metrics.series("step_s")
            _, spark = curve(self._metrics, shown.get("reward", shown.get("loss", "")), points=SPARK)
        if facts.alerts:
            last = facts.alerts[-1]
            last_alert = {"text": facts.trouble, "name": last.name, "step": last.step, "at": last.time}
        left_s = None
        if facts.life is Life.ALIVE and facts.steps is not None and len(took):
            left_s = round(float(np.median(took[-20:])) * max(0, facts.steps - facts.step), 1)
        return {
            "run": self.name,
            "name": self.path.name,
            "status": facts.status,
            "updated_at": self._updated_at,
            "duration_s": facts.last.get("time_s"),
            "left_s": left_s,
            "step": facts.step,
            "steps": facts.steps,
            "reward": facts.reward,
            "loss": facts.loss,
            "held_out": float(score[-1]) if len(score) else None,
            "held_out_label": score_label(held_out.partition("/")[2]),
            "held_out_lost": float(lost[-1]) if len(lost) and lost[-1] else None,
            "tokens_per_s": facts.last.get("tokens_per_s"),
            "spark": numbers(spark, 4) if len(spark) > 1 else [],
            "trouble": last_alert,
            "settings": _few_settings(facts.config),
            "damage": [*facts.damage, *self.damage],
        }

    def damaged(self, why: str) -> dict[str, Any]:
        """Return the list entry of a run whose files are damaged."""
        names = {"run": self.name, "name": self.path.name, "status": "damaged"}
        empty = {"step": 0, "spark": [], "settings": {}}
        return {**names, **empty, "updated_at": self._updated_at, "damage": [why]}

    @property
    def _updated_at(self) -> float | None:
        """Time of the last write, in seconds since 1970."""
        times: list[float] = []
        for name in (name for names in PARTS.values() for name in names):
            with suppress(OSError):
                times.append((self.path / name).stat().st_mtime)
        return max(times, default=None)

    @property
    def described(self) -> dict[str, Any]:
        """The run's entry in the list, and its latest values."""
        facts, live = self.facts, read_live(self.path)
        schedule = nested(facts.config, "schedule")
        if live:
            ranks = [one["ranks"] for one in live["groups"].values()]
        else:
            places = nested(facts.config, "placement")
            known = (nested(places, name).get("ranks") for name in places)
            ranks = [number if isinstance(number, int) else 1 for number in known]
        return {
            **self.summary,
            "why": facts.error,
            "max_staleness": schedule.get("max_staleness", 0) if schedule else None,
            "staleness": facts.last_of("mean_staleness"),
            "gap": facts.last_of("mean_logprob_gap"),
            "alerts": len(facts.alerts),
            "samples": len(self.samples.table()),
            "rows_in_flight": sum(one["in_flight"] for one in live["graphs"].values()) if live else None,
            "workers": sum(ranks),
        }

    @property
    def alerts(self) -> list[dict[str, Any]]:
        """All alerts, latest first."""
        return [
            {
                "step": one.step,
                "at": one.time,
                "kind": "error" if one.ends else "warning",
                "rule": one.name,
                "text": one.text,
            }
            for one in reversed(self.facts.alerts)
        ]

    @property
    def evaluations(self) -> list[str]:
        return _evaluations(self.facts)

    @property
    def metric_names(self) -> list[str]:
        with self._lock:
            self._metrics.refresh()
            return self._metrics.names

    def curves(
        self, names: list[str], axis: Axis, points: int, window: tuple[float, float]
    ) -> list[dict[str, Any]]:
        """Return each known metric with x and y."""
        found: list[dict[str, Any]] = []
        with self._lock:
            self._metrics.refresh()
            for name in names:
                steps, _ = self._metrics.series(name)
                if not len(steps):
                    continue
                x, y = curve(self._metrics, name, axis, points, window)
                found.append({"run": self.name, "name": name, "x": numbers(x, 9), "y": numbers(y)})
        return found

    def marks(self, axis: Axis) -> list[dict[str, Any]]:
        """Return events with their positions on an axis."""
        facts = self.facts
        kept = [
            int(path.name.rpartition("_")[2]) for path in complete_checkpoints(self.path / CHECKPOINTS)
        ]
        with self._lock:
            found = marks(self._metrics, _evaluations(facts), facts.alerts, kept)
            places = numbers(
                axis_of(self._metrics, np.array([float(mark["step"]) for mark in found]), axis), 9
            )
        return [{"run": self.name, "x": x, **mark} for x, mark in zip(places, found, strict=True)]

    @property
    def damage(self) -> list[str]:
        with self._lock:
            found = [self._metrics.damage, self._calls.damage]
        return [*(text for text in found if text), *self.samples.damage[:5]]


def _evaluations(facts: RunFacts) -> list[str]:
    return [name for name in nested(facts.config, "graphs") if name != TRAIN]


def _few_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    flat = flattened({name: config.get(name) or {} for name in ("schedule", "groups")})
    shown = ("schedule.kind", "prompts_per_step", "max_staleness", "model", "learning_rate", "engine")
    return {key: value for key, value in flat.items() if key.endswith(shown)} | {
        "seed": config.get("seed")
    }
