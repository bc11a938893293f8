"""GRPO on two-digit addition: in minutes on a CPU, from a third to most of the sums correct.

python examples/grpo_arithmetic.py                  with Ray: two FSDP2 ranks, two vLLM replicas
python examples/grpo_arithmetic.py --backend local  in one process without Ray and vLLM, so that breakpoints work
python examples/grpo_arithmetic.py --schedule asynchronous --placement apart    one core generates while the other trains
python examples/grpo_arithmetic.py --quantization int8    quantised rollouts, and a correction for their gap to the trainer
"""

import json
import time
from typing import Literal

import arithmetic
from pydantic import Field

import weft
from weft.algorithms.corrections import TruncatedImportance
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss
from weft.dashboard.pictures import draw_curve


class Settings(arithmetic.SamplingSettings):
    placement: Literal["colocated", "apart"] = "colocated"
    """Whether actor and rollout take turns on the same cores ("colocated") or have their own."""
    steps: int | None = Field(default=None, ge=1)
    """Number of updates. Default: 400; with --small 3."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of prompts per step, each with eight responses. Default: 64; with --small 8."""
    quantization: Literal["int8", "fp8", "w4a16"] | None = None
    """Scheme of the rollout's weights, for the engine vllm. Default: not quantised."""


def main(settings: Settings) -> None:
    """Train with GRPO on two-digit addition."""
    started = time.monotonic()
    cores = weft.ResourcePool("cores", cpus=2)
    placement = {"actor": weft.Place(cores, ranks=2), "rollout": weft.Place(cores, ranks=2)}
    if settings.placement == "apart":
        placement = {name: weft.Place(weft.ResourcePool(name, cpus=1)) for name in ("actor", "rollout")}
    backend = settings.new_backend()
    backend.check(placement)  # find mistakes before the warm start
    steps, prompts = (
        settings.size(settings.steps, 400, small=3),
        settings.size(settings.prompts, 64, small=8),
    )
    # Data (columns prompt and answer), and a warm-started model that solves a third of the sums
    task = arithmetic.prepare(settings.root, settings.seed, settings.small)
    model = str(task / "model")
    train = weft.Prompts.read(task / "train.parquet", model)
    held_out = weft.Prompts.read(task / "held_out.parquet", model)

    # Workers
    rate = {"learning_rate": 1e-3, "warmup_steps": 10, "decay": ("linear", 500)}
    actor = weft.group(weft.ActorWorker, model=model, **rate)
    scheme = settings.quantization
    rollout = weft.group(weft.RolloutWorker, model=model, engine=settings.generator, quantization=scheme)
    reward = weft.group(weft.RewardWorker, function=settings.judge, tokenizer=model)
    rollout.follows(actor)

    # Graph
    sampling = weft.Sampling(max_tokens=4)
    loss = PolicyLoss(correction=TruncatedImportance() if scheme else ())
    training = grpo(
        train, rollout=rollout, reward=reward, actor=actor, n=8, sampling=sampling, loss=loss
    )
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
        driver.call(actor, "save", path=driver.directory.path / "model")
    curves = {"reward/mean": "reward of samples", "eval/reward/mean": "held-out accuracy (greedy)"}
    print(
        "learning curve:",
        draw_curve(metrics, curves, driver.directory.path / "curve.png", "GRPO on addition"),
    )
    print(json.dumps(arithmetic.summary(metrics, time.monotonic() - started)))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
