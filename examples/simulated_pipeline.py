"""Simulated GRPO with a pipeline-parallel actor: prints the time of a step.

python examples/simulated_pipeline.py --model FOLDER --stages 4 --chunks 2
weft plan examples/simulated_pipeline.py --model FOLDER --stages 4

The costs are invented; replace them with measurements from your machines.
"""

from pathlib import Path

from arithmetic import exact_match
from pipeline_engine import PipelineEngine
from pydantic import Field

import weft
from weft.algorithms.grpo import grpo
from weft.algorithms.sampling import Sampling
from weft.controllers.simulation.costs import CostModel, Generation, LogNormal, PipelineCost


class Settings(weft.Config):
    model: Path
    """Folder of the model."""
    stages: int = Field(default=4, ge=1)
    """Number of pipeline stages."""
    chunks: int = Field(default=1, ge=1)
    """Number of chunks of layers per stage; above 1, the schedule is interleaved."""
    steps: int = Field(default=2, ge=1)


def main(settings: Settings) -> None:
    """Simulate GRPO whose actor is a pipeline."""
    model, stages, tokens = str(settings.model), settings.stages, 256
    rows = [{"prompt": f"B{a}+21=", "answer": f"{a + 12}"} for a in range(10, 42)]
    actor = weft.group(
        weft.ActorWorker,
        model=model,
        engine=PipelineEngine,
        pipeline_parallel=stages,
        microbatch_tokens=tokens,
    )
    rollout = weft.group(weft.RolloutWorker, model=model, engine="transformers")
    reward = weft.group(weft.RewardWorker, function=exact_match, tokenizer=model)
    rollout.follows(actor)
    costs = CostModel(
        nodes={
            "rollout.generate": Generation(
                lengths=LogNormal(mean=12, max_tokens=32), decode_step_s=0.01
            ),
            "actor.update": PipelineCost(
                stages=stages,
                chunks=settings.chunks,
                microbatch_tokens=tokens,
                per_token_s=0.004,
                transfer_s=1e-5,
            ),
        },
    )
    training = grpo(
        weft.Prompts.from_rows(rows, model),
        rollout=rollout,
        reward=reward,
        actor=actor,
        sampling=Sampling(max_tokens=32),
    )
    with weft.Driver(
        training,
        schedule=weft.Synchronous(steps=settings.steps, prompts_per_step=16),
        placement={
            "actor": weft.Place(weft.ResourcePool("training", cpus=stages), ranks=stages),
            "rollout": weft.Place(weft.ResourcePool("generating", cpus=1)),
        },
        backend=weft.Simulated(costs),
        name=f"pipeline-{stages}-{settings.chunks}",
        progress=False,
    ) as driver:
        seconds = driver.run()[-1]["time_s"] / settings.steps
        print(f"{stages} stages of {settings.chunks} chunks: {seconds:.2f} s a step")


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
