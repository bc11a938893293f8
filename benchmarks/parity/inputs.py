"""Inputs that `parity.py` gives to Weft and its peers, and the evaluation of functions on them.

Both sides draw the inputs from the same seed, and return values and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

GROUP_SIZES = (1, 1, 2, 3, 7, 10)
"""Rows per group. A single row has no others to compare with."""
MAX_TOKENS, VOCABULARY = 48, 17
BOUNDS = (0.7, 1.6)
"""Bounds of kept ratios. They are not reciprocal, so the direction of the ratio shows."""
PAIRS = 64
LEAVES = ("logprobs", "new_values", "entropy", "logits", "scores")
"""Inputs to differentiate by, where a function depends on them."""


def draw(seed: int) -> dict[str, np.ndarray]:
    """Draw random right-padded rows: [B, L] for tokens, [B] for rows.

    Every row has a trained token, and groups differ in reward. `mask` is 0 at padding and at a
    tenth of the other tokens (tool answers).
    """
    rng = np.random.default_rng(seed)
    num_rows = sum(GROUP_SIZES)
    normal = lambda *shape: rng.normal(size=(num_rows, *shape)).astype(np.float32)  # noqa: E731
    lengths = rng.integers(1, MAX_TOKENS + 1, num_rows)
    mask = (np.arange(MAX_TOKENS) < lengths[:, None]) & (rng.random((num_rows, MAX_TOKENS)) < 0.9)
    mask[:, 0] = True
    logprobs = -2 + 0.5 * normal(MAX_TOKENS)
    last = np.where(mask, np.arange(MAX_TOKENS), 0).argmax(1)
    rewards = normal()
    token_rewards = np.zeros((num_rows, MAX_TOKENS), np.float32)
    token_rewards[np.arange(num_rows), last] = rewards
    return {
        "lengths": lengths,
        "mask": mask.astype(np.int64),
        "groups": rng.permutation(np.repeat(np.arange(len(GROUP_SIZES)), GROUP_SIZES)),
        "rewards": rewards,
        "outcome_rewards": token_rewards,
        "baselines": normal(),
        "row_advantages": normal(),
        "logprobs": logprobs,
        "old": logprobs + 0.2 * normal(MAX_TOKENS),
        "reference": logprobs + 0.3 * normal(MAX_TOKENS),
        "advantages": normal(MAX_TOKENS),
        "token_rewards": normal(MAX_TOKENS),
        "values": normal(MAX_TOKENS),
        "new_values": normal(MAX_TOKENS),
        "returns": normal(MAX_TOKENS),
        "entropy": np.abs(normal(MAX_TOKENS)),
        "logits": normal(MAX_TOKENS, VOCABULARY),
        "reference_logits": normal(MAX_TOKENS, VOCABULARY),
        "cotangents": normal(MAX_TOKENS),
    }


def draw_pairs(seed: int) -> dict[str, np.ndarray]:
    """Draw random response pairs, all chosen rows before all rejected ones.

    Values are [T] for concatenated tokens, [rows] for rows.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 2 * PAIRS)
    tokens = int(lengths.sum())

    def near(values: np.ndarray) -> np.ndarray:
        return (values + 0.3 * rng.normal(size=len(values))).astype(np.float32)

    logprobs = -rng.exponential(1.5, tokens).astype(np.float32) - np.float32(0.01)
    others = -rng.exponential(1.5, tokens).astype(np.float32)
    return {
        "lengths": lengths,
        "logprobs": logprobs,
        "reference_logprobs": near(logprobs),
        "mismatched_logprobs": others,
        "mismatched_reference_logprobs": near(others) - np.float32(0.02),
        "scores": rng.normal(size=2 * PAIRS).astype(np.float32),
        "margins": rng.random(PAIRS).astype(np.float32),
    }


Function = Callable[[SimpleNamespace], Any]
"""Maps inputs as tensors to a scalar, [B] or [B, L]; entries outside the mask do not count."""


def among_several(function: Function) -> Function:
    """Restrict a function [B, L] to rows in groups of more than one; others become 0."""

    def call(x: SimpleNamespace) -> Any:
        several = torch.bincount(x.groups)[x.groups] > 1
        rows = SimpleNamespace(**{name: column[several] for name, column in vars(x).items()})
        rows.groups = torch.unique(rows.groups, return_inverse=True)[1]
        values = torch.zeros(x.mask.shape)
        values[several] = function(rows)
        return values

    return call


def alone(function: Function) -> Function:
    """Apply the function with each row as a separate group."""

    def call(x: SimpleNamespace) -> Any:
        x.groups = torch.arange(len(x.groups))
        return function(x)

    return call


def evaluate(
    functions: Mapping[str, Function], inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return `NAME/value`, and `NAME/LEAF` for its gradient by each leaf it depends on.

    Values with several entries are summed with fixed random weights before differentiation.
    """
    out: dict[str, np.ndarray] = {}
    leaves = [leaf for leaf in LEAVES if leaf in inputs]
    for name, function in functions.items():
        given = SimpleNamespace(
            **{key: torch.from_numpy(np.array(value)) for key, value in inputs.items()}
        )
        tensors = [getattr(given, leaf).requires_grad_() for leaf in leaves]
        value = torch.as_tensor(function(given))
        if "mask" in inputs and value.shape == given.mask.shape:
            value = torch.where(given.mask > 0, value, 0.0)
        out[f"{name}/value"] = value.detach().numpy()
        if value.requires_grad:
            weights = given.cotangents if value.ndim == 2 else torch.ones(())
            gradients = torch.autograd.grad((value * weights).sum(), tensors, allow_unused=True)
            found = zip(leaves, gradients, strict=True)
            out |= {
                f"{name}/{leaf}": gradient.numpy() for leaf, gradient in found if gradient is not None
            }
    return out
