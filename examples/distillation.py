"""On-policy distillation on two-digit addition: a student that solves a third of the sums learns from
a teacher that solves nearly all, without any reward.

python examples/distillation.py                  with Ray and vLLM
python examples/distillation.py --backend local  in one process without Ray and vLLM, so that breakpoints work

The student samples answers, and the teacher says at each of the student's tokens how likely it holds
every token there.
"""

import json
import time
from pathlib import Path
from typing import Literal

import arithmetic
from pydantic import Field

import weft
from weft.algorithms.distillation import Distillation, ForwardKl, Jsd, ReverseKl, distillation
from weft.algorithms.evaluation import evaluate
from weft.dashboard.pictures import draw_curve

DIVERGENCES = {"reverse_kl": ReverseKl(), "forward_kl": ForwardKl(), "jsd": Jsd()}
TEACHER_ACCURACY = 0.97


class Settings(arithmetic.SamplingSettings):
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence between student and teacher."""
    top: int = Field(default=8, ge=1, le=len(arithmetic.SYMBOLS))
    """Number of the teacher's likeliest tokens per position."""
    steps: int | None = Field(default=None, ge=1)
    """Number of updates. Default: 150; with --small 3."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of prompts per step, each with one response. Default: 256; with --small 8."""


def main(settings: Settings) -> None:
    """Distil a teacher of two-digit addition into a student."""
    started = time.monotonic()
    steps = settings.size(settings.steps, 150, small=3)
    prompts = settings.size(settings.prompts, 256, small=8)
    task = arithmetic.prepare(settings.root, settings.seed, settings.small)
    student = str(task / "model")

    def make_teacher() -> None:
        print("preparing: a teacher that solves nearly all sums", flush=True)
        arithmetic.warm_start(
            task,
            settings.seed,
            steps=20 if settings.small else 3000,
            name="teacher",
            layers=3,
            accuracy=TEACHER_ACCURACY,
        )

    def sketch_teacher(folder: Path) -> None:
        arithmetic.make_model(folder, settings.seed, layers=3)

    teacher_model = str(weft.prepared(task / "teacher", make_teacher, sketch_teacher))
    train = weft.Prompts.read(task / "train.parquet", student)
    held_out = weft.Prompts.read(task / "held_out.parquet", student)

    # Workers
    actor = weft.group(weft.ActorWorker, model=student, learning_rate=1e-3, warmup_steps=10)
    rollout = weft.group(weft.RolloutWorker, model=student, engine=settings.generator)
    teacher = weft.group(weft.ReferenceWorker, name="teacher", model=teacher_model)
    reward = weft.group(weft.RewardWorker, function=arithmetic.exact_match, tokenizer=student)
    rollout.follows(actor)

    # Graph: only the evaluation has a reward
    sampling = weft.Sampling(max_tokens=4)
    loss = Distillation(divergence=DIVERGENCES[settings.divergence])
    training = distillation(
        train,
        rollout=rollout,
        teacher=teacher,
        actor=actor,
        sampling=sampling,
        top=settings.top,
        loss=loss,
    )
    accuracy = evaluate(held_out, rollout=rollout, reward=reward, sampling=sampling.greedy)

    # Run
    with weft.Driver(
        training,
        schedule=settings.new_schedule(steps, prompts),
        evaluations=[weft.Evaluation(accuracy, every=25)],
        backend=settings.new_backend(),
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
    curves = {
        "actor/divergence": "divergence from the teacher [nats]",
        "eval/reward/mean": "held-out accuracy (greedy)",
    }
    picture = draw_curve(
        metrics, curves, driver.directory.path / "curve.png", "Distillation of addition"
    )
    print("learning curve:", picture)
    result = arithmetic.summary(metrics, time.monotonic() - started)
    print(json.dumps({**result, "divergence": metrics[-1]["actor/divergence"]}))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
