"""`weft submit` and `weft jobs`: arguments, checks before contact with a cluster, and exit
codes."""

import json
from pathlib import Path

import pytest

from weft.__main__ import main
from weft.commands.command_line import parse
from weft.commands.jobs import ended, submit
from weft.controllers.backends.jobs import Job


def test_words_after_the_script_belong_to_it():
    command = parse(
        [
            "submit",
            "--name",
            "a",
            "--env",
            "A=1",
            "B=x=y",
            "train.py",
            "--name",
            "b",
            "--",
            "--json",
            "other.py",
        ]
    )
    assert command.command is submit and not command.as_json
    given = command.arguments
    assert (given["name"], given["env"], given["script"]) == ("a", ("A=1", "B=x=y"), "train.py")
    assert given["arguments"] == ("--name", "b", "--", "--json", "other.py")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian.py"], "script 'trian.py': there is no such file in"),
        (["--env", "A", "train.py"], "--env A: use the form NAME=VALUE"),
        (["--address", "head:6379", "train.py"], "did you mean 'http://head:8265'"),
        (["--working-dir", "nothing", "train.py"], "there is no such file in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_exit_with_two_and_a_reason(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["submit", "--json", *words]) == 2
    said = json.loads(capsys.readouterr().out)
    assert says in said["error"] and said["exit_code"] == 2


def test_a_job_that_failed_ends_with_one_and_one_that_was_stopped_with_zero():
    def job(status: str) -> Job:
        return Job("a-1", status, "exit code 3", 0.0, "python a.py", "~/weft/a", 600.0)

    assert [ended(job(status)).exit_code for status in ("SUCCEEDED", "STOPPED", "FAILED")] == [0, 0, 1]
    failed = ended(job("FAILED"))
    assert (
        failed.text == "job a-1 failed; its runs are in ~/weft/a on the head node"
        and failed.notes == ["exit code 3"]
    )
