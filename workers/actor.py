"""ActorWorker: the trained policy. Each rank is one SPMD process with an engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import field_validator

from ..algorithms.loss import Loss, PackedRows, observed
from ..algorithms.policy_loss import PolicyLoss
from ..dataflow.batch import Batch
from ..dataflow.column import (
    ENTROPIES,
    KEPT_COUNTS,
    KEPT_IDS,
    LOG_COLLISIONS,
    OLD_LOGPROBS,
    PROMPT_IDS,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    RESPONSE_VERSIONS,
    ROUTES,
    TEACHER_IDS,
    TEMPERATURE,
    Column,
)
from ..dataflow.errors import UserError, WeightSyncError
from ..dataflow.graph import Handle
from ..dataflow.metrics import Max, Mean, Metrics
from ..dataflow.untrusted_text import show
from ..resharding.weights import BY_VLLM
from .dispatch import Dispatch
from .engine_worker import (
    TrainedConfig,
    TrainedWorker,
    logprobs_may_read,
    loss_may_read,
    loss_reads,
    training_batch,
)
from .models.model_folder import stop_token_notes
from .worker import Context, remote

if TYPE_CHECKING:
    from torch import Tensor

    from ..dataflow.graph import Node
    from ..dataflow.source import Source
    from ..resharding.weights import Given, Weights
    from .rollout import Canary


class ActorConfig(TrainedConfig):
    """The policy: model, sharding and training, and how to publish weights."""

    transport: Literal["auto", "deltas", "gloo", "nccl", "ipc", "vllm:nccl", "vllm:ipc"] = "auto"
    """How to send weights to followers, unencrypted. "auto": followers on the leader's machine map
    its host memory; others receive the weights over TCP. "deltas": like "auto", but followers on
    other machines receive only the elements that changed since their last version, if that takes
    fewer bytes. The leader and these followers then keep a copy of their part of the weights in
    host memory. "nccl": from GPU to GPU, if followers use other GPUs than the leader; one NCCL
    group of all ranks broadcasts the weights. "gloo": the same between CPUs. "ipc": for followers
    that take turns with the leader on its GPUs; the leader's ranks gather the weights on each GPU
    with NCCL, and the follower maps them there. "vllm:nccl" and "vllm:ipc": like "nccl" and "ipc",
    but through vLLM's own senders, which send whole tensors. Choose "deltas" for networks slower
    than 1 GB/s, and a GPU transport if copies through host memory take long. The four GPU
    transports are untested on GPUs."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(("transport",))
    retired: ClassVar[Mapping[str, str]] = {
        "bucket_mib": "buckets of weights always have 16 MiB",
        "deltas": 'set transport="deltas"',
    }

    @property
    def vllm_backend(self) -> str:
        """Name of the vLLM weight transfer backend, or "" for Weft's own transport."""
        return self.transport.removeprefix(BY_VLLM) if self.transport.startswith(BY_VLLM) else ""

    @field_validator("transport", mode="before")
    @classmethod
    def _refuse_sharded_rdt(cls, transport: object) -> object:
        if transport == "vllm:sharded_rdt":
            raise ValueError(
                'transport="vllm:sharded_rdt" is not supported: it needs vLLM ranks that '
                "are Ray actors with separate GPUs, but here they are child processes of "
                'the rollout rank; take "nccl"'
            )
        return transport

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to log when a run starts: end-of-text tokens that the model's settings lack."""
        return stop_token_notes(self.model)


def _may_read(loss: Loss) -> tuple[str | Column, ...]:
    sampled = (TEMPERATURE, RESPONSE_LOGPROBS, RESPONSE_VERSIONS, KEPT_COUNTS, KEPT_IDS, ROUTES)
    return (*loss_may_read(loss), *sampled)


