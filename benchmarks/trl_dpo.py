"""TRL's `DPOTrainer`, a step at a time. Runs in an environment of its own (`make bench-peers`), never in Weft's."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from algorithm_workloads import num_tokens, read
from turns import Turns


def main(folder: Path, microbatch: int) -> None:
    turns = Turns()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports]

    class StepByStep(TrainerCallback):
        started = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.say(microbatch=microbatch, threads=torch.get_num_threads())
            self._wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.say(step_s=time.perf_counter() - self.started, tokens=tokens)
            self._wait(control)

        def _wait(self, control: Any) -> None:
            control.should_training_stop = not turns.go_on()
            self.started = time.perf_counter()

    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    # Pairs of like length stand together, so that little is padded.
    pairs.sort(
        key=lambda pair: len(pair["prompt"].split()) + max(len(pair[side].split()) for side in ("chosen", "rejected"))
    )
    tokens = num_tokens(read(folder / "pairs.jsonl"))
    settings = DPOConfig(
        output_dir=str(folder / "trl"),
        # One optimizer step on all pairs, in microbatches.
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=len(pairs) // microbatch,
        max_steps=1_000_000,
        learning_rate=1e-8,
        lr_scheduler_type="constant",
        # The fastest: the reference is asked once, no recomputed activations, no mixed precision, no reports.
        precompute_ref_log_probs=True,
        train_sampling_strategy="sequential",
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = DPOTrainer(
        model=str(folder / "model"),
        args=settings,
        # AutoTokenizer would put Qwen's own splitting of words into a Qwen2 model's tokenizer.
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_list(pairs),
        callbacks=[StepByStep()],
    )
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    found = num_tokens([{name.removesuffix("_ids"): row[name] for name in names} for row in trainer.train_dataset])
    if found != tokens:
        raise SystemExit(f"TRL made {found} tokens of the pairs, which have {tokens}")
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--microbatch", type=int, required=True, help="pairs")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.microbatch)
