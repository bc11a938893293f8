"""Definitions: the statements of a script that a function, a class or an object needs, as text for another program.

A function of a script refers to names of that script: imports, constants, tables, other functions. `Script` finds the top-level
statements that bind or change those names, and their dependencies. `factory` returns the text of a closure and the names it encloses.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from ..dataflow.errors import UserError

MAIN = "__main__"
_BLOCKS = (ast.If, ast.With, ast.Try, ast.For, ast.While)
_PRINTS = {"print"}


@dataclass(frozen=True)
class Part:
    """A top-level statement of a script."""

    place: tuple[int, int]
    """Line and column."""
    text: str
    binds: frozenset[str]
    """Names that it defines, or whose objects it changes."""
    reads: frozenset[str]
    """Names of the script that it, or a function in it, refers to."""
    calls: str = ""
    """The name at the root of a call without a kept result, such as `table` of `table.update(...)`."""
    star: str = ""
    """The module of a `from module import *`."""


class Script:
    """The running script: its top-level statements up to the current one."""

    def __init__(self) -> None:
        self.module: ModuleType = sys.modules[MAIN]
        frame = _frame_of(self.module)
        self._line = frame.f_lineno if frame is not None else sys.maxsize
        self._file = frame.f_code.co_filename if frame is not None else getattr(self.module, "__file__", None) or ""

    @cached_property
    def parts(self) -> list[Part]:
        """The statements of the script. Empty if Python has no text of it (an interactive session, `python -c`)."""
        text = "".join(linecache.getlines(self._file, vars(self.module)))
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return []
        return [self._part(node, text) for node in self._top_level(tree.body)]

    def has(self, name: str) -> bool:
        """Whether a statement of the script defines this name."""
        return any(name in part.binds for part in self.parts) or self._by_star(name) is not None

    def name_of(self, value: Any) -> str | None:
        """The name that the script uses for an object."""
        found = (name for name, each in vars(self.module).items() if each is value and not name.startswith("__"))
        return next((name for name in found if self.has(name)), None)

    def needed(self, names: set[str]) -> list[Part]:
        """The statements that define these names, and their dependencies, in the order of the script."""
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
        wanted = {*needed, *(part for part in self.parts if part.text.startswith("from __future__"))}
        for path in (part for part in self.parts if part.text.startswith("sys.path.")):  # imports may depend on it
            wanted |= {path, *(self.needed(set(path.reads)) if not path.reads <= known else ())}
            known |= path.reads
        return sorted(wanted, key=lambda part: part.place)

    def _changes(self, part: Part, names: set[str]) -> bool:
        """Whether a call without a kept result may change one of these names: `table.update(...)`, `fill(table)`."""
        if not part.calls or part.calls in _PRINTS or self._is_weft(part.calls):
            return False
        containers = {name for name in names if isinstance(vars(self.module).get(name), list | dict | set)}
        return part.calls in names or bool(part.reads & containers)

    def _is_weft(self, name: str) -> bool:
        value = vars(self.module).get(name)
        owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        return owner.split(".")[0] == __name__.split(".")[0]

    def _by_star(self, name: str) -> int | None:
        """The `from module import *` that provides this name, if no other statement defines it."""
        if any(name in part.binds for part in self.parts) or name not in vars(self.module):
            return None
        stars = [n for n, part in enumerate(self.parts) if part.star and hasattr(sys.modules.get(part.star), name)]
        return stars[-1] if stars else None

    def _top_level(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """Statements before the current one. A block around the current statement is replaced by its own statements."""
        for node in body:
            if node.lineno > self._line:
                return
            if node.lineno <= self._line <= (node.end_lineno or node.lineno) and isinstance(node, _BLOCKS):
                blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
                blocks += [handler.body for handler in getattr(node, "handlers", [])]
                yield from (each for block in blocks for each in self._top_level(block))
            elif not (node.lineno <= self._line <= (node.end_lineno or node.lineno)):
                yield node

    def _part(self, node: ast.stmt, text: str) -> Part:
        star = ""
        if isinstance(node, ast.ImportFrom):
            package = getattr(self.module, "__package__", None) or ""
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            node.module = ".".join([*parents, *([node.module] if node.module else [])])
            node.level = 0
            star = node.module if node.names[0].name == "*" else ""
            source = ast.unparse(node)
        else:
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            if node.col_offset == 0 or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines = text.splitlines()[first - 1 : node.end_lineno]
                source = textwrap.dedent("\n".join(lines)) if ";" not in lines[-1] else ast.unparse(node)
            else:
                source = ast.unparse(node)
        binds, reads = names_of(source)
        roots = {
            _root(each)
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store | ast.Del)
        }
        calls = _root(node.value.func) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else ""
        defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
        return Part(
            (node.lineno, node.col_offset),
            source,
            frozenset(binds if defines else binds | roots - {""}),
            frozenset(reads),
            calls,
            star,
        )


def names_of(source: str) -> tuple[set[str], set[str]]:
    """Names that statements bind, and global names that they or functions in them refer to.

    >>> names_of("def area(r): return r * r * PI")
    ({'area'}, {'PI'})
    """
    if source.startswith("from ") and source.endswith("import *"):
        return set(), set()
    table = symtable.symtable(source, "script", "exec")
    binds = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    reads = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    inner = list(table.get_children())
    while inner:
        each = inner.pop()
        inner += each.get_children()
        reads |= {s.get_name() for s in each.get_symbols() if s.is_global() and s.is_referenced()}
    return binds, {name for name in reads if not hasattr(builtins, name)}


def factory(function: FunctionType) -> tuple[str, list[str]]:
    """A function as text: an expression where it is a lambda, else its `def`; and the names of the values that it encloses.

    Raises:
        UserError: Python has no text of it.
    """
    try:
        node = _node_of(function.__code__, function.__code__.co_filename, function.__globals__)
    except (OSError, TypeError, SyntaxError):
        node = None
    if node is None:
        raise UserError(
            f"{function.__qualname__} of {function.__module__} has no text that Python can find, so that no program can be printed: "
            "define it in a file"
        )
    enclosed = [name for name in function.__code__.co_freevars if name != function.__name__]
    return ast.unparse(node), enclosed


def _node_of(code: CodeType, file: str, names: Mapping[str, Any]) -> ast.AST | None:
    """The `def` or `lambda` that a code object was made of."""
    tree = ast.parse("".join(linecache.getlines(file, dict(names))))
    kind = ast.Lambda if code.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kind) and _first_line(node) == code.co_firstlineno]
    if len(found) > 1:  # several lambdas on one line: the one whose body is where the code is
        spots = {(line, column) for line, _, column, _ in code.co_positions() if column}
        found = [n for n in found if any(_holds(n, line or 0, column or 0) for line, column in spots)]
        found = sorted(found, key=lambda n: -(n.col_offset or 0))  # pyright: ignore[reportAttributeAccessIssue]
    return found[0] if found else None


def _first_line(node: Any) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])


def _holds(node: Any, line: int, column: int) -> bool:
    return (node.lineno, node.col_offset) <= (line, column) < (node.end_lineno, node.end_col_offset)


def _root(node: ast.expr) -> str:
    """
    >>> _root(ast.parse("table['a'].rows.append").body[0].value)
    'table'
    """
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _frame_of(module: ModuleType) -> FrameType | None:
    """The frame that executes the top level of a module."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(module)):
        frame = frame.f_back
    return frame
