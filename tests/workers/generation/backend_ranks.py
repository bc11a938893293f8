"""Trainer ranks that send weights by vLLM's transfer backends, on the CPU, for
`test_backends_of_vllm.py`.

nccl   vLLM's classes on both sides, with gloo as the communicator and no CUDA streams
memfd  a backend of this file, registered with both factories of vLLM: rank 0 writes tensors to
       memory that engines map
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import torch

from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.worker import Context

CHUNK_BYTES = 20_000


class BackendConfig(ActorConfig):
    transport: Literal["vllm:nccl", "vllm:memfd"] = "vllm:memfd"  # pyright: ignore[reportIncompatibleVariableOverride]


class Gloo:
    """The part of vLLM's communicator that its backend uses."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self._group: Any = stateless_init_torch_distributed_process_group(
            host, port, rank, world_size, "gloo"
        )

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group.shutdown()


def without_gpus(patch: Any) -> None:
    """Patch both sides of vLLM's nccl backend to work on the CPU, and register memfd.

    Args:
        patch: function of (object, attribute name, new value).
    """
    from vllm.distributed.weight_transfer import nccl_engine

    from weft.resharding import vllm_publisher
    from weft.resharding.vllm_publisher import _VllmBackend

    def end_of_trainer(info: Any) -> Gloo:
        return Gloo(info.master_address, info.master_port, 0, info.world_size)

    def end_of_engine(info: Any, parallel: Any) -> Gloo:
        return Gloo(
            info.master_address, info.master_port, info.rank_offset + parallel.rank, info.world_size
        )

    def nccl(*terms: Any) -> Any:
        info: Any = vllm_publisher._nccl(*terms)
        info.packed = False  # packing needs CUDA streams
        return info

    patch(nccl_engine, "open_trainer_endpoint", end_of_trainer)
    patch(nccl_engine, "worker_init_process_group", end_of_engine)
    patch(torch.cuda, "current_stream", lambda *_: None)
    patch(torch.accelerator, "synchronize", lambda *_: None)
    backends = {
        "nccl": _VllmBackend(nccl, together=True, on_gpus=False),
        "memfd": _VllmBackend(
            lambda rank, *terms: _memfd()[0](rank=rank), together=False, on_gpus=False
        ),
    }
    patch(vllm_publisher, "BACKENDS", backends)
    _memfd()


def _memfd() -> tuple[Any, ...]:
    """Register the backend once, and return its classes."""
    global _made
    if _made:
        return _made
    from vllm.distributed.weight_transfer.base import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class TrainerInfo(TrainerInitInfo):
        backend: ClassVar[str] = "memfd"

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        path: str

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]

    class Trainer(TrainerWeightTransferEngine[TrainerInfo]):
        init_info_cls = TrainerInfo
        file: int

        @classmethod
        def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> Self:
            found = cls(client=client, source=source, is_sender=init_info.is_sender)
            if found.is_sender:
                found.file = os.memfd_create("weights")
                client.init_weight_transfer_engine(
                    asdict(InitInfo(f"/proc/{os.getpid()}/fd/{found.file}"))
                )
            return found

        def send_weights(self) -> None:
            if self.is_sender:
                self.client.start_weight_update()
            for chunk in self._chunks():
                if self.is_sender:
                    content = b"".join(
                        bytes(t.contiguous().view(-1).view(torch.uint8).numpy()) for _, t in chunk
                    )
                    os.pwrite(self.file, content, 0)
                    tensors = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in chunk]
                    self.client.update_weights(asdict(UpdateInfo(tensors)))
            if self.is_sender:
                self.client.finish_weight_update()

        def _chunks(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
            chunk: list[tuple[str, torch.Tensor]] = []
            for pair in self.source or ():
                chunk.append(pair)
                if sum(tensor.nbytes for _, tensor in chunk) > CHUNK_BYTES:
                    yield chunk
                    chunk = []
            if chunk:
                yield chunk

    class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.file = os.open(init_info.path, os.O_RDONLY)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            end, weights = 0, []
            memory: Any = mmap.mmap(self.file, os.fstat(self.file).st_size, flags=mmap.MAP_PRIVATE)
            for name, dtype, shape in update_info.tensors:
                found = torch.frombuffer(
                    memory, dtype=dtype, count=torch.Size(shape).numel(), offset=end
                ).view(shape)
                weights.append((name, found.clone()))
                end += found.nbytes
            self.model.load_weights(weights)  # pyright: ignore[reportCallIssue]

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """The process closes the file on exit."""

    WeightTransferTrainerFactory.register_engine("memfd", Trainer)
    WeightTransferEngineFactory.register_engine("memfd", Engine)
    _made = (TrainerInfo, Trainer, Engine)
    return _made


_made: tuple[Any, ...] = ()
_wrong: set[str] = set()


def _with_wrong_sums() -> None:
    """Make the trainer announce wrong checksums for tensors in `_wrong`."""
    from weft.resharding.vllm_publisher import _GatheredTensors

    complete = _GatheredTensors.complete_sums

    def told(self: Any) -> Any:
        found = complete(self)
        while _wrong:
            name = _wrong.pop()
            found[name] = found[name]._replace(box_sum=found[name].box_sum ^ 1)
        return found

    cast(Any, _GatheredTensors).complete_sums = told


def train(pipe: Pipe, folder: Path, meeting: Any, rank: int, ranks: int, gpu: int | None = None) -> None:
    """Run a trainer rank that obeys messages: method names with arguments, or one of these words.

    use      the backend to use from here on
    change   multiply all weights by a factor
    full     return all weights, gathered
    wrong    announce a wrong checksum of this tensor in the next version
    """
    torch.set_num_threads(1)
    if gpu is None:
        without_gpus(setattr)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    _with_wrong_sums()
    context = Context("actor", rank, ranks, meeting if ranks > 1 else None)
    worker = ActorWorker(BackendConfig(model=folder), context)
    while (asked := pipe.recv()) is not None:
        method, *arguments = asked
        try:
            found: Any = None
            if method == "use":
                if worker._publisher is not None:
                    worker._publisher.close()
                worker._publisher = None
                worker.config = worker.config.model_copy(update={"transport": f"vllm:{arguments[0]}"})
            elif method == "change":
                for part in worker.engine.published_parts():
                    part.tensor.mul_(arguments[0])
            elif method == "wrong":
                _wrong.add(arguments[0])
            elif method == "full":
                found = {
                    name: tensor.clone().cpu().numpy() for name, tensor in worker.engine.named_tensors()
                }
            else:
                found = getattr(worker, method)(*arguments)
            pipe.send(found)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    worker.close()
