"""VllmPublisher: the sending side of `vllm.distributed.weight_transfer`.

    publish ──> send, on all ranks, while the engines receive ──> finish

All trainer ranks iterate together over vLLM's `WeightSource`, which yields one whole tensor at a
time. So every rank assembles each tensor from all parts. Rank 0 drives the engines
(`vllm_control.py`).

The engines sum the tensors that their loaders get, and compare these sums with the trainer's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from ..dataflow.errors import WeightSyncError
from .buckets import BUCKET_BYTES, read_sums, start_sum
from .connection import listen
from .mapped_memory import release_device_memory
from .vllm_control import Receivers, TensorSum, checksum_of_tensors
from .weights import BY_VLLM, CHECKSUM_MODULUS, LOOPBACK, Box, TensorPart, Weights


@dataclass(frozen=True)
class _VllmBackend:
    init_info: Callable[[int, str, int, int], TrainerInitInfo]
    """Makes the backend's parameters from the trainer's rank, the address of rank 0, the total
    number of engine ranks, and the buffer size in bytes (at least the largest tensor's)."""
    together: bool
    """Whether all engines take part in one collective."""
    on_gpus: bool = True


def _nccl(rank: int, host: str, num_ranks: int, buffer_bytes: int) -> TrainerInitInfo:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    port = 0
    if rank == 0:
        # vLLM opens the port itself, so find a free one and release it.
        with listen(host) as taken:
            port = taken.getsockname()[1]
    return NCCLTrainerInitInfo(
        host, port, 1 + num_ranks, packed_buffer_size_bytes=buffer_bytes, rank=rank
    )


def _ipc(rank: int, host: str, num_ranks: int, buffer_bytes: int) -> TrainerInitInfo:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=buffer_bytes, rank=rank)


BACKENDS = {"nccl": _VllmBackend(_nccl, together=True), "ipc": _VllmBackend(_ipc, together=False)}
"""Keyed by vLLM's names."""

_NOBODY, _AS_BEFORE, _ANEW = range(3)


