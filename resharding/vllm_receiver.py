"""The receiving side of a weight update inside vLLM, through its public `WeightTransferEngine` interface.

Importing this module registers the transfer engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

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
from .incoming import PATIENCE_S, IncomingWeights, open_weights, receive_parts
from .layout import Box, Layout
from .memory import threads_beside
from .plan import ReshardPlan
from .vllm_control import TensorSum
from .vllm_layout import record_layout, restore
from .vllm_writer import WeightWriter, process_tied
from .weights import CHECKSUM_MODULUS, RankWeights, Weights, box_sum, whole

BACKEND = "weft"
"""Name of the transfer engine in vLLM's factory."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Each version says where it is given away."""


@dataclass
class WeightsUpdateInfo(WeightTransferUpdateInfo):
    """The fields of a `Weights` record as plain data: vLLM carries dictionaries between its processes."""

    version: int
    ranks: list[dict[str, Any]]
    receiver: str

    @property
    def weights(self) -> Weights:
        """The record that it came from."""
        return Weights(self.version, tuple(RankWeights(**rank) for rank in self.ranks), self.receiver)


def to_update_info(weights: Weights) -> dict[str, Any]:
    """The record as the dictionary that vLLM's `update_weights` takes."""
    record = asdict(weights)
    del record["backend"]
    return record


@dataclass(frozen=True)
class Received:
    """What a rank holds after an update, of one tensor. Plain data."""

    published: int
    """`box_sum` over the whole tensor, as its publishers computed it."""
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """Starts, stops and `box_sum` of each box that this rank has written."""


@dataclass(frozen=True)
class Loaded:
    """The last version that a rank has taken. Plain data."""

    version: int
    checksum: str
    """Of the whole version, as its publishers say."""
    received: dict[str, Received]
    """What arrived of each tensor."""


@dataclass(frozen=True)
class _Staging:
    """A version that a thread takes into memory beside the model."""

    incoming: IncomingWeights
    done: Future[Loaded]
    ranks: tuple[RankWeights, ...]
    """Who gives it: another trainer may give another version of the same number."""


def check_received(version: int, ranks: Sequence[dict[str, Received]]) -> None:
    """Compare what all ranks of an engine hold with what was published. Together they hold each tensor that any of them holds.

    Args:
        version: of the weights.
        ranks: by rank, what it holds of each tensor.

    Raises:
        WeightSyncError: the boxes of a tensor do not add up to what was published; the message names tensor and ranks.
    """
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


class BucketReceiver(WeightTransferEngine[NoInitInfo, WeightsUpdateInfo]):
    """Takes a version as it comes, and writes this rank's part of it into vLLM's model in place."""

    init_info_cls = NoInitInfo
    update_info_cls = WeightsUpdateInfo

    loaded: Loaded | None = None
    """What is in the model; None before the first update, and where one failed."""
    _writer: WeightWriter | None = None
    _source: Layout | None = None
    _plan: ReshardPlan | None = None
    _arriving: Loaded | None = None
    _staging: _Staging | None = None
    _sums: dict[str, dict[Box, int]]

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        self._arriving = self.loaded = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(
                self.device
            )  # the memory is the sender's again when this returns

    def receive_weights(self, update_info: WeightsUpdateInfo) -> None:
        staging = self._staging
        found = self._end_staging()
        if (
            staging
            and found
            and (found.version, staging.ranks) == (update_info.version, update_info.weights.ranks)
        ):
            assert self._writer is not None
            self._writer.apply_staged()
            self._arriving = found
            return
        with self._open(update_info.weights) as incoming:
            assert self._writer is not None
            self._arriving = self._take(incoming, self._writer.apply)

    def stage(self, weights: Weights) -> None:
        """Begin to take a version into memory beside the model, on a thread of its own, while the model goes on computing."""
        self._end_staging()
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
        """Whether the version that is being staged has come.

        Raises:
            WeightSyncError: it did not arrive as it was published.
        """
        assert self._staging is not None
        done = self._staging.done
        if done.done() and (error := done.exception()) is not None:
            self._staging = None
            raise error
        return done.done()

    def _end_staging(self) -> Loaded | None:
        """What has been staged; None: nothing has, or not all of it, and it is given up, since other ranks of the engine have failed."""
        staging, self._staging = self._staging, None
        if staging is None:
            return None
        if not staging.done.done():
            staging.incoming.hang_up()
        return None if staging.done.exception(PATIENCE_S) is not None else staging.done.result()

    def _open(self, weights: Weights) -> IncomingWeights:
        """Connect to those who give a version away, and plan what this rank takes of it."""
        incoming = open_weights(weights, self.parallel_config.rank, self.parallel_config.world_size)
        try:
            if self._writer is None or self._source is not incoming.layout:
                self._prepare(incoming)
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
        received: dict[str, Received] = {}
        for name, sums in self._sums.items():
            boxes = tuple((box.starts, box.stops, found) for box, found in sums.items())
            received[name] = Received(incoming.published_sum(name), boxes)
        return Loaded(incoming.version, incoming.finish(), received)

    def finish_weight_update(self) -> None:
        self.loaded = self._arriving

    def shutdown(self) -> None:
        """Nothing is held."""

    def _prepare(self, incoming: IncomingWeights) -> None:
        """Record what this rank takes of these tensors, and plan which rank gives it."""
        checkpoint = {
            name: (tensor.shape, tensor.dtype) for name, tensor in incoming.layout.tensors.items()
        }
        recording = record_layout(self.model, checkpoint)
        self._writer = WeightWriter(self.model, self.model_config, recording, self._note)
        self._plan = ReshardPlan(incoming.layout, Layout.of_ranks([recording.layout], "vLLM"))
        self._source = incoming.layout

    def _slices(self, incoming: IncomingWeights) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """What this rank takes, as it comes."""
        assert self._plan is not None
        for name, copy, source in incoming.slices(self._plan.received_by(0)):
            wanted = self._plan.destination.tensors[name].dtype
            if (
                wanted != incoming.layout.tensors[name].dtype
            ):  # the bits change: what was read is compared
                self._add(name, copy.box, box_sum(source, copy.box, incoming.layout.tensors[name].shape))
                source = source.to(dtype=getattr(torch, wanted))
            yield name, copy.box, source
            if (found := self._sums[name].get(copy.box)) is not None:  # it was written in one piece
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


