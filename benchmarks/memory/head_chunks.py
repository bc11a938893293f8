"""The chunked head against full logits: bytes and seconds of a loss.

The loss has log-probabilities, entropies with a gradient, and the k3 estimate of a KL divergence.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.algorithms.kl import k3
from weft.workers.training.activations import _LiveBytes
from weft.workers.training.head_logprobs import head_logprobs

Logprobs = Callable[[Tensor, Tensor, Tensor], "tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class Sizes:
    tokens: int
    vocabulary: int
    hidden: int
    dtype: torch.dtype = torch.float32


FULL, QUICK = Sizes(8192, 32768, 512), Sizes(256, 32768, 32)
LARGE, QUICK_LARGE = Sizes(16384, 151936, 896, torch.bfloat16), Sizes(512, 32768, 64, torch.bfloat16)
REPEATS = 3


def at_once(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the plain form, with autograd."""
    log_p = F.log_softmax((hidden @ weight.T).float(), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs, entropies = head_logprobs(hidden, weight, None, targets, None, entropy=True)
    assert entropies is not None
    return logprobs, entropies


def train(of: Logprobs, hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Run forward and backward, and return the loss."""
    hidden.grad = weight.grad = None
    logprobs, entropies = of(hidden, weight, targets)
    loss = (-logprobs + 0.04 * k3(logprobs, logprobs.detach() - 0.1) - 0.01 * entropies).mean()
    loss.backward()
    return loss.item()


def _inputs(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden).to(sizes.dtype).requires_grad_()
    weight = torch.randn(sizes.vocabulary, sizes.hidden).mul_(0.05).to(sizes.dtype).requires_grad_()
    return hidden, weight, torch.randint(sizes.vocabulary, (sizes.tokens,))


def measure(*, quick: bool = False) -> dict[str, float]:
    """Return peak bytes and seconds of the chunked head, over the plain form."""
    inputs = _inputs(QUICK if quick else FULL)
    peaks, seconds, losses = {}, {at_once: [], in_chunks: []}, set()
    for of in (at_once, in_chunks):
        with _LiveBytes(inputs) as live:
            losses.add(round(train(of, *inputs), 3))
        peaks[of] = live.peak
    for _ in range(1 if quick else REPEATS):
        for of, times in seconds.items():
            start = time.perf_counter()
            train(of, *inputs)
            times.append(time.perf_counter() - start)
    if len(losses) > 1:
        raise RuntimeError(f"the two forms disagree: {losses}")
    plain_s, chunked_s = (statistics.median(times) for times in seconds.values())
    return {
        "lean_peak_ratio": round(peaks[in_chunks] / peaks[at_once], 3),
        "lean_time_ratio": round(chunked_s / plain_s, 2),
        "lean_gb": round(peaks[in_chunks] / 1e9, 2),
        "plain_gb": round(peaks[at_once] / 1e9, 2),
        "lean_s": round(chunked_s, 2),
        "plain_s": round(plain_s, 2),
    }


def measure_large(*, quick: bool = False) -> dict[str, float]:
    """Return the resident memory that training a large head adds to a fresh process. [GB]"""
    fresh = multiprocessing.get_context("spawn")
    with fresh.Pool(1) as pool:
        return pool.apply(_large, (quick,))


def _large(quick: bool) -> dict[str, Any]:
    train(in_chunks, *_inputs(Sizes(8, 64, 8)))  # let torch allocate its fixed memory first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    train(in_chunks, *_inputs(QUICK_LARGE if quick else LARGE))
    taken = time.perf_counter() - start
    held = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"large_head_gb": round(held / 1e9, 2), "large_head_s": round(taken, 1)}
