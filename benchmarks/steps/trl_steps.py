"""TRL's `GRPOTrainer` or `DPOTrainer` for `grpo_step.py` and `algorithm_steps.py`, in .venv-peers.

python benchmarks/steps/trl_steps.py {grpo,dpo} FOLDER SETTINGS      # a system of turns.py; SETTINGS is JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from algorithm_workloads import num_tokens, read
from turns import Turns
from workloads import Workload, prompts_of, reward

PLAIN: dict[str, Any] = {
    "max_steps": 1_000_000,
    "learning_rate": 1e-8,
    "lr_scheduler_type": "constant",
    # The fastest: no activation checkpointing, no mixed precision, no reports.
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "model_init_kwargs": {"dtype": "float32"},
}
"""Settings of both trainers."""


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
"""Environment of a trainer's process, set before it imports vLLM."""


def step_by_step(turns: Turns, microbatch: int, tokens: Callable[[], int]) -> Any:
    """Return a callback that makes a trainer wait for its turn before each step, and reports its
    tokens."""
    import torch
    from transformers import TrainerCallback

    class StepByStep(TrainerCallback):
        started = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.say(microbatch=microbatch, threads=torch.get_num_threads())
            self._wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.say(step_s=time.perf_counter() - self.started, tokens=tokens())
            self._wait(control)

        def _wait(self, control: Any) -> None:
            control.should_training_stop = not turns.go_on()
            self.started = time.perf_counter()

    return StepByStep()


def tokenizer_of(folder: Path) -> Any:
    """Load the tokenizer directly: AutoTokenizer would add Qwen's word splitting to a Qwen2
    model."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder / "model")


def grpo_trainer(
    turns: Turns,
    folder: Path,
    workload: dict[str, Any],
    use_vllm: bool,
    microbatch: int,
    *,
    processes: int = 1,
    adapter: Any = None,
    **more: Any,
) -> Any:
    """Return a trainer on this many processes, each with microbatches of `microbatch` rows. `more`
    are settings of `GRPOConfig`, `adapter` is a configuration of `peft`."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    given = {**PLAIN, **more}
    if use_vllm and given["use_cpu"]:
        from trl.generation.vllm_generation import VLLMGeneration  # pyright: ignore[reportMissingImports]

        VLLMGeneration.sync_weights = sync_weights
    work, lengths = Workload.of(workload), list[int]()

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [reward(text) for text in completions]

    def tokens() -> int:
        number = sum(lengths)
        lengths.clear()
        return number

    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        # One optimizer step on all rows, in microbatches.
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=work.rows // (microbatch * processes),
        num_generations=work.num_samples,
        max_completion_length=work.max_tokens,
        beta=0.0,
        vllm_importance_sampling_correction=False,  # it costs a second forward pass
        shuffle_dataset=False,
        use_vllm=use_vllm,
        vllm_mode="colocate",
        vllm_max_model_length=work.context,
        **{"generation_kwargs": {"detokenize": False} if use_vllm else None, **given},
    )
    return GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=score,
        args=settings,
        processing_class=tokenizer_of(folder),
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts_of(work)]),
        callbacks=[step_by_step(turns, microbatch, tokens)],
        peft_config=adapter,
    )


def sync_weights(generation: Any) -> None:
    """Replace TRL's method, which fails on a CPU. There vLLM repacks weights, and accepts new ones
    only between these two calls."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    initialize_layerwise_reload(runner.model)
    runner.model.load_weights(generation._iter_named_params())
    finalize_layerwise_reload(runner.model, runner.model_config)
    generation.llm.reset_prefix_cache()


def dpo_trainer(turns: Turns, folder: Path, microbatch: int) -> Any:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports]

    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]

    def length(pair: dict[str, str]) -> int:
        return len(pair["prompt"].split()) + max(
            len(pair[side].split()) for side in ("chosen", "rejected")
        )

    pairs.sort(key=length)  # pairs of similar length share a microbatch, to save padding
    tokens = num_tokens(read(folder / "pairs.jsonl"))
    settings = DPOConfig(
        output_dir=str(folder / "trl"),
        # One optimizer step on all pairs, in microbatches.
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=len(pairs) // microbatch,
        precompute_ref_log_probs=True,
        train_sampling_strategy="sequential",
        max_length=None,
        **PLAIN,
    )
    trainer = DPOTrainer(
        model=str(folder / "model"),
        args=settings,
        processing_class=tokenizer_of(folder),
        train_dataset=Dataset.from_list(pairs),
        callbacks=[step_by_step(turns, microbatch, lambda: tokens)],
    )
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    made = num_tokens(
        [{name.removesuffix("_ids"): row[name] for name in names} for row in trainer.train_dataset]
    )
    if made != tokens:
        raise SystemExit(f"TRL made {made} tokens of the pairs, which have {tokens}")
    return trainer


if __name__ == "__main__":
    system = Turns()
    os.environ |= ENVIRONMENT
    make = grpo_trainer if sys.argv[1] == "grpo" else dpo_trainer
    make(system, Path(sys.argv[2]), **json.loads(sys.argv[3])).train()
