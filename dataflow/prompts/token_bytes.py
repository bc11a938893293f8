"""The bytes that each token of a tokenizer adds to a text, and an encoder whose tokens have exactly the
bytes of a text.

Two tokenizers split a text differently, but the bytes of their tokens add up to the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    import tokenizers

    from .tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token for one byte, in tokenizers with byte fallback."""


class TokenBytes:
    """The bytes of each token, and an encoder of parts of texts.

    Args:
        tokenizer: its decoder must join tokens without changing them: `ByteLevel`, `Metaspace`, or
            `Replace`, `ByteFallback`, `Fuse` and `Strip`.

    Raises:
        UserError: the tokenizer has no decoder, or one that changes tokens.

    >>> from tokenizers import Tokenizer as Backend, models, decoders
    >>> from .tokenizer import Tokenizer
    >>> backend = Backend(models.BPE({"▁": 0, "a": 1, "▁a": 2, "<0xC3>": 3}, [("▁", "a")], byte_fallback=True))
    >>> backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    >>> TokenBytes(Tokenizer(backend)).of_id
    [b' ', b'a', b' a', b'\\xc3']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        content = json.loads(tokenizer.backend.to_str())
        self.name = tokenizer.name
        read = _reader(content.get("decoder"), tokenizer.name)
        tokens = tokenizer.backend.get_vocab(with_added_tokens=True)
        texts = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
        special = {*tokenizer.special_texts, *_unknown(content)}
        self.of_id: list[bytes | None] = [None] * (max(tokens.values(), default=-1) + 1)
        """The bytes of each token id; None for special tokens, the unknown token, and unused ids."""
        self.special: dict[int, str] = {}
        """Maps ids of special tokens to their names."""
        self._one_byte: set[int] = set()
        for token, number in tokens.items():
            if token in special:
                self.special[number] = token
            else:
                self.of_id[number] = token.encode() if token in texts else read(token)
                if _BYTE.fullmatch(token):
                    self._one_byte.add(number)
        self._backend = _encoder_of_parts(content)

    @property
    def ids(self) -> dict[bytes, int]:
        """Maps bytes to the token that has them. Of several tokens, this is an ordinary one before
        one for a single byte, and then the first."""
        order = sorted(
            (number for number, piece in enumerate(self.of_id) if piece),
            key=lambda number: (number in self._one_byte, number),
        )
        found: dict[bytes, int] = {}
        for number in order:
            piece = self.of_id[number]
            assert piece is not None
            found.setdefault(piece, number)
        return found

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts that continue other texts: without special tokens, without a space in front,
        and with the names of special tokens as ordinary text."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]


def _unknown(content: Mapping[str, Any]) -> set[str]:
    """Return the unknown token, which replaces texts that the vocabulary lacks."""
    model = content["model"]
    if isinstance(number := model.get("unk_id"), int):  # a unigram model
        return {model["vocab"][number][0]}
    return {model["unk_token"]} if model.get("unk_token") else set()


def _reader(decoder: Mapping[str, Any] | None, name: str) -> Callable[[str], bytes]:
    """Return a function from a token's name to its bytes."""
    if decoder is None:
        raise UserError(
            f"tokenizer {name!r} has no decoder, so it separates tokens by spaces, which are not in its "
            "texts; give tokenizer.json a decoder, such as Fuse"
        )
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replaced: list[tuple[str, str]] = []
    by_byte = False
    for step in steps:
        kind, pattern = step["type"], step.get("pattern") or {}
        if kind == "ByteLevel":
            by_byte = True
        elif kind == "Metaspace":
            replaced.append((step.get("replacement", "▁"), " "))
        elif kind == "Replace" and "String" in pattern:
            replaced.append((pattern["String"], step["content"]))
        elif kind not in ("ByteFallback", "Fuse", "Strip"):  # Strip changes the ends of a text alone
            raise UserError(
                f"tokenizer {name!r} has a {kind} decoder, which can change a token by its neighbours, so its tokens have no fixed bytes"
            )
    falls_back = any(step["type"] == "ByteFallback" for step in steps)
    byte_of = _byte_characters() if by_byte else {}

    def read(token: str) -> bytes:
        if byte_of and all(character in byte_of for character in token):
            return bytes(byte_of[character] for character in token)
        if falls_back and (found := _BYTE.fullmatch(token)):
            return bytes.fromhex(found[1])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return read


def _byte_characters() -> dict[str, int]:
    """Map the characters of byte-level BPE to bytes: printable characters of Latin-1 keep
    their code, and the other bytes have the characters from 256 on, in their order (GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): b for k, b in enumerate(others)}


def _encoder_of_parts(content: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer without anything that it puts before a text."""
    import tokenizers

    changed = {**content, "padding": None, "truncation": None}
    for part in ("normalizer", "pre_tokenizer"):
        changed[part] = _without_prefix(content.get(part))
    backend = tokenizers.Tokenizer.from_str(json.dumps(changed))
    # Text that spells a special token is still text.
    backend.encode_special_tokens = True
    return backend


def _without_prefix(part: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        known = {"prepend_scheme": "never", "add_prefix_space": False}
        return {**part, **{name: value for name, value in known.items() if name in part}}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            return {**part, name: [one for one in map(_without_prefix, part[name]) if one is not None]}
    return dict(part)