class ActorWorker(TrainedWorker):
    """Trains a policy, computes its log-probabilities, and publishes its weights."""

    Config = ActorConfig

    def __init__(self, config: ActorConfig, context: Context = Context()) -> None:
        super().__init__(config, context)
        self._publisher: Any = None

    @classmethod
    def check(cls, config: ActorConfig, nodes: Sequence[Node], source: Source) -> None:
        super().check(config, nodes, source)
        for node in nodes:
            _check_kept_sets(node)
            if node.arguments.get("adapter", True):
                continue
            for name in ("entropies", "collisions"):
                if node.arguments.get(name):
                    raise UserError(
                        f"node {node.name!r}: {name}=True needs the trained policy; leave "
                        "out adapter=False"
                    )
            if config.lora is None:
                raise UserError(
                    f"node {node.name!r}: adapter=False, but the actor has no adapter; give "
                    "it lora=weft.Lora(...)"
                )

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda of: (PROMPT_IDS, of),
        may_read=lambda of: logprobs_may_read(of),
        writes=lambda into, entropies, collisions: (
            into,
            *([str(ENTROPIES)] if entropies else []),
            *([str(LOG_COLLISIONS)] if collisions else []),
        ),
    )
    def logprobs(
        self,
        batch: Batch,
        *,
        into: str = str(OLD_LOGPROBS),
        of: str = str(RESPONSE_IDS),
        adapter: bool = True,
        entropies: bool = False,
        collisions: bool = False,
    ) -> Batch:
        """Compute the log-probability of each token in the column `of`, under the current weights,
        at the sampling temperature and over the kept sets of sampled responses.

        `adapter=False` runs the model without its adapter (`weft.adapter_off`). `entropies=True`
        also writes the entropy of each token's distribution, and `collisions=True` the column
        `log_collisions`.
        """
        rows = batch.with_columns(response_ids=batch[of])
        if entropies or collisions:
            more: dict[str, bool] = {"collisions": True} if collisions else {}
            *found, cu_seqlens = self.engine.logprobs_and_entropies(rows, **more)
            names = [into, str(ENTROPIES) if entropies else None, str(LOG_COLLISIONS)]
            made = {name: (own, cu_seqlens) for name, own in zip(names, found, strict=False) if name}
            return batch.with_columns(**made)
        return batch.with_columns(**{into: self.engine.logprobs(rows, adapter=adapter)})

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=loss_reads, may_read=_may_read, takes=training_batch)
    def update(
        self,
        batch: Batch,
        *,
        loss: Loss = PolicyLoss(),
        epochs: int = 1,
        minibatches: int = 1,
        last: bool = True,
    ) -> Metrics:
        """Make a new version of the weights: `epochs` passes over the rows of `minibatches` steps.

        With several minibatches, each rank shuffles and splits its own rows. With one pass and one
        minibatch, rows may arrive in several calls, and gradients accumulate until the `last` call.

        Returns:
            The metrics of `Updates.update`. If their columns exist, the first step adds
            `mean_logprob_gap` and `max_logprob_gap` (difference in nats between the
            log-probabilities of generator and trainer, under the weights before the update), and
            `mean_staleness` and `max_staleness` (in versions). With delta transfers,
            `changed_share` is the share of elements that changed in the last published version.

        Raises:
            DivergedError: the last `stop_after_bad_steps` steps were bad. Their rows are in
                `skipped/` in the run's directory.
        """
        published: Metrics = {}
        if last and self._publisher is not None:
            self._publisher.finish()  # no receiver may get a mixture of two versions
            if self.config.transport == "deltas" and (compared := self._publisher.sent.compared):
                published["changed_share"] = Mean(float(self._publisher.sent.changed), float(compared))
        staleness: Metrics = {}
        versions: Any = batch.ragged_numpy(RESPONSE_VERSIONS)[0] if RESPONSE_VERSIONS in batch else ()
        if len(versions):
            lag = self.version - versions.astype(np.int64)
            mean = Mean(float(lag.sum()), float(len(lag)))
            staleness = {"mean_staleness": mean, "max_staleness": Max(float(lag.max()))}
        # The trainer's whole distributions have no gap to a part of them.
        comparable = KEPT_IDS not in batch or str(TEACHER_IDS) not in loss.reads
        first = _WithGap(loss) if RESPONSE_LOGPROBS in batch and comparable else None
        steps = {"epochs": epochs, "minibatches": minibatches}
        made = self._updates.update(batch, loss, **steps, last=last, first=first)
        return {**staleness, **published, **made}

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int, receivers: Sequence[str] = ()) -> Weights:
        """Offer this rank's part of the weights to receivers such as "rollout[0]". Parameters must
        not change until `finish_publishing`. Return a record for the receivers; the driver adds up
        all records."""
        if self._publisher is None:
            self._publisher = self._new_publisher()
        return self._publisher.publish(self.engine.published_parts(), version, receivers)

    def _new_publisher(self) -> Any:
        at = self.context
        if backend := self.config.vllm_backend:
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it on import
            from ..resharding.vllm_publisher import VllmPublisher

            return VllmPublisher(backend, at.rank, at.world_size, at.address, advance=at.advance)
        from ..resharding.publisher import WeightPublisher

        transport = self.config.transport
        if transport == "deltas":
            return WeightPublisher(at.address, deltas=True)
        return WeightPublisher(at.address, transport=transport, rank=at.rank, ranks=at.world_size)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int) -> None:
        """Send a published version through vLLM's transfer backend while the receivers take it."""
        self._publisher.send(version)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def finish_publishing(self, version: int) -> Given:
        """End the publication of a version that all receivers have; then, the weights may change.
        Return a summary of what this rank sent; the driver adds up all ranks' summaries. Raises a
        WeightSyncError if the weights could not be read or changed during the transfer."""
        from ..resharding.weights import Given

        if self._publisher is None:
            return Given(version, None, 0)
        checksum = self._publisher.finish()
        for receiver in self._publisher.lost.values():
            show(f"weights: {receiver}")
        return Given(version, checksum, self._publisher.num_bytes)

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def compare_canaries(self, canaries: Mapping[str, Canary], version: int) -> None:
        """Compare this group's log-probabilities with the canaries of followers such as
        "rollout[0]". Raises a WeightSyncError if they differ."""
        for receiver, canary in canaries.items():
            rows = Batch.of(
                prompt_ids=[list(ids) for ids in canary.prompts],
                response_ids=[list(ids) for ids in canary.responses],
            )
            found, _ = self.engine.logprobs(rows)
            check_canary(receiver, version, canary, found, exact=self.config.dtype == "float32")

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        super().close()


