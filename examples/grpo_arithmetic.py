"""GRPO on two-digit addition: a small model, from a third of the sums right to most of them, in minutes on a CPU.

python examples/grpo_arithmetic.py                  Ray, two FSDP2 ranks, two vLLM replicas
python examples/grpo_arithmetic.py --backend local  one process, no Ray, no vLLM: breakpoints work
python examples/grpo_arithmetic.py --schedule asynchronous --placement apart    a core generates, the other one trains
"""

import json
import time
from pathlib import Path
from typing import Literal

import arithmetic
from pydantic import Field

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss
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
    steps: int = Field(default=400, ge=1)
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
    """GRPO on two-digit addition."""
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
    rate = {"learning_rate": 1e-3, "warmup_steps": 10, "decay": "linear", "decay_steps": 500}
    actor = weft.group(weft.ActorWorker, model=model, **rate)
    rollout = weft.group(weft.RolloutWorker, model=model, engine=engine)
    reward = weft.group(weft.RewardWorker, function=arithmetic.exact_match, tokenizer=model)
    rollout.follows(actor)

    # What happens.
    sampling = weft.Sampling(max_tokens=4)
    training = grpo(train, rollout=rollout, reward=reward, actor=actor, n=8, sampling=sampling, loss=PolicyLoss())
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
        driver.call(actor, "save", path=driver.directory.path / "model")
    curves = {"reward/mean": "reward of samples", "eval/reward/mean": "held-out accuracy (greedy)"}
    print("learning curve:", draw_curve(metrics, curves, driver.directory.path / "curve.png", "GRPO on addition"))
    print(json.dumps(arithmetic.summary(metrics, time.monotonic() - started)))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
