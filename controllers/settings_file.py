"""Settings in a YAML or TOML file: its values, each with the line that it stands on."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dataflow.errors import UserError, nearest

SUFFIXES = (".yaml", ".yml", ".toml")


@dataclass(frozen=True)
class Placed:
    """A value of a file."""

    value: Any
    """A plain value, or a mapping of names to further ones."""
    place: str
    """File and line."""


def read_settings_file(path: Path) -> dict[str, Placed]:
    """The settings of a file by name.

    Raises:
        UserError: it cannot be read, or is no mapping; the message has the file and the line.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"--config {path}: settings are read from files ending with {', '.join(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"--config {path}: there is no such file{nearest(path.name, others)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: it cannot be read: {error}") from None
    return _toml(path, text) if path.suffix == ".toml" else _yaml(path, text)


# YAML


def _yaml(path: Path, text: str) -> dict[str, Placed]:
    import yaml

    try:
        root = yaml.compose(text, yaml.SafeLoader)
        loader = yaml.SafeLoader("")
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path}:{root.start_mark.line + 1}: a file of settings has `name: value` in each line")
        return _yaml_mapping(path, root, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: it is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: it is not YAML: {error}") from None


def _yaml_mapping(path: Path, node: Any, loader: Any) -> dict[str, Placed]:
    import yaml

    found: dict[str, Placed] = {}
    for key, value in node.value:
        name, place = str(loader.construct_object(key, deep=True)), f"{path}:{key.start_mark.line + 1}"
        if name in found:
            raise UserError(f"{place}: {name} is given twice, the first time in {found[name].place}")
        inner = isinstance(value, yaml.MappingNode)
        made = _yaml_mapping(path, value, loader) if inner else loader.construct_object(value, deep=True)
        found[name] = Placed(made, place)
    return found


# TOML


def _toml(path: Path, text: str) -> dict[str, Placed]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        place = f"{path}:{line[1]}" if line else f"{path}:{len(text.splitlines())}"
        raise UserError(f"{place}: it is not TOML: {error}") from None
    return _toml_mapping(path, values, "", _toml_lines(text))


def _toml_mapping(path: Path, values: Mapping[str, Any], above: str, lines: Mapping[str, int]) -> dict[str, Placed]:
    found: dict[str, Placed] = {}
    for name, value in values.items():
        full = f"{above}.{name}" if above else name
        line = lines.get(full) or next((n for known, n in lines.items() if known.startswith(f"{full}.")), None)
        place = f"{path}:{line}" if line else str(path)
        made = _toml_mapping(path, value, full, lines) if isinstance(value, Mapping) else value
        found[name] = Placed(made, place)
    return found


def _toml_lines(text: str) -> dict[str, int]:
    """Full name of a key -> its line.

    >>> _toml_lines("steps = 3\\n[lora]\\nrank = 8\\n")
    {'steps': 1, 'lora': 2, 'lora.rank': 3}
    """
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.\"' -]+?)\s*\]", line):
            table = _bare(header[1])
            found.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
            name = _bare(key[1])
            found.setdefault(f"{table}.{name}" if table else name, number)
    return found


def _bare(key: str) -> str:
    """A key without quotes and spaces."""
    return re.sub(r"[\"' ]", "", key)
