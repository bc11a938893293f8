"""A reward that changes the working directory breaks nothing: paths are relative to the run's
start."""

import os
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.algorithms.grpo import grpo
from weft.controllers.driver import Driver
from weft.examples import arithmetic  # pyright: ignore[reportMissingImports]


def test_a_relative_model_path_survives_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arithmetic.make_model("model", seed=0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def sandboxed(response: str) -> float:
        os.chdir(elsewhere)
        return float(len(response))

    rows = [{"prompt": f"B{a}+21="} for a in range(10, 14)]
    prompts = weft.Prompts.from_rows(rows, "model", name="sums")
    actor = weft.group(weft.ActorWorker, model="model", learning_rate=1e-3)
    rollout: Any = weft.group(weft.RolloutWorker, model="model", engine="transformers")
    reward = weft.group(weft.RewardWorker, function=sandboxed, tokenizer="model")
    rollout.follows(actor)
    recording = grpo(
        prompts, rollout=rollout, reward=reward, actor=actor, n=2, sampling=weft.Sampling(max_tokens=3)
    )
    schedule = weft.Synchronous(steps=2, prompts_per_step=2)
    with Driver(recording, schedule=schedule, backend=weft.Local(), root="runs", name="run") as driver:
        driver.run()
        driver.call(actor, "save", path="trained")
    assert (tmp_path / "trained" / "config.json").is_file() and not list(elsewhere.iterdir())
    assert Path.cwd() == tmp_path