def _check_kept_sets(node: Node) -> None:
    """Check that an update does not compare whole distributions with a teacher, and probabilities over
    kept sets with another policy."""
    loss: Loss | None = node.arguments.get("loss")
    if loss is None or str(KEPT_IDS) not in node.reads or str(TEACHER_IDS) not in loss.reads:
        return
    compared = {*map(str, (RESPONSE_LOGPROBS, OLD_LOGPROBS, REFERENCE_LOGPROBS))}
    if compared & {*loss.reads, *loss.may_read}:
        raise UserError(
            f"node {node.name!r}: the divergence from a teacher is over the whole vocabulary, and the policy loss over the tokens "
            "that top_p, top_k, min_p or min_tokens keep; sample without them, leave out the policy loss, or distil with top=0"
        )


_LARGEST_GAP = 1e-3
"""[nats] Limit on the mean absolute difference between both sides' log-probabilities of a canary's
tokens, if both compute in float32. Usual gaps are about 1e-6 (docs/benchmarks.md)."""
_LARGEST_HALF_GAP = 0.2
"""[nats] The same limit if either side uses half precision or quantised weights. Usual gaps are a few
hundredths."""


def check_canary(
    receiver: str, version: int, canary: Canary, logprobs: np.ndarray, *, exact: bool
) -> None:
    """Compare a rank's log-probabilities with the trainer's, [tokens] each. Raises a
    WeightSyncError if the mean difference is too large or NaN."""
    own = np.array([value for response in canary.logprobs for value in response])
    gap = float(np.abs(own - logprobs).mean())
    bound = _LARGEST_GAP if exact and canary.exact else _LARGEST_HALF_GAP
    # Also true for NaN.
    if not gap <= bound:
        raise WeightSyncError(
            f"weights version {version}: the log-probabilities of {receiver} for {len(own)} "
            f"tokens are {gap:.3g} nats from the trainer's in the mean, more than "
            f"{bound:g}. It computes something else with the same weights: compare model "
            "folders, dtypes, quantization and engine settings of both groups"
        )


