"""Times one training step of Weft's actor beside the bare `transformers` step on the same rows.

    python benchmarks/training_step.py [--workloads 1m 25m] [--repeats 5]

The bare step is what a careful person writes by hand: padded rows, forward, log-softmax of the whole sequence, the same
clipped loss, backward, clipping, AdamW; in microbatches of the size that is best for it (each size is tried). Both sides
take steps in turn, on the same threads; medians are reported. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weft.dataflow.batch import Batch

WORKLOADS: dict[str, dict[str, Any]] = {
    # Model settings, rows, prompt and response lengths (all rows equally long, as in the workloads a and b).
    "1m": {
        "model": {
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
        "rows": 256,
        "prompt": 7,
        "response": 64,
    },
    "25m": {
        "model": {
            "vocab_size": 32000,
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
        },
        "rows": 64,
        "prompt": 16,
        "response": 64,
    },
}
BARE_MICROBATCHES = (8, 16, 32, 64)


def make_model(workload: str, folder: Path) -> int:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    settings = WORKLOADS[workload]["model"]
    heads = settings["num_attention_heads"]
    model = Qwen2ForCausalLM(Qwen2Config(**settings, num_key_value_heads=heads // 2, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def make_rows(workload: str) -> Batch:
    settings, rng = WORKLOADS[workload], np.random.default_rng(0)
    rows, vocabulary = settings["rows"], settings["model"]["vocab_size"]
    num_tokens = rows * settings["response"]
    cu_seqlens = np.arange(rows + 1) * settings["response"]
    return Batch.of(
        prompt_ids=list(rng.integers(0, vocabulary, (rows, settings["prompt"]))),
        response_ids=(rng.integers(0, vocabulary, num_tokens), cu_seqlens),
        response_logprobs=(np.full(num_tokens, -np.log(vocabulary)), cu_seqlens),
        advantages=(np.repeat(rng.normal(size=rows), settings["response"]), cu_seqlens),
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


def timed(function: Callable[..., object], *args: object) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def one_process(model: Path, rows: Batch, repeats: int, sizes: list[int], threads: int) -> dict[str, float]:
    """Both sides in this process, in turn."""
    import torch

    from weft.workers.actor import ActorConfig, ActorWorker

    torch.set_num_threads(threads)
    bare = BareStep(model, rows)
    actors = {
        size: ActorWorker(ActorConfig(model=str(model), learning_rate=1e-5, microbatch_tokens=size or None))
        for size in sizes
    }
    best = min(BARE_MICROBATCHES, key=lambda size: min(timed(bare, size) for _ in range(2)))
    for actor in actors.values():
        actor.update(rows)
    bare_s: list[float] = []
    weft_s: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats):
        bare_s.append(timed(bare, best))
        for size, actor in actors.items():
            weft_s[size].append(timed(actor.update, rows))
    medians = {f"weft_s{f'_{size}' if size else ''}": statistics.median(s) for size, s in weft_s.items()}
    return {"bare_s": statistics.median(bare_s), "bare_microbatch": best, **medians}


def two_ranks(model: Path, rows: Batch, repeats: int) -> dict[str, float]:
    """Both sides as two processes of one thread; the bare ones share nothing, not even a gradient: a bound."""
    half = len(rows) // 2
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        queue, barrier = context.Queue(), context.Barrier(2)
        parts = [rows.slice(0, half), rows.slice(half, len(rows) - half)]
        ranks = [
            context.Process(target=_rank, args=(rank, folder, model, part, repeats, barrier, queue))
            for rank, part in enumerate(parts)
        ]
        for process in ranks:
            process.start()
        times = [queue.get(timeout=600) for _ in ranks]
        for process in ranks:
            process.join()
    return {name: max(t[name] for t in times) for name in times[0]}


def _rank(rank: int, folder: str, model: Path, rows: Batch, repeats: int, barrier: Any, queue: Any) -> None:
    import torch

    from weft.workers.actor import ActorConfig, ActorWorker
    from weft.workers.worker import Context

    torch.set_num_threads(1)
    actor = ActorWorker(
        ActorConfig(model=str(model), learning_rate=1e-5), Context("actor", rank, 2, f"file://{folder}/rendezvous")
    )
    bare = BareStep(model, rows)
    best = min(BARE_MICROBATCHES[:3], key=lambda size: min(timed(bare, size) for _ in range(2)))
    actor.update(rows)
    bare_s, weft_s = [], []
    for _ in range(repeats):
        barrier.wait()
        bare_s.append(timed(bare, best))
        barrier.wait()
        weft_s.append(timed(actor.update, rows))
    queue.put({"bare_s": statistics.median(bare_s), "bare_microbatch": best, "weft_s": statistics.median(weft_s)})
    actor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--sizes", nargs="*", type=int, default=[0], help="microbatch_tokens to try; 0 is the default one"
    )
    parser.add_argument("--threads", type=int, default=2, help="of the one process")
    parser.add_argument("--one-process", action="store_true", help="leave out the two ranks")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for workload in arguments.workloads:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder)
            parameters, rows = make_model(workload, model), make_rows(workload)
            tokens = rows.ragged_numpy("prompt_ids")[0].size + rows.ragged_numpy("response_ids")[0].size
            print(f"{workload}: {parameters / 1e6:.1f}M parameters, {len(rows)} rows, {tokens} tokens", flush=True)
            results[workload] = {
                "one_process": one_process(model, rows, arguments.repeats, arguments.sizes, arguments.threads)
            }
            if not arguments.one_process:
                results[workload]["two_ranks"] = two_ranks(model, rows, arguments.repeats)
            for setting, seconds in results[workload].items():
                if "weft_s" in seconds:
                    seconds["ratio_to_bare"] = seconds["bare_s"] / seconds["weft_s"]
                print(
                    f"  {setting}: " + ", ".join(f"{name} {value:.3g}" for name, value in seconds.items()), flush=True
                )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
