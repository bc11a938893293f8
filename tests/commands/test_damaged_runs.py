"""Every command on a damaged run explains the damage: no traceback, exit code 0, 1 or 2."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.__main__ import main


def empty(run: Path) -> None:
    for inside in run.iterdir():
        shutil.rmtree(inside) if inside.is_dir() else inside.unlink()


def torn(run: Path) -> None:
    """Cut every file in half."""
    for file in run.rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)


def garbled(run: Path) -> None:
    for file in run.rglob("*"):
        if file.is_file():
            file.write_bytes(b"\xff\x00{not what it was" * 9)


def swapped(run: Path) -> None:
    """Replace files by folders, and folders by files."""
    for inside in list(run.iterdir()):
        if inside.is_dir():
            shutil.rmtree(inside)
            inside.write_text("a file")
        else:
            inside.unlink()
            inside.mkdir()


def of_another_shape(run: Path) -> None:
    """Write valid JSON without the expected content."""
    (run / "config.json").write_text(
        json.dumps({"schedule": [1], "graphs": 3, "versions": None, "groups": "many"})
    )
    (run / "alerts.jsonl").write_text('[1]\n{"step": 3}\n"text"\n')


COMMANDS = {
    "runs": ["runs", "."],
    "watch": ["watch", "./run"],
    "stop": ["stop", "./run"],
    "samples": ["samples", "./run"],
    "samples sql": ["samples", "./run", "--sql", "select count(*) from samples"],
    "diff": ["diff", "./run", "./sound"],
    "export": ["export", "./run", "./model"],
    "timeline": ["timeline", "./run"],
    "explain": ["explain", "./run"],
    "buffer check": ["buffer", "check", "./run"],
    "buffer why": ["buffer", "why", "./run", "1"],
    "buffer table": ["buffer", "table", "./run"],
    "buffer sql": ["buffer", "sql", "./run", "select count(*) from rows"],
    "buffer archive": ["buffer", "archive", "./run"],
}


@pytest.mark.parametrize("damage", [empty, torn, garbled, swapped, of_another_shape])
def test_no_command_ends_with_a_traceback(
    damage: Callable[[Path], None],
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "two", tmp_path / "run")
    shutil.copytree(finished / "one", tmp_path / "sound")
    damage(tmp_path / "run")
    for name, words in COMMANDS.items():
        code = main(words)
        said = capsys.readouterr()
        assert code in (0, 1, 2), name
        assert (said.out or said.err) and "Traceback" not in said.err, name
        assert (
            code == 0
            or said.err.startswith(("error: ", "RecoveryError: ", "FormatError: "))
            or "NOT OK" in said.out
        ), name


REPLACED = (
    "buffer/ledger.log",
    "config.json",
    "graph.json",
    "metrics.parquet",
    "alerts.jsonl",
    "live.json",
    "checkpoints/*/manifest.json",
    "checkpoints/*/run.json",
    "lock/epoch_*",
)


@pytest.mark.parametrize("how", ["a named pipe", "deep"])
@pytest.mark.parametrize(
    "name", [REPLACED[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in REPLACED[1:])]
)
def test_no_command_hangs_or_fails_at_a_pipe_or_at_deep_json(
    name: str,
    how: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def replace(run: Path) -> None:
        for path in list(run.glob(name)) or [run / name]:
            path.unlink(missing_ok=True)
            path.parent.mkdir(exist_ok=True)
            if how == "deep":
                path.write_text("[" * 100_000)
            else:
                os.mkfifo(path)

    test_no_command_ends_with_a_traceback(replace, finished, tmp_path, monkeypatch, capsys)


READERS = {
    "samples": ["samples", "./run"],
    "samples sql": ["samples", "./run", "--sql", "select count(*) from samples"],
    "table": ["buffer", "table", "./run"],
    "sql": ["buffer", "sql", "./run", "select count(*) from rows"],
    "sql of samples": ["buffer", "sql", "./run", "select count(*) from samples"],
    "check": ["buffer", "check", "./run"],
}


@pytest.mark.parametrize(
    "harm", ["a line twice", "a line missing", "two lines swapped", "a byte changed"]
)
def test_every_reader_of_a_damaged_log_reports_lost_records(
    harm: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "two", tmp_path / "run")
    log = tmp_path / "run" / "buffer" / "ledger.log"
    lines = log.read_bytes().splitlines(keepends=True)
    at = len(lines) // 3
    if harm == "a line twice":
        lines.insert(at, lines[at])
    elif harm == "a line missing":
        del lines[at]
    elif harm == "two lines swapped":
        lines[at : at + 2] = lines[at + 1], lines[at]
    else:
        lines[at] = lines[at][:12] + b"!" + lines[at][13:]
    log.write_bytes(b"".join(lines))
    for name, words in READERS.items():
        assert main(words) == 1, name
        said = capsys.readouterr()
        assert "complete lines from there on are not read" in said.out + said.err, (name, said)
    assert main(["buffer", "why", "./run", "0"]) == 0
    assert "damaged: " in capsys.readouterr().out
    assert main(["buffer", "archive", "./run"]) == 2
    assert "the archive would be incomplete: damaged: " in capsys.readouterr().err
