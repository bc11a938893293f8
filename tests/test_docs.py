"""Fenced code blocks in the docs are correct: code runs, and commands exist with their options.

CONTRIBUTING.md, "Documentation", explains the check of each kind of block.
"""

import ast
import contextlib
import doctest
import json
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from forked import program

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
MAKEFILE = (ROOT / "Makefile").read_text()

SHELLS = {"bash", "console", "sh"}
DATA_PARSERS = {
    "json": json.loads,
    "toml": tomllib.loads,
    "python": ast.parse,
    "text": str,
    "mermaid": str,
    "yaml": yaml.safe_load,
}
COMMANDS_OF_OTHERS = {"cd", "export", "git", "ray", "source"}
"""Commands of other programs, which are not checked."""

LONG = {"algorithms.md", "buffer.md", "pipelines.md", "preferences.md", "watching.md"}
"""Pages with code that takes seconds."""

every_document = pytest.mark.parametrize(
    "document",
    [
        pytest.param(path, marks=pytest.mark.thorough) if path.name in LONG else path
        for path in DOCUMENTS
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)


class Block(NamedTuple):
    language: str
    test: str
    """`test="..."` in the info string: run, output, compile, or empty."""
    line: int
    """First line of code, counted from 1."""
    code: str


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a document, in order."""
    fence = re.compile(
        r"^(?P<ticks>```+)(?P<language>\w*)(?P<info>.*)\n(?P<code>(?s:.*?))^(?P=ticks) *$", re.M
    )
    blocks = []
    for found in fence.finditer(text):
        mark = re.search(r'test="(\w+)"', found["info"])
        line = text.count("\n", 0, found.start("code")) + 1
        blocks.append(Block(found["language"], mark[1] if mark else "", line, found["code"]))
    return blocks


def commands_of(block: Block) -> list[list[str]]:
    """Return the commands of a shell block. In a console block, lines without a `$` are output."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    tokens = [shlex.split(part, comments=True) for line in lines for part in re.split(r"&&|\|", line)]
    setting = re.compile(r"[A-Z_0-9]+=")  # of an environment variable, before the command
    commands = [
        words[next((i for i, word in enumerate(words) if not setting.match(word)), 0) :]
        for words in tokens
    ]
    return [words for words in commands if words]


def check_command(words: list[str]) -> None:
    """Refuse make targets, scripts, options and extras that do not exist, and unknown programs."""
    name, arguments = Path(words[0]).name, words[1:]
    if name == "make":
        given = next(
            (shlex.split(word.removeprefix("ARGS=")) for word in arguments if word.startswith("ARGS=")),
            [],
        )
        for target in (word for word in arguments if "=" not in word):
            recipe = re.search(rf"^{target}:(?!=).*\n((?:\t.*\n)*)", MAKEFILE, re.M)
            assert recipe, f"the Makefile has no target {target!r}"
            if script := re.search(r"\$\(PYTHON\) (\S+\.py)", recipe[1]):
                check_options(script[1], given)
    elif name.startswith("python") and arguments[0].endswith(".py"):
        check_options(arguments[0], arguments[1:])
    elif name == "weft":
        scripts = (number for number, word in enumerate(arguments) if word.endswith(".py"))
        at = next(scripts, len(arguments))  # words after a script belong to it
        own, script = arguments[:at], arguments[at:]
        command = [word for word in own[:2] if not word.startswith("-")]
        known = help_of("-m", "weft", *command)
        if script:
            check_options(script[0], script[1:])
        for option in (word.split("=")[0] for word in own if word.startswith("--")):
            assert re.search(rf"{option}(?![\w-])", known), (
                f"weft {shlex.join(command)} --help does not know {option}"
            )
    elif name == "pip":
        named = {
            extra
            for group in re.findall(r"\[([\w,]+)\]", " ".join(arguments))
            for extra in group.split(",")
        }
        assert named <= EXTRAS, f"pyproject.toml has no extra {named - EXTRAS}"
        for lock in arguments[arguments.index("-r") + 1 :] if "-r" in arguments else ():
            assert (ROOT / lock).is_file(), f"there is no {lock}"
    else:
        assert name in COMMANDS_OF_OTHERS, f"no rule says how to check the command {shlex.join(words)!r}"


def check_options(script: str, arguments: list[str]) -> None:
    assert (ROOT / script).is_file(), f"there is no {script}"
    for option in (word.split("=")[0] for word in arguments if word.startswith("--")):
        assert re.search(rf"{option}(?![\w-])", help_of(script)), (
            f"{script} --help does not know {option}"
        )


@cache
def help_of(*program: str) -> str:
    return run(sys.executable, *program, "--help", cwd=ROOT)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_python(document: Path, blocks: list[Block], folder: Path) -> list[str]:
    """Run a document's Python blocks as one program with original line numbers; return each block's
    output."""
    end_of_block = "--- end of block ---\n"
    lines = [""] * len(document.read_text().splitlines())
    for block in blocks:
        code = block.code.splitlines()
        closing_fence = block.line - 1 + len(code)
        lines[block.line - 1 : closing_fence] = code
        lines[closing_fence] = f"print({end_of_block!r}, end='', flush=True)"
    script = folder / f"{document.stem}.py"
    script.write_text("\n".join(lines))
    (folder / "examples").symlink_to(ROOT / "examples")
    with contextlib.chdir(folder):
        return program(folder / "printed", script).finish().split(end_of_block)[:-1]


def transcript_of(block: Block, folder: Path) -> str:
    """Return a console block with the real output of its `weft` commands in this folder."""
    lines = []
    for line in block.code.splitlines():
        if line.startswith("$ weft "):
            command = shlex.split(line.removeprefix("$ weft "))
            lines += [line, run(sys.executable, "-m", "weft", *command, cwd=folder).rstrip("\n")]
    return "\n".join(lines) + "\n"


def wrong_in(document: Path, folder: Path) -> list[str]:
    """Return all errors in the document's blocks, with their lines."""
    blocks, wrong = blocks_of(document.read_text()), []
    for block in blocks:
        try:
            if block.language == "bash" and block.test == "run":
                run("bash", "-euo", "pipefail", "-c", block.code, cwd=ROOT)
            elif block.language in SHELLS:
                for words in commands_of(block):
                    check_command(words)
            else:
                assert block.language in DATA_PARSERS, (
                    f"no rule says how to check a {block.language!r} block"
                )
                DATA_PARSERS[block.language](block.code)
        except (AssertionError, SyntaxError, ValueError) as error:
            wrong.append(f"{document.name}:{block.line}: {error}")
    python = [block for block in blocks if block.language == "python" and block.test != "compile"]
    printed = dict(zip(python, run_python(document, python, folder), strict=True)) if python else {}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for before, block in pairwise(blocks):
        if block.test == "output" and not doctest.OutputChecker().check_output(
            block.code, printed[before], flags
        ):
            wrong.append(f"{document.name}:{block.line}: it printed\n{printed[before]}")
    for block in blocks:
        if block.language == "console" and block.test == "run":
            said = transcript_of(block, folder)
            if not doctest.OutputChecker().check_output(block.code, said, flags):
                wrong.append(f"{document.name}:{block.line}: it printed\n{said}")
    return wrong


@every_document
def test_every_code_block_of_the_documentation_is_true(document: Path, tmp_path: Path):
    wrong = wrong_in(document, tmp_path)
    assert not wrong, "\n".join(wrong)


TRUE = """
```bash
git clone somewhere && cd weft
CI=true make test ARGS="-x" # all of them
pip install "weft[cpu]"
```
```python
x = 6 * 7
```
```python
print(x, object())
```
```text test="output"
42 <object object at 0x...>
```
```python test="compile"
import needs_a_gpu
```
```bash test="run"
test -f Makefile
```
```bash
weft buffer table my-run --state waiting --limit 5
```
"""

FALSE = """
```bash
make dmo
```
```bash
pip install weft[gpu]
```
```bash
python examples/grpo.py --small
```
```console
$ wget somewhere
this is output
```
```python test="compile"
x = = 1
```
```json
{'a': 1}
```
```haskell
main = pure ()
```
```bash
weft buffer chek my-run
```
```bash
weft buffer check my-run --fast
```
```python
print(1)
```
```text test="output"
2
```
```console test="run"
$ weft --help
usage: waft
```
"""


LIBRARY_FILE = re.compile(
    r"`((?:algorithms|benchmarks|commands|controllers|dashboard|dataflow|examples|resharding|tests|workers)/[\w/]*(?:\.py)?)`"
)


@every_document
def test_every_file_that_the_documentation_names_exists(document: Path):
    missing = [name for name in LIBRARY_FILE.findall(document.read_text()) if not (ROOT / name).exists()]
    assert not missing, f"{document.relative_to(ROOT)} names {', '.join(missing)}"


def test_true_blocks_pass(tmp_path: Path):
    (tmp_path / "true.md").write_text(TRUE)
    assert wrong_in(tmp_path / "true.md", tmp_path) == []


def test_each_false_block_is_reported_with_its_line(tmp_path: Path):
    (tmp_path / "false.md").write_text(FALSE)
    lines = [int(message.split(":")[1]) for message in wrong_in(tmp_path / "false.md", tmp_path)]
    assert lines == [3, 6, 9, 12, 16, 19, 22, 25, 28, 34, 37]
