"""The bound: bare vLLM generates a step's tokens, and plain `transformers` trains on the rows.

It has no reward, no real advantages, no weight transfer and no other process. It generates
responses of the lengths that Weft sampled, so that steps are equal.

    python benchmarks/steps/grpo_bound.py FOLDER SETTINGS      # a system of turns.py; SETTINGS is JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turns import Turns
from workloads import Workload, prompts_of

MICROBATCHES = (4, 8, 16, 32)
"""[rows] Sizes to try during warm-up."""


def main(workload: Workload, folder: Path) -> None:
    turns = Turns()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    import torch

    threads = torch.get_num_threads()
    trainer = Trainer(folder / "model")
    generator = Generator(workload, folder / "model")
    warm = [workload.mean_tokens or workload.max_tokens] * workload.rows
    rows = generator.generate(warm)
    seconds = {
        size: trainer.step(rows, size)
        for size in MICROBATCHES
        if size <= workload.rows
        for _ in range(2)
    }
    best = min(seconds, key=lambda size: seconds[size])  # time of the second try
    turns.say(microbatch=best, threads=threads)
    while turns.go_on():
        lengths = turns.command["lengths"].pop(0)
        started = time.perf_counter()
        rows = generator.generate(lengths)
        generate_s = time.perf_counter() - started
        train_s = trainer.step(rows, best)
        turns.say(
            step_s=time.perf_counter() - started,
            generate_s=generate_s,
            train_s=train_s,
            tokens=sum(lengths),
        )


class Generator:
    """vLLM's engine in this process, configured as in Weft."""

    def __init__(self, workload: Workload, model: Path) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        set_num_threads = torch.set_num_threads
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype="float32",
                max_model_len=workload.context,
                max_num_seqs=workload.rows,
                max_num_batched_tokens=16384,
                kv_cache_memory_bytes=1 << 30,
                enable_prefix_caching=False,
                enable_chunked_prefill=False,
                async_scheduling=False,
                enforce_eager=True,
                skip_tokenizer_init=True,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
            )
        )
        torch.set_num_threads = set_num_threads  # vLLM replaces it by a no-op
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        prompts: Any = tokenizer(prompts_of(workload))["input_ids"]
        self._prompts: list[list[int]] = [ids for ids in prompts for _ in range(workload.num_samples)]
        self._number = 0

    def generate(self, lengths: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Return prompt and response of each row, with responses of these lengths."""
        import torch
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        order: dict[str, int] = {}
        for row, (prompt, length) in enumerate(zip(self._prompts, lengths, strict=True)):
            self._number += 1
            order[str(self._number)] = row
            parameters = SamplingParams(
                max_tokens=length,
                temperature=1.0,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, parameters)
        rows: list[tuple[list[int], list[int]]] = [([], [])] * len(order)
        with torch.compiler.set_stance("force_eager"):
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    completion: Any = output.outputs[0]  # pyright: ignore[reportIndexIssue]
                    row = order[output.request_id]
                    rows[row] = (self._prompts[row], list(completion.token_ids))
        return rows


class Trainer:
    """The plainest training step: padded microbatches of similar length, gradient clipping,
    AdamW."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-8, fused=True)

    def step(self, rows: Sequence[tuple[list[int], list[int]]], microbatch: int) -> float:
        """Take one GRPO step with advantages of +1 and -1, and return its seconds."""
        import torch

        started = time.perf_counter()
        ordered = sorted(rows, key=lambda row: -len(row[1]))
        num_tokens = sum(len(response) for _, response in ordered)
        for start in range(0, len(ordered), microbatch):
            part = ordered[start : start + microbatch]
            widest = max(len(prompt) + len(response) for prompt, response in part)
            ids = torch.zeros(len(part), widest, dtype=torch.long)
            attention = torch.zeros_like(ids)
            trained = torch.zeros(len(part), widest)
            advantages = torch.tensor([1.0 if (start + k) % 2 else -1.0 for k in range(len(part))])
            for k, (prompt, response) in enumerate(part):
                end = len(prompt) + len(response)
                ids[k, :end] = torch.tensor(prompt + response)
                attention[k, :end] = 1
                trained[k, len(prompt) : end] = 1.0
            logits = self._model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
            logprobs = -torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), ids[:, 1:], reduction="none"
            )
            ratio = (logprobs - logprobs.detach()).exp()
            gain = torch.minimum(
                ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]
            )
            (-(gain * trained[:, 1:]).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - started


if __name__ == "__main__":
    main(Workload.of(json.loads(sys.argv[2])["workload"]), Path(sys.argv[1]))
