"""House rules that a machine can check: imports, module names, and examples in docstrings."""

import ast
import doctest
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "dataflow": set[str](),
    "resharding": set[str](),
    "algorithms": {"dataflow"},
    "workers": {"algorithms", "dataflow", "resharding"},
    "controllers": {"workers", "algorithms", "dataflow"},
    "dashboard": {"controllers", "dataflow"},
}
"""Allowed imports between the floors. Other folders may import everything, and only `__main__`
imports commands."""

EVERYBODY_MAY_IMPORT = {"weft.dataflow.lazy", "weft.dataflow.errors", "weft.dataflow.cgroups"}
"""torch on demand, the tree of exceptions, and the CPUs of a process: they import nothing else, so anyone
may use them."""

NO_NAMES = {"util", "utils", "common", "helper", "helpers", "misc", "base", "impl", "manager"}


def library_files() -> list[Path]:
    folders = (folder for folder in ROOT.iterdir() if (folder / "__init__.py").is_file())
    return sorted([*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))])


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(["weft", *(parts[:-1] if parts[-1] == "__init__" else parts)])


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=str(file))


def imports_of(module: str, source: ast.Module, *, is_package: bool = False) -> list[tuple[int, str]]:
    """Return every import as (line, absolute dotted name): at the top, in functions, under
    TYPE_CHECKING."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found = []
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            if origin in EVERYBODY_MAY_IMPORT:  # `from ..dataflow.lazy import torch` imports torch
                found += [(node.lineno, origin), *((node.lineno, alias.name) for alias in node.names)]
            else:
                found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            found += [(node.lineno, name) for name in names[:1] if isinstance(name, str)]
    return found


def room_of(module: str) -> str | None:
    """Return the folder of a `weft.` module, or None for root modules and other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "weft" and len(parts) > 1 and (ROOT / parts[1]).is_dir() else None


@cache
def imports_by_file() -> dict[Path, list[tuple[int, str]]]:
    return {
        file: imports_of(module_name(file), parsed(file), is_package=file.name == "__init__.py")
        for file in library_files()
    }


def imports_among_modules() -> dict[str, set[str]]:
    """Return module -> modules of the library that it imports."""
    modules = {module_name(file) for file in library_files()}
    found: dict[str, set[str]] = {}
    for file, imports in imports_by_file().items():
        names = {name if name in modules else name.rpartition(".")[0] for _, name in imports}
        found[module_name(file)] = (names & modules) - {module_name(file)}
    return found


def imports_among_benchmarks() -> dict[str, set[str]]:
    """Do the same for benchmarks, whose programs import from their own folder or from the one
    above."""
    top = ROOT / "benchmarks"
    found: dict[str, set[str]] = {}
    for file in sorted(top.rglob("*.py")):
        names = [name.replace(".", "/") for _, name in imports_of(file.stem, parsed(file))]
        paths = {
            folder / f"{name}.py"
            for folder in (file.parent, top)
            for each in names
            for name in (each, str(Path(each).parent))
        }
        found[_dotted(file)] = {_dotted(path) for path in paths if path.is_file() and path != file}
    return found


