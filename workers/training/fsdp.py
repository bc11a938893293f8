"""FsdpEngine: trains `transformers` models with FSDP2 and optional tensor parallelism. A single
process uses plain torch."""

from __future__ import annotations

import ctypes
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...algorithms.loss import LOG_COLLISIONS, Loss
from ...dataflow.batch import Batch
from ...dataflow.column import GROUP_ID, ROUTES
from ...dataflow.errors import UserError
from ...dataflow.metrics import Mean, Metric, Metrics, Sum, merge
from ...dataflow.runs.files import Disk
from ...resharding.incoming import IncomingWeights
from ...resharding.mapped_memory import release_device_memory
from ...resharding.weights import TensorPart
from ..dispatch import Coordinates, row_cost_of
from ..models.images import ImageReader
from ..models.model_folder import context_of, num_experts
from ..models.node_folder import node_folder
from ..worker import Context, rank_device
from .adapter import Adapter, is_trained
from .agreement import find_agreement
from .causal_lm import build_causal_lm, move_buffers
from .device_memory import HostCopies, in_phase, memory_errors
from .engine import Head, ModelConfig, OptimizerStep, TrainingConfig
from .memory import CPU_TOKENS, GPU_TOKENS, gathers_in_node
from .microbatch_plan import SharingCost
from .microbatches import Microbatches, tokens_of
from .moments import has_momentum, in_8_bits, make_optimizer
from .moving_average import MovingAverage
from .packed_attention import VARLEN
from .response_model import ResponseModel, with_computed
from .routers import Balance, Routers
from .sharded_model import ShardedModel, keep_in
from .sharding import (
    NODES,
    check_alike,
    gradient_norm,
    group_timeout,
    join_mesh,
    local_part,
    mesh_of_one,
    split_by_node,
)
from .snapshot import Snapshot, SnapshotWriter, set_random_states
from .stored_weights import open_stored

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let the C library keep freed memory, at the cost of about 1 % more memory. By default, glibc
    returns tensors above 32 MiB to the kernel, which must clear each page before its next use. The
    setting affects the whole process; under `Local()`, that is the user's process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


