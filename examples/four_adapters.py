"""Four adapters with different rewards, trained at the same time on one base model.

python examples/four_adapters.py                  with Ray: one vLLM engine samples with all four adapters
python examples/four_adapters.py --backend local  in one process without Ray and vLLM, so that breakpoints work

Each actor trains an adapter with GRPO. They share the prompts, the rollout group and its base model, but have
rewards of their own: many even digits, many odd digits, many sevens, or a short response.
"""

import json
import time

import arithmetic
from pydantic import Field

import weft
from weft.algorithms.grpo import grpo


def even(response: str) -> float:
    return sum(symbol in "02468" for symbol in response) / TOKENS


def odd(response: str) -> float:
    return sum(symbol in "13579" for symbol in response) / TOKENS


def sevens(response: str) -> float:
    return response.count("7") / TOKENS


def short(response: str) -> float:
    return 1 - len(response) / TOKENS


TOKENS = 8
REWARDS = {reward.__name__: reward for reward in (even, odd, sevens, short)}


class Settings(arithmetic.SamplingSettings):
    rank: int = Field(default=8, ge=1)
    """Rank of the adapters."""
    steps: int | None = Field(default=None, ge=1)
    """Number of updates of each adapter. Default: 60; with --small 3."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of prompts per step, each with eight responses of each adapter. Default: 32; with --small 4."""


@weft.graph
def four_adapters(prompts, *, rollout, actors, rewards):
    for name, actor in actors.items():
        own = weft.with_policy(rollout, actor)
        sampling = weft.Sampling(max_tokens=TOKENS)
        grpo(prompts, rollout=own, reward=rewards[name], actor=actor, n=8, sampling=sampling)


def main(settings: Settings) -> None:
    """Train four adapters with different rewards on one base model."""
    started = time.monotonic()
    steps = settings.size(settings.steps, 60, small=3)
    prompts = settings.size(settings.prompts, 32, small=4)
    # Prompts, and a base model with random weights
    folder = settings.root / f"four-adapters-{settings.seed}"

    def make_base() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        arithmetic.make_data(folder, settings.seed)
        arithmetic.make_model(folder / "model", settings.seed)

    def sketch_base(model) -> None:
        arithmetic.make_data(model.parent, settings.seed)
        arithmetic.make_model(model, settings.seed)

    model = str(weft.prepared(folder / "model", make_base, sketch_base))
    train = weft.Prompts.read(folder / "train.parquet", model)

    # Workers
    lora = weft.Lora(rank=settings.rank, alpha=2 * settings.rank)
    actors, rewards = {}, {}
    for name, function in REWARDS.items():
        actors[name] = weft.group(
            weft.ActorWorker, name=name, model=model, lora=lora, learning_rate=1e-2
        )
        rewards[name] = weft.group(
            weft.RewardWorker, name=f"{name}_reward", function=function, tokenizer=model
        )
    rollout = weft.group(weft.RolloutWorker, model=model, engine=settings.generator)
    rollout.follows(*actors.values())

    # Run: the actors take turns on one core, and the rollout has the other
    cores = weft.ResourcePool("cores", cpus=1)
    with weft.Driver(
        four_adapters(train, rollout=rollout, actors=actors, rewards=rewards),
        schedule=settings.new_schedule(steps, prompts),
        placement={name: weft.Place(cores) for name in actors},
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
        for name, actor in actors.items():
            driver.call(actor, "save", path=driver.directory.path / name)
    updates = [row for row in metrics if "even/loss" in row]
    print(
        json.dumps(
            {
                "seconds": round(time.monotonic() - started, 1),
                "steps": len(updates),
                "samples": int(sum(row["samples"] for row in updates)),
                "max_logprob_gap": max(
                    row[f"{name}/max_logprob_gap"] for row in updates for name in REWARDS
                ),
                "rewards": {
                    name: [round(row[f"{name}_reward/mean"], 3) for row in (updates[0], updates[-1])]
                    for name in REWARDS
                },
            }
        )
    )


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
