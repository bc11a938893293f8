"""Preference training on two-digit addition, in minutes on a CPU: prefer correct sums to wrong
ones.

python examples/dpo_preferences.py                  with Ray: actor and reference have two FSDP2 ranks each
python examples/dpo_preferences.py --backend local  in one process without Ray, so that breakpoints work
python examples/dpo_preferences.py --method simpo   without a reference
"""

import json
import random
import time
from pathlib import Path
from typing import Literal

import arithmetic
import pyarrow.parquet as pq
from pydantic import Field

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.preference import dpo, preference_accuracy, reference_of_pairs
from weft.algorithms.preference_loss import LogLikelihood, LogOdds, LogRatio, PreferenceLoss, Squared
from weft.dashboard.pictures import draw_curve

ACCURACY = "pairs/preference_accuracy"
METHODS = {
    "rpo": PreferenceLoss(likelihood=1),
    "dpo": PreferenceLoss(),
    "ipo": PreferenceLoss(beta=1, score=LogRatio(per_token=True), comparison=Squared(tau=0.1)),
    "simpo": PreferenceLoss(beta=2, score=LogLikelihood(per_token=True), margin=1),
    "orpo": PreferenceLoss(beta=1, score=LogOdds(), likelihood=1),
}
"""Maps a method to its loss. rpo is DPO with a term that raises the likelihood of the preferred
response, which plain DPO may lower."""


class Settings(arithmetic.RunSettings):
    method: Literal["rpo", "dpo", "ipo", "simpo", "orpo"] = "rpo"
    """Loss; simpo and orpo need no reference."""
    steps: int | None = Field(default=None, ge=1)
    """Number of updates. Default: 200; with --small 3."""
    pairs: int | None = Field(default=None, ge=1)
    """Number of pairs per step. Default: 64; with --small 8."""


def preferences(file: Path, model: str, seed: int, limit: int | None = None) -> weft.Prompts:
    """Pair the correct answer to each sum with an answer whose last digit (written first) is off by
    one."""
    draw = random.Random(seed)
    rows = []
    for row in pq.read_table(file).to_pylist()[:limit]:
        right = row["answer"]
        rows.append(
            {
                "prompt": row["prompt"],
                "chosen": right,
                "rejected": off_by_one(right, draw.choice((1, 9))),
            }
        )
    return weft.Prompts.from_rows(rows, model, name=file.stem)


def off_by_one(answer: str, step: int) -> str:
    """Add `step` to the last digit (written first), modulo 10.

    >>> off_by_one("950", 1), off_by_one("950", 9)
    ('050', '850')
    """
    return f"{(int(answer[0]) + step) % 10}{answer[1:]}"


def main(settings: Settings) -> None:
    """Train on preferences between correct and wrong sums."""
    started = time.monotonic()
    cores = weft.ResourcePool("cores", cpus=2)
    placement = {name: weft.Place(cores, ranks=2) for name in ("actor", "reference", "rollout")}
    steps, number = (
        settings.size(settings.steps, 200, small=3),
        settings.size(settings.pairs, 64, small=8),
    )
    loss = METHODS[settings.method]
    task = arithmetic.prepare(settings.root, settings.seed, settings.small)
    model = str(task / "model")
    train = preferences(task / "train.parquet", model, seed=1, limit=100 if settings.small else None)
    held_out = preferences(task / "held_out.parquet", model, seed=2)

    # The reference is frozen, so compute its log-probabilities only once per pair.
    if "reference_logprobs" in loss.reads:
        reference = weft.group(weft.ReferenceWorker, model=model)
        known = reference_of_pairs(train, reference=reference)
        train = weft.precompute(
            known,
            placement={"reference": placement["reference"]},
            backend=settings.new_backend(),
            root=settings.root,
        )

    # Workers
    rate = {"learning_rate": 1e-3, "warmup_steps": 5, "decay": ("linear", max(steps, 10))}
    actor = weft.group(weft.ActorWorker, model=model, **rate)
    rollout = weft.group(weft.RolloutWorker, model=model, engine="transformers")
    reward = weft.group(weft.RewardWorker, function=arithmetic.exact_match, tokenizer=model)
    rollout.follows(actor)

    # Graph
    training = dpo(train, actor=actor, loss=loss)
    accuracy = preference_accuracy(held_out, actor=actor)
    prompts = weft.Prompts.read(task / "held_out.parquet", model)
    greedy = weft.Sampling(max_tokens=4, temperature=0)
    answers = evaluate(prompts, rollout=rollout, reward=reward, sampling=greedy)

    # Run
    with weft.Driver(
        training,
        schedule=weft.Synchronous(steps=steps, prompts_per_step=number),
        evaluations=[
            weft.Evaluation(accuracy, every=25, name="pairs"),
            weft.Evaluation(answers, every=25),
        ],
        placement={name: placement[name] for name in ("actor", "rollout")},
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
        ACCURACY: "held-out pairs in the right order",
        "eval/reward/mean": "held-out sums right (greedy)",
    }
    print(
        "learning curve:",
        draw_curve(metrics, curves, driver.directory.path / "curve.png", "preferences on addition"),
    )
    first, last = metrics[0], metrics[-1]
    result = {
        "method": settings.method,
        "preference_accuracy_before": first[ACCURACY],
        "preference_accuracy_after": last[ACCURACY],
        "accuracy_before": first["eval/reward/mean"],
        "accuracy_after": last["eval/reward/mean"],
        "seconds": round(time.monotonic() - started, 1),
        "steps": int(last["step"]),
        "pairs": int(sum(row.get("samples", 0) for row in metrics)) // 2,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
