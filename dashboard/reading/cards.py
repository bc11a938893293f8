"""Cards: the dozen curves that matter, in the order in which they are looked at; and what each metric means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...dataflow.metric_names import SCORES, entry_named, score_label
from ...dataflow.metric_table import SECTIONS


@dataclass(frozen=True)
class CardKind:
    """A card that a run may have."""

    id: str
    title: str
    metric: str
    """Patterns of the shown metrics, without evaluation and group. Each matching metric is a line."""
    spread: str = ""
    """The metric of the same group that is its standard deviation."""
    beside: str = ""
    """Pattern of a metric of the same group that is told beside the value."""
    scope: Literal["training", "evaluation"] = "training"
    floor: float | None = 0.0
    """Where the scale begins, if nothing is below it; None: at the lowest value."""
    form: Literal["number", "share", "bytes", "count", "small"] = "number"
    several: bool = False
    """It has a line for each group."""


KINDS = (
    CardKind("reward", "reward", "reward/mean|mean", spread="std", floor=None),
    CardKind("loss", "loss", "loss", floor=None),
    CardKind("accuracy", "held-out", "|".join(SCORES), scope="evaluation"),
    CardKind("signal", "groups without signal", "groups_without_signal", form="share"),
    CardKind("entropy", "entropy", "entropy"),
    CardKind("kl", "KL from the reference", "kl"),
    CardKind("length", "response length", "response_length", beside="response_length_p95", form="count"),
    CardKind("truncated", "truncated", "truncation_rate", form="share"),
    CardKind("gap", "log-probability gap", "mean_logprob_gap", beside="max_logprob_gap", form="small"),
    CardKind("ratio", "generator ratio", "mean_generator_ratio", beside="max_generator_ratio", floor=None),
    CardKind("clipped", "clip fraction", "clip_fraction", form="share"),
    CardKind("staleness", "staleness", "mean_staleness", beside="max_staleness"),
    CardKind("grad_norm", "gradient norm", "grad_norm"),
    CardKind("throughput", "tokens/s", "tokens_per_s", form="count"),
    CardKind("idle", "idle share", "idle_share", form="share", several=True),
    CardKind("memory", "memory", "device_bytes|resident_bytes", form="bytes", several=True),
    CardKind("pairs", "preference accuracy", "preference_accuracy", form="share"),
)
"""In the order of the page."""


def cards(names: Sequence[str], evaluations: Sequence[str]) -> list[dict[str, Any]]:
    """The cards for these metrics; a kind that none of them belongs to is left out.

    Args:
        names: metrics that runs have measured.
        evaluations: names of their evaluations.

    >>> found = cards(["reward/mean", "reward/std", "eval/reward/mean", "actor/idle_share", "rollout/idle_share"], ["eval"])
    >>> [(card["id"], card["names"]) for card in found]
    [('reward', ['reward/mean']), ('accuracy', ['eval/reward/mean']), ('idle', ['actor/idle_share', 'rollout/idle_share'])]
    >>> found[0]["spread"], found[1]["title"]
    ('reward/std', 'held-out mean reward')
    """
    there = set(names)
    held_out = [name for name in names if name.partition("/")[0] in evaluations]
    training = [name for name in names if name not in set(held_out)]
    found: list[dict[str, Any]] = []
    for kind in KINDS:
        shown = _shown(kind, held_out if kind.scope == "evaluation" else training)
        if shown:
            found.append(_card(kind, shown, there))
    has_reward = any(card["id"] == "reward" for card in found)
    return [card for card in found if not (card["id"] == "loss" and has_reward)]


def _shown(kind: CardKind, names: Sequence[str]) -> list[str]:
    if kind.scope == "evaluation":  # each by the first pattern that it has
        each = dict.fromkeys(name.partition("/")[0] for name in names)
        found = (_matching(kind, [name for name in names if name.startswith(f"{one}/")]) for one in each)
        return [own[0] for own in found if own]
    own = _matching(kind, names)
    return sorted(own) if kind.several else own[:1]


def _matching(kind: CardKind, names: Sequence[str]) -> list[str]:
    """The metrics that match the first matching pattern of a kind, the group `reward` first."""
    for pattern in kind.metric.split("|"):
        behind = re.compile(rf"(?:[^/]+/)*{pattern}")
        own = [name for name in names if behind.fullmatch(name) and not name.endswith(("_low", "_high"))]
        if kind.scope == "training":  # not those of parts of a reward, such as reward/format/mean
            own = [name for name in own if name.count("/") <= 1]
        if own:
            return sorted(own, key=lambda name: name != f"reward/{pattern}")
    return []


def _card(kind: CardKind, names: list[str], there: set[str]) -> dict[str, Any]:
    group = names[0].rpartition("/")[0]

    def beside(metric: str) -> str | None:
        name = f"{group}/{metric}" if group else metric
        return name if metric and name in there else None

    lost = [f"{name.partition('/')[0]}/prompts_lost" for name in names] if kind.scope == "evaluation" else []
    bands = {name: [f"{name}_low", f"{name}_high"] for name in names if f"{name}_low" in there}
    return {
        "id": kind.id,
        "title": _title(kind, names),
        "names": names,
        "spread": beside(kind.spread),
        "beside": beside(kind.beside),
        "lost": [name for name in lost if name in there],
        "bands": bands,
        "floor": kind.floor,
        "form": kind.form,
        **meaning(names[0]),
    }


def _title(kind: CardKind, names: Sequence[str]) -> str:
    """The title of a card. Evaluations add the names of their scores, such as pass@1 or mean reward."""
    labels = (score_label(name.partition("/")[2]) for name in names if kind.scope == "evaluation")
    return f"{kind.title} {', '.join(dict.fromkeys(filter(None, labels)))}".rstrip()


def meaning(name: str) -> dict[str, Any]:
    """What is known of a metric as a run writes it: unit, meaning, good, bad, and which direction is better.

    >>> meaning("actor/entropy")["unit"], meaning("reward/mean")["direction"], meaning("my/own")
    ('nats/token', 'up', {'unit': '', 'meaning': '', 'good': '', 'bad': '', 'direction': 'none', 'section': ''})
    """
    parts = name.split("/")
    entry = next((e for k in range(len(parts)) if (e := entry_named("/".join(parts[k:])))), None)
    if entry is None:
        return {"unit": "", "meaning": "", "good": "", "bad": "", "direction": "none", "section": ""}
    section = next(s.title for s in SECTIONS if entry in s.entries)
    return {
        "unit": entry.unit,
        "meaning": entry.meaning,
        "good": entry.good,
        "bad": entry.bad,
        "direction": _direction(entry.good),
        "section": section,
    }


def _direction(good: str) -> str:
    if good.startswith(("rises", "as high", "above")):
        return "up"
    return "down" if good.startswith(("falls", "below", "near 0", "few")) or good == "0" else "none"
