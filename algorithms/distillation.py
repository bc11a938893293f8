"""On-policy distillation: a teacher scores the student's own samples, token by token.

distillation(prompts, rollout=rollout, teacher=teacher, actor=actor)                      reverse KL, top 64
distillation(..., loss=Distillation(divergence=Jsd(beta=0.5)))                            GKD (arXiv:2306.13649)
distillation(..., reward=reward, n=8, loss=Distillation(weight=0.5, policy=PolicyLoss()))   mixed with a reward
distillation(..., top=0)                                                                  one log-probability per token
distillation(..., tokenizers=SharedSpans(student=..., teacher=...))         a teacher with another tokenizer (`cross_tokenizer.py`)

The teacher gives its k likeliest tokens at each position, so rows need memory for k tokens rather
than for the vocabulary. The other tokens form one more outcome, the tail: the divergence over these
k + 1 outcomes is exact except for the tail's inside, and at most the divergence over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from ..dataflow.batch import Batch
from ..dataflow.column import (
    ADVANTAGES,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_PROMPT_IDS,
    TEACHER_RESPONSE_IDS,
    TEACHER_RESPONSE_LOGPROBS,
)
from ..dataflow.config import Config
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from ..dataflow.metrics import Metrics
from ..dataflow.operation import node
from ..dataflow.tracing import graph
from .advantages import Estimator, group_advantages, group_normalized
from .aggregation import AggregatedLoss
from .covariance import with_covariance
from .cross_tokenizer import UNMAPPED, SharedSpans, retokenized, shared_candidates, span_advantages
from .loss import CANDIDATE_LOGPROBS, Loss, PackedRows, observed, response_rows
from .policy_loss import PolicyLoss, needs_entropies, needs_forward_pass, old_logprobs
from .protocols import Policy, Rewarder, Rollout, Teacher, scored
from .sampling import Sampling
from .step_corrections import with_step_weights

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_TAIL = 1e-6
"""Least probability of a tail. Below it, float32 rounding errors of the other outcomes dominate."""


ABSENT = -1e4
"""Log-probability of a candidate that a position lacks, in place of minus infinity, whose gradient is
NaN. Its probability is 0 in float32."""


def with_tail(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens: [T, k] to [T, k + 1] nats. Differentiable, also
    below `SMALLEST_TAIL`.

    >>> with_tail(torch.tensor([[0.5, 0.25]]).log()).exp().tolist()
    [[0.5, 0.25, 0.25]]
    """
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)
    rest = rest + (rest.clamp(min=SMALLEST_TAIL) - rest).detach()
    return torch.cat([logprobs, rest.log()], -1)


@runtime_checkable
class Divergence(Protocol):
    """A divergence between student and teacher."""

    def __call__(self, student: Tensor, teacher: Tensor, /) -> Tensor:
        """Return the divergence at each position, [T] nats, from log-probabilities [T, m] that add up
        to probability 1; only the student's have a gradient."""
        ...


class ReverseKl(Config):
    """KL(student || teacher) = sum_v p_v (log p_v - log q_v) (MiniLLM, arXiv:2306.08543, eq. 1). The
    student keeps to the likeliest of the teacher's modes.

    >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> round(ReverseKl()(p, q).item(), 4)  # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75)
    0.1438
    """

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (student.exp() * (student - teacher)).sum(-1)


class ForwardKl(Config):
    """KL(teacher || student) = sum_v q_v (log q_v - log p_v) (word-level distillation,
    arXiv:1606.07947, §3.1). The student covers all modes of the teacher.

    >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> round(ForwardKl()(p, q).item(), 4)  # 0.25 log(0.25 / 0.5) + 0.75 log(0.75 / 0.5)
    0.1308
    """

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (teacher.exp() * (teacher - student)).sum(-1)


class Jsd(Config):
    """Generalised Jensen-Shannon divergence: beta KL(q || m) + (1 - beta) KL(p || m), with the mixture
    m = beta q + (1 - beta) p of teacher q and student p (GKD, arXiv:2306.13649, eq. 1). At most log 2
    for beta = 0.5.

    >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> round(Jsd()(p, q).item(), 4)
    0.0338
    """

    beta: float = Field(default=0.5, gt=0, lt=1)
    """[share] Share of the teacher in the mixture. Lower it for gradients that resemble the
    forward KL; raise it for the reverse KL."""

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        of_teacher, of_student = math.log(self.beta), math.log1p(-self.beta)
        mixture = torch.logaddexp(teacher + of_teacher, student + of_student)
        p, q = student.exp(), teacher.exp()
        return (self.beta * q * (teacher - mixture) + (1 - self.beta) * p * (student - mixture)).sum(-1)


