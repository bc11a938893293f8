"""The text of each token of a response, as far as the run's tokenizer is on this machine. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...dataflow.errors import UserError
from ...dataflow.prompts.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a token decodes to that has only some bytes of a character."""
LONGEST_CHARACTER = 6
"""Tokens that one character may lie in."""
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space before a word, in tokens of SentencePiece."""


def tokenizer_of(config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a run; None where it is not on this machine.

    Args:
        config: of the run.
    """
    groups = config.get("groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        for name in ("tokenizer", "model"):
            where = group.get(name) if isinstance(group, Mapping) else None
            if isinstance(where, str) and (found := _load(where)) is not None:
                return found
    return None


@lru_cache(maxsize=8)
def _load(where: str) -> Tokenizer | None:
    folder = Path(where)
    if not (folder / "tokenizer.json").is_file():
        folder = _cached(where)
    if folder is None:
        return None
    try:
        return Tokenizer.load(folder)
    except (UserError, OSError):
        return None


def _cached(name: str) -> Path | None:
    """The folder of a Hugging Face id in the cache of this machine."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "tokenizer.json")
    except (ImportError, ValueError):  # not an id, but a path that is gone
        return None
    return Path(found).parent if isinstance(found, str) else None


def token_texts(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """The text of each token, special ones too. Of a character in several tokens the first has all of it, the others nothing.

    Args:
        tokenizer: None: tokens are shown by their numbers.
        ids: of the tokens.
    """
    if tokenizer is None:
        return [f"⟨{id}⟩" for id in ids]
    backend = tokenizer.backend
    texts: list[str] = []
    place = 0
    while place < len(ids):
        number = 1
        text = backend.decode([ids[place]], skip_special_tokens=False)
        while UNFINISHED in text and number < min(LONGEST_CHARACTER, len(ids) - place):
            longer = backend.decode(list(ids[place : place + number + 1]), skip_special_tokens=False)
            number += 1
            if UNFINISHED not in longer:
                text = longer
                break
        else:
            number = 1
        if (backend.id_to_token(ids[place]) or "").startswith(WORD_START) and not text.startswith(" "):
            text = f" {text}"
        texts += [text, *[""] * (number - 1)]
        place += number
    return texts
