"""The receiving side of a weight update inside vLLM, through its public `WeightTransferEngine` interface.

vLLM imports this module in each of its processes because the engine names `WeightReport` as its worker extension
class; importing it registers the transfer engine, so tensor-parallel children need no plugin.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from ..dataflow.errors import WeightSyncError
from .box import Box
from .checksum import box_sum
from .host_memory import threads_beside
from .incoming import PATIENCE_S, IncomingWeights, open_weights
from .layout import Layout
from .plan import ReshardPlan
from .vllm_adapter import receive_adapter
from .vllm_control import TensorSum
from .vllm_layout import record_layout, restore
from .vllm_routes import RouteRecorder
from .vllm_writer import WeightWriter, process_tied
from .weights import CHECKSUM_MODULUS, RankWeights, Weights

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
            torch.accelerator.synchronize(self.device)  # the memory is the sender's again when this returns

    def receive_weights(self, update_info: WeightsUpdateInfo) -> None:
        staging = self._staging
        found = self._end_staging()
        if staging and found and (found.version, staging.ranks) == (update_info.version, update_info.weights.ranks):
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
        checkpoint = {name: (tensor.shape, tensor.dtype) for name, tensor in incoming.layout.tensors.items()}
        recording = record_layout(self.model, checkpoint)
        self._writer = WeightWriter(self.model, self.model_config, recording, self._note)
        self._plan = ReshardPlan(incoming.layout, Layout.of_ranks([recording.layout], "vLLM"))
        self._source = incoming.layout

    def _slices(self, incoming: IncomingWeights) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """What this rank takes, as it comes."""
        assert self._plan is not None
        for name, copy, source in incoming.slices(self._plan.received_by(0)):
            wanted = self._plan.destination.tensors[name].dtype
            if wanted != incoming.layout.tensors[name].dtype:  # the bits change: what was read is compared
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
            raise WeightSyncError(f"{box} of tensor {name!r} arrived differently in two places of one rank of vLLM")


class LoadedTensors:
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


class WeightReport:
    """vLLM worker extension: what the engine asks of every rank besides vLLM's own calls."""

    weight_transfer_engine: WeightTransferEngine[Any, Any] | None
    vllm_config: Any
    device: torch.device
    model_runner: Any
    parallel_config: Any
    rank: int
    _weight_update_active: bool
    _weft_engines: dict[str, WeightTransferEngine[Any, Any] | None]
    _weft_loaded: LoadedTensors | None = None

    def weft_loaded_weights(self) -> Loaded | None:
        """What this rank has taken in its last finished update; None before the first."""
        engine = self.weight_transfer_engine
        return engine.loaded if isinstance(engine, BucketReceiver) else None

    def weft_receive_adapter(self, update_info: dict[str, Any], settings: dict[str, Any]) -> str:
        """Put a version of an adapter into this rank's slot; returns its checksum."""
        weights = WeightsUpdateInfo(**update_info).weights
        with open_weights(weights, self.rank, self.parallel_config.world_size) as incoming:
            return receive_adapter(self.model_runner.lora_manager, incoming, settings)

    def weft_record_routes(self) -> None:
        """Record the experts of all tokens from now on."""
        self._weft_routes = RouteRecorder(self.model_runner)

    def weft_take_routes(self, requests: list[str]) -> list[np.ndarray | None]:
        """See `RouteRecorder.take`."""
        return self._weft_routes.take(requests)

    def weft_weight_bytes(self) -> int:
        """Of this rank's parameters."""
        return sum(parameter.nbytes for parameter in self.model_runner.model.parameters())

    def weft_stage_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to take a version into memory beside the model."""
        engine = self.weight_transfer_engine
        assert isinstance(engine, BucketReceiver)
        engine.stage(WeightsUpdateInfo(**update_info).weights)

    def weft_is_staged(self) -> bool:
        """Whether it has come."""
        engine = self.weight_transfer_engine
        assert isinstance(engine, BucketReceiver)
        return engine.is_staged()

    def weft_begin_by_vllm(self, backend: str) -> None:
        """A version comes by one of vLLM's own backends: until it has, vLLM's calls are its engine's, which vLLM's factory makes."""
        if not hasattr(self, "_weft_engines"):
            self._weft_engines = {BACKEND: self.weight_transfer_engine}
        model = self.model_runner.get_model()
        if backend not in self._weft_engines:
            config = WeightTransferConfig(backend=backend)
            made = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, model)
            self._weft_engines[backend] = made
        self.weight_transfer_engine = self._weft_engines[backend]
        self._weft_loaded = LoadedTensors(model)

    def weft_end_by_vllm(self, whole: bool) -> dict[str, TensorSum]:
        """It has come, or nothing more comes of it; returns what the model's loaders were given.

        Args:
            whole: it has come. Otherwise layers whose weights have not all come keep those that they had.
        """
        loaded, self._weft_loaded = self._weft_loaded, None
        assert loaded is not None
        loaded.end()
        self.weight_transfer_engine = self._weft_engines[BACKEND]
        model = self.model_runner.get_model()
        if whole:
            process_tied(model)  # which vLLM's own engines do not
        else:
            restore(model)
            self._weight_update_active = False
        return loaded.sums

    def weft_unlink_shared_memory(self) -> None:
        """Take away the names under which ranks on CPU found each other's memory; it stays as long as they use it.

        vLLM leaves the files behind even when it is shut down in order.
        """
        if name := os.environ.get("VLLM_DIST_IDENT"):  # set by vLLM where ranks are processes on CPU
            for file in Path("/dev/shm").glob(f"{glob.escape(name)}-*"):
                file.unlink(missing_ok=True)


WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)
