"""Names of metrics: under which name a run writes one, which entry of the table it has, and the page of the table.

`python -m weft.dataflow.metric_names > docs/metrics.md` writes the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from .errors import UserError, nearest
from .metric_table import SECTIONS, MetricEntry

FUNCTIONS = "functions"
"""The worker group that runs the pure functions of graphs. Users do not name it, and it names no metric of the table."""
DRIVER = "driver"
"""Name of the driver among the processes of a run."""
FATES = ("wait", "mask", "requeue", "drop")
_FILLED = {"FATE": "|".join(FATES), "COLUMN": r"\w+", "K": r"\d+"}
"""What the capital letters of a name stand for, as patterns."""


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split("([A-Z]+)", name)
    return re.compile("".join(f"(?:{_FILLED[part]})" if part in _FILLED else re.escape(part) for part in parts))


def entries() -> Iterable[MetricEntry]:
    """All of the table."""
    return (entry for section in SECTIONS for entry in section.entries)


@cache
def entry_named(name: str) -> MetricEntry | None:
    """The entry of a metric without the names of its evaluation and group; None: the table has none."""
    exact = (entry for entry in entries() if entry.name == name)
    return next(exact, None) or next((entry for entry in entries() if _pattern(entry.name).fullmatch(name)), None)


def written_name(group: str, name: str) -> str:
    """The name under which a run writes what a worker group measured: behind the group's, unless it is a number of the table that a
    function of Weft measured.

    >>> written_name("actor", "loss"), written_name("functions", "groups_without_signal"), written_name("functions", "my_own")
    ('actor/loss', 'groups_without_signal', 'functions/my_own')
    """
    entry = entry_named(name) if group == FUNCTIONS else None
    return f"{group}/{name}" if entry is None or entry.place == "group" else name


def is_of_group(name: str, metric: str) -> bool:
    """Whether a name is that of a metric of training (not of an evaluation).

    >>> is_of_group("rollout/truncation_rate", "truncation_rate"), is_of_group("eval/rollout/truncation_rate", "truncation_rate")
    (True, False)
    """
    entry = entry_named(metric)
    if name == metric:
        return True
    return (entry is None or entry.place != "run") and name.count("/") == 1 and name.endswith(f"/{metric}")


def untimed(row: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step without those that two runs differ in because one took longer.

    >>> untimed({"step": 1.0, "step_s": 0.5, "actor/idle_share": 0.1, "actor/loss": 2.0})
    {'step': 1.0, 'actor/loss': 2.0}
    """
    timed = [entry.name for entry in entries() if entry.is_timed]
    return {name: value for name, value in row.items() if name.rpartition("/")[2] not in timed}


def entry_of(name: str) -> MetricEntry:
    """The entry of a metric as a run writes it, behind the names of an evaluation and a group.

    >>> entry_of("critic/loss").unit, entry_of("eval/stale/drop").name
    ('of the loss', 'stale/FATE')

    Raises:
        UserError: the table has none; it names the nearest.

    >>> entry_of("actor/entorpy")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: no metric is called 'actor/entorpy'; did you mean 'entropy'?
    """
    parts = name.split("/")
    for first in range(len(parts)):
        if entry := entry_named("/".join(parts[first:])):
            return entry
    raise UserError(
        f"no metric is called {name!r}{nearest(parts[-1], [entry.name for entry in entries()])}".replace("??", "?")
    )


def undeclared(names: Iterable[str]) -> list[str]:
    """Those of some metrics, as a run writes them, that the table does not have.

    >>> undeclared(["actor/loss", "eval/reward/mean", "reward/form"])
    ['reward/form']
    """
    return [name for name in names if not any(entry_named(tail) for tail in _tails(name))]


def _tails(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[first:]) for first in range(len(parts))]


SCORES = {
    r"pass@1": "pass@1",
    r"avg@\d+": "mean reward",
    r"(.*/)?reward/mean": "mean reward",
    r"(.*/)?mean": "mean reward",
    r"(.*/)?preference_accuracy": "preference accuracy",
}
"""Pattern of a metric -> label of the score. The first pattern that an evaluation has is its score, and more is better."""


def score_label(name: str) -> str | None:
    """The label of an evaluation's score, or None if the metric is not one of `SCORES`.

    Args:
        name: the metric's name without the evaluation's.

    >>> score_label("pass@1"), score_label("avg@8"), score_label("judge/mean"), score_label("loss")
    ('pass@1', 'mean reward', 'mean reward', None)
    """
    return next((label for pattern, label in SCORES.items() if re.fullmatch(pattern, name)), None)


# The page

INTRODUCTION = """\
# Metrics

Every number that a run writes, one section for what is read together. This page is made from the table in `dataflow/metric_table.py`
(`python -m weft.dataflow.metric_names > docs/metrics.md`), and a test compares the two.

A metric that a worker group measures is written behind the group's name: `actor/entropy`, `rollout/response_length`. One of an
evaluation is written behind the evaluation's: `eval/reward/mean`, `eval/rollout/response_length`. Capital letters stand for what a run
fills in. What your own rewards, losses and workers measure is passed on under `GROUP/NAME`, and that of your own functions under
`functions/NAME`; these are not in the table.

A metric is missing in a step that did not measure it. `metrics.parquet` has a row for each step and a column for each metric; the same
numbers go to every tracker ([watching.md](watching.md)).
"""


def page() -> str:
    """`docs/metrics.md`."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        rows = [
            f"| `{_shown(e)}` | {e.unit} | {e.meaning.replace('|', chr(92) + '|')} | {e.good or '-'} | {e.bad or '-'} |"
            for e in section.entries
        ]
        head = "| metric | unit | what it is | good | bad |\n|---|---|---|---|---|"
        parts.append("\n".join([f"## {section.title}\n\n{section.text}\n", head, *rows]) + "\n")
    return "\n".join(parts)


def _shown(entry: MetricEntry) -> str:
    return {"run": entry.name, "group": f"GROUP/{entry.name}", "either": f"[GROUP/]{entry.name}"}[entry.place]


if __name__ == "__main__":
    print(page(), end="")
