"""Random rows for training workers."""

from collections.abc import Sequence

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


def with_kept_sets(rows: Batch, vocabulary: int = 97, seed: int = 0) -> Batch:
    """Add kept sets that have the sampled tokens: a third each of few tokens, of all but a few, and of
    all."""
    rng = np.random.default_rng(seed)
    values, cu_seqlens = rows.ragged_numpy("response_ids")
    counts, ids = np.zeros(len(values), np.int32), list[np.ndarray]()
    for token, sampled in enumerate(values.tolist()):
        others = rng.permutation(np.delete(np.arange(vocabulary), sampled))
        number = int(rng.integers(0, 8))
        kind = rng.integers(3)
        if kind == 0:
            ids.append(rng.permutation(np.append(others[:number], sampled)))
            counts[token] = number + 1
        elif kind == 1:
            ids.append(others[:number])
            counts[token] = -number
    ends = np.concatenate([[0], np.cumsum(np.abs(counts))])[cu_seqlens]
    return rows.with_columns(kept_counts=(counts, cu_seqlens), kept_ids=(np.concatenate(ids), ends))


def make_groups(num_groups: int, prompt_tokens: int, responses: Sequence[int]) -> Batch:
    """Return groups of rows with equal prompts and responses of these lengths, in random order."""
    rng, samples = np.random.default_rng(2), len(responses)
    cu_seqlens = np.concatenate([[0], np.cumsum(np.tile(responses, num_groups))])
    drawn = rng.normal(size=int(cu_seqlens[-1]))
    return Batch.of(
        sample_id=np.arange(num_groups * samples),
        group_id=np.repeat(np.arange(num_groups), samples),
        prompt_ids=np.repeat(rng.integers(0, 97, (num_groups, prompt_tokens)), samples, 0).tolist(),
        response_ids=(rng.integers(0, 97, len(drawn)), cu_seqlens),
        response_mask=(np.ones(len(drawn), np.uint8), cu_seqlens),
        temperature=np.ones(num_groups * samples),
        advantages=(drawn, cu_seqlens),
        old_logprobs=(-4.5 + 0.3 * drawn, cu_seqlens),
        reference_logprobs=(-4.5 - 0.3 * drawn, cu_seqlens),
    ).take(rng.permutation(num_groups * samples))


def make_pairs(rows: Batch) -> Batch:
    """11 pairs with the columns of every loss; the rows of a pair are apart.

    In one pair, a response is fully masked. Three rows each form an episode, across pairs.
    """
    rng, rows = np.random.default_rng(3), rows.slice(0, 22)
    mask, cu_seqlens = rows.ragged_numpy("response_mask")
    mask, number = mask.copy(), int(cu_seqlens[-1])
    mask[cu_seqlens[5] : cu_seqlens[6]] = 0
    drawn = {name: rng.normal(size=number).astype(np.float32) for name in ("values", "returns")}
    marked = (np.random.default_rng(4).random(number) < 0.2).astype(np.uint8)
    trained = np.diff(np.concatenate([[0], np.cumsum(mask)])[cu_seqlens])
    episode = np.arange(22) // 3
    shares = rng.dirichlet(np.ones(4), number)[:, :3].astype(np.float32)
    labels = np.where(rng.random(number) < 0.3, rng.random(number), np.nan).astype(np.float32)
    return rows.with_columns(
        group_id=100 + np.arange(22) // 2,
        preferred=(np.arange(22) % 2 == 0).astype(np.uint8),
        margin=np.repeat(rng.random(11), 2).astype(np.float32),
        reference_point=np.full(22, 0.2, np.float32),
        episode_tokens=np.bincount(episode, weights=trained)[episode].astype(np.int32),
        response_mask=(mask, cu_seqlens),
        response_logprobs=(-4.5 + 0.3 * rng.normal(size=number).astype(np.float32), cu_seqlens),
        step_labels=(labels, cu_seqlens),
        high_covariance=(marked, cu_seqlens),
        token_weights=((1 - marked).astype(np.float32), cu_seqlens),
        teacher_ids=(np.argsort(rng.random((number, 97)))[:, :3].ravel(), cu_seqlens * 3),
        teacher_logprobs=(np.log(shares).ravel(), cu_seqlens * 3),
        **{name: (column, cu_seqlens) for name, column in drawn.items()},
    ).take(np.random.default_rng(1).permutation(22))
