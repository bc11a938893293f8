"""The arithmetic of memory beside the tensors of a real engine."""

from pathlib import Path
from typing import Any

import pytest

from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training.lora import Lora
from weft.workers.training.memory import checkpoint_bytes, model_size, training_memory

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora": Lora(rank=4)},
    "dora on some layers": {"lora": Lora(rank=4, dora=True, targets=("q_proj", "mlp.down_proj")), "dtype": "bfloat16"},
}


def tensor_bytes(file: Path) -> int:
    """Bytes of the tensors in a safetensors file; of tiny ones its header has as many."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planned_is_what_an_engine_holds(tiny_model: Path, rows: Batch, tmp_path: Path, kind: str):
    config = ActorConfig(model=str(tiny_model), **KINDS[kind])
    worker = ActorWorker(config)
    engine: Any = worker.engine
    worker.update(rows, loss=PolicyLoss(old="old_logprobs"))
    parameters = list(engine.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    moments = [m for p in trained for name, m in engine.optimizer.state[p].items() if name != "step"]
    size = model_size(tiny_model)
    planned = training_memory(size, config, ranks=1, trains=True, lora=config.lora, tokens=100, saves=True)
    assert planned.weights == sum(p.nbytes for p in parameters)
    assert planned.gradients == sum(p.nbytes for p in trained)
    assert planned.moments == sum(m.nbytes for m in moments)
    worker.save_checkpoint(tmp_path / "actor")
    worker.checkpoint_written(wait=True)
    written = sum(map(tensor_bytes, (tmp_path / "actor").rglob("*.safetensors")))
    assert abs(checkpoint_bytes(size, config, config.lora) / written - 1) < 0.1
    copied = sum(copy.nbytes for copy in engine._snapshots._copies.values())
    assert abs(planned.snapshot / copied - 1) < 0.1
    worker.close()


def test_ranks_share_the_state_evenly_and_gather_the_model_for_a_pass(tiny_model: Path):
    size, config = model_size(tiny_model), ActorConfig(model=str(tiny_model), dtype="bfloat16")
    one, two = (
        training_memory(size, config, ranks=ranks, trains=True, lora=None, tokens=64, saves=False) for ranks in (1, 2)
    )
    assert two.resident * 2 == one.resident == 16 * size.parameters
    assert one.gathered == two.gathered == 2 * size.parameters and two.snapshot == 0


def test_a_folder_without_weights_is_told(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match="has no safetensors files"):
        model_size(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="is damaged, or no safetensors file"):
        model_size(tmp_path)
