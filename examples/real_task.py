"""Settings, placement and data of the examples for real models, and of their trials (`--tiny`)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

import weft
from weft.controllers.node_layout import machine_cpus, machine_gpus
from weft.workers.reward import reward_processes

GPU_SHARE = 0.85
"""Share of a GPU's memory for vLLM. Offloaded groups on the GPU keep a few GiB of the rest."""


class RealSettings(weft.Config):
    """Settings of the examples for real models."""

    model: str | None = None
    """Folder or Hugging Face id of a model with 0.5B to 8B parameters and a chat template."""
    data: str | None = None
    """File, folder, or Hugging Face id such as openai/gsm8k. Default with --tiny: generated
    data."""
    gpus: int | None = Field(default=None, ge=0)
    """Number of GPUs, on which all groups take turns. Default: all GPUs of this machine."""
    backend: Literal["ray", "local"] = "ray"
    """Where workers run: "ray" uses processes of a Ray cluster and vLLM, "local" this process, so
    that breakpoints work."""
    tiny: bool = False
    """Run a trial of two minutes on a CPU: train a tiny Qwen3 model on generated word problems."""
    thinking: bool = False
    """Let the model think before it answers, if its chat template supports this."""
    max_tokens: int | None = Field(default=None, ge=1)
    """[tokens] Longest response. Default: 1,024; with --thinking 4,096; with --tiny 32."""
    steps: int | None = Field(default=None, ge=1)
    """Number of updates. Default: 200; with --tiny 16, or 8 with --tiny and --data."""
    prompts_per_step: int | None = Field(default=None, ge=1)
    """Number of prompts or pairs per update. Default: 128; for PPO 512; with --tiny fewer. For a
    trial on a CPU, 8 is enough."""
    adapter: int | None = Field(default=None, ge=1)
    """Rank of a LoRA adapter; its learning rate is ten times higher. Default: train all weights."""
    offload: Literal["nothing", "moments", "everything"] = "nothing"
    """Parts of a trained model to move to host memory while other groups use the GPU; see
    docs/gpu.md."""
    root: Path = Path("runs")
    """Folder for run directories."""
    name: str | None = None
    """Name of the run and its directory. Default: the current time."""
    resume: str = "none"
    """Run to resume: "latest" for the run of this name (or the newest, without a name), or the
    folder of a run or checkpoint."""
    trackers: tuple[str, ...] = ()
    """Trackers that also get the metrics: tensorboard, wandb, mlflow, trackio, prometheus (under
    Ray)."""
    dashboard: bool = False
    """Serve a web page that shows all runs of the folder, and print its address."""
    seed: int = 0
    """Random seed of the sampling and the order of rows."""

    @model_validator(mode="after")
    def _has_a_model_and_data(self) -> RealSettings:
        if self.tiny == (self.model is not None):
            raise ValueError("give --model PATH|ID, or --tiny for a model that is made here")
        if not self.tiny and self.data is None:
            raise ValueError("give --data PATH|ID, such as --data openai/gsm8k")
        return self

    def new_backend(self) -> weft.RayBackend | weft.Local:
        """Return a new backend; each driver needs its own."""
        return weft.RayBackend() if self.backend == "ray" else weft.Local()

    @property
    def engine(self) -> str:
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
        """Settings of trained workers: on GPUs, bfloat16 and activation checkpointing."""
        return {
            "dtype": "bfloat16" if self.num_gpus else "float32",
            "activation_checkpointing": bool(self.num_gpus),
            "lora": None
            if self.adapter is None
            else weft.Lora(rank=self.adapter, alpha=2 * self.adapter),
            "offload": self.offload,
        }

    def rate(self, of_model: float) -> float:
        """Return the learning rate to use, given the rate for full fine-tuning."""
        return of_model if self.adapter is None else 10 * of_model

    def places(self, groups: Iterable[str]) -> dict[str, weft.Place]:
        """Return a placement in which the groups take turns on all devices: one rank per GPU or,
        without GPUs, up to two ranks under Ray and one in this process. On GPUs, the groups leave CPUs
        for processes that compute rewards."""
        cpus = machine_cpus()
        if self.num_gpus:
            cpus = max(1, cpus - reward_processes(cpus))
        devices = weft.ResourcePool("devices", cpus=cpus, gpus=self.num_gpus)
        place = weft.Place(
            devices, ranks=self.num_gpus or (min(2, machine_cpus()) if self.backend == "ray" else 1)
        )
        return dict.fromkeys(groups, place)


def read_problems(
    settings: RealSettings, data: str, model: str, system: str
) -> tuple[weft.Prompts, weft.Prompts, int]:
    """Return (training problems, held-out problems, longest context in tokens). The context has
    room for 99 % of the prompts with the longest response. The run drops longer prompts, and prints
    a summary of the data when it starts."""
    problems = weft.Prompts.read(
        data,
        model,
        system=system,
        chat_template_kwargs={"enable_thinking": settings.thinking},
        too_long="drop",
    )
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
        metrics: metrics of each step.
        accuracy: name of the evaluation metric to report.
        started: start of the program. [s, `time.monotonic`]
    """
    scores = [row[accuracy] for row in metrics if accuracy in row]
    result = {
        "accuracy_before": scores[0],
        "accuracy_after": scores[-1],
        "steps": int(metrics[-1]["step"]),
    }
    return json.dumps(result | {"seconds": round(time.monotonic() - started, 1)})
