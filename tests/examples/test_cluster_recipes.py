"""Cluster recipes use existing files and options, and store nothing in folders that vanish with a
node."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from weft.controllers.backends.jobs import RESUME, ROOT

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = REPOSITORY / "examples" / "clusters"
RUNS = ("rayjob.yaml", "slurm.sh", "skypilot.yaml")


def commands(text: str) -> list[list[str]]:
    """Return the words of each call of an example."""
    return [shlex.split(found) for found in re.findall(r"python (examples/\w+\.py[^\n$]*)", text)]


@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_keeps_its_runs_resumes_and_uses_a_token(recipe: str):
    text = (RECIPES / recipe).read_text()
    assert f"{RESUME}" in text and re.search(rf"{ROOT}(: |=)\"?(/|\$PWD)", text), "an absolute folder"
    assert "token" in text.lower() and "RAY_AUTH_MODE=disabled" not in text


@pytest.mark.parametrize("recipe", ("rayjob.yaml", "skypilot.yaml"))
def test_an_example_that_a_recipe_runs_knows_its_options(recipe: str):
    yaml.safe_load((RECIPES / recipe).read_text())
    [(script, *words)] = commands((RECIPES / recipe).read_text())
    fields = (REPOSITORY / "examples" / "real_task.py").read_text() + (REPOSITORY / script).read_text()
    for option in (word.removeprefix("--") for word in words if word.startswith("--")):
        assert re.search(rf"^    {option.replace('-', '_')}: ", fields, re.M), option


def test_the_pods_of_a_rayjob_live_longer_than_a_checkpoint_takes():
    job = yaml.safe_load((RECIPES / "rayjob.yaml").read_text())["spec"]
    wait_s = int(yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    cluster = job["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > wait_s


def test_the_batch_script_is_bash_and_the_image_installs_extras_that_exist():
    assert subprocess.run(["bash", "-n", RECIPES / "slurm.sh"], check=False).returncode == 0
    [extras] = re.findall(r'"\.\[([\w,]+)\]"', (RECIPES / "Dockerfile").read_text())
    known = (REPOSITORY / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = ", known, re.M) for extra in extras.split(","))
