"""Training's wait for a checkpoint, against a plain copy of the same memory.

python benchmarks/recovery/pause.py FOLDER RANK RANKS CHECKPOINTS PORT DESCRIPTOR     # one rank; recovery.py starts them
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from weft.dataflow.batch import Batch

VOCABULARY = 32_000
LARGE: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 11,
    "num_attention_heads": 12,
}
"""GPT-2's sizes with one layer less, because Qwen2's feed-forward layers have three matrices, not
two."""
TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def make_model(folder: Path, small: bool) -> int:
    """Save random weights, and return the number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = TINY if small else LARGE
    heads = sizes["num_attention_heads"]
    config = Qwen2Config(
        **sizes,
        vocab_size=VOCABULARY,
        num_key_value_heads=heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def rows(number: int = 2, length: int = 8) -> Batch:
    rng, tokens = np.random.default_rng(0), number * length
    cu_seqlens = np.arange(number + 1) * length
    return Batch.of(
        prompt_ids=list(rng.integers(0, VOCABULARY, (number, length))),
        response_ids=(rng.integers(0, VOCABULARY, tokens), cu_seqlens),
        response_logprobs=(np.full(tokens, -np.log(VOCABULARY)), cu_seqlens),
        advantages=(np.repeat(rng.normal(size=number), length), cu_seqlens),
    )


def one_rank(
    folder: Path, rank: int, ranks: int, checkpoints: int, port: int, taken: int
) -> dict[str, Any]:
    """Train on tiny batches; after each step, make a checkpoint and a plain copy, in alternating
    order.

    Args:
        port: rendezvous port of the ranks.
        taken: descriptor of rank 0's socket on this port.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from weft.workers.actor import ActorConfig, ActorWorker
    from weft.workers.rendezvous import LOOPBACK, Rendezvous
    from weft.workers.worker import Context

    torch.set_num_threads(1)
    holder = socket.socket(fileno=taken) if rank == 0 else None
    rendezvous = Rendezvous(LOOPBACK, port, "of this benchmark", taken=holder) if ranks > 1 else None
    worker = ActorWorker(
        ActorConfig(model=str(folder / "model"), learning_rate=1e-6),
        Context("actor", rank, ranks, rendezvous),
    )
    batch = rows(2 * ranks).take(list(range(2 * rank, 2 * rank + 2)))
    worker.update(batch)
    state = cast(Any, worker.engine).state()
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]
    copies = [part.clone() for part in parts]
    pauses: list[float] = []
    copied: list[float] = []

    def save(number: int) -> None:
        pauses.append(worker.save_checkpoint(folder / f"ranks-{ranks}" / f"step_{number}"))

    def copy() -> None:
        began = time.perf_counter()
        for part, into in zip(parts, copies, strict=True):
            into.copy_(part)
        copied.append(time.perf_counter() - began)

    for number in range(checkpoints):
        worker.update(batch)
        if number % 2:
            save(number)
            copy()
        else:
            copy()
            save(number)
        worker.checkpoint_written(wait=True)  # do not measure the disk
        shutil.rmtree(folder / f"ranks-{ranks}" / f"step_{number - 1}", ignore_errors=True)
    worker.close()
    return {"pauses": pauses, "copies": copied, "bytes": sum(part.nbytes for part in parts)}


def measure(folder: Path, ranks: int, checkpoints: int) -> dict[str, Any]:
    """Return the seconds of the slowest rank, which all others wait for."""
    from weft.workers.rendezvous import LOOPBACK, take_port

    with take_port(LOOPBACK) as taken:
        descriptor, port = taken.fileno(), taken.getsockname()[1]
        command = [
            str(w)
            for w in (sys.executable, __file__, folder, "RANK", ranks, checkpoints, port, descriptor)
        ]
        started = [
            subprocess.Popen(
                [w.replace("RANK", str(rank)) for w in command],
                stdout=subprocess.PIPE,
                pass_fds=() if rank else (descriptor,),
                text=True,
            )
            for rank in range(ranks)
        ]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"a rank of {ranks} ended with {[p.returncode for p in started]}")
    shutil.rmtree(folder / f"ranks-{ranks}")
    return slowest([json.loads(text.splitlines()[-1]) for text in said])


def slowest(found: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return median seconds of the slowest rank, without the first pause, and that pause.

    >>> slowest([{"pauses": [2.0, 0.2, 0.4], "copies": [0.1, 0.2, 0.3], "bytes": 8}])
    {'pause_s': 0.3, 'copy_s': 0.25, 'over_copy': 1.2, 'first_pause_s': 2.0, 'bytes': 8}
    """
    pauses = [max(p) for p in zip(*(one["pauses"] for one in found), strict=True)]
    copies = [max(c) for c in zip(*(one["copies"] for one in found), strict=True)]
    pause, copy = median(pauses[1:]), median(copies[1:])
    return {
        "pause_s": round(pause, 4),
        "copy_s": round(copy, 4),
        "over_copy": round(pause / copy, 2),
        "first_pause_s": round(pauses[0], 4),
        "bytes": max(one["bytes"] for one in found),
    }


if __name__ == "__main__":
    print(json.dumps(one_rank(Path(sys.argv[1]), *map(int, sys.argv[2:7]))))
