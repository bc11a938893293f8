"""GRPO on the examples' task with a moving reference, killed and resumed by `test_resume.py`.

Each correct digit is rewarded, so that a barely trained model can learn.
"""

from pathlib import Path
from typing import Literal

import arithmetic  # pyright: ignore[reportMissingImports] (of the examples)

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo
from weft.algorithms.kl import KlPenalty
from weft.algorithms.policy_loss import PolicyLoss


class Settings(weft.Config):
    root: Path
    name: str
    engine: Literal["transformers", "vllm"]
    resume: str = "none"
    steps: int = 3
    replicas: int = 1
    """More than one: these rollout ranks under Ray, each with few slots, and only eight prompts."""


def main(settings: Settings) -> None:
    """Train with GRPO."""
    task = arithmetic.prepare(settings.root, 0, small=True)
    model = str(task / "model")
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=1e-3)
    many = settings.replicas > 1
    rollout = weft.group(
        weft.RolloutWorker, model=model, engine=settings.engine, max_num_seqs=8 if many else 256
    )
    reward = weft.group(weft.RewardWorker, function=arithmetic.right_digits, tokenizer=model)
    reference = weft.group(weft.MovingReferenceWorker, model=model, mix=0.3)
    rollout.follows(actor)
    reference.follows(actor, every=2)
    prompts = weft.Prompts.read(task / "train.parquet", model)
    held_out = weft.Prompts.read(task / "held_out.parquet", model)
    if many:
        first = {str(row["prompt"]) for row in prompts.table.slice(0, 8).to_pylist()}
        prompts = prompts.filter(lambda row: str(row["prompt"]) in first)
    sampling = weft.Sampling(max_tokens=4)
    training = grpo(
        prompts,
        rollout=rollout,
        reward=reward,
        actor=actor,
        reference=reference,
        n=8,
        sampling=sampling,
        loss=PolicyLoss(kl=KlPenalty(coefficient=0.1)),
    )
    accuracy = evaluate(
        held_out, rollout=rollout, reward=reward, sampling=weft.Sampling(max_tokens=4, temperature=0)
    )
    with weft.Driver(
        training,
        schedule=weft.Synchronous(steps=settings.steps, prompts_per_step=8),
        evaluations=[weft.Evaluation(accuracy, every=2)],
        placement={"rollout": weft.Place(weft.ResourcePool("generating", cpus=2), settings.replicas)}
        if many
        else None,
        backend=weft.RayBackend() if many else weft.Local(),
        root=settings.root,
        name=settings.name,
        checkpoint=weft.CheckpointConfig(every=1),
        resume=settings.resume,
    ) as driver:
        driver.run()
        driver.call(actor, "save", path=driver.directory.path / "model")


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
