"""Preference optimization: pairs of responses, and the graphs that train on them.

dpo(pairs, actor=actor, reference=reference)                                        DPO; other losses: `preference_loss.py`
dpo(pairs, actor=actor, loss=PreferenceLoss(score=LogLikelihood(...), ...))         without a reference: SimPO, ORPO
online_dpo(prompts, rollout=rollout, reward=reward, actor=actor, reference=reference, n=8)
aot(pairs, actor=actor, reference=reference)                                        distributions of leads, not single pairs
kto(responses, actor=actor, reference=reference)                                    single responses, good or bad; also bco

A pair is a group of two rows, whose `preferred` is 1 and 0. Losses that compare them set
`Loss.whole_groups`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ..dataflow.batch import Batch
from ..dataflow.column import (
    CHOSEN_IDS,
    CHOSEN_MASK,
    CHOSEN_REFERENCE_LOGPROBS,
    EPISODE_ID,
    GROUP_ID,
    MISMATCHED_IDS,
    MISMATCHED_LOGPROBS,
    MISMATCHED_MASK,
    MISMATCHED_REFERENCE_LOGPROBS,
    OLD_LOGPROBS,
    PREFERRED,
    QUANTILE_MARGIN,
    REFERENCE_LOGPROBS,
    REFERENCE_POINT,
    REJECTED_IDS,
    REJECTED_MASK,
    REJECTED_REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    REWARD,
    SAMPLE_ID,
    Column,
)
from ..dataflow.errors import UserError
from ..dataflow.metrics import Estimate, Mean, Metrics, Sum
from ..dataflow.operation import GROUPS, Shape, node
from ..dataflow.tracing import graph
from .episodes import Episodes
from .loss import Loss, response_rows
from .policy_loss import old_logprobs
from .preference_loss import ClassifierLoss, DesirabilityLoss, LogLikelihood, PreferenceLoss
from .protocols import Rewarder, Rollout, Scorer, Trainable
from .sampling import Sampling


@node(
    shape=Shape.EXPAND,
    reads=(CHOSEN_IDS, REJECTED_IDS),
    may_read=(CHOSEN_MASK, REJECTED_MASK),
    writes=(RESPONSE_IDS, RESPONSE_MASK, PREFERRED),
)
def pairs(preferences: Batch) -> Batch:
    """Turn each preference into two rows: the chosen response and the rejected one.

    >>> rows = pairs(Batch.of(sample_id=[7], chosen_ids=[[1, 2]], rejected_ids=[[3]]))
    >>> rows["response_ids"].to_pylist(), rows["preferred"].to_pylist(), rows["parent_id"].to_pylist()
    ([[1, 2], [3]], [1, 0], [7, 7])
    """
    return _two_of_each(preferences, {RESPONSE_IDS: (CHOSEN_IDS, REJECTED_IDS)})


@node(
    shape=Shape.EXPAND,
    reads=(CHOSEN_IDS, REJECTED_IDS, CHOSEN_REFERENCE_LOGPROBS, REJECTED_REFERENCE_LOGPROBS),
    may_read=(CHOSEN_MASK, REJECTED_MASK),
    writes=(RESPONSE_IDS, RESPONSE_MASK, PREFERRED, REFERENCE_LOGPROBS),
)
def pairs_with_reference(preferences: Batch) -> Batch:
    """Like `pairs`, for preferences with log-probabilities from `reference_of_pairs`."""
    ids, reference = (CHOSEN_IDS, REJECTED_IDS), (CHOSEN_REFERENCE_LOGPROBS, REJECTED_REFERENCE_LOGPROBS)
    return _two_of_each(preferences, {RESPONSE_IDS: ids, REFERENCE_LOGPROBS: reference})


@node(
    shape=Shape.FILTER,
    reads=(REWARD,),
    may_read=(EPISODE_ID, RESPONSE_MASK),
    writes=(PREFERRED,),
    takes=GROUPS,
)
def best_and_worst(samples: Batch) -> tuple[Batch, Metrics]:
    """Keep the best and the worst sample of each group. Drops groups of equal rewards and groups
    with a NaN reward, and counts them in the metric `tied_groups`. Samples without a trained token
    do not count. Raises a UserError if the best or the worst sample is an episode of several rows.

    >>> samples = Batch.of(sample_id=[1, 2, 3, 4, 5], group_id=[0, 0, 0, 1, 1], reward=[0.5, 0.0, 1.0, 1.0, 1.0])
    >>> kept, metrics = best_and_worst(samples)
    >>> kept["sample_id"].to_pylist(), kept["preferred"].to_pylist(), metrics["tied_groups"].value
    ([3, 2], [1, 0], 1.0)
    """
    episodes = Episodes.of(samples)
    rewards, (groups, index) = episodes.values(REWARD), episodes.groups()
    # Sample ids break ties, so that the result does not depend on the order of rows.
    order = np.lexsort((samples.numpy(SAMPLE_ID)[episodes.first], rewards, index))
    starts = np.searchsorted(index[order], np.arange(len(groups)))
    # Cut the ends to the number of groups, which is 0 if the batch has no rows.
    worst, best = order[starts], order[np.append(starts[1:], len(order))[: len(groups)] - 1]
    # False for ties and for NaN.
    apart = rewards[best] > rewards[worst]
    picked = np.stack([best, worst], axis=1)[apart].ravel()
    several = picked[episodes.sums(np.ones(len(samples)))[picked] > 1]
    if len(several):
        raise UserError(
            f"best_and_worst: {episodes.name(several[0])} has several rows, but a preference pair takes one "
            "response; train such episodes with a policy loss"
        )
    kept = samples.take(episodes.first[picked])
    kept = kept.with_columns(preferred=np.tile(np.array([1, 0], np.uint8), len(picked) // 2))
    return kept, {"tied_groups": Sum(float(len(samples.groups()[0]) - apart.sum()))}


@node(reads=lambda by: (by,), writes=(PREFERRED,))
def labelled(responses: Batch, *, by: str = "label") -> Batch:
    """Add `preferred` to single responses: 1 if the label is true or above 0, otherwise 0.

    >>> labelled(Batch.of(label=[True, False]))["preferred"].to_pylist()
    [1, 0]
    """
    return responses.with_columns(preferred=(responses.numpy(by) > 0).astype(np.uint8))


@node(reads=(RESPONSE_IDS,), may_read=(RESPONSE_MASK,), writes=(MISMATCHED_IDS, MISMATCHED_MASK))
def mismatched(rows: Batch) -> Batch:
    """Add the response to another prompt, and its mask, to each row.

    Ordered by group, a row gets the response m places further on, cyclically, where m is the size
    of the largest group. So the response is from another group, and each response is used once. If
    one group has more than half of the rows, responses of the others are used several times. A
    single group keeps its own responses.

    >>> rows = Batch.of(sample_id=[1, 2, 3], group_id=[1, 2, 3], response_ids=[[1], [2], [3]])
    >>> mismatched(rows)["mismatched_ids"].to_pylist()
    [[2], [3], [1]]
    """
    groups, number = rows.numpy(GROUP_ID), len(rows)
    # Sample ids make the assignment independent of the order of rows.
    order = np.lexsort((rows.numpy(SAMPLE_ID), groups))
    starts = np.searchsorted(groups[order], groups[order])
    largest = int(np.bincount(starts).max(initial=0))
    in_group = np.arange(number) - starts
    other = np.empty(number, np.int64)
    other[order] = (
        order[(starts + largest + in_group % (number - largest or number)) % number] if number else order
    )
    responses = rows.take(other)
    ids, cu_seqlens = responses.ragged_numpy(RESPONSE_IDS)
    mask = (
        responses[RESPONSE_MASK] if RESPONSE_MASK in rows else (np.ones(len(ids), np.uint8), cu_seqlens)
    )
    return rows.with_columns(mismatched_ids=responses[RESPONSE_IDS], mismatched_mask=mask)


@node(
    reads=(MISMATCHED_LOGPROBS, MISMATCHED_REFERENCE_LOGPROBS),
    may_read=(MISMATCHED_MASK,),
    writes=(REFERENCE_POINT,),
)
def reference_point(rows: Batch) -> Batch:
    """KTO's z0 (arXiv:2402.01306, §4.1): max(0, mean over rows of sum_t log p(y'_t) - log
    p_ref(y'_t)), where y' are the mismatched responses. It is equal in all rows of this call.

    >>> columns = {"mismatched_logprobs": [[-1.0, -1.0], [-3.0]], "mismatched_reference_logprobs": [[-3.0, -2.0], [-2.0]]}
    >>> rows = Batch.of(**columns, mismatched_mask=[[1, 1], [1]])
    >>> reference_point(rows)["reference_point"].to_pylist()
    [1.0, 1.0]
    """
    of_policy = _sums(rows, MISMATCHED_LOGPROBS, MISMATCHED_MASK)
    of_reference = _sums(rows, MISMATCHED_REFERENCE_LOGPROBS, MISMATCHED_MASK)
    point = max(0.0, float((of_policy - of_reference).sum()) / max(1, len(rows)))
    return rows.with_columns(reference_point=np.full(len(rows), point, np.float32))


@node(
    reads=(PREFERRED, OLD_LOGPROBS, REFERENCE_LOGPROBS),
    may_read=(RESPONSE_MASK,),
    writes=(REFERENCE_POINT,),
)
def midpoint(rows: Batch) -> Batch:
    """BCO's reward shift (arXiv:2404.04656) in nats: halfway between the mean log-ratio to the
    reference of good and of bad responses; with one kind only, its mean. Rows without a trained token
    do not count. It is equal in all rows of this call.

    >>> columns = {"old_logprobs": [[-1.0, -1.0], [-3.0]], "reference_logprobs": [[-2.0, -3.0], [-2.0]]}
    >>> midpoint(Batch.of(preferred=[1, 0], **columns))["reference_point"].to_pylist()
    [1.0, 1.0]
    """
    ratios = _sums(rows, OLD_LOGPROBS) - _sums(rows, REFERENCE_LOGPROBS)
    counted = response_rows(rows, OLD_LOGPROBS).counted.numpy()
    good = rows.numpy(PREFERRED) > 0
    kinds = [ratios[counted & kind] for kind in (good, ~good)]
    means = [float(kind.mean()) for kind in kinds if len(kind)]
    point = sum(means) / len(means) if means else 0.0
    return rows.with_columns(reference_point=np.full(len(rows), point, np.float32))


@node(
    reads=(PREFERRED, OLD_LOGPROBS, REFERENCE_LOGPROBS),
    may_read=(RESPONSE_MASK,),
    writes=(REFERENCE_POINT,),
)
def quantile_points(rows: Batch) -> Batch:
    """Give each response the log-ratio [nats] of a response of the other kind, good or bad, at the same
    quantile among the rows of this call. Rows without a trained token do not count. If all rows are of
    one kind, each gets its own log-ratio.

    >>> columns = {"old_logprobs": [[-1.0], [-2.0], [-3.0], [-4.0]], "reference_logprobs": [[-2.0]] * 4}
    >>> quantile_points(Batch.of(preferred=[1, 1, 0, 0], **columns))["reference_point"].to_pylist()
    [-1.0, -2.0, 1.0, 0.0]
    """
    ratios = _sums(rows, OLD_LOGPROBS) - _sums(rows, REFERENCE_LOGPROBS)
    counted = response_rows(rows, OLD_LOGPROBS).counted.numpy()
    good = rows.numpy(PREFERRED) > 0
    points = np.where(counted, ratios, 0.0).astype(np.float32)
    kinds = [np.flatnonzero(counted & kind) for kind in (good, ~good)]
    if not all(map(len, kinds)):
        return rows.with_columns(reference_point=points)
    ordered = [kind[np.argsort(ratios[kind], kind="stable")] for kind in kinds]
    for own, other in (ordered, reversed(ordered)):
        rank = (np.arange(len(own)) + 0.5) / len(own)
        points[own] = ratios[other[(rank * len(other)).astype(np.int64)]]
    return rows.with_columns(reference_point=points)


@node(
    shape=Shape.GROUP,
    reads=(PREFERRED, OLD_LOGPROBS, REFERENCE_LOGPROBS),
    may_read=(RESPONSE_MASK,),
    writes=(QUANTILE_MARGIN,),
)
def quantile_margins(rows: Batch, *, beta: float) -> Batch:
    """Give each pair `beta` times the reference's lead in the pair of the same rank. A lead is the
    difference of log-probabilities, preferred response minus other. Both the policy's and the
    reference's leads are ranked over the pairs of this call with trained tokens in both responses.

    >>> columns = {"old_logprobs": [[-1.0], [-2.0], [-1.0], [-4.0]], "reference_logprobs": [[-1.0], [-6.0], [-3.0], [-1.0]]}
    >>> rows = Batch.of(group_id=[7, 7, 8, 8], preferred=[1, 0, 1, 0], **columns)
    >>> quantile_margins(rows, beta=0.5)["quantile_margin"].to_pylist()  # the policy's leads are 1 and 3, the reference's 5 and -2
    [-1.0, -1.0, 2.5, 2.5]
    """
    groups, index = rows.groups()
    signs = np.where(rows.numpy(PREFERRED) > 0, 1.0, -1.0)
    counted = response_rows(rows, OLD_LOGPROBS).counted.numpy()
    whole = np.flatnonzero(np.bincount(index[counted], minlength=len(groups)) == 2)
    policy, reference = (
        np.bincount(index, weights=signs * _sums(rows, name), minlength=len(groups))[whole]
        for name in (OLD_LOGPROBS, REFERENCE_LOGPROBS)
    )
    margins = np.zeros(len(groups), np.float32)
    margins[whole[np.argsort(policy, kind="stable")]] = beta * np.sort(reference)
    return rows.with_columns(quantile_margin=margins[index])


@node(
    shape=Shape.GROUP,
    reads=lambda score: (PREFERRED, score),
    may_read=lambda against: (against, RESPONSE_MASK) if against else (RESPONSE_MASK,),
)
def compare(rows: Batch, *, score: str, against: str = "") -> Metrics:
    """Measure how often the preferred response of a pair has the higher score.

    The score is the sum of the column `score` over trained tokens, or the value of a per-row
    column. If `against` is given, its score is subtracted.

    >>> rows = Batch.of(group_id=[4, 4], preferred=[0, 1], logprobs=[[-3.0], [-1.0, -1.0]])
    >>> compare(rows, score="logprobs")["preference_accuracy"].value
    1.0
    """
    totals = _sums(rows, score) - (_sums(rows, against) if against else 0.0)
    groups, index = rows.groups()
    signs = np.where(rows.numpy(PREFERRED) > 0, 1.0, -1.0)
    margins = np.bincount(index, weights=signs * totals, minlength=len(groups))
    accuracy = Estimate.of((margins > 0).astype(np.float64).tolist())
    margin = Mean(float(margins.sum()), float(len(groups)))
    return {"preference_accuracy": accuracy, "preference_margin": margin}


@graph
def dpo(
    preferences: Any, *, actor: Trainable, reference: Scorer | None = None, loss: Loss = PreferenceLoss()
) -> Any:
    """Preference optimization on given pairs, by default DPO (arXiv:2305.18290).

    The source has `prompt_ids`, `chosen_ids` and `rejected_ids`. If it also has the reference's
    log-probabilities (`reference_of_pairs`), pass no reference.
    """
    known = CHOSEN_REFERENCE_LOGPROBS in preferences and REJECTED_REFERENCE_LOGPROBS in preferences
    rows = pairs_with_reference(preferences) if known else pairs(preferences)
    if reference:
        rows = reference.logprobs(rows, into=str(REFERENCE_LOGPROBS))
    return actor.update(rows, loss=loss)


@graph
def reference_of_pairs(preferences: Any, *, reference: Scorer) -> Any:
    """Compute the reference's log-probabilities of both responses, for `weft.precompute`."""
    chosen = reference.logprobs(preferences, of=str(CHOSEN_IDS), into=str(CHOSEN_REFERENCE_LOGPROBS))
    return reference.logprobs(chosen, of=str(REJECTED_IDS), into=str(REJECTED_REFERENCE_LOGPROBS))


@graph
def online_dpo(
    prompts: Any,
    *,
    rollout: Rollout,
    reward: Rewarder,
    actor: Trainable,
    reference: Scorer | None = None,
    n: int = 8,
    sampling: Sampling = Sampling(),
    loss: Loss = PreferenceLoss(),
) -> Any:
    """Preference optimization on the policy's own samples: the best of n against the worst. This is
    online DPO (arXiv:2402.04792), with a reward in place of an annotator."""
    samples = best_and_worst(reward.score(rollout.generate(prompts, n=n, sampling=sampling)))
    if reference:
        samples = reference.logprobs(samples, into=str(REFERENCE_LOGPROBS))
    return actor.update(samples, loss=loss)


@graph
def kto(
    responses: Any, *, actor: Any, reference: Scorer, loss: Loss = DesirabilityLoss(), by: str = "label"
) -> Any:
    """KTO (arXiv:2402.01306) on single labeled responses (`prompt_ids`, `response_ids` and a
    label), or on pairs, which count as single responses.

    Before each update, two extra forward passes on responses to other prompts estimate the
    reference point. If the schedule runs nodes on parts of a step, each part has its own estimate.
    """
    rows = pairs(responses) if CHOSEN_IDS in responses else labelled(responses, by=by)
    others = mismatched(rows)
    others = actor.logprobs(others, of=str(MISMATCHED_IDS), into=str(MISMATCHED_LOGPROBS))
    others = reference.logprobs(others, of=str(MISMATCHED_IDS), into=str(MISMATCHED_REFERENCE_LOGPROBS))
    rows = reference.logprobs(rows, into=str(REFERENCE_LOGPROBS))
    return actor.update(rows | reference_point(others), loss=loss)


@graph
def bco(
    responses: Any, *, actor: Any, reference: Scorer, loss: Loss = ClassifierLoss(), by: str = "label"
) -> Any:
    """BCO (arXiv:2404.04656) on the data of `kto`. Before each update, the actor's log-probabilities
    give the point that separates good responses from bad ones.

    The paper averages this point over steps. Here, it depends only on the current weights and the
    rows of the step, so a resumed run continues exactly. If the schedule runs nodes on parts of a
    step, each part has its own.
    """
    rows = pairs(responses) if CHOSEN_IDS in responses else labelled(responses, by=by)
    rows = reference.logprobs(rows, into=str(REFERENCE_LOGPROBS))
    rows = old_logprobs(rows, actor=actor)
    return actor.update(midpoint(rows), loss=loss)


@graph
def aot(
    preferences: Any,
    *,
    actor: Any,
    reference: Scorer,
    loss: PreferenceLoss = PreferenceLoss(score=LogLikelihood(), margin=str(QUANTILE_MARGIN)),
) -> Any:
    """AOT on pairs (arXiv:2406.05882): the distribution of the policy's leads over pairs is to exceed the
    reference's at every quantile. DPO asks this of each pair.

    Before each update, the actor's log-probabilities rank its leads. The gradient is exact for one
    optimizer step per update, because ranks are constant near the current weights. If the schedule runs
    nodes on parts of a step, or `functions` has several ranks, each part has its own ranks.

    Raises:
        UserError: the loss does not use these ranks.
    """
    if loss.margin != str(QUANTILE_MARGIN) or not isinstance(loss.score, LogLikelihood):
        raise UserError(
            f"aot: the loss must be PreferenceLoss(score=LogLikelihood(), margin={str(QUANTILE_MARGIN)!r}, ...), not {loss!r}, which "
            "ignores the ranks"
        )
    rows = reference.logprobs(pairs(preferences), into=str(REFERENCE_LOGPROBS))
    rows = old_logprobs(rows, actor=actor)
    return actor.update(quantile_margins(rows, beta=loss.beta), loss=loss)


@graph
def aot_unpaired(
    responses: Any, *, actor: Any, reference: Scorer, loss: Loss = ClassifierLoss(), by: str = "label"
) -> Any:
    """AOT on the data of `kto` (arXiv:2406.05882): good responses are to have a higher log-ratio than bad
    ones, quantile by quantile.

    Each response is compared with one of the other kind, so a pair counts twice: the loss equals the
    paper's, and its gradient is half as large, which AdamW ignores. Otherwise as in `aot`.
    """
    if str(REFERENCE_POINT) not in loss.reads:
        raise UserError(
            f"aot_unpaired: the loss must read {str(REFERENCE_POINT)!r}, as ClassifierLoss() does, not {loss!r}"
        )
    rows = pairs(responses) if CHOSEN_IDS in responses else labelled(responses, by=by)
    rows = reference.logprobs(rows, into=str(REFERENCE_LOGPROBS))
    rows = old_logprobs(rows, actor=actor)
    return actor.update(quantile_points(rows), loss=loss)


@graph
def preference_accuracy(preferences: Any, *, actor: Scorer, reference: Scorer | None = None) -> Any:
    """Evaluate how often the actor prefers the preferred response: by likelihood, or with a
    reference by implicit reward. Metrics: `preference_accuracy` and `preference_margin` (nats)."""
    rows = actor.logprobs(pairs(preferences), into="policy_logprobs")
    if reference is None:
        return compare(rows, score="policy_logprobs")
    rows = reference.logprobs(rows, into=str(REFERENCE_LOGPROBS))
    return compare(rows, score="policy_logprobs", against=str(REFERENCE_LOGPROBS))


def _two_of_each(preferences: Batch, columns: dict[Column, tuple[Column, Column]]) -> Batch:
    """Interleave: preference i becomes rows 2i (chosen) and 2i + 1 (rejected)."""
    number = len(preferences)
    if CHOSEN_MASK in preferences and REJECTED_MASK in preferences:
        columns = {**columns, RESPONSE_MASK: (CHOSEN_MASK, REJECTED_MASK)}
    order = pa.array(np.arange(2 * number).reshape(2, number).T.ravel())
    made = {
        str(name): pa.concat_arrays([preferences[side] for side in sides]).take(order)
        for name, sides in columns.items()
    }
    preferred = np.tile(np.array([1, 0], np.uint8), number)
    rows = Batch.of(parent_id=np.repeat(preferences.numpy(SAMPLE_ID), 2), preferred=preferred, **made)
    if RESPONSE_MASK in rows:
        return rows
    ids, cu_seqlens = rows.ragged_numpy(RESPONSE_IDS)
    return rows.with_columns(response_mask=(np.ones(len(ids), np.uint8), cu_seqlens))


def _sums(rows: Batch, column: object, mask: object = RESPONSE_MASK) -> np.ndarray:
    """Return the sums over unmasked tokens, or the values of a per-row column: [rows] float64."""
    if not pa.types.is_list(rows[column].type):
        return rows.numpy(column).astype(np.float64)
    values, cu_seqlens = rows.ragged_numpy(column)
    if mask in rows:
        values = np.where(rows.ragged_numpy(mask)[0] > 0, values, 0)
    return np.diff(np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])[cu_seqlens])
