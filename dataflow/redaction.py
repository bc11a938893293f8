"""Redaction: secrets of the environment, and settings that hold one, stand in no message and no file of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

SECRET_WORDS = {
    "token",
    "secret",
    "secrets",
    "password",
    "passwords",
    "passwd",
    "passphrase",
    "credential",
    "credentials",
}
"""Words that make a name that of a secret. `key` and `auth` do where they are the last: `WANDB_API_KEY`, but not `KEY_COLUMN`."""
PLACES = {"path", "file", "dir", "id", "ids", "env", "variable", "name", "url"}
"""Last words of names that say where a secret is, and not what it is."""
SHORTEST = 8
"""Characters of a value that may be a secret. Shorter ones ("true", "0") stand in many a text."""
HIDDEN = "[hidden]"


def is_secret_name(name: str) -> bool:
    """Whether a variable, or a field of settings, of this name holds a secret.

    >>> all(map(is_secret_name, ("HF_TOKEN", "WANDB_API_KEY", "dbPassword", "AWS_SECRET_ACCESS_KEY", "api_keys", "PROXY_AUTH")))
    True
    >>> any(map(is_secret_name, ("max_tokens", "TOKENIZERS_PARALLELISM", "tokenizer", "eos_token_id", "key_variable")))
    False
    """
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()) if word]
    if not words or words[-1] in PLACES:
        return False
    return words[-1] in ("key", "auth", "apikey") or words[-2:] == ["api", "keys"] or not SECRET_WORDS.isdisjoint(words)


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """A text without the secrets of the environment; each is replaced by the name of its variable.

    >>> redacted("401 for hf_0123456789", {"HF_TOKEN": "hf_0123456789"})
    '401 for [value of HF_TOKEN]'

    Args:
        text: for a person, or a file.
        environment: default: that of this process.
    """
    found = os.environ if environment is None else environment
    values = {value: name for name, value in found.items() if len(value) >= SHORTEST and is_secret_name(name)}
    for value in sorted(values, key=len, reverse=True):  # one may be part of another
        for written in (value, quote(value, safe="")):
            text = text.replace(written, f"[value of {values[value]}]")
    return text


def without_secrets(settings: Any, name: str = "") -> Any:
    """Settings as JSON has them, without the texts of fields whose names are those of secrets.

    Args:
        settings: the value of a field, or of all.
        name: of the field.

    >>> without_secrets({"judge": {"api_key": "sk-1"}, "max_tokens": 8, "token": None, "passwords": ["a"], "password": ["a"]})
    {'judge': {'api_key': '[hidden]'}, 'max_tokens': 8, 'token': None, 'passwords': ['[hidden]'], 'password': ['[hidden]']}
    """
    if isinstance(settings, dict):
        return {key: without_secrets(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list):
        return [without_secrets(value, name) for value in settings]
    return HIDDEN if isinstance(settings, str) and settings and is_secret_name(name) else settings
