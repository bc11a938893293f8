"""PPO on GSM8K or MATH, with a real model of 0.5B to 8B parameters and a grader or reward model.

python examples/ppo_gsm8k.py --model Qwen/Qwen3-0.6B --data openai/gsm8k                      all GPUs of this machine
python examples/ppo_gsm8k.py --model models/qwen3 --data train.jsonl --reward-model models/rm own data and reward model
python examples/ppo_gsm8k.py --tiny                                                          a tiny model, on a CPU
"""

import time
from pathlib import Path

import tiny_qwen3
from real_task import GPU_SHARE, RealSettings, read_problems, summary

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.graders.math import Math
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.ppo import ppo
from weft.algorithms.surrogates import Clipped
from weft.algorithms.values import ValueLoss

SYSTEM = "Reason step by step, and put the final answer into \\boxed{}."
ACCURACY = "eval/pass@1"
"""Metric: share of held-out problems whose greedy answer is correct."""


class Settings(RealSettings):
    reward_model: Path | None = None
    """Folder of a reward model with the policy's tokenizer. Default: use the grader instead."""


def main(settings: Settings) -> None:
    """Train a real model with PPO on GSM8K or MATH."""
    started, tiny = time.monotonic(), settings.tiny
    data, model = settings.data, settings.model
    if tiny:
        data, model = tiny_qwen3.prepare(settings.root, data, SYSTEM, settings.seed)
    assert data is not None and model is not None
    train, held_out, context = read_problems(settings, data, model, SYSTEM)

    # Workers. All groups with a model take turns on all devices.
    rate = settings.rate(5e-4 if tiny else 1e-6)
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=rate, **settings.training)
    critic = weft.group(
        weft.CriticWorker, model=model, learning_rate=rate if tiny else 5 * rate, **settings.training
    )
    reference = weft.group(
        weft.ReferenceWorker, model=model, dtype="bfloat16" if settings.num_gpus else "float32"
    )
    rollout = weft.group(
        weft.RolloutWorker,
        model=model,
        engine=settings.engine,
        max_context=context,
        gpu_memory_utilization=GPU_SHARE,
    )
    judge = weft.group(weft.RewardWorker, name="judge", function=Math(), tokenizer=model)
    groups, reward = ["actor", "critic", "reference", "rollout"], judge
    if settings.reward_model is not None:
        reward = weft.group(weft.RewardModelWorker, name="reward_model", model=settings.reward_model)
        groups.append("reward_model")
    rollout.follows(actor)

    # Graph and run
    sampling = weft.Sampling(max_tokens=settings.longest_response)
    training = ppo(
        train,
        rollout=rollout,
        reward=reward,
        actor=actor,
        critic=critic,
        reference=reference,
        sampling=sampling,
        kl=0.001,
        lam=1.0,  # no bias from the critic; the only reward is at the end of the response
        loss=PolicyLoss(surrogate=Clipped(dual=3.0)),
        value_loss=ValueLoss(clip=0.5),
        minibatches=2,
    )
    accuracy = evaluate(held_out, rollout=rollout, reward=judge, sampling=sampling.greedy)
    with weft.Driver(
        training,
        schedule=weft.Synchronous(
            steps=settings.num_steps,
            prompts_per_step=settings.prompts_per_step or (128 if tiny else 512),
        ),
        evaluations=[weft.Evaluation(accuracy, every=8 if tiny else 10)],
        placement=settings.places(groups),
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
        for handle, folder in ((actor, "model"), (critic, "critic")):
            driver.call(handle, "save", path=driver.directory.path / folder)
    print(summary(metrics, ACCURACY, started))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
