"""RLOO with LoRA on two-digit addition: trains an adapter while the model is frozen.

python examples/rloo_lora.py                  with Ray: two FSDP2 ranks, two vLLM replicas
python examples/rloo_lora.py --backend local  in one process without Ray and vLLM, so that breakpoints work
python examples/rloo_lora.py --dora           with DoRA, which also trains the norm of each weight row

The KL penalty's reference is the actor without its adapter, so there is no second model.
"""

import json
import time

import arithmetic
from pydantic import Field

import weft
from weft.algorithms.advantages import leave_one_out
from weft.algorithms.aggregation import sequence_mean
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo
from weft.algorithms.kl import KlPenalty
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.surrogates import sequence_product
from weft.dashboard.pictures import draw_curve


class Settings(arithmetic.SamplingSettings):
    rank: int = Field(default=16, ge=1)
    """Rank of the adapter."""
    dora: bool = False
    """Use DoRA (weight-decomposed LoRA)."""
    kl: float = Field(default=0.01, ge=0)
    """Coefficient of the KL penalty; the reference is the model without its adapter."""
    steps: int | None = Field(default=None, ge=1)
    """Number of updates. Default: 300; with --small 3."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of prompts per step, each with eight responses. Default: 64; with --small 8."""


def main(settings: Settings) -> None:
    """Train an adapter with RLOO on two-digit addition."""
    started = time.monotonic()
    cores = weft.ResourcePool("cores", cpus=2)
    placement = {"actor": weft.Place(cores, ranks=2), "rollout": weft.Place(cores, ranks=2)}
    backend = settings.new_backend()
    backend.check(placement)  # find mistakes before the warm start
    steps, prompts = (
        settings.size(settings.steps, 300, small=3),
        settings.size(settings.prompts, 64, small=8),
    )
    # Data (columns prompt and answer), and a warm-started model that solves a third of the sums
    task = arithmetic.prepare(settings.root, settings.seed, settings.small)
    model = str(task / "model")
    train = weft.Prompts.read(task / "train.parquet", model)
    held_out = weft.Prompts.read(task / "held_out.parquet", model)

    # Workers
    rate = {"learning_rate": 5e-3, "warmup_steps": 10, "decay": ("linear", 400)}
    lora = weft.Lora(rank=settings.rank, alpha=2 * settings.rank, dora=settings.dora)
    actor = weft.group(weft.ActorWorker, model=model, lora=lora, **rate)
    rollout = weft.group(weft.RolloutWorker, model=model, engine=settings.generator)
    reward = weft.group(weft.RewardWorker, function=settings.judge, tokenizer=model)
    rollout.follows(actor)

    # Graph
    sampling = weft.Sampling(max_tokens=4)
    loss = PolicyLoss(
        ratio=sequence_product, aggregation=sequence_mean, kl=KlPenalty(coefficient=settings.kl)
    )
    reference = weft.adapter_off(actor)
    parts = {"rollout": rollout, "reward": reward, "actor": actor, "reference": reference}
    training = grpo(train, **parts, n=8, sampling=sampling, loss=loss, advantages=leave_one_out)
    greedy = weft.Sampling(max_tokens=4, temperature=0)
    accuracy = evaluate(held_out, rollout=rollout, reward=reward, sampling=greedy)

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
        driver.call(actor, "save", path=driver.directory.path / "adapter")
        driver.call(actor, "save", path=driver.directory.path / "model", merged=True)
    curves = {"reward/mean": "reward of samples", "eval/reward/mean": "held-out accuracy (greedy)"}
    print(
        "learning curve:",
        draw_curve(metrics, curves, driver.directory.path / "curve.png", "RLOO with LoRA on addition"),
    )
    print(json.dumps(arithmetic.summary(metrics, time.monotonic() - started)))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
