"""`weft run SCRIPT` runs a script as `python SCRIPT` does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import beside
import weft


class Settings(weft.Config):
    steps: int = 3


def main(settings: Settings) -> None:
    assert sys.modules["__main__"].main is main and main.__module__ == "__main__"
    print(settings.steps, beside.NAME, sys.argv)
    if settings.steps == 4:
        sys.exit("four")
    if settings.steps == 5:
        raise RuntimeError("five")


if __name__ == "__main__":
    raise SystemExit(weft.launch(main))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "beside.py").write_text("NAME = 'found'\n")
    (tmp_path / "programs" / "train.py").write_text(SCRIPT)
    return tmp_path


def weft(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "run", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_script_gets_its_arguments_and_its_exit_code_is_passed_on(script: Path):
    done = weft(script, "programs/train.py", "--steps", "7")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "7 found ['programs/train.py', '--steps', '7']\n"
    told = weft(script, "--json", "programs/train.py", "--steps", "4")
    assert told.returncode == 1 and told.stderr.splitlines()[1:] == ["four"]
    assert json.loads(told.stdout) == {"script": "programs/train.py", "exit_code": 1}
    failed = weft(script, "programs/train.py", "--steps", "5")
    assert failed.returncode == 1 and failed.stderr.splitlines()[-1] == "RuntimeError: five"
    first = failed.stderr.splitlines()[1].split('"')[1]
    assert first == "programs/train.py", "the traceback begins where that of `python SCRIPT` does"
    assert weft(script, "programs/train.py", "--stesp", "5").returncode == 2


def test_a_missing_or_wrong_script_is_reported(script: Path):
    for words, says in (
        (["programs/trian.py"], "there is no script programs/trian.py; did you mean 'train.py'?"),
        (["programs"], "SCRIPT must be a Python file, such as train.py, not 'programs'"),
    ):
        done = weft(script, *words)
        assert done.returncode == 2 and says in done.stderr
