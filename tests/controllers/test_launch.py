"""How commands and scripts end: with a message and a fix, and no traceback for a `UserError`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.controllers.launch import launch
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.placement_file import with_chosen, write_placement
from weft.dataflow.config import Config
from weft.dataflow.errors import LeaseError, StalledError, UserError, WeftError


class Settings(Config):
    pass


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("steps=0: at least 1"), 2, ["error: steps=0: at least 1"]),
        (
            StalledError("rows are in flight"),
            1,
            ["StalledError: rows are in flight", StalledError.advice],
        ),
        (LeaseError("lease 2 was released"), 1, ["LeaseError: lease 2 was released", LeaseError.advice]),
    ],
)
def test_an_exception_of_ours_ends_a_script_with_its_message_and_advice(
    error: WeftError, code: int, said: list[str], capsys: pytest.CaptureFixture[str]
):
    def main(settings: Settings) -> None:
        raise error

    assert launch(main, []) == code
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--placement"], "--placement needs a file, such as --placement plan.json"),
        (["--placement", "a", "--placement=b"], "--placement is given 2 times (a, b); give one file"),
        (["--placement", "plan.jsn"], "--placement plan.jsn: there is no such file"),
    ],
)
def test_mistakes_in_the_placement_of_a_script_are_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    def main(settings: Settings) -> None:
        raise AssertionError("it must not run")

    assert launch(main, words) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


class WithPlacement(Config):
    placement: str = "apart"


def test_a_placement_file_goes_to_the_driver_and_other_values_to_the_setting(tmp_path: Path):
    file, seen = tmp_path / "plan.json", list[object]()
    actor = Place(ResourcePool("train", cpus=2), 2)
    # Another driver of the script may have the third group.
    write_placement(file, {"actor": actor, "critic": actor}, {})

    def main(settings: WithPlacement) -> None:
        seen.append(
            (
                settings.placement,
                with_chosen({"reward": Place(ResourcePool("one"))}, {"actor", "reward"}),
            )
        )

    assert launch(main, ["--placement", str(file)]) == 0
    assert launch(main, ["--placement", "colocated"]) == 0
    reward = {"reward": Place(ResourcePool("one"))}
    assert seen == [
        ("apart", {**reward, "actor": actor}),
        ("colocated", reward),
    ]


SCRIPT = """
import atexit, sys
import weft
atexit.register(print, "cleaned up")
try:
    weft.Synchronous(steps=0)
except weft.UserError:
    print("caught")
{hook}
try:
    {last}
finally:
    print("left")
"""
SETTING = "weft.Synchronous(steps=0)"
LINE = "error: Synchronous.steps: input should be greater than or equal to 1, not 0"


def ended(last: str, *options: str, hook: str = "", **environment: str) -> tuple[int, list[str]]:
    """Run a script, and return its exit code and the lines of its stderr."""
    command = [sys.executable, *options, "-c", SCRIPT.format(last=last, hook=hook)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.stdout.splitlines() == ["caught", "left", "cleaned up"]
    return done.returncode, done.stderr.splitlines()


def test_a_script_that_a_mistake_ends_shows_one_line_and_exits_with_two():
    assert ended(SETTING) == (2, [LINE])


def test_a_secret_in_the_message_is_hidden():
    code, said = ended("raise weft.UserError('no such path: s3cr3t-value')", MY_API_KEY="s3cr3t-value")
    assert (code, said) == (2, ["error: no such path: [value of MY_API_KEY]"])


@pytest.mark.parametrize(
    ("last", "options", "final"),
    [
        ("raise ValueError('of the script')", (), "ValueError: of the script"),
        (SETTING, ("-X", "dev"), f"weft.dataflow.errors.SettingError: {LINE.removeprefix('error: ')}"),
    ],
)
def test_other_errors_and_the_development_mode_show_the_traceback(
    last: str, options: tuple[str, ...], final: str
):
    code, said = ended(last, *options)
    assert code == 1 and said[0].startswith("Traceback") and said[-1] == final


def test_a_hook_of_the_script_decides_by_itself():
    assert ended(SETTING, hook="sys.excepthook = lambda *error: print('mine', file=sys.stderr)") == (
        1,
        ["mine"],
    )


def test_an_interactive_session_continues_after_a_mistake():
    lines = f"import weft\n{SETTING}\nprint('goes', 'on')\n"
    done = subprocess.run([sys.executable, "-i"], input=lines, capture_output=True, text=True)
    assert done.returncode == 0 and "goes on" in done.stdout and "Traceback" in done.stderr