class Distillation(AggregatedLoss):
    """l_t = weight D_t, the divergence between student and teacher at each trained token, plus a
    policy loss if the rows also have a reward.

    A teacher's log-probability of minus infinity marks a candidate that a position lacks. A position
    without any candidate has divergence 0, and does not count in the metrics.

    The gradient is exact for the sampled prefixes; it does not include how the student's tokens
    change later positions (GKD, arXiv:2306.13649, §3).

    >>> rows = PackedRows.of(
    ...     [1],
    ...     teacher_ids=[[3, 7]],
    ...     teacher_logprobs=torch.tensor([[0.5, 0.25]]).log(),
    ...     candidate_logprobs=torch.tensor([[0.25, 0.25]]).log(),
    ... )
    >>> loss_sum, metrics = Distillation(divergence=ForwardKl())(torch.tensor([-1.0]), rows)
    >>> round(loss_sum.item(), 4)  # 0.5 log(0.5 / 0.25) + 0.25 log(0.25 / 0.5)
    0.1733
    >>> metrics["teacher_tail"].value, metrics["student_tail"].value
    (0.25, 0.5)
    """

    divergence: Divergence = ReverseKl()
    """`ReverseKl()`, `ForwardKl()` or `Jsd(beta)`. Choose the forward KL to keep the teacher's
    diversity."""
    weight: float = Field(default=1.0, ge=0)
    """[loss/nat] Weight of the divergence. Lower it to give a reward more influence."""
    policy: PolicyLoss | None = None
    """Loss of the advantages from a reward; None trains on the teacher alone. Set it if the rows also
    have a reward."""

    @model_validator(mode="after")
    def _aggregate_alike(self) -> Distillation:
        if self.policy is not None and self.policy.aggregation != self.aggregation:
            raise ValueError(
                f"aggregation={self.aggregation!r}, but policy has aggregation={self.policy.aggregation!r}; both need the same"
            )
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        return (str(TEACHER_IDS), str(TEACHER_LOGPROBS), *(self.policy.reads if self.policy else ()))

    @property
    def may_read(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().may_read, *(self.policy.may_read if self.policy else ()))))

    @property
    def needs_entropy(self) -> bool:
        return self.policy is not None and self.policy.needs_entropy

    def __call__(self, logprobs: Tensor, rows: PackedRows) -> tuple[Tensor, Metrics]:
        """Return the loss (a scalar) before the engine divides it by the count, and metrics: the mean
        `divergence`, and the probability outside the teacher's k tokens for the teacher
        (`teacher_tail`) and the student (`student_tail`)."""
        teacher = rows.only_trained(rows[TEACHER_LOGPROBS])
        known = teacher > -torch.inf
        student = torch.where(known, rows.only_trained(rows[CANDIDATE_LOGPROBS]), ABSENT)
        student, teacher = with_tail(student), with_tail(torch.where(known, teacher, ABSENT))
        divergence = rows.only_trained(self.divergence(student, teacher))
        loss_sum = (self.aggregation.weights(rows) * self.weight * divergence).sum()
        watched = {"divergence": divergence}
        watched |= {"teacher_tail": teacher[:, -1].exp(), "student_tail": student[:, -1].exp()}
        metrics = observed((rows.trained > 0) & known.any(-1), watched)
        if self.policy is not None:
            of_policy, more = self.policy(logprobs, rows)
            both: Metrics = more | metrics  # pyright: ignore[reportOperatorIssue] # a dict would wait for the device
            return loss_sum + of_policy, both
        return loss_sum, metrics


_OF_REWARD = "reward_advantages"
"""Column of advantages from a reward, before the teacher's part is added."""


