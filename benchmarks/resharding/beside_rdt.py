"""Bytes of a version against vLLM's sharded_rdt, for the same loaders: two FSDP ranks to TP 2.

Each rank creates sharded_rdt's engine, which plans as before a run, but without Ray actors, NIXL
and a GPU to carry the bytes.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import reduce
from math import prod
from operator import add
from pathlib import Path
from typing import Any

from meeting import meetings
from trainer_and_engine import TIMEOUT_S, Processes, all_of, answer, train

from weft.resharding.incoming import IncomingWeights
from weft.resharding.weights import Layout, ReshardPlan

RANKS = 2
"""Ranks of the trainer, and of the engine."""
SIZES: dict[str, Any] = {
    "vocab_size": 1024,  # sharded_rdt refuses vocabularies that vLLM pads
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,  # replicated on both ranks
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Maps a tensor of the checkpoint to (shape, dtype)."""


def record(pipe: Any, folder: Path, checkpoint: Shapes) -> None:
    """Answer with each vLLM rank's reads, as Weft records them, and the bytes that sharded_rdt
    plans to pull."""
    from torch import distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed import parallel_state
    from vllm.distributed.weight_transfer.base import layerwise_groups
    from vllm.distributed.weight_transfer.sharded_rdt_common import RdtRouter
    from vllm.distributed.weight_transfer.sharded_rdt_engine import (
        ShardedRDTWeightTransferEngine,
        ShardedRDTWeightTransferInitInfo,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from weft.resharding.vllm_writer import record_layout
    from weft.workers.generation.vllm_settings import VllmSettings

    with set_current_vllm_config(VllmConfig()):
        store: Any = distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        parallel_state.initialize_model_parallel(1)
    arguments = VllmSettings(kv_cache_gib=0.05).engine_arguments(
        str(folder), max_context=None, dtype="float32", seed=0, free_share=None
    )
    groups = layerwise_groups(list(checkpoint))
    names = [name for group in groups for name in group]
    info = ShardedRDTWeightTransferInitInfo(
        names=names,
        dtype_names=[checkpoint[name][1] for name in names],
        shapes=[list(checkpoint[name][0]) for name in names],
        group_lens=[len(group) for group in groups],
        num_consumers=RANKS,
    )
    group: Any = parallel_state.get_tp_group()
    group.world_size = RANKS
    found: list[tuple[Layout, int]] = []
    for rank in range(RANKS):
        group.rank_in_group = rank
        config = EngineArgs(**arguments).create_engine_config()  # sufficient to create one model
        # its engine requires this executor
        config.parallel_config.distributed_executor_backend = "ray"
        model = initialize_model(config)
        layout = record_layout(model, checkpoint).layout
        device = next(model.parameters()).device
        engine = ShardedRDTWeightTransferEngine(
            WeightTransferConfig(backend="sharded_rdt"), config, device, model
        )
        engine._router = RdtRouter(RANKS, RANKS, names=names, group_lens=info.group_lens)
        engine._bake(info)
        engine._build_static_plan(info)
        assert engine._cached_plan is not None
        slices = [one for chunk in engine._cached_plan.chunks for one in chunk.pack_layout]
        found.append((layout, sum(prod(shape) * dtype.itemsize for _, dtype, _, shape in slices)))
    pipe.send(found)


def measure() -> dict[str, object]:
    """Return received and sent bytes, over sharded_rdt."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder, processes = Path(tempfile.mkdtemp(prefix="weft-beside-rdt-")), Processes()
    try:
        model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES)).float()
        model.save_pretrained(folder)
        trainer = [
            processes.start(train, folder, rank, RANKS, meeting, {})
            for rank, meeting in enumerate(meetings(RANKS, TIMEOUT_S))
        ]
        with IncomingWeights(reduce(add, all_of(trainer, "publish_weights", 1))) as incoming:
            source = incoming.layout
        for pipe in trainer:
            pipe.send(None)
        checkpoint = {name: (tensor.shape, tensor.dtype) for name, tensor in source.tensors.items()}
        recorded = answer(processes.start(record, folder, checkpoint))
    finally:
        processes.close()
        shutil.rmtree(folder, ignore_errors=True)
    plan = ReshardPlan(source, Layout.of_ranks([layout for layout, _ in recorded], "TP 2"))
    pulled = sum(num_bytes for _, num_bytes in recorded)
    whole = sum(prod(tensor.shape) * tensor.item_bytes for tensor in source.tensors.values())
    gathered = (RANKS - 1) * whole  # each rank receives the other shards of each tensor
    received, sent = int(plan.received_bytes.sum()), int(plan.sent_bytes.sum())
    print(f"{whole / 1e6:.2f} MB of float32 from FSDP {RANKS} to TP {RANKS}")
    print(f"{'':<12}{'received by vLLM':>20}{'gathered by the trainer':>26}   MB")
    print(f"{'Weft':<12}{received / 1e6:>20.3f}{0.0:>26.3f}")
    print(f"{'sharded_rdt':<12}{pulled / 1e6:>20.3f}{gathered / 1e6:>26.3f}", flush=True)
    return {
        "bytes_over_sharded_rdt": round(received / pulled, 4),
        "trainer_bytes_over_sharded_rdt": round(sent / (gathered + pulled), 4),
    }
