"""What the user got wrong ends with exit code 2 and one message, in under two seconds, before torch or Ray is loaded."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("bad_input.py")

MISTAKES = {
    "setting": "error: ToyConfig has no setting 'fail_onn' (value 3); did you mean 'fail_on'?",
    "column": "error: node 'reward.score' reads column 'answer', which no node writes; did you mean 'answr'?",
    "signature": "error: RewardConfig.function: Reward: reward function unnamed(sentence: str) -> float takes neither 'response' nor "
    "'response_ids'",
    "tokenizer": "/nowhere': no such folder",
    "cpus": "error: the placement asks for 5000 CPUs (big: 5000), but this machine has ",
    "argument": "error: Driver takes no argument 'nme' (value 'first'); did you mean 'name'?",
    "address": "error: RAY_ADDRESS='http://ray-head:8265' is the address of a dashboard or a job server",
    "nan": "error: worker reward[0], node 'reward.score' failed 3 times at sample ",
    "lost": "best is declared with shape=Shape.MAP: it returns every row that it was given; it lost 3 of 4 (samples ",
}


COMMAND_LINES = {
    "--learning-rat 1": "--learning-rate",
    "--learning-rate fast": "learning-rate",
    "--mode fsat": "'fast', 'slow'",
}

Told = dict[str, list[Any]]
"""Mistake, or command line -> exit code, what was said to the user, and which heavy modules were imported by then."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, for the reward worker."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bad_input")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    """All of them in one process that begins with nothing imported."""
    tried = {
        **{mistake: ["--mistake", mistake] for mistake in [*MISTAKES, "none"]},
        **{c: c.split() for c in COMMAND_LINES},
    }
    lines = [["--root", str(folder), *arguments] for arguments in tried.values()]
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(lines), capture_output=True, text=True, timeout=120
    )
    return dict(zip(tried, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_exit_code_2_and_one_message(told: Told, mistake: str):
    code, said, imported = told[mistake]
    assert code == 2, said
    assert MISTAKES[mistake] in said and said.count("error:") == 1
    assert "Traceback" not in said and len(said.splitlines()) == 1
    assert imported == [], "known without them, so told at once"


def test_a_script_ends_with_this_code_and_message(folder: Path):
    command = [sys.executable, str(SCRIPT), "--root", str(folder), "--mistake", "setting"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (2, MISTAKES["setting"])


def test_a_nan_reward_names_function_and_sample(told: Told):
    _, said, _ = told["nan"]
    assert "reward function nan returned nan; a reward is a finite number" in said
    assert re.search(r" at sample \d+ \(row \d+ of source 'prompts'; prompt '", said), (
        "the sample at fault, and its prompt"
    )


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_mistake_on_the_command_line_is_told_too(told: Told, line: str):
    code, said, imported = told[line]
    said = " ".join(said.replace("│", " ").split())  # it is drawn in a box
    assert code == 2 and COMMAND_LINES[line] in said and imported == [] and "Traceback" not in said


def test_the_same_script_without_a_mistake_runs(told: Told):
    assert told["none"] == [0, "", []]