@node(
    reads=lambda base: (REFERENCE_LOGPROBS, RESPONSE_LOGPROBS, RESPONSE_IDS, *([base] if base else [])),
    may_read=(RESPONSE_MASK,),
    writes=(ADVANTAGES,),
)
def teacher_advantages(samples: Batch, *, weight: float = 1.0, base: str | None = None) -> Batch:
    """Compute advantages `weight` (log q - log p) of each sampled token, where q is the teacher
    (`reference_logprobs`) and p the sampling student: minus the one-sample estimate of the reverse KL
    (MiniLLM, arXiv:2306.08543, eq. 4, single-step part). Add the column `base`, if one is named.

    >>> samples = Batch.of(response_ids=[[5, 6]], response_logprobs=[[-1.0, -2.0]], reference_logprobs=[[-0.5, -3.0]])
    >>> teacher_advantages(samples)["advantages"].to_pylist()
    [[0.5, -1.0]]
    """
    read = (RESPONSE_LOGPROBS, REFERENCE_LOGPROBS, *([base] if base else []))
    rows = response_rows(samples, RESPONSE_IDS, *read)
    gained = weight * rows.only_trained(rows[REFERENCE_LOGPROBS] - rows[RESPONSE_LOGPROBS])
    total = gained + rows[base] if base else gained
    return samples.with_columns(advantages=(total, rows.cu_seqlens))


@node(
    reads=lambda parts: tuple(f"{part}_{name}" for part in parts for name in ("ids", "logprobs")),
    writes=(TEACHER_IDS, TEACHER_LOGPROBS),
)
def joined_teachers(samples: Batch, *, parts: tuple[str, ...]) -> Batch:
    """Take each row's tokens from the teacher that scored it. `parts` are the names of the columns,
    without `_ids` and `_logprobs`.

    >>> of_teachers = {"a_ids": [[5], []], "a_logprobs": [[-1.0], []], "b_ids": [[], [6]], "b_logprobs": [[], [-2.0]]}
    >>> joined = joined_teachers(Batch.of(**of_teachers), parts=("a", "b"))
    >>> joined["teacher_ids"].to_pylist(), joined["teacher_logprobs"].to_pylist()
    ([[5], [6]], [[-1.0], [-2.0]])
    """
    teacher = np.stack([samples.lengths(f"{part}_ids") for part in parts]).argmax(0)
    index = pa.array(teacher * len(samples) + np.arange(len(samples)))
    ids, logprobs = (
        pa.concat_arrays([samples[f"{part}_{name}"] for part in parts]).take(index)
        for name in ("ids", "logprobs")
    )
    return samples.with_columns(teacher_ids=ids, teacher_logprobs=logprobs)


