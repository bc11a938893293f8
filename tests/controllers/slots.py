"""Toy workers of several policies on one rollout group, whose actors have adapters."""

from collections.abc import Iterator
from typing import Any

from killed_simulations import SavedActor
from pydantic import Field
from toy import SlowConfig, SlowRollout, ToyConfig, centred

from weft.dataflow.batch import Batch
from weft.dataflow.metrics import Metrics
from weft.dataflow.operation import Shape
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.training.lora import Lora
from weft.workers.worker import remote


class SlotsConfig(SlowConfig):
    adapters: dict[str, Lora] = Field(default_factory=dict)
    dtype: str = "float32"


class Slots(SlowRollout):
    """Samples with one of several adapters; tokens have the version of theirs."""

    Config = SlotsConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.versions: dict[str, int] = {}

    @classmethod
    def refuses_adapter(cls, config: Any, leader: Any) -> str:
        return ""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        interruptible=True,
        reads=("prompt_ids",),
        writes=("response_ids", "response_logprobs", "response_versions", "policy"),
    )
    def generate(
        self, prompts: Batch, *, n: int = 2, policy: Any = None
    ) -> Iterator[tuple[Batch, Metrics] | None]:
        steps = super().generate(prompts, n=n)
        while True:
            self.version = self.versions[policy]  # the next step may be that of another call
            try:
                part = next(steps)
            except StopIteration:
                return
            yield part and (part[0].with_columns(policy=[policy] * len(part[0])), part[1])

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Any, policy: str = "") -> str:
        assert weights.version >= self.versions.get(policy, 0)
        self.versions[policy] = weights.version
        return weights.checksum


class AdapterConfig(ToyConfig):
    lora: Lora | None = Lora()
    dtype: str = "float32"


class Adapting(SavedActor):
    """An actor that trains an adapter."""

    Config = AdapterConfig


@graph
def two_policies(prompts: Any, *, rollout: Any, reward: Any, actor: Any, other: Any, n: int = 2) -> None:
    for policy in (actor, other):
        samples = centred(reward.score(rollout.generate(prompts, n=n, policy=policy)))
        policy.update(samples)
