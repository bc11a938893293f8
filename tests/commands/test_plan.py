"""`weft plan`: a summary of a future run, without starting or writing anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.__main__ import main

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
    prepares: bool = False
    out: Path = Path("out")


def main(settings: Settings) -> None:
    if settings.writes:
        Path("made").write_text("something")
    if settings.prepares:
        made = weft.prepared(settings.out, make=lambda: settings.out.write_text("slow"), sketch=lambda path: path.write_text("quick"))
        print("prepared:", made.read_text(), file=__import__("sys").stderr)
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
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([toys, *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    command = [sys.executable, "-B", "-m", "weft", "plan", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_settings_have_their_origins_and_a_step_its_sizes(folder: Path):
    done = plan(folder, "--json", "train.py", "--config", "settings.toml", "--steps", "9")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: each["origin"] for name, each in found["settings"].items()} == {
        "steps": "--steps 9",
        "seed": "settings.toml:1",
        "writes": "default",
        "prepares": "default",
        "out": "default",
    }
    assert (found["step"]["prompts"], found["step"]["rows"], found["step"]["time"]) == (6, 24, None)
    [update] = found["step"]["updates"]
    assert (update["node"], update["rows_per_replica"], update["optimizer_steps"]) == (
        "actor.update",
        24,
        1,
    )
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
    assert "  out       out    default" in lines and max(map(len, lines)) < 140
    for said in (
        "  6 prompts × 4 → 24 rows",
        "  train  8 rows of prompts → rollout.generate(4) → reward.score → centred → actor.update",
        "  checkpoints  none",
    ):
        assert said in lines, lines
    assert any(line.startswith("  together ") and "host memory" in line for line in lines)


@pytest.mark.thorough
def test_a_machine_with_gpus_is_planned_for_without_one(folder: Path):
    script = folder / "train.py"
    placed = "placement={n: weft.Place(weft.ResourcePool('gpus', gpus=8), ranks=8) for n in ('rollout', 'actor')}"
    backend = "backend=weft.RayBackend()"
    script.write_text(SCRIPT.replace("schedule=schedule,", f"schedule=schedule, {placed}, {backend},"))
    done = plan(folder, "--json", "--machine", "8x80", "train.py")
    assert done.returncode == 0, done.stderr
    machine = json.loads(done.stdout)["machine"]
    assert (machine["gpus"], machine["gpu_bytes"]) == (8, 80 * 2**30)
    assert machine["planned_for"]
    script.write_text(SCRIPT)
    unused = plan(folder, "--machine", "8x80", "train.py").stdout
    assert "no GPU is used, but the machine has 8" in unused and "this machine has" not in unused
    mistyped = plan(folder, "--machin", "8x80", "train.py")
    assert (mistyped.returncode, mistyped.stderr) == (
        2,
        "error: there is no option --machin; did you mean '--machine'?\n",
    )
    wrong = plan(folder, "--machine", "80GB", "train.py")
    assert (
        wrong.returncode == 2
        and "--machine 80GB: give the number of GPUs and the GB of each, such as 1x80" in wrong.stderr
    )


SIMULATED = SCRIPT.replace(
    "schedule=schedule,", "schedule=schedule, backend=weft.Simulated(COSTS),"
).replace(
    "class Settings",
    """from weft.controllers.simulation.costs import CostModel, Generation, LinearCost

COSTS = CostModel(nodes={
    "rollout.generate": Generation(lengths=((4,),), decode_step_s=((1, 0.5), (24, 4.0))),
    "actor.update": LinearCost(fixed_s=1.0, per_row_s=0.5),
})


