"""RunReader: one run, as the dashboard reads it. Each part is read once and then followed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError

from ...controllers.recovery.checkpoints import complete_checkpoints
from ...dataflow.config import flattened
from ...dataflow.graph import TRAIN
from ...dataflow.metric_names import metric_of, score_label
from ...dataflow.runs.facts import RunFacts, facts_of
from ...dataflow.runs.files import BUFFER, CHECKPOINTS, GRAPH, LIVE, LOG, SAMPLES_ARCHIVE
from ...dataflow.runs.follow import PARTS, state_of
from ...dataflow.runs.lock import Life
from ...dataflow.safe_files import read_json
from ..timeline import CallLog
from .metrics import Axis, MetricLog, axis_of, cards, curve, marks, numbers
from .sample_index import SampleIndex
from .sample_pages import SamplePages

# The content of `live.json` (rows at each node, groups, leases, memory) and of `graph.json` (nodes and
# followers). A damaged file counts as missing.


MOST_BYTES = 32 << 20
"""[bytes] Largest file to read. Drivers write far less, and pages request these files again and again."""


class _Open(BaseModel):
    """The fields that pages rely on; other fields are allowed."""

    model_config = ConfigDict(extra="allow")


class _NodeState(_Open):
    todo: float
    ready: float
    leased: float
    done: float
    held: float


class _Lease(_Open):
    lease: int
    node: str
    left: int


class _OldGroup(_Open):
    group: int
    step: int
    waits: list[str]


class _GraphState(_Open):
    nodes: dict[str, _NodeState]
    issued: int
    in_flight: int
    done: int
    dropped: dict[str, int]
    steps: dict[str, tuple[int, float]]
    leases: list[_Lease]
    oldest: list[_OldGroup]


class _Call(_Open):
    what: str
    rows: int
    waits_for: list[int]
    since_s: float


class _GroupState(_Open):
    version: int
    ranks: int
    calls: list[_Call]
    absent: list[int]
    starting: list[int]
    lacking: list[int]


class _Host(_Open):
    processes: dict[str, tuple[int, int]]


class _Stack(_Open):
    at: float
    text: str


class _Live(_Open):
    at: float
    time_s: float
    step: int
    graphs: dict[str, _GraphState]
    groups: dict[str, _GroupState]
    hosts: dict[str, _Host]
    stacks: dict[str, _Stack]


class _Source(_Open):
    name: str
    columns: list[str]


class _Node(_Open):
    name: str
    group: str | None
    reads: list[str]
    writes: list[str]
    writers: dict[str, str]
    after: list[str]


class _Edge(_Open):
    follower: str
    leader: str


class _Structure(_Open):
    source: _Source
    nodes: list[_Node]
    follows: list[_Edge]


_Graphs = RootModel[dict[str, _Structure]]


def read_live(run: Path) -> dict[str, Any]:
    """Return the run's latest state from its driver, or an empty mapping."""
    return _read(run / LIVE, _Live)


def read_graphs(run: Path) -> dict[str, Any]:
    """Return the graphs of the run by name, or an empty mapping."""
    return _read(run / GRAPH, _Graphs)


