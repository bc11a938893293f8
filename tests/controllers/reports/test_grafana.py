"""The Grafana dashboard queries metrics that runs write, by their Prometheus names."""

import json
import re
from pathlib import Path

from grafana import PANELS, dashboard

from weft.controllers.backends.ray_backend import labelled
from weft.dataflow.metric_names import undeclared

FILE = Path(__file__).resolve().parents[3] / "docs" / "grafana.json"


def test_the_file_is_that_of_the_module():
    assert json.loads(FILE.read_text()) == dashboard(), (
        "run: python docs/generate/grafana.py > docs/grafana.json"
    )


def test_each_query_names_a_metric_of_the_table():
    metrics = [metric for _, _, metrics in PANELS for metric in metrics]
    assert undeclared(metrics) == []
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    assert len(asked) == len(metrics)
    for query, metric in zip(asked, metrics, strict=True):
        assert re.match(r'ray_(\w+)\{run="\$run",evaluation(=""|!="")\}$', query)
        assert query.startswith(f"ray_{labelled(metric)[0]}{{")


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    cells = {(p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])}
    assert len(cells) == sum(p["w"] * p["h"] for p in places) and max(x for x, _ in cells) == 23