class Settings""",
)


@pytest.mark.thorough
def test_a_search_writes_a_placement_that_the_script_accepts(folder: Path):
    (folder / "train.py").write_text(SIMULATED)
    done = plan(folder, "--json", "--search", "--machine", "2x4x80", "train.py", "--steps", "9")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    seconds = [each["seconds"] for each in found["placements"]]
    assert (found["file"], found["machine"]) == ("plan.json", "2 nodes of 4 GPUs")
    assert 1 < len(seconds) <= 5 and seconds == sorted(seconds)
    best = found["placements"][0]["groups"]
    assert {each["ranks"] for each in best.values()} <= {4, 8}
    written = json.loads((folder / "plan.json").read_text())
    assert written["groups"] == best and written["predicted_step_s"] == seconds[0]
    planned = json.loads(plan(folder, "--json", "train.py", "--placement", "plan.json").stdout)
    assert {name: planned["groups"][name]["ranks"] for name in best} == {
        name: each["ranks"] for name, each in best.items()
    }
    said = plan(folder, "--search", "--out", "other.json", "train.py").stdout
    assert said.startswith("PLACEMENTS on the ") and "use it with --placement other.json" in said
    (folder / "train.py").write_text(SCRIPT)
    unknown = plan(folder, "--search", "train.py")
    assert unknown.returncode == 2 and "--search needs the costs of calls" in unknown.stderr


def test_the_cheapest_fleet_is_found_without_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prices = tmp_path / "prices.toml"
    prices.write_text(
        "load = [2, 20]\n[kinds.A10G]\nprice = 1.01\nrates = [2, 1]\n"
        "[kinds.A100]\nprice = 3.67\nrates = [20, 20]\n"
    )
    assert main(["plan", "--fleet", str(prices)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cheapest fleet: 1 A10G, 1 A100 for 4.68",
        "  slice 0: 2 requests/s on A10G",
        "  slice 1: 20 requests/s on A100",
    ]
    prices.write_text("load = 2\n")
    assert main(["plan", "--fleet", str(prices)]) == 2
    assert "the file has load = [requests per second" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "name a script, such as weft plan train.py" in capsys.readouterr().err


def test_preparations_of_a_script_are_sketched_and_reported(folder: Path):
    done = plan(folder, "train.py", "--prepares")
    assert done.returncode == 0, done.stderr
    assert (
        "prepared: quick" in done.stderr and "  makes out; this plan uses a sketch of it" in done.stdout
    )
    assert not (folder / "out").exists()
    (folder / "out").write_text("there")
    done = plan(folder, "train.py", "--prepares")
    assert "prepared: there" in done.stderr and "BEFORE THE RUN" not in done.stdout


def test_a_script_that_writes_before_its_driver_is_refused_with_the_place(folder: Path):
    done = plan(folder, "train.py", "--writes")
    assert done.returncode == 2
    assert (
        "before it makes its driver, the script writes made (train.py:18), but weft plan must not"
        in done.stderr
    )
    assert not (folder / "made").exists()


@pytest.mark.thorough
def test_a_plan_refuses_the_same_as_a_run(folder: Path):
    done = plan(folder, "train.py", "--steps", "0")
    assert (
        done.returncode == 2
        and "Synchronous.steps: input should be greater than or equal to 1" in done.stderr
    )
    (folder / "empty.py").write_text("print('nothing')\n")
    done = plan(folder, "empty.py")
    assert done.returncode == 2 and "empty.py made no weft.Driver" in done.stderr


EXAMPLES = {
    "grpo_arithmetic": ("arithmetic-0/model",),
    "ppo_arithmetic": ("arithmetic-0/model",),
    "dpo_preferences": ("arithmetic-0/model",),
    "rloo_lora": ("arithmetic-0/model",),
    "sft_then_dpo": ("sft_then_dpo-0/untrained",),
    "grpo_gsm8k --tiny": ("tiny_qwen3",),
    "ppo_gsm8k --tiny": ("tiny_qwen3",),
    "dpo_pairs --tiny": ("tiny_qwen3",),
}
"""Example with flags -> the file it would make first."""


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_planned_without_training_or_writing(tmp_path: Path, example: str):
    name, *flags = example.split()
    done = plan(tmp_path, "--json", str(ROOT / "examples" / f"{name}.py"), *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["groups"]["actor"]["ranks"] == 2 and not any(
        g["unknown"] for g in found["groups"].values()
    )
    assert found["groups"]["actor"]["phases"]["update"]["activations"] > 0
    assert found["step"]["updates"] and 0 < found["sample_bytes"] < found["disk_bytes"]
    assert [made in said for made, said in zip(EXAMPLES[example], found["sketched"], strict=False)] == [
        True
    ]
    assert list(tmp_path.iterdir()) == []
