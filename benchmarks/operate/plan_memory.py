"""Planned bytes beside those of a real engine: the actor of the example on addition, in four ways, on one rank."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.append(str(EXAMPLES))
PROMPT, RESPONSE, ROWS = 22, 10, 80
"""Tokens of each prompt and response, and rows of an update: two microbatches."""


def measure() -> dict[str, float]:
    """The largest relative error of a number of bytes."""
    import arithmetic  # pyright: ignore[reportMissingImports]

    from weft.workers.training.lora import Lora

    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="weft-plan-") as folder:
        arithmetic.make_model(Path(folder) / "model", seed=0, hidden_size=256)
        for kind, settings in {
            "float32": {},
            "bfloat16": {"dtype": "bfloat16"},
            "lora": {"lora": Lora(rank=16)},
            "activations again": {"activation_checkpointing": True},
        }.items():
            errors |= _errors(Path(folder), kind, settings)
    print("\n".join(f"  {name:<32} {error:7.2%}" for name, error in errors.items()), flush=True)
    return {"plan_memory_error": round(max(errors.values()), 4)}


def _errors(folder: Path, kind: str, settings: dict[str, Any]) -> dict[str, float]:
    from weft.algorithms.policy_loss import NegativeLogLikelihood
    from weft.dataflow.batch import Batch
    from weft.workers.actor import ActorConfig, ActorWorker
    from weft.workers.training.activations import LiveBytes, PassShape, pass_bytes
    from weft.workers.training.memory import checkpoint_bytes, model_size, training_memory

    config = ActorConfig(model=str(folder / "model"), microbatch_tokens=ROWS // 2 * (PROMPT + RESPONSE), **settings)
    worker = ActorWorker(config)
    engine: Any = worker.engine
    rows, loss = (
        Batch.of(prompt_ids=[[1] * PROMPT] * ROWS, response_ids=[[4] * RESPONSE] * ROWS),
        NegativeLogLikelihood(),
    )
    worker.update(rows, loss=loss)
    parameters = list(engine.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    moments = [m for p in trained for m in engine.optimizer.state[p].values()]
    with LiveBytes([*parameters, *engine.model.buffers(), *moments]) as live:
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
    planned["pass"] = made.gathered + pass_bytes(
        config.model,
        folder / "model",
        PassShape(ROWS // 2, PROMPT + RESPONSE, RESPONSE),
        dtype=config.dtype,
        lora=config.lora,
        checkpointing=config.activation_checkpointing,
    )
    return {f"{kind}: {name}": abs(planned[name] / number - 1) for name, number in found.items()}
