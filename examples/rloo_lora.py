"""RLOO with LoRA on two-digit addition: the model stands still, and an adapter learns the sums that it does not know.

python examples/rloo_lora.py                  Ray, two FSDP2 ranks, two vLLM replicas
python examples/rloo_lora.py --backend local  one process, no Ray, no vLLM: breakpoints work
python examples/rloo_lora.py --dora           with the lengths of the weights' rows as parameters of their own

The reference of the KL penalty is the actor itself, with its adapter off: there is no second model.
"""

import json
import time
from pathlib import Path
from typing import Literal

import arithmetic
from pydantic import Field

import weft
from weft.algorithms.advantages import leave_one_out
from weft.algorithms.aggregation import sequence_mean
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo
from weft.algorithms.kl import KlPenalty
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.ratios import sequence_product
from weft.dashboard.curve import draw_curve


class Settings(weft.Config):
    backend: Literal["ray", "local"] = "ray"
    """Processes on a Ray cluster, or everything in this process."""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """What generates; auto is vllm under Ray and transformers in one process."""
    schedule: Literal["synchronous", "pipelined", "asynchronous"] = "synchronous"
    """When nodes run; asynchronous lets generation run one update ahead."""
    placement: Literal["colocated", "apart"] = "colocated"
    """Actor and rollouts take turns on all cores, or each has its own."""
    seed: int = 0
    """Of data, model, sampling and order."""
    rank: int = Field(default=16, ge=1)
    """Of the adapter."""
    dora: bool = False
    """Weight-decomposed LoRA."""
    kl: float = Field(default=0.01, ge=0)
    """Weight of the penalty for leaving the model without its adapter."""
    steps: int = Field(default=300, ge=1)
    """Updates of the policy."""
    prompts: int = Field(default=64, ge=1)
    """Prompts in a step; each is answered eight times."""
    root: Path = Path("runs")
    """Where data, model and run directory go."""
    name: str | None = None
    """Of the run, and its directory; default: the time."""
    checkpoint_every: int = Field(default=100, ge=0)
    """Steps between two checkpoints; 0: none."""
    resume: str = "none"
    """latest: go on with the run of that name (or the newest); or the folder of a run or a checkpoint."""
    small: bool = False
    """Three steps of eight prompts from a barely trained model: does everything work?"""


def main(settings: Settings) -> None:
    """RLOO with LoRA on two-digit addition."""
    started = time.monotonic()
    cores = weft.ResourcePool("cores", cpus=2)
    placement = {"actor": weft.Place(cores, ranks=2), "rollout": weft.Place(cores, ranks=2)}
    if settings.placement == "apart":
        placement = {name: weft.Place(weft.ResourcePool(name, cpus=1)) for name in ("actor", "rollout")}
    backend = weft.RayBackend() if settings.backend == "ray" else weft.Local()
    backend.check(placement)  # the driver does, too; this is before the warm start
    steps, prompts = (3, 8) if settings.small else (settings.steps, settings.prompts)
    # Data (columns prompt and answer), and a model that a supervised phase has brought to a third of right answers.
    task = arithmetic.prepare(settings.root, settings.seed, settings.small)
    model = str(task / "model")
    train = weft.Prompts.read(task / "train.parquet", model)
    held_out = weft.Prompts.read(task / "held_out.parquet", model)

    # Who does the work.
    engine = settings.engine if settings.engine != "auto" else "vllm" if settings.backend == "ray" else "transformers"
    rate = {"learning_rate": 5e-3, "warmup_steps": 10, "decay": "linear", "decay_steps": 400}
    lora = weft.Lora(rank=settings.rank, alpha=2 * settings.rank, dora=settings.dora)
    actor = weft.group(weft.ActorWorker, model=model, lora=lora, **rate)
    rollout = weft.group(weft.RolloutWorker, model=model, engine=engine)
    reward = weft.group(weft.RewardWorker, function=arithmetic.exact_match, tokenizer=model)
    rollout.follows(actor)

    # What happens.
    sampling = weft.Sampling(max_tokens=4)
    loss = PolicyLoss(ratio=sequence_product, aggregation=sequence_mean, kl=KlPenalty(coefficient=settings.kl))
    reference = weft.adapter_off(actor)
    parts = {"rollout": rollout, "reward": reward, "actor": actor, "reference": reference}
    training = grpo(train, **parts, n=8, sampling=sampling, loss=loss, advantages=leave_one_out)
    greedy = weft.Sampling(max_tokens=4, temperature=0)
    accuracy = evaluate(held_out, rollout=rollout, reward=reward, sampling=greedy)

    # When and where.
    schedules = {"synchronous": weft.Synchronous, "pipelined": weft.Pipelined, "asynchronous": weft.Asynchronous}
    with weft.Driver(
        training,
        schedule=schedules[settings.schedule](steps=steps, prompts_per_step=prompts),
        evaluations=[weft.Evaluation(accuracy, every=25)],
        placement=placement,
        backend=backend,
        root=settings.root,
        name=settings.name,
        checkpoint=weft.CheckpointConfig(every=settings.checkpoint_every),
        resume=settings.resume,
        seed=settings.seed,
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
