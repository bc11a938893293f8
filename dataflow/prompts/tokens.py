"""Tokens of prompts and responses: parted where one ends and the other begins, with the token that ends a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from ..batch import ragged_array
from ..errors import UserError
from .conversations import Texts
from .damage import short
from .origin import Origin
from .tokenizer import Tokenizer


def tokenise(texts: Texts, origin: Origin, tokenizer: Tokenizer) -> dict[str, pa.Array]:
    """The `*_ids` columns of rows: lists of int32, one a row.

    Raises:
        UserError: a prompt or response has no tokens; the message names the row.
    """
    special = not (texts.chat or texts.has_bos)
    values, offsets = tokenizer.encode(texts.prompts, add_special_tokens=special)
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise UserError(f"{origin(int(empty[0]))}: the prompt {short(texts.prompts[empty[0]])} has no tokens")
    if not texts.responses and not texts.whole:
        return {"prompt_ids": ragged_array(values, offsets, pa.int32())}
    prompts = np.split(values, offsets[1:-1])
    # Templates write the token that ends a turn; plain text has none, and a model must learn to stop.
    stop = None if texts.chat else tokenizer.token_id("eos_token")
    if texts.whole:
        return _whole(prompts, texts, origin, tokenizer, stop)
    responses = _responses(prompts, texts, origin, tokenizer, special)
    for name, rows in responses.items():
        if stop is not None:
            responses[name] = rows = [_stopped(response, stop) for response in rows]
        for row, response in enumerate(rows):
            if len(response) == 0:
                raise UserError(
                    f"{origin(row)}: the response {short(texts.responses[name][row])} has no tokens ({name})"
                )
    return {"prompt_ids": _lists(prompts), **{name: _lists(rows) for name, rows in responses.items()}}


def _responses(
    prompts: list[np.ndarray], texts: Texts, origin: Origin, tokenizer: Tokenizer, special: bool
) -> dict[str, list[np.ndarray]]:
    """The tokens of responses, by column. A prompt whose last token reaches into a response is shortened in place."""
    # Prompt and response are tokenised together, so that the response's first word is split as in running text.
    wholes = {
        name: _rows(tokenizer, [prompt + tail for prompt, tail in zip(texts.prompts, tails, strict=True)], special)
        for name, tails in texts.responses.items()
    }
    responses = {
        name: [whole[len(prompt) :] for whole, prompt in zip(rows, prompts, strict=True)]
        for name, rows in wholes.items()
    }
    for row, prompt in enumerate(prompts):
        if not all(np.array_equal(rows[row][: len(prompt)], prompt) for rows in wholes.values()):
            prompts[row], parted = _part(
                prompt,
                {name: rows[row] for name, rows in wholes.items()},
                {name: tails[row] for name, tails in texts.responses.items()},
                tokenizer,
            )
            for name, response in parted.items():
                responses[name][row] = response
            if len(prompts[row]) == 0:
                raise UserError(f"{origin(row)}: prompt and response have no token apart from each other")
    return responses


def _part(
    prompt: np.ndarray, wholes: Mapping[str, np.ndarray], tails: Mapping[str, str], tokenizer: Tokenizer
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Prompt and responses of a row where a token reaches from one into the other.

    The prompt keeps its own tokens, as in generation, and responses are tokenised by themselves. Where that would
    change the text (some tokenizers begin every text with a space), the token that reaches over goes to the responses.
    """
    alone = {name: _rows(tokenizer, [tail], False)[0] for name, tail in tails.items()}
    decode = tokenizer.backend.decode
    if all(
        decode([*prompt, *alone[name]], skip_special_tokens=False) == decode(whole.tolist(), skip_special_tokens=False)
        for name, whole in wholes.items()
    ):
        return prompt, alone
    same = min(len(prompt), *map(len, wholes.values()))
    differs = np.any([whole[:same] != prompt[:same] for whole in wholes.values()], axis=0)
    cut = int(np.argmax(differs)) if differs.any() else same
    return prompt[:cut], {name: whole[cut:] for name, whole in wholes.items()}


def _whole(
    rows: list[np.ndarray], texts: Texts, origin: Origin, tokenizer: Tokenizer, stop: int | None
) -> dict[str, pa.Array]:
    """Language modeling: the first token of a text is its context, all others are predicted."""
    if stop is not None:
        rows = [_stopped(row, stop) for row in rows]
    for index, row in enumerate(rows):
        if len(row) < 2:
            raise UserError(f"{origin(index)}: the text {short(texts.prompts[index])} has fewer than two tokens")
    texts.prompts[:] = tokenizer.backend.decode_batch([row[:1].tolist() for row in rows], skip_special_tokens=False)
    return {"prompt_ids": _lists([row[:1] for row in rows]), "response_ids": _lists([row[1:] for row in rows])}


def _stopped(response: np.ndarray, stop: int) -> np.ndarray:
    """The response with the token that stops generation at its end."""
    ended = len(response) > 0 and response[-1] == stop
    return response if ended else np.concatenate([response, np.array([stop], np.int32)])


def _rows(tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool) -> list[np.ndarray]:
    values, offsets = tokenizer.encode(texts, add_special_tokens=add_special_tokens)
    return np.split(values, offsets[1:-1])


def _lists(rows: Sequence[np.ndarray]) -> pa.Array:
    """A list<int32> array, one list per row."""
    return ragged_array(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), pa.int32())
