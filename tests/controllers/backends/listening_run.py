"""A default run on Ray for `test_sockets.py`. It prints a line when it is up, and trains until it is told to
end."""

import select
import signal
import sys
from pathlib import Path

from saved_runs import SavingActor
from toy import ToyReward, ToyRollout, prompts, toy_grpo

import weft


class Settings(weft.Config):
    root: Path
    checkpoints: bool = False


def main(settings: Settings) -> None:
    """Run one group with two ranks. After each line on standard input, continue or end."""
    rollout, reward, actor = (
        weft.group(ToyRollout),
        weft.group(ToyReward),
        weft.group(SavingActor, name="actor"),
    )
    rollout.follows(actor)
    told: list[str] = []

    def stop(row: object) -> bool:
        if not told:
            print("up", flush=True)
            while not select.select([sys.stdin], [], [], 0.1)[0]:
                pass  # a signal just before a blocking read would be delayed by it
            told.append(sys.stdin.readline())
        return told == ["end\n"]

    with weft.Driver(
        toy_grpo(prompts(8), rollout=rollout, reward=reward, actor=actor),
        schedule=weft.Synchronous(steps=10**6, prompts_per_step=4),
        placement={"actor": weft.Place(weft.ResourcePool("cores", cpus=2), ranks=2)},
        backend=weft.RayBackend(),
        root=settings.root,
        name="run",
        checkpoint=weft.CheckpointConfig(every=10**6 if settings.checkpoints else 0),
        progress=False,
        stop=stop,
    ) as driver:
        driver.run()


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell makes background processes ignore it
    raise SystemExit(weft.launch(main))
