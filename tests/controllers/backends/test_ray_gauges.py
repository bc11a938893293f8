"""Prometheus reads the metrics of a run at the endpoint of its Ray cluster."""

import re
import time
import urllib.request
from pathlib import Path

import pytest
from toy import prompts, toy_evaluation, toy_grpo
from toy_runs import drive, handles

from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Evaluation


def endpoint(port: int) -> dict[tuple[str, str], float]:
    """(gauge, evaluation) -> value, of the run `measured`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("ray_weft_") and 'run="measured"' in line:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            found[line.split("{")[0], labels.get("evaluation", "")] = float(line.split()[-1])
    return found


@pytest.mark.slow  # Ray brings metrics to its endpoint every 10 s
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_the_endpoint_shows_the_latest_step_and_evaluation(tmp_path: Path):
    import ray

    made = handles()
    training = toy_grpo(prompts(8), **made)
    accuracy = toy_evaluation(prompts(2), rollout=made["rollout"], reward=made["reward"])
    settings = {"trackers": ("prometheus",), "name": "measured", "evaluations": [Evaluation(accuracy, every=1)]}
    with drive(training, tmp_path, steps=2, backend=RayBackend(), **settings) as driver:
        metrics = driver.run()
        port = ray.nodes()[0]["MetricsExportPort"]
        if port <= 0:
            pytest.skip("this Ray has no agent that Prometheus can read: pip install 'ray[default]'")
        deadline = time.monotonic() + 120
        while (shown := endpoint(port)).get(("ray_weft_step", "")) != 2.0 and time.monotonic() < deadline:
            time.sleep(1)
    assert shown["ray_weft_step", ""] == 2.0
    assert shown["ray_weft_reward_mean", ""] == pytest.approx(metrics[-1]["reward/mean"])
    assert shown["ray_weft_reward_mean", "eval"] == pytest.approx(metrics[-1]["eval/reward/mean"])
    assert shown["ray_weft_rollout_idle_share", ""] == pytest.approx(metrics[-1]["rollout/idle_share"])
