"""Trainers and vLLM engines of all layouts: each version arrives, and both compute the same."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from meeting import meetings
from trainer_and_engine import TIMEOUT_S, Processes, answer, gap, generate, train

LARGEST_GAP = 1e-4
"""[nats] Largest mean logprob difference."""
_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2, tied, one key head": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "Qwen3": ("qwen3", {}),
    "Llama, 151,937 ids": ("llama", {"vocab_size": 151_937}),
    "Qwen3 MoE": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
TRAINERS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP 1": (1, {}),
    "FSDP 2": (2, {}),
    "FSDP 4": (4, {}),
    "TP 2": (2, {"tensor_parallel": 2}),
    "FSDP 2 x TP 2": (4, {"tensor_parallel": 2}),
}
"""Maps a trainer to (ranks, settings)."""
ENGINES: dict[str, tuple[int, str]] = {
    "one": (1, ""),
    "another": (1, ""),
    "two ranks": (2, ""),
    "far": (1, "elsewhere"),
}
"""Maps an engine to (tensor-parallel ranks, the machine it believes to be on; empty for this
one)."""
FOLLOWERS: dict[str, tuple[str, ...]] = {
    "TP 1": ("one",),
    "TP 2": ("two ranks",),
    "two replicas": ("one", "another"),
    "replicas on two nodes": ("one", "far"),
}
"""Engines that receive a version together."""


def measure(*, small: bool = False) -> dict[str, Any]:
    """Return `real_layouts_ok`: pairs of trainer and follower layouts with correct transfers."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    trainers = {"FSDP 2": TRAINERS["FSDP 2"]} if small else TRAINERS
    followers = {"TP 1": FOLLOWERS["TP 1"]} if small else FOLLOWERS
    right = tried = version = 0
    for model, (kind, settings) in {"Qwen3": MODELS["Qwen3"]}.items() if small else MODELS.items():
        folder = Path(tempfile.mkdtemp(prefix="weft-layouts-"))
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            for number, trainer in enumerate(
                ("engine", *trainers)
            ):  # each trainer has different weights
                torch.manual_seed(number)
                made: Any = AutoModelForCausalLM.from_config(
                    CONFIG_MAPPING[kind](**{**_SMALL, **settings})
                )
                made.save_pretrained(folder / trainer)
            processes = Processes()
            stack.callback(processes.close)
            needed = dict.fromkeys(name for names in followers.values() for name in names)
            engines: dict[str, Any] = {}
            for name in needed:  # start one by one: each checks the free memory
                engines[name] = processes.start(generate, folder / "engine", *ENGINES[name])
                answer(engines[name])
            for trainer, (ranks, settings_of_it) in trainers.items():
                if settings_of_it and settings.get("num_key_value_heads", 2) % 2:
                    print(f"  {model}: {trainer} is refused: its key heads do not divide", flush=True)
                    continue
                pipes = [
                    processes.start(train, folder / trainer, rank, ranks, meeting, settings_of_it)
                    for rank, meeting in enumerate(meetings(ranks, TIMEOUT_S))
                ]
                for follower, names in followers.items():
                    version += 1
                    found = gap(pipes, engines, names, version)
                    tried, right = tried + 1, right + (found <= LARGEST_GAP)
                    if not found <= LARGEST_GAP:
                        print(f"  {model}: {trainer} to {follower}: {found:.1e} nats apart", flush=True)
                for pipe in pipes:
                    pipe.send(None)
            for pipe in engines.values():
                pipe.send(None)
        print(f"  {model}: {right} of {tried} pairs of layouts so far", flush=True)
    return {"real_layouts_ok": right, "real_layouts_tried": tried}
