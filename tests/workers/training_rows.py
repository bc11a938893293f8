"""Rows that a training worker takes, at random."""

import numpy as np

from weft.dataflow.batch import Batch


def make_rows(num_rows: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    prompts, lengths = rng.integers(1, 9, num_rows), rng.integers(1, 14, num_rows)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = int(cu_seqlens[-1])
    return Batch.of(
        sample_id=np.arange(num_rows),
        prompt_ids=[rng.integers(0, 97, n) for n in prompts],
        response_ids=(rng.integers(0, 97, num_tokens), cu_seqlens),
        response_mask=((rng.random(num_tokens) < 0.9).astype(np.uint8), cu_seqlens),
        temperature=np.where(rng.random(num_rows) < 0.5, 1.0, 0.7),
        advantages=(rng.normal(size=num_tokens), cu_seqlens),
        old_logprobs=(-4.5 + 0.3 * rng.normal(size=num_tokens), cu_seqlens),
        reference_logprobs=(-4.5 + 0.3 * rng.normal(size=num_tokens), cu_seqlens),
    )
