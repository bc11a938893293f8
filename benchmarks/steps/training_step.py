"""One training step of Weft's actor beside the bare `transformers` step on the same rows.

    python benchmarks/steps/training_step.py [--workloads 1m 25m] [--repeats 5]

The bare step is what a careful person writes by hand: padded rows, forward, log-softmax of the response, the same clipped loss,
backward, clipping, AdamW; in microbatches of the size that is best for it (each size is tried). Both sides take steps in turn, on
the same threads: in one process, and as two ranks of one thread, where the bare ranks share nothing, not even a gradient. The last
line printed is one JSON object with medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.dataflow.batch import Batch

WORKLOADS: dict[str, dict[str, Any]] = {
    "1m": {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "25m": {
        "vocab_size": 32000,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
    },
}
"""Models; the rows of both are all of one length."""
ROWS = {"1m": (256, 7, 64), "25m": (64, 16, 64)}
"""Rows, tokens of a prompt, tokens of a response."""
BARE_MICROBATCHES = (8, 16, 32, 64)


def make_model(workload: str, folder: Path) -> int:
    """Random weights; returns the number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    settings = WORKLOADS[workload]
    heads = settings["num_attention_heads"] // 2
    model = Qwen2ForCausalLM(Qwen2Config(**settings, num_key_value_heads=heads, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def make_rows(workload: str) -> Batch:
    rng, vocabulary = np.random.default_rng(0), WORKLOADS[workload]["vocab_size"]
    rows, prompt, response = ROWS[workload]
    cu_seqlens = np.arange(rows + 1) * response
    return Batch.of(
        prompt_ids=list(rng.integers(0, vocabulary, (rows, prompt))),
        response_ids=(rng.integers(0, vocabulary, rows * response), cu_seqlens),
        response_logprobs=(np.full(rows * response, -np.log(vocabulary)), cu_seqlens),
        advantages=(np.repeat(rng.normal(size=rows), response), cu_seqlens),
    )


class BareStep:
    """The step by hand, on `transformers` and torch alone."""

    def __init__(self, model: Path, rows: Batch) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, weight_decay=0.0)
        self.ids = torch.cat([rows.padded("prompt_ids"), rows.padded("response_ids")], 1).long()
        self.length = rows.padded("response_ids").shape[1]
        self.old, self.advantages = rows.padded("response_logprobs"), rows.padded("advantages")

    def __call__(self, microbatch: int) -> None:
        import torch

        for start in range(0, len(self.ids), microbatch):
            part = slice(start, start + microbatch)
            ids = self.ids[part]
            logits = self.model(
                ids, attention_mask=torch.ones_like(ids), logits_to_keep=self.length + 1, use_cache=False
            ).logits[:, :-1]
            targets = ids[:, -self.length :]
            logprobs = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            ratio = (logprobs - self.old[part]).exp()
            advantages = self.advantages[part]
            loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages).sum() / self.old.numel()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def timed(function: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def compare(
    model: Path, rows: Batch, repeats: int, sizes: tuple[int, ...], rank: Rank | None = None
) -> dict[str, float]:
    """Both sides in this process, in turn; medians of seconds.

    Args:
        sizes: microbatches of the bare step that are tried.
        rank: the place of this process among two; they begin each step together.
    """
    from weft.workers.actor import ActorConfig, ActorWorker
    from weft.workers.worker import Context

    bare = BareStep(model, rows)
    context = Context("actor", rank.number, 2, rank.rendezvous) if rank else Context()
    actor = ActorWorker(ActorConfig(model=str(model), learning_rate=1e-5), context)
    best = min(sizes, key=lambda size: min(timed(bare, size) for _ in range(2)))
    actor.update(rows)
    seconds: dict[str, list[float]] = {"bare_s": [], "weft_s": []}
    for _ in range(repeats):
        for name, step, arguments in (("bare_s", bare, (best,)), ("weft_s", actor.update, (rows,))):
            if rank:
                rank.barrier.wait()
            seconds[name].append(timed(step, *arguments))
    actor.close()
    return {name: statistics.median(each) for name, each in seconds.items()} | {"bare_microbatch": best}


@dataclass(frozen=True)
class Rank:
    """One of two processes."""

    number: int
    rendezvous: str
    barrier: Any


def one_process(model: Path, rows: Batch, repeats: int, threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    return compare(model, rows, repeats, BARE_MICROBATCHES)


def two_ranks(model: Path, rows: Batch, repeats: int) -> dict[str, float]:
    """The slower rank of each side."""
    half = len(rows) // 2
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        queue, barrier = context.Queue(), context.Barrier(2)
        ranks = [Rank(number, f"file://{folder}/rendezvous", barrier) for number in range(2)]
        parts = [rows.slice(0, half), rows.slice(half, len(rows) - half)]
        processes = [
            context.Process(target=one_rank, args=(model, part, repeats, rank, queue))
            for rank, part in zip(ranks, parts, strict=True)
        ]
        for process in processes:
            process.start()
        times = [queue.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    return {name: max(t[name] for t in times) for name in times[0]}


def one_rank(model: Path, rows: Batch, repeats: int, rank: Rank, queue: Any) -> None:
    import torch

    torch.set_num_threads(1)
    queue.put(compare(model, rows, repeats, BARE_MICROBATCHES[:3], rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5, help="steps of each side; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="of the one process; default: %(default)s")
    parser.add_argument("--one-process", action="store_true", help="leave out the two ranks")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for workload in arguments.workloads:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder)
            parameters, rows = make_model(workload, model), make_rows(workload)
            print(f"{workload}: {parameters / 1e6:.1f}M parameters, {len(rows)} rows", flush=True)
            results[workload] = {"one_process": one_process(model, rows, arguments.repeats, arguments.threads)}
            if not arguments.one_process:
                results[workload]["two_ranks"] = two_ranks(model, rows, arguments.repeats)
            for setting, seconds in results[workload].items():
                seconds["ratio_to_bare"] = seconds["bare_s"] / seconds["weft_s"]
                said = ", ".join(f"{name} {value:.3g}" for name, value in seconds.items())
                print(f"  {setting}: {said}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
