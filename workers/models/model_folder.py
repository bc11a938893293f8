"""A model's folder: read its config.json without torch, to report mistakes at once."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.column import CHOSEN_IDS, PROMPT_IDS, REJECTED_IDS, RESPONSE_IDS
from ...dataflow.errors import UserError, nearest
from ...dataflow.model_location import find_cached, find_model_folder, folders_near
from ...dataflow.safe_files import read_json

if TYPE_CHECKING:
    from ...dataflow.source import Source

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
"""Settings file of a LoRA adapter in the format of `peft`."""
SCALAR_HEAD = "score.weight"
"""Weight of a scalar head, [1, hidden]. There is no bias."""
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_SIZES = ("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer")
_TOKEN_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id")
_HEADS_NAMES = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN_NAMES = ("hidden_size", "n_embd", "d_model")
EXPERTS_NAMES = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the setting for the number of experts per layer."""


def read_model_config(model: str | Path) -> dict[str, Any]:
    """Read `config.json` from a model's folder or cached Hugging Face id. Raises a UserError if
    there is no such model. The message names the path, its contents and the closest model folder.

    >>> read_model_config("/no/such/folder")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: model '/no/such/folder': no such folder
    """
    file = find_model_config(model)
    config = _read_settings(model, file)
    _check_types(model, file, config)
    return config


def _read_settings(model: str | Path, file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except (OSError, UserError) as error:
        raise UserError(f"model {str(model)!r}: {file} cannot be read ({error})") from None


def _check_types(model: str | Path, file: Path, config: Mapping[str, Any]) -> None:
    """Check the settings that Weft reads itself. `transformers` checks all of them later."""
    # Maps each setting to its type, for messages, and a check of its value.
    wanted: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "model_type": ("text", lambda value: isinstance(value, str)),
        "text_config": ("an object", lambda value: isinstance(value, Mapping)),
        **dict.fromkeys(
            _SIZES, ("a number of at least 1", lambda value: _is_integer(value) and value >= 1)
        ),
        **dict.fromkeys(
            (*_CONTEXT_NAMES, *_HEADS_NAMES, "num_key_value_heads", "head_dim"),
            ("an integer", _is_integer),
        ),
        "layer_types": ("a list", lambda value: isinstance(value, list)),
        **dict.fromkeys(_TOKEN_NAMES, ("an integer, or a list of them", _is_token)),
    }
    text = config.get("text_config")
    for section, settings in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        for name, (kind, is_right) in wanted.items():
            value = settings.get(name)
            if value is not None and not is_right(value):
                raise UserError(
                    f"model {str(model)!r}: {section}{name} in {file} is {value!r}, not {kind}; correct it, or fetch the file again"
                )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)


def _is_token(value: Any) -> bool:
    return all(_is_integer(each) for each in value) if isinstance(value, list) else _is_integer(value)


def find_model_config(model: str | Path) -> Path:
    """Return the path of `config.json` for a model's folder or cached id. Raises the errors of
    `read_model_config`."""
    folder = find_model_folder(model, CONFIG_FILE)
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"model {str(model)!r}: the folder has no {CONFIG_FILE}{folders_near(model, CONFIG_FILE)}"
        )
    return folder / CONFIG_FILE


def read_index(file: Path) -> dict[str, str]:
    """Read a model's index, which maps tensors to files. Raises a UserError if it is damaged."""
    try:
        files = read_json(file)["weight_map"]
        if not (isinstance(files, dict) and files and all(isinstance(f, str) for f in files.values())):
            raise ValueError("its weight_map names no files")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"the index of a model's weights, {file}, is damaged ({error}): restore the file; in "
            "the cache of the Hugging Face hub, remove it and the file that it links to"
        ) from None
    return files


def read_stop_tokens(model: str | Path) -> tuple[int, ...]:
    """Return the token ids that end a response: in the settings, and at the end of training
    texts."""
    named = _named_stop_tokens(model)
    return (*named, *(token for token in _end_tokens(model) if token not in named))


def unnamed_stop_tokens(model: str | Path) -> dict[int, str]:
    """Map token ids that end training texts, but are missing in the settings, to their origin."""
    named = _named_stop_tokens(model)
    return {token: what for token, what in _end_tokens(model).items() if token not in named}


