"""Program: calls that are made, and the Python text of a program that makes them again."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from ..dataflow.config import Config
from ..dataflow.errors import UserError

T = TypeVar("T")
PACKAGE = __name__.split(".")[0]
WIDEST = 120
"""Characters of a call in one line; the arguments of a longer one have a line each."""


@dataclass(frozen=True)
class Statement:
    """A call of a program, and the name that its result gets."""

    name: str
    function: Any
    positional: tuple[Any, ...]
    arguments: Mapping[str, Any]


class Program:
    """Statements that were carried out. A result of an earlier one is written by its name.

    >>> program = Program()
    >>> digits = program.assign("digits", list, ("1", "2"))
    >>> sorted_digits = program.assign("largest", max, digits)
    >>> print(program.text)
    digits = list(("1", "2"))
    largest = max(digits)
    """

    def __init__(self) -> None:
        self._statements: list[Statement | str] = []
        self._made: list[tuple[Any, str]] = []
        self._imports: dict[str, set[str]] = {}
        """Module -> what is imported from it."""
        self._functions: dict[str, str] = {}
        """Name -> text of a function that the script defines."""

    def assign(self, name: str, function: Callable[..., T], /, *positional: Any, **arguments: Any) -> T:
        """Make a call, and give its result a name."""
        made = function(*positional, **arguments)
        self._statements.append(Statement(name, function, positional, arguments))
        self._made.append((made, name))
        return made

    def add(self, text: str) -> None:
        """Any other statement, as text."""
        self._statements.append(text)

    def call(self, function: Any, /, *positional: Any, **arguments: Any) -> str:
        """A call as text.

        Raises:
            UserError: an argument was made elsewhere, and has no text.
        """
        given = [*map(self.expression, positional), *(f"{n}={self.expression(v)}" for n, v in arguments.items())]
        name = self._name_of(function)
        line = f"{name}({', '.join(given)})"
        if len(line) <= WIDEST:
            return line
        return f"{name}(\n" + "".join(textwrap.indent(each, "    ") + ",\n" for each in given) + ")"

    @property
    def text(self) -> str:
        """The whole program, with what it imports, and the functions that the script itself defines.

        Raises:
            UserError: a value has no text.
        """
        lines = [
            s if isinstance(s, str) else f"{s.name} = {self.call(s.function, *s.positional, **s.arguments)}"
            for s in self._statements
        ]
        package = [f"import {PACKAGE}"] if any(f"{PACKAGE}." in line for line in lines) else []
        imports = [
            f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(self._imports.items())
        ]
        head = [*package, *imports, *(f"\n\n{function}\n" for function in self._functions.values())]
        return "\n".join([*head, *([""] if head else []), *lines])

    def expression(self, value: Any) -> str:
        """A value as text; of settings only those that differ from their defaults."""
        for made, name in self._made:
            if made is value and not isinstance(value, str | int | float | None):  # equal ones may be one object
                return name
        if isinstance(value, Config):
            return self.call(type(value), **_given_settings(value))
        if is_dataclass(value) and not isinstance(value, type):
            return self.call(type(value), **_given_fields(value))
        if inspect.isroutine(value) or isinstance(value, type):
            return self._name_of(value)
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.expression(k)}: {self.expression(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self.expression, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
        if value is None or isinstance(value, str | int | float | Path):
            return _quoted(str(value)) if isinstance(value, str | Path) else repr(value)
        if _exported(type(value).__name__) is type(value):  # a backend: its text says how it was made
            return f"{PACKAGE}.{value!r}"
        raise UserError(f"{value!r} has no text for a program: give functions by their names, and data by its files")

    def _name_of(self, function: Any) -> str:
        """A function or a class by its name, which is imported; a function of the script is written out."""
        owner, _, own = function.__qualname__.rpartition(".")
        name = owner or own
        module = sys.modules.get(function.__module__)
        there = getattr(module, name, None)
        known = function if not owner else there
        if module is None or known is None or (not owner and there is not function) or "." in name:
            raise UserError(f"{function.__qualname__} of {function.__module__} has no name that a program could import")
        if _exported(name) is known:
            return f"{PACKAGE}.{function.__qualname__}"
        if function.__module__ == "__main__":
            self._functions[name] = textwrap.dedent(inspect.getsource(function)).rstrip()
        elif function.__module__ != "builtins":
            self._imports.setdefault(function.__module__, set()).add(name)
        return function.__qualname__


def _exported(name: str) -> Any:
    """What the package exports under a name; None: nothing."""
    return getattr(import_module(PACKAGE), name, None)


def _quoted(text: str) -> str:
    """
    >>> print(_quoted("data"), _quoted('"'))
    "data" '"'
    """
    single = repr(text)
    return single if single.startswith('"') or '"' in text else f'"{single[1:-1]}"'


def _given_settings(value: Config) -> dict[str, Any]:
    """Settings that were given, in their order."""
    return {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}


def _given_fields(value: Any) -> dict[str, Any]:
    """Fields of a dataclass that differ from their defaults."""
    given = {f.name: (getattr(value, f.name), f.default) for f in fields(value) if f.init}
    return {name: now for name, (now, default) in given.items() if default is MISSING or now != default}
