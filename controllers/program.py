"""Program: records calls, and prints a Python program that makes the same calls."""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import inspect
import itertools
import linecache
import math
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from ..dataflow.config import Config
from ..dataflow.errors import UserError

# Definitions: source text of the functions, classes and objects of a script. `_Script` finds the
# top-level statements that define a name, and their dependencies. `factory` returns the text of a
# closure and its free variables.


MAIN = "__main__"
PACKAGE = __name__.split(".")[0]


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class _Part:
    place: tuple[int, int]
    text: str
    binds: frozenset[str]
    """Names that the statement defines, or whose objects it changes."""
    reads: frozenset[str]
    """Names that the statement uses, including inside functions."""
    calls: str = ""
    """Root name of a call whose result is dropped, such as `table` in `table.update(...)`."""
    star: str = ""
    """The module of a `from module import *`."""


class _Script:
    """The running script: its top-level statements up to the current one."""

    def __init__(self) -> None:
        self.module: ModuleType = sys.modules[MAIN]
        frame = _frame_of(self.module)
        self._line = frame.f_lineno if frame is not None else sys.maxsize
        self._file = frame.f_code.co_filename if frame else getattr(self.module, "__file__", None) or ""

    @cached_property
    def parts(self) -> list[_Part]:
        """Statements of the script; empty without source text, as under `python -c`."""
        text = "".join(linecache.getlines(self._file, vars(self.module)))
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return []
        return [self._part(node, text) for node in self._top_level(tree.body)]

    def has(self, name: str) -> bool:
        return any(name in part.binds for part in self.parts) or self._by_star(name) is not None

    def name_of(self, value: Any) -> str | None:
        found = [n for n, each in vars(self.module).items() if each is value and not n.startswith("__")]
        return next((name for name in found if self.has(name)), None)

    def needed(self, names: set[str]) -> list[_Part]:
        """Return the statements that define these names and their dependencies, in order."""
        # Search for dependencies until no new names appear.
        known, open_names, chosen = set[str](), set(names), set[int]()
        while open_names:
            known |= open_names
            for number, part in enumerate(self.parts):
                if part.binds & open_names or self._changes(part, open_names):
                    chosen.add(number)
            chosen |= {n for n in map(self._by_star, open_names) if n is not None}
            open_names = set().union(*(self.parts[n].reads for n in chosen)) - known
        needed = [self.parts[number] for number in sorted(chosen)]
        if not needed:
            return []
        # A future import changes the meaning of the other statements.
        wanted = {*needed, *(part for part in self.parts if part.text.startswith("from __future__"))}
        for path in (part for part in self.parts if part.text.startswith("sys.path.")):
            # later imports may depend on it
            wanted |= {path, *(self.needed(set(path.reads)) if not path.reads <= known else ())}
            known |= path.reads
        return sorted(wanted, key=lambda part: part.place)

    def _changes(self, part: _Part, names: set[str]) -> bool:
        """Whether a call such as `fill(table)` may change the object of one of these names."""
        known = vars(self.module)
        called = known.get(part.calls)
        owner = (
            getattr(called, "__name__" if isinstance(called, ModuleType) else "__module__", None) or ""
        )
        # These calls do not change objects of the script.
        if part.calls in ("", "print") or owner.split(".")[0] == PACKAGE:
            return False
        containers = {name for name in names if isinstance(known.get(name), list | dict | set)}
        return part.calls in names or bool(part.reads & containers)

    def _by_star(self, name: str) -> int | None:
        """Return the index of the `from module import *` that provides this name, or None."""
        if any(name in part.binds for part in self.parts) or name not in vars(self.module):
            return None
        stars = [(n, part.star) for n, part in enumerate(self.parts) if part.star]
        return max((n for n, star in stars if hasattr(sys.modules.get(star), name)), default=None)

    def _top_level(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """Yield the statements before the current one. For a block that contains the current
        statement, yield the statements in the block."""
        for node in body:
            if node.lineno > self._line:
                return
            if (node.end_lineno or node.lineno) < self._line:
                yield node
            elif isinstance(node, ast.If | ast.With | ast.Try | ast.For | ast.While):
                blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
                blocks += [handler.body for handler in getattr(node, "handlers", [])]
                yield from (each for block in blocks for each in self._top_level(block))

    def _part(self, node: ast.stmt, text: str) -> _Part:
        star = ""
        if isinstance(node, ast.ImportFrom):
            package = getattr(self.module, "__package__", None) or ""
            parents = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            # The program is outside of the script's package, so its imports must be absolute.
            node.module = ".".join([*parents, *([node.module] if node.module else [])])
            node.level = 0
            star = node.module if node.names[0].name == "*" else ""
            source = ast.unparse(node)
        else:
            lines = text.splitlines()[_first_line(node) - 1 : node.end_lineno]
            is_whole = node.col_offset == 0 or isinstance(node, _DEFINITIONS)
            # Other lines may hold several statements, so print this one from its syntax tree.
            written = is_whole and ";" not in lines[-1]
            source = textwrap.dedent("\n".join(lines)) if written else ast.unparse(node)
        binds, reads = names_of(source)
        roots = {
            _root(each)
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute | ast.Subscript)
            and isinstance(each.ctx, ast.Store | ast.Del)
        }
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        calls = _root(node.value.func) if is_call else ""  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom)):
            binds |= roots - {""}
        place = node.lineno, node.col_offset
        return _Part(place, source, frozenset(binds), frozenset(reads), calls, star)


