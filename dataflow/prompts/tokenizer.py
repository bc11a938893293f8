"""Loads the tokenizer of a model folder without `transformers`.

`AutoTokenizer` imports torch, which takes three seconds. This tokenizer returns the same ids as
`AutoTokenizer` and its `apply_chat_template` (tests/dataflow/prompts/test_tokenizer.py).
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, nearest
from ..model_location import find_model_folder, folders_near
from ..safe_files import read_json

if TYPE_CHECKING:
    import jinja2
    import tokenizers


# Chat template


THINKING = ("enable_thinking", "thinking")
"""Template variables that turn thinking on and off: in Qwen3 and GLM, and in DeepSeek and Granite.
Users may set either one for any template."""


@dataclass(frozen=True)
class _ChatTemplate:
    """The chat templates of a tokenizer, rendered in a sandbox.

    >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    >>> template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    >>> _ChatTemplate({"default": template}).render([{"role": "user", "content": "2 + 2?"}], add_generation_prompt=True)
    '<user>2 + 2?<assistant>'
    """

    sources: Mapping[str, str]
    """Maps names (`default`, `tool_use`) to Jinja sources."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Maps names (`eos_token`, ...) to special tokens for the templates."""
    name: str = "the tokenizer"

    def __bool__(self) -> bool:
        return bool(self.sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_last: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render messages as text, like `apply_chat_template(tokenize=False)`.

        Args:
            messages: messages `{"role": ..., "content": ...}`, oldest first. Content is text, or
                blocks of type `text` and `image`. The template writes placeholders for images.
            add_generation_prompt: whether to end with the header of the assistant's turn.
            continue_last: whether to end inside the last message, so that generation continues it.
            tools: JSON schemas of functions, for templates with tools.
            variables: further template variables, such as `enable_thinking=False`.

        Raises:
            UserError: there is no template, or the template rejects the messages.
        """
        messages = [_with_text(message) for message in messages]
        mark = "WEFT_CONTINUES_HERE "
        if continue_last:
            content = messages[-1].get("content")
            if not isinstance(content, str):
                raise UserError(
                    f"the last message is the assistant's and should be continued, but has {'images' if content else 'no text'}"
                )
            messages[-1] = {**messages[-1], "content": content + mark}
        if self._wants_blocks:
            messages = [_as_blocks(message) for message in messages]
        try:
            text = self._fill(
                messages, tools, {**variables, "add_generation_prompt": add_generation_prompt}
            )
        except UserError:
            raise
        except Exception as error:  # templates can raise any error
            raise self._broken(error) from None
        if not continue_last:
            return text
        end = text.rfind(mark.strip())
        if end < 0:
            raise UserError(
                f"the chat template of {self.name} leaves out the last message, which should be continued"
            )
        # If the template trimmed the mark's space, it also trims messages, so trim the text.
        return text[:end] if text.startswith(mark, end) else text[:end].rstrip()

    def _fill(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        given = {**self.special_tokens, **variables}
        return self._template(bool(tools)).render(
            messages=messages, tools=tools or None, documents=None, **given
        )

    @functools.cached_property
    def _wants_blocks(self) -> bool:
        """Whether the template writes text in blocks only, and silently drops strings."""

        def shows(content: Any) -> bool:
            message = {"role": "user", "content": content}
            try:
                return mark in self._fill([message], None, {"add_generation_prompt": False})
            except Exception:  # the template needs other messages
                return False

        mark = "WEFT_WRITES_THIS"
        return not shows(mark) and shows([{"type": "text", "text": mark}])

    def variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template variables for the user's settings. Renames a variable in `THINKING`
        to the one that the template reads. Raises a `UserError` for unknown variables."""
        reads, found = self._reads, dict[str, Any]()
        switch = next((name for name in THINKING if name in reads), None)
        for name, value in given.items():
            if name in THINKING and name not in reads:
                # Without a switch, ignore a request to turn thinking off.
                if switch is None and value:
                    raise UserError(
                        f"chat_template_kwargs: {name}={value!r}: the chat template of {self.name} has no switch for thinking "
                        f"(none of {', '.join(THINKING)}); leave it out"
                    )
                found |= {switch: value} if switch else {}
            elif name not in reads:
                ours = {"messages", "tools", "documents", "add_generation_prompt", *self.special_tokens}
                known = sorted(reads - ours)
                hint = nearest(name, known) or f"; it reads {', '.join(known) or 'none'}"
                raise UserError(
                    f"chat_template_kwargs: the chat template of {self.name} reads no {name!r}{hint}"
                )
            else:
                found[name] = value
        return found

    @functools.cached_property
    def _reads(self) -> set[str]:
        """Variables that the templates read but do not set."""
        from jinja2 import meta

        found: set[str] = set()
        for source in self.sources.values():
            try:
                found |= meta.find_undeclared_variables(_environment().parse(source))
            except Exception as error:
                raise self._broken(error) from None
        return found - set(_environment().globals)

    def _broken(self, error: Exception) -> UserError:
        return UserError(f"the chat template of {self.name} refused the messages: {error}")

    def _template(self, with_tools: bool) -> jinja2.Template:
        if not self.sources:
            raise UserError(
                f"{self.name} has no chat template (no chat_template.jinja, none in tokenizer_config.json), "
                "and the prompts are messages; add one, or use plain-text prompts"
            )
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            known = ", ".join(sorted(self.sources))
            raise UserError(
                f"{self.name} has several chat templates and none is called 'default': {known}"
            )
        return _compiled(self.sources[name])


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its text blocks joined into one string. With images, the blocks stay
    for the template. Raises a UserError for other content, because templates would write its Python
    representation."""
    content, role = message.get("content"), message.get("role")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, list):
        raise UserError(f"the content of a message of role {role!r} is {content!r}; it must be text")
    kinds = {str(b.get("type", "text")) if isinstance(b, Mapping) else type(b).__name__ for b in content}
    if kinds == {"text"}:
        return {**message, "content": "".join(str(block.get("text", "")) for block in content)}
    if kinds <= {"text", "image"}:
        blocks = [
            {"type": "image"} if b["type"] == "image" else {"type": "text", "text": str(b["text"])}
            for b in content
        ]
        return {**message, "content": blocks}
    raise UserError(
        f"the content of a message of role {role!r} is a list of content blocks ({', '.join(sorted(kinds))}); Weft takes blocks of type "
        "'text' and 'image': images themselves go into a column 'images', and rows with video or audio are left out"
    )


def _as_blocks(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": blocks or []}


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> jinja2.Environment:
    """Return a sandboxed Jinja environment like that of `transformers`."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class _Generation(Extension):
        """Accepts and ignores `{% generation %}`, which marks the assistant's text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: Any = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: Any = False,
    ) -> str:
        # Jinja's own filter escapes HTML characters.
        how = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
        return json.dumps(value, sort_keys=sort_keys, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


# Tokenizer

_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Names of special tokens for chat templates, as in `transformers`."""

_CONFIG, _SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_FILES = ("tokenizer.json", _CONFIG, _SPECIAL, "*.jinja", "additional_chat_templates/*")
_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_CHUNK = 8192  # texts per call: limits memory, but keeps all threads busy


class Tokenizer:
    """Converts text to token ids, and messages to text.

    Args:
        backend: tokenizer of the `tokenizers` library.
        chat_template: Jinja source, or a mapping from names (`default`, `tool_use`) to sources.
        special_tokens: maps names (`eos_token`, ...) to special tokens for the template.
        name: the tokenizer's name in error messages.

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
        # tokenizer.json may enable padding or truncation, which would change lengths.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        sources = (
            {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        )
        self.chat = _ChatTemplate(sources, self.special_tokens, name)

    @classmethod
    def load(cls, source: str | Path | Tokenizer) -> Tokenizer:
        """Load the tokenizer of a model folder or Hugging Face id, which is downloaded if it is not
        in the local cache. Raises a `UserError` without a readable `tokenizer.json`."""
        if isinstance(source, Tokenizer):
            return source
        import tokenizers

        folder = find_model_folder(source, "tokenizer.json", kind="tokenizer", download=_FILES)
        file = folder / "tokenizer.json"
        if not file.is_file():
            hint = folders_near(source, "tokenizer.json")
            if any((folder / name).is_file() for name in _SLOW_FILES):
                hint = (
                    f"; write it once with transformers: AutoTokenizer.from_pretrained({str(source)!r})"
                    f".save_pretrained({str(source)!r})"
                )
            raise UserError(f"tokenizer {str(source)!r} has no tokenizer.json{hint}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"{file}: not a tokenizer that the tokenizers library can read ({error})"
            ) from None

        config = _json(folder / _CONFIG)
        if "added_tokens_decoder" not in config:  # old models have a file for special tokens
            config |= _json(folder / _SPECIAL)
        named = {name: _text(config[name]) for name in _NAMED_TOKENS if config.get(name)}
        # `AutoTokenizer` also adds these tokens, and the ids must be equal.
        _add_missing(backend, config, named)
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))

        return cls(
            backend,
            chat_template=_chat_templates(folder, config),
            special_tokens=named,
            name=str(source),
        )

    def __repr__(self) -> str:
        templates = ", ".join(self.chat.sources) or "no chat template"
        return f"Tokenizer({self.name!r}, {self.backend.get_vocab_size()} tokens, {templates})"

    def token_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @functools.cached_property
    def added(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids that the tokenizer adds (before, after) each text."""
        number = self.backend.num_special_tokens_to_add(is_pair=False)
        for probe in ("a", "0", "the", "\u4e00") if number else ():
            encoding = self.backend.encode(probe, add_special_tokens=True)
            ids = encoding.ids
            if len(ids) > number:
                before = encoding.special_tokens_mask.index(0)
                return tuple(ids[:before]), tuple(ids[len(ids) - number + before :])
        return (), ()

    @functools.cached_property
    def end_tokens(self) -> dict[int, str]:
        """Maps each token that ends a response in training data to its origin."""
        ends: dict[int, str] = {}
        if (eos := self.token_id("eos_token")) is not None:
            ends[eos] = "the tokenizer's eos_token"
        if self.chat:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            try:
                # Templates often add a newline after this token.
                text = self.chat.render(turns).rstrip()
            except UserError:  # the template needs other messages
                return ends
            last = max(filter(text.endswith, self.special_texts), key=len, default=None)
            if last and (token := self.backend.token_to_id(last)) is not None:
                ends.setdefault(token, "the chat template's end of a turn")
        return ends

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        added = self.backend.get_added_tokens_decoder().values()
        special = (token.content for token in added if token.special)
        return tuple(dict.fromkeys([*self.special_tokens.values(), *special]))

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Encode B texts. By default, the tokenizer adds its special tokens.

        Returns:
            (ids, offsets): ids `[T]` int32, and offsets `[B + 1]` int64. `([], [0])` for no texts.
        """
        values: list[NDArray[np.int32]] = []
        lengths = np.zeros(len(texts) + 1, np.int64)
        for start in range(0, len(texts), _CHUNK):
            # The fast variant does not compute character offsets.
            encodings = self.backend.encode_batch_fast(
                texts[start : start + _CHUNK], add_special_tokens=add_special_tokens
            )
            chunk = [encoding.ids for encoding in encodings]
            counts = np.fromiter(map(len, chunk), np.int64, len(chunk))
            lengths[start + 1 : start + 1 + len(chunk)] = counts
            values.append(np.fromiter(itertools.chain.from_iterable(chunk), np.int32, int(counts.sum())))
        return (np.concatenate(values) if values else np.zeros(0, np.int32)), np.cumsum(lengths)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode rows of token ids, without special tokens."""
        return self.backend.decode_batch(rows, skip_special_tokens=True)

    def decode_ragged(self, values: np.ndarray, offsets: np.ndarray) -> list[str]:
        """Decode the rows of a ragged column, without special tokens."""
        ids = np.ascontiguousarray(values, np.uint32).data  # avoids one Python object per token
        return self.decode([ids[start:end] for start, end in itertools.pairwise(offsets.tolist())])


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Map names to Jinja sources of templates. Files take precedence over the configuration."""
    file = folder / "chat_template.jinja"
    files = {"default": file} if file.is_file() else {}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    templates = config.get("chat_template") or {}
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return {"default": templates} if isinstance(templates, str) else dict(templates)


def _add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Add declared tokens that `tokenizer.json` lacks, in the order of their ids."""
    import tokenizers

    have = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, tokenizers.AddedToken] = {}
    declared = config.get("added_tokens_decoder") or {}
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        flags = {key: bool(token[key]) for key in names if key in token}
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
