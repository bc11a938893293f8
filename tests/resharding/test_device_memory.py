"""Weights from GPU to GPU. These tests have not run yet, for lack of GPUs.

`test_transfer.py` tests the same path with host memory, except for the CUDA and NCCL calls.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from device_ranks import take

from weft.resharding.bucket_group import Transport
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import LOOPBACK, whole

SHAPES = {"embed": (300, 70), "norm": (7,)}


@pytest.mark.gpu
@pytest.mark.parametrize(("transport", "device"), [("ipc", 0), ("nccl", 1)])
def test_version_after_version_arrives_from_gpu_to_gpu(transport: Transport, device: int) -> None:
    if torch.cuda.device_count() <= device:
        pytest.skip(
            f"this machine has {torch.cuda.device_count()} GPUs, and {transport} needs {device + 1}"
        )
    processes: Any = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    receiver = processes.Process(target=take, args=(there, device, SHAPES))
    receiver.start()
    publisher = WeightPublisher(LOOPBACK, 4096, transport=transport)
    try:
        for version in (1, 2, 3):
            given = {name: torch.randn(shape, device="cuda:0") for name, shape in SHAPES.items()}
            here.send(publisher.publish(whole(given), version))
            assert here.poll(120), "the receiver answers"
            checksum, found = here.recv()
            assert publisher.finish() == checksum
            assert all(
                np.array_equal(found[name], tensor.cpu().numpy()) for name, tensor in given.items()
            )
        here.send(None)
        receiver.join(60)
    finally:
        publisher.close()
        receiver.kill()
        receiver.join()
