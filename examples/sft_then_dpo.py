"""SFT, then DPO on two-digit addition: the model learns from correct answers, then from its own.

1. Train on correct answers, until the model solves a third of the held-out sums.
2. Let the model answer training sums, eight times each, and pair correct with wrong answers.
3. Train on these pairs with DPO.

python examples/sft_then_dpo.py                  with Ray: two ranks of each worker group with a model
python examples/sft_then_dpo.py --backend local  in one process without Ray, so that breakpoints work
"""

import json
import math
import shutil
import time
from pathlib import Path

import arithmetic
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.methods import supervised
from weft.algorithms.preference import best_and_worst, dpo, reference_of_pairs
from weft.algorithms.preference_loss import PreferenceLoss
from weft.dashboard.pictures import draw_curve

ACCURACY = "eval/reward/mean"
GREEDY = weft.Sampling(max_tokens=4, temperature=0)
CORES = weft.Place(weft.ResourcePool("cores", cpus=2), ranks=2)


class Settings(arithmetic.RunSettings):
    supervised_steps: int | None = Field(default=None, ge=1)
    """Maximum number of updates of the supervised phase. Default: 1000; with --small 20."""
    supervised_accuracy: float = Field(default=arithmetic.WARM_ACCURACY, gt=0, le=1)
    """Held-out accuracy that ends the supervised phase."""
    steps: int | None = Field(default=None, ge=1)
    """Number of updates of the preference phase. Default: 200; with --small 3."""
    pairs: int | None = Field(default=None, ge=1)
    """Number of pairs per step. Default: 64; with --small 8."""
    sums: int | None = Field(default=None, ge=1)
    """Number of sums that the supervised model answers eight times each, rounded up for equal
    sampling steps. Default: 4096; with --small 24."""
    likelihood: float = Field(default=1.0, ge=0)
    """Weight of a loss term that raises the likelihood of the preferred answers. 0 is plain DPO,
    which may lower this likelihood."""


def fresh_model(settings: Settings) -> Path:
    """Return a folder with data, tokenizer and an untrained model. The first call makes it."""
    task = settings.root / f"sft_then_dpo-{settings.seed}{'-small' if settings.small else ''}"

    def make(model: Path) -> None:
        model.parent.mkdir(parents=True, exist_ok=True)
        arithmetic.make_data(model.parent, settings.seed)
        unfinished = model.with_name("unfinished")
        arithmetic.make_model(unfinished, settings.seed)
        unfinished.rename(model)

    return weft.prepared(task / "untrained", make=lambda: make(task / "untrained"), sketch=make).parent


def train_on_answers(task: Path, settings: Settings) -> Path:
    """Phase 1: train on correct answers, if not done before. Return the model's folder."""
    steps = settings.size(settings.supervised_steps, 1000, small=20)
    folder = task / f"supervised_{steps}_{settings.supervised_accuracy:g}"
    return weft.prepared(
        folder,
        make=lambda: supervise(task, folder, steps, settings),
        sketch=lambda model: arithmetic.make_model(model, settings.seed),
    )


def supervise(task: Path, folder: Path, steps: int, settings: Settings) -> None:
    """Train on correct answers until the held-out accuracy reaches `supervised_accuracy`."""
    fresh = str(task / "untrained")
    print("phase 1: supervised training on right answers", flush=True)
    shutil.rmtree(task / "supervised_phase", ignore_errors=True)  # left by an interrupted phase
    answers = weft.Prompts.read(task / "supervised.jsonl", fresh)
    held_out = weft.Prompts.read(task / "held_out.parquet", fresh)

    actor = weft.group(weft.ActorWorker, model=fresh, learning_rate=3e-3, warmup_steps=20)
    rollout = weft.group(weft.RolloutWorker, model=fresh, engine="transformers")
    reward = weft.group(weft.RewardWorker, function=arithmetic.exact_match, tokenizer=fresh)
    rollout.follows(actor)

    with weft.Driver(
        supervised(answers, actor=actor),
        schedule=weft.Synchronous(steps=steps, prompts_per_step=256),
        evaluations=[
            weft.Evaluation(evaluate(held_out, rollout=rollout, reward=reward, sampling=GREEDY), every=4)
        ],
        stop=lambda metrics: metrics.get(ACCURACY, 0.0) >= settings.supervised_accuracy,
        placement={"actor": CORES, "rollout": CORES},
        backend=settings.new_backend(),
        root=task,
        name="supervised_phase",
        record_every=0,
        seed=settings.seed,
    ) as driver:
        driver.run()
        driver.call(actor, "save", path=folder)


@weft.graph
def sampled_pairs(prompts, *, rollout, reward):
    """Pair the best and the worst of eight answers. Drop prompts with equal rewards."""
    samples = rollout.generate(prompts, n=8, sampling=weft.Sampling(max_tokens=4))
    return best_and_worst(reward.score(samples))