def _dotted(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def with_folders_as_modules(imports: dict[str, set[str]], depth: int) -> dict[str, set[str]]:
    """Merge modules by folder: floors for depth 2, folders within them for depth 3."""

    def folded(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    found: dict[str, set[str]] = defaultdict(set)
    for module, names in imports.items():
        found[folded(module)] |= {folded(name) for name in names} - {folded(module)}
    return found


def circles(imports: dict[str, set[str]]) -> set[str]:
    """Return strongly connected components of several modules, each as sorted names."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: set[str] = set()

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for name in sorted(imports.get(module, ())):
            if name not in number:
                visit(name)
                lowest[module] = min(lowest[module], lowest[name])
            elif name in stack:
                lowest[module] = min(lowest[module], number[name])
        if lowest[module] == number[module]:
            component = stack[stack.index(module) :]
            del stack[-len(component) :]
            if len(component) > 1:
                found.add(" ".join(sorted(component)))

    for module in sorted(imports):
        if module not in number:
            visit(module)
    return found


def files_importing(package: str) -> dict[str | None, list[str]]:
    """Return folder -> its files that import the package."""
    files = defaultdict(list)
    for file, imports in imports_by_file().items():
        if any(name.split(".")[0] == package for _, name in imports):
            files[room_of(module_name(file))].append(str(file.relative_to(ROOT)))
    return dict(files)


def test_imports_are_found_at_any_place_in_a_file():
    source = """
import ray
from ..dataflow import batch
from . import actor
from ..dataflow.lazy import torch
if TYPE_CHECKING:
    from ..controllers.driver import Driver
def engine():
    import vllm.config
    return importlib.import_module("vllm")
"""
    names = {name for _, name in imports_of("weft.workers.rollout", ast.parse(source))}
    assert names >= {
        "ray",
        "torch",
        "vllm",
        "vllm.config",
        "weft.workers.actor",
        "weft.controllers.driver.Driver",
    }
    assert names >= {"weft.dataflow.batch", "weft.dataflow.lazy"}


def test_imports_run_down_the_floors():
    wrong = []
    for file, imports in imports_by_file().items():
        room = room_of(module_name(file))
        if room not in MAY_IMPORT:
            continue
        for line, name in imports:
            target = room_of(name)
            if name.split(".")[0] != "weft" or target == room or name in EVERYBODY_MAY_IMPORT:
                continue
            if target not in MAY_IMPORT[room]:
                allowed = ", ".join(sorted(MAY_IMPORT[room])) or "no other folder"
                wrong.append(
                    f"{file.relative_to(ROOT)}:{line}: {room} imports {name}; it may import {allowed}"
                )
    assert not wrong, "\n".join(wrong)


def test_circles_of_imports_are_found():
    assert circles(
        {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": {"b"}, "e": {"a"}, "f": {"g"}, "g": {"f"}}
    ) == {
        "b c d",
        "f g",
    }
    rooms = {
        "weft.floor.above": {"weft.floor.room.b"},
        "weft.floor.room.a": {"weft.floor.above"},
        "weft.floor.room.b": set[str](),
    }
    assert not circles(rooms) and circles(with_folders_as_modules(rooms, 3)) == {
        "weft.floor.above weft.floor.room"
    }


def test_imports_run_one_way_among_modules_and_folders():
    modules = imports_among_modules()
    found = circles(modules) | circles(imports_among_benchmarks())
    found |= circles(with_folders_as_modules(modules, 2)) | circles(with_folders_as_modules(modules, 3))
    assert not found, f"these import each other in a circle: {sorted(found)}"


def test_the_library_imports_no_example_test_or_benchmark():
    outside = {"examples", "tests", "benchmarks"}
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file, imports in imports_by_file().items()
        for line, name in imports
        if outside & set(name.removeprefix("weft.").split(".")[:1])
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_module_that_is_run_imports_the_commands():
    importing = {
        str(file.relative_to(ROOT))
        for file, imports in imports_by_file().items()
        if room_of(module_name(file)) != "commands"
        and any(room_of(name) == "commands" for _, name in imports)
    }
    assert importing == {"__init__.py", "__main__.py"}, importing  # the first one for editors


def test_ray_lives_in_one_folder_of_controllers_alone():
    files = files_importing("ray")
    assert set(files) <= {"controllers"}, files
    assert all(file.startswith("controllers/backends/") for file in files["controllers"]), files


def test_vllm_is_known_to_modules_of_generation_and_resharding_that_say_so():
    files = files_importing("vllm")
    assert set(files) <= {"workers", "resharding"}, files
    assert all(file.startswith("workers/generation/vllm_") for file in files["workers"]), files
    assert all(file.startswith("resharding/vllm_") for file in files["resharding"]), files


def test_no_module_is_named_after_nothing():
    named = [file for file in library_files() if {file.stem, file.parent.name} & NO_NAMES]
    assert not named, f"a helper lives beside the noun that it serves: {[str(file) for file in named]}"


def test_every_exception_is_in_the_tree_of_one_file():
    tree = ROOT / "dataflow" / "errors.py"
    of_episodes = ROOT / "workers" / "agents" / "failures.py"  # caught by Weft, and never end a run
    known = {node.name for node in ast.walk(parsed(tree)) if isinstance(node, ast.ClassDef)}
    elsewhere = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for file in library_files()
        if file not in (tree, of_episodes)
        and room_of(module_name(file)) not in {"benchmarks", "examples", "tests"}
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if (name := ast.unparse(base).split(".")[-1]) in known or name.endswith(("Error", "Exception"))
    ]
    assert not elsewhere, (
        f"exceptions are drawn and defined in dataflow/errors.py, not here: {elsewhere}"
    )


Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(definition: Documented) -> Iterator[Documented]:
    """Yield a definition and those inside, without a walk through all expressions."""
    yield definition
    for inner in definition.body:
        if isinstance(inner, Documented):
            yield from documented(inner)


def docstring_examples() -> list[doctest.DocTest]:
    """Return the `>>>` examples of every docstring, from the source, because decorators may hide
    docstrings."""
    parser, tests = doctest.DocTestParser(), []
    for file in library_files():
        if ">>>" not in file.read_text():  # both test processes collect: skip parsing for most files
            continue
        for node in documented(parsed(file)):
            text = ast.get_docstring(node, clean=False)
            if text and ">>>" in text:
                name = ".".join(
                    [module_name(file), *([] if isinstance(node, ast.Module) else [node.name])]
                )
                first_line = node.body[0].lineno - 1
                tests.append(parser.get_doctest(text, {}, name, str(file), first_line))
    return tests


@pytest.mark.parametrize(
    "example", docstring_examples(), ids=lambda example: f"{example.name}:{example.lineno + 1}"
)
def test_docstring_examples_run(example: doctest.DocTest, capsys: pytest.CaptureFixture[str]):
    assert example.filename is not None
    example.globs = dict(vars(importlib.import_module(module_name(Path(example.filename)))))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed = runner.run(example).failed
    assert not failed, capsys.readouterr().out


SHORTEST_S = 10
"""Shortest allowed deadline of a test: on a busy machine a process may not run for seconds."""

BOUNDS_A_WAIT = re.compile(r"timeout|deadline|patience|silence|pause|grace|idle|wait_s$|interval_s$")
"""Names of arguments that limit a wait."""

OWN_CLOCK = {"test_elastic.py", "test_jobs.py", "test_ledger.py", "test_log.py", "test_simulated.py"}
"""Tests with a fake clock."""


def short_waits(source: str) -> list[int]:
    """Return the lines of a test file that depend on less than SHORTEST_S of wall-clock time.

    These are deadlines, sleeps outside of polling loops, and limits on elapsed time. Tests marked
    slow are exempt, and so are lines with the comment "waited out": nothing has to happen within
    their time.
    """
    lines, found = source.splitlines(), list[int]()

    def is_short(node: ast.AST) -> bool:
        if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
            return False
        return isinstance(node.value, int | float) and 0 < node.value < SHORTEST_S

    def is_wrong(node: ast.AST, loops: bool) -> bool:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
            if name == "setattr" and any(str(value).endswith("_S") for value in first):
                return is_short(node.args[-1])
            if (
                name in {"sleep", "wait", "join", "result", "settimeout"}
                and not loops
                and any(map(is_short, node.args))
            ):
                return len(node.args) == 1
            return any(
                is_short(each.value) and BOUNDS_A_WAIT.search(each.arg or "") for each in node.keywords
            )
        if isinstance(node, ast.Compare):
            return any(map(is_short, node.comparators)) and "monotonic" in ast.unparse(node)
        return (
            isinstance(node, ast.BinOp)
            and is_short(node.right)
            and "monotonic()" in ast.unparse(node.left)
        )

    def look(node: ast.AST, loops: bool = False) -> None:
        if isinstance(node, ast.FunctionDef) and "mark.slow" in " ".join(
            map(ast.unparse, node.decorator_list)
        ):
            return
        loops = loops or isinstance(node, ast.While | ast.For)
        if isinstance(node, ast.expr) and is_wrong(node, loops):
            found.extend(
                [node.lineno] * ("waited out" not in " ".join(lines[node.lineno - 1 : node.end_lineno]))
            )
        for child in ast.iter_child_nodes(node):
            look(child, loops)

    look(ast.parse(source))
    return found


def test_a_short_wait_is_found_and_one_that_is_waited_out_is_not():
    source = """
def test_short(monkeypatch):
    monkeypatch.setattr(connection, "SILENCE_S", 0.3)
    event.wait(5)
    run(call_timeout_s=2)
    assert time.monotonic() - began < 1
    end = time.monotonic() + 5
    time.sleep(1)

def test_long(monkeypatch):
    monkeypatch.setattr(connection, "SILENCE_S", 0.3)  # waited out: nobody answers
    while not event.wait(0.1):
        time.sleep(0.1)
    run(call_timeout_s=60, prompts=2)

@pytest.mark.slow
def test_slow():
    run(call_timeout_s=2)
"""
    assert short_waits(source) == [3, 4, 5, 6, 7, 8]


@pytest.mark.thorough
def test_no_quick_test_depends_on_less_than_ten_seconds_of_wall_clock_time():
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if file.name not in OWN_CLOCK]
    wrong = [
        f"{file.relative_to(ROOT)}:{line}" for file in files for line in short_waits(file.read_text())
    ]
    assert not wrong, f"take a fake clock, an event, or a limit of {SHORTEST_S} s or more: {wrong}"
