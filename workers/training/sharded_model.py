"""A model sharded over the ranks of a group with FSDP2 and optional tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ...dataflow.errors import UserError
from ...dataflow.runs.files import Disk
from ...resharding.incoming import IncomingWeights, receive_parts
from ...resharding.mapped_memory import SharedMemory
from ...resharding.weights import Box, TensorPart
from ..models.model_folder import find_model_config, read_model_config
from .adapter import Adapter, is_adapter, is_trained, measured_weight, peft_name
from .causal_lm import move_buffers, scalar_settings
from .engine import ModelConfig
from .head_logprobs import HeadForm
from .memory import gathers_once
from .packed_sequences import join_stretches
from .response_model import ResponseModel, follows_length
from .safetensors_files import write_model
from .sharding import (
    NODES,
    CheckpointNames,
    box_of,
    full_tensor,
    is_split_by_node,
    local_part,
    lying_as,
    share_of_node,
    use_direct_collectives,
    writes,
)
from .stored_weights import WeightReader
from .tensor_parallel import add_up, share_layers

# Mixed precision on a single process, with the same results as FSDP's `MixedPrecisionPolicy` on
# several ranks. Trained parameters are float32; passes use rounded copies. Gradients arrive in
# float32; several ranks first reduce them in `ModelConfig.gradients`. Frozen models keep the dtype
# of their passes.


def keep_in(model: ResponseModel, dtype: torch.dtype) -> None:
    """Convert the parameters of a model on the meta device to another dtype. A scalar head keeps
    its own, because half precision is too coarse for values."""
    kept = set(model.scalar_head.parameters()) if model.scalar_head is not None else set[nn.Parameter]()
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in kept:
            parameter.data = parameter.data.to(dtype)


@contextmanager
def rounded_parameters(
    model: nn.Module, dtype: torch.dtype, *, but: nn.Module | None = None
) -> Iterator[None]:
    """Inside the context, replace parameters by copies in another dtype, except in the module
    `but`. Run the backward pass inside too, because it may recompute activations.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with rounded_parameters(layer, torch.bfloat16):
    ...     layer.weight.dtype, layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    (torch.bfloat16, None)
    >>> layer.weight.dtype, layer.weight.grad.dtype
    (torch.float32, torch.float32)
    """
    kept = set(but.modules()) if but is not None else set()
    owners = [module for module in model.modules() if module not in kept]
    before = [dict(module._parameters) for module in owners]
    rounded: dict[Tensor, Tensor] = {}  # round a tied parameter only once, as FSDP gathers it once
    for parameters in before:
        for parameter in parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter not in rounded:
                rounded[parameter] = parameter.to(dtype)
    try:
        for module, parameters in zip(owners, before, strict=True):
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = rounded.get(parameter, parameter)  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for module, parameters in zip(owners, before, strict=True):
            module._parameters.update(parameters)


_ONE_UNIT_PARAMETERS = 16_000_000
"""Gather models with fewer parameters as one unit: many small collectives only add latency."""


class ShardedModel:
    """A model on the meta device, sharded over ranks in place. If it has an adapter, only the
    adapter is trained. `fill` loads the values. All ranks must call its methods together."""

    def __init__(
        self,
        config: ModelConfig,
        model: ResponseModel,
        mesh: DeviceMesh | None,
        device: torch.device,
        adapter: Adapter | None = None,
    ) -> None:
        self.config, self.model, self.adapter = config, model, adapter
        self.mesh, self.device = mesh, device
        self._splits_vocabulary = False
        self._partials: frozenset[str] = frozenset()
        """Parameters whose gradients must be summed over tensor-parallel ranks before a step."""
        self._memory: SharedMemory | None = None
        """Shared memory with this rank's parts for other processes, kept as long as the parts."""
        self.gathers_once = self._distribute()
        """Whether ranks gather parameters once a step instead of in each microbatch."""

    @property
    def _on_host(self) -> bool:
        """Whether parameters are in host memory except while their layer runs."""
        return self.config.offload == "everything" and self.mesh is not None

    @property
    def _by_node(self) -> bool:
        return self.mesh is not None and is_split_by_node(self.mesh)

    def _distribute(self) -> bool:
        mesh = self.mesh
        if mesh is None:
            return True
        numel = sum(p.numel() for p in self.model.parameters())
        once = gathers_once(self.config, numel)
        if self.config.tensor_parallel > 1:
            self._partials = share_layers(self.model.causal_lm, mesh["tp"])
            self._split_vocabulary(mesh)
        precision, offload = MixedPrecisionPolicy(), OffloadPolicy()
        if self._on_host:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        if self.config.dtype == "bfloat16":
            # Do not cast inputs: the model rounds where it needs to, and temperatures stay exact.
            gradients = getattr(torch, self.config.gradients)
            precision = MixedPrecisionPolicy(torch.bfloat16, gradients, cast_forward_inputs=False)
        over = mesh[NODES, "shards"] if self._by_node else mesh["dp"]
        shard = partial(fully_shard, mesh=over, offload_policy=offload)
        if self.config.dtype == "bfloat16" and self.model.scalar_head is not None:
            # No mixed precision here: half precision is too coarse for values.
            shard(self.model.scalar_head, reshard_after_forward=False)
        # Inner units first, because the outer unit takes all remaining parameters.
        for layer in [] if once and numel < _ONE_UNIT_PARAMETERS else self.model.layers:
            shard(layer, reshard_after_forward=not once, mp_policy=precision)
        shard(self.model, reshard_after_forward=False, mp_policy=precision)
        if self.device.type == "cpu":
            use_direct_collectives(self.model)
        return once

    def _split_vocabulary(self, mesh: DeviceMesh) -> None:
        """Split embeddings and head over token ids if these divide evenly; otherwise replicate
        them."""
        causal_lm = self.model.causal_lm
        embeddings, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
        if self.model.scalar or embeddings.weight.shape[0] % mesh.size():
            return
        self._splits_vocabulary = True
        tied = head.weight is embeddings.weight
        parallelize_module(embeddings, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
        if tied:
            # The split replaced the embedding's parameter, so tie the head to the new one.
            head.weight = embeddings.weight
        else:
            parallelize_module(head, mesh["tp"], ColwiseParallel())

    def share_tokens(self, timeout: timedelta) -> None:
        """Let the ranks of a replica share the tokens of microbatches, if `sequence_parallel` is
        set. Raises UserError if the model cannot pack rows, or if its rope depends on a row's
        length, because no rank has a whole row."""
        if self.config.sequence_parallel == 1:
            return
        model = self.model
        if not model.packs or follows_length(model.causal_lm):
            why = "its rope depends on the length of a row" if model.packs else ""
            raise UserError(
                f"sequence_parallel={self.config.sequence_parallel} cannot share the tokens "
                f"of model {str(self.config.model)!r}: {why or 'its rows cannot be packed'}"
            )
        model.shares_prompts = False
        model.stretches = join_stretches(self.config.sequence_parallel, timeout)

    def check_head(self, form: HeadForm | None) -> None:
        """Check that ranks can compute a split head in parts. Raises UserError if a split head does
        more than multiply, scale and soft-cap."""
        if self._splits_vocabulary and form is None:
            raise UserError(
                f"tensor_parallel={self.config.tensor_parallel} cannot split the head of model {str(self.config.model)!r}: its logits are "
                "more than the products of hidden states and a matrix"
            )

    @torch.no_grad()
    def fill(self, weights: WeightReader, made: Mapping[str, Tensor]) -> None:
        """Load the model's values, on each rank only the parts that it holds. They come from
        `weights` (the model without its adapter) or from `made` (full tensors on the host, by name
        in the model). On a CPU the parts are in shared memory, so that receivers on this machine
        can read them."""
        causal_lm = self.model.causal_lm
        filled: dict[Tensor, Tensor] = {}
        empty = {name: t for name, t in self.own_tensors().items() if local_part(t).is_meta}
        if self.device.type == "cpu":
            parts = map(local_part, empty.values())
            room = sum(SharedMemory.room([part.shape], part.dtype) for part in parts)
            self._memory = SharedMemory(room)
        for name, tensor in empty.items():
            on_host, own = self._on_host and isinstance(tensor, nn.Parameter), local_part(tensor)
            if self._memory is None:
                part = torch.empty_like(own, device="cpu" if on_host else self.device)
            else:
                part = self._memory.empty(own.shape, own.dtype)
            if part.numel():
                box, plain = box_of(tensor), name.replace(".base_layer.", ".")
                part.copy_(made[name][box.slices] if name in made else weights.read_box(plain, box))
            filled[tensor] = part
        for name, parameter in causal_lm.named_parameters():
            if measured := measured_weight(name):
                weight = filled[causal_lm.get_parameter(measured)]
                filled[parameter].copy_(torch.linalg.norm(weight.float(), dim=1))
        whole = {tensor: _whole(tensor, part) for tensor, part in filled.items()}
        for module in self.model.modules():
            held: dict[str, Any]
            for held in (module._parameters, module._buffers):
                held |= {key: whole[tensor] for key, tensor in held.items() if tensor in whole}
        self.model.to("cpu" if self._on_host else self.device)  # lets FSDP register the parameters
        move_buffers(causal_lm, self.device)
        causal_lm._weight_conversions = weights.conversions

    def full_base_tensors(self) -> Callable[[str], Tensor]:
        """Return a function that returns a full tensor of the base model, without the adapter, by its
        name. If the tensor is sharded, all ranks must call that function."""
        own = self.own_tensors()

        def full(name: str) -> Tensor:
            path, _, last = name.rpartition(".")
            return full_tensor(own[name if name in own else f"{path}.base_layer.{last}"]).to(self.device)

        return full

    # Passes

    def precision(self) -> AbstractContextManager[object]:
        if self.config.dtype == "float32" or self.mesh is not None:  # FSDP rounds by its own policy
            return nullcontext()
        return rounded_parameters(
            self.model, getattr(torch, self.config.dtype), but=self.model.scalar_head
        )

    def adapter_off(self) -> AbstractContextManager[object]:
        """Return a context that disables the adapter, for passes without a gradient."""
        return nullcontext() if self.adapter is None else self.adapter.off()

    def over_replicas(self, *numbers: float) -> np.ndarray:
        """Return the numbers of every replica: [replicas, numbers] float64."""
        own = torch.tensor([numbers], dtype=torch.float64, device=self.device)
        if self.mesh is None:
            return own.numpy(force=True)
        mesh = self.mesh["dp"]
        gathered = torch.zeros(mesh.size(), len(numbers), dtype=torch.float64, device=self.device)
        gathered[mesh.get_local_rank()] = own[0]
        dist.all_reduce(gathered, group=mesh.get_group())
        # Ranks that share tokens have the same rows, so count each replica only once.
        return gathered[:: self.config.sequence_parallel].numpy(force=True)

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor in place over the ranks that have different tokens."""
        if self.mesh is not None:
            dist.all_reduce(tensor, group=self.mesh["dp"].get_group())

    def sync_gradients(self, last: bool) -> None:
        """Let the next backward pass reduce gradients only if it is the `last`. With layerwise
        gathering, every pass reduces them, but only the last between nodes."""
        if not isinstance(self.model, FSDPModule):
            return
        if self.gathers_once:
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)
        elif self._by_node:
            self.model.set_requires_all_reduce(last)

    def complete_gradients(self) -> None:
        """Sum the gradients of replicated parameters that each tensor-parallel rank computes in
        part."""
        if self.mesh is not None and self._partials:
            named = self.model.causal_lm.named_parameters()
            add_up((parameter for name, parameter in named if name in self._partials), self.mesh["tp"])

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # Weights

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters and saved buffers by Hugging Face name, tied tensors once.
        Reading them frees tensors that FSDP has gathered."""
        module = self.model.causal_lm
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        stored = module.state_dict(keep_vars=True).items()
        buffers = {name: tensor for name, tensor in stored if name not in parameters}
        return {**dict(module.named_parameters()), **buffers}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        dtype = getattr(torch, self.config.dtype)
        own = self.own_tensors()
        adapters: dict[str, list[str]] = {}
        for name in filter(is_adapter, own):
            adapters.setdefault(name.rpartition(".lora_")[0], []).append(name)
        for name, tensor in own.items():
            if is_adapter(name):
                continue
            full = full_tensor(tensor)
            if self.adapter is not None:
                of_layer = adapters.get(name.removesuffix(".base_layer.weight"), [])
                factors = {each: full_tensor(own[each]) for each in of_layer}
                name, full = self.adapter.merged(name, full, factors)
            yield name, full.to(dtype) if full.is_floating_point() else full

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full float32 parameters of adapter and scalar head, one at a time."""
        for name, tensor in self.own_tensors().items():
            if is_trained(name):
                yield name, full_tensor(tensor)

    def held_parts(self) -> Iterator[tuple[TensorPart, bool]]:
        """Yield this rank's parts, each with whether this rank is the first that holds the part."""
        self.reshard()
        rank = dist.get_rank() if self.mesh is not None else 0
        for name, tensor in self.own_tensors().items():
            yield _part(name, tensor), writes(tensor, rank)

    @cached_property
    def checkpoint_names(self) -> CheckpointNames:
        """Names of the base model's tensors in the checkpoint; available after `fill`."""
        own = {
            name.replace(".base_layer.", "."): t
            for name, t in self.own_tensors().items()
            if not is_adapter(name)
        }
        return CheckpointNames(self.model.causal_lm, own)

    def published_parts(self) -> Iterator[TensorPart]:
        dtype = getattr(torch, self.config.dtype)
        if self.adapter is not None and not self.adapter.travels_alone:
            parts = self._merged_parts()
        else:
            given = self._published_shares()
            parts = (p._replace(dtype=dtype if p.tensor.is_floating_point() else None) for p in given)
        for part in parts:
            if self.adapter is None or not self.adapter.travels_alone:
                yield from (stored for stored in self.checkpoint_names.parts(part) if stored.box.numel)
            elif is_adapter(part.name):
                yield part._replace(name=peft_name(part.name))

    def _published_shares(self) -> Iterator[TensorPart]:
        """Yield this rank's parts, without those that another rank publishes. Nodes with equal parts
        publish equal shares of them."""
        self.reshard()
        rank = dist.get_rank() if self.mesh is not None else 0
        for name, tensor in self.own_tensors().items():
            if writes(tensor, rank, of_node=True):
                share = share_of_node(tensor, _part(name, tensor))
                if share.box.numel:
                    yield share

    def _merged_parts(self) -> Iterator[TensorPart]:
        """Yield merged weights, an equal share of rows on each rank. Merging gathers each
        tensor."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if self.mesh is not None else (0, 1)
        for name, tensor in self.named_tensors():
            shape = tuple(tensor.shape)
            rows = shape[0] if shape else 1
            start, stop = rows * rank // ranks, rows * (rank + 1) // ranks
            if start < stop:
                box = Box.along(shape, 0, start, stop) if shape else Box.full(shape)
                # Clone, so that the rest of the gathered tensor is freed.
                yield TensorPart(name, shape, box, (tensor[start:stop] if shape else tensor).clone())

    def receive_weights(self, incoming: IncomingWeights) -> str:
        if self.adapter is not None:
            raise RuntimeError(
                "a model with an adapter cannot receive weights, because they do not "
                "separate model and adapter"
            )
        parts: list[TensorPart] = []
        counted: list[bool] = []
        for whole, first in self.held_parts():
            stored = list(self.checkpoint_names.parts(whole))
            parts += stored
            counted += [first] * len(stored)

        def sum_over_ranks(numbers: np.ndarray) -> np.ndarray:
            total = torch.from_numpy(numbers.copy()).to(self.device)
            dist.all_reduce(total)
            return total.numpy(force=True)

        return receive_parts(incoming, parts, counted, None if self.mesh is None else sum_over_ranks)

    def write_folder(
        self, folder: Path, tensors: dict[str, Tensor], disk: Disk, *, only_adapter: bool
    ) -> None:
        """Write a folder that `from_pretrained` loads, with the model or only its adapter. The
        tensors are full and on the host (`named_tensors` or `adapter_tensors`)."""
        source = find_model_config(self.config.model).parent
        if only_adapter:
            assert self.adapter is not None
            self.adapter.write_folder(folder, tensors, source, disk)
            return
        settings = scalar_settings(read_model_config(self.config.model)) if self.model.scalar else {}
        changed: Mapping[str, object] = {**settings, "dtype": self.config.dtype}
        write_model(folder, self.model.causal_lm, tensors, source, changed, disk)


def _part(name: str, tensor: Tensor) -> TensorPart:
    local = local_part(tensor.detach())
    box = box_of(tensor) if local.numel() else Box.full(tuple(local.shape))
    return TensorPart(name, tuple(tensor.shape), box, local)


def _whole(tensor: Tensor, part: Tensor) -> Tensor:
    """Return the sharded tensor that belongs to an empty full tensor, holding this rank's part."""
    part = lying_as(tensor, part)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(part, requires_grad=tensor.requires_grad) if is_parameter else part
