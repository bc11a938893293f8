"""Planned bytes against a real engine: the addition example's actor on one rank, and its reference.

The actor trains in ten ways. An eleventh, with 8-bit moments, needs torchao
(`pip install --no-deps -r requirements/torchao.txt`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.append(str(EXAMPLES))
PROMPT, RESPONSE, ROWS = 22, 10, 80
"""[tokens] Prompt and response; rows per update, which make two microbatches."""


def measure(*, quick: bool = False) -> dict[str, float]:
    """Return the largest relative error of any number of bytes. `quick` uses a small model, and two
    of the ways."""
    import arithmetic  # pyright: ignore[reportMissingImports]

    from weft.workers.training.lora import Lora

    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="weft-plan-") as folder:
        arithmetic.make_model(Path(folder) / "model", seed=0, hidden_size=64 if quick else 256)
        ways: dict[str, dict[str, Any]] = {
            "float32": {},
            "bfloat16, moments on the host": {"dtype": "bfloat16", "offload": "moments"},
        }
        if not quick:
            ways |= {
                "bfloat16": {"dtype": "bfloat16"},
                "lora": {"lora": Lora(rank=16)},
                "bfloat16 lora": {"lora": Lora(rank=16), "dtype": "bfloat16"},
                "activations again": {"activation_checkpointing": True},
                "every second layer again": {"activation_checkpointing": 2},
                "elementwise again": {"activation_checkpointing": "elementwise"},
                "elementwise again, bfloat16": {
                    "activation_checkpointing": "elementwise",
                    "dtype": "bfloat16",
                },
                "everything on the host": {"offload": "everything"},
            }
            if find_spec("torchao") is not None:
                ways["moments in 8 bits"] = {"moments": "8bit"}
        for kind, settings in ways.items():
            errors |= _errors(Path(folder), kind, settings)
        errors |= {} if quick else _frozen_errors(Path(folder))
    print("\n".join(f"  {name:<32} {error:7.2%}" for name, error in errors.items()), flush=True)
    return {"plan_memory_error": round(max(errors.values()), 4)}


def _rows() -> Any:
    """Return rows of one length without shared prompts."""
    from weft.dataflow.batch import Batch

    prompts = [[row // 10, row % 10, *[1] * (PROMPT - 2)] for row in range(ROWS)]
    return Batch.of(prompt_ids=prompts, response_ids=[[4] * RESPONSE] * ROWS)


def _errors(folder: Path, kind: str, settings: dict[str, Any]) -> dict[str, float]:
    from weft.algorithms.policy_loss import NegativeLogLikelihood
    from weft.controllers.planner.phase_memory import with_activations
    from weft.workers.actor import ActorConfig, ActorWorker
    from weft.workers.training.activations import _LiveBytes
    from weft.workers.training.memory import checkpoint_bytes, model_size, training_memory
    from weft.workers.training.sharding import local_part

    config = ActorConfig(
        model=str(folder / "model"), microbatch_tokens=ROWS // 2 * (PROMPT + RESPONSE - 1), **settings
    )
    worker = ActorWorker(config)
    engine: Any = worker.engine
    rows, loss = _rows(), NegativeLogLikelihood()
    worker.update(rows, loss=loss)
    parameters = list(engine.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    moments = [m for p in trained for m in engine.optimizer.state[p].values()]
    with (
        _LiveBytes(map(local_part, [*parameters, *engine.model.buffers(), *moments])) as live,
        _resized(live),
    ):
        worker.update(rows, loss=loss)
    worker.save_checkpoint(folder / kind)
    worker.checkpoint_written(wait=True)
    found = {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.nbytes for p in trained),
        "moments": sum(m.nbytes for m in moments),
        "checkpoint": sum(f.stat().st_size for f in (folder / kind).rglob("*.safetensors")),
        "pass": live.peak,
    }
    worker.close()
    size = model_size(folder / "model")
    made = training_memory(size, config, ranks=1, trains=True, lora=config.lora, saves=True)
    planned = {"weights": made.weights, "gradients": made.gradients, "moments": made.moments}
    planned["checkpoint"] = checkpoint_bytes(size, config, config.lora)
    passes = _pass_bytes(config, lora=config.lora, checkpointing=config.activation_checkpointing)
    # complete gradients exist only within a pass
    kept = made.gradients if config.lora is None else 0
    rest = {"kept": kept, "gathered weights": made.gathered}
    planned["pass"] = sum(with_activations(rest, passes - kept, made).values())
    return {f"{kind}: {name}": abs(planned[name] / number - 1) for name, number in found.items()}


@contextmanager
def _resized(live: Any) -> Iterator[None]:
    """Also count storages that FSDP resizes in place with internal calls (torch 2.13)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    def counted(resize: Any) -> Any:
        def call(tensor: Any) -> None:
            storage = tensor.untyped_storage()
            before = storage.nbytes()
            resize(tensor)
            live.resized(storage, before)

        return call

    fill, empty = counted(_fsdp_param.alloc_storage), counted(_fsdp_param.free_storage)
    with (
        patch.object(_fsdp_param, "alloc_storage", fill),
        patch.object(_fsdp_param_group, "alloc_storage", fill),
        patch.object(_fsdp_param, "free_storage", empty),
    ):
        yield


def _frozen_errors(folder: Path) -> dict[str, float]:
    from weft.workers.reference import ReferenceConfig, ReferenceWorker
    from weft.workers.training.activations import _LiveBytes
    from weft.workers.training.memory import model_size, training_memory

    config = ReferenceConfig(
        model=str(folder / "model"),
        microbatch_tokens=ROWS // 2 * (PROMPT + RESPONSE - 1),
        dtype="bfloat16",
    )
    worker = ReferenceWorker(config)
    engine: Any = worker.engine
    with _LiveBytes([*engine.model.parameters(), *engine.model.buffers()]) as live:
        engine.logprobs(_rows())
    found = {"weights": sum(p.nbytes for p in engine.model.parameters()), "pass": live.peak}
    worker.close()
    made = training_memory(
        model_size(folder / "model"), config, ranks=1, trains=False, lora=None, saves=False
    )
    planned = {"weights": made.weights, "pass": made.gathered + _pass_bytes(config, trains=False)}
    return {f"frozen: {name}": abs(planned[name] / number - 1) for name, number in found.items()}


def _pass_bytes(config: Any, **settings: Any) -> int:
    from weft.workers.training.activations import pass_bytes

    settings |= {"rows": ROWS // 2, "length": PROMPT + RESPONSE, "predicted": RESPONSE}
    return pass_bytes(config.model, Path(config.model), dtype=config.dtype, **settings)
