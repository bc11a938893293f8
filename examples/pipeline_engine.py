"""A custom training engine: pipeline parallelism (1F1B) with plain torch and `transformers`.

    actor = weft.group(weft.ActorWorker, model=..., engine=PipelineEngine, pipeline_parallel=2)
    weft.Driver(..., placement={"actor": weft.Place(pool, ranks=2)})

It implements `weft.workers.training.engine.TrainingEngine` for models with Llama's structure
(embedding, layers, norm, head). To stay short, it supports only float32, one replica and padded
rows. Each rank has the layers of one pipeline stage. It sends activations to the next rank and
gradients to the previous one, in the order of Weft's pipeline schedule.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from weft.algorithms.loss import Loss
from weft.dataflow.batch import Batch
from weft.dataflow.column import GROUP_ID
from weft.dataflow.errors import UserError
from weft.dataflow.metrics import Mean, Metrics, Sum, merge
from weft.resharding.formulas import PipelineStages
from weft.resharding.incoming import IncomingWeights
from weft.resharding.weights import Box, TensorPart
from weft.workers.dispatch import Coordinates
from weft.workers.models.model_folder import find_model_config
from weft.workers.training.engine import Head, ModelConfig, OptimizerStep, TrainingConfig
from weft.workers.training.microbatches import Microbatches
from weft.workers.training.pipeline_schedule import one_forward_one_backward
from weft.workers.worker import Context

EMBEDDING = "model.embed_tokens.weight"


class PipelineEngine:
    """A `TrainingEngine` in which rank i computes pipeline stage i."""

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        training: TrainingConfig | None = None,
        *,
        head: Head = "logprobs",
    ) -> None:
        asked = training and (training.lora or training.activation_checkpointing or training.router_loss)
        if head != "logprobs" or asked or config.dtype != "float32":
            raise UserError("PipelineEngine only supports full training of policies in float32")
        if context.world_size != config.pipeline_parallel:
            raise UserError(
                f"a pipeline of {config.pipeline_parallel} stages needs as many ranks, not {context.world_size}"
            )
        self.config, self.context, self.training = config, context, training
        self.stage, self.stages = context.rank, context.world_size
        if context.rendezvous is not None:
            if context.rendezvous.on_one_machine:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # use only the loopback interface
            store = context.rendezvous.join(context.name, context.rank, context.world_size)
            dist.init_process_group("gloo", store=store, rank=self.stage, world_size=self.stages)
        self.causal_lm: Any = AutoModelForCausalLM.from_pretrained(
            config.model, dtype=torch.float32
        ).eval()
        self.owner = self._cut()
        self.parameters: dict[str, nn.Parameter] = dict(self.causal_lm.named_parameters())
        self.optimizer = None
        if training is not None:
            decayed = [p for p in self.parameters.values() if p.ndim > 1]
            others = [p for p in self.parameters.values() if p.ndim == 1]
            kinds = [
                {"params": decayed, "weight_decay": training.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(
                [k for k in kinds if k["params"]], lr=training.learning_rate, betas=training.betas
            )
        self.steps, self.count = 0, 0.0
        self.sent: list[Any] = []
        """Sends in progress, as (work, tensor), to keep the tensors' memory alive."""

    def _cut(self) -> dict[str, int]:
        """Replace the layers of other stages with identities. Return a mapping from each parameter
        name of the whole model to the stage that publishes it."""
        backbone, last = self.causal_lm.model, self.stages - 1
        self.shapes = {name: tuple(p.shape) for name, p in self.causal_lm.named_parameters()}
        self.tied = self.causal_lm.lm_head.weight is backbone.embed_tokens.weight and self.stages > 1
        self.vocabulary, self.width = backbone.embed_tokens.weight.shape
        cut = PipelineStages.equal(len(backbone.layers), self.stages)
        self.layers = [k for k in range(len(backbone.layers)) if cut.stage_of(k) == self.stage]
        for k in set(range(len(backbone.layers))) - set(self.layers):
            backbone.layers[k] = nn.Identity()
        if self.stage != last:
            backbone.norm = self.causal_lm.lm_head = nn.Identity()
        if self.stage and not (self.tied and self.stage == last):
            backbone.embed_tokens = nn.Identity()
        of_layer = {f"model.layers.{k}.": cut.stage_of(k) for k in range(len(backbone.layers))}
        numbered = {n: s for n in self.shapes for start, s in of_layer.items() if n.startswith(start)}
        return {name: numbered.get(name, 0 if name == EMBEDDING else last) for name in self.shapes}

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates(dp=0, pp=self.stage)

    # Passes

    def _forward(
        self, rows: Microbatches, part: np.ndarray, *, entropy: bool
    ) -> tuple[Tensor | None, Tensor, Any]:
        """Run the forward pass of this stage on a microbatch.

        Args:
            part: indices of the microbatch's rows.
            entropy: whether the last stage also returns entropies.

        Returns:
            Input, output and entropies of the stage. The input is None on the first stage, which
            reads token ids. The output is the log-probabilities [T] of response tokens on the last
            stage, hidden states on others. The entropies [T] are None on others.
        """
        self.context.advance()
        (prompts, p), (responses, r) = rows.prompt, rows.response
        own = [np.concatenate([prompts[p[i] : p[i + 1]], responses[r[i] : r[i + 1]]]) for i in part]
        ids = pad_sequence(
            [torch.from_numpy(tokens.astype(np.int64)) for tokens in own], batch_first=True
        )
        given = None
        if self.stage:
            given = self._receive((*ids.shape, self.width), self.stage - 1).requires_grad_(
                torch.is_grad_enabled()
            )
        hidden = self.causal_lm.model.embed_tokens(ids) if given is None else given
        positions = torch.arange(ids.shape[1])[None]
        rotations = self.causal_lm.model.rotary_emb(hidden, positions)
        for k in self.layers:  # causal attention ignores the padding at the end of rows
            hidden = self.causal_lm.model.layers[k](
                hidden, position_ids=positions, position_embeddings=rotations
            )
        if self.stage < self.stages - 1:
            return given, hidden, None
        lengths = np.diff(r)[part]
        before = [np.arange(n) + len(tokens) - n - 1 for n, tokens in zip(lengths, own, strict=True)]
        where = (
            torch.from_numpy(np.concatenate(before)),
            torch.from_numpy(np.repeat(np.arange(len(part)), lengths)),
        )
        logits = self.causal_lm.lm_head(self.causal_lm.model.norm(hidden[where[1], where[0]])).float()
        if rows.temperatures is not None:
            logits = logits / torch.from_numpy(np.repeat(rows.temperatures[part], lengths))[:, None]
        logits = logits.log_softmax(-1)
        logprobs = logits.gather(1, ids[where[1], where[0] + 1][:, None])[:, 0]
        return given, logprobs, -(logits.exp() * logits).sum(-1) if entropy else None

    def _send(self, tensor: Tensor, to: int) -> None:
        self.sent.append((dist.isend(tensor, to), tensor))

    def _receive(self, shape: tuple[int, ...], source: int) -> Tensor:
        tensor = torch.empty(shape)
        dist.recv(tensor, source)
        return tensor

    def _wait(self) -> None:
        for sending, _ in self.sent:
            sending.wait()
        self.sent = []

    def _rows(self, batch: Batch, columns: Sequence[str] = ()) -> Microbatches:
        owner = str(self.config.model)
        return Microbatches.from_batch(
            batch, columns, torch.device("cpu"), vocabulary=self.vocabulary, owner=owner
        )

    def _plan(self, rows: Microbatches, batch: Batch, loss: Loss | None = None) -> list[np.ndarray]:
        groups = batch.numpy(GROUP_ID) if loss is not None and loss.whole_groups else None
        return rows.plan(self.config.microbatch_tokens or 1280, packed=False, groups=groups)

    @torch.no_grad()
    def _of_tokens(self, batch: Batch, *, entropy: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return log-probabilities and entropies [T] of response tokens, and each row's offset in
        them. The last stage computes both and broadcasts them to all ranks."""
        rows = self._rows(batch)
        ends = rows.response[1]
        found = torch.zeros(2, int(ends[-1]))
        for part in self._plan(rows, batch):
            _, out, entropies = self._forward(rows, part, entropy=entropy)
            if self.stage < self.stages - 1:
                self._send(out, self.stage + 1)
                continue
            where = torch.from_numpy(np.concatenate([np.arange(ends[i], ends[i + 1]) for i in part]))
            found[0, where] = out
            if entropies is not None:
                found[1, where] = entropies
        self._wait()
        if self.stages > 1:
            dist.broadcast(found, self.stages - 1)
        return found[0].numpy(), found[1].numpy(), ends

    def logprobs(self, batch: Batch, *, adapter: bool = True) -> tuple[np.ndarray, np.ndarray]:
        logprobs, _, ends = self._of_tokens(batch, entropy=False)
        return logprobs, ends

    def logprobs_and_entropies(
        self, batch: Batch, *, collisions: bool = False
    ) -> tuple[np.ndarray, ...]:
        if collisions:
            raise RuntimeError("this engine computes no collisions; train with the default engine")
        return self._of_tokens(batch, entropy=True)

    def top_logprobs(self, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        raise RuntimeError("this engine cannot be a teacher of distillation; use weft.ReferenceWorker")

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        raise RuntimeError("a policy has no values; use a critic")

    def accumulate(self, batch: Batch, loss: Loss, *, last: bool) -> Metrics:
        rows = self._rows(batch, [c for c in (*loss.reads, *loss.may_read) if c in batch])
        plan = self._plan(rows, batch, loss)
        total, metrics, kept = 0.0, list[Metrics](), dict[int, tuple[Tensor | None, Tensor]]()
        for one in one_forward_one_backward(self.stages, len(plan)).passes[self.stage] if plan else ():
            part = plan[one.microbatch]
            if not one.backward:
                given, out, entropies = self._forward(rows, part, entropy=loss.needs_entropy)
                if self.stage < self.stages - 1:
                    self._send(out.detach(), self.stage + 1)
                else:
                    computed = {} if entropies is None else {"entropy": entropies}
                    out, said = loss(out, rows.packed(part, computed))
                    total += float(out.detach())
                    metrics.append(said)
                kept[one.microbatch] = given, out
                continue
            given, out = kept.pop(one.microbatch)
            out.backward(
                None
                if self.stage == self.stages - 1
                else self._receive(tuple(out.shape), self.stage + 1)
            )
            if given is not None and given.grad is not None:
                self._send(given.grad, self.stage - 1)
        self._wait()
        everything = rows.packed()
        self.count += loss.count(everything)
        # The driver keeps only the metrics of the last stage.
        known = {
            "loss": Mean(total, loss.count(everything)),
            "tokens": Sum(float(everything.trained.sum())),
        }
        return {**merge(metrics), **known}

    def apply(self) -> OptimizerStep:
        assert self.optimizer is not None and self.training is not None
        step = (
            self._apply(self.optimizer, self.training)
            if self.count
            else OptimizerStep({}, applied=False)
        )
        self.optimizer.zero_grad()
        self.count = 0.0
        counts = {
            "skipped_steps": Sum(float(not step.applied)),
            "bad_steps": Sum(float(step.bad is not None)),
        }
        return OptimizerStep({**step.metrics, **counts}, step.applied, step.bad)

    def _apply(self, optimizer: torch.optim.Optimizer, training: TrainingConfig) -> OptimizerStep:
        # The first stage has the embedding's part of a tied weight's gradient, the last stage the
        # head's.
        if self.tied:
            own = self.parameters.get(EMBEDDING)
            gradient = (
                torch.zeros(self.shapes[EMBEDDING]) if own is None or own.grad is None else own.grad
            )
            dist.all_reduce(gradient)
        squares = torch.zeros(())
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                parameter.grad /= self.count
                squares += parameter.grad.square().sum() * (self.owner[name] == self.stage)
        if self.stages > 1:
            dist.all_reduce(squares)
        norm, limit = (
            math.sqrt(squares.item()) if squares.isfinite() else math.inf,
            training.skip_above_grad_norm,
        )
        if not math.isfinite(norm) or (limit is not None and norm > limit):
            return OptimizerStep({}, applied=False, bad=f"the norm of the gradient is {norm:.4g}")
        if training.max_grad_norm is not None and norm > training.max_grad_norm:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad *= training.max_grad_norm / norm
        for kind in optimizer.param_groups:
            kind["lr"] = training.rate(self.steps)
        optimizer.step()
        self.steps += 1
        metrics: Metrics = {
            "grad_norm": Mean(norm),
            "learning_rate": Mean(training.rate(self.steps - 1)),
        }
        return OptimizerStep(metrics, applied=True)

    @torch.no_grad()
    def losses(self, batch: Batch, loss: Loss) -> np.ndarray:
        rows, unit = (
            self._rows(batch, [c for c in (*loss.reads, *loss.may_read) if c in batch]),
            np.arange(len(batch)),
        )
        logprobs, entropies, ends = map(
            torch.from_numpy, self._of_tokens(batch, entropy=loss.needs_entropy)
        )
        unit, found = (
            batch.numpy(GROUP_ID) if loss.whole_groups else unit,
            np.zeros(len(batch), np.float32),
        )
        for one in np.unique(unit):
            own = np.flatnonzero(unit == one)
            where = torch.cat([torch.arange(int(ends[i]), int(ends[i + 1])) for i in own])
            packed = rows.packed(own, {"entropy": entropies[where]} if loss.needs_entropy else {})
            found[own] = float(loss(logprobs[where], packed)[0]) / len(own)
        return found

    # Weights

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, shape in self.shapes.items():
            tensor = (
                self.parameters[name].detach() if self.owner[name] == self.stage else torch.empty(shape)
            )
            if self.stages > 1:
                dist.broadcast(tensor, self.owner[name])
            yield name, tensor

    def published_parts(self) -> Iterator[TensorPart]:
        for name, parameter in self.parameters.items():
            if self.owner[name] == self.stage:
                shape = self.shapes[name]
                yield TensorPart(name, shape, Box.full(shape), parameter.detach())

    def receive_weights(self, incoming: IncomingWeights) -> str:
        raise UserError("PipelineEngine cannot receive weights; use it for training")

    def save(self, folder: Path, *, merged: bool = False) -> None:
        tensors = {name: tensor.clone() for name, tensor in self.named_tensors()}
        if self.stage == 0:
            shutil.rmtree(folder, ignore_errors=True)
            source = find_model_config(self.config.model).parent
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if self.stages > 1:
            dist.barrier()

    def _state(self) -> dict[str, Tensor]:
        assert self.optimizer is not None
        state = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state[parameter]
            for key in ("exp_avg", "exp_avg_sq") if not moments else ():
                moments[key] = torch.zeros_like(parameter)
            moments.setdefault("step", torch.zeros(()))
            state |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
        return state

    def snapshot(self, folder: Path, notes: Mapping[str, Any] | None = None) -> float:
        began = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: t.contiguous() for name, t in self._state().items()},
            folder / f"stage{self.stage}.safetensors",
        )
        (folder / f"stage{self.stage}.json").write_text(
            json.dumps({"steps": self.steps, "notes": dict(notes or {})})
        )
        if self.stages > 1:
            dist.barrier()
        return time.perf_counter() - began

    def written(self, *, wait: bool) -> bool:
        return True

    def restore(self, folder: Path) -> Mapping[str, Any]:
        stored = load_file(folder / f"stage{self.stage}.safetensors")
        with torch.no_grad():
            for name, tensor in self._state().items():
                tensor.copy_(stored[name])
        said = json.loads((folder / f"stage{self.stage}.json").read_text())
        self.steps = said["steps"]
        return said["notes"]

    def onload(self) -> None:
        """Do nothing on a CPU."""

    def offload(self) -> None:
        """Do nothing on a CPU."""

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
