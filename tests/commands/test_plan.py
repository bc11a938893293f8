"""`weft plan`: what a run will be; nothing is started, and nothing is written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os
from pathlib import Path
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo
import weft


class Settings(weft.Config):
    steps: int = 3
    seed: int = 0
    writes: bool = False
    out: Path = Path("out")


def main(settings: Settings) -> None:
    if settings.writes:
        Path("made").write_text("something")
    rollout, reward, actor = weft.group(ToyRollout), weft.group(ToyReward), weft.group(ToyActor)
    rollout.follows(actor)
    training = toy_grpo(prompts(8), rollout=rollout, reward=reward, actor=actor, n=4)
    schedule = weft.Synchronous(steps=settings.steps, prompts_per_step=6)
    with weft.Driver(training, schedule=schedule, seed=settings.seed) as driver:
        driver.run()
    print("it ran")


raise SystemExit(weft.launch(main))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "settings.toml").write_text("seed = 7\n")
    return tmp_path


def plan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    toys = str(ROOT / "tests" / "controllers")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([toys, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-B", "-m", "weft", "plan", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_settings_have_their_origins_and_a_step_its_sizes(folder: Path):
    done = plan(folder, "--json", "train.py", "--config", "settings.toml", "--steps", "9")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: each["origin"] for name, each in found["settings"].items()} == {
        "steps": "--steps 9",
        "seed": "settings.toml:1",
        "writes": "default",
        "out": "default",
    }
    assert (found["step"]["prompts"], found["step"]["samples"], found["step"]["rows"]) == (6, 4, 24)
    [update] = found["step"]["updates"]
    assert (update["node"], update["rows_per_replica"], update["optimizer_steps"]) == ("actor.update", 24, 1)
    assert found["schedule"]["steps"] == 9 and set(found["groups"]) == {
        "rollout",
        "reward",
        "actor",
        "functions",
        "recorder",
    }
    assert sorted(path.name for path in folder.iterdir()) == ["settings.toml", "train.py"]


def test_a_plan_is_written_for_a_person(folder: Path):
    lines = plan(folder, "train.py").stdout.splitlines()
    assert "  out = 'out'  (default)" in lines and "  actor: 1 rank on pool" in "\n".join(lines)


def test_a_script_that_writes_before_its_driver_is_told_where(folder: Path):
    done = plan(folder, "train.py", "--writes")
    assert done.returncode == 2
    assert "before it makes its driver, the script writes made (train.py:17), and weft plan starts and" in done.stderr
    assert not (folder / "made").exists()


def test_what_a_run_would_refuse_a_plan_refuses(folder: Path):
    done = plan(folder, "train.py", "--steps", "0")
    assert done.returncode == 2 and "Synchronous.steps: input should be greater than or equal to 1" in done.stderr
    (folder / "empty.py").write_text("print('nothing')\n")
    done = plan(folder, "empty.py")
    assert done.returncode == 2 and "empty.py made no weft.Driver" in done.stderr


@pytest.mark.slow
def test_an_example_is_planned_without_a_warm_start(tmp_path: Path):
    done = plan(tmp_path, "--json", str(ROOT / "examples" / "grpo_arithmetic.py"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"]["rows"] == 512 and found["groups"]["actor"]["ranks"] == 2
    assert found["groups"]["actor"]["checkpoint"] == found["checkpoint_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
