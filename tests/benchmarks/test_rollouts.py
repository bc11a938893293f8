"""The test of the figure `speculation_p`."""

from typing import Any

import numpy as np
import pytest


def test_the_chi_squared_test_is_that_of_the_tables(load: Any):
    p_value = load("rollouts/speculative").p_value
    # (10 - 15)^2 / 15 + (20 - 15)^2 / 15, twice: 6.667 with one degree of freedom
    assert p_value(np.array([10, 20]), np.array([20, 10])) == pytest.approx(0.009823, abs=1e-6)
    assert p_value(np.array([10, 20]), np.array([10, 20])) == 1


def test_rare_responses_are_one_category(load: Any):
    p_value = load("rollouts/speculative").p_value
    common = np.array([10, 20]), np.array([20, 10])
    rare = np.array([4, 0, 3, 1, 0]), np.array([0, 4, 1, 3, 0])
    both = [np.concatenate(each) for each in zip(common, rare, strict=True)]
    pooled = p_value(np.array([10, 20, 8]), np.array([20, 10, 8]))
    assert p_value(*both) == pytest.approx(pooled)


def test_samples_of_one_distribution_pass_and_others_do_not(load: Any):
    p_value = load("rollouts/speculative").p_value
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(300))
    other = shares**1.1 / (shares**1.1).sum()
    one, same, different = (rng.multinomial(20_000, each) for each in (shares, shares, other))
    assert p_value(one, same) > 0.01 and p_value(one, different) < 1e-6
