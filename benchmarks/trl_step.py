"""TRL's `GRPOTrainer`, a step at a time. Runs in an environment of its own (`make bench-peers`), never in Weft's."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from turns import Turns
from workloads import WORKLOADS, Workload, prompts_of, reward


def main(workload: Workload, folder: Path, use_vllm: bool, microbatch: int) -> None:
    turns = Turns()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    if use_vllm:
        from trl.generation.vllm_generation import VLLMGeneration  # pyright: ignore[reportMissingImports]

        VLLMGeneration.sync_weights = sync_weights

    class StepByStep(TrainerCallback):
        started = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.say(microbatch=microbatch, threads=torch.get_num_threads())
            self._wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.say(step_s=time.perf_counter() - self.started, tokens=sum(lengths))
            lengths.clear()
            self._wait(control)

        def _wait(self, control: Any) -> None:
            control.should_training_stop = not turns.go_on()
            self.started = time.perf_counter()

    lengths: list[int] = []

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [reward(text) for text in completions]

    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        # One optimizer step on all rows, in microbatches.
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=workload.rows // microbatch,
        num_generations=workload.num_samples,
        max_completion_length=workload.max_tokens,
        max_steps=1_000_000,
        learning_rate=1e-8,
        lr_scheduler_type="constant",
        beta=0.0,
        # The fastest: no second forward pass for the ratio, no recomputed activations, no mixed precision, no reports.
        vllm_importance_sampling_correction=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"},
        use_vllm=use_vllm,
        vllm_mode="colocate",
        vllm_max_model_length=workload.context,
        generation_kwargs={"detokenize": False} if use_vllm else None,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=score,
        args=settings,
        # AutoTokenizer would put Qwen's own splitting of words into a Qwen2 model's tokenizer.
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts_of(workload)]),
        callbacks=[StepByStep()],
    )
    trainer.train()


def sync_weights(generation: Any) -> None:
    """In place of TRL's own, which fails on a CPU: vLLM repacks weights there, and takes new ones only between these two calls."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    initialize_layerwise_reload(runner.model)
    runner.model.load_weights(generation._iter_named_params())
    finalize_layerwise_reload(runner.model, runner.model_config)
    generation.llm.reset_prefix_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--vllm", action="store_true", help="generate with colocated vLLM")
    parser.add_argument("--microbatch", type=int, help="rows in a microbatch; default: what was fastest")
    arguments = parser.parse_args()
    chosen = WORKLOADS[arguments.workload]
    chosen = chosen.small() if arguments.small else chosen
    main(chosen, arguments.folder, arguments.vllm, arguments.microbatch or chosen.trl_microbatch)
