"""Inputs of the comparison with the peers' functions."""

from typing import Any

import numpy as np


def test_parity_draws_groups_of_one_and_bounds_that_tell_a_ratio_from_its_reciprocal(load: Any):
    parity = load("parity/parity")
    inputs = parity.draw(0)
    sizes = np.bincount(inputs["groups"])
    several, rewards, mask = sizes[inputs["groups"]] > 1, inputs["rewards"], inputs["mask"] > 0
    assert sizes.min() == 1 and len(set(sizes)) > 2 and set(parity.ON_PURPOSE) <= set(parity.WEFT)
    found = parity.evaluate(
        {k: f for k, f in parity.WEFT.items() if "rloo" in k or "rejection token" in k}, inputs
    )
    others = np.array(
        [
            rewards[(inputs["groups"] == g) & (np.arange(24) != k)].sum()
            for k, g in enumerate(inputs["groups"])
        ]
    )
    expected = np.where(several, rewards - others / np.maximum(sizes[inputs["groups"]] - 1, 1), 0)
    for name in ("verl rloo", "verl rloo_vectorized"):
        np.testing.assert_allclose(found[f"{name}/value"][:, 0], expected, atol=1e-6)
    assert not found["verl rloo, groups of one row/value"].any(), "a row without others has no advantage"
    low, high = parity.BOUNDS
    generator_over_trainer = np.exp(inputs["reference"] - inputs["old"])
    kept = (generator_over_trainer >= low) & (generator_over_trainer <= high)
    assert (found["verl rejection token_k1/value"] == kept)[mask].all()
    assert not (found["verl rejection token_k1, the same bounds/value"] == kept)[mask].all()
