"""GRPO on a task of reasoning-gym: in minutes on a CPU, from a third to five sixths of the words right.

python examples/grpo_reasoning_gym.py                  with Ray and vLLM
python examples/grpo_reasoning_gym.py --backend local  in one process without Ray and vLLM, so that breakpoints work

reasoning-gym makes questions and checks answers, so there is nothing to download:
pip install "weft[reasoning-gym]". The task `spell_backward` asks for a word of three to five letters in
reverse, such as <answer>nus</answer> for "sun".
"""

import json
import re
import shutil
import string
import time
from pathlib import Path

import arithmetic
from pydantic import Field

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.graders.procedural import ReasoningGym
from weft.algorithms.grpo import grpo
from weft.dashboard.pictures import draw_curve
from weft.dataflow.prompts.procedural_tasks import TAGGED
from weft.dataflow.runs.directory import require_folder

TASK = "spell_backward"
DIFFICULTY = {"min_word_len": 3, "max_word_len": 5}
SIZE = 20_000
"""Questions to make. Equal ones are kept once."""
HELD_OUT = 512
QUESTION = "Spell this word backward (example: sun -> nus): "
TAGS = ("<answer>", "</answer>")
SYMBOLS = ["<pad>", "B", "E", QUESTION, f"\n{TAGGED}", *TAGS, *string.ascii_lowercase]
TOKENS = "|".join([*map(re.escape, SYMBOLS[3:7]), "."])
"""The question, the request for an answer, the tags, and all other characters are tokens."""
SAMPLING = weft.Sampling(max_tokens=8, stop=TAGS[1:])
"""Room for the tags and five letters. A response ends with its answer."""


class Settings(arithmetic.SamplingSettings):
    steps: int | None = Field(default=None, ge=1)
    """Number of updates. Default: 200; with --small 3."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of prompts per step, each with eight responses. Default: 64; with --small 8."""


def read(model: Path, seed: int) -> tuple[weft.Prompts, weft.Prompts]:
    """Return the questions to train on, and 512 others for evaluation. Leave out names."""
    tasks = weft.Prompts.reasoning_gym(TASK, model, size=SIZE, seed=seed, difficulty=DIFFICULTY)
    return tasks.filter(lambda row: row["answer"].islower()).hold_out(HELD_OUT, seed)


def make_model(folder: Path, seed: int) -> None:
    """Save a model with random weights, and a tokenizer for this task."""
    arithmetic.make_model(folder, seed, symbols=SYMBOLS, pattern=TOKENS)


def prepare(root: Path, seed: int, small: bool) -> Path:
    """Return a model that spells some words. The first call makes it."""
    folder = root / f"reasoning-gym-{seed}{'-small' if small else ''}"

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted warm start
        require_folder(folder, f"root {str(root)!r}")
        print("preparing: tokenizer, model, and a supervised warm start", flush=True)
        untrained = folder / "untrained_model"
        make_model(untrained, seed)
        train, held_out = read(untrained, seed)
        columns = train.table.select(["prompt", "answer"]).to_pylist()
        answered = [
            {"prompt": row["prompt"], "completion": f"{TAGS[0]}{row['answer']}{TAGS[1]}"}
            for row in columns
        ]
        answers = weft.Prompts.from_rows(answered, untrained, name="answers")
        sizes = {"seed": seed, "steps": 20 if small else 1000, "max_tokens": SAMPLING.max_tokens}
        arithmetic.supervise(
            untrained, answers, held_out, ReasoningGym(exact=True), folder / "model", **sizes
        )

    return weft.prepared(folder / "model", make, lambda model: make_model(model, seed))


def main(settings: Settings) -> None:
    """Train with GRPO on words of reasoning-gym."""
    started = time.monotonic()
    steps = settings.size(settings.steps, 200, small=3)
    prompts = settings.size(settings.prompts, 64, small=8)
    model = prepare(settings.root, settings.seed, settings.small)
    train, held_out = read(model, settings.seed)

    # Workers. A small run keeps the task's partial scores, because its model gets no sum right.
    actor = weft.group(
        weft.ActorWorker, model=model, learning_rate=1e-3, warmup_steps=10, decay=("linear", 500)
    )
    rollout = weft.group(weft.RolloutWorker, model=model, engine=settings.generator)
    grader = ReasoningGym(exact=not settings.small)
    reward = weft.group(weft.RewardWorker, function=grader, tokenizer=model)
    rollout.follows(actor)

    # Graph
    training = grpo(train, rollout=rollout, reward=reward, actor=actor, n=8, sampling=SAMPLING)
    accuracy = evaluate(held_out, rollout=rollout, reward=reward, sampling=SAMPLING.greedy)

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
    curves = {"reward/mean": "reward of samples", "eval/reward/mean": "held-out accuracy (greedy)"}
    picture = draw_curve(metrics, curves, driver.directory.path / "curve.png", f"GRPO on {TASK}")
    print("learning curve:", picture)
    print(json.dumps(arithmetic.summary(metrics, time.monotonic() - started)))


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
