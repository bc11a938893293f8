"""An engine that samples random turns in the formats of model families, for `exact.py`."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from weft.dataflow.prompts.tokenizer import Tokenizer
from weft.workers.generation.engine import Response
from weft.workers.models.model_folder import read_stop_tokens

MOST_IDS = 128
WORDS = (
    "It is 42.",
    " Hello",
    "\n\nthere ",
    "空は青い。",
    "Größe",
    "👩‍👩‍👧",
    "{",
    '"',
    "  ",
    "e\u0301",
    "<b>",
)


def _turn(family: str, draw: random.Random) -> str:
    """Return the text of a turn, as a model of this family writes it."""

    def words(most: int) -> str:
        return "".join(draw.choice(WORDS) for _ in range(draw.randint(0, most)))

    calls: list[tuple[str, str]] = []
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        arguments = json.dumps({"a": draw.randint(-5, 9), "b": words(2)}, ensure_ascii=False)
        calls.append((draw.choice(("add", "ls")), arguments if draw.random() < 0.9 else "{oops"))
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    thoughts = words(4) if draw.random() < 0.6 else ""
    if family.startswith("qwen"):
        shown = "".join(f"\n<tool_call>\n{each}\n</tool_call>" for each in objects)
        opened = f"<think>\n{thoughts}\n</think>\n\n" if family == "qwen3" and thoughts else ""
        return opened + words(4) + shown
    if family == "llama3":
        parameters = [each.replace('"arguments"', '"parameters"') for each in objects]
        return draw.choice(("", "<|python_tag|>")) + "; ".join(parameters) if calls else words(5)
    if family == "mistral":
        return f"[TOOL_CALLS][{', '.join(objects)}]" if calls else words(5)
    analysis = f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant" if thoughts else ""
    if calls:
        name, arguments = calls[0]
        return f"{analysis} to=functions.{name}<|channel|>commentary json<|message|>{arguments}"
    return f"{analysis}<|channel|>final<|message|>{words(5)}"


class RandomEngine:
    """Samples random turns of a family. Its version grows while it samples."""

    def __init__(self, folder: Path, family: str) -> None:
        self._tokenizer, self._family = Tokenizer.load(folder), family
        self._stops = [*read_stop_tokens(folder)]
        self._steps, self._tickets = 0, itertools.count()
        self._left: dict[int, tuple[list[int], list[int], int]] = {}
        """Ticket -> (ids, versions so far, length)."""

    @property
    def version(self) -> int:
        return self._steps // 20

    @property
    def num_unfinished(self) -> int:
        return len(self._left)

    def submit(self, request: Any, sampling: Any) -> int:
        draw, ticket = random.Random(request.seed), next(self._tickets)
        ids = [*self._ids(draw), draw.choice(self._stops)]
        self._left[ticket] = ids, [], min(len(ids), sampling.max_tokens)
        return ticket

    def step(self) -> list[Any]:
        self._steps += 1
        finished: list[Response] = []
        for ticket, (ids, versions, length) in [*self._left.items()]:
            versions += [self.version] * min(10, length - len(versions))
            if len(versions) == length:
                del self._left[ticket]
                draw = np.random.default_rng(ticket)
                logprobs = (-8 * draw.random(length) - 1e-4).astype(np.float32)
                arrays = np.array(ids[:length], np.int32), logprobs, np.array(versions, np.int32)
                reason = "stop" if length == len(ids) else "length"
                finished.append(Response(ticket, 0, *arrays, reason))
        return finished

    def abort(self, tickets: Collection[int]) -> None:
        for ticket in tickets:
            self._left.pop(ticket, None)

    def close(self) -> None:
        pass

    def _ids(self, draw: random.Random) -> list[int]:
        if draw.random() < 0.15:  # with special tokens and invalid bytes
            size = self._tokenizer.backend.get_vocab_size()
            drawn = [draw.randrange(size) for _ in range(draw.randint(0, MOST_IDS))]
            return [each for each in drawn if each not in self._stops]
        text = _turn(self._family, draw)
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.choice((0, 0, 1, 3, 40))))
        parts = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        return self._tokenizer.encode(parts, add_special_tokens=False)[0].tolist()
