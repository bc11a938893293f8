"""Train, then offload while a checkpoint is written, as a colocated run does; print host memory.

Host memory is measured while the trainer is offloaded and rank 0 writes the model's folder, minus the
memory of the process with its engine but without the engine's tensors. The offloaded trainer holds no
device memory, which the fake GPU takes from the host.
"""

import json
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import weft.workers.training.fsdp as fsdp
from weft.algorithms.policy_loss import PolicyLoss
from weft.controllers.planner.phase_memory import placed
from weft.dataflow.batch import Batch
from weft.workers.actor import ActorConfig
from weft.workers.training.agreement import Agreement
from weft.workers.training.head_logprobs import HeadForm
from weft.workers.training.memory import folder_bytes, model_size, training_memory
from weft.workers.training.packed_attention import VARLEN
from weft.workers.worker import Context


def host_bytes() -> int:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return sum(int(kib) << 10 for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


class Peak:
    """The most host memory while the context is open."""

    def __enter__(self) -> "Peak":
        self.peak, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, host_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def make_model(folder: Path) -> None:
    settings: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}
    settings |= {"num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 8192}
    made: Any = Qwen2ForCausalLM(Qwen2Config(**settings, tie_word_embeddings=False))
    made.save_pretrained(folder)


def main(folder: Path) -> dict[str, int]:
    make_model(folder / "model")
    fsdp.find_agreement = lambda *_, **__: Agreement(True, True, VARLEN, HeadForm(), ())
    fsdp.gradient_norm = lambda *_, **__: 0.5
    config = ActorConfig(model=str(folder / "model"), dtype="bfloat16")
    engine = fsdp.FsdpEngine(config, Context(name="actor", devices=("0",)), config)
    rows = Batch.of(
        sample_id=[0, 1],
        group_id=[0, 0],
        prompt_ids=[[3] * 8] * 2,
        response_ids=[[5] * 8] * 2,
        advantages=[[1.0] * 8] * 2,
        response_logprobs=[[-1.0] * 8] * 2,
    )
    # The estimate for the process covers imports and what loading leaves in the heap.
    before = host_bytes() - torch.cuda.memory_reserved()
    host = Peak()
    for step in range(2):
        engine.onload()
        engine.accumulate(rows, PolicyLoss(), last=True)
        engine.apply()
        engine.snapshot(folder / f"snapshot{step}")
        engine.offload()
        with host:
            engine.written(wait=True)
    assert torch.cuda.memory_reserved() < 64 << 20
    size = model_size(folder / "model")
    made = training_memory(size, config, ranks=1, trains=True, lora=None, saves=True)
    rest, _, on_host = placed(made, config, on_gpu=True)
    planned = sum(rest.values()) + sum(on_host.values()) + folder_bytes(size, config, None)
    engine.close()
    return {"measured": host.peak - before, "planned": planned}


with tempfile.TemporaryDirectory() as path:
    print(json.dumps(main(Path(path))))
