"""A script with one mistake, named on the command line, for `test_bad_input.py`.

It reads command lines as JSON from standard input and runs with each of them in turn. For each it
prints one line of JSON: exit code, message to the user, heavy modules imported so far, and CPU
seconds.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field
from toy import ToyActor, ToyRollout, centred

import weft


class Rates(weft.Config):
    peak: float = Field(default=1e-3, gt=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"


class Settings(weft.Config):
    mistake: str = "none"
    """The mistake to make."""
    root: Path = Path()
    learning_rate: float = 1e-3
    mode: Literal["fast", "slow"] = "fast"
    steps: int = Field(default=1, ge=1, le=1000)
    sizes: tuple[int, ...] = (1,)
    small: bool = False
    rates: Rates = Rates()


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def nan(response: str, answer: str) -> float:
    return float("nan")


def unnamed(sentence: str) -> float:
    return 0.0


@weft.node(reads=("reward",), writes=("reward_kept",))
def best(samples: weft.Batch) -> weft.Batch:
    """Drop three rows of four, although it is declared as a map."""
    return samples.take([0]).with_columns(reward_kept=[1.0])


@weft.graph
def scored(prompts: Any, *, rollout: Any, reward: Any, actor: Any, loses: bool) -> Any:
    samples = reward.score(rollout.generate(prompts))
    return actor.update(centred(best(samples) if loses else samples))


anything: Any = weft
"""Hides the mistakes from type checkers."""
VALUES: dict[str, Callable[[], object]] = {
    "schedule steps": lambda: anything.Synchronous(steps=0, prompts_per_step=2),
    "staleness": lambda: anything.Asynchronous(steps=1, prompts_per_step=2, max_staleness=-1),
    "partial": lambda: anything.Asynchronous(steps=1, prompts_per_step=2, partial_rollouts="contniue"),
    "ranks": lambda: anything.Place(anything.ResourcePool("pool", cpus=1), ranks=0),
    "buffer": lambda: anything.BufferConfig(max_row=10),
    "checkpoint": lambda: anything.CheckpointConfig(evry=3),
    "keep": lambda: anything.CheckpointConfig(every=1, keep=0),
    "temperature": lambda: anything.Sampling(max_tokens=4, temperature=-1),
    "method": lambda: anything.train("nowhere", [{"prompt": "a"}], exact, method="gpro"),
    "rewards": lambda: anything.train("nowhere", [{"prompt": "a"}]),
    "node": lambda: anything.group(ToyRollout).genrate,
    "config": lambda: anything.group(anything.ActorWorker, model="nowhere", learnin_rate=1e-3),
    "lora": lambda: anything.Lora(rank=0),
}
"""Mistakes in a value: name -> function that makes the value."""
DRIVER: dict[str, dict[str, Any]] = {
    "argument": {"nme": "first"},
    "name": {"name": "runs/first"},
    "resume": {"resume": "lastest"},
    "progress": {"progress": "plian"},
    "stop_on": {"stop_on": ("no_signl",)},
    "schedule": {"schedule": weft.Synchronous},
    "max_rows": {"buffer": weft.BufferConfig(max_rows=1)},
    "place": {"placement": {"actr": weft.Place(weft.ResourcePool("pool", cpus=1))}},
}
"""Mistakes in an argument of the driver."""


def main(settings: Settings) -> None:
    """Make a run with one mistake."""
    wrong = settings.mistake
    if wrong in VALUES:
        VALUES[wrong]()
    columns: dict[str, Any] = {
        "prompt_ids": [[1], [2]],
        "answer" if wrong != "column" else "answr": ["a", "b"],
    }
    source = weft.TableSource("prompts", pa.table(columns))
    settings_of_rollout: dict[str, Any] = {"fail_onn": 3} if wrong == "setting" else {}
    rollout = weft.group(ToyRollout, **settings_of_rollout)
    function = {"signature": unnamed, "nan": nan}.get(wrong, exact)
    tokenizer = settings.root if wrong != "tokenizer" else settings.root / "nowhere"
    reward = weft.group(weft.RewardWorker, function=function, tokenizer=tokenizer)
    actor = weft.group(ToyActor)
    rollout.follows(actor)
    usual: dict[str, Any] = {
        "schedule": weft.Synchronous(steps=1, prompts_per_step=2),
        "placement": {
            "actor": weft.Place(weft.ResourcePool("big", cpus=5000 if wrong == "cpus" else 1))
        },
        "backend": weft.RayBackend() if wrong in ("cpus", "address") else weft.Local(),
        "root": settings.root,
        "progress": False,
    }
    training = scored(source, rollout=rollout, reward=reward, actor=actor, loses=wrong == "lost")
    with weft.Driver(training, **usual | DRIVER.get(wrong, {})) as driver:
        driver.run()


def try_each(command_lines: list[list[str]]) -> None:
    for arguments in command_lines:
        os.environ.pop("RAY_ADDRESS", None)
        if "address" in arguments:
            os.environ["RAY_ADDRESS"] = "http://ray-head:8265"
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                code = weft.launch(main, arguments)
            except SystemExit as left:
                code = left.code
            except Exception:
                code = traceback.print_exc()
        imported = sorted({"torch", "ray", "vllm", "transformers"} & set(sys.modules))
        print(json.dumps([code, said.getvalue().strip(), imported]))


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(weft.launch(main))
    try_each(json.load(sys.stdin))
