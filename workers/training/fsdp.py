"""FsdpEngine: training with FSDP2, optionally x tensor parallel, on `transformers` models. One process: plain torch."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ...algorithms.loss import Loss, PackedRows
from ...dataflow.batch import Batch
from ...dataflow.buffer.disk import Disk
from ...dataflow.column import GROUP_ID, PROMPT_IDS, RESPONSE_IDS, TEMPERATURE
from ...dataflow.errors import UserError
from ...dataflow.metrics import Mean, Metric, Metrics, Sum, merge
from ..dispatch import Coordinates
from ..model_folder import find_model_config, read_model_config, refusals_named
from ..worker import Context
from .adapter import Adapter, is_adapter, is_trained, tensor_parallel_plan
from .checkpoint import SnapshotWriter, StoredState, local_part, set_random_states, write_model
from .engine import Head, ModelConfig, OptimizerConfig, OptimizerStep, check_rows, plan_microbatches, tokens_of
from .lora import Lora
from .precision import rounded_parameters
from .replicated import check_alike
from .response_model import ResponseModel
from .scalar_head import put_scalar_head, scalar_settings

_ONE_UNIT_PARAMETERS = 16_000_000
"""Below this many parameters the model is gathered as one unit: more, smaller collectives only cost latency."""
_GATHER_ONCE_BYTES = 2 * 2**30
"""What gather="auto" takes for little."""


class FsdpEngine:
    """One model over the ranks of a group: dp replicas outermost, each of `tensor_parallel` ranks.

    The gradient of a step is that of the summed loss over the global count, whatever the ranks, microbatches and row order:
    a rank without rows takes part in the collectives with a token that weighs nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        optimizer: OptimizerConfig | None = None,
        *,
        head: Head = "logprobs",
        lora: Lora | None = None,
        activation_checkpointing: bool = False,
        disk: Disk | None = None,
    ) -> None:
        self.config, self.context, self.schedule = config, context, optimizer
        self.steps = 0
        """Optimizer steps applied."""
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.mesh = _mesh(context, config.tensor_parallel, self.device)
        self.microbatch_tokens = config.microbatch_tokens or (1280 if self.device.type == "cpu" else 16384)
        self.head: Head = head
        causal_lm = _load(str(config.model), head, context.seed)
        if activation_checkpointing:
            _checkpoint_activations(causal_lm)
        self.model = ResponseModel(causal_lm, scalar=head != "logprobs")
        self.adapter = None
        """What is trained, in place of the model itself."""
        self.vocabulary = self.model.causal_lm.get_input_embeddings().weight.shape[0]
        self.model.requires_grad_(optimizer is not None)
        if lora is not None:
            with torch.no_grad():
                self.adapter = Adapter(self.model.causal_lm, lora, getattr(torch, config.dtype), context.seed)
        self.gathers_once = self._distribute()
        self.optimizer = None if optimizer is None else self._make_optimizer(optimizer)
        self._disk = disk or Disk()
        self._snapshots: SnapshotWriter | None = None
        if optimizer is not None:
            self._snapshots = SnapshotWriter(context, self.device, self._write_stored, self._disk)
        self._count = self._loss_total = 0.0
        """Of the rows whose gradients have been accumulated since the last step: what the sum is divided by, and the sum."""

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates(*(divmod(self.context.rank, self.config.tensor_parallel)))

    # Log-probabilities and steps

    def logprobs(self, batch: Batch, *, adapter: bool = True) -> tuple[np.ndarray, np.ndarray]:
        return self._of_tokens(batch, "log-probabilities", self.head == "logprobs", adapter)

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        return self._of_tokens(batch, "values", self.head != "logprobs")

    def _of_tokens(self, batch: Batch, what: str, has_it: bool, adapter: bool = True) -> tuple[np.ndarray, np.ndarray]:
        if not has_it:
            raise RuntimeError(f"this engine was made with head={self.head!r}; it computes no {what}")
        rows = self._pack(batch, ())
        out = np.zeros(int(rows.response[1][-1]), dtype=np.float32)
        plan = rows.plan(self.microbatch_tokens, packed=self.model.packs)
        with (
            torch.no_grad(),
            self._precision(),
            nullcontext() if adapter or self.adapter is None else self.adapter.off(),
        ):
            for part in self._padded_plan(plan, self._over_replicas(len(plan))):
                values, _ = self._forward(rows, part)
                if len(part):
                    out[tokens_of(rows.response[1], part)] = values.cpu().numpy()
        self._reshard()
        return out, rows.response[1]

    def accumulate(self, batch: Batch, loss: Loss, *, last: bool) -> Metrics:
        if self.optimizer is None:
            raise RuntimeError("this engine was made without an optimizer; it computes log-probabilities only")
        rows = self._pack(batch, [c for c in (*loss.reads, *loss.may_read) if c in batch])
        groups = batch.numpy(GROUP_ID) if loss.whole_groups else None
        plan = rows.plan(self.microbatch_tokens, packed=self.model.packs, groups=groups)
        everything = rows.packed()
        local_count, num_tokens = loss.count(everything), float(everything.trained.sum())
        replicas = self._over_replicas(len(plan), local_count)
        self._count += float(replicas[:, 1].sum())
        parts: list[Metrics] = []
        loss_total = torch.zeros((), device=self.device)
        plan = self._padded_plan(plan, replicas) or [np.empty(0, dtype=np.int64)] * last
        for number, part in enumerate(plan if self._count > 0 else ()):
            self._sync_gradients(last and number == len(plan) - 1)
            with self._precision():
                logprobs, entropy = self._forward(rows, part, entropy=loss.needs_entropy)
                if len(part):
                    loss_sum, metrics = loss(logprobs, rows.packed(part, entropy))
                    parts.append(metrics)
                else:
                    loss_sum = 0.0 * logprobs.sum()
                (loss_sum * len(replicas)).backward()  # FSDP averages over replicas; the loss is a sum
            loss_total += loss_sum.detach()
        if last:
            self._reshard()
        total = loss_total.item()
        self._loss_total += total
        return {**merge(parts), "loss": Mean(total, local_count), "tokens": Sum(num_tokens)}

    def apply(self) -> OptimizerStep:
        step = self._apply() if self._count > 0 else OptimizerStep({}, applied=False)
        self._count = self._loss_total = 0.0
        once = float(self.coordinates.dp == 0)  # said once, not by every replica
        counts = {"skipped_steps": Sum(once * (not step.applied)), "bad_steps": Sum(once * (step.bad is not None))}
        return replace(step, metrics={**step.metrics, **counts})

    def losses(self, batch: Batch, loss: Loss) -> np.ndarray:
        rows = self._pack(batch, [c for c in (*loss.reads, *loss.may_read) if c in batch])
        # What a loss takes together: a group, or each row by itself.
        unit = batch.numpy(GROUP_ID) if loss.whole_groups else np.arange(len(batch))
        plan = rows.plan(self.microbatch_tokens, packed=self.model.packs, groups=unit if loss.whole_groups else None)
        lengths = np.diff(rows.response[1])
        out = np.zeros(len(batch), dtype=np.float32)
        with torch.no_grad(), self._precision():
            for part in self._padded_plan(plan, self._over_replicas(len(plan))):
                logprobs, entropy = self._forward(rows, part, entropy=loss.needs_entropy)
                of_token = np.repeat(unit[part], lengths[part])
                for one in np.unique(unit[part]):
                    mine = part[unit[part] == one]
                    tokens = torch.from_numpy(np.flatnonzero(of_token == one)).to(self.device)
                    packed = rows.packed(mine, None if entropy is None else entropy[tokens])
                    out[mine] = loss(logprobs[tokens], packed)[0].item() / len(mine)
        self._reshard()
        return out

    def _apply(self) -> OptimizerStep:
        """Clip and step, unless the step is bad on any rank."""
        assert self.optimizer is not None and self.schedule is not None
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            local_part(gradient).div_(self._count)
        norm = gradient_norm(gradients, also=0.0 * self._loss_total)  # 0 * inf is nan, and reaches every rank
        metrics: dict[str, Metric] = {"grad_norm": Mean(norm)} if math.isfinite(norm) else {}
        bad = self._why_bad(norm)
        if bad is None:
            limit = self.schedule.max_grad_norm
            if limit is not None and norm > limit:
                for gradient in gradients:
                    local_part(gradient).mul_(limit / norm)
            rate = self.schedule.rate(self.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.steps += 1
            metrics["learning_rate"] = Mean(rate)
        self.optimizer.zero_grad()
        return OptimizerStep(metrics, applied=bad is None, bad=bad)

    def _why_bad(self, norm: float) -> str | None:
        """Of a gradient norm that is equal on all ranks; None: the step can be taken."""
        assert self.schedule is not None
        limit = self.schedule.skip_above_grad_norm
        if math.isfinite(norm):
            above = limit is not None and norm > limit
            return f"the norm of the gradient is {norm:.4g}, above skip_above_grad_norm={limit:g}" if above else None
        loss = sum(self._over_replicas(self._loss_total)[:, 0].tolist()) / self._count
        return "the norm of the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"

    def _forward(self, rows: _Rows, part: np.ndarray, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        self.context.advance()
        inputs = rows.inputs(part)
        arrays = [None if array is None else torch.from_numpy(array).to(self.device) for array in inputs]
        return self.model(*arrays, entropy=entropy)

    def _precision(self) -> AbstractContextManager[object]:
        """What forward and backward passes are in."""
        if self.config.dtype == "float32" or self.mesh is not None:  # FSDP rounds by its own policy
            return nullcontext()
        return rounded_parameters(self.model, getattr(torch, self.config.dtype), but=self.model.scalar_head)

    def _pack(self, batch: Batch, columns: Iterable[str]) -> _Rows:
        columns = list(columns)
        check_rows(batch, columns)
        for name in (PROMPT_IDS, RESPONSE_IDS):
            values, _ = batch.ragged_numpy(name)
            if len(values) and not 0 <= int(values.min()) <= int(values.max()) < self.vocabulary:
                wrong = values.max() if values.max() >= self.vocabulary else values.min()
                raise UserError(
                    f"column {str(name)!r} has token id {wrong}; {self.config.model} has ids 0 to {self.vocabulary - 1}"
                )
        temperatures = None
        if TEMPERATURE in batch:
            found = batch.numpy(TEMPERATURE)
            if not np.isin(found, (0.0, 1.0)).all():  # 0 is greedy: it has no distribution but that of the plain logits
                temperatures = np.where(found == 0, np.float32(1), found)
        ragged = {c: torch.tensor(batch.ragged_numpy(c)[0]) for c in columns if _is_list(batch, c)}
        scalars = {c: torch.tensor(batch.numpy(c)) for c in columns if not _is_list(batch, c)}
        sequences = (batch.ragged_numpy(PROMPT_IDS), batch.ragged_numpy(RESPONSE_IDS))
        return _Rows(*sequences, temperatures, ragged, scalars, self.device, reads_last=self.head == "rewards")

    # Collectives

    def _over_replicas(self, *numbers: float) -> np.ndarray:
        """[replicas, numbers] float64: every replica's numbers."""
        own = torch.tensor([numbers], dtype=torch.float64, device=self.device)
        if self.mesh is None:
            return own.numpy(force=True)
        mesh = self.mesh["dp"]
        gathered = torch.zeros(mesh.size(), len(numbers), dtype=torch.float64, device=self.device)
        gathered[mesh.get_local_rank()] = own[0]
        dist.all_reduce(gathered, group=mesh.get_group())
        return gathered.numpy(force=True)

    def _padded_plan(self, plan: list[np.ndarray], replicas: np.ndarray) -> list[np.ndarray]:
        """The plan, with empty microbatches where this rank must take part in the collectives of others."""
        wanted = int(replicas[:, 0].max())
        if self.gathers_once:  # one gathering and one reduction a step, in whichever microbatch is the last
            wanted = min(wanted, max(1, len(plan)))
        return plan + [np.empty(0, dtype=np.int64)] * (wanted - len(plan))

    def _sync_gradients(self, last: bool) -> None:
        if isinstance(self.model, FSDPModule) and self.gathers_once:
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)

    def _reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _distribute(self) -> bool:
        """Spread the parameters over the mesh; returns whether they are gathered once a step."""
        mesh = self.mesh
        if mesh is None:
            self.model.to(self.device)
            return True
        numel = sum(p.numel() for p in self.model.parameters())
        once = self.config.gather == "once" or (self.config.gather == "auto" and 4 * numel < _GATHER_ONCE_BYTES)
        layers = self.model.layers
        if self.config.tensor_parallel > 1:
            # Embeddings, norms and the head are the same on all ranks of a replica, and get the same gradient there.
            for layer in layers:
                parallelize_module(layer, mesh["tp"], tensor_parallel_plan(layer, _TENSOR_PARALLEL_PLAN))
        precision = MixedPrecisionPolicy()
        if self.config.dtype == "bfloat16":
            # Inputs stay as they are: of those with floating point the model rounds itself what it must, and not temperatures.
            precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            if self.model.scalar_head is not None:  # half precision is too coarse for values
                fully_shard(self.model.scalar_head, mesh=mesh["dp"], reshard_after_forward=False)
        units = [] if once and numel < _ONE_UNIT_PARAMETERS else layers
        for layer in units:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=not once, mp_policy=precision)
        fully_shard(self.model, mesh=mesh["dp"], reshard_after_forward=False, mp_policy=precision)
        return once

    def _make_optimizer(self, config: OptimizerConfig) -> torch.optim.AdamW:
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None  # one operation takes one mesh
            groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
        return torch.optim.AdamW(
            [
                {"params": parameters, "weight_decay": config.weight_decay if cast(Any, key)[0] else 0.0}
                for key, parameters in groups.items()
            ],
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,
        )

    # Weights

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        dtype = getattr(torch, self.config.dtype)
        for unit, names in self._names_by_unit():
            own = self._own_tensors()
            # Those of an adapter each by itself, because a unit is gathered in the dtype that is computed in.
            adapter = {name: _whole(own[name]) for name in names if is_adapter(name)}
            # One collective for all parameters of a unit; beside its own part a rank holds one gathered unit at a time.
            if unit is not None:
                unit.unshard()
            try:
                own = self._own_tensors()
                for name in names:
                    if name in adapter:
                        continue
                    full = _whole(own[name])
                    if self.adapter is not None:
                        name, full = self.adapter.merged(name, full, adapter)
                    yield name, full.to(dtype) if full.is_floating_point() else full
            finally:
                if unit is not None:
                    unit.reshard()

    def _names_by_unit(self) -> list[tuple[FSDPModule | None, list[str]]]:
        """Tensors by the FSDP unit that gathers them: the innermost one around them."""
        units = {name: module for name, module in self.model.named_modules() if isinstance(module, FSDPModule)}
        found: dict[str | None, list[str]] = {}
        for name in self._own_tensors():
            inside = f"causal_lm.{name}"
            around = [unit for unit in units if not unit or inside.startswith(f"{unit}.")]
            found.setdefault(max(around, key=len, default=None), []).append(name)
        return [(None if unit is None else units[unit], names) for unit, names in found.items()]

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self.adapter is not None:
            raise RuntimeError("a model with an adapter takes over no weights: what of them would be the adapter's?")
        own = self._own_tensors()
        missing = set(own)
        with torch.no_grad():
            for name, tensor in tensors:
                if name not in own:
                    raise UserError(f"{self.config.model} has no tensor {name!r}")
                target = own[name]
                if target.shape != tensor.shape:
                    raise UserError(
                        f"{self.config.model}: {name!r} has shape {list(target.shape)}, not {list(tensor.shape)}"
                    )
                missing.discard(name)
                if isinstance(target, DTensor):
                    full = tensor.to(self.device, target.dtype)
                    part = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
                    target.to_local().copy_(part.to_local())
                else:
                    target.copy_(tensor)
        if missing:
            raise UserError(f"weights for {self.config.model} came without {', '.join(sorted(missing)[:5])}")

    def save(self, folder: Path, *, merged: bool = False) -> None:
        gathered: dict[str, Tensor] = {}
        only_adapter = self.adapter is not None and not merged
        for name, tensor in self._adapter_tensors() if only_adapter else self.named_tensors():
            if self.context.rank == 0:
                gathered[name] = tensor.to("cpu", copy=True)
        if self.context.rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            written = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
            written.chmod(0o755)
            (self._write_adapter if only_adapter else self._write_model)(written, gathered)
            if folder.exists():
                shutil.rmtree(folder)
            written.rename(folder)  # a folder under its name is a whole one
        if self.mesh is not None:
            dist.barrier()  # no rank goes on to read what is still being written

    def _write_model(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        source = find_model_config(self.config.model).parent
        settings = scalar_settings(read_model_config(self.config.model)) if self.model.scalar else {}
        settings["dtype"] = self.config.dtype
        write_model(folder, self.model.causal_lm, tensors, source, settings, self._disk)

    def _write_adapter(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        assert self.adapter is not None
        source = find_model_config(self.config.model).parent
        self.adapter.write(folder, tensors, source, self._disk)

    def _adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters of the adapter, and of a scalar head, in float32, gathered one at a time."""
        for name, tensor in self._own_tensors().items():
            if is_trained(name):
                yield name, _whole(tensor)

    def _own_tensors(self) -> Mapping[str, Tensor]:
        """Parameters and buffers that are saved, by Hugging Face name; tied ones once."""
        module = self.model.causal_lm
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        buffers = {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}
        return {**dict(module.named_parameters()), **buffers}

    # Checkpoints

    def snapshot(self, folder: Path, notes: Mapping[str, Any] | None = None) -> float:
        if self._snapshots is None:
            raise RuntimeError("this engine was made without an optimizer; it has no state to go on with")
        if self._count > 0:
            raise RuntimeError(
                "gradients of the step to come have been accumulated; a snapshot is taken between two steps"
            )
        start, state = time.perf_counter(), self._state()
        if self.mesh is not None and self.config.tensor_parallel > 1:
            check_alike(state, self.mesh["tp"])
        self._snapshots.snapshot(folder, state, {"steps": self.steps, "notes": dict(notes or {})})
        return time.perf_counter() - start

    def written(self, *, wait: bool) -> bool:
        return self._snapshots is None or self._snapshots.written(wait=wait)

    def restore(self, folder: Path) -> Mapping[str, Any]:
        if self.optimizer is None:
            raise RuntimeError("this engine was made without an optimizer; it has no state to restore")
        stored, state = StoredState(folder), self._state()
        stored.check(state)
        for name, tensor in state.items():
            stored.read(name, tensor)
        self.optimizer.zero_grad()
        self._count = self._loss_total = 0.0
        same_ranks = stored.num_ranks == self.context.world_size
        known = stored.known(self.context.rank if same_ranks else 0)
        if same_ranks:
            set_random_states(known["random"])
        self.steps = known["steps"]
        return known["notes"]

    def _state(self) -> dict[str, Tensor]:
        """All that training changes: tensors of the model, and AdamW's state of each parameter, made when there is none yet."""
        assert self.optimizer is not None
        state: dict[str, Tensor] = {}
        for name, tensor in self._own_tensors().items():
            if self.adapter is not None and not is_trained(name):
                continue
            state[f"model.{name}"] = tensor.detach()
            if tensor.requires_grad:
                moments = self.optimizer.state[tensor]
                if not moments:  # as AdamW makes it at its first step
                    moments["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                    moments["exp_avg"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
                    moments["exp_avg_sq"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
                state |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
        return state

    def _write_stored(self, stored: StoredState, folder: Path) -> None:
        """Write the folder of the model, or of its adapter, from a checkpoint's files: the model itself is being trained."""
        dtype = getattr(torch, self.config.dtype) if self.adapter is None else torch.float32
        names = [name for name in stored.shapes if name.startswith("model.")]
        tensors = {name.removeprefix("model."): stored.full(name, dtype) for name in names}
        (self._write_model if self.adapter is None else self._write_adapter)(folder, tensors)

    # Device memory

    def onload(self) -> None:
        self._move(self.device)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        self.model.to(device)
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)
        torch.cuda.empty_cache()

    def close(self) -> None:
        try:
            if self._snapshots is not None:
                self._snapshots.close()
        finally:
            if self.mesh is not None and dist.is_initialized():
                dist.destroy_process_group()


@dataclass(frozen=True)
class _Rows:
    """The rows of one call: tokens on the host, what a loss reads on the device."""

    prompt: tuple[np.ndarray, np.ndarray]
    response: tuple[np.ndarray, np.ndarray]
    temperatures: np.ndarray | None
    ragged: Mapping[str, Tensor]
    scalars: Mapping[str, Tensor]
    device: torch.device
    reads_last: bool = False
    """Of each response token the position itself is read, and not the one before it."""

    def plan(self, max_tokens: int, *, packed: bool, groups: np.ndarray | None = None) -> list[np.ndarray]:
        """Microbatches of the rows that have a response; rows of equal `groups` stay together."""
        prompts, responses = np.diff(self.prompt[1]), np.diff(self.response[1])
        rows = np.flatnonzero(responses)
        num_inputs = (prompts + responses - 1 + self.reads_last)[rows]  # else the last token is only predicted
        groups = None if groups is None else groups[rows]
        return [rows[part] for part in plan_microbatches(num_inputs, max_tokens, packed=packed, groups=groups)]

    def inputs(self, part: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Arguments of `ResponseModel` for these rows; for none, one token that nobody reads."""
        if not len(part):
            zero = np.zeros(1, dtype=np.int64)
            return zero, zero + 1, zero, zero, None
        (prompts, p_starts), (responses, r_starts) = self.prompt, self.response
        ids, predicting, before = [], [], 0
        for i in part:
            prompt, response = prompts[p_starts[i] : p_starts[i + 1]], responses[r_starts[i] : r_starts[i + 1]]
            inputs = len(response) - 1 + self.reads_last
            ids += [prompt, response[:inputs]]
            predicting.append(np.arange(len(response)) + (before + len(prompt) - 1 + self.reads_last))
            before += len(prompt) + inputs
        lengths = (np.diff(p_starts)[part] + np.diff(r_starts)[part] - 1 + self.reads_last).astype(np.int64)
        targets = responses[tokens_of(r_starts, part)].astype(np.int64)
        temperatures = None
        if self.temperatures is not None:
            temperatures = np.repeat(self.temperatures[part], np.diff(r_starts)[part])
        return np.concatenate(ids).astype(np.int64), lengths, np.concatenate(predicting), targets, temperatures

    def packed(self, part: np.ndarray | None = None, entropy: Tensor | None = None) -> PackedRows:
        """These rows (None: all) as a loss reads them, with the entropy [T] of their tokens where it was computed."""
        cu_seqlens = self.response[1]
        if part is None:
            lengths, tokens, rows = np.diff(cu_seqlens), slice(None), slice(None)
        else:
            lengths, tokens, rows = (
                np.diff(cu_seqlens)[part],
                torch.from_numpy(tokens_of(cu_seqlens, part)),
                torch.from_numpy(part),
            )
        columns = {c: v[tokens] for c, v in self.ragged.items()} | {c: v[rows] for c, v in self.scalars.items()}
        packed = PackedRows.of(torch.from_numpy(lengths.astype(np.int64)), **columns)
        columns = {c: v.to(self.device) for c, v in packed.columns.items()}  # itself, where it is there already
        if entropy is not None:
            columns["entropy"] = entropy
        return PackedRows(packed.cu_seqlens.to(self.device), columns)


def _whole(tensor: Tensor) -> Tensor:
    """Without a gradient; gathered where it lies on several ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_norm(gradients: Iterable[Tensor], also: float = 0.0) -> float:
    """2-norm of all gradients together, each element counted once wherever it lies; equal on all ranks.

    `also` is added on every rank before the sums are exchanged: a nan there makes the norm nan on every rank.
    """
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh, shards = None, ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            shards = tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())
        groups.setdefault((mesh, shards), []).append(local_part(gradient))
    total = 0.0
    for (mesh, shards), locals_ in groups.items():
        squares = nn.utils.get_total_norm(locals_).double().square() + also
        for dimension in shards:
            assert mesh is not None
            dist.all_reduce(squares, group=mesh.get_group(dimension))
        total += squares.item()
    return math.sqrt(total) if math.isfinite(total) else math.nan


_TENSOR_PARALLEL_PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def _mesh(context: Context, tensor_parallel: int, device: torch.device) -> DeviceMesh | None:
    """The (dp, tp) mesh of the group, joined through the rendezvous; None for a group of one, which needs no sockets."""
    if context.world_size % tensor_parallel:
        raise UserError(
            f"tensor_parallel={tensor_parallel} does not divide the {context.world_size} ranks of {context.name!r}"
        )
    if context.world_size == 1:
        return None
    if context.rendezvous is None:
        raise UserError(f"worker group {context.name!r} has {context.world_size} ranks but no rendezvous")
    if context.rendezvous.startswith(("file://", "tcp://127.0.0.1", "tcp://localhost")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: do not listen to others
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=context.rendezvous, rank=context.rank, world_size=context.world_size)
    shape = (context.world_size // tensor_parallel, tensor_parallel)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))


def _load(model: str, head: Head, seed: int) -> Any:
    """The model in float32 on the host, as it is when it generates: nothing in it is random.

    Raises:
        UserError: `transformers` refuses it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one per rank would garble the terminal
    said = logging.get_verbosity()
    if head != "logprobs":  # else it says that there is no weight for one head, and none to take the other's
        logging.set_verbosity_error()
    try:
        with refusals_named(model, "cannot be trained"):
            settings = AutoConfig.from_pretrained(model, local_files_only=True)
            _switch_off_dropout(settings)
            causal_lm = AutoModelForCausalLM.from_pretrained(
                model, config=settings, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            )
    finally:
        logging.set_verbosity(said)
    if head != "logprobs":
        put_scalar_head(causal_lm, model, seed)
    return causal_lm


def _switch_off_dropout(settings: Any) -> None:
    """Set it to zero wherever it stands among the settings.

    A policy that drops out is not the one that sampled. The model is in evaluation mode, where nothing is random; but layers whose
    activations are computed a second time must be in training mode, and may drop out by themselves.
    """
    for name, value in vars(settings).items():
        if hasattr(value, "to_dict"):
            _switch_off_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(settings, name, 0.0)


def _checkpoint_activations(causal_lm: Any) -> None:
    """Compute activations again in the backward pass, of each layer for itself."""
    try:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"activation_checkpointing=True: transformers refuses it ({error})") from error
    for module in causal_lm.modules():
        module.training = bool(getattr(module, "gradient_checkpointing", False))  # it alone looks at that


def _is_list(batch: Batch, column: str) -> bool:
    import pyarrow as pa

    return pa.types.is_list(batch[column].type)
