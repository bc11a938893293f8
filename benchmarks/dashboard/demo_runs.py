"""Demo runs for the dashboard: real runs of a tiny model, in every state that a dashboard meets.

    python benchmarks/dashboard/demo_runs.py FOLDER                     # all that end; a minute
    python benchmarks/dashboard/demo_runs.py FOLDER --only live         # one that runs until it is stopped

| run | what it is |
|---|---|
| `first`, `second` | the same training with two seeds and two learning rates; done, with evaluations and checkpoints |
| `ahead` | asynchronous: responses with tokens of two versions |
| `dialogues` | a model that calls a calculator: conversations |
| `ranks` | under Ray: two ranks generate, two train, two score |
| `killed` | its process was killed in the middle of a step |
| `failed` | its reward function raises |
| `nothing` | killed before the end of the first step |
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent.parent)]
ENDED = ("first", "second", "ahead", "ranks", "dialogues", "killed", "failed", "nothing")


def train(root: Path, name: str) -> None:
    if name == "dialogues":
        import tool_dialogues

        return tool_dialogues.train(root)
    import weft
    from examples.arithmetic import make_data, make_model, right_digits
    from weft.algorithms.evaluation import evaluate
    from weft.algorithms.grpo import grpo

    data = root / ".data"
    if not (data / "model").exists():
        data.mkdir(parents=True, exist_ok=True)
        make_data(data, 0)
        make_model(data / "model", seed=0)
    model = str(data / "model")
    made = [0]

    def judge(response: str, answer: str) -> float:
        made[0] += 1
        if name == "failed" and made[0] > 400:
            raise ValueError(f"no rule for {response!r}")
        if name == "live":
            time.sleep(0.004)
        if name == "nothing" or (name == "killed" and made[0] > 1500):
            os.kill(os.getpid(), signal.SIGKILL)
        return right_digits(response, answer)

    prompts = weft.Prompts.read(data / "train.parquet", model)
    held_out = weft.Prompts.read(data / "held_out.parquet", model, limit=64)
    rate = 1e-3 if name == "second" else 3e-3
    actor = weft.group(weft.ActorWorker, model=model, learning_rate=rate)
    rollout = weft.group(weft.RolloutWorker, model=model, engine="transformers")
    reward = weft.group(weft.RewardWorker, function=judge, tokenizer=model)
    rollout.follows(actor)
    sampling = weft.Sampling(max_tokens=6)
    graph = grpo(
        prompts, rollout=rollout, reward=reward, actor=actor, n=8, sampling=sampling, entropies=True
    )
    greedy = weft.Sampling(max_tokens=6, temperature=0)
    evaluation = weft.Evaluation(
        evaluate(held_out, rollout=rollout, reward=reward, sampling=greedy),
        every=10,
        at_start=name != "nothing",
    )
    steps = 100_000 if name == "live" else 40
    places: dict[str, weft.Place] = {}
    backend = None
    if name == "ranks":
        shared = weft.ResourcePool("two", cpus=2)
        places = {group: weft.Place(shared, ranks=2) for group in ("rollout", "actor", "reward")}
        backend, steps = weft.RayBackend(), 12
    schedule = (
        weft.Asynchronous(steps=steps, prompts_per_step=16, max_staleness=1)
        if name == "ahead"
        else weft.Synchronous(steps=steps, prompts_per_step=16)
    )
    with weft.Driver(
        graph,
        schedule=schedule,
        placement=places or None,
        backend=backend,
        evaluations=[evaluation],
        checkpoint=weft.CheckpointConfig(every=0 if name in ("live", "nothing") else 10),
        root=root,
        name=name,
        seed=int(name == "second"),
        stop_on=(),
    ) as driver:
        driver.run()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*ENDED, "live"], default=list(ENDED))
    parser.add_argument("--here", action="store_true", help="in this process")
    arguments = parser.parse_args()
    for name in arguments.only:
        if arguments.here:
            train(arguments.folder, name)
        else:
            subprocess.run(
                [sys.executable, __file__, str(arguments.folder), "--only", name, "--here"], check=False
            )


if __name__ == "__main__":
    main()
