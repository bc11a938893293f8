"""Deltas over TCP, with one machine as two: bytes and seconds of a full version and a delta."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft.resharding import sources
from weft.resharding.incoming import IncomingWeights, receive_parts
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import LOOPBACK, whole

Tensors = dict[str, torch.Tensor]
SHARES = (0.001, 0.01, 0.05, 0.5)
"""Shares of published elements that a step changes."""


@contextmanager
def another_machine() -> Iterator[None]:
    """Make receivers believe that the publisher is on another machine, so that they use TCP."""
    before = sources.this_machine
    sources.this_machine = lambda: "another machine"
    try:
        yield
    finally:
        sources.this_machine = before


def step(model: Tensors, share: float) -> None:
    """Change this share of the elements in place, at random."""
    for tensor in model.values():
        bits = tensor.view(torch.int16)
        bits ^= (torch.rand(tensor.shape) < share).to(torch.int16)


def transfer(
    publisher: WeightPublisher, model: Tensors, found: Tensors, version: int, receiver: str
) -> float:
    """Return the seconds to receive one version into plain tensors, with checksum."""
    start = time.perf_counter()
    with IncomingWeights(publisher.publish(whole(model), version, [receiver]).to(receiver)) as came:
        receive_parts(came, list(whole(found)))
    publisher.finish()
    return time.perf_counter() - start


def measure(rounds: int, *, small: bool) -> dict[str, object]:
    """Print seconds, and return `delta_bytes_share` for a change of one element in a hundred."""
    torch.manual_seed(0)
    rows = 256 if small else 4096
    model = {f"{n}.weight": torch.randn(rows, 1024).bfloat16() for n in range(8)}
    found = {name: torch.empty_like(tensor) for name, tensor in model.items()}
    ways = {name: WeightPublisher(LOOPBACK, deltas=name == "delta") for name in ("delta", "whole")}
    seconds: dict[tuple[float, str], list[float]] = {
        (share, name): [] for share in SHARES for name in ways
    }
    shares: dict[float, float] = {}
    version = 0
    with another_machine():
        for share in SHARES:
            for number in range(rounds + 1):  # the first version has no predecessor
                step(model, share)
                version += 1
                for name, publisher in ways.items():
                    took = transfer(publisher, model, found, version, f"{name}[0]")
                    assert all(torch.equal(found[n], tensor) for n, tensor in model.items())
                    seconds[share, name] += [took] if number else []
                sent = ways["delta"].sent
                shares[share] = sent.num_bytes / sent.whole_bytes
    for publisher in ways.values():
        publisher.close()
    medians = {key: statistics.median(taken) for key, taken in seconds.items()}
    megabytes = sum(tensor.nbytes for tensor in model.values()) / 1e6
    print(f"{megabytes:.0f} MB of bfloat16 over TCP on one machine; medians of {rounds}")
    for share in SHARES:
        times = f"{medians[share, 'delta']:.3f} s as a delta, {medians[share, 'whole']:.3f} s whole"
        print(f"{share:>7.1%} changed: {shares[share]:>7.2%} of the bytes, {times}")
    return {"delta_bytes_share": round(shares[0.01], 4)}
