"""BucketReceiver: receives weights inside vLLM. Importing this module registers it as a transfer
engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from ..dataflow.errors import WeightSyncError, nearest
from .buckets import threads_beside
from .incoming import PATIENCE_S, IncomingWeights, receive_parts
from .layout import Box, Layout
from .plan import ReshardPlan
from .vllm_control import TensorSum
from .vllm_writer import WeightWriter, process_tied, record_layout, restore
from .weights import CHECKSUM_MODULUS, RankWeights, Weights, box_sum, whole

BACKEND = "weft"


@dataclass
class _NoInitInfo(WeightTransferInitInfo):
    """Empty: each version's record names its publishers."""


@dataclass
class WeightsUpdateInfo(WeightTransferUpdateInfo):
    """A `Weights` record as plain data, because vLLM passes dictionaries between processes."""

    version: int
    ranks: list[dict[str, Any]]
    receiver: str

    @property
    def weights(self) -> Weights:
        return Weights(self.version, tuple(RankWeights(**rank) for rank in self.ranks), self.receiver)


def to_update_info(weights: Weights) -> dict[str, Any]:
    record = asdict(weights)
    del record["backend"]
    return record


@dataclass(frozen=True)
class _Received:
    """The state of one tensor on a rank after an update. Plain data."""

    published: int
    """`box_sum` over the whole tensor, as computed by its publishers."""
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """Starts, stops and `box_sum` of each box that this rank has written."""


@dataclass(frozen=True)
class Loaded:
    """The last version that a rank has loaded. Plain data."""

    version: int
    checksum: str
    """Checksum of the whole version, from its publishers."""
    received: dict[str, _Received]


class _Staging(NamedTuple):
    incoming: IncomingWeights
    done: Future[Loaded]
    ranks: tuple[RankWeights, ...]
    """The publishers: another trainer may publish another version of the same number."""


def check_received(version: int, ranks: Sequence[dict[str, _Received]]) -> None:
    """Compare the tensors on all ranks of an engine with the published ones. Raises WeightSyncError
    if the boxes of a tensor do not add up to the published tensor."""
    for name in dict.fromkeys(name for held in ranks for name in held):
        sums: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
        published = next(held[name].published for held in ranks if name in held)
        for rank, held in enumerate(ranks):
            for starts, stops, found in held[name].boxes if name in held else ():
                first_rank, first = sums.setdefault((starts, stops), (rank, found))
                if first != found:
                    raise WeightSyncError(
                        f"weights version {version}: {Box(starts, stops)} of tensor {name!r} arrived differently at the ranks "
                        f"{first_rank} and {rank} of vLLM"
                    )
        if sum(found for _, found in sums.values()) % CHECKSUM_MODULUS != published:
            raise WeightSyncError(
                f"weights version {version}: tensor {name!r} did not arrive at vLLM as it was published"
            )