def stop_token_notes(model: str | Path) -> tuple[str, ...]:
    """Return notes about `unnamed_stop_tokens`, to log when a run starts."""
    from ...dataflow.prompts.tokenizer import Tokenizer

    try:
        unnamed, named = unnamed_stop_tokens(model), _named_stop_tokens(model)
        backend = Tokenizer.load(model).backend if unnamed else None
    except UserError:  # the run's checks report this
        return ()
    if backend is None:
        return ()
    texts = ", ".join(f"{backend.id_to_token(token)!r} ({what})" for token, what in unnamed.items())
    others = ", ".join(repr(backend.id_to_token(token) or token) for token in named) or "none"
    return (
        f"model {str(model)!r}: training texts end with {texts}, and its settings name {others} as "
        "end of a response; rollouts stop at all of them, and saved models name all",
    )


def _end_tokens(model: str | Path) -> dict[int, str]:
    """Return the end tokens of the model's tokenizer; empty without a readable tokenizer."""
    # Import late, because commands import this module, and must print their help at once.
    from ...dataflow.prompts.tokenizer import Tokenizer

    if not find_model_config(model).with_name("tokenizer.json").is_file():
        return {}
    try:
        return Tokenizer.load(find_model_config(model).parent).end_tokens
    except UserError:
        return {}


