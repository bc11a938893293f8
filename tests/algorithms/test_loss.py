"""Common behaviour of all losses: metrics and errors."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from weft.algorithms.aggregation import TokenMean, fixed_length, sequence_mean
from weft.algorithms.corrections import Rejection, TruncatedImportance
from weft.algorithms.kl import KlPenalty
from weft.algorithms.loss import FrozenLoss, Loss, PackedRows, observed
from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.algorithms.preference_loss import DesirabilityLoss
from weft.algorithms.surrogates import Clipped, sequence_ratio
from weft.algorithms.values import ValueLoss
from weft.dataflow.errors import UserError
from weft.dataflow.metrics import Max, Mean, Sum


def test_masked_entries_are_not_observed():
    over, values = (
        torch.tensor([True, False, True]),
        torch.tensor([1.0, math.nan, 2.0], requires_grad=True),
    )
    flags = torch.tensor([True, True])
    found = observed(
        over, {"mean": values, "share": values > 1}, largest={"largest": values}, counts={"flags": flags}
    )
    assert found == {
        "mean": Mean(3.0, 2.0),
        "share": Mean(1.0, 2.0),
        "largest": Max(2.0),
        "flags": Sum(2.0),
    }
    nothing = observed(
        over[:0], {"mean": values[:0]}, largest={"largest": values[:0]}, counts={"flags": flags}
    )
    assert nothing == {"mean": Mean(0.0, 0.0), "flags": Sum(2.0)}


@pytest.mark.parametrize(
    "loss",
    [
        PolicyLoss(),
        PolicyLoss(
            ratio=sequence_ratio,
            aggregation=sequence_mean,
            entropy_coefficient=0.1,
            kl=KlPenalty(coefficient=0.1),
        ),
        PolicyLoss(correction=(TruncatedImportance(), Rejection(keep=(0.5, 2.0), level="sequence"))),
        NegativeLogLikelihood(),
        ValueLoss(),
        DesirabilityLoss(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_loss_and_its_gradient_ask_nothing_of_the_device(loss: Loss):
    """On meta tensors, anything that would sync with the device raises."""
    of_tokens = (
        "advantages",
        "old_logprobs",
        "response_logprobs",
        "reference_logprobs",
        "entropy",
        "response_mask",
    )
    of_tokens += ("old_values", "returns", "values")
    with FakeTensorMode(allow_non_fake_inputs=False):
        logprobs = torch.zeros(5, requires_grad=True)
        columns = {name: torch.zeros(5) for name in of_tokens}
        columns |= {name: torch.zeros(2) for name in ("preferred", "reference_point")}
        loss_sum, metrics = loss(logprobs, PackedRows(torch.zeros(3, dtype=torch.int64), columns, 5))
        loss_sum.backward()
        assert list(metrics)
        with pytest.raises(DataDependentOutputException):
            dict(metrics)


@pytest.mark.parametrize(
    ("loss", "settings", "name"),
    [
        (
            PolicyLoss,
            {"surrogate": Clipped},
            r"surrogate=Clipped is a class; make a value of it: Clipped\(\)",
        ),
        (
            PolicyLoss,
            {"correction": (TruncatedImportance(), Rejection)},
            "correction=Rejection is a class",
        ),
        (NegativeLogLikelihood, {"aggregation": TokenMean}, "aggregation=TokenMean is a class"),
        (PolicyLoss, {"aggregation": fixed_length}, "aggregation=FixedLength is a class"),
    ],
)
def test_parts_of_a_loss_are_values(loss: type[FrozenLoss], settings: dict, name: str):
    with pytest.raises(UserError, match=name):
        loss(**settings)


def test_a_custom_loss_declares_only_its_differences():
    class LastToken(FrozenLoss):
        @property
        def reads(self) -> tuple[str, ...]:
            return ("target",)

        def count(self, rows: PackedRows) -> float:
            return float(rows.counted.sum())

        def __call__(self, logprobs: torch.Tensor, rows: PackedRows) -> tuple[torch.Tensor, dict]:
            return (logprobs[rows.cu_seqlens[1:] - 1] - rows["target"]).square().sum(), {}

    loss = LastToken()
    assert isinstance(loss, Loss) and loss == LastToken()
    assert (loss.reads, loss.may_read, loss.needs_entropy, loss.whole_groups) == (
        ("target",),
        ("response_mask",),
        False,
        False,
    )
    assert not isinstance(FrozenLoss(), Loss), "a loss has to say its count and what it is"
