"""Weft inside vLLM's worker processes: receives weights and adapters, and records tokens' experts and
kept sets.

vLLM imports this module in each of its processes, because `VllmSettings` names `WorkerExtension`.
The import also registers the weight receiver, so ranks that share a model need no plugin.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
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
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from ...dataflow.errors import WeightSyncError, nearest
from ...resharding.buckets import box_sum, read_sums, start_sum, threads_beside
from ...resharding.incoming import PATIENCE_S, IncomingWeights, receive_parts
from ...resharding.vllm_control import TensorSum
from ...resharding.vllm_writer import WeightWriter, process_tied, record_layout, restore
from ...resharding.weights import (
    CHECKSUM_MODULUS,
    Box,
    Copy,
    Layout,
    RankWeights,
    ReshardPlan,
    Weights,
    whole,
)
from ..kept_sets import KeptSets, KeptSetsRecord, record_kept_sets

T = TypeVar("T")


@dataclass
class _NoInitInfo(WeightTransferInitInfo):
    """Empty, because the record of each version names its publishers."""


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):
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
    """One tensor on a rank after an update, as plain data to send between processes."""

    published: int
    """`box_sum` of the whole tensor, from its publishers."""
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """Starts, stops and `box_sum` of each box that this rank has written."""


@dataclass(frozen=True)
class _Loaded:
    """The last version that a rank has loaded, as plain data to send between processes."""

    version: int
    checksum: str
    """Checksum of the whole version, from its publishers."""
    received: dict[str, _Received]


class _Staging(NamedTuple):
    incoming: IncomingWeights
    done: Future[_Loaded]
    ranks: tuple[RankWeights, ...]
    """The publishers. Another trainer may publish another version with the same number."""


def check_received(version: int, ranks: Sequence[dict[str, _Received]]) -> None:
    """Check that each tensor's boxes, on all ranks of an engine, add up to the published tensor.
    Raises WeightSyncError if they do not."""
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


class _BucketReceiver(WeightTransferEngine[_NoInitInfo, _UpdateInfo]):
    """Receives versions, and writes this rank's part of each into vLLM's model in place."""

    init_info_cls = _NoInitInfo
    update_info_cls = _UpdateInfo

    loaded: _Loaded | None = None
    """The version in the model; None before the first update and after a failed one."""
    _writer: WeightWriter | None = None
    _source: Layout | None = None
    _plan: ReshardPlan | None = None
    _arriving: _Loaded | None = None
    _staging: _Staging | None = None
    _sums: dict[str, dict[Box, int]]
    """Sums of the written boxes. Those of a device are read after the last box."""
    _started: list[tuple[str, Box, torch.Tensor]]
    _copies: list[tuple[str, Copy]]
    """Copies to check once their sums are read."""

    def init_transfer_engine(self, init_info: _NoInitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        self._arriving = self.loaded = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Unlike the base class, without a synchronization: `IncomingWeights` does that.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _UpdateInfo) -> None:
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
        """Start a thread that receives a version while the model continues to compute."""
        self._end_staging()
        # Open it here, not in the thread: opening may swap tensors that the computing model would
        # read.
        incoming = self._open(weights)
        assert self._writer is not None
        write, done = self._writer.stage, Future[_Loaded]()

        def work() -> None:
            try:
                with incoming:
                    done.set_result(self._take(incoming, write))
            except BaseException as error:
                done.set_exception(error)

        self._staging = _Staging(incoming, done, weights.ranks)
        threading.Thread(target=work, name="weft-staging", daemon=True).start()

    def is_staged(self) -> bool:
        """Return whether the staged version has arrived. Raises an error if it is damaged."""
        assert self._staging is not None
        done = self._staging.done
        if done.done() and (error := done.exception()) is not None:
            self._staging = None
            raise error
        return done.done()

    def _end_staging(self) -> _Loaded | None:
        """End staging, and return the version if it is complete."""
        staging, self._staging = self._staging, None
        if staging is None:
            return None
        if not staging.done.done():
            staging.incoming.hang_up()
        return None if staging.done.exception(PATIENCE_S) is not None else staging.done.result()

    def _open(self, weights: Weights) -> IncomingWeights:
        incoming = IncomingWeights(weights, self.parallel_config.rank, self.parallel_config.world_size)
        try:
            # Equal layouts are one object; a new object means that the trainer cuts its tensors
            # differently.
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
    ) -> _Loaded:
        self._sums, self._started, self._copies = {}, [], []
        with threads_beside(incoming.neighbours):
            write(self._slices(incoming))
        read = read_sums([found for _, _, found in self._started])
        for (name, box, _), found in zip(self._started, read, strict=True):
            self._add(name, box, found)
        for name, copy in self._copies:
            self._check(incoming, name, copy)
        received: dict[str, _Received] = {}
        for name, sums in self._sums.items():
            boxes = tuple((box.starts, box.stops, found) for box, found in sums.items())
            received[name] = _Received(incoming.published_sum(name), boxes)
        return _Loaded(incoming.version, incoming.confirm(), received)

    def finish_weight_update(self) -> None:
        self.loaded = self._arriving

    def shutdown(self) -> None:
        """Do nothing."""

    def _slices(self, incoming: IncomingWeights) -> Iterator[tuple[str, Box, torch.Tensor]]:
        assert self._plan is not None
        for name, copy, source in incoming.slices(self._plan.received_by(0)):
            wanted = self._plan.destination.tensors[name].dtype
            # A cast changes the bits, so sum the elements as they were received.
            if wanted != incoming.layout.tensors[name].dtype:
                self._start(name, copy.box, source)
                source = source.to(dtype=getattr(torch, wanted))
            yield name, copy.box, source
            if self._started:
                self._copies.append((name, copy))
            else:
                self._check(incoming, name, copy)

    def _note(self, name: str, box: Box, elements: torch.Tensor) -> None:
        assert self._plan is not None and self._source is not None
        if self._source.tensors[name].dtype == self._plan.destination.tensors[name].dtype:
            self._start(name, box, elements)

    def _start(self, name: str, box: Box, elements: torch.Tensor) -> None:
        assert self._source is not None
        found = start_sum(elements, box, self._source.tensors[name].shape)
        if isinstance(found, torch.Tensor):
            self._started.append((name, box, found))
        else:
            self._add(name, box, found)

    def _check(self, incoming: IncomingWeights, name: str, copy: Copy) -> None:
        """Compare a copy with the published elements, if it was written in one piece."""
        if (found := self._sums.get(name, {}).get(copy.box)) is not None:
            incoming.check(name, copy, found)

    def _add(self, name: str, box: Box, found: int) -> None:
        if self._sums.setdefault(name, {}).setdefault(box, found) != found:
            raise WeightSyncError(
                f"{box} of tensor {name!r} arrived differently in two places of one rank of vLLM"
            )


WeightTransferEngineFactory.register_engine("weft", _BucketReceiver)


# Versions that arrive through vLLM's own backends, as whole tensors that the model's loaders cut.


class _VllmBackends:
    """The transfer engines of vLLM's own backends on one rank, in place of Weft's receiver."""

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
        """End a version, and return the sums of the tensors that the loaders got. Unless the
        version is complete (`whole`), incomplete layers keep their previous weights."""
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
    """Sums the tensors that a model's loaders get, until `end_version` deletes its
    `load_weights`."""

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


# LoRA adapters inside vLLM, served from tensors instead of files. An engine has a slot for each
# policy, and requests name the slot of theirs, so requests of all policies decode in one batch. Like
# full weights, a new version replaces the adapter between two steps, and unfinished requests continue
# with it.


def adapter_slot(number: int, policy: str) -> LoRARequest:
    """Return vLLM's name for an adapter slot, numbered from 1."""
    return LoRARequest(policy, number, "received, not read")


