"""The adaptive entropy bonus: when it applies, how its coefficient changes, and its gradient."""

from pathlib import Path

import numpy as np
import pytest
import torch

from weft.algorithms.loss import PackedRows
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.adaptive_entropy import AdaptiveEntropyConfig, AdaptiveEntropyWorker


def rows(entropy: float, given: float = np.nan) -> Batch:
    """Three trained tokens with this mean entropy; the entropy of given tokens is `given`."""
    return Batch.of(
        response_mask=[[1, 0, 1], [1], [0]],
        entropies=[[entropy - 0.1, given, entropy + 0.1], [entropy], [given]],
    )


def test_the_bonus_applies_and_grows_while_the_entropy_is_low():
    config = AdaptiveEntropyConfig(value=0.01, target=0.3, change=0.02, largest=0.04)
    worker = AdaptiveEntropyWorker(config)
    used, next_values = [], []
    for entropy in (0.2, 0.2, 0.25, 0.5, 0.5, 0.5, 0.2):
        samples = worker.coefficients(rows(entropy))
        written = samples["entropy_coefficient"].to_pylist()
        assert len(set(written)) == 1
        used.append(written[0])
        metrics = worker.update(samples)
        assert metrics["entropy_coefficient"].value == pytest.approx(written[0])
        next_values.append(worker.coefficient.value)
    assert used == pytest.approx([0.01, 0.03, 0.04, 0.0, 0.0, 0.0, 0.0])
    assert next_values == pytest.approx([0.03, 0.04, 0.04, 0.02, 0.0, 0.0, 0.02])


def test_entropies_that_are_not_finite_do_not_count_and_a_lower_limit_holds_at_once():
    worker = AdaptiveEntropyWorker(AdaptiveEntropyConfig(value=0.04, target=0.3, change=0.01))
    samples = Batch.of(response_mask=[[1, 1]], entropies=[[0.2, np.nan]])
    assert worker.update(worker.coefficients(samples))["entropy_coefficient"].value == pytest.approx(
        0.04
    )
    assert worker.coefficient.value == pytest.approx(0.05)
    lower = worker.coefficient.model_copy(update={"largest": 0.02})
    assert lower.at(0.2) == 0.02


def test_rows_without_a_trained_token_change_nothing():
    worker = AdaptiveEntropyWorker(AdaptiveEntropyConfig(value=0.01))
    alone = rows(0.1).slice(2, 1)
    assert worker.update(alone) == {} and worker.coefficient.value == 0.01
    assert worker.coefficients(alone)["entropy_coefficient"].to_pylist() == [0.0]


def test_a_checkpoint_restores_the_coefficient_and_not_the_other_settings(tmp_path: Path):
    worker = AdaptiveEntropyWorker(AdaptiveEntropyConfig(value=0.01, target=0.3))
    worker.update(worker.coefficients(rows(0.2)))
    worker.save_checkpoint(tmp_path / "entropy")
    again = AdaptiveEntropyWorker(AdaptiveEntropyConfig(target=0.5, change=0.1))
    again.load_checkpoint(tmp_path / "entropy")
    assert again.coefficient.value == pytest.approx(0.015)
    assert (again.coefficient.target, again.coefficient.change) == (0.5, 0.1)
    with pytest.raises(UserError, match=r"value must be at most largest, which is 1\.0, not 2\.0"):
        AdaptiveEntropyConfig(value=2.0)


def test_the_loss_reads_the_coefficient_of_each_row():
    entropy = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    columns = {"advantages": [0.0] * 3, "response_logprobs": [-1.0] * 3, "entropy": entropy}
    packed = PackedRows.of([2, 1], **columns, entropy_coefficient=[0.5, 0.25])
    loss = PolicyLoss(entropy_coefficient="entropy_coefficient")
    assert loss.needs_entropy and "entropy_coefficient" in loss.reads
    total, _ = loss(torch.full((3,), -1.0, requires_grad=True), packed)
    assert total.item() == pytest.approx(-0.5 * 3 - 0.25 * 4)
    assert torch.autograd.grad(total, entropy)[0].tolist() == [-0.5, -0.5, -0.25]
    with pytest.raises(UserError, match="entropy_coefficient"):
        PolicyLoss(entropy_coefficient=-0.1)
