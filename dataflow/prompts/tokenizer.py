"""The tokenizer of a model folder, read without `transformers`: prompts are checked before torch is imported.

`AutoTokenizer` needs three seconds and torch; the same `tokenizer.json` through the `tokenizers` library needs
neither. The ids are those of `AutoTokenizer` and its `apply_chat_template`; tests/dataflow/prompts/test_prompts.py compares.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

if TYPE_CHECKING:
    import jinja2
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
        self.chat_templates = (
            {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        )

    @classmethod
    def load(cls, source: str | Path | Tokenizer) -> Tokenizer:
        """The tokenizer of a model folder, or of a Hugging Face hub id (from the local cache, else downloaded).

        Raises:
            UserError: no such folder or model, or no readable `tokenizer.json` in it.
        """
        if isinstance(source, Tokenizer):
            return source
        import tokenizers

        folder = _folder(source)
        file = folder / "tokenizer.json"
        if not file.is_file():
            slow = any(
                (folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
            )
            hint = (
                f"; write it once with transformers: AutoTokenizer.from_pretrained({str(source)!r})"
                f".save_pretrained({str(source)!r})"
                if slow
                else _nearest_folders(str(source))
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

        templates = config.get("chat_template") or {}
        if isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
        elif isinstance(templates, str):
            templates = {"default": templates}
        # Template files, where there are any, take the place of the ones in the configuration.
        files = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
        files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
        if files:
            templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return cls(backend, chat_template=templates, special_tokens=named, name=str(source))

    def __repr__(self) -> str:
        templates = ", ".join(self.chat_templates) or "no chat template"
        return f"Tokenizer({self.name!r}, {self.backend.get_vocab_size()} tokens, {templates})"

    def token_id(self, name: str) -> int | None:
        """The id of a named token (`eos_token`), or None when the tokenizer has no such token."""
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_last: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Messages as text, through the chat template; what `apply_chat_template(tokenize=False)` returns.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_last: end inside the last message, so that generation goes on with it.
            tools: JSON schemas of functions, for templates that know about tools.
            variables: further variables of the template (`enable_thinking=False`).

        Raises:
            UserError: there is no template, or it refuses the messages, or the content of a message is no text.

        >>> import tokenizers
        >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> template += "{% if add_generation_prompt %}<assistant>{% endif %}"
        >>> tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=template)
        >>> tokenizer.render([{"role": "user", "content": "2 + 2?"}], add_generation_prompt=True)
        '<user>2 + 2?<assistant>'
        """
        messages = list(messages)
        for message in messages:
            _check_content(message)
        mark = "WEFT_CONTINUES_HERE "
        if continue_last:
            messages[-1] = _marked(messages[-1], mark)
        try:
            text = self._template(bool(tools)).render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **variables},
            )
        except UserError:
            raise
        except Exception as error:  # a template can fail in any way that an expression can
            raise UserError(f"the chat template of {self.name} refused the messages: {error}") from None
        if not continue_last:
            return text
        end = text.rfind(mark.strip())
        if end < 0:
            raise UserError(f"the chat template of {self.name} leaves out the last message, which should be continued")
        # A template that trims the message trimmed the mark's space too: then trim as it would have.
        return text[:end] if text.startswith(mark, end) else text[:end].rstrip()

    def _template(self, with_tools: bool) -> jinja2.Template:
        if not self.chat_templates:
            raise UserError(
                f"{self.name} has no chat template (no chat_template.jinja, none in tokenizer_config.json), "
                "and the prompts are messages; add one, or use plain-text prompts"
            )
        name = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            known = ", ".join(sorted(self.chat_templates))
            raise UserError(f"{self.name} has several chat templates and none is called 'default': {known}")
        return _compiled(self.chat_templates[name])


def _check_content(message: Mapping[str, Any]) -> None:
    """Refuses content that is no text: most templates would write it down as Python does, and a model be trained on that."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    role = message.get("role")
    if isinstance(content, list):
        kinds = {str(b.get("type", "text")) if isinstance(b, Mapping) else type(b).__name__ for b in content}
        raise UserError(
            f"the content of a message of role {role!r} is a list of content blocks ({', '.join(sorted(kinds))}); Weft takes text "
            "alone: write the text of the blocks as one string, and leave out rows with images, video or audio"
        )
    raise UserError(f"the content of a message of role {role!r} is {content!r}; it must be text")


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """The template in the environment that chat templates are written for (that of `transformers`), sandboxed."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant wrote; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # Jinja's own filter escapes HTML, which a model should not see.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A copy of the message whose text ends with `mark`; content may be text or a list of typed parts."""
    message = copy.deepcopy(dict(message))
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + mark
        return message
    for part in reversed(content or []):
        if "text" in part:
            part["text"] += mark
            return message
    raise UserError("the last message is the assistant's, to be continued, and has no text")


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
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _folder(source: str | Path) -> Path:
    """Where the files of `source` are: itself, or the cached snapshot of a hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    name = str(source)
    if path.is_file():
        raise UserError(f"tokenizer {name!r} is a file; give the folder that it is in ({str(path.parent)!r})")
    # `models/qwne` with a folder `models` here is a mistyped path: nothing is asked of the hub for it.
    is_id = isinstance(source, str) and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) is not None
    if not is_id or ("/" in name and Path(name).parent.is_dir()):
        raise UserError(f"tokenizer folder {name!r} does not exist{_nearest_folders(name)}")

    import huggingface_hub

    reason: Exception | None = None
    for offline in (True, False):
        try:
            found = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_FILES), local_files_only=offline))
        except (OSError, ValueError, RuntimeError) as error:  # not cached; not on the hub; no network
            reason = error
            continue
        if (found / "tokenizer.json").is_file() or not offline:
            return found
    why = str(reason).strip().splitlines()[0] if reason else "not in the local cache"
    raise UserError(
        f"tokenizer {name!r} is neither a folder here nor a Hugging Face model that can be had ({why})"
        f"{_nearest_folders(name)}"
    ) from None


def _nearest_folders(name: str) -> str:
    """The hint for a folder that is not there: the nearest one that holds a tokenizer, else those there are."""
    parent = Path(name).expanduser().parent
    roots = [parent] if parent.is_dir() else [Path(".")]
    folders = sorted(
        str(file.parent) for root in roots for depth in ("*", "*/*") for file in root.glob(f"{depth}/tokenizer.json")
    )
    # Last names are compared: `Qwen2-tiny` should find `models/qwen2-tiny`.
    by_last = {Path(folder).name: folder for folder in reversed(folders)}
    close = difflib.get_close_matches(Path(name).name, by_last, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {by_last[close[0]]!r}?"
    return f"; folders with a tokenizer here: {', '.join(map(repr, folders[:5]))}" if folders else ""
