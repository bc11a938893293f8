"""Hiding: secrets are left out of what goes to a tracker."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SECRET = re.compile(r"(?:^|_)(?:api_?key|key|secret|password|passwd|token|credentials?|auth)s?$", re.IGNORECASE)
"""Ends of names whose values, where they are texts, are secrets: `WANDB_API_KEY`, `hub_token`; not `tokenizer`."""
SHORTEST = 6
"""Characters: a shorter value of a variable may stand in any text."""
HIDDEN = "(hidden)"


def readable_config(path: Path) -> dict[str, Any]:
    """The configuration of a run without secrets; empty where it cannot be read."""
    try:
        return public(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def public(config: Any, name: str = "") -> Any:
    """A configuration without secrets: texts under such names, and values that variables of such names have in the environment.

    >>> public({"hub_token": "hf_abc", "max_tokens": 4, "tokenizer": "model", "nested": [{"password": "x"}]})
    {'hub_token': '(hidden)', 'max_tokens': 4, 'tokenizer': 'model', 'nested': [{'password': '(hidden)'}]}
    """
    if isinstance(config, Mapping):
        return {str(key): public(value, str(key)) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [public(value, name) for value in config]
    if isinstance(config, str):
        return HIDDEN if _SECRET.search(name) else without_secrets(config)
    return config


def without_secrets(text: str) -> str:
    """A text in which the values of secret variables of the environment are replaced."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and _SECRET.search(name):
            text = text.replace(value, HIDDEN)
    return text


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested mappings as one, for trackers that know only names and values.

    >>> flat({"schedule": {"steps": 3}, "seed": 0, "graphs": ["a"]})
    {'schedule/steps': 3, 'seed': 0, 'graphs': ['a']}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{before}{key}"
        found |= flat(value, f"{name}/") if isinstance(value, Mapping) else {name: value}
    return found
