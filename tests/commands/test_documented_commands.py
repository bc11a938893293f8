"""docs/commands.md names every command, and each of its examples runs."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from test_command_line import ROOT, commands

from weft.__main__ import main
from weft.commands.command_line import _ParsedCommand, parse

ROWS = re.findall(
    r"^\| `(weft [\w ]+)` \| .* \| `(weft .*)` \|$", (ROOT / "docs" / "commands.md").read_text(), re.M
)
TRIED_ELSEWHERE = {
    "weft dashboard",
    "weft eval",
    "weft export",
    "weft merge",
    "weft run",
    "weft plan",
    "weft submit",
}
"""These take minutes, or need a model, a process or a cluster; other files test them."""
HERE = [example for command, example in ROWS if command not in TRIED_ELSEWHERE and "jobs" not in command]


def test_every_command_has_a_line():
    assert {command for command, _ in ROWS} == {f"weft {' '.join(words)}" for words in commands()}


@pytest.mark.parametrize("example", [example for _, example in ROWS])
def test_the_example_of_a_command_has_its_arguments(example: str):
    assert isinstance(parse(shlex.split(example)[1:]), _ParsedCommand)


@pytest.mark.parametrize("example", HERE)
def test_the_example_of_a_command_runs(
    example: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name, run in (("my-run", "two"), ("your-run", "one")):
        shutil.copytree(finished / run, tmp_path / "runs" / name)
    for name, question in (("train", "2 + 2?"), ("test", "3 + 3?")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": question}) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(example)[1:]) == 0
    assert capsys.readouterr().out
