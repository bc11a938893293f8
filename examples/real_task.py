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
"""Share of a GPU's memory for vLLM when other groups take turns on the GPU."""


class RealSettings(weft.Config):
    """Settings of the examples for real models."""

    model: str | None = None
    """Folder or Hugging Face id of a model of 0.5B to 8B with a chat template."""
    data: str | None = None
    """File, folder, or Hugging Face id such as openai/gsm8k. Default with --tiny: generated rows."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs that all groups share in turns. Default: all of this machine."""
    backend: Literal["ray", "local"] = "ray"
    """Processes on a Ray cluster with vLLM, or this process, where breakpoints work."""
    tiny: bool = False
    """Trial in two minutes on a CPU: a tiny Qwen3 model learns generated word problems."""
    thinking: bool = False
    """Let the model think before it answers, if its chat template supports that."""
    max_tokens: int | None = Field(default=None, ge=1)
    """[tokens] Longest response. Default: 1,024; with thinking 4,096; with --tiny 32."""
    steps: int | None = Field(default=None, ge=1)
    """Number of updates. Default: 200; with --tiny 16, or 8 with --data."""
    prompts_per_step: int | None = Field(default=None, ge=1)
    """Rows per update. Default: 128, PPO 512; with --tiny fewer. Use 8 for a trial on a CPU."""
    adapter: int | None = Field(default=None, ge=1)
    """Rank of a LoRA adapter, trained at ten times the learning rate. Default: train all weights."""
    offload: Literal["nothing", "moments", "everything"] = "nothing"
    """Parts of a trained model to keep in host memory while unused; see docs/gpu.md."""
    root: Path = Path("runs")
    """Folder of run directories."""
    name: str | None = None
    """Name of the run and its directory. Default: the time."""
    resume: str = "none"
    """Run to resume: "latest" for this name (or the newest), or the folder of a run or checkpoint."""
    trackers: tuple[str, ...] = ()
    """Extra outputs for metrics: tensorboard, wandb, mlflow, trackio, prometheus (under Ray)."""
    dashboard: bool = False
    """Start a web page that shows this run and its neighbours, and print the address."""
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
        """Return a backend for one driver."""
        return weft.RayBackend() if self.backend == "ray" else weft.Local()

    @property
    def engine(self) -> str:
        """Engine for generation."""
        return "vllm" if self.backend == "ray" else "transformers"

    @property
    def num_gpus(self) -> int:
        """Number of GPUs to use."""
        return machine_gpus() if self.gpus is None else self.gpus

    @property
    def num_steps(self) -> int:
        """Number of updates to make."""
        return self.steps or (200 if not self.tiny else 16 if self.data is None else 8)

    @property
    def longest_response(self) -> int:
        """[tokens] Longest response."""
        return self.max_tokens or (32 if self.tiny else 4096 if self.thinking else 1024)

    @property
    def training(self) -> dict[str, Any]:
        """Settings of trained models: bfloat16 on GPUs, with activation checkpointing."""
        return {
            "dtype": "bfloat16" if self.num_gpus else "float32",
            "activation_checkpointing": bool(self.num_gpus),
            "lora": None
            if self.adapter is None
            else weft.Lora(rank=self.adapter, alpha=2 * self.adapter),
            "offload": self.offload,
        }

    def rate(self, of_model: float) -> float:
        """Return the learning rate, given the rate for full fine-tuning."""
        return of_model if self.adapter is None else 10 * of_model

    def places(self, groups: Iterable[str]) -> dict[str, weft.Place]:
        """Place the groups on all devices in turns: one rank per GPU, or up to two without GPUs."""
        devices = weft.ResourcePool("devices", cpus=machine_cpus(), gpus=self.num_gpus)
        place = weft.Place(
            devices, ranks=self.num_gpus or (min(2, machine_cpus()) if self.backend == "ray" else 1)
        )
        return dict.fromkeys(groups, place)


def read_problems(
    settings: RealSettings, data: str, model: str, system: str
) -> tuple[weft.Prompts, weft.Prompts, int]:
    """Return (training problems, held-out problems, tokens of the longest prompt with response).

    The longest 1 % of prompts are dropped. The run prints a summary of the data at its start.
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
    """Return the result of a run as JSON.

    Args:
        metrics: metrics of every step.
        accuracy: name of the evaluation metric, such as the share of correct answers.
        started: start of the program on the monotonic clock. [s]
    """
    scores = [row[accuracy] for row in metrics if accuracy in row]
    result = {
        "accuracy_before": scores[0],
        "accuracy_after": scores[-1],
        "steps": int(metrics[-1]["step"]),
    }
    return json.dumps(result | {"seconds": round(time.monotonic() - started, 1)})
