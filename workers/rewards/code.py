"""Code: runs the code of a response against tests, in a sandbox."""

from __future__ import annotations

import ast
import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...algorithms.graders.extraction import without_reasoning
from ...algorithms.graders.grader import Grader, from_json
from ...dataflow.errors import NoSandboxError, SampleError
from ..sandbox import Limits, Result, Sandbox

_PROGRAM = Path(__file__).with_name("code_program.py")
_PYTHON = {"", "python", "python3", "py"}
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)")


class Code(Grader):
    """1 if the Python code of a response passes all tests, otherwise 0.

    The code is the last fenced block of the response that names Python or no language. Each row has
    its tests in one of these layouts:

    | layout | columns |
    |---|---|
    | programs | `tests`: a list of `{"input": ..., "output": ...}`, or `{"inputs": [...], "outputs": [...]}` |
    | pytest | `tests`: text of a test file, or `{"test_name.py": text, ...}`; the code is the module `solution` |
    | HumanEval | `test`, with a function `check(candidate)`, and `entry_point`; a response may also continue `prompt` |
    | MBPP | `test_list`, and optionally `test_setup_code` or `test_imports` |

    Instead of these columns, `answer` may hold a value of `tests`, or an object with the columns, as JSON.

    A crash, an exception and a reached limit fail a test. If the sandbox itself fails, the call
    raises, so the sample is not scored.
    """

    share: bool = False
    """Return the share of passed tests instead of 1 or 0. Set it if few responses pass all tests."""
    limits: Limits = Limits()
    """Limits of each program. All tests of a function or of pytest files are one program. Set it
    to require fast code, or to let code use more."""

    @property
    def is_verdict(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.share

    def prepare(self) -> None:
        """Check that the sandbox works. Raises a NoSandboxError if it does not."""
        if Code(limits=self.limits)("print(input())", tests=[{"input": "1", "output": "1"}]) != 1:
            raise NoSandboxError(
                "the sandbox cannot run Python: `python -c 'print(input())'` printed nothing"
            )

    def __call__(
        self,
        response: str,
        prompt: str | None = None,
        tests: Any = None,
        test: str | None = None,
        entry_point: str | None = None,
        test_list: Any = None,
        test_setup_code: str | None = None,
        test_imports: Any = None,
        answer: str | None = None,
    ) -> float:
        """Grade a response.

        Raises:
            SampleError: the row has no tests, or tests of another layout.
            NoSandboxError: no sandbox works on this machine.
            SandboxError: something outside ended the sandbox.
        """
        row = {"tests": tests, "test": test, "entry_point": entry_point, "test_list": test_list}
        row |= {"test_setup_code": test_setup_code, "test_imports": test_imports}
        found = _tests_of(row if any(v is not None for v in row.values()) else from_json(answer))
        code = last_code(response)
        if found.entry_point and prompt:
            start = _beginning(prompt)
            if re.search(rf"\bdef {re.escape(found.entry_point)}\b", code):
                found = replace(found, setup=start)  # the code may use its imports and functions
            else:
                code = f"{start}\n{code}"
        passed, number = self._run(code, found)
        return passed / number if self.share else float(passed == number)

    def _run(self, code: str, tests: _Tests) -> tuple[int, int]:
        """Return the numbers of passed tests and of all tests."""
        with Sandbox(self.limits) as sandbox:
            if tests.layout != "programs":
                return _run_tests(sandbox, code, tests)
            passed = 0
            files = {"main.py": _bytes(code)}
            for given, wanted in tests.programs:
                result = sandbox.run(["python", "main.py"], files=files, stdin=_bytes(given))
                files = {}  # so that a program cannot make writing the next one fail
                if result.succeeded and _is_same(result.stdout.decode(errors="replace"), wanted):
                    passed += 1
                elif not self.share:
                    break
            return passed, len(tests.programs)


@dataclass(frozen=True)
class _Tests:
    layout: str
    """"programs", "pytest" or "statements"."""
    programs: Sequence[tuple[str, str]] = ()
    """Standard input and expected output of each program."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    statements: Sequence[str] = ()
    setup: str = ""
    entry_point: str = ""


def last_code(response: str) -> str:
    """Return the code of a response: its last fenced block that names Python or no language, its
    last block of any language, or the whole text if it has none. Skips the reasoning.

    >>> last_code("First:\\n```python\\nx = 1\\n```\\nThen:\\n```py\\nx = 2\\n```\\nThe output:\\n```text\\n2\\n```")
    'x = 2'
    """
    text = without_reasoning(response)
    blocks: list[tuple[str, str]] = []
    fence, language, lines = "", "", list[str]()
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if not fence:
            if mark:
                fence, language, lines = mark[1], mark[2].lower(), []
        elif mark and mark[1].startswith(fence) and not line[mark.end() :].strip() and not mark[2]:
            blocks.append((language, "\n".join(lines)))
            fence = ""
        else:
            lines.append(line)
    if fence and not blocks:  # a response may end without closing its only block
        blocks.append((language, "\n".join(lines)))
    python = [code for name, code in blocks if name in _PYTHON]
    return python[-1] if python else blocks[-1][1] if blocks else text


def _beginning(prompt: str) -> str:
    """Return the code at the beginning of a prompt of HumanEval: imports, and a function with a
    docstring, without the text that a chat template adds."""
    lines = last_code(prompt).splitlines()
    starts = ("from ", "import ", "def ", "class ", "@")
    first = next((k for k, line in enumerate(lines) if line.startswith(starts)), 0)
    for end in range(len(lines), first, -1):
        text = "\n".join(lines[first:end])
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        return text
    return ""


# Tests of a row


def _tests_of(row: Any) -> _Tests:
    """Return the tests of a row or of its answer, in whichever layout they have."""
    if not isinstance(row, Mapping):
        return _read(row)
    if row.get("test_list") is not None:
        statements, imports = from_json(row["test_list"]), from_json(row.get("test_imports"))
        if not statements or not isinstance(statements, list | tuple | str):
            raise SampleError(f"'test_list' must be a list of asserts, not {_short(statements)}")
        setup = [row.get("test_setup_code") or "", *_texts(imports or [])]
        return _Tests("statements", statements=_texts(statements), setup="\n".join(setup))
    if row.get("test") is not None:
        if not (entry_point := row.get("entry_point")):
            raise SampleError("the row has a 'test' as in HumanEval, but no 'entry_point'")
        statement = f"{row['test']}\n\ncheck({entry_point})\n"
        return _Tests("statements", statements=[statement], entry_point=entry_point)
    if row.get("tests") is not None:
        return _read(row["tests"])
    return _read(row)


def _read(value: Any) -> _Tests:
    """Return tests from the value of a column `tests`."""
    parsed = from_json(value)
    if isinstance(parsed, str) and re.search(r"^\s*(async )?def test", parsed, re.MULTILINE):
        return _Tests("pytest", files={"test_solution.py": parsed})
    if isinstance(parsed, Mapping):
        named = {"inputs": "outputs", "input": "output"}
        key = next((name for name in named if parsed.get(name) is not None), None)
        if parsed.get("fn_name"):
            raise SampleError(
                f"tests call the function {parsed['fn_name']!r}; write them as asserts in 'test_list'"
            )
        if key is not None:
            given, wanted = parsed[key], parsed.get(named[key])
            given, wanted = (
                list(v) if isinstance(v, list | tuple) else [v] * (v is not None)
                for v in (given, wanted)
            )
            if not given or len(given) != len(wanted):
                raise SampleError(f"tests need as many outputs as inputs: {_short(parsed)}")
            pairs = zip(_texts(given), _texts(wanted), strict=True)
            return _Tests("programs", programs=list(pairs))
        if parsed and all(name.endswith(".py") for name in parsed):
            files = {name: text for name, text in parsed.items() if text is not None}
            if odd := [name for name, text in files.items() if not isinstance(text, str)]:
                raise SampleError(
                    f"the file {odd[0]!r} in tests must be a text, not {_short(files[odd[0]])}"
                )
            return _Tests("pytest", files=files)
    if isinstance(parsed, Sequence) and not isinstance(parsed, str) and parsed:
        if all(isinstance(each, str) for each in parsed):
            return _Tests("statements", statements=list(parsed))
        if all(isinstance(each, Mapping) and {"input", "output"} <= {*each} for each in parsed):
            each = [(test["input"], test["output"]) for test in parsed]
            return _Tests("programs", programs=[tuple(_texts(pair)) for pair in each])  # pyright: ignore[reportArgumentType]
    raise SampleError(
        f"no tests in {_short(value)}; Code reads inputs with outputs, pytest files, HumanEval's 'test' with "
        "'entry_point', and MBPP's 'test_list' (docs/rewards.md)"
    )


def _texts(values: Any) -> list[str]:
    """Return texts; lists of lines are joined, and other values written as JSON."""
    if isinstance(values, str):
        values = [values]
    return [
        v if isinstance(v, str) else "\n".join(map(str, v)) if isinstance(v, list) else json.dumps(v)
        for v in values
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _is_same(printed: str, wanted: str) -> bool:
    """Return whether two outputs agree, apart from white space at the ends of lines and of the text."""
    one, other = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, wanted))
    return one == other


# Tests that run in one program


@functools.cache
def _program() -> bytes:
    return _PROGRAM.read_bytes()


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def _run_tests(sandbox: Sandbox, code: str, tests: _Tests) -> tuple[int, int]:
    token = secrets.token_hex(16)
    task = {"token": token, "layout": tests.layout, "files": [*tests.files]}
    task |= {"code": code, "setup": tests.setup, "tests": list(tests.statements)}
    files = {"solution.py": _bytes(code)} if tests.files else {}
    files |= {name: _bytes(text) for name, text in tests.files.items()}
    files["weft_tests.py"] = _program()
    result = sandbox.run(["python", "-I", "weft_tests.py"], files=files, stdin=json.dumps(task).encode())
    return _verdict(result, token) or (0, max(1, len(tests.statements)))


def _verdict(result: Result, token: str) -> tuple[int, int] | None:
    """Return the last verdict of the program; None if it ended before its first test did."""
    lines = [line.split() for line in result.stdout.decode(errors="replace").splitlines()]
    found = [(int(words[1]), int(words[2])) for words in lines if len(words) == 3 and words[0] == token]
    if not found:
        return None
    if found[-1] == (-1, -1):
        raise NoSandboxError("tests of pytest need pytest in Weft's environment: `pip install pytest`")
    return found[-1]