def names_of(source: str) -> tuple[set[str], set[str]]:
    """Return the names that statements bind, and the global names that they use, also inside
    functions.

    >>> names_of("def area(r): return r * r * PI")
    ({'area'}, {'PI'})
    """
    if source.startswith("from ") and source.endswith("import *"):
        return set(), set()
    table = symtable.symtable(source, "script", "exec")
    symbols = table.get_symbols()
    binds = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_namespace()}
    reads = {s.get_name() for s in symbols if s.is_referenced()}
    inner = list(table.get_children())
    while inner:
        each = inner.pop()
        inner += each.get_children()
        reads |= {s.get_name() for s in each.get_symbols() if s.is_global() and s.is_referenced()}
    return binds, {name for name in reads if not hasattr(builtins, name)}


def factory(function: FunctionType) -> tuple[str, list[str]]:
    """Return the source text of a function or lambda, and the names of its free variables."""
    try:
        node = _node_of(function.__code__, function.__code__.co_filename, function.__globals__)
    except (OSError, TypeError, SyntaxError):
        node = None
    if node is None:
        raise UserError(
            f"cannot print a program, because Python cannot find the source of {function.__qualname__} of {function.__module__}; "
            "define it in a file"
        )
    enclosed = [name for name in function.__code__.co_freevars if name != function.__name__]
    return ast.unparse(node), enclosed


def _node_of(code: CodeType, file: str, names: Mapping[str, Any]) -> ast.AST | None:
    tree = ast.parse("".join(linecache.getlines(file, dict(names))))
    kind = ast.Lambda if code.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [n for n in ast.walk(tree) if isinstance(n, kind) and _first_line(n) == code.co_firstlineno]
    if len(found) > 1:  # several lambdas on one line: compare columns
        spots = {(line or 0, column) for line, _, column, _ in code.co_positions() if column}
        found = [n for n in found if any(_holds(n, spot) for spot in spots)]
    return max(found, key=lambda n: getattr(n, "col_offset", 0), default=None)


def _first_line(node: Any) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])


def _holds(node: Any, spot: tuple[int, int]) -> bool:
    return (node.lineno, node.col_offset) <= spot < (node.end_lineno, node.end_col_offset)


def _root(node: ast.expr) -> str:
    """
    >>> _root(ast.parse("table['a'].rows.append").body[0].value)
    'table'
    """
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _frame_of(module: ModuleType) -> FrameType | None:
    frame: FrameType | None = inspect.currentframe()
    while frame and (frame.f_code.co_name != "<module>" or frame.f_globals is not vars(module)):
        frame = frame.f_back
    return frame


