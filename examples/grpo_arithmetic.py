"""GRPO on two-digit addition: a 100k-parameter model, from a third right to most of it in a few minutes on a CPU.

python examples/grpo_arithmetic.py                      # Ray, two FSDP2 ranks, two vLLM replicas
python examples/grpo_arithmetic.py --backend local      # one process, no Ray, no vLLM: breakpoints work
"""

import json
import time
from pathlib import Path
from typing import Literal

import arithmetic

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss
from weft.dashboard.curve import draw_curve


class Settings(weft.Config):
    backend: Literal["ray", "local"] = "ray"
    """Processes on a Ray cluster, or everything in this process."""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """What generates; auto: vllm under Ray, transformers in one process."""
    seed: int = 0
    """Of data, model, sampling and order."""
    steps: int = 300
    """Updates of the policy."""
    root: Path = Path("runs")
    """Where the run directory, the data and the model go."""
    small: bool = False
    """Three steps of eight prompts, to see that everything works."""


def main(settings: Settings) -> None:
    """GRPO on two-digit addition."""
    started = time.monotonic()
    task = arithmetic.prepare(
        settings.root / f"arithmetic-{settings.seed}{'-small' * settings.small}",
        settings.seed,
        20 if settings.small else 1000,
    )
    model = str(task / "model")
    engine = (
        settings.engine if settings.engine != "auto" else {"ray": "vllm", "local": "transformers"}[settings.backend]
    )

    # Data: columns prompt and answer.
    train = weft.Prompts.read(task / "train.parquet", model)
    held_out = weft.Prompts.read(task / "held_out.parquet", model)

    # Who does the work.
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=1e-3, decay="linear", decay_steps=500)
    rollout = weft.group(weft.RolloutWorker, model=model, engine=engine)
    reward = weft.group(weft.RewardWorker, function=arithmetic.exact_match, tokenizer=model)
    rollout.follows(actor)

    # What happens.
    algorithm = grpo(
        train, rollout=rollout, reward=reward, actor=actor, n=8, sampling=weft.Sampling(max_tokens=4), loss=PolicyLoss()
    )
    accuracy = evaluate(held_out, rollout=rollout, reward=reward, sampling=weft.Sampling(temperature=0, max_tokens=4))

    # Where and when it happens.
    cores = weft.ResourcePool("cores", cpus=2)
    with weft.Driver(
        algorithm,
        placement={"actor": weft.Place(cores, ranks=2), "rollout": weft.Place(cores, ranks=2)},
        schedule=weft.Synchronous(
            steps=3 if settings.small else settings.steps, prompts_per_step=8 if settings.small else 64
        ),
        evaluations=[weft.Evaluation(accuracy, every=25)],
        backend=weft.RayBackend() if settings.backend == "ray" else weft.Local(),
        root=settings.root,
        seed=settings.seed,
        settings=settings,
    ) as driver:
        metrics = driver.run()
        driver.call(actor, "save", path=driver.directory.path / "model")

    curve = draw_curve(
        metrics,
        {"reward/mean": "reward", "eval/reward/mean": "held-out accuracy"},
        driver.directory.path / "curve.png",
        "GRPO on addition",
    )
    print(f"learning curve: {curve}")
    gaps = [row for row in metrics if "actor/mean_logprob_gap" in row]
    summary = {
        "accuracy_before": metrics[0]["eval/reward/mean"],
        "accuracy_after": metrics[-1]["eval/reward/mean"],
        "seconds": round(time.monotonic() - started, 1),
        "mean_logprob_gap": max(row["actor/mean_logprob_gap"] for row in gaps),
        "max_logprob_gap": max(row["actor/max_logprob_gap"] for row in gaps),
        "steps": len(gaps),
        "samples": int(sum(row["samples"] for row in gaps)),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
