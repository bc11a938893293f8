"""The Grafana dashboard of a run, over the metrics that Prometheus reads from Ray.

`python docs/generate/grafana.py > docs/grafana.json` writes it.
"""

from __future__ import annotations

import json
from typing import Any

from weft.controllers.backends.ray_backend import labelled

PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "none", ("reward/mean", "reward/std")),
    ("Evaluations", "none", ("eval/reward/mean",)),
    ("Groups without signal", "percentunit", ("groups_without_signal",)),
    ("Response length", "none", ("rollout/response_length",)),
    ("Truncated responses", "percentunit", ("rollout/truncation_rate",)),
    ("Entropy (nats a token)", "none", ("actor/entropy",)),
    ("Divergence (nats a token)", "none", ("actor/approx_kl", "actor/kl")),
    ("Clipped tokens", "percentunit", ("actor/clip_fraction",)),
    (
        "Generator and trainer apart (nats a token)",
        "none",
        ("actor/mean_logprob_gap", "actor/max_logprob_gap"),
    ),
    ("Staleness (versions)", "none", ("actor/mean_staleness", "actor/max_staleness")),
    ("Loss", "none", ("actor/loss", "critic/loss")),
    ("Gradient norm", "none", ("actor/grad_norm", "critic/grad_norm")),
    ("Tokens a second", "none", ("tokens_per_s",)),
    ("Seconds a step", "s", ("step_s", "checkpoint_pause_s")),
    ("Idle share", "percentunit", ("rollout/idle_share", "reward/idle_share", "actor/idle_share")),
    ("Failures so far", "none", ("replaced_workers", "requeued_rows", "failed_rows")),
)
"""Title, Grafana unit, and metrics of each panel. Groups have the names of the examples."""
WIDTH, HEIGHT = 12, 8
"""Size of a panel; a row is 24 wide."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the form that Grafana imports."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    run = {
        "name": "run",
        "type": "query",
        "datasource": source,
        "query": "label_values(ray_weft_step, run)",
        "refresh": 2,
        "sort": 2,
    }
    return {
        "title": "Weft",
        "uid": "weft",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, run]
        },
        "panels": [_panel(number, *panel, source=source) for number, panel in enumerate(PANELS)],
    }


def _panel(
    number: int, title: str, unit: str, metrics: tuple[str, ...], *, source: dict[str, str]
) -> dict[str, Any]:
    targets = []
    for ref, metric in zip("ABCDEFG", metrics, strict=False):
        gauge, evaluation = labelled(metric)
        which = '!=""' if evaluation else '=""'
        legend = "{{evaluation}}" if evaluation else metric
        query = f'ray_{gauge}{{run="$run",evaluation{which}}}'
        targets.append({"refId": ref, "expr": query, "legendFormat": legend, "datasource": source})
    place = {"x": WIDTH * (number % 2), "y": HEIGHT * (number // 2), "w": WIDTH, "h": HEIGHT}
    defaults = {"unit": unit, "custom": {"drawStyle": "line", "showPoints": "auto"}}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
