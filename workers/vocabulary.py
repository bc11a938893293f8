"""A model's vocabulary against all that speaks in its ids: its tokenizer, its own settings, and the rows of a source.

Ids beyond it would end a worker in the middle of its work, with an error of the embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dataflow.column import CHOSEN_IDS, PROMPT_IDS, REJECTED_IDS, RESPONSE_IDS
from ..dataflow.errors import UserError
from ..dataflow.safe_files import read_json
from .model_folder import CONFIG_FILE, find_model_config, read_model_config, text_settings

if TYPE_CHECKING:
    from ..dataflow.source import Source

_IDS = (PROMPT_IDS, RESPONSE_IDS, CHOSEN_IDS, REJECTED_IDS)
_NAMED = ("bos_token", "eos_token", "unk_token")
"""Tokens of a tokenizer that are used though no text has them; nothing here is ever padded with one."""


def read_vocabulary(model: str | Path) -> int | None:
    """The number of a model's token ids; None: its `config.json` leaves it to the defaults of `transformers`."""
    return text_settings(read_model_config(model)).get("vocab_size")


def check_vocabulary(model: str | Path, source: Source) -> None:
    """Compare the largest ids with those that the model has.

    Raises:
        UserError: naming both.
    """
    size = read_vocabulary(model)
    if size is None:
        return
    for what, largest in (*_of_settings(model), *_of_tokenizer(model), *_of_rows(source)):
        if largest >= size:
            raise UserError(
                f"{what} {largest}, and the model in {model} has ids 0 to {size - 1} (its vocab_size is {size})"
            )


def _of_settings(model: str | Path) -> Iterator[tuple[str, int]]:
    file = find_model_config(model)
    generation = file.with_name("generation_config.json")
    for name, settings in (
        (CONFIG_FILE, text_settings(read_model_config(model))),
        (generation.name, _read(generation)),
    ):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = settings.get(key)
            for one in ids if isinstance(ids, list) else [ids]:
                if isinstance(one, int):
                    yield f"{model}: {key} in {name} is", one


def _of_tokenizer(model: str | Path) -> Iterator[tuple[str, int]]:
    """Largest id of its ordinary tokens, and those of its named ones. Further special ones, which only a text that spells them has,
    may lie beyond: Gemma 3's text models leave out the token of an image."""
    file = find_model_config(model).with_name("tokenizer.json")
    if not file.is_file():
        return
    stamp = file.stat()
    largest, ids = _tokenizer_ids(file, stamp.st_mtime_ns, stamp.st_size)
    yield f"the tokenizer in {model} has ids up to", largest
    named = {**_read(file.with_name("special_tokens_map.json")), **_read(file.with_name("tokenizer_config.json"))}
    for name in _NAMED:
        token = named.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str) and content in ids:
            yield f"the tokenizer in {model} has as its {name} the id", ids[content]


@functools.lru_cache(maxsize=4)
def _tokenizer_ids(file: Path, _changed: int, _size: int) -> tuple[int, dict[str, int]]:
    """(Largest id of an ordinary token, -1 if there is none; the ids of special tokens by their text)."""
    content = _read(file)
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    added = [token for token in content.get("added_tokens") or () if isinstance(token.get("id"), int)]
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    if isinstance(vocabulary, list):  # of a unigram model: token and score, by id
        vocabulary = {token: number for number, (token, *_) in enumerate(vocabulary)}
    ordinary = [number for token, number in vocabulary.items() if token not in special]
    ordinary += [token["id"] for token in added if not token.get("special")]
    return max(ordinary, default=-1), special


def _of_rows(source: Source) -> Iterator[tuple[str, int]]:
    for column in map(str, _IDS):
        if column not in source.columns:
            continue
        for chunk in source.table.column(column).chunks:
            ids = chunk.flatten()
            if len(ids):
                yield f"{source.name}: column {column!r} has token id", int(ids.to_numpy(zero_copy_only=False).max())


def _read(file: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if the file is missing or not JSON, which is reported where the content is needed."""
    try:
        return read_json(file)
    except (OSError, UserError):
        return {}
