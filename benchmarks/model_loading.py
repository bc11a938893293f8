"""Bytes that each rank of a group reads and holds to load a model, against its share.

    python benchmarks/model_loading.py [--small]

Eight processes (gloo) load a model of 69 million parameters with the training engine, stored in
bfloat16 and held in float32. The benchmark counts the bytes that each rank reads from files, and
the peak bytes of its tensors (temporaries included) until all parameters have values. The ratio is
eight times the largest rank's bytes over the model's: 1 if each rank reads and holds only its
shard, 8 if each loads the full model.

`start_held_ratio` is the same until the engine is ready. It includes the forward passes that
compare the model with `transformers`, which gather embeddings, head and one layer like a training
step. `saving_held_ratio` is for rank 0 while it gathers the model on the host and saves it. The
last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.workers.rendezvous import LOOPBACK, Rendezvous, take_port

RANKS = 8
TIMEOUT_S = 300.0


class PeakBytes(TorchDispatchMode):
    """Tracks the live and peak bytes of all tensors, except memory-mapped files."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()
        self._mapped: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.from_file.default:
            self._mapped.add(made.untyped_storage().data_ptr())
        for leaf in tree_leaves(made):
            local = getattr(leaf, "_local_tensor", leaf)
            if (
                type(local) is torch.Tensor and not local.is_meta
            ):  # torch's fake tensors have another class
                self._count(local)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if not where or where in self._mapped or where in self._alive:
            return
        self._alive.add(where)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, where, storage.nbytes())

    def _freed(self, where: int, nbytes: int) -> None:
        self._alive.discard(where)
        self.now -= nbytes


def save_model(folder: Path, small: bool) -> int:
    """Save a model with random weights in bfloat16, and return its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = (64, 128, 8, 512) if small else (768, 2048, 8, 8192)
    hidden, intermediate, layers, vocabulary = size
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 16,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="32MB")
    return sum(parameter.numel() for parameter in model.parameters())


def load_rank(
    folder: Path, rank: int, ranks: int, meeting: Rendezvous, answers: Queue[tuple[int, int, int, int]]
) -> None:
    """Load and save the model on one rank, and answer with the bytes read, and the peaks while
    loading, until ready, and while saving."""
    from weft.workers.training import fsdp
    from weft.workers.training.engine import ModelConfig
    from weft.workers.worker import Context

    torch.set_num_threads(1)
    context = Context("model", rank, ranks, replace(meeting, taken=None) if rank else meeting)
    config = ModelConfig(model=str(folder / "model"), gather="layerwise")
    held = PeakBytes()
    loaded = 0
    find_agreement = fsdp.find_agreement

    def after_loading(*arguments: Any, **settings: Any) -> Any:
        nonlocal loaded
        loaded = held.peak
        return find_agreement(*arguments, **settings)

    fsdp.find_agreement = after_loading
    with held:
        engine = fsdp.FsdpEngine(config, context)
        started, held.peak = held.peak, held.now
        engine.save(folder / "saved")
    answers.put((engine.bytes_read, loaded, started, held.peak))
    engine.close()


def measure(*, ranks: int = RANKS, small: bool = False) -> dict[str, float]:
    """Load a model on this many ranks of this machine. Raises RuntimeError if a rank failed or took
    too long."""
    import weft.workers.training.fsdp  # noqa: F401 - imported once, before the ranks are forked

    folder = Path(tempfile.mkdtemp(prefix="weft-loading-"))
    try:
        parameters = save_model(folder / "model", small)
        stored = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
        forks = multiprocessing.get_context("fork")
        answers = forks.Queue()
        meeting = Rendezvous.at(take_port(LOOPBACK), "of this benchmark")
        started = [
            forks.Process(target=load_rank, args=(folder, rank, ranks, meeting, answers))
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        try:
            found = _answers(answers, started)
        finally:
            for process in started:
                process.kill()
                process.join()
            if meeting.taken is not None:
                meeting.taken.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    read, loaded, ready, saving = (max(each) for each in zip(*found, strict=True))
    held = 4 * parameters
    figures = {
        "read_ratio": ranks * read / stored,
        "held_ratio": ranks * loaded / held,
        "start_held_ratio": ranks * ready / held,
        "saving_held_ratio": ranks * saving / held,
    }
    ratio = max(figures["read_ratio"], figures["held_ratio"])
    return {
        "start_bytes_per_rank_ratio": round(ratio, 3),
        **{name: round(value, 3) for name, value in figures.items()},
        "model_bytes": held,
        "ranks": ranks,
    }


def _answers(
    answers: Queue[tuple[int, int, int, int]], ranks: Sequence[BaseProcess]
) -> list[tuple[int, int, int, int]]:
    found: list[tuple[int, int, int, int]] = []
    end = time.monotonic() + TIMEOUT_S
    while len(found) < len(ranks):
        try:
            found.append(answers.get(timeout=0.2))
        except queue.Empty:
            failed = [number for number, rank in enumerate(ranks) if rank.exitcode]
            if failed or time.monotonic() > end:
                late = f"{len(ranks) - len(found)} ranks did not load the model in {TIMEOUT_S:g} s"
                raise RuntimeError(f"rank {failed[0]} failed" if failed else late) from None
    return found


def start_bytes_per_rank_ratio() -> float:
    """Return eight times the largest rank's bytes to load a model, over the model's bytes."""
    return measure()["start_bytes_per_rank_ratio"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a tiny model on two ranks, for the tests")
    options = parser.parse_args()
    print(json.dumps(measure(ranks=2 if options.small else RANKS, small=options.small)))


if __name__ == "__main__":
    sys.exit(main())