class _WithGap:
    """Wraps a loss to compare the log-probabilities of trainer and generator in the same pass."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.reads = loss.reads
        self.may_read = (*loss.may_read, str(RESPONSE_LOGPROBS), str(RESPONSE_MASK))
        self.needs_entropy = loss.needs_entropy
        self.whole_groups = loss.whole_groups
        self.count = loss.count

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        loss_sum, metrics = self.loss(logprobs, rows)
        # Untrained tokens may not have been sampled, such as a tool's results.
        gaps = (logprobs - rows[RESPONSE_LOGPROBS]).abs()
        gap = observed(rows.trained > 0, {"mean_logprob_gap": gaps}, largest={"max_logprob_gap": gaps})
        return loss_sum, {**metrics, **gap}


# LoRA adapters: decide before any process starts which ones are published alone.


def agree_on_adapters(handles: Iterable[Handle]) -> None:
    """Decide for each followed group with an adapter what to publish: the adapter alone or merged
    weights (`Lora.published`). Set the handles' `config` accordingly. Raises a UserError if the
    user asks for the adapter alone but a follower cannot take it, or if a group follows several
    groups that do not all train an adapter that it can serve."""
    handles = list(handles)
    for handle in handles:
        handle.config = handle.given
    for follower in handles:
        if len(follower.leaders) > 1:
            _check_slots(follower)
    for leader in handles:
        followers = [handle for handle in handles if leader in handle.leaders]
        if followers and getattr(leader.given, "lora", None) is not None:
            _agree(leader, followers)


def _check_slots(follower: Handle) -> None:
    """Check that a group can serve an adapter of each of its leaders."""
    first = follower.leaders[0]
    for leader in follower.leaders:
        given, why, fix = leader.given, "", "give each leader its own rollout group"
        if getattr(given, "lora", None) is None:
            why, fix = "trains the whole model", "give it lora=weft.Lora(...)"
        elif given.lora.published == "merged":
            why, fix = "publishes merged weights", "leave Lora(published='merged') out"
        elif given.dtype != first.given.dtype:
            why = f"has dtype {given.dtype!r}, and {first.called!r} has {first.given.dtype!r}"
            fix = "give both the same dtype"
        elif reason := follower.worker_class.refuses_adapter(follower.given, given):
            why, fix = f"has an adapter that {follower.called!r} cannot serve: {reason}", "change that"
        if why:
            raise UserError(
                f"{follower.called!r} follows {len(follower.leaders)} groups, so each must train an adapter of one model; "
                f"{leader.called!r} {why}; {fix}"
            )


def _agree(leader: Handle, followers: list[Handle]) -> None:
    given: Any = leader.given
    refusals = [
        (f, reason) for f in followers if (reason := f.worker_class.refuses_adapter(f.given, given))
    ]
    published = given.lora.published
    if any(len(follower.leaders) > 1 for follower in followers):
        published = "adapter"
    if published is None:
        # Every follower can load merged weights, but merging loses small updates in bfloat16.
        published = "adapter" if given.dtype == "bfloat16" and not refusals else "merged"
    elif published == "adapter" and refusals:
        follower, reason = refusals[0]
        raise UserError(
            f"Lora(published='adapter') of {leader.called!r}: {follower.called!r} cannot "
            f"take the adapter alone: {reason}; change that, or set published='merged'"
        )
    lora = given.lora.model_copy(update={"published": published})
    leader.config = given.model_copy(update={"lora": lora})
    for follower in followers if published == "adapter" else ():
        if not hasattr(follower.config, "adapters"):
            raise UserError(
                f"{follower.called!r} follows {leader.called!r}, which publishes only its adapter, and its configuration has no field "
                "`adapters: dict[str, Lora]`; add the field, or let `refuses_adapter` return a reason"
            )
        adapters = {**follower.config.adapters, leader.called: lora}
        follower.config = follower.given.model_copy(update={"adapters": adapters, "dtype": given.dtype})
