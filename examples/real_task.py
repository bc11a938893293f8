"""Settings, devices and data of the examples for real models, and of their trial (`--tiny`)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

import weft
from weft.controllers.placement import machine_cpus, machine_gpus

GPU_SHARE = 0.6
"""vLLM's part of a GPU's memory where other groups take turns on it."""


class RealSettings(weft.Config):
    """A model, its data, and where they meet."""

    model: str | None = None
    """Folder, or Hugging Face id, of a model of 0.5B to 8B with a chat template."""
    data: str | None = None
    """File or folder of rows, or a Hugging Face id such as openai/gsm8k. Default with --tiny: rows made here."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs that all groups share, taking turns. Default: those of this machine."""
    backend: Literal["ray", "local"] = "ray"
    """Processes on a Ray cluster with vLLM; or everything in this process, where breakpoints work."""
    tiny: bool = False
    """A trial in two minutes on a CPU: a tiny model of Qwen3's shape, made here, learns word problems that are made here."""
    thinking: bool = False
    """Whether the chat template lets the model think before it answers."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest response, in tokens. Default: 1,024; with thinking 4,096; with --tiny 32."""
    steps: int | None = Field(default=None, ge=1)
    """Updates of the policy. Default: 200; with --tiny 16, or 8 with --data."""
    prompts_per_step: int | None = Field(default=None, ge=1)
    """Rows of each update. Default: 128, PPO 512; with --tiny fewer. A trial on a CPU wants 8."""
    adapter: int | None = Field(default=None, ge=1)
    """Rank of an adapter (LoRA) to train in the model's place, at ten times the rate. Default: the whole model is trained."""
    offload: Literal["nothing", "moments", "everything"] = "nothing"
    """What of a trained model lies in host memory while it is not used: docs/gpu.md says which models need it."""
    root: Path = Path("runs")
    """Folder of run directories."""
    name: str | None = None
    """Name of the run and its directory. Default: the time."""
    resume: str = "none"
    """latest: go on with the run of that name (or the newest); or the folder of a run or a checkpoint."""
    trackers: tuple[str, ...] = ()
    """What metrics go to besides the run's own files: tensorboard, wandb, mlflow, trackio, prometheus (under Ray)."""
    dashboard: bool = False
    """Start a web page over the runs beside this one, and print its address."""
    seed: int = 0
    """Seed of sampling and order."""

    @model_validator(mode="after")
    def _has_a_model_and_data(self) -> RealSettings:
        if self.tiny == (self.model is not None):
            raise ValueError("give --model PATH|ID, or --tiny for a model that is made here")
        if not self.tiny and self.data is None:
            raise ValueError("give --data PATH|ID, such as --data openai/gsm8k")
        return self

    def new_backend(self) -> weft.RayBackend | weft.Local:
        """Of one driver."""
        return weft.RayBackend() if self.backend == "ray" else weft.Local()

    @property
    def engine(self) -> str:
        """What generates."""
        return "vllm" if self.backend == "ray" else "transformers"

    @property
    def num_gpus(self) -> int:
        """GPUs that are used."""
        return machine_gpus() if self.gpus is None else self.gpus

    @property
    def num_steps(self) -> int:
        """Updates, decided."""
        return self.steps or (200 if not self.tiny else 16 if self.data is None else 8)

    @property
    def longest_response(self) -> int:
        """Tokens, decided."""
        return self.max_tokens or (32 if self.tiny else 4096 if self.thinking else 1024)

    @property
    def training(self) -> dict[str, Any]:
        """Settings of a trained model: bfloat16 on GPUs, where activations are computed twice to save memory."""
        return {
            "dtype": "bfloat16" if self.num_gpus else "float32",
            "activation_checkpointing": bool(self.num_gpus),
            "lora": None
            if self.adapter is None
            else weft.Lora(rank=self.adapter, alpha=2 * self.adapter),
            "offload": self.offload,
        }

    def rate(self, of_model: float) -> float:
        """The learning rate, from that of a whole model."""
        return of_model if self.adapter is None else 10 * of_model

    def places(self, groups: Iterable[str]) -> dict[str, weft.Place]:
        """The groups on all devices, where they take turns: a rank for each GPU; without a GPU at most two ranks."""
        devices = weft.ResourcePool("devices", cpus=machine_cpus(), gpus=self.num_gpus)
        place = weft.Place(
            devices, ranks=self.num_gpus or (min(2, machine_cpus()) if self.backend == "ray" else 1)
        )
        return dict.fromkeys(groups, place)


def read_problems(
    settings: RealSettings, data: str, model: str, system: str
) -> tuple[weft.Prompts, weft.Prompts, int]:
    """Problems with answers: (to train on, held out, tokens of the longest prompt and response together).

    What was understood of the data is printed when the run starts. The longest one in a hundred prompts is left out.
    """
    problems = weft.Prompts.read(data, model, system=system, thinking=settings.thinking, too_long="drop")
    assert problems.understood is not None
    longest = problems.understood.prompts.limit()
    context = longest + settings.longest_response
    print(
        f"context: {context:,} tokens, for prompts of up to {longest:,} and responses of {settings.longest_response:,}"
    )
    train, held_out = problems.hold_out(
        min(128 if settings.tiny else 512, len(problems) // 5), settings.seed
    )
    return train, held_out, context


def summary(metrics: list[dict[str, float]], accuracy: str, started: float) -> str:
    """What a run reached, as JSON.

    Args:
        metrics: of every step.
        accuracy: the evaluation's metric, such as the share of right answers.
        started: moment of the monotonic clock at which the program began, in seconds.
    """
    scores = [row[accuracy] for row in metrics if accuracy in row]
    result = {
        "accuracy_before": scores[0],
        "accuracy_after": scores[-1],
        "steps": int(metrics[-1]["step"]),
    }
    return json.dumps(result | {"seconds": round(time.monotonic() - started, 1)})
