"""Plain values: what vLLM's transfer backends tell each other, as JSON. Nothing is pickled.

Their payloads are dictionaries of names, numbers and shapes; that of CUDA IPC has the arguments by which torch opens a memory in another
process: bytes, dtypes and classes of torch. Whatever is not listed here is refused by name.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

_CLASSES: dict[str, type] = {
    "torch.Tensor": torch.Tensor,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.UntypedStorage": torch.UntypedStorage,
    "torch.TypedStorage": torch.storage.TypedStorage,
}
_NAMES = {found: name for name, found in _CLASSES.items()}


def encoded(value: Any) -> str:
    """A value as JSON.

    >>> decoded(encoded({"handle": (torch.Size([2, 3]), b"\\x00", torch.float32, None)}))
    {'handle': ((2, 3), b'\\x00', torch.float32, None)}

    Raises:
        TypeError: it holds something that is not plain.
    """
    return json.dumps(_plain(value))


def decoded(text: str | bytes) -> Any:
    """What `encoded` has made JSON of. Sizes become tuples.

    Raises:
        ValueError: it is something else.
    """
    return _value(json.loads(text))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"map": {key: _plain(each) for key, each in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, type) and value in _NAMES:
        return {"class": _NAMES[value]}
    raise TypeError(f"{value!r} is not plain: a transfer backend that tells receivers such values cannot be used here")


def _value(said: Any) -> Any:
    if isinstance(said, list):
        return [_value(each) for each in said]
    if not isinstance(said, dict):
        return said
    if len(said) == 1:
        ((kind, content),) = said.items()
        if kind == "map" and isinstance(content, dict):
            return {key: _value(each) for key, each in content.items()}
        if kind == "tuple" and isinstance(content, list):
            return tuple(_value(each) for each in content)
        if kind == "bytes" and isinstance(content, str):
            return base64.b64decode(content)
        if kind == "dtype" and isinstance(found := getattr(torch, str(content), None), torch.dtype):
            return found
        if kind == "class" and content in _CLASSES:
            return _CLASSES[content]
    raise ValueError(f"{said!r} is not what a transfer backend says")