# Program

T = TypeVar("T")
WIDEST = 120
"""[characters] Maximum width of a call on one line; longer calls have one argument per line."""


class Program:
    """Records calls and writes them as a program. Results of earlier calls appear by name.

    The text begins with the imports and the script's definitions that the calls use. If the script
    already uses a name, such as `reward`, the program writes `weft_reward` instead.

    >>> program = Program()
    >>> digits = program.assign("digits", list, ("1", "2"))
    >>> sorted_digits = program.assign("largest", max, digits)
    >>> print(program.text)
    digits = list(("1", "2"))
    largest = max(digits)
    """

    def __init__(self) -> None:
        self._statements: list[Callable[[], str]] = []
        self._made: list[tuple[Any, str]] = []
        self._script = _Script()
        self._imports: dict[str, dict[str, str]] = {}
        """Module -> imported name -> its alias in the program."""
        self._needs: set[str] = set()
        self._definitions: dict[str, str] = {}
        """Name -> its definition, for closures and for scripts without source text."""
        self._renamed: set[str] = set()
        """Names of the program that the script also defines."""

    def assign(self, name: str, function: Callable[..., T], /, *positional: Any, **arguments: Any) -> T:
        made = function(*positional, **arguments)
        self._made.append((made, name))
        self.add_statement(
            lambda: f"{self.named(name)} = {self.call_text(function, *positional, **arguments)}"
        )
        return made

    def add_statement(self, write: Callable[[], str]) -> None:
        """Add a statement; `write` returns its text."""
        self._statements.append(write)

    def named(self, name: str) -> str:
        """Return the name of a result in the program's text."""
        return f"{PACKAGE}_{name}" if name in self._renamed else name

    def call_text(self, function: Any, /, *positional: Any, **arguments: Any) -> str:
        given = [
            *map(self.expression, positional),
            *(f"{n}={self.expression(v)}" for n, v in arguments.items()),
        ]
        name = self._name_of(function)
        line = f"{name}({', '.join(given)})"
        if len(line) <= WIDEST:
            return line
        return f"{name}(\n" + "".join(textwrap.indent(each, "    ") + ",\n" for each in given) + ")"

    @property
    def text(self) -> str:
        """The whole program, with its imports and the script's definitions."""
        self._renamed = set()
        lines = [write() for write in self._statements]
        own = {name for _, name in self._made} | {"driver", "metrics"}
        needed = self._script.needed(self._needs)
        taken = {*self._needs, *self._definitions, *(name for part in needed for name in part.binds)}
        # Rename the program's names that the script already uses, and write the lines again.
        if own & taken:
            self._renamed = own & taken
            lines = [write() for write in self._statements]
        imports: list[str] = []
        for module, names in sorted(self._imports.items()):
            pairs = [n if n == own else f"{n} as {own}" for n, own in sorted(names.items())]
            imports.append(f"from {module} import {', '.join(pairs)}")
        texts = [part.text for part in needed] + list(self._definitions.values())
        future = [text for text in texts if text.startswith("from __future__")]
        weft = [f"import {PACKAGE}"] if any(f"{PACKAGE}." in line for line in [*lines, *texts]) else []
        blocks = list(dict.fromkeys([*future, *weft, *imports, *texts]))
        body = "\n".join(lines)
        if not blocks:
            return body
        text = blocks[0]
        for before, block in itertools.pairwise(blocks):
            text += ("\n\n\n" if _is_definition(before) or _is_definition(block) else "\n") + block
        return text + ("\n\n\n" if _is_definition(blocks[-1]) else "\n\n") + body

    def expression(self, value: Any) -> str:
        """Return a value as text; settings with default values are left out."""
        is_plain = isinstance(value, str | int | float | None)  # equal values may be the same object
        for made, name in self._made:
            if made is value and not is_plain:
                return self.named(name)
        # Check enums before plain values, because a member of an IntEnum is also an int.
        if isinstance(value, enum.Enum):
            return f"{self._name_of(type(value))}.{value.name}"
        if value is None or isinstance(value, bool | str | bytes | int | float | Path):
            return _literal(value)
        if isinstance(value, re.Pattern):
            return self.call_text(re.compile, value.pattern, value.flags)
        if isinstance(value, functools.partial):
            return self.call_text(functools.partial, value.func, *value.args, **value.keywords)
        if inspect.isroutine(value) or isinstance(value, type):
            return self._name_of(value)
        if isinstance(value, Config):
            names = [name for name in type(value).model_fields if name in value.model_fields_set]
            return self.call_text(type(value), **{name: getattr(value, name) for name in names})
        if is_dataclass(value):
            given = {f.name: (getattr(value, f.name), f.default) for f in fields(value) if f.init}
            changed = {n: v for n, (v, default) in given.items() if default is MISSING or v != default}
            return self.call_text(type(value), **changed)
        if isinstance(value, Mapping):
            pairs = [f"{self.expression(k)}: {self.expression(v)}" for k, v in value.items()]
            return "{" + ", ".join(pairs) + "}"
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self.expression, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
        if isinstance(value, set | frozenset):
            # By `repr`: the text must not depend on hashes, and elements may not compare.
            return self.call_text(type(value), sorted(value, key=repr))
        if _exported(type(value).__name__) is type(value):  # a backend, whose repr shows how to make it
            return f"{PACKAGE}.{value!r}"
        return self._object(value)

    def _object(self, value: Any) -> str:
        """Return the text of another object: its name, or a call that constructs it."""
        name = self._script.name_of(value)
        if name is not None:
            self._needs.add(name)
            return name
        for module in (sys.modules.get(type(value).__module__), *list(sys.modules.values())):
            if not isinstance(module, ModuleType) or module.__name__ == MAIN:
                continue
            name = next((n for n, each in list(vars(module).items()) if each is value), None)
            if name and not name.startswith("__"):
                return self._import(module.__name__, name, value)
        try:
            arguments = _constructor_arguments(value)
        except (AttributeError, TypeError, ValueError):
            raise UserError(
                f"{value!r} cannot be written in a program; give it a name at the top level of the script, such as `reward = ...`"
            ) from None
        return self.call_text(type(value), **arguments)

    def _name_of(self, function: Any) -> str:
        """Return the name of a function or class or, for a closure, a call that creates it."""
        if inspect.ismethod(function):
            owner = function.__self__
            return f"{self.expression(owner)}.{function.__name__}"
        qualified = getattr(function, "__qualname__", None) or function.__name__
        name = qualified.partition(".")[0]
        home = function.__module__ or ""
        module = sys.modules.get(home)
        there: Any = module
        for each in qualified.split("."):
            there = getattr(there, each, None)
        # Users import names from the package, not from its modules.
        if _exported(name) is not None and _exported(name) is getattr(module, name, None):
            return f"{PACKAGE}.{qualified}"
        if home == "builtins":
            return qualified
        if there is function and home != MAIN:
            return qualified.replace(name, self._import(home, name, getattr(module, name)), 1)
        known = self._script.name_of(function)
        if there is function or known is not None:
            return self._script_name(known or qualified)
        if inspect.isfunction(function):
            return self._closure(function)
        raise UserError(
            f"{qualified} of {home} has no name that a program can import; define it at the top level"
        )

    def _script_name(self, qualified: str) -> str:
        name = qualified.partition(".")[0]
        if self._script.has(name):
            self._needs.add(name)
        elif name not in self._definitions:
            self._define(name, getattr(self._script.module, name))
        return qualified

    def _define(self, name: str, value: Any) -> None:
        """Define a name of a script without source text (such as a notebook) by its value."""
        self._definitions[name] = ""  # ends the recursion if the value refers to itself
        if isinstance(value, ModuleType):
            text = f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
        elif inspect.isfunction(value) and value.__module__ == MAIN and value.__name__ == name:
            text, enclosed = factory(value)
            if enclosed:
                text = f"{name} = {self._closure(value)}"
            else:
                self._define_reads(text, value)
                text = text if not text.startswith("lambda") else f"{name} = {text}"
        else:
            text = f"{name} = {self.expression(value)}"
        # Move it to the end, after the definitions that it uses.
        del self._definitions[name]
        if text != f"{name} = {name}":
            self._definitions[name] = text

    def _define_reads(self, text: str, function: FunctionType) -> None:
        for name in sorted(names_of(text)[1]):
            if name not in function.__globals__ or name in self._definitions:
                continue
            value = function.__globals__[name]
            if function.__module__ != MAIN:
                # The text of the function uses this name, so it cannot get an alias.
                self._import(function.__module__, name, value, alias=False)
            elif self._script.has(name):
                self._needs.add(name)
            else:
                self._define(name, value)

    def _closure(self, function: FunctionType) -> str:
        """Return a lambda inline, or a call of a factory function with the free variables."""
        text, enclosed = factory(function)
        self._define_reads(text, function)
        values = inspect.getclosurevars(function).nonlocals
        arguments = ", ".join(f"{name}={self.expression(values[name])}" for name in enclosed)
        if text.startswith("lambda") and not enclosed:
            return f"({text})"
        name = function.__name__ if function.__name__.isidentifier() else "function"
        if not enclosed:
            made, body = name, text
        else:
            made = f"make_{name}"
            inner = f"return {text}" if text.startswith("lambda") else f"{text}\nreturn {name}"
            body = f"def {made}({', '.join(enclosed)}):\n{textwrap.indent(inner, '    ')}"
        made = self._unused(made, body)
        self._definitions[made] = (
            body if made in body.partition("(")[0] else body.replace(made.rpartition("_")[0], made, 1)
        )
        return made if not enclosed else f"{made}({arguments})"

    def _unused(self, name: str, text: str) -> str:
        """Return an unused name for a definition, or the name of an identical definition."""
        number, free = 1, name
        while self._script.has(free) or self._definitions.get(free, text) not in (
            text,
            text.replace(name, free, 1),
        ):
            number += 1
            free = f"{name}_{number}"
        return free

    def _import(self, module: str, name: str, value: Any, *, alias: bool = True) -> str:
        """Import a name. Return it, or an alias if the script or another import uses it."""
        names = self._imports.setdefault(module, {})
        others = {
            n for other, imported in self._imports.items() if other != module for n in imported.values()
        }
        here = vars(self._script.module).get(name, value)
        if name not in names:
            is_taken = here is not value and self._script.has(name)
            free, number = name, 1
            while alias and (free in others or (free == name and is_taken)):
                number += 1
                free = f"{name}_{number}"
            names[name] = free
        return names[name]


