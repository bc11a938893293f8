"""User mistakes end with exit code 2 and name the place, before torch or Ray is imported."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mistakes import IN_THE_SCRIPT, MISTAKES

SCRIPT = Path(__file__).with_name("bad_input.py")

OF_SAMPLES = {
    "nan": "error: worker reward[0], node 'reward.score' failed 3 times at sample ",
    "lost": "best is declared with shape=Shape.MAP: it must return every row that it was given, but lost 3 of 4 (samples ",
}
"""Mistakes that only show while the run works."""


class Told(NamedTuple):
    code: int
    said: str
    imported: list[str]
    """Heavy modules imported until the message."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer for the reward worker, and the settings files."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bad_input")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(
        str(folder / "tokenizer.json")
    )
    for wrong in MISTAKES.values():
        wrong.write_files(folder)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Told]:
    """Try all mistakes in one process that starts with no heavy imports."""
    tried = {name: list(wrong.words) for name, wrong in MISTAKES.items()}
    tried |= {name: ["--mistake", name] for name in (*OF_SAMPLES, "none")}
    lines = [["--root", str(folder), *words] for words in tried.values()]
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(
        command, input=json.dumps(lines), capture_output=True, text=True, timeout=120, cwd=folder
    )
    return {
        name: Told(*json.loads(line)) for name, line in zip(tried, done.stdout.splitlines(), strict=True)
    }


def test_there_are_forty_of_them_at_least():
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_exit_code_2_and_its_place(told: dict[str, Told], mistake: str):
    code, said, imported = told[mistake]
    words = " ".join(said.replace("│", " ").split())  # tyro draws a frame around its message
    assert code == 2, said
    assert all(part in words for part in MISTAKES[mistake].says), said
    assert "Traceback" not in said and imported == [], "known without them, so told at once"


@pytest.mark.parametrize("mistake", [*IN_THE_SCRIPT, *OF_SAMPLES])
def test_a_mistake_in_the_script_is_one_message(told: dict[str, Told], mistake: str):
    code, said, *_ = told[mistake]
    assert code == 2 and said.count("error:") == 1 and "Traceback" not in said
    assert len(said.splitlines()) == 1 and OF_SAMPLES.get(mistake, "") in said


def test_a_script_ends_with_this_code_and_message(folder: Path):
    command = [sys.executable, str(SCRIPT), "--root", str(folder), "--mistake", "setting"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (2, IN_THE_SCRIPT["setting"])


def test_a_nan_reward_names_function_and_sample(told: dict[str, Told]):
    said = told["nan"].said
    assert "reward function nan returned nan; a reward must be a finite number" in said
    assert re.search(r" at sample \d+ \(row \d+ of source 'prompts'; prompt '", said), (
        "the sample at fault, and its prompt"
    )


def test_the_same_script_without_a_mistake_runs(told: dict[str, Any]):
    assert told["none"][:3] == (0, "", [])
