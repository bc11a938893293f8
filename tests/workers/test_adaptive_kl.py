"""The adaptive penalty: only sampled tokens, and only responses that have some, count."""

import numpy as np
import pytest

from weft.dataflow.batch import Batch
from weft.workers.adaptive_kl import AdaptiveKlConfig, AdaptiveKlWorker


def rows(*, given: float = 0.0) -> Batch:
    """Three responses; the last has only given tokens. The divergence of given tokens is `given`."""
    return Batch.of(
        reward=[1.0, 1.0, 1.0],
        response_mask=[[1, 0, 1], [1], [0, 0]],
        response_logprobs=[[-1.0, given, -1.0], [-1.0], [given, given]],
        reference_logprobs=[[-1.5, 0.0, -2.0], [-1.5], [0.0, 0.0]],
    )


@pytest.mark.parametrize("given", [0.0, 500.0, np.nan])
def test_given_tokens_never_count_in_the_divergence(given: float):
    worker = AdaptiveKlWorker(AdaptiveKlConfig(value=0.5, target=1.0, horizon=100))
    made = worker.token_rewards(rows(given=given))["token_rewards"].to_pylist()
    assert made == [[-0.25, 0.0, 0.5], [0.75], [0.0, 0.0]]
    metrics = worker.update(rows(given=given))
    # 1.5 nats in the first response and 0.5 in the second; the third has no sampled token.
    assert metrics["kl"].value == 1.0
    assert worker.coefficient.value == 0.5, "the divergence is on target"


def test_responses_without_a_sampled_token_do_not_change_the_coefficient():
    worker = AdaptiveKlWorker(AdaptiveKlConfig(value=0.5, target=0.1, horizon=100))
    metrics = worker.update(rows().slice(2, 1))
    assert worker.coefficient.value == 0.5 and np.isnan(metrics["kl"].value)
    worker.update(rows())
    assert worker.coefficient.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 100)), "two responses"
