"""The run whose processes `kills.py` kills: GRPO of a tiny random model through `rollout.run`, under Ray.

    python benchmarks/agents/killed_agents.py --folder WORK --make-model
    python benchmarks/agents/killed_agents.py --folder WORK --root RUNS --name a --address HOST:PORT

The second command resumes the run if it exists. Each attempt at an episode has several turns, and a
sandbox for the commands between them. It names its process after its phase, and at its end writes to
WORK/evidence what it has seen.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Literal

import httpx
import pyarrow as pa

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import weft
from weft.algorithms.grpo import grpo
from weft.workers.agents.harness import Function
from weft.workers.sandbox import Limits, Sandbox, working_engine

QUESTIONS = 24
PROMPTS, EPISODES = 3, 3
"""Prompts per step, and episodes of each prompt."""
TURNS = 3
TURN_TOKENS = 12
PHASES = ("start", "model", "tool", "grade")
"""Phases of an episode; "model" and "tool" follow each other several times."""
CALL_TIMEOUT_S = 600.0
"""[s] For a busy machine."""
MODEL, EVIDENCE = "model", "evidence"
PR_SET_NAME = 15


# The harness


def show(phase: str) -> None:
    """Name this process after what it does."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, phase.encode(), 0, 0, 0)


def solve(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """Talk to the model, with a command in a sandbox after each answer but the last. The reward depends
    on the whole conversation."""
    show("start")
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    logprobs: list[list[float]] = []
    results: list[str] = []
    with (
        Sandbox(Limits(processes=8), engine=row["sandbox"]) as sandbox,
        httpx.Client(base_url=base_url, timeout=600, verify=False) as client,
    ):
        for turn in range(1, TURNS + 1):
            show(f"model {turn}")
            body = {"model": "policy", "messages": messages, "logprobs": True}
            [choice] = client.post("/chat/completions", json=body).raise_for_status().json()["choices"]
            logprobs.append([token["logprob"] for token in choice["logprobs"]["content"]])
            messages.append(choice["message"])
            if turn < TURNS:
                show(f"tool {turn}")
                said = (choice["message"]["content"] or "").encode()
                command = ["sh", "-c", f"sleep {random.uniform(0, 0.6):.3f}; cksum"]
                done = sandbox.run(command, stdin=said)
                if not done.succeeded:
                    raise RuntimeError(f"the command ended with {done.ending}: {done.stderr!r}")
                results.append(done.stdout.decode().split()[0])
                messages.append({"role": "user", "content": results[-1]})
    show("grade")
    time.sleep(random.uniform(0, 0.3))
    reward = zlib.crc32(json.dumps([messages, logprobs]).encode()) / 2**32
    seen = {
        "question": row["question"],
        "logprobs": logprobs,
        "results": results,
        "reward": reward,
    }
    path = Path(row["evidence"]) / f"{os.getpid()}-{time.time_ns()}.json"
    path.write_text(json.dumps(seen))
    return reward


# The run


class Settings(weft.Config):
    folder: Path
    """Folder with the model and the evidence."""
    make_model: bool = False
    """Make the model and exit."""
    root: Path = Path("runs")
    """Folder for the run directory."""
    name: str = "run"
    address: str = ""
    """Address of the Ray cluster; empty for one process without Ray."""
    schedule: Literal["synchronous", "asynchronous"] = "synchronous"
    partial_rollouts: Literal["continue", "recompute", "finish", "requeue"] = "continue"
    max_staleness: int = 1
    steps: int = 10


def make_model(folder: Path) -> None:
    import tiny_agents  # pyright: ignore[reportMissingImports]
    import tiny_qwen3  # pyright: ignore[reportMissingImports]

    texts = [f"Question {number}?" for number in range(QUESTIONS)]
    tiny_qwen3.make_model(folder, texts, chat_template=tiny_agents.TEMPLATE)


def main(settings: Settings) -> None:
    """Run until killed."""
    model, evidence = str(settings.folder / MODEL), settings.folder / EVIDENCE
    if settings.make_model:
        make_model(Path(model))
        return
    evidence.mkdir(exist_ok=True)
    questions = pa.table(
        {
            "question": [f"Question {number}?" for number in range(QUESTIONS)],
            "evidence": [str(evidence.absolute())] * QUESTIONS,
            "sandbox": [working_engine()] * QUESTIONS,
        }
    )
    actor = weft.group(weft.ActorWorker, name="actor", model=model, learning_rate=1e-4)
    rollout = weft.group(weft.RolloutWorker, name="rollout", model=model, engine="transformers")
    rollout.follows(actor)
    graph = grpo(
        weft.TableSource("questions", questions),
        rollout=rollout,
        harness=Function(function=f"{__file__}:solve", concurrency=4 * PROMPTS * EPISODES),
        actor=actor,
        n=EPISODES,
        sampling=weft.Sampling(max_tokens=TURN_TOKENS),
    )
    schedule: Any = weft.Synchronous(steps=settings.steps, prompts_per_step=PROMPTS)
    if settings.schedule == "asynchronous":
        schedule = weft.Asynchronous(
            steps=settings.steps,
            prompts_per_step=PROMPTS,
            max_staleness=settings.max_staleness,
            partial_rollouts=settings.partial_rollouts,
        )
    pools = {name: weft.ResourcePool(f"for {name}", cpus=1) for name in ("rollout", "actor")}
    ranks = {"rollout": 2 if settings.address else 1, "actor": 1}
    with weft.Driver(
        graph,
        schedule=schedule,
        placement={name: weft.Place(pool, ranks=ranks[name]) for name, pool in pools.items()},
        backend=weft.RayBackend(settings.address) if settings.address else weft.Local(),
        checkpoint=weft.CheckpointConfig(every=1),
        resume="latest",
        call_timeout_s=CALL_TIMEOUT_S,
        root=settings.root,
        name=settings.name,
        trackers=(),
    ) as driver:
        driver.run()


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