class VllmPublisher:
    """Publishes versions through a vLLM backend (a key of BACKENDS). All ranks of the trainer,
    which are the default group of `torch.distributed`, call each method together. `host` is the
    address of rank 0 for engines on other machines; empty if there are none. Calls `advance` after
    each tensor. Raises WeightSyncError if torch finds no GPU for the backend, or if this machine
    lacks that address.

    Extra memory on each rank: the current tensor, and two vLLM buffers of `bucket_bytes` or the
    size of the largest tensor.
    """

    def __init__(
        self,
        backend: str,
        rank: int = 0,
        ranks: int = 1,
        host: str = "",
        bucket_bytes: int = BUCKET_BYTES,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = backend
        self._backend = BACKENDS[backend]
        if self._backend.on_gpus and not torch.cuda.is_available():
            raise WeightSyncError(
                f'transport="{BY_VLLM}{backend}" moves weights from GPU to GPU, and torch finds none; use "auto"'
            )
        device = torch.device("cpu")
        if self._backend.on_gpus:
            device = torch.device("cuda", torch.cuda.current_device())
        self._rank = rank
        self._ranks = ranks
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._source = _GatheredTensors(ranks, device, advance)
        self._receivers = Receivers(host, together=self._backend.together) if rank == 0 else None
        self._trainer: TrainerWeightTransferEngine[Any] | None = None
        self._engines: list[str] = []
        self._expected: Sequence[str] = ()
        self._was_sent = False
        self.num_bytes = 0

    def publish(
        self, parts: Iterable[TensorPart], version: int, receivers: Sequence[str] = ()
    ) -> Weights:
        """Offer the parts of all ranks, which together hold each element once, to these engines.
        Return the record for receivers, which the driver adds up over the ranks. Do not change the
        parts before `finish`. Raises WeightSyncError if the ranks do not hold each element exactly
        once."""
        self._source.set_parts(list(parts), version)
        self.num_bytes = self._source.own_bytes
        self._expected, self._was_sent = receivers, False
        places = (self._receivers.endpoint,) if self._receivers is not None else ()
        return Weights(version, places, backend=self._name)

    def send(self, version: int) -> None:
        """Send the published version, and return once all engines have it. Raises WeightSyncError
        if the transfer failed. One engine's failure fails a collective backend."""
        try:
            if not self._meet(version):
                return
            assert self._trainer is not None
            self._trainer.send_weights()
            # The engines continue once they have the sums, and may need the memory. All ranks add up
            # their sums, so rank 0 sends them after every rank has released its memory.
            release_device_memory(self._device)
            tensors = self._source.complete_sums()
            if self._receivers is not None:
                self._receivers.send_sums(tensors)
            self._was_sent = True
        except BaseException as error:
            self._trainer = None
            if self._receivers is not None:
                self._receivers.dismiss(f"the trainer has given up: {error}")
            if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
                raise
            raise WeightSyncError(
                f"weights version {version} could not be sent by vLLM's {self._name}: {type(error).__name__}: {error}"
            ) from error

    def finish(self) -> str | None:
        """End the transfer, so that the weights may change. Return the checksum of this rank's
        parts (checksums of ranks add up), or None if the version was not sent."""
        if self._receivers is not None:
            self._receivers.dismiss("the trainer has ended the transfer")
        self._source.drop()
        return checksum_of_tensors(self._source.own_sums()) if self._was_sent else None

    @property
    def lost(self) -> dict[str, str]:
        """Maps each receiver that did not get the complete last version to the reason."""
        return {} if self._receivers is None else dict(self._receivers.lost)

    def close(self) -> None:
        if self._receivers is not None:
            self._receivers.close()
        self._end_trainer()

    def _meet(self, version: int) -> bool:
        """Wait for the engines; if they changed, create a trainer. Return False without engines."""
        said = torch.tensor([_NOBODY, 0])
        if self._receivers is not None:
            engines = self._receivers.gather(version, self._expected, self._source.whole_bytes)
            anew = self._trainer is None or engines != self._engines
            self._engines = engines
            what = (_ANEW if anew else _AS_BEFORE) if engines else _NOBODY
            said = torch.tensor([what, self._receivers.num_ranks])
        if self._ranks > 1:
            # Only rank 0 knows the engines, and all ranks must decide alike.
            dist.broadcast(said, 0)
        what, num_ranks = said.tolist()
        if what == _ANEW:
            self._end_trainer()
            buffer_bytes = max(self._bucket_bytes, self._source.largest_bytes)
            info = self._backend.init_info(self._rank, self._host or LOOPBACK, num_ranks, buffer_bytes)
            # vLLM calls the client only on ranks that drive engines.
            client: Any = self._receivers or object()
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                info, client=client, source=self._source
            )
        return what != _NOBODY

    def _end_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()
            self._trainer = None


