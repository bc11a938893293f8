"""SFT, reward model training, and PPO with a critic on two-digit addition, in minutes on a CPU.

    supervised warm start -> reward model on pairs -> PPO with four models: actor, critic,
    reference, reward model

python examples/ppo_arithmetic.py                   with Ray: two FSDP2 ranks of each model, two vLLM replicas
python examples/ppo_arithmetic.py --backend local   in one process without Ray and vLLM, so that breakpoints work
python examples/ppo_arithmetic.py --reward exact    three models, with exact match as the reward

The reward model has a scalar head. Like the policy, it first learns correct answers. Then it learns
pairs of a correct and a wrong answer, with the Bradley-Terry loss. It sees only training sums, and
scores responses without the ground truth. It has four layers: with two, like the policy, it would
be too weak, and the policy would exploit it (docs/algorithms.md).
"""

import json
import random
import shutil
import time
from pathlib import Path
from typing import Literal

import arithmetic
import pyarrow.parquet as pq
from pydantic import Field

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.ppo import ppo
from weft.algorithms.reward_model import reward_accuracy, reward_model
from weft.algorithms.surrogates import Clipped
from weft.algorithms.values import ValueLoss
from weft.dashboard.pictures import draw_curve

ACCURACY = "eval/reward/mean"
PAIRS = "pairs/preference_accuracy"


class Settings(arithmetic.SamplingSettings):
    reward: Literal["model", "exact"] = "model"
    """Source of the reward: a trained reward model, or an exact match with the answer."""
    steps: int | None = Field(default=None, ge=1)
    """Number of updates of policy and critic. Default: 200; with --small 3."""
    reward_steps: int | None = Field(default=None, ge=1)
    """Number of updates of the reward model. Default: 1,200; with --small 3."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of prompts per step, each with one response. Default: 256; with --small 8."""


def spoiled(answer: str, draw: random.Random) -> str:
    """Return a wrong answer: 80 % have one changed digit, 10 % one digit less, 10 % one more.

    >>> spoiled("950", random.Random(0)) != "950"
    True
    """
    kind = draw.random()
    if kind < 0.1:
        return answer[:-1]
    if kind < 0.2:
        return answer + draw.choice("0123456789")
    place = draw.randrange(len(answer))
    return f"{answer[:place]}{(int(answer[place]) + draw.randrange(1, 10)) % 10}{answer[place + 1 :]}"


def pairs(file: Path, model: str, seed: int, copies: int = 1) -> weft.Prompts:
    """Make `copies` pairs for each sum: the correct answer, and a random wrong one."""
    draw = random.Random(seed)
    given = [row for row in pq.read_table(file).to_pylist() for _ in range(copies)]
    rows = [
        {"prompt": r["prompt"], "chosen": r["answer"], "rejected": spoiled(r["answer"], draw)}
        for r in given
    ]
    return weft.Prompts.from_rows(rows, model, name=file.stem)


def trained_reward_model(task: Path, settings: Settings) -> Path:
    """Return the folder of the reward model. The first call trains it."""
    steps = settings.size(settings.reward_steps, 1200, small=3)
    folder = task / f"reward_model_{steps}"
    return weft.prepared(
        folder,
        make=lambda: train_reward_model(task, folder, steps, settings),
        sketch=lambda model: untrained_reward_model(model, settings.seed),
    )


def untrained_reward_model(folder: Path, seed: int) -> None:
    """Save a model of the same size whose rewards are all 0, for a dry run."""
    import torch
    from safetensors.torch import load_file, save_file

    arithmetic.make_model(folder, seed, layers=4)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "score.weight": torch.zeros(1, 64)}, file, {"format": "pt"})


def train_reward_model(task: Path, folder: Path, steps: int, settings: Settings) -> None:
    """Train a reward model on pairs, starting from a model trained on correct answers."""
    answers, policy = "answers", str(task / "model")
    if not (task / answers).exists():
        print("preparing: a deeper model, on right answers", flush=True)
        size = {"steps": 20, "accuracy": 0.0} if settings.small else {"steps": 1500, "accuracy": 0.97}
        arithmetic.warm_start(task, settings.seed, name=answers, layers=4, **size)
    print("preparing: a reward model, on pairs", flush=True)
    shutil.rmtree(task / "reward_training", ignore_errors=True)  # left by an interrupted training
    number = 8 if settings.small else 256
    rate = {"learning_rate": 2e-3, "warmup_steps": 5, "decay": ("linear", max(steps, 10))}
    model = weft.group(
        weft.CriticWorker, name="reward_model", model=str(task / answers), head="rewards", **rate
    )
    held_out = pairs(task / "held_out.parquet", policy, seed=2)
    with weft.Driver(
        reward_model(pairs(task / "train.parquet", policy, seed=1, copies=4), model=model),
        schedule=weft.Synchronous(steps=steps, prompts_per_step=number),
        evaluations=[weft.Evaluation(reward_accuracy(held_out, model=model), every=50, name="pairs")],
        root=task,
        name="reward_training",
        record_every=0,
        seed=settings.seed,
    ) as driver:
        metrics = driver.run()
        driver.call(model, "save", path=folder)
    print(f"reward model: {metrics[-1][PAIRS]:.1%} of held-out pairs in the right order", flush=True)