@graph
def distillation(
    prompts: Any,
    *,
    rollout: Rollout,
    teacher: Teacher | Mapping[Any, Teacher],
    actor: Policy,
    reward: Rewarder | None = None,
    harness: Any = None,
    env: Any = None,
    n: int = 1,
    sampling: Sampling = Sampling(),
    top: int = 64,
    by: str = "teacher",
    hints: str | None = None,
    tokenizers: SharedSpans | None = None,
    loss: Loss | None = None,
    advantages: Estimator = group_normalized,
    epochs: int = 1,
    minibatches: int = 1,
) -> Any:
    """On-policy distillation (GKD, arXiv:2306.13649): the student (the actor) samples, and moves
    towards the teacher's distribution at each token that it sampled.

    Args:
        teacher: a group that computes log-probabilities, such as a `ReferenceWorker` with a larger
            model and the same tokenizer. Several teachers: a mapping from values of the column `by`.
        reward, harness, env: a source of rewards, as in `grpo`; then `loss` needs a `policy`.
        top: the teacher's tokens per position. With 0, the teacher gives only the log-probability of
            each sampled token, and the difference to the student's is added to the advantages
            (`teacher_advantages`); `loss` is then a `PolicyLoss`. This takes least memory and has
            more variance.
        hints: column of token ids that the teacher reads in place of `prompt_ids`, such as a prompt
            with the solution. With the student's own model as the teacher, this is self-distillation.
        tokenizers: a teacher with another tokenizer, which reads the responses in its own tokens and
            the prompts in the column `hints` (default: `teacher_prompt_ids`). Without `top=0`, the
            teacher computes twice: its likeliest tokens, and the log-probabilities of longer spans.
        loss: default `Distillation()`, or `PolicyLoss()` for `top=0`. With `tokenizers`, longer spans
            train the `policy` of a `Distillation`, multiplied by its weight.
    """
    ways: dict[str, Any] = {"reward": reward, "harness": harness, "env": env}
    rewarded = any(way is not None for way in ways.values())
    if loss is None:
        policy = PolicyLoss() if rewarded or tokenizers else None
        loss = Distillation(policy=policy) if top else PolicyLoss()
    _check(loss, top, rewarded, teacher, tokenizers, sampling)
    samples: Any
    if rewarded:
        samples = scored(prompts, rollout=rollout, **ways, n=n, sampling=sampling)
    else:
        samples = rollout.generate(prompts, n=n, sampling=sampling)
    read: dict[str, Any] = {} if hints is None else {"prompts": hints}
    of_teacher = REFERENCE_LOGPROBS
    if tokenizers is not None:
        samples = cast(Any, retokenized(samples, tokenizers=tokenizers))
        read = {"prompts": hints or str(TEACHER_PROMPT_IDS), "of": str(TEACHER_RESPONSE_IDS)}
        of_teacher = TEACHER_RESPONSE_LOGPROBS
    if tokenizers is not None or not top:
        samples = teacher.logprobs(samples, into=str(of_teacher), **read)  # pyright: ignore[reportAttributeAccessIssue]
    if top and isinstance(teacher, Mapping):
        parts = tuple(f"teacher_{number}" for number in range(len(teacher)))
        for part, (value, group) in zip(parts, teacher.items(), strict=True):
            samples = group.top_logprobs(samples, top=top, where=(by, value), into=part, **read)
        samples = joined_teachers(samples, parts=parts)
    elif top and tokenizers is not None:
        samples = teacher.top_logprobs(samples, top=top, into=UNMAPPED, **read)  # pyright: ignore[reportAttributeAccessIssue]
        samples = shared_candidates(samples, tokenizers=tokenizers, top=top)
    elif top:
        samples = teacher.top_logprobs(samples, top=top, **read)  # pyright: ignore[reportAttributeAccessIssue]
    if needs_forward_pass(loss, epochs=epochs, minibatches=minibatches):
        samples = old_logprobs(samples, actor=actor, entropies=needs_entropies(loss))
    if rewarded:
        into = str(ADVANTAGES) if top and tokenizers is None else _OF_REWARD
        samples = group_advantages(samples, estimator=advantages, into=into)
    base = _OF_REWARD if rewarded else None
    if tokenizers is not None:
        weight = loss.weight if isinstance(loss, Distillation) else 1.0
        samples = span_advantages(samples, weight=weight, base=base, single=not top)
    elif not top:
        samples = teacher_advantages(samples, base=base)
    samples = with_covariance(samples, loss=loss.policy if isinstance(loss, Distillation) else loss)
    samples = with_step_weights(samples, loss=loss)
    return actor.update(samples, loss=loss, epochs=epochs, minibatches=minibatches)


def _check(
    loss: Loss,
    top: int,
    rewarded: bool,
    teacher: object,
    tokenizers: SharedSpans | None,
    sampling: Sampling,
) -> None:
    distills, policy = str(TEACHER_IDS) in loss.reads, str(ADVANTAGES) in loss.reads
    if bool(top) != distills:
        raise UserError(
            f"distillation(top={top}, loss={loss!r}): "
            + (
                "the loss ignores the teacher's tokens; take a Distillation, or top=0"
                if top
                else "without the teacher's tokens the loss must be a PolicyLoss; take one, or top=64"
            )
        )
    if top and rewarded and not policy:
        raise UserError(
            f"distillation(reward=..., loss={loss!r}): the loss ignores the reward; give it policy=PolicyLoss(), or leave the "
            "reward out"
        )
    if top and not rewarded and tokenizers is None and policy:
        raise UserError(
            f"distillation(loss={loss!r}): the loss reads advantages, but no node computes a reward; give reward=..., or leave policy out"
        )
    if (not top or tokenizers) and isinstance(teacher, Mapping):
        given = f"top={top}" if not top else f"tokenizers={tokenizers!r}"
        raise UserError(
            f"distillation({given}) takes one teacher; several need top=1 or more and the student's tokenizer"
        )
    if tokenizers is None:
        return
    if not policy:
        raise UserError(
            f"distillation(tokenizers=..., loss={loss!r}): the loss ignores spans of several tokens, which train by advantages; give it "
            "policy=PolicyLoss()"
        )
    if sampling.truncates:
        raise UserError(
            f"distillation(tokenizers=..., sampling={sampling!r}): kept sets hold tokens of the student, which the teacher does not "
            "have; sample without top_p, top_k, min_p and min_tokens"
        )
    tokenizers.check()
