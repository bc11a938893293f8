"""Tokens of prompts and responses: parted where one ends and the other begins, with the token that ends a response."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from ..batch import ragged_array
from ..errors import UserError
from .conversations import Gap, Texts
from .damage import short
from .origin import Origin
from .tokenizer import Tokenizer

MAX_CHARACTERS = 4_000_000
"""Longest text that is tokenised: a million tokens of English. Tokenizers take minutes for longer ones."""


def tokenise(texts: Texts, origin: Origin, tokenizer: Tokenizer) -> dict[str, pa.Array]:
    """The `*_ids` columns of rows, lists of int32, and for responses that may have gaps a `*_mask`, lists of uint8.

    Raises:
        UserError: a prompt or response has no tokens; the message names the row.
    """
    origin, special = origin.of(texts.rows), not (texts.chat or texts.has_bos)
    for row, name in too_many_characters(texts).items():
        text = {"prompt_ids": texts.prompts, **texts.responses}[name][row]
        raise UserError(
            f"{origin(row)}: the {name.removesuffix('_ids')} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read. Shorten "
            "the row, or leave it out with too_long='drop'"
        )
    values, offsets = _encode(tokenizer, texts.prompts, special)
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise UserError(f"{origin(int(empty[0]))}: the prompt {short(texts.prompts[empty[0]])} has no tokens")
    if not texts.responses and not texts.whole:
        return {"prompt_ids": ragged_array(values, offsets, pa.int32())}
    prompts = np.split(values, offsets[1:-1])
    # Templates write the token that ends a turn; plain text has none, and a model must learn to stop.
    stop = None if texts.chat else _stop_token(tokenizer)
    if texts.whole:
        return _whole(prompts, texts, origin, tokenizer, stop)
    responses = _responses(prompts, texts, origin, tokenizer, special)
    masks = _masks(responses, texts, origin, tokenizer)
    for name, rows in responses.items():
        if stop is not None:
            responses[name] = rows = [_stopped(response, stop) for response in rows]
        for row, response in enumerate(rows):
            if len(response) == 0:
                raise UserError(
                    f"{origin(row)}: the response {short(texts.responses[name][row])} has no tokens ({name})"
                )
    columns = {"prompt_ids": _lists(prompts), **{name: _lists(rows) for name, rows in responses.items()}}
    for name, rows in masks.items():
        # The end-of-sequence token that was appended is trained.
        longer = [
            np.pad(mask, (0, len(ids) - len(mask)), constant_values=1)
            for mask, ids in zip(rows, responses[name], strict=True)
        ]
        columns[mask_of(name)] = _lists(longer, pa.uint8())
    return columns


def too_many_characters(texts: Texts) -> dict[int, str]:
    """Rows with a text that is too long to tokenise, in order, and the column of that text."""
    found: dict[int, str] = {}
    for name, column in {"prompt_ids": texts.prompts, **texts.responses}.items():
        for row, text in enumerate(column):
            if len(text) > MAX_CHARACTERS:
                found.setdefault(row, name)
    return dict(sorted(found.items()))


def mask_of(ids: str) -> str:
    """Name of the mask for a column of tokens.

    >>> mask_of("response_ids")
    'response_mask'
    """
    return f"{ids.removesuffix('_ids')}_mask"


def _masks(
    responses: dict[str, list[np.ndarray]], texts: Texts, origin: Origin, tokenizer: Tokenizer
) -> dict[str, list[np.ndarray]]:
    """Mask the tokens of gaps: [tokens] uint8 for each row, by column.

    A response with gaps is tokenised again, part by part, and replaced in `responses`. Generation tokenises turns the same way, and no
    token crosses the end of a turn.
    """
    masks: dict[str, list[np.ndarray]] = {}
    for name, all_gaps in texts.gaps.items():
        rows = responses[name]
        masks[name] = [np.ones(len(ids), np.uint8) for ids in rows]
        gapped = [row for row, gaps in enumerate(all_gaps) if gaps]
        ends = {row: [*itertools.chain(*all_gaps[row]), len(texts.responses[name][row])] for row in gapped}
        pieces = {
            row: [texts.responses[name][row][a:b] for a, b in itertools.pairwise([0, *ends[row]])] for row in gapped
        }
        tokens = iter(_rows(tokenizer, [piece for row in gapped for piece in pieces[row]], False) if gapped else [])
        for row in gapped:
            parts = list(itertools.islice(tokens, len(pieces[row])))
            joined = np.concatenate(parts)
            if np.array_equal(joined, rows[row]) or _text(tokenizer, joined) == _text(tokenizer, rows[row]):
                rows[row] = joined
                masks[name][row] = np.repeat(np.arange(len(parts)) % 2 == 0, [len(part) for part in parts]).astype(
                    np.uint8
                )
            else:  # the tokenizer adds a space before each part
                masks[name][row] = _mask_by_place(
                    rows[row], texts.prompts[row], texts.responses[name][row], all_gaps[row], origin(row), tokenizer
                )
    return masks


def _mask_by_place(
    ids: np.ndarray, prompt: str, response: str, gaps: Sequence[Gap], place: str, tokenizer: Tokenizer
) -> np.ndarray:
    """Mask the tokens that overlap a gap, by their character offsets: [tokens] uint8."""
    encoding = tokenizer.backend.encode(prompt + response, add_special_tokens=False)
    if encoding.ids[-len(ids) :] != ids.tolist():
        raise UserError(
            f"{place}: the tokenizer divides this row differently with and without its prompt; its turns cannot be told apart"
        )
    spans = np.array(encoding.offsets[-len(ids) :]) - len(prompt)
    mask = np.ones(len(ids), np.uint8)
    for start, end in gaps:
        mask[(spans[:, 0] < end) & (spans[:, 1] > start)] = 0
    return mask


def _text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)


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


def _stop_token(tokenizer: Tokenizer) -> int | None:
    """The token that ends plain text."""
    eos, after = tokenizer.token_id("eos_token"), tokenizer.added[1]
    return after[-1] if eos is None and after else eos


def _encode(tokenizer: Tokenizer, texts: list[str], special: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids and offsets of texts, without end tokens that the tokenizer adds, and without a second beginning token.

    Args:
        special: whether the tokenizer adds special tokens at the beginning.
    """
    values, offsets = tokenizer.encode(texts, add_special_tokens=special)
    before, after = tokenizer.added if special else ((), ())
    begun = tokenizer.backend.decode(before, skip_special_tokens=False) if before else ""
    twice = [row for row, text in enumerate(texts) if begun and text.startswith(begun.strip())]
    if not after and not twice:
        return values, offsets
    kept, lengths = np.ones(len(values), bool), np.diff(offsets)
    for place in range(1, len(after) + 1):
        kept[offsets[1:] - place] = False
    lengths = lengths - len(after)
    for row in twice:
        start, number = int(offsets[row]), len(before)
        if tuple(values[start + number : start + 2 * number]) == before:
            kept[start : start + number] = False
            lengths[row] -= number
    return values[kept], np.concatenate([[0], np.cumsum(lengths)])


def _rows(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[np.ndarray]:
    values, offsets = _encode(tokenizer, texts, special)
    return np.split(values, offsets[1:-1])


def _lists(rows: Sequence[np.ndarray], kind: pa.DataType = pa.int32()) -> pa.Array:
    """An array of lists, one per row."""
    return ragged_array(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), kind)
