"""Tokens that training ranks compute, and their balance, by ranks and distribution of lengths."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from weft.workers.dispatch import Coordinates, Dispatch, RowCost, RowSizes

PROMPTS, SAMPLES = 64, 8
PROMPT_TOKENS, RESPONSE_TOKENS = 1024, 2048
"""[tokens] Length of each prompt and response, or the mean of log-normal lengths."""
SIGMA = {"prompt": 0.5, "response": 0.8}
"""Standard deviation of the logarithm of log-normal lengths."""
MAX_TOKENS = 8192
COST = RowCost(attention_length=51_000)
"""Cost of a row of Qwen3-8B."""
RANKS = (2, 8, 32)
DRAWS = 20
"""Number of draws of log-normal lengths. Figures are means."""


def lengths(distribution: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each row's prompt and response, [rows] each."""
    if distribution == "equal":
        prompts, responses = np.full(PROMPTS, PROMPT_TOKENS), np.full(PROMPTS * SAMPLES, RESPONSE_TOKENS)
    else:
        draw = np.random.default_rng(seed)
        prompts = _log_normal(draw, PROMPT_TOKENS, SIGMA["prompt"], PROMPTS)
        responses = _log_normal(draw, RESPONSE_TOKENS, SIGMA["response"], PROMPTS * SAMPLES)
    return np.repeat(prompts, SAMPLES), responses


def _log_normal(draw: np.random.Generator, mean: float, sigma: float, number: int) -> np.ndarray:
    values = draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, number)
    return np.clip(values, 16, MAX_TOKENS).astype(np.int64)


def dealt(distribution: str, ranks: int, seed: int, *, shares: bool = True) -> dict[str, float]:
    """Deal the rows of a step, and return its figures. Without `shares`, deal rows as if they did
    not share prompts, although ranks still compute each prompt once."""
    prompts, responses = lengths(distribution, seed)
    groups = np.repeat(np.arange(PROMPTS), SAMPLES)
    costs, prompt_costs = COST(prompts + responses), COST(prompts)
    sizes = RowSizes(
        prompts + responses, groups, costs=costs, prompt_costs=prompt_costs if shares else None
    )
    mesh = [Coordinates(dp=rank) for rank in range(ranks)]
    began = time.process_time()
    dealt = Dispatch.SPLIT_BY_DP.distribute(sizes, mesh)
    seconds = time.process_time() - began
    tokens, of_ranks = 0, []
    for share in dealt:
        rows = np.array(share, np.int64)
        _, first = np.unique(groups[rows], return_index=True)
        once = rows[first]  # one row of each prompt
        tokens += responses[rows].sum() + prompts[once].sum()
        of_ranks.append((costs - prompt_costs)[rows].sum() + prompt_costs[once].sum())
    return {
        "tokens": tokens / (prompts[::SAMPLES].sum() + responses.sum()),
        "imbalance": max(of_ranks) / np.mean(of_ranks) - 1,
        "row_us": 1e6 * seconds / len(groups),
    }


def dispatch_tokens() -> dict[str, Any]:
    """Return the figures of the table in `driver.py`."""
    by_case: dict[str, dict[str, float]] = {}
    for distribution in ("equal", "log-normal"):
        for ranks in RANKS:
            for shares in (True, False):
                draws = [dealt(distribution, ranks, seed, shares=shares) for seed in range(DRAWS)]
                mean = {name: round(float(np.mean([d[name] for d in draws])), 4) for name in draws[0]}
                mean["worst_imbalance"] = round(float(max(d["imbalance"] for d in draws)), 4)
                case = f"{distribution}, {ranks} ranks" + ("" if shares else ", dealt by rows")
                by_case[case] = mean
                print(f"{case:<40} {mean}", flush=True)
    on_8 = [by_case[f"{distribution}, 8 ranks"] for distribution in ("equal", "log-normal")]
    return {
        "dispatch_tokens": max(case["tokens"] for case in on_8),
        "dispatch_imbalance": max(case["worst_imbalance"] for case in on_8),
        "dispatch_by_case": by_case,
    }
