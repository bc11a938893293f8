"""Memory by phase: ReaLHF's rule, hand-worked states, and estimated activations."""

import re
from pathlib import Path
from typing import Any

from gpu_tables import MODELS

from weft.controllers.planner.phase_memory import (
    ASLEEP,
    CUDA,
    HELD_FREE,
    ON_GPU,
    ON_GPU_TRAINING,
    TRAINING,
    activation_bytes,
    generating_memory,
    realhf_bytes,
    trained_memory,
)
from weft.dataflow.byte_units import GIB
from weft.workers.actor import ActorConfig
from weft.workers.models.transformer import Transformer
from weft.workers.reference import ReferenceConfig
from weft.workers.training.lora import Lora
from weft.workers.training.memory import ModelSize

DOCS = Path(__file__).parents[3] / "docs" / "gpu.md"
SIZE = ModelSize({"embed": (100, 8), "layers.0.up": (30, 8), "head": (100, 8)}, vocabulary=100, layers=1)
PARAMETERS = 100 * 8 * 2 + 30 * 8


def test_static_memory_is_that_of_realhf():
    parameters = 6_869_221_376
    hidden, inner, layers, vocabulary = 4096, 11_008, 32, 32_000
    assert parameters == 3 * vocabulary * hidden + (3 * hidden * inner + 4 * hidden**2) * layers
    one = realhf_bytes(parameters, data=1, tensor=8, pipeline=1, trains=True)
    two = realhf_bytes(parameters, data=2, tensor=4, pipeline=2, trains=True)
    assert (one, two) == (20_607_664_128, 12_021_137_408)
    frozen: dict[str, Any] = {"data": 2, "tensor": 4, "pipeline": 2, "trains": False}
    assert realhf_bytes(parameters, **frozen) == 4 * parameters / 8
    cached = 2 * 2 * 16 * 512 * hidden * layers
    with_cache = realhf_bytes(parameters, **frozen, kv_bytes=cached)
    assert with_cache == 4 * parameters / 8 + 2 * cached / 16


def test_a_trained_rank_holds_its_state_and_leaves_it_on_the_host_asleep():
    config = ActorConfig(model="m", dtype="bfloat16")
    found = trained_memory(SIZE, config, ranks=1, activations=1000, saves=False, gpu_bytes=80 * GIB)
    # Parameters and two moments in float32 at rest; a gradient and a rounded copy in a pass.
    assert found.working.device == CUDA + PARAMETERS * (3 * 4 + 4 + 2) + 1000
    assert found.working.host == ON_GPU_TRAINING
    assert found.asleep.device == CUDA
    assert found.asleep.host == ON_GPU_TRAINING + 12 * PARAMETERS
    saving = trained_memory(SIZE, config, ranks=1, activations=1000, gpu_bytes=80 * GIB)
    assert saving.asleep.host - found.asleep.host == 12 * PARAMETERS, "the copy for a checkpoint"


def test_ranks_share_the_state_of_a_model():
    config = ActorConfig(model="m", dtype="bfloat16", gather="layerwise")
    two = trained_memory(SIZE, config, ranks=2, activations=0, saves=False, gpu_bytes=GIB)
    assert two.asleep.host - ON_GPU_TRAINING == 12 * PARAMETERS // 2


def test_a_frozen_rank_holds_weights_in_the_dtype_of_passes():
    config = ReferenceConfig(model="m", dtype="bfloat16")
    found = trained_memory(SIZE, config, ranks=1, activations=7, trains=False, gpu_bytes=GIB)
    assert found.working.device == CUDA + 2 * PARAMETERS + 7
    assert found.asleep.host == ON_GPU_TRAINING + 2 * PARAMETERS


def test_a_cpu_holds_everything_in_host_memory():
    config = ActorConfig(model="m")
    found = trained_memory(SIZE, config, ranks=1, activations=1000, saves=False)
    in_pass = 4 * PARAMETERS + 1000
    assert found.working.host == TRAINING + 12 * PARAMETERS + round((1 + HELD_FREE) * in_pass)
    assert found.working == found.asleep and found.working.device == 0


def test_a_sleeping_engine_keeps_its_weights_on_the_host():
    found = generating_memory(10 * GIB, 30 * GIB)
    assert found.working.device == CUDA + 40 * GIB and found.working.host == ON_GPU["vllm"]
    assert found.asleep.device == ASLEEP and found.asleep.host == ON_GPU["vllm"] + 10 * GIB
    assert generating_memory(GIB, GIB, on_gpu=False).working.device == 0


def rows_of_the_docs() -> list[tuple[str, bool, dict[str, Any], int, int, float]]:
    """Return model, whether an adapter, settings, tokens, GiB of a GPU, and GiB of a pass."""
    found = []
    for part in re.split(r"^### \d x ", DOCS.read_text(), flags=re.MULTILINE)[1:]:
        gib, tokens = re.match(r"(\d+) GB, passes of ([\d,]+) tokens", part).groups()  # pyright: ignore
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 7 and cells[0] in MODELS and cells[4]:
                again = re.search(r"activation_checkpointing=('elementwise'|True)", cells[2])
                kind = False if again is None else {"True": True}.get(again[1], "elementwise")
                adapter = cells[1] == "adapter"
                settings = {"activation_checkpointing": kind, "lora": Lora(rank=16) if adapter else None}
                read = int(tokens.replace(",", "")), int(gib), float(cells[4])
                found.append((cells[0], adapter, settings, *read))
    return found


def test_estimated_activations_are_close_to_those_of_the_docs():
    rows = rows_of_the_docs()
    assert len(rows) > 35
    for model, _, settings, tokens, gib, documented in rows:
        config = ActorConfig(model="m", dtype="bfloat16", **settings)
        sizes = Transformer.of(MODELS[model].settings())
        found = activation_bytes(sizes, config, tokens=tokens, gpu_bytes=gib * GIB) / GIB
        # The docs round to GiB.
        assert abs(found - documented) <= 0.5 + documented / 6, (model, settings, found, documented)


def test_passes_that_keep_less_estimate_less():
    sizes = Transformer.of(MODELS["Qwen2.5-7B"].settings())

    def estimated(trains: bool = True, **settings: Any) -> int:
        config = ActorConfig(model="m", dtype="bfloat16", **settings)
        return activation_bytes(sizes, config, tokens=16_384, trains=trains, gpu_bytes=80 * GIB)

    ways = [False, 4, 2, "elementwise", True]
    found = [estimated(activation_checkpointing=way) for way in ways]
    assert sorted(found, reverse=True) == found
    assert estimated(trains=False) < found[-1]
    assert estimated(sequence_parallel=4) < found[0] / 3
