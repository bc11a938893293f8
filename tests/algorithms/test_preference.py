"""Preference graphs and their nodes: given pairs, and pairs made of samples."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from weft.algorithms.loss import response_rows
from weft.algorithms.methods import supervised
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.preference import (
    aot,
    aot_unpaired,
    bco,
    best_and_worst,
    compare,
    dpo,
    kto,
    midpoint,
    mismatched,
    online_dpo,
    pairs,
    pairs_with_reference,
    quantile_margins,
    quantile_points,
    reference_of_pairs,
    reference_point,
)
from weft.algorithms.preference_loss import LogLikelihood, PreferenceLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.reference import ReferenceWorker
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker

PAIRS = TableSource(
    "pairs", pa.table({"prompt_ids": [[1]], "chosen_ids": [[2, 3]], "rejected_ids": [[4]]})
)
LABELLED = TableSource(
    "labelled", pa.table({"prompt_ids": [[1]], "response_ids": [[2]], "label": [True]})
)
SIMPO = PreferenceLoss(beta=2, score=LogLikelihood(per_token=True), margin=1)


def always_one(response: str) -> float:
    return 1.0


def handles(*names: str) -> dict[str, Any]:
    made = {
        "actor": lambda: group(ActorWorker, model="m"),
        "reference": lambda: group(ReferenceWorker, model="m"),
        "rollout": lambda: group(RolloutWorker, model="m"),
        "reward": lambda: group(RewardWorker, function=always_one, tokenizer="m"),
    }
    return {name: made[name]() for name in names}


def test_dpo_makes_rows_of_pairs_and_keeps_them_together():
    graph = dpo(PAIRS, **handles("actor", "reference"))
    assert [n.name for n in graph.nodes] == ["pairs", "reference.logprobs", "actor.update"]
    update = graph["actor.update"]
    assert update.operation.whole_groups and update.level == graph["pairs"].makes_level
    assert {"preferred", "reference_logprobs", "response_ids"} <= set(update.reads)
    plain = dpo(PAIRS, **handles("actor"), loss=SIMPO)
    assert [n.name for n in plain.nodes] == ["pairs", "actor.update"]
    with pytest.raises(
        UserError, match=r"'actor\.update' reads column 'reference_logprobs', which no node writes"
    ):
        dpo(PAIRS, **handles("actor"))


def test_a_reference_that_is_known_is_only_read():
    known = PAIRS.table.append_column("chosen_reference_logprobs", pa.array([[-1.0, -2.0]]))
    known = known.append_column("rejected_reference_logprobs", pa.array([[-3.0]]))
    graph = dpo(TableSource("known", known), **handles("actor"))
    assert [n.name for n in graph.nodes] == ["pairs_with_reference", "actor.update"]
    rows = pairs_with_reference(Batch(known.append_column("sample_id", pa.array([5])).to_batches()[0]))
    assert rows["reference_logprobs"].to_pylist() == [[-1.0, -2.0], [-3.0]]
    once = reference_of_pairs(PAIRS, **handles("reference"))
    assert [n.reads for n in once.nodes] == [
        ("prompt_ids", "chosen_ids"),
        ("prompt_ids", "rejected_ids"),
    ]
    assert {n.level for n in once.nodes} == {0}, "the columns are of the source's rows"


def test_a_loss_on_pairs_needs_groups_and_one_on_tokens_does_not():
    with pytest.raises(
        UserError,
        match="sees complete groups, but each row of the source 'labelled' is a separate group",
    ):
        supervised(LABELLED, actor=group(ActorWorker, model="m"), loss=SIMPO)
    assert not PolicyLoss().whole_groups


def test_online_dpo_scores_only_the_rows_that_it_keeps_under_the_reference():
    prompts = TableSource(
        "prompts", pa.table({"prompt": ["1+1="], "prompt_ids": [[1]], "answer": ["2"]})
    )
    graph = online_dpo(prompts, **handles("rollout", "reward", "actor", "reference"), n=4)
    names = [n.name for n in graph.nodes]
    assert names == [
        "rollout.generate",
        "reward.score",
        "best_and_worst",
        "reference.logprobs",
        "actor.update",
    ]
    assert "best_and_worst" in graph["reference.logprobs"].after and graph["best_and_worst"].writes == (
        "preferred",
    )


def test_kto_takes_single_responses_and_those_of_pairs():
    graph = kto(LABELLED, **handles("actor", "reference"))
    assert graph["labelled"].reads == ("label",) and not graph["actor.update"].operation.whole_groups
    assert "reference_point" in graph["actor.update"].reads
    assert kto(PAIRS, **handles("actor", "reference")).nodes[0].name == "pairs"


def test_the_best_and_the_worst_of_uneven_groups():
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat([3, 5, 8, 9], [4, 1, 2, 5]))
    rewards = np.where(groups == 8, 1.0, rng.random(12)).astype(np.float32)
    kept, metrics = best_and_worst(Batch.of(sample_id=np.arange(12), group_id=groups, reward=rewards))
    assert metrics["tied_groups"].value == 2, "of one row, and of equal rewards"
    for row in kept.to_rows():
        of_group = rewards[groups == row["group_id"]]
        assert row["reward"] == (of_group.max() if row["preferred"] else of_group.min())
    assert sorted(kept["group_id"].to_pylist()) == [3, 3, 9, 9]
    none, _ = best_and_worst(kept.slice(0, 0))
    assert len(none) == 0
    lost, metrics = best_and_worst(
        Batch.of(sample_id=[1, 2], group_id=[1, 1], reward=[float("nan"), 1.0])
    )
    assert len(lost) == 0 and metrics["tied_groups"].value == 1


def test_mismatched_responses_are_of_other_groups():
    rows = Batch.of(
        sample_id=range(6), group_id=[1, 1, 2, 2, 3, 3], response_ids=[[i] for i in range(6)]
    )
    order = [3, 0, 5, 1, 4, 2]
    found = mismatched(rows.take(order))
    other = [ids[0] // 2 for ids in found["mismatched_ids"].to_pylist()]
    assert all(a + 1 != b for a, b in zip(other, found["group_id"].to_pylist(), strict=True))
    assert sorted(ids[0] for ids in found["mismatched_ids"].to_pylist()) == list(range(6))


@pytest.mark.parametrize("seed", range(20))
def test_mismatched_responses_are_of_other_groups_of_any_size(seed: int):
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(4), rng.integers(1, 7, 4)))
    number = len(groups)
    rows = Batch.of(sample_id=range(number), group_id=groups, response_ids=[[i] for i in range(number)])
    other = np.array([ids[0] for ids in mismatched(rows)["mismatched_ids"].to_pylist()])
    assert (groups[other] != groups).all()
    if 2 * np.bincount(groups).max() <= number:
        assert sorted(other) == list(range(number)), "each response stands beside one prompt"
    alone = mismatched(rows.take(np.flatnonzero(groups == 0)))
    assert alone["mismatched_ids"].to_pylist() == [[i] for i in np.flatnonzero(groups == 0)]


def test_the_midpoint_lies_between_the_means_of_good_and_bad_responses():
    rows = Batch.of(
        preferred=[1, 1, 0, 0],
        old_logprobs=[[-1.0, -9.0], [-2.0], [-4.0], [-5.0, -5.0]],
        reference_logprobs=[[-3.0, -1.0], [-6.0], [-3.0], [-1.0, -1.0]],
        response_mask=[[1, 0], [1], [1], [0, 0]],
    )
    # good: 2 and 4; bad: -1, and a row without a trained token
    assert midpoint(rows)["reference_point"].to_pylist() == [1.0] * 4
    assert midpoint(rows.take(np.array([0, 1])))["reference_point"].to_pylist() == [3.0, 3.0]
    assert midpoint(rows.take(np.array([3])))["reference_point"].to_pylist() == [0.0]


def test_bco_reads_the_actor_before_the_update():
    graph = bco(LABELLED, **handles("actor", "reference"))
    assert [node.operation.name for node in graph.nodes][-3:] == ["logprobs", "midpoint", "update"]
    assert "reference_point" in graph["actor.update"].reads


def leads(rows: Batch, column: str) -> dict[int, float]:
    """Return the lead of the preferred response of each group."""
    found: dict[int, float] = {}
    for row in rows.record.to_pylist():
        trained = [v for v, m in zip(row[column], row["response_mask"], strict=True) if m]
        sign = 1 if row["preferred"] else -1
        found[row["group_id"]] = found.get(row["group_id"], 0.0) + sign * sum(trained)
    return found


def scored_pairs(number: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, 2 * number)
    columns = {
        name: [rng.normal(-2, 1, n).astype(np.float32) for n in lengths]
        for name in ("old_logprobs", "reference_logprobs")
    }
    masks = [(rng.random(n) < 0.7).astype(np.uint8) for n in lengths]
    for mask in masks:
        mask[0] = 1
    masks[5][:] = 0  # half a pair without trained tokens
    order = rng.permutation(2 * number)
    identity = {"group_id": 10 + np.arange(2 * number) // 2, "preferred": 1 - np.arange(2 * number) % 2}
    return Batch.of(**identity, **columns, response_mask=masks).take(order)


def test_aot_compares_sorted_leads():
    """The mean over ranks of f(policy's lead of the rank - reference's lead of the rank)."""
    rows = scored_pairs(8)
    margins = quantile_margins(rows, beta=0.1)["quantile_margin"].to_pylist()
    policy, reference = leads(rows, "old_logprobs"), leads(rows, "reference_logprobs")
    whole = [group for group in policy if group != 12]
    expected = np.sort([policy[g] for g in whole]) - np.sort([reference[g] for g in whole])
    lead_of = dict(zip(rows["group_id"].to_pylist(), margins, strict=True))
    found = [policy[group] - lead_of[group] / 0.1 for group in sorted(whole, key=policy.__getitem__)]
    assert found == pytest.approx(expected.tolist(), abs=1e-5) and lead_of[12] == 0
    assert {*zip(rows["group_id"].to_pylist(), margins, strict=True)} == {*lead_of.items()}


def test_aot_has_the_gradient_of_sorted_leads():
    rows = scored_pairs(8)
    loss = PreferenceLoss(score=LogLikelihood(), margin="quantile_margin")
    rows = quantile_margins(rows, beta=loss.beta)
    columns = ("group_id", "preferred", "reference_logprobs", "quantile_margin", "old_logprobs")
    packed = response_rows(rows, "old_logprobs", *columns)
    logprobs = packed["old_logprobs"].clone().requires_grad_()
    [ours] = torch.autograd.grad(loss(logprobs, packed)[0], logprobs)
    again = packed["old_logprobs"].double().requires_grad_()
    sums = packed.sums(packed.trained.double() * again)
    known = packed.sums(packed.trained.double() * packed["reference_logprobs"].double())
    pairs_of = [
        [
            next(k for k in range(16) if packed["group_id"][k] == g and packed["preferred"][k] == side)
            for side in (1, 0)
        ]
        for g in range(10, 18)
        if g != 12
    ]
    policy, reference = (torch.stack([of[w] - of[r] for w, r in pairs_of]) for of in (sums, known))
    ahead = policy.sort().values - reference.sort().values
    [right] = torch.autograd.grad(-torch.sigmoid(0.1 * ahead).log().sum(), again)
    torch.testing.assert_close(ours.double(), right, atol=1e-6, rtol=1e-5)


def test_unpaired_aot_compares_good_and_bad_responses_of_the_same_rank():
    rows = scored_pairs(8)
    found = quantile_points(rows)
    read = rows.record.to_pylist()
    ratios = [
        sum(
            a - b
            for a, b, m in zip(
                row["old_logprobs"], row["reference_logprobs"], row["response_mask"], strict=True
            )
            if m
        )
        for row in read
    ]
    kinds = {
        good: sorted(
            (k for k in range(16) if read[k]["preferred"] == good and any(read[k]["response_mask"])),
            key=ratios.__getitem__,
        )
        for good in (1, 0)
    }
    points = found["reference_point"].to_pylist()
    assert (len(kinds[1]), len(kinds[0])) == (8, 7), "one bad response has no trained token"
    for good, bad in ((1, 0), (0, 1)):
        own, other = kinds[good], kinds[bad]
        for rank, row in enumerate(own):
            partner = other[int((rank + 0.5) / len(own) * len(other))]
            assert points[row] == pytest.approx(ratios[partner], abs=1e-5)
    alone = rows.take(np.flatnonzero(rows.numpy("preferred")))
    own = [ratios[row] for row in np.flatnonzero(rows.numpy("preferred")).tolist()]
    assert quantile_points(alone)["reference_point"].to_pylist() == pytest.approx(own, abs=1e-5)
    assert len(quantile_points(alone.slice(0, 0))) == 0


def test_aot_reads_the_actor_before_the_update():
    for graph, column in (
        (aot(PAIRS, **handles("actor", "reference")), "quantile_margin"),
        (aot_unpaired(LABELLED, **handles("actor", "reference")), "reference_point"),
    ):
        assert "old_logprobs" in graph.nodes[-2].reads and column in graph["actor.update"].reads


def test_masked_tokens_stay_out_of_comparisons_and_of_the_reference_point():
    rows = Batch.of(
        sample_id=[1, 2],
        group_id=[1, 2],
        response_ids=[[5, 6], [7, 8]],
        response_mask=[[1, 0], [1, 1]],
    )
    beside = mismatched(rows)
    assert beside["mismatched_mask"].to_pylist() == [[1, 1], [1, 0]], "the mask goes with the response"
    assert mismatched(rows.select(["sample_id", "group_id", "response_ids"]))[
        "mismatched_mask"
    ].to_pylist() == [
        [1, 1],
        [1, 1],
    ]
    nothing = float("nan")
    scored = beside.with_columns(
        mismatched_logprobs=[[-1.0, -1.0], [-1.0, nothing]],
        mismatched_reference_logprobs=[[-2.0, -2.0], [-4.0, nothing]],
    )
    assert reference_point(scored)["reference_point"].to_pylist() == [2.5, 2.5]
    pair = Batch.of(
        group_id=[4, 4], preferred=[1, 0], response_mask=[[1, 0], [1, 1]], a=[[-1.0, -9.0], [-2.0, -2.0]]
    )
    found = compare(pair, score="a")
    assert found["preference_accuracy"].value == 1 and found["preference_margin"].value == 3  # pyright: ignore[reportAttributeAccessIssue]


def test_pairs_of_a_slice_keep_their_own_tokens():
    batch = Batch.of(sample_id=[1, 2, 3], chosen_ids=[[1], [2, 2], [3]], rejected_ids=[[4], [5], [6, 6]])
    rows = pairs(batch.slice(1, 2))
    assert rows["response_ids"].to_pylist() == [[2, 2], [5], [3], [6, 6]] and rows[
        "parent_id"
    ].to_pylist() == [
        2,
        2,
        3,
        3,
    ]


def test_ties_are_not_right():
    rows = Batch.of(
        group_id=[1, 1, 2, 2], preferred=[1, 0, 0, 1], a=[[-1.0], [-1.0], [-2.0], [-1.0]], b=[[0.0]] * 4
    )
    found = compare(rows, score="a", against="b")
    assert found["preference_accuracy"].value == 0.5 and found["preference_margin"].value == 0.5  # pyright: ignore[reportAttributeAccessIssue]


def test_a_loss_that_ignores_the_computed_column_is_refused():
    with pytest.raises(UserError, match="aot: the loss must be PreferenceLoss"):
        aot(PAIRS, **handles("actor", "reference"), loss=PreferenceLoss(beta=0.5))
    with pytest.raises(UserError, match="aot_unpaired: the loss must read 'reference_point'"):
        aot_unpaired(LABELLED, **handles("actor", "reference"), loss=PreferenceLoss())