def answer_in_pairs(task: Path, model: str, settings: Settings) -> weft.Prompts:
    """Phase 2: let the supervised model answer training sums, if not done before. Return pairs of
    its answers."""
    number = settings.size(settings.sums, 4096, small=24)
    file = Path(model) / f"pairs_{number}.jsonl"

    def sketch(pairs: Path) -> None:
        """Write one placeholder pair per sum, for a dry run. A real run may have fewer."""
        sums = pq.read_table(task / "train.parquet").slice(0, number).to_pylist()
        rows = (
            {"prompt": each["prompt"], "chosen": each["answer"], "rejected": each["answer"]}
            for each in sums
        )
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))

    made = weft.prepared(file, lambda: sample_pairs(task, model, file, number, settings), sketch)
    return weft.Prompts.read(made, model)


def sample_pairs(task: Path, model: str, file: Path, number: int, settings: Settings) -> None:
    """Sample answers to `number` sums, and write pairs of them to `file` as JSON lines."""
    print(
        "phase 2: the supervised model answers, and right answers are put beside wrong ones", flush=True
    )
    shutil.rmtree(task / "sampling_phase", ignore_errors=True)
    steps = math.ceil(number / 512)
    rollout = weft.group(weft.RolloutWorker, model=model, engine="transformers")
    reward = weft.group(weft.RewardWorker, function=settings.judge, tokenizer=model)
    sums = weft.Prompts.read(task / "train.parquet", model)
    with weft.Driver(
        sampled_pairs(sums, rollout=rollout, reward=reward),
        schedule=weft.Synchronous(steps=steps, prompts_per_step=math.ceil(number / steps)),
        placement={"rollout": CORES},
        backend=settings.new_backend(),
        root=task,
        name="sampling_phase",
        seed=settings.seed,
    ) as driver:
        driver.run()
    pairs: dict[int, dict[str, str]] = {}
    for samples in sorted((driver.directory.path / "samples").glob("train_*.arrow")):
        for row in pa.ipc.open_file(str(samples)).read_all().to_pylist():
            side = "chosen" if row["preferred"] else "rejected"
            pairs.setdefault(row["group_id"], {"prompt": row["prompt"]})[side] = row["response"]
    unfinished = file.with_suffix(".part")
    unfinished.write_text("".join(json.dumps(pair) + "\n" for pair in pairs.values()))
    unfinished.rename(file)


def main(settings: Settings) -> None:
    """Train with supervised fine-tuning, then with direct preference optimisation."""
    started = time.monotonic()
    task = fresh_model(settings)
    model = str(train_on_answers(task, settings))
    pairs = answer_in_pairs(task, model, settings)

    print(f"phase 3: DPO on {len(pairs)} pairs", flush=True)
    steps, number = (
        settings.size(settings.steps, 200, small=3),
        settings.size(settings.pairs, 64, small=8),
    )
    held_out = weft.Prompts.read(task / "held_out.parquet", model)

    # The reference is frozen, so compute its log-probabilities only once per pair.
    known = weft.precompute(
        reference_of_pairs(pairs, reference=weft.group(weft.ReferenceWorker, model=model)),
        placement={"reference": CORES},
        backend=settings.new_backend(),
        root=task,
    )

    # Workers
    rate = {"learning_rate": 1e-3, "warmup_steps": 5, "decay": ("linear", max(steps, 10))}
    actor = weft.group(weft.ActorWorker, model=model, **rate)
    rollout = weft.group(weft.RolloutWorker, model=model, engine="transformers")
    reward = weft.group(weft.RewardWorker, function=arithmetic.exact_match, tokenizer=model)
    rollout.follows(actor)

    # Graph and run
    with weft.Driver(
        dpo(known, actor=actor, loss=PreferenceLoss(likelihood=settings.likelihood)),
        schedule=weft.Synchronous(steps=steps, prompts_per_step=number),
        evaluations=[
            weft.Evaluation(
                evaluate(held_out, rollout=rollout, reward=reward, sampling=GREEDY), every=25
            )
        ],
        placement={"actor": CORES, "rollout": CORES},
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
        "actor/preference_accuracy": "pairs in the right order",
        ACCURACY: "held-out sums right (greedy)",
    }
    print(
        "learning curve:",
        draw_curve(metrics, curves, driver.directory.path / "curve.png", "DPO after SFT"),
    )
    trained = [row for row in metrics if "actor/loss" in row]
    result = {
        "accuracy_before": metrics[0][ACCURACY],
        "accuracy_after": metrics[-1][ACCURACY],
        "preference_accuracy": trained[-1]["actor/preference_accuracy"],
        "seconds": round(time.monotonic() - started, 1),
        "steps": len(trained),
        "pairs": len(pairs),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
