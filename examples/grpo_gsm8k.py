"""GRPO on GSM8K or MATH, with a real model of 0.5B to 8B parameters.

python examples/grpo_gsm8k.py --model Qwen/Qwen3-0.6B --data openai/gsm8k        all GPUs of this machine
python examples/grpo_gsm8k.py --model models/qwen3 --data train.jsonl --gpus 8   own data, 8 GPUs
python examples/grpo_gsm8k.py --tiny                                             a tiny model and generated problems, on a CPU
"""

import time
from typing import Any

import tiny_qwen3
from real_task import GPU_SHARE, RealSettings, read_problems, summary

import weft
from weft.algorithms.advantages import group_advantages
from weft.algorithms.evaluation import evaluate
from weft.algorithms.graders.math import Math
from weft.algorithms.grpo import drop_zero_variance
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.surrogates import Clipped
from weft.workers.rewards.function import Reward

ACCURACY = "eval/pass@1"
"""Metric: share of held-out problems whose greedy answer is correct, boxed or not."""
SYSTEM = "Reason step by step, and put the final answer into \\boxed{}."


def boxed(response: str) -> float:
    """Return 1 if the response has a box, otherwise 0."""
    return float("\\boxed{" in response)


@weft.graph
def training(
    prompts: Any, *, rollout: Any, reward: Any, actor: Any, n: int, sampling: weft.Sampling
) -> Any:
    """GRPO that drops groups with equal rewards, because their advantages are all 0."""
    samples: Any = rollout.generate(prompts, n=n, sampling=sampling)
    samples = reward.score(samples)
    samples = drop_zero_variance(samples)
    samples = group_advantages(samples)
    return actor.update(samples, loss=PolicyLoss(surrogate=Clipped(high=0.28)))


def main(settings: RealSettings) -> None:
    """Train a real model with GRPO on GSM8K or MATH."""
    started, tiny = time.monotonic(), settings.tiny
    data, model = settings.data, settings.model
    if tiny:
        data, model = tiny_qwen3.prepare(settings.root, data, SYSTEM, settings.seed)
    assert data is not None and model is not None
    train, held_out, context = read_problems(settings, data, model, SYSTEM)

    # Workers. Actor and rollout take turns on all devices.
    actor = weft.group(
        weft.ActorWorker,
        model=model,
        learning_rate=settings.rate(5e-4 if tiny else 1e-6),
        **settings.training,
    )
    rollout = weft.group(
        weft.RolloutWorker,
        model=model,
        engine=settings.engine,
        max_context=context,
        gpu_memory_utilization=GPU_SHARE,
    )
    right, form = Reward(function=Math(), name="right"), Reward(function=boxed, weight=0.1)
    reward = weft.group(weft.RewardWorker, function=(right, form), tokenizer=model)
    rollout.follows(actor)

    # Graph and run
    sampling = weft.Sampling(max_tokens=settings.longest_response)
    accuracy = evaluate(held_out, rollout=rollout, reward=reward, sampling=sampling.greedy)
    with weft.Driver(
        training(train, rollout=rollout, reward=reward, actor=actor, n=8, sampling=sampling),
        schedule=weft.Synchronous(
            steps=settings.num_steps, prompts_per_step=settings.prompts_per_step or (16 if tiny else 128)
        ),
        evaluations=[weft.Evaluation(accuracy, every=8 if tiny else 10)],
        placement=settings.places(("actor", "rollout")),
        backend=settings.new_backend(),
        checkpoint=weft.CheckpointConfig(every_s=None if tiny else 1800, best=ACCURACY),
        root=settings.root,
        name=settings.name,
        resume=settings.resume,
        seed=settings.seed,
        trackers=settings.trackers,
        dashboard=settings.dashboard,
        settings=settings,
    ) as driver:
        metrics = driver.run()
        driver.call(actor, "save", path=driver.directory.path / "model")
    print(summary(metrics, ACCURACY, started))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