def _read(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    try:
        found = read_json(path, MOST_BYTES)
        model.model_validate(found)
    except (OSError, ValueError, ValidationError):
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
        """State of the files, and the summary made from them."""
        self.samples = SampleIndex(path)
        self.sample_pages = SamplePages(self.samples)

    @contextmanager
    def parts(self) -> Iterator[tuple[MetricLog, CallLog]]:
        """Yield refreshed metrics and calls, locked against other threads."""
        with self._lock:
            self._metrics.refresh()
            self._calls.refresh()
            yield self._metrics, self._calls

    @property
    def facts(self) -> RunFacts:
        """Status, last metrics, alerts and configuration."""
        with self._lock:
            self._metrics.refresh()
            last = self._metrics.last
        return facts_of(self.path, last)

    @property
    def summary(self) -> dict[str, Any]:
        """The run's line in the list, cached for finished runs until their files change."""
        state = state_of(self.path)
        if self._summary is not None and self._summary[0] == state:
            return self._summary[1]
        made = self._new_summary()
        # A running run changes all the time, so do not cache it.
        self._summary = None if made["status"] == "running" else (state, made)
        return made

    def _new_summary(self) -> dict[str, Any]:
        facts = self.facts
        names = self.metric_names
        shown = {card["id"]: card["names"][0] for card in cards(names, self._evaluations_of(facts))}
        held_out = shown.get("accuracy", "")
        with self._lock:
            _, lost = self._metrics.series(f"{held_out.partition('/')[0]}/prompts_lost")
            _, score = self._metrics.series(held_out)
            spark_x, spark = curve(
                self._metrics, shown.get("reward", shown.get("loss", "")), points=SPARK
            )
        schedule = facts.config.get("schedule")
        return {
            "run": self.name,
            "name": self.path.name,
            "status": facts.status,
            "started_at": facts.since or None,
            "updated_at": self._updated_at,
            "duration_s": facts.last.get("time_s"),
            "left_s": self._left_s(facts) if facts.life is Life.ALIVE else None,
            "step": facts.step,
            "steps": facts.steps,
            "reward": facts.reward,
            "loss": facts.loss,
            "held_out": float(score[-1]) if len(score) else None,
            "held_out_label": score_label(held_out.partition("/")[2]),
            "held_out_lost": float(lost[-1]) if len(lost) and lost[-1] else None,
            "tokens_per_s": facts.last.get("tokens_per_s"),
            "spark": numbers(spark, 4) if len(spark_x) > 1 else [],
            "trouble": self._trouble(facts),
            "settings": self._few_settings(facts),
            "schedule": schedule.get("kind") if isinstance(schedule, dict) else None,
            "epoch": facts.holder.epoch if facts.holder else None,
            "holder": str(facts.holder) if facts.holder else None,
            "damage": [*facts.damage, *self.damage],
        }

    def damaged(self, why: str) -> dict[str, Any]:
        """Return the line of a run whose files are damaged."""
        nothing = (
            "started_at",
            "duration_s",
            "left_s",
            "steps",
            "reward",
            "loss",
            "held_out",
            "held_out_label",
            "held_out_lost",
            "tokens_per_s",
            "trouble",
            "schedule",
        )
        return dict.fromkeys((*nothing, "epoch", "holder")) | {
            "run": self.name,
            "name": self.path.name,
            "status": "damaged",
            "updated_at": self._updated_at,
            "step": 0,
            "spark": [],
            "settings": {},
            "damage": [why],
        }

    @property
    def _updated_at(self) -> float | None:
        """Time of the last write, in seconds since 1970."""
        times: list[float] = []
        for name in (name for names in PARTS.values() for name in names):
            with suppress(OSError):
                times.append((self.path / name).stat().st_mtime)
        return max(times, default=None)

    def _trouble(self, facts: RunFacts) -> dict[str, Any] | None:
        if not facts.alerts:
            return None
        last = facts.alerts[-1]
        return {"text": facts.trouble, "name": last.name, "step": last.step, "at": last.time}

    def _few_settings(self, facts: RunFacts) -> dict[str, Any]:
        flat = flattened(
            {"schedule": facts.config.get("schedule") or {}, "groups": facts.config.get("groups") or {}}
        )
        wanted = (
            "schedule.kind",
            "prompts_per_step",
            "max_staleness",
            "model",
            "learning_rate",
            "engine",
        )
        return {key: value for key, value in flat.items() if key.endswith(wanted)} | {
            "seed": facts.config.get("seed")
        }

    def _left_s(self, facts: RunFacts) -> float | None:
        """Return the estimated seconds to the last step, from the median of the last twenty steps."""
        with self._lock:
            _, took = self._metrics.series("step_s")
        if facts.steps is None or not len(took):
            return None
        return round(float(np.median(took[-20:])) * max(0, facts.steps - facts.step), 1)

    @property
    def described(self) -> dict[str, Any]:
        """The run without its data: facts, latest values, settings, versions, and pages with data."""
        facts = self.facts
        last = facts.last
        schedule = facts.config.get("schedule")
        live = read_live(self.path)
        return {
            **self.summary,
            "why": facts.error,
            "version": facts.step,
            "max_staleness": schedule.get("max_staleness", 0) if isinstance(schedule, dict) else None,
            "staleness": _of_group(last, "mean_staleness"),
            "gap": _of_group(last, "mean_logprob_gap"),
            "alerts": len(facts.alerts),
            "samples": len(self.samples.table()),
            "rows_in_flight": sum(one.get("in_flight", 0) for one in nested(live, "graphs").values())
            if live
            else None,
            "workers": _workers(live, facts.config),
            "last": dict(last),
            "settings": {key: value for key, value in facts.config.items() if key != "versions"},
            "versions": facts.config.get("versions", {}),
            "pages": self._pages(facts),
            "directory": str(self.path),
        }

    def _pages(self, facts: RunFacts) -> list[str]:
        has = {
            "curves": bool(facts.last),
            "graph": self._has((GRAPH, f"{BUFFER}/{LOG}")),
            "timeline": self._has(PARTS["timeline"]),
            "samples": self._has((*PARTS["samples"], SAMPLES_ARCHIVE)),
            "buffer": self._has((f"{BUFFER}/{LOG}",)),
            "workers": bool(facts.config.get("placement")),
            "weights": any(name.endswith("weights_transfer_s") for name in self.metric_names),
            "alerts": bool(facts.alerts),
        }
        return [page for page, there in has.items() if there]

    def _has(self, names: tuple[str, ...]) -> bool:
        return any((self.path / name).exists() for name in names)

    @property
    def alerts(self) -> list[dict[str, Any]]:
        """All alerts, latest first."""
        return [
            {
                "step": alert.step,
                "at": alert.time,
                "kind": "error" if alert.ends else "warning",
                "rule": alert.name,
                "text": alert.text,
                "advice": None,
                "ends": alert.ends,
            }
            for alert in reversed(self.facts.alerts)
        ]

    @property
    def evaluations(self) -> list[str]:
        """Names of the evaluations."""
        return self._evaluations_of(self.facts)

    def _evaluations_of(self, facts: RunFacts) -> list[str]:
        graphs = facts.config.get("graphs")
        return [str(name) for name in graphs if name != TRAIN] if isinstance(graphs, dict) else []

    @property
    def metric_names(self) -> list[str]:
        with self._lock:
            self._metrics.refresh()
            return self._metrics.names

    def curves(
        self, names: list[str], axis: Axis, points: int, window: tuple[float, float] | None = None
    ) -> list[dict[str, Any]]:
        """Return each metric with x, y and its last value. Unknown metrics are left out."""
        found: list[dict[str, Any]] = []
        with self._lock:
            self._metrics.refresh()
            for name in names:
                steps, _ = self._metrics.series(name)
                if not len(steps):
                    continue
                x, y = curve(self._metrics, name, axis, points, window)
                x_s, y_s = numbers(x, 9), numbers(y)
                last = {"x": x_s[-1], "y": y_s[-1]} if x_s else None
                found.append(
                    {"run": self.name, "name": name, "x": x_s, "y": y_s, "last": last, "of": len(steps)}
                )
        return found

    def marks(self, axis: Axis) -> list[dict[str, Any]]:
        """Return events with their positions on an axis."""
        facts = self.facts
        kept = [
            int(path.name.rpartition("_")[2]) for path in complete_checkpoints(self.path / CHECKPOINTS)
        ]
        with self._lock:
            found = marks(self._metrics, facts.config, facts.alerts, kept)
            places = numbers(
                axis_of(self._metrics, np.array([float(mark["step"]) for mark in found]), axis), 9
            )
        return [{"run": self.name, "x": x, **mark} for x, mark in zip(places, found, strict=True)]

    @property
    def damage(self) -> list[str]:
        """Files that cannot be read."""
        with self._lock:
            found = [self._metrics.damage, self._calls.damage]
        return [*(text for text in found if text), *self.samples.damage[:5]]


def _workers(live: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    if live:
        return sum(one["ranks"] for one in live["groups"].values())
    places = nested(config, "placement")
    return sum(
        ranks if isinstance(ranks := nested(places, name).get("ranks"), int) else 1 for name in places
    )


def _of_group(row: Mapping[str, float], metric: str) -> float | None:
    """Return a training metric from any group that measured it, or None."""
    name = metric_of(row, metric)
    return None if name is None else row[name]
