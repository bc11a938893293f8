"""The bound for `algorithm_steps.py`: the passes of a PPO or DPO step in plain `transformers`.

It has no driver, no columns, no real advantages and no other process, and rows become tensors
before the clock starts. Rows of similar length share a microbatch. Padding is on the right and
needs no mask. The head only sees positions that predict a response token.

    python benchmarks/steps/algorithm_bound.py {ppo,dpo} FOLDER      # a system of turns.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithm_workloads import EPOCHS, MINIBATCHES, num_tokens, read
from turns import Turns

MICROBATCHES = (256, 512, 1024, 2048, 4096)
"""[tokens] Padded sizes to try during warm-up."""

Row = tuple[list[int], list[int]]
"""A prompt and a response."""


def main(algorithm: str, folder: Path) -> None:
    turns = Turns()
    import torch

    step = PpoStep(folder) if algorithm == "ppo" else DpoStep(folder)
    seconds = {
        size: timed(step, size) for _ in range(2) for size in MICROBATCHES
    }  # time of the second try
    best = min(seconds, key=lambda size: seconds[size])
    step.prepare(best)
    padding = 1 - step.tokens / sum(part.ids.numel() for part in step.parts)
    turns.say(microbatch=best, threads=torch.get_num_threads(), padding=round(padding, 4))
    while turns.go_on():
        started = time.perf_counter()
        step()
        turns.say(step_s=time.perf_counter() - started, tokens=step.tokens)


def timed(step: PpoStep | DpoStep, size: int) -> float:
    step.prepare(size)
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Part:
    ids: Any
    """[rows, longest] int64, padded on the right."""
    predicting: Any
    """[rows, longest] bool: the positions that predict response tokens."""
    targets: Any
    """[T] int64: the response tokens."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Part:
        import torch

        widest = max(len(prompt) + len(response) for prompt, response in rows)
        ids = torch.zeros(len(rows), widest, dtype=torch.long)
        predicting = torch.zeros(len(rows), widest, dtype=torch.bool)
        for k, (prompt, response) in enumerate(rows):
            ids[k, : len(prompt) + len(response)] = torch.tensor(prompt + response)
            predicting[k, len(prompt) - 1 : len(prompt) + len(response) - 1] = True
        targets = torch.tensor([token for _, response in rows for token in response])
        return cls(ids, predicting, targets)


class Model:
    """A causal language model for response log-probabilities, or with a scalar head for one number
    per token."""

    def __init__(self, folder: Path, *, scalar: bool = False, trained: bool = False) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        causal_lm: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._scalar = scalar
        self._backbone = causal_lm.model
        self._head = (
            torch.nn.Linear(causal_lm.config.hidden_size, 1, bias=False) if scalar else causal_lm.lm_head
        )
        self._parameters = [*self._backbone.parameters(), *(self._head.parameters() if scalar else ())]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-8, fused=True) if trained else None

    def __call__(self, part: Part) -> Any:
        """Return [T] values."""
        import torch

        hidden = self._backbone(input_ids=part.ids, use_cache=False).last_hidden_state[part.predicting]
        if self._scalar:
            return self._head(hidden)[:, 0]
        return -torch.nn.functional.cross_entropy(self._head(hidden), part.targets, reduction="none")

    def update(self, parts: Iterable[Part], loss: Callable[[Any, Part], Any]) -> None:
        import torch

        assert self._optimizer is not None
        for part in parts:
            loss(self(part), part).backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


class PpoStep:
    """Three models evaluate all rows, then critic and actor train their epochs of minibatches."""

    def __init__(self, folder: Path) -> None:
        given = read(folder / "rows.jsonl")
        self.tokens = num_tokens(given)
        self._rows = by_length((row["prompt"], row["given"]) for row in given)
        self._evaluating = [Model(folder / "model"), Model(folder / "model", scalar=True)]
        self._critic = Model(folder / "model", scalar=True, trained=True)
        self._actor = Model(folder / "model", trained=True)

    def prepare(self, microbatch: int) -> None:
        self.parts = cut(self._rows, microbatch)
        self._minibatches = [cut(self._rows[k::MINIBATCHES], microbatch) for k in range(MINIBATCHES)]

    def __call__(self) -> None:
        import torch

        with torch.no_grad():
            for model in (*self._evaluating, self._critic):
                for part in self.parts:
                    model(part)

        def value_loss(values: Any, part: Part) -> Any:
            return (values - 1.0).square().sum() / self.tokens

        def policy_loss(logprobs: Any, part: Part) -> Any:
            ratio = (logprobs - logprobs.detach()).exp()
            return torch.maximum(-ratio, -ratio.clamp(0.8, 1.2)).sum() / self.tokens

        for model, loss in ((self._critic, value_loss), (self._actor, policy_loss)):
            for _ in range(EPOCHS):
                for parts in self._minibatches:
                    model.update(parts, loss)


class DpoStep:
    """One optimizer step on both responses of all pairs, with given reference log-probabilities.

    The gradient by a log-probability is one number per row, whose value does not affect the cost.
    So the responses of a pair need not share a microbatch, which saves padding.
    """

    def __init__(self, folder: Path) -> None:
        pairs = read(folder / "pairs.jsonl")
        self.tokens = num_tokens(pairs)
        self._rows = by_length(
            (pair["prompt"], pair[side]) for pair in pairs for side in ("chosen", "rejected")
        )
        self._actor = Model(folder / "model", trained=True)

    def prepare(self, microbatch: int) -> None:
        self.parts = cut(self._rows, microbatch)

    def __call__(self) -> None:
        self._actor.update(self.parts, lambda logprobs, part: -0.05 * logprobs.sum() / len(self._rows))


def by_length(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: len(row[0]) + len(row[1]))


def cut(rows: Sequence[Row], microbatch: int) -> list[Part]:
    """Cut rows, sorted by length, into microbatches of at most this many padded tokens, or a single
    row."""
    parts: list[list[Row]] = []
    for row in rows:
        if parts and (len(parts[-1]) + 1) * (len(row[0]) + len(row[1])) <= microbatch:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [Part.of(part) for part in parts]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