def _named_stop_tokens(model: str | Path) -> tuple[int, ...]:
    """Return `eos_token_id`, one id or several, from `generation_config.json` or else
    `config.json`. For chat models, only the former names the token that ends a turn."""
    file = find_model_config(model).with_name("generation_config.json")
    if not file.is_file() and not Path(model).expanduser().is_dir():
        file = find_cached(model, file.name) or file
    found = _read_settings(model, file).get("eos_token_id") if file.is_file() else None
    if found is not None and not _is_token(found):
        raise UserError(
            f"model {str(model)!r}: eos_token_id in {file} is {found!r}, not an integer, or a list of them; correct it"
        )
    if found is None:
        found = text_settings(read_model_config(model)).get("eos_token_id")
    return () if found is None else tuple(found) if isinstance(found, list) else (found,)


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the text section of a multimodal model's settings into the top level.

    >>> text_settings({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": 97}})
    {'model_type': 'gemma3', 'vocab_size': 97}
    """
    text = settings.get("text_config")
    rest = {name: value for name, value in settings.items() if name != "text_config"}
    is_multimodal = isinstance(text, Mapping)
    return {**rest, **text, "model_type": settings.get("model_type")} if is_multimodal else rest


def context_of(settings: Mapping[str, Any]) -> int | None:
    """Return the model's context length in tokens, including an extension by YaRN; None if the
    settings leave it to `transformers`, or there is no limit.

    >>> context_of({"n_positions": 1024}), context_of({"text_config": {"max_position_embeddings": 64}}), context_of({})
    (1024, 64, None)
    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    >>> context_of({"max_position_embeddings": 32768, "rope_scaling": yarn})
    131072
    """
    text = text_settings(settings)
    context = _first(text, _CONTEXT_NAMES)
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if context is None or not isinstance(rope, Mapping):
        return context
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings")
    stretched = factor * trained if isinstance(factor, int | float) and isinstance(trained, int) else 0
    return max(context, int(stretched))


def num_heads(settings: Mapping[str, Any]) -> int | None:
    return _first(text_settings(settings), _HEADS_NAMES)


def head_dim(settings: Mapping[str, Any]) -> int | None:
    """Return the size of an attention head, given or computed from hidden size and heads, or None.

    >>> head_dim({"hidden_size": 64, "num_attention_heads": 2}), head_dim({})
    (32, None)
    """
    text = text_settings(settings)
    hidden, heads = _first(text, _HIDDEN_NAMES), num_heads(settings)
    return text.get("head_dim") or (hidden // heads if hidden and heads else None)


def num_experts(settings: Any) -> int | None:
    """Return the number of experts per layer; None if the model is not a mixture of experts.
    `settings` is the result of `complete_text_settings`."""
    counts = (getattr(settings, name, None) for name in EXPERTS_NAMES)
    return next((count for count in counts if isinstance(count, int) and count > 1), None)


def _first(settings: Mapping[str, Any], names: Iterable[str]) -> int | None:
    return next((int(settings[name]) for name in names if settings.get(name)), None)


@contextmanager
def refusals_named(model: str | Path, cannot: str, file: Path | None = None) -> Iterator[None]:
    """Turn an error of `transformers` into a UserError that names the model and its intended use.

    >>> with refusals_named("gpt-9", "cannot be trained"):
    ...     raise KeyError("gpt9")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: model 'gpt-9' cannot be trained: transformers refuses it ('gpt9')
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # settings of wrong types or sizes can fail anywhere
        lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
        # After a first line that ends with a colon, the second has the reason.
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        where = "" if file is None else f"; correct {file}, or fetch it again"
        raise UserError(
            f"model {str(model)!r} {cannot}: transformers refuses it ({reason}){where}"
        ) from error


def complete_text_settings(model: str | Path) -> Any:
    """Return the text settings, completed by `transformers`. The import takes seconds."""
    from transformers import AutoConfig

    file = find_model_config(model)
    with refusals_named(model, "cannot be read", file):
        return AutoConfig.from_pretrained(file.parent, local_files_only=True).get_text_config()


def check_causal_lm(model: str | Path, settings: Mapping[str, Any]) -> None:
    """Check that `transformers` has a trainable causal language model of this type."""
    kind, quantised = settings.get("model_type"), settings.get("quantization_config")
    known = causal_lm_types()
    why = None
    if known and kind not in known and not sees_images(settings):
        why = f"transformers has no causal language model of type {kind!r}{nearest(str(kind), known)}"
    elif settings.get("is_encoder_decoder"):
        why = f"models of type {kind!r} have an encoder, so they are not causal language models"
    elif isinstance(quantised, Mapping):
        how = quantised.get("quant_method", "quantization_config")
        why = f"its weights are quantised ({how}); train the original model"
    if why is not None:
        raise UserError(f"model {str(model)!r} cannot be trained: {why}")


def sees_images(settings: Mapping[str, Any]) -> bool:
    """Return whether `transformers` has this type only as a model of images and text.

    >>> sees_images({"model_type": "qwen2_5_vl"}), sees_images({"model_type": "qwen2"}), sees_images({"model_type": "gemma3"})
    (True, False, False)
    """
    kind, causal = settings.get("model_type"), causal_lm_types()
    with_images = _types("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
    return bool(causal) and kind not in causal and kind in with_images


def may_share_prompts(model: str | Path) -> bool:
    """Return whether a model's settings allow rows to share the computation of their prompt: it
    reads no images, and its rope does not depend on a row's length. `agreement.py` checks the
    actual results."""
    try:
        settings = read_model_config(model)
    except UserError:
        return False
    text = text_settings(settings)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kinds = [rope, *rope.values()]  # some models have one rope for each kind of layer
    names = [str(kind.get("rope_type", kind.get("type"))) for kind in kinds if isinstance(kind, Mapping)]
    return not sees_images(settings) and not any(n == "longrope" or "dynamic" in n for n in names)


def check_scalar_head(model: str | Path, settings: Mapping[str, Any]) -> None:
    """Check that a model of this type can have a scalar head: it must not read images."""
    if sees_images(settings):
        raise UserError(
            f"model {str(model)!r} (type {settings['model_type']!r}) reads images, and such "
            "models cannot have a scalar head; take a text model as critic or reward model"
        )


def causal_lm_types() -> frozenset[str]:
    """Return the types of causal language models in `transformers`; empty if unknown."""
    return _types("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


@functools.cache
def _types(table: str) -> frozenset[str]:
    """Return the model types in a table of `transformers`; empty if the file has an unexpected
    format. Parses the file, because its import would take seconds and import torch."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    file = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    content = re.search(rf"^{table} = OrderedDict\((.*?)^\)", text, re.DOTALL | re.MULTILINE)
    return frozenset(re.findall(r'\("([\w.-]+)", "\w+"\)', content.group(1)) if content else ())


# Vocabulary checks: all token ids of tokenizer, settings and rows must be in the model's
# vocabulary. A larger id would crash a worker in its embedding layer.


_IDS = (PROMPT_IDS, RESPONSE_IDS, CHOSEN_IDS, REJECTED_IDS)
_NAMED = ("bos_token", "eos_token", "unk_token")
"""Special tokens that models use even if no text contains them. Padding is not one of them."""


def read_vocabulary(model: str | Path) -> int | None:
    """Return the number of token ids of a model; None if `config.json` does not say."""
    return text_settings(read_model_config(model)).get("vocab_size")


def check_vocabulary(model: str | Path, source: Source) -> None:
    """Check that the vocabulary has all token ids in use. Raises a UserError that names one."""
    size = read_vocabulary(model)
    if size is None:
        return
    for what, largest in (*_of_settings(model), *_of_tokenizer(model), *_of_rows(source)):
        if largest >= size:
            raise UserError(
                f"{what} {largest}, and the model in {model} has ids 0 to {size - 1} (its vocab_size is {size})"
            )


def different_token(model: str | Path, other: str | Path) -> str:
    """Name a token id that has different meanings for two models; "" if there is none. One may have
    more tokens."""
    files = [find_model_config(each).with_name("tokenizer.json") for each in (model, other)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return ""
    tokens, others = (_tokens_by_id(file) for file in files)
    for number in sorted(tokens.keys() & others.keys()):
        if tokens[number] != others[number]:
            return f"token {number} is {tokens[number]!r} in {model} and {others[number]!r} in {other}"
    return ""


def _tokens_by_id(file: Path) -> dict[int, str]:
    content = _read(file)
    found = {number: token for token, number in _vocabulary(content).items()}
    return found | {token["id"]: token["content"] for token in content.get("added_tokens") or ()}


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # a unigram model lists (token, score) by id
        return {token: number for number, (token, *_) in enumerate(vocabulary)}
    return vocabulary


def _of_settings(model: str | Path) -> Iterator[tuple[str, int]]:
    file = find_model_config(model)
    generation = file.with_name("generation_config.json")
    of_model = text_settings(read_model_config(model))
    for name, settings in ((CONFIG_FILE, of_model), (generation.name, _read(generation))):
        for key in _TOKEN_NAMES:
            ids = settings.get(key)
            for one in ids if isinstance(ids, list) else [ids]:
                if isinstance(one, int):
                    yield f"{model}: {key} in {name} is", one


def _of_tokenizer(model: str | Path) -> Iterator[tuple[str, int]]:
    """Yield the largest id of the tokenizer's ordinary tokens, and the ids of its named special
    tokens. Other special tokens may have larger ids, because they occur only in texts that spell
    them: Gemma 3's text models lack the image token."""
    file = find_model_config(model).with_name("tokenizer.json")
    if not file.is_file():
        return
    stamp = file.stat()
    largest, ids = _tokenizer_ids(file, stamp.st_mtime_ns, stamp.st_size)
    yield f"the tokenizer in {model} has ids up to", largest
    named = _read(file.with_name("special_tokens_map.json"))
    named |= _read(file.with_name("tokenizer_config.json"))
    for name in _NAMED:
        token = named.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str) and content in ids:
            yield f"in the tokenizer of {model}, the id of {name} is", ids[content]


# The unused arguments are part of the cache key, so that a changed file is read again.
@functools.lru_cache(maxsize=4)
def _tokenizer_ids(file: Path, _changed: int, _size: int) -> tuple[int, dict[str, int]]:
    """Return the largest ordinary token id (-1 for none), and special tokens' ids by text."""
    content = _read(file)
    added = [token for token in content.get("added_tokens") or () if isinstance(token.get("id"), int)]
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    ordinary = [number for token, number in _vocabulary(content).items() if token not in special]
    ordinary += [token["id"] for token in added if not token.get("special")]
    return max(ordinary, default=-1), special


def _of_rows(source: Source) -> Iterator[tuple[str, int]]:
    for column in map(str, _IDS):
        if column not in source.columns:
            continue
        for chunk in source.table.column(column).chunks:
            ids = chunk.flatten()
            if len(ids):
                largest = int(ids.to_numpy(zero_copy_only=False).max())
                yield f"{source.name}: column {column!r} has token id", largest


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON file; empty if it is missing or damaged, which other checks report."""
    try:
        return read_json(file)
    except (OSError, UserError):
        return {}
