"""A sample for people: prompt, response, and the parts of its reward."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...dataflow.column import (
    ANSWER,
    EPISODE_ID,
    FINISH_REASON,
    PREFERRED,
    PROMPT,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    REWARD,
    REWARD_PARTS,
    is_of_reward,
)
from ...dataflow.untrusted_text import cut, cut_lines, readable

LONGEST = 1200
"""[characters] Longest text to show."""
MOST_LINES = 16
MOST_TOKENS = 40
"""Maximum number of token ids to show without text."""


@dataclass(frozen=True)
class Sample:
    """One recorded row, with long texts cut."""

    step: int
    texts: Mapping[str, str]
    """`prompt`, `response` and `answer`; missing texts are left out."""
    finish_reason: str = ""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Part of the reward -> value; also whether the response was preferred."""
    episode: int | None = None
    """Id of the row's episode."""

    @property
    def shown(self) -> dict[str, str]:
        """The texts, cut and escaped for the terminal."""
        return {name: cut_lines(readable(text), MOST_LINES) for name, text in self.texts.items()}

    @property
    def verdict(self) -> str:
        """Rewards and truncation as text.

        >>> Sample(3, {}, "length", 0.5, {"form": 1.0, "right": 0.0}).verdict
        'reward 0.5 (form 1, right 0); truncated at the limit of tokens'
        """
        values = ", ".join(f"{readable(name)} {value:.4g}" for name, value in self.parts.items())
        if self.reward is not None:
            values = f"reward {self.reward:.4g}" + (f" ({values})" if values else "")
        truncated = "truncated at the limit of tokens" if self.finish_reason == "length" else ""
        return "; ".join(part for part in (values, truncated) if part)

    def __str__(self) -> str:
        episode = "" if self.episode is None else f", episode {self.episode}"
        verdict = f": {self.verdict}" if self.verdict else ""
        lines = [f"sample of step {self.step}{episode}{verdict}"]
        for name, text in self.shown.items():
            first, *rest = text.split("\n")
            lines += [f"  {name + ':':9} {first}", *(f"{'':12}{line}" for line in rest)]
        return "\n".join(lines)


def read_sample(paths: Iterable[Path], step: int) -> Sample | None:
    """Return the first row of the first readable file of samples, or None."""
    for path in paths:
        try:
            with pa.memory_map(str(path)) as file:
                reader = pa.ipc.open_file(file)
                batch = reader.get_batch(0) if reader.num_record_batches else None
                if batch is not None and batch.num_rows:
                    return sample_of(batch.slice(0, 1), step)
        except (pa.ArrowException, OSError, UnicodeDecodeError):  # a later step will show a sample
            continue
    return None


def sample_of(row: pa.RecordBatch, step: int) -> Sample:

    def value(name: object) -> Any:
        return row.column(str(name))[0].as_py() if str(name) in row.schema.names else None

    texts: dict[str, str] = {}
    for name, ids in ((PROMPT, PROMPT_IDS), (RESPONSE, RESPONSE_IDS), (ANSWER, None)):
        text = value(name)
        tokens = value(ids) if text is None and ids is not None else None
        if tokens is not None:
            more = " ..." if len(tokens) > MOST_TOKENS else ""
            text = f"tokens {' '.join(map(str, tokens[:MOST_TOKENS]))}{more}"
        if text is not None:
            texts[str(name)] = cut(str(text), LONGEST)
    names = [name for name in row.schema.names if is_of_reward(name) or name == str(PREFERRED)]
    parts = {name.removeprefix(f"{REWARD}/"): value(name) for name in names}
    reward = parts.pop(str(REWARD), None)
    with suppress(ValueError, TypeError, AttributeError):
        parts |= json.loads(parts.pop(str(REWARD_PARTS), "{}"))
    parts = {name: float(number) for name, number in parts.items() if isinstance(number, int | float)}
    reward = None if reward is None else float(reward)
    episode = value(EPISODE_ID)
    episode = episode if isinstance(episode, int) else None
    return Sample(step, texts, str(value(FINISH_REASON) or ""), reward, parts, episode)