def receive_adapter(
    manager: Any, incoming: IncomingWeights, slot: int, settings: Mapping[str, Any]
) -> str:
    """Receive an adapter with `peft` names, check it, and put it into a slot of vLLM's
    `WorkerLoRAManager`. `settings` contains "r" and "lora_alpha". Return the adapter's checksum.
    Raises WeightSyncError if a tensor arrived damaged or vLLM has no layer for it; the slot then
    keeps its old adapter."""
    tensors = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in incoming.layout.tensors.items()
    }
    checksum = receive_parts(incoming, list(whole(tensors)))
    slots = manager._adapter_manager
    mapper = getattr(slots.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        slot,
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
    before = slots.get_adapter(slot)
    try:
        _exchange(slots, adapter)
    except Exception:
        if before is not None:
            _exchange(slots, before)
        raise
    return checksum


def _exchange(slots: Any, adapter: LoRAModel) -> None:
    # vLLM ignores an adapter whose number it knows, so remove the old one first.
    slots.remove_adapter(adapter.id)
    slots.add_adapter(adapter)
    slots.activate_adapter(adapter.id)


# Routes on a CPU. On GPUs, vLLM returns routed experts (`enable_return_routed_experts`) through its
# newer model runner, which needs Triton. On a CPU, vLLM's capturer observes the routers of the
# older runner, and the scheduler's output says which tokens the routers processed.


@dataclass
class _Noted:
    chunks: list[np.ndarray] = field(default_factory=list)
    """One array per step, [tokens, layers, k]."""
    tokens: int = 0


class _RouteRecorder:
    """Replaces `execute_model` of vLLM's model runner to record which experts a rank's routers
    chose for each request. Raises a ValueError if vLLM cannot capture some router."""

    def __init__(self, model_runner: Any) -> None:
        settings = model_runner.vllm_config
        self._runner, self._execute = model_runner, model_runner.execute_model
        self._capturer = RoutedExpertsCapturer(
            settings.scheduler_config.max_num_batched_tokens, settings
        )
        bind_routed_experts_capturer(model_runner.get_model(), self._capturer)
        self._noted: dict[str, _Noted] = {}
        model_runner.execute_model = self._execute_and_note

    def _execute_and_note(self, scheduled: Any, *others: Any, **named: Any) -> Any:
        found = self._execute(scheduled, *others, **named)
        if tokens := scheduled.total_num_scheduled_tokens:
            self._note(
                scheduled.num_scheduled_tokens, self._capturer.snapshot_routing_data(tokens).numpy()
            )
        return found

    def _note(self, counts: dict[str, int], rows: np.ndarray) -> None:
        """Split the routes of a step, [tokens, layers, k], by request."""
        batch, end = self._runner.input_batch, 0
        for number, request in enumerate(batch.req_ids):
            begin, end = end, end + counts[request]
            before = int(batch.num_computed_tokens_cpu[number])
            if before == 0:  # the first tokens, or all tokens again after a preemption
                self._noted[request] = _Noted()
            noted = self._noted.setdefault(request, _Noted())
            if noted.tokens != before:
                raise RuntimeError(
                    f"the routers did not see the first {before} tokens of request {request}"
                )
            noted.chunks.append(rows[begin:end].copy())
            noted.tokens += end - begin

    def take_routes(self, requests: Iterable[str]) -> list[np.ndarray | None]:
        """Return and forget the routes of each request, [tokens, layers, k], or None for a request
        without tokens. `requests` are names in vLLM."""
        found = [noted.chunks if noted else None for noted in _taken(self._noted, requests)]
        return [np.concatenate(chunks) if chunks else None for chunks in found]


# Kept sets on a CPU. On GPUs, vLLM returns them (`return_sampling_mask`) through its newer model
# runner. The log-probabilities of the older runner's sampler are -inf outside the sets.


class _KeptSetsRecorder:
    """Replaces `sample` of the sampler of vLLM's model runner, to record the kept sets of requests
    that ask for them (`RECORDS_KEPT`)."""

    def __init__(self, model_runner: Any) -> None:
        self._runner, self._sample = model_runner, model_runner.sampler.sample
        self._noted: dict[str, KeptSetsRecord] = {}
        model_runner.sampler.sample = self._sample_and_note

    def _sample_and_note(self, *arguments: Any, **named: Any) -> Any:
        sampled, logprobs = self._sample(*arguments, **named)
        wanting: dict[str, int] = {}
        for row, name in enumerate(self._runner.input_batch.req_ids):
            if (self._runner.requests[name].sampling_params.extra_args or {}).get(RECORDS_KEPT):
                wanting[name] = row
        if wanting:
            records = [self._noted.setdefault(name, KeptSetsRecord()) for name in wanting]
            record_kept_sets(logprobs[[*wanting.values()]] > -torch.inf, records)
        return sampled, logprobs

    def take(self, requests: Iterable[str]) -> list[KeptSets | None]:
        """Return and forget the kept sets of each request, or None for a request without any."""
        return [record and record.sets for record in _taken(self._noted, requests)]


RECORDS_KEPT = "weft_records_kept"
"""Extra argument of requests whose kept sets are recorded."""


def _taken(noted: dict[str, T], requests: Iterable[str]) -> list[T | None]:
    """Remove the notes of these requests, which are named without the number that vLLM adds."""
    by_name = {name.rpartition("-")[0]: name for name in noted}
    return [noted.pop(by_name.get(request, ""), None) for request in requests]


def _constrain(logits: torch.Tensor, ends: torch.Tensor, sampling: Any) -> torch.Tensor:
    """Apply temperature, top-k and top-p to the logits of drafted tokens, [drafted, vocabulary], in
    place. `ends` are the sums of the lengths of the first drafts, [requests].

    vLLM's function fails without drafts, and its kernel for CPUs writes the temperature of each token
    to a copy, so tokens would be sampled at an arbitrary one.
    """
    if sampling.all_greedy or not len(logits):
        return logits
    counts = ends.diff(prepend=ends.new_zeros(1))

    def repeat(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.repeat_interleave(counts)

    greedy = sampling.temperature == rejection_sampler.GREEDY_TEMPERATURE
    temperatures = sampling.temperature.masked_fill(greedy, 1).repeat_interleave(counts)
    narrow = repeat(sampling.top_k), repeat(sampling.top_p)
    return apply_top_k_top_p(logits.div_(temperatures[:, None]), *narrow)


class WorkerExtension:
    """Mixin for vLLM's worker class; `collective_rpc` calls its methods on every rank."""

    weight_transfer_engine: Any
    vllm_config: Any
    device: Any
    model_runner: Any
    parallel_config: Any
    rank: int
    _weight_update_active: bool
    _weft_backends: _VllmBackends | None = None
    _weft_routes: _RouteRecorder | None = None
    _weft_kept_sets: _KeptSetsRecorder | None = None

    @property
    def _weft_receiver(self) -> _BucketReceiver:
        assert isinstance(self.weight_transfer_engine, _BucketReceiver)
        return self.weight_transfer_engine

    def weft_loaded_weights(self) -> _Loaded | None:
        """Return the record of this rank's last finished update, or None before the first and after
        a failed one."""
        return self._weft_receiver.loaded

    def weft_stage_weights(self, update_info: dict[str, Any]) -> None:
        self._weft_receiver.stage(_UpdateInfo(**update_info).weights)

    def weft_is_staged(self) -> bool:
        return self._weft_receiver.is_staged()

    def weft_begin_by_vllm(self, backend: str) -> None:
        """Send this update's calls to one of vLLM's own backends."""
        if self._weft_backends is None:
            model = self.model_runner.get_model()
            self._weft_backends = _VllmBackends(
                self._weft_receiver, self.vllm_config, self.device, model
            )
        self.weight_transfer_engine = self._weft_backends.begin_version(backend)

    def weft_end_by_vllm(self, whole: bool) -> dict[str, TensorSum]:
        """End an update that `weft_begin_by_vllm` started, and return the sums of the tensors that
        the model's loaders received. Unless it is `whole`, incomplete layers keep their old
        weights."""
        if self._weft_backends is None:  # this rank, or another one, could not begin
            assert not whole
            return {}
        self.weight_transfer_engine = self._weft_backends.receiver
        if not whole:
            self._weight_update_active = False
        return self._weft_backends.end_version(whole)

    def weft_receive_adapter(
        self, update_info: dict[str, Any], slot: int, settings: dict[str, Any]
    ) -> str:
        """Load a version of an adapter into a slot of this rank, and return its checksum."""
        weights = _UpdateInfo(**update_info).weights
        with IncomingWeights(weights, self.rank, self.parallel_config.world_size) as incoming:
            return receive_adapter(self.model_runner.lora_manager, incoming, slot, settings)

    def weft_record_routes(self) -> None:
        self._weft_routes = _RouteRecorder(self.model_runner)

    def weft_take_routes(self, requests: Sequence[str]) -> list[np.ndarray | None]:
        assert self._weft_routes is not None
        return self._weft_routes.take_routes(requests)

    def weft_record_kept_sets(self) -> None:
        if self.rank == 0:  # all ranks sample the same
            self._weft_kept_sets = _KeptSetsRecorder(self.model_runner)

    def weft_take_kept_sets(self, requests: Sequence[str]) -> list[KeptSets | None]:
        return [] if self._weft_kept_sets is None else self._weft_kept_sets.take(requests)

    def weft_correct_drafts(self) -> None:
        """Replace a function of vLLM that is wrong on CPUs."""
        if self.device.type == "cpu":
            rejection_sampler.apply_sampling_constraints = _constrain

    def weft_draft(self, length: int) -> None:
        """Set the maximum length of the next drafts by Weft; 0 switches them off."""
        drafter = self.model_runner.drafter
        drafter.runner, drafter.tokens = self.model_runner, length

    def weft_weight_bytes(self) -> int:
        model = self.model_runner.model
        methods = [getattr(module, "quant_method", None) for module in model.modules()]
        arriving = sum(getattr(method, "arriving_bytes", 0) for method in methods)
        return arriving + sum(parameter.nbytes for parameter in model.parameters())

    def weft_free_host_cache(self) -> None:
        torch.accelerator.empty_host_cache()

    def weft_model_runner(self) -> str:
        """Return the version of vLLM's model runner. The newer one is in a package of its own."""
        module = type(self.model_runner).__module__
        return "V2" if ".worker.gpu." in module or ".worker.cpu." in module else "V1"

    def weft_unlink_shared_memory(self) -> None:
        """Unlink the names of shared memory between ranks on a CPU; the memory remains while ranks
        use it. vLLM leaves the files behind even after an orderly shutdown."""
        if name := os.environ.get("VLLM_DIST_IDENT"):  # set by vLLM if ranks are CPU processes
            for file in Path("/dev/shm").glob(f"{glob.escape(name)}-*"):
                file.unlink(missing_ok=True)
