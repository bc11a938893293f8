"""Workloads: a random model in a folder, with tokenizer and prompts, without Weft for TRL's
process.

(a) is a small model, where overhead dominates; (b) has a vocabulary of 32k, where the head is most
of the work; (c) is like (b), with responses that end by themselves: most are short, a few are long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

STOP, PAD = 1, 0
"""Token ids."""
PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Workload:
    """Each system's work per step and best settings."""

    name: str
    num_prompts: int
    max_tokens: int
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    mlp: int
    num_samples: int = 8
    """Responses per prompt."""
    prompt_tokens: int = PROMPT_TOKENS
    mean_tokens: int | None = None
    """[tokens] Mean length of responses that end by themselves; None gives all `max_tokens`."""
    placement: tuple[int, int] = (2, 2)
    """Weft's actor and rollout ranks, each with an equal share of the cores: the fastest choice."""
    trl_microbatch: int = 16
    """[rows] TRL's microbatch, the fastest of 4 to 64."""

    @property
    def rows(self) -> int:
        return self.num_prompts * self.num_samples

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def described(self) -> str:
        length = f"{self.max_tokens} tokens"
        if self.mean_tokens:
            length = f"about {self.mean_tokens} tokens, {self.max_tokens} at most"
        return f"({self.name}) {self.num_prompts} prompts x {self.num_samples} samples x {length}, vocabulary {self.vocabulary}"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Workload:
        return cls(**{**settings, "placement": tuple(settings["placement"])})

    def small(self) -> Workload:
        """Return the same workload at the size of a test."""
        tiny = {
            "vocabulary": 256,
            "hidden": 64,
            "layers": 2,
            "heads": 2,
            "mlp": 128,
            "trl_microbatch": 4,
        }
        tokens = {"max_tokens": 16, "mean_tokens": 6} if self.mean_tokens else {"max_tokens": 8}
        return replace(self, num_prompts=2, num_samples=4, **tiny, **tokens)


_25M = Workload(
    "b",
    num_prompts=8,
    max_tokens=64,
    vocabulary=32_000,
    hidden=384,
    layers=6,
    heads=6,
    mlp=1280,
    trl_microbatch=8,
)

WORKLOADS = {
    "a": Workload(
        "a", num_prompts=32, max_tokens=64, vocabulary=1024, hidden=128, layers=4, heads=4, mlp=512
    ),
    "b": _25M,
    "c": replace(_25M, name="c", max_tokens=256, mean_tokens=48),
}


def reward(response: str) -> float:
    """Return the share of words that contain a 7, a cheap reward that differs within a group."""
    words = response.split()
    return sum("7" in word for word in words) / max(1, len(words))


def prompts_of(workload: Workload) -> list[str]:
    """Return the prompts of a step, each with `prompt_tokens` tokens."""
    size, columns = workload.vocabulary - 2, range(workload.prompt_tokens)
    return [
        " ".join(f"w{2 + (7919 * row + 104_729 * column) % size}" for column in columns)
        for row in range(workload.num_prompts)
    ]


def prepare(workload: Workload, folder: Path) -> Path:
    """Write `model/` (weights, tokenizer) and `prompts.jsonl`, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in prompts_of(workload))
    )
    make_tokenizer(workload, folder / "model")
    make_model(workload, folder / "model")
    return folder


def make_tokenizer(workload: Workload, folder: Path) -> None:
    """Save a tokenizer with one token per word: w2, w3, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<stop>", *(f"w{i}" for i in range(2, workload.vocabulary))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<stop>")
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)


def make_model(workload: Workload, folder: Path) -> float:
    """Save a Qwen2 model with random weights, tied embeddings, and the workload's stop probability.
    Return the stop token's mean probability over random contexts.

    The first coordinate of the residual stream is constant, so the first coordinate of the stop
    token's embedding acts as a bias on its logit. With `mean_tokens`, the bias gives a mean stop
    probability of 1 / `mean_tokens`; without, almost 0.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=workload.vocabulary,
        hidden_size=workload.hidden,
        intermediate_size=workload.mlp,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.heads,
        max_position_embeddings=max(128, workload.context),
        tie_word_embeddings=True,
        bos_token_id=STOP,
        eos_token_id=STOP,
        pad_token_id=PAD,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    embedding: torch.Tensor = model.model.embed_tokens.weight
    with torch.no_grad():
        embedding[:, 0] = 1.0
        contexts = torch.randint(2, workload.vocabulary, (16, min(64, workload.context)))
        hidden = model.model(input_ids=contexts).last_hidden_state.flatten(0, 1)
        others = (hidden @ embedding.T).index_fill_(1, torch.tensor([STOP]), -math.inf).logsumexp(-1)
        rest = hidden[:, 1:] @ embedding[STOP, 1:]

        def stops(value: float) -> float:
            return float(torch.sigmoid(hidden[:, 0] * value + rest - others).mean())

        if workload.mean_tokens is None:
            embedding[STOP, 0] = -100.0 / float(hidden[:, 0].mean())
        else:
            low, high = -100.0, 100.0
            if float(hidden[:, 0].mean()) < 0:
                low, high = high, low
            for _ in range(50):
                middle = (low + high) / 2
                low, high = (middle, high) if stops(middle) < 1 / workload.mean_tokens else (low, middle)
            embedding[STOP, 0] = low
        probability = stops(float(embedding[STOP, 0]))
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    model.save_pretrained(folder)
    return probability
