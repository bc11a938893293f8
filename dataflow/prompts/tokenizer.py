"""The tokenizer of a model folder, read without `transformers`: prompts are checked before torch is imported.

`AutoTokenizer` needs three seconds and torch; the same `tokenizer.json` through the `tokenizers` library needs
neither. The ids are those of `AutoTokenizer` and its `apply_chat_template`; tests/dataflow/prompts/test_tokenizer.py compares.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..model_location import find_model_folder, folders_near
from ..safe_files import read_json
from .chat_template import ChatTemplate

if TYPE_CHECKING:
    import tokenizers

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a chat template can use by name, as in `transformers`."""

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "*.jinja",
    "additional_chat_templates/*",
)
_CHUNK = 8192  # texts per call: bounds the memory held by encodings, and is plenty for the library's threads


class Tokenizer:
    """Text to token ids, and messages to text.

    Args:
        backend: the tokenizer itself.
        chat_template: Jinja source, or several by name (`default`, `tool_use`).
        special_tokens: named tokens (`eos_token`, ...), visible to the template.

    >>> from tokenizers import Tokenizer as Backend, models, pre_tokenizers
    >>> backend = Backend(models.WordLevel({"<unk>": 0, "the": 1, "sky": 2}, unk_token="<unk>"))
    >>> backend.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> ids, offsets = Tokenizer(backend).encode(["the sky", "sky"])
    >>> ids.tolist(), offsets.tolist()
    ([1, 2, 2], [0, 2, 3])
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the tokenizer",
    ) -> None:
        # A file may come with padding or truncation switched on; lengths here are always the real ones.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        sources = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        self.chat = ChatTemplate(sources, self.special_tokens, name)

    @classmethod
    def load(cls, source: str | Path | Tokenizer) -> Tokenizer:
        """The tokenizer of a model folder, or of a Hugging Face hub id (from the local cache, else downloaded).

        Raises:
            UserError: no such folder or model, or no readable `tokenizer.json` in it.
        """
        if isinstance(source, Tokenizer):
            return source
        import tokenizers

        folder = find_model_folder(source, "tokenizer.json", kind="tokenizer", download=_FILES)
        file = folder / "tokenizer.json"
        if not file.is_file():
            slow = any(
                (folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
            )
            hint = (
                f"; write it once with transformers: AutoTokenizer.from_pretrained({str(source)!r})"
                f".save_pretrained({str(source)!r})"
                if slow
                else folders_near(source, "tokenizer.json")
            )
            raise UserError(f"tokenizer {str(source)!r} has no tokenizer.json{hint}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{file}: not a tokenizer that the tokenizers library can read ({error})") from None

        config = _json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # models saved long ago keep special tokens in a file of their own
            config |= _json(folder / "special_tokens_map.json")
        named = {name: _text(config[name]) for name in NAMED_TOKENS if config.get(name)}
        _add_missing(backend, config, named)
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))

        return cls(backend, chat_template=_chat_templates(folder, config), special_tokens=named, name=str(source))

    def __repr__(self) -> str:
        templates = ", ".join(self.chat.sources) or "no chat template"
        return f"Tokenizer({self.name!r}, {self.backend.get_vocab_size()} tokens, {templates})"

    def token_id(self, name: str) -> int | None:
        """The id of a named token (`eos_token`), or None when the tokenizer has no such token."""
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @functools.cached_property
    def added(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the tokenizer adds before a text and after it: a token that begins a sequence, one that ends it, separators."""
        number = self.backend.num_special_tokens_to_add(is_pair=False)
        for probe in ("a", "0", "the", "\u4e00") if number else ():
            encoding = self.backend.encode(probe, add_special_tokens=True)
            if len(encoding.ids) > number:
                before = encoding.special_tokens_mask.index(0)
                return tuple(encoding.ids[:before]), tuple(encoding.ids[len(encoding.ids) - number + before :])
        return (), ()

    @functools.cached_property
    def end_tokens(self) -> dict[int, str]:
        """Ids that end a response in training data -> what writes them: `eos_token` behind plain text, the chat template behind a turn."""
        ends: dict[int, str] = {}
        if (eos := self.token_id("eos_token")) is not None:
            ends[eos] = "the tokenizer's eos_token"
        if self.chat:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            try:
                text = self.chat.render(turns).rstrip()
            except UserError:  # a template for other messages
                return ends
            last = max((special for special in self.special_texts if text.endswith(special)), key=len, default=None)
            if last and (token := self.backend.token_to_id(last)) is not None:
                ends.setdefault(token, "the chat template's end of a turn")
        return ends

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of all special tokens."""
        added = self.backend.get_added_tokens_decoder().values()
        return tuple(
            dict.fromkeys([*self.special_tokens.values(), *(token.content for token in added if token.special)])
        )

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Token ids of many texts at the library's speed (all cores, no padding, no truncation).

        Args:
            texts: B strings.
            add_special_tokens: add what the tokenizer adds by default (a beginning-of-sequence token, say).

        Returns:
            `(ids, offsets)`: ids `[T]` int32 of all texts in a row, offsets `[B + 1]` int64; `([], [0])` for no texts.
        """
        values: list[NDArray[np.int32]] = []
        lengths = np.zeros(len(texts) + 1, np.int64)
        for start in range(0, len(texts), _CHUNK):
            encodings = self.backend.encode_batch_fast(
                texts[start : start + _CHUNK], add_special_tokens=add_special_tokens
            )
            chunk = [encoding.ids for encoding in encodings]
            counts = np.fromiter(map(len, chunk), np.int64, len(chunk))
            lengths[start + 1 : start + 1 + len(chunk)] = counts
            values.append(np.fromiter(itertools.chain.from_iterable(chunk), np.int32, int(counts.sum())))
        return (np.concatenate(values) if values else np.zeros(0, np.int32)), np.cumsum(lengths)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Texts of rows of token ids, special tokens skipped."""
        return self.backend.decode_batch(rows, skip_special_tokens=True)

    def decode_ragged(self, values: np.ndarray, offsets: np.ndarray) -> list[str]:
        """Texts of the rows of a ragged column, special tokens skipped; no token becomes a Python object of a list."""
        ids = np.ascontiguousarray(values, np.uint32).data
        cuts = offsets.tolist()
        return self.decode([ids[start:end] for start, end in itertools.pairwise(cuts)])


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Jinja source by name. Template files, where there are any, take the place of the ones in the configuration."""
    files = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    templates = config.get("chat_template") or {}
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return {"default": templates} if isinstance(templates, str) else dict(templates)


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds tokens that the configuration declares and `tokenizer.json` lacks, in the order of their ids."""
    import tokenizers

    have = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, tokenizers.AddedToken] = {}
    for _, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        flags = {
            key: bool(token[key])
            for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if key in token
        }
        missing.setdefault(token["content"], tokenizers.AddedToken(token["content"], **flags))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    for content in [*named.values(), *map(_text, extra)]:
        missing.setdefault(content, tokenizers.AddedToken(content, special=True))
    backend.add_tokens([token for content, token in missing.items() if content not in have])


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