class BucketReceiver(WeightTransferEngine[_NoInitInfo, WeightsUpdateInfo]):
    """Receives a version, and writes this rank's part of it into vLLM's model in place."""

    init_info_cls = _NoInitInfo
    update_info_cls = WeightsUpdateInfo

    loaded: Loaded | None = None
    """Version in the model; None before the first update, and after a failed one."""
    _writer: WeightWriter | None = None
    _source: Layout | None = None
    _plan: ReshardPlan | None = None
    _arriving: Loaded | None = None
    _staging: _Staging | None = None
    _sums: dict[str, dict[Box, int]]

    def init_transfer_engine(self, init_info: _NoInitInfo) -> None:
        """Do nothing: no preparation is needed."""

    def start_weight_update(self) -> None:
        self._arriving = self.loaded = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            # The sender may reuse its memory when this returns.
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: WeightsUpdateInfo) -> None:
        staging, found = self._staging, self._end_staging()
        wanted = (update_info.version, update_info.weights.ranks)
        if staging and found and (found.version, staging.ranks) == wanted:
            assert self._writer is not None
            self._writer.apply_staged()
            self._arriving = found
            return
        with self._open(update_info.weights) as incoming:
            assert self._writer is not None
            self._arriving = self._take(incoming, self._writer.apply)

    def stage(self, weights: Weights) -> None:
        """Start a thread that receives a version, while the model continues to compute."""
        self._end_staging()
        # Opening may record the layout, which swaps tensors that a computing model would read.
        incoming = self._open(weights)
        assert self._writer is not None
        write, done = self._writer.stage, Future[Loaded]()

        def work() -> None:
            try:
                with incoming:
                    done.set_result(self._take(incoming, write))
            except BaseException as error:
                done.set_exception(error)

        self._staging = _Staging(incoming, done, weights.ranks)
        threading.Thread(target=work, name="weft-staging", daemon=True).start()

    def is_staged(self) -> bool:
        """Whether the staged version has arrived. Raises an error if it is damaged or
        incomplete."""
        assert self._staging is not None
        done = self._staging.done
        if done.done() and (error := done.exception()) is not None:
            self._staging = None
            raise error
        return done.done()

    def _end_staging(self) -> Loaded | None:
        """End staging, and return the staged version; None if there is none or it is incomplete."""
        staging, self._staging = self._staging, None
        if staging is None:
            return None
        if not staging.done.done():
            staging.incoming.hang_up()
        return None if staging.done.exception(PATIENCE_S) is not None else staging.done.result()

    def _open(self, weights: Weights) -> IncomingWeights:
        incoming = IncomingWeights(weights, self.parallel_config.rank, self.parallel_config.world_size)
        try:
            # Equal layouts are one object, so a new object means that the trainer cuts differently.
            if self._writer is None or self._source is not incoming.layout:
                checkpoint = {name: (t.shape, t.dtype) for name, t in incoming.layout.tensors.items()}
                recording = record_layout(self.model, checkpoint)
                self._writer = WeightWriter(self.model, self.model_config, recording, self._note)
                self._plan = ReshardPlan(incoming.layout, Layout.of_ranks([recording.layout], "vLLM"))
                self._source = incoming.layout
        except BaseException:
            incoming.close()
            raise
        return incoming

    def _take(
        self, incoming: IncomingWeights, write: Callable[[Iterator[tuple[str, Box, torch.Tensor]]], None]
    ) -> Loaded:
        self._sums = {}
        with threads_beside(incoming.neighbours):
            write(self._slices(incoming))
        received: dict[str, _Received] = {}
        for name, sums in self._sums.items():
            boxes = tuple((box.starts, box.stops, found) for box, found in sums.items())
            received[name] = _Received(incoming.published_sum(name), boxes)
        return Loaded(incoming.version, incoming.confirm(), received)

    def finish_weight_update(self) -> None:
        self.loaded = self._arriving

    def shutdown(self) -> None:
        """Do nothing: no resources are held."""

    def _slices(self, incoming: IncomingWeights) -> Iterator[tuple[str, Box, torch.Tensor]]:
        assert self._plan is not None
        for name, copy, source in incoming.slices(self._plan.received_by(0)):
            wanted = self._plan.destination.tensors[name].dtype
            # A cast changes the bits, so sum the received elements.
            if wanted != incoming.layout.tensors[name].dtype:
                self._add(name, copy.box, box_sum(source, copy.box, incoming.layout.tensors[name].shape))
                source = source.to(dtype=getattr(torch, wanted))
            yield name, copy.box, source
            # It was written in one piece, so it can be compared here.
            if (found := self._sums[name].get(copy.box)) is not None:
                incoming.check(name, copy, found)

    def _note(self, name: str, box: Box, elements: torch.Tensor) -> None:
        assert self._plan is not None and self._source is not None
        tensor = self._source.tensors[name]
        if tensor.dtype == self._plan.destination.tensors[name].dtype:
            self._add(name, box, box_sum(elements, box, tensor.shape))

    def _add(self, name: str, box: Box, found: int) -> None:
        if self._sums.setdefault(name, {}).setdefault(box, found) != found:
            raise WeightSyncError(
                f"{box} of tensor {name!r} arrived differently in two places of one rank of vLLM"
            )


WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)


# Versions that arrive through vLLM's own backends: whole tensors, which the model's loaders cut.


class VllmBackends:
    """Transfer engines of vLLM's own backends in a rank, used in place of Weft's receiver."""

    def __init__(
        self, receiver: WeightTransferEngine[Any, Any], settings: Any, device: torch.device, model: Any
    ) -> None:
        self.receiver = receiver
        self._settings, self._device, self._model = settings, device, model
        self._engines: dict[str, WeightTransferEngine[Any, Any]] = {}
        self._loaded: _LoadedTensors | None = None

    def begin_version(self, backend: str) -> WeightTransferEngine[Any, Any]:
        """Start a version: return vLLM's engine, and record the tensors that the loaders get."""
        if backend not in self._engines:
            config = WeightTransferConfig(backend=backend)
            made = WeightTransferEngineFactory.create_engine(
                config, self._settings, self._device, self._model
            )
            assert made is not None
            self._engines[backend] = made
        self._loaded = _LoadedTensors(self._model)
        return self._engines[backend]

    def end_version(self, whole: bool) -> dict[str, TensorSum]:
        """End a version, complete (`whole`) or not: incomplete layers then keep their previous
        weights. Return the sums of the tensors that the loaders got."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:  # `begin_version` failed on this rank
            assert not whole
            return {}
        del self._model.load_weights  # restore the model's own loader
        if whole:
            process_tied(self._model)  # vLLM's own engines do not do this
        else:
            restore(self._model)
        return loaded.sums


class _LoadedTensors:
    """Sums the tensors that a model's loaders get, until `load_weights` is deleted from the
    model."""

    def __init__(self, model: Any) -> None:
        self.sums: dict[str, TensorSum] = {}
        load = model.load_weights

        def load_and_sum(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            return load(self._summed(weights))

        model.load_weights = load_and_sum

    def _summed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            shape = tuple(tensor.shape)
            if name in self.sums:
                raise WeightSyncError(f"tensor {name!r} came twice")
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.sums[name] = TensorSum(dtype, shape, box_sum(tensor, Box.full(shape), shape))
            yield name, tensor


# Adapters (LoRA) inside vLLM, served from tensors instead of files.
#
# An engine has one slot, and requests name the adapter in it. A new version replaces the adapter
# between two steps, like full weights; unfinished requests continue with it.


_SLOT = 1


def adapter_request() -> LoRARequest:
    return LoRARequest("weft", _SLOT, "received, not read")


def receive_adapter(manager: Any, incoming: IncomingWeights, settings: Mapping[str, Any]) -> str:
    """Receive an adapter with `peft` names, check it, and put it into the slot of vLLM's
    `WorkerLoRAManager`. `settings` are "r" and "lora_alpha". Return its checksum.
    Raises WeightSyncError if a tensor arrived damaged, or vLLM has no layer for it; the slot then
    keeps its adapter."""
    tensors = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in incoming.layout.tensors.items()
    }
    checksum = receive_parts(incoming, list(whole(tensors)))
    slots = manager._adapter_manager
    mapper = getattr(slots.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        _SLOT,
        tensors,
        PEFTHelper(target_modules=[], **settings),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    served = {part for name in slots.modules for part in slots.packed_modules.get(name, [name])}
    if unserved := [name for name in adapter.loras if name not in served]:
        raise WeightSyncError(
            f"weights version {incoming.version}: vLLM's {type(slots.model).__name__} does not support an adapter on layer {unserved[0]!r}"
            f"{nearest(unserved[0], served)}; remove it from Lora(targets=...), or use Lora(published='merged')"
        )
    before = slots.get_adapter(_SLOT)
    try:
        _exchange(slots, adapter)
    except Exception:
        if before is not None:
            _exchange(slots, before)
        raise
    return checksum


def _exchange(slots: Any, adapter: LoRAModel) -> None:
    # vLLM ignores an added adapter whose number it already knows.
    slots.remove_adapter(_SLOT)
    slots.add_adapter(adapter)
    slots.activate_adapter(_SLOT)
