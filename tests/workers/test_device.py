"""Each rank uses its assigned device."""

import pytest

from weft.dataflow.errors import UserError
from weft.workers.worker import Context, device_index, rank_device


def test_a_rank_that_sees_its_own_devices_alone_takes_the_first():
    assert [
        device_index(Context(local_rank=r, devices=(f"{2 * r}", f"{2 * r + 1}")), 2) for r in range(4)
    ] == [0] * 4


def test_a_rank_that_sees_the_gpus_of_its_node_takes_that_of_its_local_rank():
    assert [
        device_index(Context(rank=8 + r, local_rank=r, node_rank=1, nodes=2), 8) for r in range(8)
    ] == [*range(8)]


def test_two_ranks_never_share_a_gpu_by_accident():
    with pytest.raises(
        UserError,
        match="rank 5 of 'actor' is number 2 of its group on its node, counted from 0, but sees only 2",
    ):
        device_index(Context("actor", rank=5, local_rank=2), 2)


def test_without_gpus_a_rank_computes_on_cpus(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_device(Context(local_rank=7)).type == "cpu"


def test_a_rank_with_gpus_refuses_to_compute_on_cpus(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UserError, match=r"rank 1 of 'actor' has GPUs 2, 3, but torch cannot use CUDA: .*torch"
    ):
        rank_device(Context("actor", rank=1, world_size=2, devices=("2", "3")))