def _is_definition(text: str) -> bool:
    return text.startswith(("def ", "async def ", "class ", "@"))


def _literal(value: Any) -> str:
    """
    >>> _literal(float("inf")), _literal(Path("runs")), _literal(0.1)
    ('float("inf")', '"runs"', '0.1')
    """
    if isinstance(value, str | Path):
        return _quoted(str(value))
    if isinstance(value, float):
        # `repr` of a numpy float names its type.
        return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'
    return repr(value)


def _constructor_arguments(value: Any) -> dict[str, Any]:
    """Return the constructor arguments of an object. Its class must store each as an attribute of
    that name, or with a leading underscore."""
    construct = type(value).__init__
    if not inspect.isfunction(construct) and (
        construct is not object.__init__ or getattr(value, "__dict__", None) is None
    ):
        raise TypeError("its class is not written in Python")
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(value)).parameters.items():
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise TypeError(name)
        given = getattr(value, name if hasattr(value, name) else f"_{name}")
        if parameter.default is parameter.empty or given != parameter.default:
            arguments[name] = given
    return arguments


def _exported(name: str) -> Any:
    return getattr(import_module(PACKAGE), name, None)


def _quoted(text: str) -> str:
    """
    >>> print(_quoted("data"), _quoted('"'))
    "data" '"'
    """
    single = repr(text)
    return single if single.startswith('"') or '"' in text else f'"{single[1:-1]}"'
