"""The command line `weft`: help, shell completion, exit codes."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import weft
from weft.__main__ import main
from weft.commands.command_line import TREE

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    "torch", "ray", "vllm", "transformers", "tokenizers", "datasets", "duckdb", "pyarrow", "pandas", "numpy", "matplotlib", "rich",
    "pydantic", "jinja2", "httpx", "requests", "aiohttp", "cryptography", "yaml", "jsonschema", "sympy",
}  # fmt: skip
"""Modules that help does not need. Each takes 20 ms to seconds to import."""
MAX_MODULES = 400
"""Modules that `weft --help` may load: with more, it exceeds half a second."""


def commands(tree: Mapping = TREE) -> Iterator[list[str]]:
    for name, below in tree.items():
        yield from (
            ([name, *rest] for rest in commands(below)) if isinstance(below, Mapping) else ([name],)
        )


def test_help_of_every_command_and_the_doctor_load_nothing_heavy():
    tried = [["--help"], [], *([*words, "--help"] for words in commands())]
    code = (
        "import sys\nfrom weft.__main__ import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit: assert len(sys.modules) <= {MAX_MODULES}, len(sys.modules)\n"
        f"for words in {tried}:\n"
        "    try: main(words)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert main(['doctor']) in (0, 1)\n"
        "print(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1].replace("'", '"')))
    assert not loaded & HEAVY and "Ray's token" in done.stdout
    for words in commands():
        assert f"usage: weft {' '.join(words)} [-h]" in done.stdout


def test_help_lists_every_command_with_a_description(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and all(f"• {name} " in said for name in TREE)


def test_the_shell_completes_commands_and_options(capsys: pytest.CaptureFixture[str]):
    assert main(["completion", "bash"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("archive", "timeline", "--state", "--json"))
    assert subprocess.run(["bash", "-n"], input=said, text=True).returncode == 0


def test_a_wrong_command_or_argument_ends_with_two(capsys: pytest.CaptureFixture[str]):
    assert main(["bufer"]) == 2
    assert "error: weft has no command 'bufer'; did you mean 'buffer'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["buffer", "why", "tiny", "first"])
    assert end.value.code == 2 and "GROUP" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["watch", "x", "--last", "-1"],
        ["buffer", "table", "x", "--limit", "-5"],
        ["stop", "x", "--timeout", "-0.5"],
    ],
)
def test_a_negative_number_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    assert f"{words[-2]} {words[-1]}: it must be 0 or more" in capsys.readouterr().err


def test_help_shows_each_default_once(capsys: pytest.CaptureFixture[str]):
    for words in commands():
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        said = capsys.readouterr().out
        assert "None" not in said and "(default: False)" not in said, words


def test_the_module_and_the_script_are_the_same_command(runs: Path):
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "weft", "buffer", "check", "tinny"]
    done = subprocess.run(command, cwd=runs.parent, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "did you mean 'tiny'" in done.stderr
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"weft": f"{main.__module__}:{main.__qualname__}"}


def test_an_unexpected_error_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def damaged(folder: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("weft.commands.runs.run_names", damaged)
    assert main(["runs", ".", "--json"]) == 1
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1 and said.err.startswith(
        "unexpected error: RecursionError: maximum"
    )
    assert json.loads(said.out) == {
        "error": said.err.strip().removeprefix("unexpected error: "),
        "exit_code": 1,
    }


def test_a_number_larger_than_any_table_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "table", "some-run", "--limit", "9" * 23]) == 2
    assert "at most 9223372036854775807" in capsys.readouterr().err


def test_an_export_without_a_name_and_a_host_that_no_name_can_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for words, says in (
        (["--export", ""], "name a new file"),
        (["--host", "a" * 300], "cannot be listened on"),
    ):
        assert main(["dashboard", str(tmp_path), *words]) == 2
        assert says in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"weft {weft.__version__}\n"
