"""Prometheus reads the metrics of a run from its Ray cluster."""

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from grafana import PANELS
from toy import prompts, toy_evaluation, toy_grpo
from toy_runs import drive, handles

from weft.controllers.backends.ray_backend import RayBackend, labelled
from weft.controllers.driver import Evaluation

RUN = "measured"
QUERY = re.compile(r'(\w+)\{run="\$run",evaluation(=|!=)""\}')


def endpoint(port: int) -> dict[tuple[str, str], float]:
    """Return (gauge, evaluation) -> value for the run."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("ray_weft_") and f'run="{RUN}"' in line:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            found[line.split("{")[0], labels.get("evaluation", "")] = float(line.split()[-1])
    return found


def unanswered(shown: dict[tuple[str, str], float]) -> list[str]:
    """Return the queries of the Grafana dashboard that the endpoint cannot answer."""
    panels = json.loads((Path(__file__).resolve().parents[3] / "docs" / "grafana.json").read_text())[
        "panels"
    ]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {query: found.groups() for query in queries if (found := QUERY.fullmatch(query))}
    assert asked.keys() == {*queries}
    there = {(name, bool(evaluation)) for name, evaluation in shown}
    return [query for query, (name, sign) in asked.items() if (name, sign == "!=") not in there]


@pytest.mark.slow  # Ray updates its endpoint every 10 s
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_the_endpoint_shows_the_latest_step_and_evaluation(tmp_path: Path):
    import ray

    made = handles()
    training = toy_grpo(prompts(8), **made)
    accuracy = toy_evaluation(prompts(2), rollout=made["rollout"], reward=made["reward"])
    settings = {"trackers": ("prometheus",), "name": RUN, "evaluations": [Evaluation(accuracy, every=1)]}
    with drive(training, tmp_path, steps=2, backend=RayBackend(), **settings) as driver:
        metrics = driver.run()
        port = ray.nodes()[0]["MetricsExportPort"]
        if port <= 0:
            pytest.skip("this Ray has no agent that Prometheus can read: pip install 'ray[default]'")
        of_others = {
            metric: 0.5 for _, _, names in PANELS for metric in names if metric not in metrics[-1]
        }
        RayBackend().report(RUN, of_others)  # metrics of workers with a model
        deadline = time.monotonic() + 120
        while ((shown := endpoint(port)).get(("ray_weft_step", "")) != 2.0 or unanswered(shown)) and (
            time.monotonic() < deadline
        ):
            time.sleep(1)
    assert not unanswered(shown)
    assert {name for name, _ in shown} >= {f"ray_{labelled(name)[0]}" for row in metrics for name in row}
    assert shown["ray_weft_step", ""] == 2.0
    assert shown["ray_weft_reward_mean", ""] == pytest.approx(metrics[-1]["reward/mean"])
    assert shown["ray_weft_reward_mean", "eval"] == pytest.approx(metrics[-1]["eval/reward/mean"])
    assert shown["ray_weft_rollout_idle_share", ""] == pytest.approx(metrics[-1]["rollout/idle_share"])
