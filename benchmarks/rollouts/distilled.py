"""Distance of a distilled student from the closed-form optimum, on a task of one token.

The student samples one token after each of eight prompts. The optimum of the reverse KL divergence is
the teacher's distribution. With only the teacher's four likeliest tokens, it is the distribution with
the teacher's probabilities of these tokens and of all others together.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

import weft
from weft.algorithms.distillation import distillation

sys.path.append(str(Path(__file__).resolve().parents[2]))
from examples.arithmetic import SYMBOLS, make_model

PROMPTS = [[1, k] for k in range(2, 10)]
STEPS = 300
FEW = 4


def measure() -> dict[str, float]:
    before, after = distilled(top=len(SYMBOLS))
    return {
        "distillation_gap": after,
        "distillation_gap_top_4": distilled(top=FEW)[1],
        "distillation_gap_before": before,
    }


def distilled(top: int) -> tuple[float, float]:
    """Return the largest divergence of the student from the optimum after any prompt, in nats, before and
    after the distillation."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for seed, name in enumerate(("student", "teacher")):
            make_model(root / name, seed=seed)
        _sharpen(root / "teacher")
        actor = weft.group(weft.ActorWorker, model=str(root / "student"), learning_rate=3e-3)
        rollout = weft.group(weft.RolloutWorker, model=str(root / "student"), engine="transformers")
        rollout.follows(actor)
        teacher = weft.group(weft.ReferenceWorker, name="teacher", model=str(root / "teacher"))
        source = weft.TableSource("prompts", pa.table({"prompt_ids": PROMPTS}))
        sampling = weft.Sampling(max_tokens=1)
        groups: dict[str, Any] = {"rollout": rollout, "actor": actor, "teacher": teacher}
        graph = distillation(source, **groups, n=4, top=top, sampling=sampling)
        schedule = weft.Synchronous(steps=STEPS, prompts_per_step=len(PROMPTS))
        quiet: dict[str, Any] = {"record_every": 0, "progress": False}
        with weft.Driver(graph, schedule=schedule, root=root / "runs", name="run", **quiet) as driver:
            driver.run()
            driver.call(actor, "save", path=root / "trained")
        before, after, wanted = (_distributions(root / n) for n in ("student", "trained", "teacher"))
    gaps = [
        max(_divergence(mine, theirs, top) for mine, theirs in zip(student, wanted, strict=True))
        for student in (before, after)
    ]
    return round(gaps[0], 6), round(gaps[1], 6)


def _sharpen(folder: Path) -> None:
    """Give the tokens clearly different probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    model.save_pretrained(folder)


def _distributions(folder: Path) -> Any:
    """Return the model's distribution of the token after each prompt: [prompts, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor(PROMPTS)).logits[:, -1].softmax(-1)


def _divergence(student: Any, teacher: Any, top: int) -> float:
    """Return the divergence over the teacher's likeliest tokens and all others together."""
    import torch

    chosen = teacher.topk(top).indices
    parts = [
        torch.cat([each[chosen], (1 - each[chosen].sum()).clamp(min=1e-12)[None]])
        for each in (student, teacher)
    ]
    return float((parts[0] * (parts[0] / parts[1]).log()).sum())