class _GatheredTensors(WeightSource):
    """The tensors of a version. Iteration assembles each one on `device` of every rank."""

    def __init__(self, ranks: int, device: torch.device, advance: Callable[[], None]) -> None:
        self._ranks = ranks
        self._device = device
        self._advance = advance
        self._own: dict[str, list[TensorPart]] = {}
        self._forms: list[tuple[str, str, tuple[int, ...], int]] = []
        """For each tensor: name, dtype, shape, and the number of elements on this rank."""
        self._metadata: list[ParamMeta] = []
        self._sums: dict[str, int] = {}

    def set_parts(self, parts: Sequence[TensorPart], version: int) -> None:
        """Set the next version. Exactly one rank must hold each element of each tensor."""
        own: defaultdict[str, list[TensorPart]] = defaultdict(list)
        for part in parts:
            own[part.name].append(part)
        self._own, self._sums = dict(own), {}
        forms: list[tuple[str, str, tuple[int, ...], int]] = []
        for name, of in own.items():
            dtype = str(of[0].dtype or of[0].tensor.dtype).removeprefix("torch.")
            forms.append((name, dtype, tuple(of[0].shape), sum(part.box.numel for part in of)))
        changed = torch.tensor([forms != self._forms])
        if self._ranks > 1:
            changed = changed.int()
            # Exchanging forms is a collective, so if any rank's forms changed, all ranks take part.
            dist.all_reduce(changed)
        if changed.item():
            self._metadata = _agreed(self._told(forms), version)
            self._forms = forms

    @property
    def own_bytes(self) -> int:
        return sum(elements * getattr(torch, dtype).itemsize for _, dtype, _, elements in self._forms)

    @property
    def whole_bytes(self) -> int:
        return sum(map(_num_bytes, self._metadata))

    @property
    def largest_bytes(self) -> int:
        return max(map(_num_bytes, self._metadata), default=0)

    def metadata(self) -> list[ParamMeta]:
        return self._metadata

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._sums = {}
        for tensor in self._metadata:
            full = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
            found: list[int | torch.Tensor] = []
            for part in self._own.get(tensor.name, ()):
                target = full[part.box.slices]
                target.copy_(part.tensor.detach())  # casts to the dtype of the transfer
                found.append(start_sum(target, part.box, tensor.shape))
            self._sums[tensor.name] = sum(read_sums(found)) % CHECKSUM_MODULUS
            if self._ranks > 1 and full.numel():
                # At most one rank has a nonzero value at each byte, so the sum is the whole tensor.
                dist.all_reduce(full.view(-1).view(torch.uint8))
            self._advance()
            yield tensor.name, full

    def own_sums(self) -> dict[str, TensorSum]:
        return self._with_forms(self._sums)

    def complete_sums(self) -> dict[str, TensorSum]:
        sums = np.array([self._sums[tensor.name] for tensor in self._metadata], np.uint64).view(np.int64)
        if self._ranks > 1:
            dist.all_reduce(torch.from_numpy(sums))
        names = (tensor.name for tensor in self._metadata)
        return self._with_forms(dict(zip(names, sums.view(np.uint64).tolist(), strict=True)))

    def drop(self) -> None:
        self._own = {}

    def _with_forms(self, sums: dict[str, int]) -> dict[str, TensorSum]:
        tensors = (tensor for tensor in self._metadata if tensor.name in sums)
        return {
            t.name: TensorSum(str(t.dtype).removeprefix("torch."), t.shape, sums[t.name])
            for t in tensors
        }

    def _told(self, forms: list[tuple[str, str, tuple[int, ...], int]]) -> list[list[Any]]:
        own = torch.frombuffer(bytearray(json.dumps(forms).encode()), dtype=torch.uint8)
        if self._ranks == 1:
            return [json.loads(bytes(own.numpy()))]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks)]
        dist.all_gather(lengths, torch.tensor([len(own)]))
        # `all_gather` needs tensors of equal length.
        longest = max(int(length) for length in lengths)
        said = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._ranks)]
        dist.all_gather(said, torch.cat([own, torch.zeros(longest - len(own), dtype=torch.uint8)]))
        return [
            json.loads(bytes(one[: int(length)].numpy()))
            for one, length in zip(said, lengths, strict=True)
        ]


def _agreed(told: Iterable[Iterable[Any]], version: int) -> list[ParamMeta]:
    """Return the tensors that the ranks together hold, in order of first appearance."""
    found: dict[str, ParamMeta] = {}
    elements: defaultdict[str, int] = defaultdict(int)
    for name, dtype, shape, of_rank in (form for forms in told for form in forms):
        meta = ParamMeta(name, getattr(torch, dtype), tuple(shape))
        if found.setdefault(name, meta) != meta:
            raise WeightSyncError(
                f"weights version {version}: tensor {name!r} is {meta} on one rank, and {found[name]} on another"
            )
        elements[name] += of_rank
    for meta in found.values():
        if elements[meta.name] != (whole := Box.full(meta.shape).numel):
            raise WeightSyncError(
                f"weights version {version}: the ranks publish {elements[meta.name]} elements of tensor {meta.name!r}, which has {whole}"
            )
    return list(found.values())


def _num_bytes(tensor: ParamMeta) -> int:
    return Box.full(tensor.shape).numel * tensor.dtype.itemsize
