"""Router replay: the trainer's logprob gap to its generator, with own and with replayed experts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import in_processes

_SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1, "num_local_experts": 16, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
}  # fmt: skip
CASES = (("qwen3_moe", "bfloat16"), ("mixtral", "bfloat16"), ("qwen3_moe", "float32"))


def gaps(case: tuple[Path, str, Any, int]) -> dict[str, Any]:
    """Return mean and largest gaps in nats on responses of 48 tokens, and the share of moved
    routes."""
    from weft.algorithms.policy_loss import NegativeLogLikelihood
    from weft.algorithms.sampling import Sampling
    from weft.dataflow.batch import Batch
    from weft.workers.actor import ActorConfig, ActorWorker
    from weft.workers.generation.engine import GenerationRequest, generate
    from weft.workers.rollout import RolloutWorker
    from weft.workers.rollout_config import RolloutConfig

    folder, engine, dtype, rows = case
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"engine": engine, "dtype": dtype}
    rollout = RolloutWorker(
        RolloutConfig(model=folder, routes=True, kv_cache_gib=0.1, max_num_seqs=64, **settings)
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 128, int(rng.integers(4, 12))).astype(np.int32) for _ in range(rows)]
    requests = [GenerationRequest(row, ids, seed=row) for row, ids in enumerate(prompts)]
    steps = generate(rollout.engine, requests, Sampling(max_tokens=48, stop=None))
    responses = sorted((one for step in steps for one in step), key=lambda one: one.request_id)
    rollout.close()
    batch = Batch.of(
        prompt_ids=[ids.tolist() for ids in prompts],
        response_ids=[one.token_ids for one in responses],
        routes=[one.routes.ravel() for one in responses if one.routes is not None],
    )
    said = np.concatenate([one.logprobs for one in responses])
    trainer = ActorWorker(ActorConfig(model=folder, dtype=dtype))
    found: dict[str, Any] = {}
    for name, own in (("chosen", batch.select(["prompt_ids", "response_ids"])), ("replayed", batch)):
        off = np.abs(trainer.logprobs(own, into="own").ragged_numpy("own")[0] - said)
        found |= {name: float(off.mean()), f"largest, {name}": float(off.max())}
    return {**found, "moved": trainer.update(batch, loss=NegativeLogLikelihood())["moved_routes"].value}


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Return `replayed_gap_ratio`: the largest mean gap in bfloat16, replayed over own experts."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    ratios = []
    for kind, dtype in CASES[: 1 if quick else None]:
        folder = Path(tempfile.mkdtemp(prefix="weft-routes-"))
        try:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**_SIZES)).save_pretrained(folder)
            (folder / "tokenizer.json").write_text("{}")
            engine, rows = ("transformers", 4) if quick else ("vllm", 32)
            found = in_processes(gaps, [(folder, engine, dtype, rows)])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(
            f"  {kind}, {dtype}: { {name: f'{value:.2g}' for name, value in found.items()} }", flush=True
        )
        if dtype != "float32":
            ratios.append(found["replayed"] / found["chosen"])
    return {"replayed_gap_ratio": max(ratios)}