# Vllm backends
#
# Versions that come to a rank of vLLM by one of vLLM's own backends: whole tensors, which its
# model's loaders cut by themselves.


class VllmBackends:
    """The transfer engines of vLLM's own backends in a rank. While a version comes by one of them, it stands where Weft's receiver does.

    Args:
        receiver: Weft's.
        settings: vLLM's, of the rank.
        device: of the rank.
        model: of the rank.
    """

    def __init__(
        self, receiver: WeightTransferEngine[Any, Any], settings: Any, device: torch.device, model: Any
    ) -> None:
        self.receiver = receiver
        self._settings, self._device, self._model = settings, device, model
        self._engines: dict[str, WeightTransferEngine[Any, Any]] = {}
        self._loaded: _LoadedTensors | None = None

    def begin(self, backend: str) -> WeightTransferEngine[Any, Any]:
        """A version comes by a backend: note what the model's loaders are given; returns the engine, which vLLM's factory makes."""
        if backend not in self._engines:
            config = WeightTransferConfig(backend=backend)
            made = WeightTransferEngineFactory.create_engine(
                config, self._settings, self._device, self._model
            )
            assert made is not None
            self._engines[backend] = made
        self._loaded = _LoadedTensors(self._model)
        return self._engines[backend]

    def end(self, whole: bool) -> dict[str, TensorSum]:
        """It has come, or nothing more comes of it; returns what the loaders were given.

        Args:
            whole: it has come. Otherwise layers whose weights have not all come keep those that they had.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is None:  # this rank could not begin
            assert not whole
            return {}
        loaded.end()
        if whole:
            process_tied(self._model)  # which vLLM's own engines do not
        else:
            restore(self._model)
        return loaded.sums


class _LoadedTensors:
    """Sums of what a model's loaders are given, tensor by tensor, from here on until `end`.

    Args:
        model: of vLLM.
    """

    def __init__(self, model: Any) -> None:
        self.sums: dict[str, TensorSum] = {}
        self._model = model
        load = model.load_weights

        def load_and_sum(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            return load(self._summed(weights))

        model.load_weights = load_and_sum

    def end(self) -> None:
        """Give the model its own loaders back."""
        del self._model.load_weights

    def _summed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            shape = tuple(tensor.shape)
            if name in self.sums:
                raise WeightSyncError(f"tensor {name!r} came twice")
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.sums[name] = TensorSum(dtype, shape, box_sum(tensor, Box.full(shape), shape))
            yield name, tensor


# Vllm adapter
#
# Adapters (LoRA) inside vLLM: a published version of an adapter, served from tensors, without
# files.
#
# An engine has one slot, and requests name the one adapter in it. A version takes the place of the
# one before between two steps, as complete weights do: unfinished requests go on under it.


_SLOT = 1
"""vLLM's number of the adapter."""


def adapter_request() -> LoRARequest:
    """What a request says so that the adapter is added to its weights."""
    return LoRARequest("weft", _SLOT, "received, not read")


def receive_adapter(manager: Any, incoming: IncomingWeights, settings: Mapping[str, Any]) -> str:
    """Take a version of an adapter, check it, and put it into vLLM's slot; returns its checksum. vLLM cuts it for this rank by itself.

    Args:
        manager: vLLM's `WorkerLoRAManager`.
        incoming: the version, in the names of `peft`.
        settings: "r", "lora_alpha" and "use_rslora", as `peft` has them.

    Raises:
        WeightSyncError: something did not arrive as it was published, or vLLM has no layer for it. The slot keeps what it had.
    """
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
            f"weights version {incoming.version}: vLLM's {type(slots.model).__name__} serves no adapter of layer {unserved[0]!r}"
            f"{nearest(unserved[0], served)}; Lora(targets=...) without it, or Lora(published='merged'), needs none"
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
    slots.remove_adapter(_SLOT)
    slots.add_adapter(adapter)
    slots.activate_adapter(_SLOT)
