"""A step is one update, however often its run is killed and resumed."""

import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from killed_simulations import STEPS, lives, random_run, updates
from toy import centred, odd_prompts, toy_dapo, toy_grpo, toy_ppo

from weft.controllers.loop import admission
from weft.controllers.schedule import Asynchronous
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.log_rules import Rule
from weft.dataflow.errors import StalledError
from weft.dataflow.runs.alerts import read_alerts
from weft.dataflow.tracing import graph


def one_update_a_step(run: Path, groups: tuple[str, ...] = ("actor",)) -> None:
    steps = updates(run)
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))
    assert [dict(made) for _, made in steps] == [dict.fromkeys(groups, 1)] * STEPS


@pytest.mark.parametrize(
    "seeds",
    [
        range(2),
        pytest.param(range(2, 30), marks=pytest.mark.thorough),
        pytest.param(range(30, 400), marks=pytest.mark.slow),
    ],
    ids=["two", "few", "many"],
)
def test_runs_killed_at_random_moments_end_with_one_update_in_each_step(seeds: range, tmp_path: Path):
    for seed in seeds:
        chance = random.Random(seed)
        root = tmp_path / str(seed)
        root.mkdir()
        settings = random_run(chance)
        lives(root, chance, [chance.randint(3, 150) for _ in range(5)], **settings)
        one_update_a_step(
            root / "run", ("actor", "critic") if settings["graph"].__name__ == "toy_ppo" else ("actor",)
        )
        report = check_log(root / "run" / "buffer")
        assert not report.violations, (seed, settings, report.violations[:3])


@graph
def filtered_ppo(prompts: Any, *, rollout: Any, reward: Any, critic: Any, actor: Any, n: int = 2) -> Any:
    samples = centred(critic.values(reward.score(odd_prompts(rollout.generate(prompts, n=n)))))
    return critic.update(samples), actor.update(samples)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(6), marks=pytest.mark.thorough),
        pytest.param(range(6, 200), marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_short_steps_of_killed_runs_are_one_update(
    seeds: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(admission, "MAX_REFILLS", 2)
    shortened = stalled = 0
    for seed in seeds:
        chance = random.Random(seed)
        run = tmp_path / str(seed) / "run"
        run.parent.mkdir()
        settings: dict[str, Any] = random_run(chance) | {"graph": toy_dapo if seed % 4 else filtered_ppo}
        size = {"prompts_per_step": chance.randint(3, 8)}
        settings["schedule"] = settings["schedule"].model_copy(update=size)
        kills = [chance.randint(3, 100) for _ in range(5)]
        updated = ("actor",) if seed % 4 else ("actor", "critic")
        try:
            lives(run.parent, chance, kills, keep=chance.choice([0.25, 0.35]), **settings)
            one_update_a_step(run, updated)
        except StalledError:  # no group of a step passed, or too few to complete a batch
            stalled += 1
            assert all(dict(made) == dict.fromkeys(updated, 1) for _, made in updates(run))
        report = check_log(run / "buffer")
        assert not report.violations, (seed, settings, report.violations[:3])
        shortened += any(alert.name == "short_step" for alert in read_alerts(run))
    # About a half is shortened and a third stalls. Threads decide some of them.
    assert shortened >= len(seeds) / 4 and stalled <= len(seeds) * 2 / 3


def faulty_run(root: Path, name: str) -> None:
    """Unpack a run with two updates in one step. An earlier version of Weft made it, with log
    format 5."""
    with tarfile.open(Path(__file__).parent / "second_update" / f"{name}.tar.xz") as archive:
        archive.extractall(root, filter="data")


REQUEUE: dict[str, Any] = {"steps": STEPS, "partial_rollouts": "requeue"}
FAULTY: dict[str, dict[str, Any]] = {
    "grpo": {
        "graph": toy_grpo,
        "schedule": Asynchronous(**REQUEUE, prompts_per_step=3, max_staleness=1),
        "evaluate": True,
    },
    "ppo": {"graph": toy_ppo, "schedule": Asynchronous(**REQUEUE, prompts_per_step=2, max_staleness=2)},
}


@pytest.mark.parametrize("on_stale", ["wait", "mask", "requeue", "drop"])
@pytest.mark.parametrize(("name", "step"), [("grpo", 9), ("ppo", 4)])
def test_a_run_with_a_second_update_of_a_step_resumes_normally(
    tmp_path: Path, name: str, step: int, on_stale: str
):
    faulty_run(tmp_path, name)
    lives(tmp_path, random.Random(0), [], on_stale=on_stale, first=20, **FAULTY[name])
    steps = updates(tmp_path / "run")
    assert [number for number, _ in steps] == list(range(1, STEPS + 1))
    assert [number for number, made in steps if set(made.values()) != {1}] == [step], (
        "those of the resumed run are right"
    )
    violations = check_log(tmp_path / "run" / "buffer").violations
    assert {violation.rule for violation in violations} == {Rule.ONE_UPDATE, Rule.OLDEST_FIRST}
    (second,) = [violation for violation in violations if violation.rule is Rule.ONE_UPDATE]
    assert f"version {step + 1} of 'actor' is update 2 of step {step}" in second.text
