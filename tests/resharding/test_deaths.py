"""One side of a transfer is killed at each bucket boundary; the other reports it at once, with name
and place."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from dying import BUCKET_BYTES, tensors

from weft.dataflow.errors import WeightSyncError
from weft.resharding.incoming import IncomingWeights, receive_parts
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import RankWeights, Weights, whole

PROGRAM = str(Path(__file__).with_name("dying.py"))
BUCKETS = 4


def received(weights: Weights) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    with IncomingWeights(weights) as incoming:
        assert len(incoming._sources[0].parts.buckets) == BUCKETS
        receive_parts(incoming, list(whole(found)))
    return found


def end(program: subprocess.Popen[str]) -> None:
    """Kill a program and its children, which would otherwise run forever after a failed test."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def test_a_killed_publisher_is_named_with_the_received_buckets():
    # Two buckets have memory, so the publisher may die while the receiver reads the previous
    # bucket.
    before = [str(number) for number in range(BUCKETS)]
    arguments = [sys.executable, PROGRAM, "publish", *before]
    with (
        subprocess.Popen(
            arguments, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as program,
        contextlib.ExitStack() as ending,
    ):
        ending.callback(end, program)
        assert program.stdout is not None
        records = [json.loads(program.stdout.readline()) for _ in before]
        for record in records:
            weights = Weights(
                record["version"], tuple(RankWeights(**rank) for rank in record["ranks"]), "rollout[0]"
            )
            started = time.monotonic()
            named = rf"version 3, rank 0 of the trainer at 127.0.0.1:\d+: the publisher is gone .*(before the first|of {BUCKETS}) bucket"
            with pytest.raises(WeightSyncError, match=named):
                received(weights)
            assert time.monotonic() - started < 30, "long before anybody's deadline"


@pytest.mark.thorough
def test_receivers_that_are_killed_are_named_and_the_others_get_everything():
    publisher = WeightPublisher(bucket_bytes=BUCKET_BYTES)
    names = [f"mortal[{after}]" for after in range(BUCKETS)]
    weights = publisher.publish(whole(tensors()), 3, ["other", *names])
    program = [sys.executable, PROGRAM, "receive"]
    mortals = [
        subprocess.Popen([*program, str(n)], stdin=subprocess.PIPE, text=True) for n in range(BUCKETS)
    ]
    for mortal in mortals:
        assert mortal.stdin is not None
        mortal.stdin.write(json.dumps(dataclasses.asdict(weights)) + "\n")
        mortal.stdin.close()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(lambda: received(weights.to("other")))
        assert all(mortal.wait(60) for mortal in mortals)
        assert all(torch.equal(found, tensors()[name]) for name, found in other.result(60).items())
    deadline = time.monotonic() + 30
    while len(publisher.lost) < BUCKETS and time.monotonic() < deadline:
        time.sleep(0.01)
    for after, name in enumerate(names):
        assert (
            f"{name} is gone" in publisher.lost[name]
            and f"after {after} of {BUCKETS} buckets" in publisher.lost[name]
        )
    again = received(weights.to("mortal[1]"))  # its replacement
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors().items())
    assert publisher.finish() is not None
    publisher.close()
