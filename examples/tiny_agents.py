"""Shared by the examples of agents: settings, a tiny model that has seen demonstrations, and the run."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import arithmetic
import tiny_qwen3
from pydantic import Field

import weft
from weft.dashboard.pictures import draw_curve
from weft.dataflow.graph import Graph
from weft.dataflow.runs.directory import require_folder

STARTED = time.monotonic()
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


class Settings(arithmetic.SamplingSettings):
    steps: int | None = Field(default=None, ge=1)
    """Number of updates. Default: 30; with --small 3."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of tasks per step, each with eight episodes. Default: 16, or 8 with verifiers; with
    --small 4."""


def prepare(
    settings: Settings,
    name: str,
    *,
    texts: list[str],
    demonstrations: list[dict[str, Any]],
    warm_steps: int,
) -> str:
    """Return the folder of a tiny model that has learned from demonstrations. The first call makes it.

    Args:
        texts: typical texts, for the tokenizer.
        demonstrations: rows with messages. All of the assistant's turns are trained.
    """
    folder = settings.root / f"{name}-{settings.seed}{'-small' if settings.small else ''}"

    def sketch(model: Path) -> None:
        tiny_qwen3.make_model(model, texts, settings.seed, chat_template=TEMPLATE)

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted warm start
        require_folder(folder, f"root {str(settings.root)!r}")
        print("preparing: tokenizer, model, and a supervised warm start", flush=True)
        sketch(folder / "untrained")
        steps = 20 if settings.small else warm_steps
        tiny_qwen3.warm_start(folder, demonstrations, settings.seed, steps=steps, train_on="all")

    return str(weft.prepared(folder / "model", make, sketch))


def learn(
    settings: Settings,
    training: Graph,
    accuracy: Graph,
    *,
    actor: weft.ActorWorker,
    title: str,
    prompts: int = 16,
) -> None:
    """Run the training graph, with the other graph as evaluation. Print the results as JSON. `prompts`
    is the default of the setting."""
    steps = settings.size(settings.steps, 30, small=3)
    prompts = settings.size(settings.prompts, prompts, small=4)
    with weft.Driver(
        training,
        schedule=settings.new_schedule(steps, prompts),
        evaluations=[weft.Evaluation(accuracy, every=10)],
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
    curves = {"rollout/reward": "reward of episodes", "eval/pass@1": "held-out accuracy (greedy)"}
    picture = draw_curve(metrics, curves, driver.directory.path / "curve.png", title)
    print("learning curve:", picture)
    result = {
        "accuracy_before": metrics[0]["eval/pass@1"],
        "accuracy_after": metrics[-1]["eval/pass@1"],
        "turns": metrics[-1]["rollout/turns"],
        "max_logprob_gap": max(row.get("actor/max_logprob_gap", 0.0) for row in metrics),
        "seconds": round(time.monotonic() - STARTED, 1),
        "steps": steps,
    }
    print(json.dumps(result))
