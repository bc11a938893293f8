"""Samples: the columns of some rows as Python values, read once for all reward functions that are called with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from ...dataflow.batch import Batch
from ...dataflow.column import ANSWER, IDENTITY, PROMPT, PROMPT_IDS, RESPONSE, RESPONSE_IDS
from ...dataflow.errors import UserError, nearest

ANSWERS = ("solution", "ground_truth", "label", "target", "answer")
"""Names of the ground truth in other libraries. Where the rows have no such column it is Weft's `answer`."""
MESSAGES = "prompt_messages"
"""The column with a prompt's messages, where the file had any."""
_OURS = {*map(str, (PROMPT, PROMPT_IDS, RESPONSE, RESPONSE_IDS, *IDENTITY)), MESSAGES}


class Samples:
    """Some rows, as reward functions read them.

    Args:
        decode: token ids of many texts -> the texts.
    """

    def __init__(self, rows: Batch, decode: Callable[[list[list[int]]], list[str]]) -> None:
        self.rows = rows
        self._decode = decode
        self._lists: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: str) -> bool:
        return name in self.rows or (name in ANSWERS and ANSWER in self.rows)

    def __getitem__(self, name: str) -> list[Any]:
        """A column, by its name; a ground truth also by the names that other libraries have for it.

        Raises:
            UserError: the rows have none of this name.
        """
        if name not in self._lists:
            source = name if name in self.rows or name not in ANSWERS else str(ANSWER)
            if source not in self.rows:
                raise UserError(f"there is no column {name!r}{nearest(name, self.rows.columns)}")
            self._lists[name] = self.rows[source].to_pylist()
        return self._lists[name]

    def take(self, k: int) -> Samples:
        """One of them alone."""
        return Samples(self.rows.take([k]), self._decode)

    @cached_property
    def responses(self) -> list[str]:
        return self._decode(self[str(RESPONSE_IDS)])

    @cached_property
    def prompts(self) -> list[str]:
        """Texts of the prompts, after the chat template; "" where the rows have none."""
        if PROMPT in self.rows:
            return self[str(PROMPT)]
        return self._decode(self[str(PROMPT_IDS)]) if PROMPT_IDS in self.rows else [""] * len(self)

    @cached_property
    def dialogues(self) -> tuple[list[Any], list[Any]]:
        """Prompts and responses as messages where the prompts were messages, otherwise as texts."""
        if MESSAGES not in self.rows:
            return self.prompts, self.responses
        prompts = [[{k: v for k, v in m.items() if v is not None} for m in messages] for messages in self[MESSAGES]]
        return prompts, [[{"role": "assistant", "content": text}] for text in self.responses]

    @property
    def rest(self) -> dict[str, list[Any]]:
        """Columns that came with the prompts or from other nodes: all but tokens, identities and prompts."""
        return {name: self[name] for name in self.rows.columns if name not in _OURS}

    def or_else(self, name: str, default: Any) -> list[Any]:
        """A column as it is in the file, with the default where the rows have none or a null."""
        values = self[name] if name in self else [None] * len(self)
        return [default if value is None else value for value in values]
