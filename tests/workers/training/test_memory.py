"""Memory estimates against the tensors of a real engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import make

from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.critic import CriticConfig, CriticWorker
from weft.workers.reference import ReferenceConfig, ReferenceWorker
from weft.workers.training.activations import _LiveBytes, pass_bytes
from weft.workers.training.lora import Lora
from weft.workers.training.memory import checkpoint_bytes, model_size, training_memory

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "muon": {"optimizer": "muon"},
    "lora": {"lora": Lora(rank=4)},
    "dora on some layers": {
        "lora": Lora(rank=4, dora=True, targets=("q_proj", "mlp.down_proj")),
        "dtype": "bfloat16",
    },
}


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    make("llama", {}).save_pretrained(folder)
    return folder


def tensor_bytes(file: Path) -> int:
    """Return the bytes of tensors in a safetensors file, without its header, which dominates tiny
    files."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


@pytest.mark.parametrize("kind", KINDS)
def test_planned_bytes_equal_an_engines(tiny_model: Path, rows: Batch, tmp_path: Path, kind: str):
    config = ActorConfig(model=str(tiny_model), **KINDS[kind])
    worker = ActorWorker(config)
    engine: Any = worker.engine
    worker.update(rows, loss=PolicyLoss(old="old_logprobs"))
    parameters = list(engine.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    moments = [m for p in trained for name, m in engine.optimizer.state[p].items() if name != "step"]
    size = model_size(tiny_model)
    planned = training_memory(size, config, ranks=1, trains=True, lora=config.lora, saves=True)
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
        training_memory(size, config, ranks=ranks, trains=True, lora=None, saves=False)
        for ranks in (1, 2)
    )
    held = [made.weights + made.gradients + made.moments for made in (one, two)]
    assert 2 * held[1] == held[0] == 16 * size.parameters
    assert one.gathered == two.gathered == 2 * size.parameters and two.snapshot == 0
    assert (one.exchanged, two.exchanged) == (0, 8 * size.parameters)
    rounded = config.model_copy(update={"gradients": "bfloat16"})
    assert (
        training_memory(size, rounded, ranks=2, trains=True, lora=None, saves=False).exchanged
        == 4 * size.parameters
    )
    layerwise = config.model_copy(update={"gather": "layerwise"})
    assert (
        training_memory(
            replace(size, layers=64), layerwise, ranks=2, trains=True, lora=None, saves=False
        ).gathered
        < two.gathered / 2
    )


def test_each_node_may_hold_a_copy(tiny_model: Path):
    size = model_size(tiny_model)
    of_8b = replace(size, shapes={"layers.0.weight": (8_000_000, 1000)}, layers=1)
    about: dict[str, Any] = {"trains": True, "lora": None, "saves": False, "gpu_bytes": 80 << 30}
    config = ActorConfig(model="m", dtype="bfloat16")
    layerwise = config.model_copy(update={"gather": "layerwise"})

    def held(config: ActorConfig, ranks: int, nodes: int) -> int:
        return training_memory(of_8b, config, ranks=ranks, nodes=nodes, **about).weights

    assert held(config, 32, 4) == held(config, 8, 1) == 4 * held(layerwise, 32, 4)


@pytest.mark.parametrize(
    "kind",
    [
        "float32",
        "bfloat16",
        "again",
        pytest.param("every second", marks=pytest.mark.slow),
        "elementwise",
        "lora",
        "logprobs",
    ],
)
def test_a_meta_pass_reports_the_memory_of_a_real_one(tiny_model: Path, kind: str):
    settings: dict[str, Any] = {
        "bfloat16": {"dtype": "bfloat16"},
        "again": {"activation_checkpointing": True},
        "every second": {"activation_checkpointing": 2},
        "elementwise": {"activation_checkpointing": "elementwise"},
        "lora": {"lora": Lora(rank=4)},
    }.get(kind, {})
    worker = ActorWorker(ActorConfig(model=str(tiny_model), microbatch_tokens=620, **settings))
    batch = Batch.of(prompt_ids=[[1] * 21 + [row] for row in range(40)], response_ids=[[3] * 10] * 40)
    engine: Any = worker.engine
    loss, trains = NegativeLogLikelihood(), kind != "logprobs"
    worker.update(batch, loss=loss)  # creates the moments
    known = (
        [m for p in engine.model.parameters() for m in engine.optimizer.state[p].values()]
        if trains
        else []
    )
    with _LiveBytes([*engine.model.parameters(), *engine.model.buffers(), *known]) as live:
        if trains:
            worker.update(batch, loss=loss)
        else:
            engine.logprobs(batch)
    planned = pass_bytes(
        str(tiny_model),
        tiny_model,
        rows=20,
        length=32,
        predicted=10,
        dtype=settings.get("dtype", "float32"),
        trains=trains,
        lora=settings.get("lora"),
        checkpointing=settings.get("activation_checkpointing", False),
    )
    rounded = (
        2 * model_size(tiny_model).parameters if kind == "bfloat16" else 0
    )  # the bfloat16 copy, which the plan counts separately
    assert abs((planned + rounded) / live.peak - 1) < 0.05, (planned + rounded, live.peak)
    worker.close()


def test_the_plan_of_a_critic_has_its_scalar_head_and_not_that_of_the_policy(untied_model: Path):
    worker = CriticWorker(CriticConfig(model=str(untied_model)))
    engine: Any = worker.engine
    parameters = list(engine.model.parameters())
    planned = [model_size(untied_model, scalar=scalar).parameters for scalar in (True, False)]
    vocabulary, hidden = engine.model.causal_lm.get_input_embeddings().weight.shape
    assert planned == [
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters) + (vocabulary - 1) * hidden,
    ]
    worker.close()


def test_a_pass_of_a_model_with_wrong_files_is_refused(untied_model: Path, tmp_path: Path):
    for file in untied_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "vocab_size": 100}))
    with pytest.raises(
        UserError, match=r"'lm_head.weight' has shape \[97, 32\] in the files, but \[100, 32\] by"
    ):
        pass_bytes(tmp_path, tmp_path, rows=1, length=4, predicted=2)


def test_a_frozen_model_is_held_in_the_dtype_of_its_passes(tiny_model: Path):
    config = ReferenceConfig(model=str(tiny_model), dtype="bfloat16")
    worker = ReferenceWorker(config)
    engine: Any = worker.engine
    planned = training_memory(
        model_size(tiny_model), config, ranks=1, trains=False, lora=None, saves=False
    )
    assert planned.weights == sum(p.nbytes for p in engine.model.parameters())
    assert planned.gathered == planned.gradients == planned.moments == 0
    worker.close()


def test_a_folder_without_weights_is_reported(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match="has no safetensors files"):
        model_size(tmp_path)
