"""The task of the examples: two-digit addition, small enough to learn by RL on a laptop's CPU.

`B21+74=` asks for 12 + 47 with reversed digits, so that the carry runs in reading order; the answer
is `950`. This file makes the data (Parquet), the tokenizer, and the model with its supervised warm
start. It also has the settings that all examples share.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

import weft
from weft.algorithms.evaluation import evaluate
from weft.algorithms.methods import supervised
from weft.dataflow.runs.directory import require_folder

HELD_OUT = 512
SYMBOLS = ["<pad>", "B", "E", *"0123456789+="]
WARM_ACCURACY = 0.30
"""Accuracy that ends the warm start: RL needs a policy that is right some of the time."""


class RunSettings(weft.Config):
    """Settings of all examples."""

    backend: Literal["ray", "local"] = "ray"
    """Processes on a Ray cluster, or everything in this process."""
    seed: int = 0
    """Seed of data, model, sampling and order."""
    root: Path = Path("runs")
    """Folder for data, models and run directories."""
    name: str | None = None
    """Name of the run and its directory. Default: the time."""
    checkpoint_every: int = Field(default=100, ge=0)
    """Steps between checkpoints, or 0 for none."""
    resume: str = "none"
    """Run to resume: "latest" for this name (or the newest), or a run or checkpoint folder."""
    trackers: tuple[str, ...] = ()
    """Extra outputs for metrics: tensorboard, wandb, mlflow, trackio, prometheus (under Ray)."""
    dashboard: bool = False
    """Start a web page that shows this run and its neighbours, and print the address."""
    small: bool = False
    """Take a few steps with a barely trained model, to see that it works. Keeps sizes you set."""

    def size(self, given: int | None, full: int, small: int) -> int:
        """Return the given size, or the default of a full or a small run."""
        if given is not None:
            return given
        return small if self.small else full

    @property
    def judge(self) -> Callable[[str, str], float]:
        """Return the reward function.

        A barely trained model gets no sum right. An exact match would always give it 0, and
        training would do nothing.
        """
        return right_digits if self.small else exact_match

    def new_backend(self) -> weft.RayBackend | weft.Local:
        """Return a backend for one driver."""
        return weft.RayBackend() if self.backend == "ray" else weft.Local()


class SamplingSettings(RunSettings):
    """Settings of examples that sample during training."""

    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """Engine for generation; "auto" is vllm under Ray and transformers in one process."""
    schedule: Literal["synchronous", "pipelined", "asynchronous"] = "synchronous"
    """When nodes run. With "asynchronous", generation runs one update ahead."""

    @property
    def generator(self) -> str:
        """Return the engine to use."""
        if self.engine != "auto":
            return self.engine
        return "vllm" if self.backend == "ray" else "transformers"

    def new_schedule(
        self, steps: int, prompts: int
    ) -> weft.Synchronous | weft.Pipelined | weft.Asynchronous:
        """Return the schedule with this many prompts per step."""
        kinds = {
            "synchronous": weft.Synchronous,
            "pipelined": weft.Pipelined,
            "asynchronous": weft.Asynchronous,
        }
        return kinds[self.schedule](steps=steps, prompts_per_step=prompts)


def exact_match(response: str, answer: str) -> float:
    """Return 1 for the correct answer, 0 for anything else."""
    return float(response == answer)


def right_digits(response: str, answer: str) -> float:
    """Return the share of the answer's digits that the response has in the right places.

    >>> right_digits("951", "950") == 2 / 3
    True
    """
    return sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)


def make_data(folder: Path, seed: int) -> None:
    """Write all 10,000 sums in random order, 512 of them held out."""
    sums = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(sums)
    rows = [
        {"prompt": f"B{f'{a:02d}'[::-1]}+{f'{b:02d}'[::-1]}=", "answer": f"{a + b:03d}"[::-1]}
        for a, b in sums
    ]
    pq.write_table(pa.Table.from_pylist(rows[HELD_OUT:]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:HELD_OUT]), folder / "held_out.parquet")
    lines = [
        json.dumps({"prompt": row["prompt"], "completion": row["answer"]}) for row in rows[HELD_OUT:]
    ]
    (folder / "supervised.jsonl").write_text("\n".join(lines) + "\n")


def make_model(folder: str | Path, seed: int, hidden_size: int = 64, layers: int = 2) -> None:
    """Save a Qwen2 model with random weights, and a tokenizer with one token per character."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    characters = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    characters.decoder = Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="E", bos_token="B"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(SYMBOLS),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def warm_start(
    folder: Path,
    seed: int,
    steps: int = 1000,
    *,
    name: str = "model",
    layers: int = 2,
    accuracy: float = WARM_ACCURACY,
) -> None:
    """Train on correct answers up to this held-out accuracy: the same driver with another graph.

    Args:
        folder: folder with the data; the trained model becomes its subfolder `name`.
        steps: maximum number of updates.
        layers: layers of the model.
    """
    model = folder / f"untrained_{name}"
    make_model(model, seed, layers=layers)
    answers = weft.Prompts.read(folder / "supervised.jsonl", model)
    held_out = weft.Prompts.read(folder / "held_out.parquet", model)
    actor = weft.group(weft.ActorWorker, model=str(model), learning_rate=3e-3, warmup_steps=20)
    rollout = weft.group(weft.RolloutWorker, model=str(model), engine="transformers")
    reward = weft.group(weft.RewardWorker, function=exact_match, tokenizer=str(model))
    rollout.follows(actor)
    greedy = weft.Sampling(temperature=0, max_tokens=4)
    with weft.Driver(
        supervised(answers, actor=actor),
        schedule=weft.Synchronous(steps=steps, prompts_per_step=256),
        evaluations=[
            weft.Evaluation(evaluate(held_out, rollout=rollout, reward=reward, sampling=greedy), every=4)
        ],
        stop=lambda metrics: metrics.get("eval/reward/mean", 0.0) >= accuracy,
        root=folder,
        name=f"warm_start_{name}",
        record_every=0,
        seed=seed,
    ) as driver:
        driver.run()
        driver.call(actor, "save", path=folder / name)


def prepare(root: Path, seed: int, small: bool = False) -> Path:
    """Return a folder with data, tokenizer and warm-started model, made on first use."""
    folder = root / f"arithmetic-{seed}{'-small' if small else ''}"

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted warm start
        require_folder(folder, f"root {str(root)!r}")
        print("preparing: data, tokenizer, model, and a supervised warm start", flush=True)
        make_data(folder, seed)
        warm_start(folder, seed, steps=20 if small else 1000)

    def sketch(model: Path) -> None:
        make_data(model.parent, seed)
        make_model(model, seed)

    return weft.prepared(folder / "model", make, sketch).parent


def summary(metrics: list[dict[str, float]], seconds: float) -> dict[str, float]:
    """Return the held-out accuracy and the logprob gap between generator and trainer."""
    steps = [row for row in metrics if "actor/mean_logprob_gap" in row]
    return {
        "accuracy_before": metrics[0]["eval/reward/mean"],
        "accuracy_after": metrics[-1]["eval/reward/mean"],
        "seconds": round(seconds, 1),
        "mean_logprob_gap": max(row["actor/mean_logprob_gap"] for row in steps),
        "max_logprob_gap": max(row["actor/max_logprob_gap"] for row in steps),
        "steps": len(steps),
        "samples": int(sum(row["samples"] for row in steps)),
    }