def main(settings: Settings) -> None:
    """Train with PPO on two-digit addition."""
    started = time.monotonic()
    cores = weft.ResourcePool("cores", cpus=2)
    placed = [
        "actor",
        "critic",
        "reference",
        "rollout",
        *(["reward_model"] if settings.reward == "model" else []),
    ]
    placement = {name: weft.Place(cores, ranks=2) for name in placed}
    backend = settings.new_backend()
    backend.check(placement)  # find mistakes before the models are trained
    steps, prompts = (
        settings.size(settings.steps, 200, small=3),
        settings.size(settings.prompts, 256, small=8),
    )
    task = arithmetic.prepare(settings.root, settings.seed, settings.small)
    model = str(task / "model")
    train = weft.Prompts.read(task / "train.parquet", model)
    held_out = weft.Prompts.read(task / "held_out.parquet", model)

    # Workers
    epochs, minibatches = 2, 2
    rate = {
        "learning_rate": 1e-3,
        "warmup_steps": 10,
        "decay": ("linear", max(20, steps * epochs * minibatches)),
    }
    judge = weft.group(weft.RewardWorker, name="reward", function=settings.judge, tokenizer=model)
    reward = judge
    if settings.reward == "model":
        trained = trained_reward_model(task, settings)
        reward = weft.group(weft.RewardModelWorker, name="reward_model", model=str(trained))
    critic = weft.group(weft.CriticWorker, model=model, **rate)
    actor = weft.group(weft.ActorWorker, model=model, **rate)
    reference = weft.group(weft.ReferenceWorker, model=model)
    rollout = weft.group(weft.RolloutWorker, model=model, engine=settings.generator)
    rollout.follows(actor)

    # Graph
    training = ppo(
        train,
        rollout=rollout,
        reward=reward,
        actor=actor,
        critic=critic,
        reference=reference,
        sampling=weft.Sampling(max_tokens=4),
        kl=0.01,
        loss=PolicyLoss(surrogate=Clipped(dual=3.0)),
        value_loss=ValueLoss(clip=1.0),
        epochs=epochs,
        minibatches=minibatches,
    )
    accuracy = evaluate(
        held_out, rollout=rollout, reward=judge, sampling=weft.Sampling(max_tokens=4, temperature=0)
    )

    # Run
    with weft.Driver(
        training,
        schedule=settings.new_schedule(steps, prompts),
        evaluations=[weft.Evaluation(accuracy, every=25)],
        placement=placement,
        backend=backend,
        root=settings.root,
        name=settings.name,
        checkpoint=weft.CheckpointConfig(every=settings.checkpoint_every),
        resume=settings.resume,
        seed=settings.seed,
        trackers=settings.trackers,
        dashboard=settings.dashboard,
        settings=settings,
    ) as driver:
        metrics = driver.run()
        for handle, name in ((actor, "model"), (critic, "critic")):
            driver.call(handle, "save", path=driver.directory.path / name)
    rewarded = "reward_model/mean" if settings.reward == "model" else "reward/mean"
    curves = {rewarded: "reward of samples", ACCURACY: "held-out accuracy (greedy)"}
    print(
        "learning curve:",
        draw_curve(metrics, curves, driver.directory.path / "curve.png", "PPO on addition"),
    )
    trained = [row for row in metrics if "actor/loss" in row]
    result = {
        "reward": settings.reward,
        "accuracy_before": metrics[0][ACCURACY],
        "accuracy_after": metrics[-1][ACCURACY],
        "critic_loss_before": trained[0]["critic/loss"],
        "critic_loss_after": trained[-1]["critic/loss"],
        "seconds": round(time.monotonic() - started, 1),
        "steps": len(trained),
        "samples": int(sum(row["samples"] for row in trained)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
