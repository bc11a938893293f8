"""Safety rules for the source: no running of text as code, and no unsafe deserialization."""

import ast

import pytest
from test_house import ROOT, library_files, parsed

READ_AS_CODE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
RUN_AS_CODE = {"eval", "exec"}
CALLS = {
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "runpy.run_path",
    "runpy.run_module",
    "os.popen",
    "numpy.load",
    "np.load",
}
EXCUSED = {
    "controllers/ranks/tasks.py": {
        "pickle"
    },  # parts of calls and replies, which Ray carries as pickles, protected by its token
    "controllers/backends/rank.py": {
        "cloudpickle",
        "pickle",
    },  # Ray's actor class, read once its environment is set
    "workers/agents/harness.py": {
        "cloudpickle"
    },  # writes the user's function; harness_process.py reads it
    "workers/agents/harness_process.py": {
        "pickle"
    },  # the user's function, over a socket pair from the process that started this one
    "workers/rewards/main_thread.py": {"pickle"},  # a pipe between a rank and its forked child
    "workers/rewards/code_program.py": {"exec"},  # runs in a sandbox: `workers/sandbox.py`
    "commands/run.py": {"runpy.run_path"},  # `weft run SCRIPT` runs the user's file, as Python does
}
"""File -> allowed operations. None of them reads files of a run, a model or a data set, or our
sockets."""


def breaks(source: ast.Module) -> list[tuple[int, str]]:
    """Return lines with forbidden operations."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [
                (node.lineno, name) for name in names if READ_AS_CODE.intersection(name.split("."))
            ]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            plain = called in ("numpy.load", "np.load") and not any(
                k.arg == "allow_pickle" for k in node.keywords
            )
            if called in RUN_AS_CODE or (called in CALLS and not plain and not safe):
                found.append((node.lineno, called))
            found += [
                (node.lineno, f"{called}(shell=...)")
                for k in node.keywords
                if k.arg == "shell" and ast.unparse(k.value) != "False"
            ]
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from ray import cloudpickle",
        "def f():\n    import numpy, marshal",
        "eval(text)",
        "exec(text)",
        "runpy.run_path(path)",
        "torch.load(path)",
        "yaml.load(file)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=wanted)",
        "os.system(text)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_code_that_runs_text_or_reads_pickles_is_found(text: str):
    assert breaks(ast.parse(text))


@pytest.mark.parametrize(
    "text", ["model.eval()", "yaml.safe_load(file)", "np.load(path)", "subprocess.run([a], shell=False)"]
)
def test_safe_code_is_left_alone(text: str):
    assert not breaks(ast.parse(text))


def test_the_source_runs_no_text_and_reads_no_code():
    names = {str(file.relative_to(ROOT)): file for file in library_files()}
    found = {
        name: breaks(parsed(names[name]))
        for name in names
        if not name.startswith(("tests/", "benchmarks/"))
    }
    library = {name: lines for name, lines in found.items() if lines}
    wrong = [
        f"{name}:{line}: {what}"
        for name, lines in library.items()
        for line, what in lines
        if what not in EXCUSED.get(name, ())
    ]
    assert not wrong, wrong
    assert {name: {what for _, what in lines} for name, lines in library.items()} == EXCUSED, (
        "nothing is excused in vain"
    )
