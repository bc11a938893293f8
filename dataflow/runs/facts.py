"""RunFacts: the state of a run, read from its directory, which may be damaged."""

from __future__ import annotations

import calendar
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..metric_names import metric_of
from ..safe_files import read_json
from ..untrusted_text import without_secrets
from .alerts import Alert, read_alerts
from .files import CONFIG, METRICS
from .lock import Holder, Life, life_of

MOST_CONFIG = 16 << 20
"""[bytes] Maximum size of a configuration file, which each request reads."""


@dataclass(frozen=True)
class RunFacts:
    path: Path
    life: Life
    holder: Holder | None
    config: Mapping[str, Any]
    """Configuration of the latest start; empty if unreadable."""
    last: Mapping[str, float]
    """Metrics of the last step; empty before the first step ends."""
    alerts: tuple[Alert, ...]
    damage: tuple[str, ...]

    @property
    def step(self) -> int:
        """Number of finished steps."""
        step = self.last.get("step", 0)
        return int(step) if math.isfinite(step) else 0

    @property
    def steps(self) -> int | None:
        """Number of steps in the schedule; None if unknown."""
        found = self.config.get("schedule")
        steps = found.get("steps") if isinstance(found, Mapping) else None
        return steps if isinstance(steps, int) else None

    @property
    def error(self) -> str | None:
        """The error that ended the latest start of the run, if any."""
        # Ignore errors of earlier starts.
        ended = bool(self.alerts) and self.alerts[-1].ends and self.alerts[-1].time >= self.since
        return self.alerts[-1].text if ended else None

    @property
    def since(self) -> float:
        """[s] Unix time when the latest driver took the run; 0 if unknown."""
        with suppress(ValueError):
            return calendar.timegm(
                time.strptime(self.holder.since if self.holder else "", "%Y-%m-%d %H:%M:%S UTC")
            )
        return 0.0

    @property
    def status(self) -> str:
        """One of running, done, stopped (before the last step), failed, killed, empty, unknown."""
        if self.life is Life.ALIVE:
            return "running"
        if self.life is Life.DEAD:
            return "killed"
        if self.life is Life.UNKNOWN:
            return "unknown" if self.config or self.last else "empty"
        if self.error is not None:
            return "failed"
        return "done" if self.steps is not None and self.step >= self.steps else "stopped"

    @property
    def trouble(self) -> str:
        """First line of the last alert; empty if there is none."""
        return self.alerts[-1].text.partition("\n")[0] if self.alerts else ""

    @property
    def reward(self) -> float | None:
        """Mean reward of the last step; None for methods without rewards, such as SFT and DPO."""
        return self.last_of("mean")

    @property
    def loss(self) -> float | None:
        return self.last_of("loss")

    def last_of(self, metric: str) -> float | None:
        """Return a metric of the last step, from any worker group that measured it."""
        name = metric_of(self.last, metric)
        return None if name is None else self.last[name]

    @property
    def for_programs(self) -> dict[str, Any]:
        return {
            "run": self.path.name,
            "path": str(self.path),
            "status": self.status,
            "step": self.step,
            "steps": self.steps,
            "time_s": self.last.get("time_s"),
            "reward": self.reward,
            "loss": self.loss,
            "trouble": self.trouble or None,
            "holder": None if self.holder is None else str(self.holder),
            "damage": list(self.damage),
        }


def facts_of(run: Path, last: Mapping[str, float] | None = None) -> RunFacts:
    """Return the state of a run. Never writes, and raises no error for a damaged run. Pass `last`,
    the metrics of the last step, if they are already known."""
    damage: list[str] = []
    life, holder = life_of(run)
    last = _last(run, damage) if last is None else last
    config = _config(run, damage)
    return RunFacts(run, life, holder, config, last, tuple(read_alerts(run)), tuple(damage))


def _config(run: Path, damage: list[str]) -> Mapping[str, Any]:
    try:
        return without_secrets(read_json(run / CONFIG, MOST_CONFIG))
    except FileNotFoundError:
        pass
    except UserError as error:  # the message names the file
        damage.append(str(error))
    except OSError as error:
        damage.append(f"{run / CONFIG}: {error}")
    return {}


def _last(run: Path, damage: list[str]) -> Mapping[str, float]:
    import pyarrow as pa
    import pyarrow.compute as pc

    from .follow import FollowedTable
    from .tables import VALUES

    table = FollowedTable(run, METRICS)
    try:
        news = table.news()
        if news.table is not None:
            rows = news.table.slice(max(0, len(news.table) - 1)).to_pylist()
            values = [(name, value) for row in rows for name, value in row.items()]
            return {name: float(value) for name, value in values if isinstance(value, int | float)}
        found = pa.Table.from_batches(news.batches, VALUES)
        steps = [step for step in found["step"].to_pylist() if step is not None]
        last = found.filter(pc.field("step") == max(steps, default=0.0))
        return dict(zip(last["name"].to_pylist(), last["value"].to_pylist(), strict=True))
    except (OSError, ValueError, pa.ArrowException) as error:
        damage.append(f"{table.path}: {error}")
        return {}
