"""Task of the small examples: two-digit addition, which RL can learn on a laptop's CPU.

The prompt `B21+74=` asks for 12 + 47, and the answer is `950`. All numbers have their digits
reversed, so that the model writes a carry after the digits that cause it. This file makes the data
(Parquet), the tokenizer, and a model with a supervised warm start. It also has the examples' common
settings.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

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
"""Held-out accuracy that ends the warm start. RL needs a policy that is sometimes correct."""


class RunSettings(weft.Config):
    """Settings of all examples with arithmetic."""

    backend: Literal["ray", "local"] = "ray"
    """Where workers run: "ray" uses processes of a Ray cluster, "local" this process."""
    seed: int = 0
    """Random seed of the data, the model, the sampling and the order of rows."""
    root: Path = Path("runs")
    """Folder for data, models and run directories."""
    name: str | None = None
    """Name of the run and its directory. Default: the current time."""
    checkpoint_every: int = Field(default=100, ge=0)
    """Number of steps between checkpoints, or 0 for none."""
    resume: str = "none"
    """Run to resume: "latest" for the run of this name (or the newest, without a name), or the
    folder of a run or checkpoint."""
    trackers: tuple[str, ...] = ()
    """Trackers that also get the metrics: tensorboard, wandb, mlflow, trackio, prometheus (under
    Ray)."""
    dashboard: bool = False
    """Serve a web page that shows all runs of the folder, and print its address."""
    small: bool = False
    """Run only a few steps, with a barely trained model, to check that the example works. Sizes
    that you set take precedence."""

    def size(self, given: int | None, full: int, small: int) -> int:
        """Return `given` if it is set, otherwise the default of a full or a small run."""
        if given is not None:
            return given
        return small if self.small else full

    @property
    def judge(self) -> Callable[[str, str], float]:
        """Return the reward function. A small run uses partial rewards, because its barely trained
        model gets no sum right: with an exact match, all rewards would be 0."""
        return right_digits if self.small else exact_match

    def new_backend(self) -> weft.RayBackend | weft.Local:
        """Return a new backend; each driver needs its own."""
        return weft.RayBackend() if self.backend == "ray" else weft.Local()


class SamplingSettings(RunSettings):
    """Settings of examples that sample during training."""

    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """Engine for generation; "auto" selects vllm under Ray, and transformers in one process."""
    schedule: Literal["synchronous", "pipelined", "asynchronous"] = "synchronous"
    """When the nodes of the graph run. With "asynchronous", generation is one update ahead."""

    @property
    def generator(self) -> str:
        if self.engine != "auto":
            return self.engine
        return "vllm" if self.backend == "ray" else "transformers"

    def new_schedule(
        self, steps: int, prompts: int
    ) -> weft.Synchronous | weft.Pipelined | weft.Asynchronous:
        """Return the selected schedule for this number of steps, and of prompts per step."""
        kinds = {
            "synchronous": weft.Synchronous,
            "pipelined": weft.Pipelined,
            "asynchronous": weft.Asynchronous,
        }
        return kinds[self.schedule](steps=steps, prompts_per_step=prompts)


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def right_digits(response: str, answer: str) -> float:
    """Return the share of the answer's digits that are in the same place in the response.

    >>> right_digits("951", "950") == 2 / 3
    True
    """
    return sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)


def make_data(folder: Path, seed: int) -> None:
    """Write all 10,000 sums in random order: 512 to `held_out.parquet`, the others to
    `train.parquet` and, as prompts with completions, to `supervised.jsonl`."""
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


def make_model(
    folder: str | Path,
    seed: int,
    hidden_size: int = 64,
    layers: int = 2,
    *,
    symbols: Sequence[str] = SYMBOLS,
    pattern: str = ".",
) -> None:
    """Save a Qwen2 model with random weights, and a tokenizer with these symbols. Each match of the
    pattern is a token; by default, each character."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    backend: Any = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="E", bos_token="B"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(symbols),
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
    """Train a new model on the correct answers in a folder of data; see `supervise`."""
    model = folder / f"untrained_{name}"
    make_model(model, seed, layers=layers)
    answers = weft.Prompts.read(folder / "supervised.jsonl", model)
    held_out = weft.Prompts.read(folder / "held_out.parquet", model)
    sizes = {"seed": seed, "steps": steps, "accuracy": accuracy, "max_tokens": 4}
    supervise(model, answers, held_out, exact_match, folder / name, **sizes)


def supervise(
    model: Path,
    answers: weft.Prompts,
    held_out: weft.Prompts,
    function: Callable[..., float],
    out: Path,
    *,
    seed: int,
    steps: int,
    max_tokens: int,
    accuracy: float = WARM_ACCURACY,
) -> None:
    """Train a model on correct answers, with the driver for RL and another graph.

    Args:
        function: reward function of held-out responses.
        out: folder for the trained model.
        steps: maximum number of updates.
        accuracy: held-out accuracy that ends the training.
    """
    actor = weft.group(weft.ActorWorker, model=str(model), learning_rate=3e-3, warmup_steps=20)
    rollout = weft.group(weft.RolloutWorker, model=str(model), engine="transformers")
    reward = weft.group(weft.RewardWorker, function=function, tokenizer=str(model))
    rollout.follows(actor)
    greedy = weft.Sampling(temperature=0, max_tokens=max_tokens)
    with weft.Driver(
        supervised(answers, actor=actor),
        schedule=weft.Synchronous(steps=steps, prompts_per_step=256),
        evaluations=[
            weft.Evaluation(evaluate(held_out, rollout=rollout, reward=reward, sampling=greedy), every=4)
        ],
        stop=lambda metrics: metrics.get("eval/reward/mean", 0.0) >= accuracy,
        root=out.parent,
        name=f"warm_start_{out.name}",
        record_every=0,
        seed=seed,
    ) as driver:
        driver.run()
        driver.call(actor, "save", path=out)


def prepare(root: Path, seed: int, small: bool = False) -> Path:
    """Return a folder with data, tokenizer and warm-started model. The first call makes it."""
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
    """Return the results of a run: held-out accuracy before and after, duration [s], sizes, and the
    log-probability gap between generator and trainer [nats]."""
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
