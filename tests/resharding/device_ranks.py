"""A process that receives weights on a GPU, for `test_device_memory.py`."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe

import torch

from weft.dataflow.errors import WeightSyncError
from weft.resharding.incoming import IncomingWeights, receive_parts
from weft.resharding.weights import whole


def take(pipe: Pipe, device: int, shapes: dict[str, tuple[int, ...]]) -> None:
    """Answer each record with the checksum and the received tensors, until None arrives."""
    torch.cuda.set_device(device)
    while (weights := pipe.recv()) is not None:
        found = {name: torch.zeros(shape, device="cuda") for name, shape in shapes.items()}
        try:
            with IncomingWeights(weights) as incoming:
                checksum = receive_parts(incoming, list(whole(found)))
            pipe.send((checksum, {name: tensor.cpu().numpy() for name, tensor in found.items()}))
        except WeightSyncError as error:
            pipe.send(str(error))