class FsdpEngine:
    """A `TrainingEngine` on a group of ranks: dp replicas as the outer dimension, each of
    `tensor_parallel` ranks. See `EngineFactory` for the arguments; tests pass a `disk` that fails.

    A step's gradient is the gradient of the summed loss, divided by the count over all replicas. It
    does not depend on the number of ranks, the microbatches or the order of rows. A rank without
    rows joins collectives with a token of weight zero. Raises UserError if the model cannot be
    trained, or cannot be split over the ranks.
    """

    shares_prompts = True
    """Whether a microbatch computes a prompt once for all its rows (`Worker.shares_prompts`)."""
    averages = True
    """Whether the engine supports `MovingReferenceConfig.mix`."""
    reads_kept_sets = True
    """Whether probabilities are those over the kept sets of the rows (`EngineWorker.check`)."""

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        training: TrainingConfig | None = None,
        *,
        head: Head = "logprobs",
        disk: Disk | None = None,
    ) -> None:
        self.config, self.context, self.training = config, context, training
        self.steps = 0
        self.device = rank_device(context)
        if self.device.type == "cpu":
            keep_freed_memory()
        # FSDP moves the layers between host and device, and needs a mesh even on one rank.
        streams = config.offload == "everything" and context.world_size == 1
        self._close_mesh = dist.destroy_process_group
        if streams:
            self.mesh, self._close_mesh = mesh_of_one(self.device)
        else:
            self.mesh = join_mesh(context, config, self.device)
        self.microbatch_tokens = config.microbatch_tokens or (
            GPU_TOKENS if self.device.type == "cuda" else CPU_TOKENS
        )
        self._row_cost = row_cost_of(config.model)
        self.head: Head = head
        with memory_errors("the start of the engine", config, training):
            self._sharded, self._images, self.bytes_read = _load_model(
                config, context, training, head, self.mesh, self.device
            )
        self.mesh, self.model = self._sharded.mesh, self._sharded.model
        self.vocabulary = self.model.causal_lm.get_input_embeddings().weight.shape[0]
        router_loss = None if training is None else training.router_loss
        if router_loss is not None and not (self.model.routers and self.model.routers.have_logits):
            raise UserError(
                f"router_loss={router_loss:g}: model {str(config.model)!r} has no routers "
                "whose logits transformers declares; leave it out"
            )
        self._disk = disk or Disk()
        self._copies = HostCopies(self.device)
        self.optimizer = self._average = self._snapshots = None
        if training is not None:
            everything = self.model.parameters()
            self.optimizer = make_optimizer(config, training, everything, self.device, self.model.layers)
        if (mix := getattr(config, "mix", None)) is not None:
            self._average = MovingAverage(self._sharded.own_tensors(), mix)
        if training is not None or mix is not None:
            self._snapshots = SnapshotWriter(context, self.device, self._write_stored, self._disk)
        self._count = self._loss_total = 0.0
        """Count and loss sum of the rows since the last step."""

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates(*(divmod(self.context.rank, self.config.replica_ranks)))

    # Log-probabilities and values

    def logprobs(self, batch: Batch, *, adapter: bool = True) -> tuple[np.ndarray, np.ndarray]:
        (values,), cu_seqlens = self._of_tokens(batch, "log-probabilities", adapter=adapter)
        return values, cu_seqlens

    def logprobs_and_entropies(
        self, batch: Batch, *, collisions: bool = False
    ) -> tuple[np.ndarray, ...]:
        found, cu_seqlens = self._of_tokens(batch, "entropies", entropies=True, collisions=collisions)
        return (*found, cu_seqlens)

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        (values,), cu_seqlens = self._of_tokens(batch, "values")
        return values, cu_seqlens

    @in_phase("a forward pass", runs_model=True)
    def _of_tokens(
        self,
        batch: Batch,
        what: str,
        *,
        adapter: bool = True,
        entropies: bool = False,
        collisions: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the head's outputs, then entropies, then collisions, as [1 to 3, T] float32; and
        cu_seqlens."""
        if (what == "values") == (self.head == "logprobs"):
            raise RuntimeError(f"this engine was made with head={self.head!r}; it computes no {what}")
        rows = self._rows(batch, ())
        cu_seqlens = rows.response[1]
        out = np.zeros((1 + entropies + collisions, int(cu_seqlens[-1])), dtype=np.float32)
        plan, _ = self._plan(rows)
        with (
            torch.no_grad(),
            self._sharded.precision(),
            nullcontext() if adapter else self._sharded.adapter_off(),
        ):
            for part in plan:
                wanted = {"entropy": entropies, "collisions": collisions}
                logprobs, computed = self._forward(rows, part, **wanted)
                for of_tokens, found in zip(out, (logprobs, *computed.values()), strict=False):
                    if len(part):
                        of_tokens[tokens_of(cu_seqlens, part)] = found.cpu().numpy()
        self._sharded.reshard()
        return out, cu_seqlens

    @in_phase("a forward pass", runs_model=True)
    def top_logprobs(self, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self.head != "logprobs":
            raise RuntimeError(f"this engine was made with head={self.head!r}; it computes no tokens")
        rows, k = self._rows(batch, ()), min(k, self.vocabulary)
        cu_seqlens = rows.response[1]
        logprobs = np.zeros((int(cu_seqlens[-1]), k), dtype=np.float32)
        ids = np.zeros_like(logprobs, dtype=np.int32)
        plan, _ = self._plan(rows)
        with torch.no_grad(), self._sharded.precision():
            for part in plan:
                self.context.advance()
                found, tokens = self.model(*rows.inputs(part), top=k)
                if len(part):
                    where = tokens_of(cu_seqlens, part)
                    logprobs[where], ids[where] = found.cpu().numpy(), tokens.cpu().numpy()
        self._sharded.reshard()
        return logprobs, ids, cu_seqlens

    @in_phase("a forward pass", runs_model=True)
    def losses(self, batch: Batch, loss: Loss) -> np.ndarray:
        rows = self._rows(batch, _columns_of(loss, batch))
        # Each loss value belongs to a group or to a row.
        unit = batch.numpy(GROUP_ID) if loss.whole_groups else np.arange(len(batch))
        plan, _ = self._plan(rows, unit if loss.whole_groups else None)
        lengths, wanted = np.diff(rows.response[1]), _computed_for(loss)
        out = np.zeros(len(batch), dtype=np.float32)
        with torch.no_grad(), self._sharded.precision():
            for part in plan:
                logprobs, computed = self._forward(rows, part, **wanted)
                of_token = np.repeat(unit[part], lengths[part])
                for one in np.unique(unit[part]):
                    own = part[unit[part] == one]
                    tokens = torch.from_numpy(np.flatnonzero(of_token == one)).to(self.device)
                    packed = rows.packed(own, {c: of[tokens] for c, of in computed.items()})
                    out[own] = loss(logprobs[tokens], packed)[0].item() / len(own)
        self._sharded.reshard()
        return out

    def _rows(self, batch: Batch, columns: Iterable[str]) -> Microbatches:
        return Microbatches.from_batch(
            batch,
            columns,
            self.device,
            vocabulary=self.vocabulary,
            # config.json may omit a limit that is the default, so use the completed settings.
            context=context_of(self.model.causal_lm.config.to_dict()),
            owner=str(self.config.model),
            reads_last=self.head == "rewards",
            sharing=SharingCost(self._row_cost, masked=self._pads)
            if self.model.shares_prompts
            else None,
            routers=self._replaying(batch),
            images=self._images,
        )

    @property
    def _pads(self) -> bool:
        return self.model.causal_lm.config.get_text_config()._attn_implementation != VARLEN

    def _replaying(self, batch: Batch) -> Routers | None:
        if ROUTES not in batch or num_experts(self.model.causal_lm.config.get_text_config()) is None:
            return None
        if self.model.routers is None:
            raise UserError(
                f"model {str(self.config.model)!r} cannot replay the column "
                f"{str(ROUTES)!r}: its routers do not accept given experts; sample without "
                "routes=True"
            )
        return self.model.routers

    def _plan(
        self, rows: Microbatches, groups: np.ndarray | None = None, *numbers: float
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Plan this rank's microbatches, with empty ones where other ranks need this rank in
        collectives. Rows with equal `groups` share a microbatch. Also return all replicas'
        `numbers`: [replicas, numbers]."""
        packed = self.model.packs
        plan = rows.plan(self.microbatch_tokens, packed=packed, groups=groups)
        replicas = self._sharded.over_replicas(len(plan), *numbers)
        wanted = int(replicas[:, 0].max())
        if self._sharded.gathers_once:  # each rank reduces gradients in its own last microbatch
            wanted = min(wanted, max(1, len(plan)))
        elif len(replicas) > 1:  # ranks gather each layer together
            limits = wanted, self.microbatch_tokens, self._row_cost
            plan = rows.plan_in_lockstep(*limits, packed=packed, pads=self._pads, groups=groups)
        return plan + [np.empty(0, dtype=np.int64)] * (wanted - len(plan)), replicas[:, 1:]

    def _forward(
        self, rows: Microbatches, part: np.ndarray, *, entropy: bool = False, collisions: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the head's outputs for a part, [T], and the columns that it computed besides."""
        self.context.advance()
        how = {"entropy": entropy, "collisions": collisions}
        return with_computed(*self.model(*rows.inputs(part), **how))

    # Optimizer steps

    @in_phase("a forward and backward pass", runs_model=True)
    def accumulate(self, batch: Batch, loss: Loss, *, last: bool) -> Metrics:
        if self.optimizer is None:
            raise RuntimeError(
                "this engine was made without an optimizer; it computes log-probabilities only"
            )
        rows = self._rows(batch, _columns_of(loss, batch))
        everything = rows.packed()
        local_count, num_tokens = loss.count(everything), float(everything.trained.sum())
        plan, counts = self._plan(
            rows, batch.numpy(GROUP_ID) if loss.whole_groups else None, local_count
        )
        whole, wanted = last and self._count == 0, _computed_for(loss)
        self._count += float(counts.sum())
        parts: list[Metrics] = []
        # Kept on the device, because reading each loss would make the host wait in every
        # microbatch.
        loss_total = torch.zeros((), device=self.device)
        # FSDP reduces the gradients of earlier calls only in a backward pass marked as the last
        # one, so run that pass even without new rows.
        plan = plan or [np.empty(0, dtype=np.int64)] * last
        averaged = len(counts) * self.config.sequence_parallel  # FSDP averages, but the loss is a sum
        balance = self._balance(rows, plan, self._count * averaged, whole=whole)
        routers = self.model.routers
        watched = nullcontext() if routers is None else routers.watched(self.device, balance)
        with watched as tally, self._sharded.precision():  # round parameters once for all microbatches
            # All ranks have the same count, so all or none run the passes.
            for number, part in enumerate(plan if self._count > 0 else ()):
                self._sharded.sync_gradients(last and number == len(plan) - 1)
                logprobs, computed = self._forward(rows, part, **wanted)
                if len(part):
                    loss_sum, metrics = loss(logprobs, rows.packed(part, computed))
                    parts.append(metrics)
                else:
                    # Other ranks wait for this rank in the backward pass's collectives.
                    loss_sum = 0.0 * logprobs.sum()
                (loss_sum * averaged).backward()
                loss_total += loss_sum.detach()
        if balance is not None:
            balance.check_reached(str(self.config.model))
        if last:
            self._sharded.reshard()
        total = loss_total.item()
        self._loss_total += total
        found = {**merge(parts), "loss": Mean(total, local_count), "tokens": Sum(num_tokens)}
        if tally is not None:
            tally.add_up(self._sharded.add_up)
            found |= tally.metrics(replayed=rows.routes is not None)
        return found

    def _balance(
        self, rows: Microbatches, plan: list[np.ndarray], weight: float, *, whole: bool
    ) -> Balance | None:
        """Return the gradient of the load-balancing loss, or None if the loss has no such term."""
        routers, coefficient = self.model.routers, self.training and self.training.router_loss
        if routers is None or coefficient is None or self._count == 0:
            return None
        if not whole:
            raise RuntimeError("router_loss needs all rows of a step in one call")
        if rows.routes is not None:
            own = routers.loads(rows.routes[row] for part in plan for row in part)
            loads = torch.from_numpy(self._sharded.over_replicas(*own.tolist()).sum(0)).to(self.device)
        else:
            with routers.watched(self.device) as tally, torch.no_grad(), self._sharded.precision():
                for part in plan:
                    self.context.advance()
                    ids, packed, read, targets, heat, _ = rows.inputs(part)
                    self.model(ids, packed, read[:1], targets[:1], None if heat is None else heat[:1])
            self._sharded.reshard()
            tally.add_up(self._sharded.add_up)
            loads = tally.loads.sum(0)
        return Balance.of_step(coefficient, loads, chosen=routers.chosen, weight=weight)

    @in_phase("the optimizer step")
    def apply(self) -> OptimizerStep:
        step = self._apply() if self._count > 0 else OptimizerStep({}, applied=False)
        self._count = self._loss_total = 0.0
        once = float(self.coordinates.dp == 0)
        counts = {
            "skipped_steps": Sum(once * (not step.applied)),
            "bad_steps": Sum(once * (step.bad is not None)),
        }
        return replace(step, metrics={**step.metrics, **counts})

    def _apply(self) -> OptimizerStep:
        assert self.optimizer is not None and self.training is not None
        self._sharded.complete_gradients()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            local_part(gradient).div_(self._count)
        norm = gradient_norm(gradients, also=0.0 * self._loss_total)  # 0 * inf is nan, on every rank
        metrics: dict[str, Metric] = {"grad_norm": Mean(norm)} if math.isfinite(norm) else {}
        bad = self._why_bad(norm)
        if bad is None:
            limit = self.training.max_grad_norm
            if limit is not None and norm > limit:
                for gradient in gradients:
                    local_part(gradient).mul_(limit / norm)
            rate = self.training.rate(self.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.steps += 1
            metrics["learning_rate"] = Mean(rate)
        self.optimizer.zero_grad()
        return OptimizerStep(metrics, applied=bad is None, bad=bad)

    def _why_bad(self, norm: float) -> str | None:
        assert self.training is not None
        limit = self.training.skip_above_grad_norm
        if math.isfinite(norm):
            if limit is None or norm <= limit:
                return None
            return f"the norm of the gradient is {norm:.4g}, above skip_above_grad_norm={limit:g}"
        # All ranks reach this collective, because the norm is equal on all of them.
        loss = sum(self._sharded.over_replicas(self._loss_total)[:, 0].tolist()) / self._count
        return "the norm of the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._sharded.named_tensors()

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._sharded.adapter_tensors()

    def published_parts(self) -> Iterator[TensorPart]:
        return self._sharded.published_parts()

    def receive_weights(self, incoming: IncomingWeights) -> str:
        self._copies.forget_frozen()
        checksum = self._sharded.receive_weights(incoming)
        # Only complete versions count, so a failed transfer leaves the average unchanged.
        if self._average is not None:
            self._average.add(self._sharded.own_tensors(), incoming.version)
        return checksum

    def save(self, folder: Path, *, merged: bool = False) -> None:
        gathered: dict[str, Tensor] = {}
        only_adapter = self._sharded.adapter is not None and not merged
        for name, tensor in self.adapter_tensors() if only_adapter else self.named_tensors():
            if self.context.rank == 0:
                gathered[name] = tensor.to("cpu", copy=True)
        if self.context.rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
            # `mkdtemp` creates a folder that only its owner can read.
            partial.chmod(0o755)
            self._sharded.write_folder(partial, gathered, self._disk, only_adapter=only_adapter)
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)  # so that readers only see complete folders
        if self.mesh is not None:
            dist.barrier()  # no rank may read the folder before the rename

    # Snapshots

    def snapshot(self, folder: Path, notes: Mapping[str, Any] | None = None) -> float:
        if self._snapshots is None:
            raise RuntimeError("this engine was made without an optimizer; it has no state to snapshot")
        if self._count > 0:
            raise RuntimeError(
                "gradients of an unfinished step have been accumulated; take snapshots between two steps"
            )
        start, state = time.perf_counter(), self.state()
        if self.mesh is not None:
            for dimension in self.mesh.mesh_dim_names or ():
                if dimension in (NODES, "tp") and self.mesh[dimension].size() > 1:
                    check_alike(state, self.mesh[dimension])
        averaged = None if self._average is None else self._average.version
        own = {"steps": self.steps, "averaged": averaged, "notes": dict(notes or {})}
        self._snapshots.snapshot(folder, state, own)
        return time.perf_counter() - start

    def written(self, *, wait: bool) -> bool:
        return self._snapshots is None or self._snapshots.written(wait=wait)

    def restore(self, folder: Path) -> Mapping[str, Any]:
        if self._snapshots is None:
            raise RuntimeError("this engine was made without an optimizer; it has no state to restore")
        stored, state = Snapshot(folder), self.state()
        if in_8_bits(stored.shapes) != in_8_bits(state):
            kept, now = ("8bit", "float32") if in_8_bits(stored.shapes) else ("float32", "8bit")
            raise UserError(
                f"snapshot {folder} has moments={kept!r}, but moments={now!r} is set; "
                "keep the snapshot's setting"
            )
        if self.optimizer is not None and has_momentum(stored.shapes) != has_momentum(state):
            kept, now = ("muon", "adamw") if has_momentum(stored.shapes) else ("adamw", "muon")
            raise UserError(
                f"snapshot {folder} has optimizer={kept!r}, but optimizer={now!r} is set; "
                "keep the snapshot's setting"
            )
        stored.check(state)
        for name, tensor in state.items():
            stored.fill(name, tensor)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._count = self._loss_total = 0.0
        same_ranks = stored.num_ranks == self.context.world_size
        notes = stored.notes_of(self.context.rank if same_ranks else 0)
        if self._average is not None:
            self._copies.forget_frozen()
            self._average.put(self._sharded.own_tensors(), notes["averaged"])
        if same_ranks:
            set_random_states(notes["random"])
        self.steps = notes["steps"]
        return notes["notes"]

    def state(self) -> dict[str, Tensor]:
        if self._average is not None:
            averaged = self._average.state(self._sharded.own_tensors())
            return {f"model.{name}": tensor for name, tensor in averaged.items()}
        assert self.optimizer is not None
        state: dict[str, Tensor] = {}
        for name, tensor in self._sharded.own_tensors().items():
            if self._sharded.adapter is not None and not is_trained(name):
                continue
            state[f"model.{name}"] = tensor.detach()
            if tensor.requires_grad:
                of_tensor = self.optimizer.state_of(tensor)
                state |= {f"optimizer.{name}.{key}": value for key, value in of_tensor.items()}
        return state

    def _write_stored(self, stored: Snapshot, folder: Path) -> None:
        """Write the model's folder from a snapshot, because the model may have trained further."""
        only_adapter = self._sharded.adapter is not None
        dtype = torch.float32 if only_adapter else getattr(torch, self.config.dtype)
        names = [name for name in stored.shapes if name.startswith("model.")]
        tensors = {name.removeprefix("model."): stored.full(name, dtype) for name in names}
        self._sharded.write_folder(folder, tensors, self._disk, only_adapter=only_adapter)

    # Device memory

    @in_phase("the return of the model to the GPU")
    def onload(self) -> None:
        self._move(self.device)

    def offload(self) -> None:
        self._move(torch.device("cpu"))
        release_device_memory(self.device)  # also if only freed memory of passes is there

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu" or self.config.offload == "everything":
            return
        self._sharded.reshard()
        self._copies.move(self.model, self.optimizer, device)

    def close(self) -> None:
        try:
            if self._snapshots is not None:
                self._snapshots.close()
        finally:
            self._copies.close()
            if self.mesh is not None and dist.is_initialized():
                self._close_mesh()


def _computed_for(loss: Loss) -> dict[str, bool]:
    """Return what the head must compute for a loss, besides log-probabilities."""
    return {"entropy": loss.needs_entropy, "collisions": LOG_COLLISIONS in loss.may_read}


def _columns_of(loss: Loss, batch: Batch) -> list[str]:
    return [c for c in (*loss.reads, *loss.may_read) if c in batch]


# Loading


def _load_model(
    config: ModelConfig,
    context: Context,
    training: TrainingConfig | None,
    head: Head,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> tuple[ShardedModel, ImageReader | None, int]:
    """Load a model, sharded before it reads its values. All ranks must call this function. Also
    return its image processor, if it reads images, and the bytes that this rank read from files."""
    scalar, lora = head != "logprobs", training and training.lora
    again = training is not None and training.activation_checkpointing
    folder = node_folder(config.model, advance=context.advance)
    build = partial(
        build_causal_lm, config.model, folder, head, context.seed, activation_checkpointing=again
    )
    # `plain`, as `transformers` built it, is the reference of the check below.
    plain, skeleton = build(), build()
    weights = open_stored(config.model, folder, plain, share=(context.rank, context.world_size))
    response = ResponseModel(skeleton.causal_lm, scalar=scalar)
    response.requires_grad_(training is not None)
    made, adapter = dict(skeleton.made), None
    if training is None:
        keep_in(response, getattr(torch, config.dtype))
    if lora is not None:
        adapter = Adapter(skeleton.causal_lm, lora, getattr(torch, config.dtype), context.seed)
        made |= adapter.made
        adapter.made.clear()
    if mesh is not None and _gathers_in_node(config, context, response, device, mesh):
        mesh = split_by_node(mesh, context)
    sharded = ShardedModel(config, response, mesh, device, adapter)
    sharded.fill(weights, made)
    bytes_read = weights.bytes_read
    del weights, made  # frees the full tensors if the model was loaded completely
    move_buffers(plain.causal_lm, device)
    tried = ResponseModel(plain.causal_lm, scalar=scalar)
    images = ImageReader(config.model, folder) if tried.sees else None
    full = sharded.full_base_tensors()
    agreement = find_agreement(tried, full, by_layer=mesh is not None, images=images)
    sharded.check_head(agreement.head_form)
    agreement.put_on(response)
    sharded.share_tokens(group_timeout(context))
    if config.compile:
        compile_layers(response, device)
    return sharded, images, bytes_read


def _gathers_in_node(
    config: ModelConfig,
    context: Context,
    model: ResponseModel,
    device: torch.device,
    mesh: DeviceMesh,
) -> bool:
    ranks, nodes = context.world_size, context.nodes
    if config.gather == "node" and (ranks // nodes) % config.replica_ranks:
        raise UserError(
            f'gather="node": a replica of {context.name!r} has {config.replica_ranks} ranks, and a node '
            f'has {ranks // nodes}; set gather="layerwise"'
        )
    memory = 0
    if device.type == "cuda":  # all ranks must decide alike, so the smallest GPU counts
        least = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
        for dimension in range(mesh.ndim):
            dist.all_reduce(least, dist.ReduceOp.MIN, mesh.get_group(dimension))
        memory = int(least.item())
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return gathers_in_node(
        config, frozen=frozen, trained=trained, ranks=ranks, nodes=nodes, gpu_bytes=memory
    )


# Compiled layers (`torch.compile`). FSDP's gathering and activation checkpointing stay outside the
# compiled code. Attention over packed rows depends on lengths known only to the host, so it runs
# uncompiled between two compiled parts. Layers of the same kind share compiled code. The number of
# tokens is dynamic, so new microbatches cause no recompilation.


_BACKEND = "inductor"


def compile_layers(model: ResponseModel, device: torch.device) -> None:
    if model.routers is not None:
        raise UserError(
            f"compile=True: model {model.causal_lm.name_or_path!r} is a mixture of experts, "
            "whose routers are observed layer by layer; leave it out"
        )
    if not model.layers:
        raise UserError(
            f"compile=True: the layers of model {model.causal_lm.name_or_path!r} are "
            "unknown; leave it out"
        )
    _check_compiler(device)
    for layer in model.layers:
        cast(Any, layer).forward = torch.compile(layer.forward, backend=_BACKEND, dynamic=True)


def _check_compiler(device: torch.device) -> None:
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise UserError(
                "compile=True needs a C++ compiler on a CPU, but there is none (g++, or "
                f"the one in CXX): {error}"
            ) from None
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise UserError(
            "compile=True needs Triton on a GPU, but this torch has none: pip install triton"
        )
