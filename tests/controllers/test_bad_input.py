"""What the user got wrong ends with exit code 2 and one message, in under two seconds, before torch or Ray is loaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bad_input.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer, for the reward worker."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def launch(folder: Path | str, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
    """Exit code, what was said to the user, and which heavy modules were imported."""
    command = [sys.executable, str(SCRIPT), "--root", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    assert last.startswith("imported:"), done
    return done.returncode, done.stderr.strip(), last.split()[1:]


MISTAKES = {
    "setting": "error: ToyConfig has no setting 'fail_onn' (value 3); did you mean 'fail_on'?",
    "column": "error: node 'reward.score' reads column 'answer', which no node writes; did you mean 'answr'?",
    "signature": "error: RewardConfig.function: reward function unnamed(completion: str) -> float takes neither 'response' nor "
    "'response_ids'",
    "tokenizer": "/nowhere' does not exist",
    "cpus": "error: the placement asks for 5000 CPUs (big: 5000), but this machine has ",
    "argument": "error: Driver takes no argument 'nme' (value 'first'); did you mean 'name'?",
    "address": "error: RAY_ADDRESS='http://ray-head:8265' is the address of a dashboard or a job server",
    "nan": "error: worker reward[0], node 'reward.score' failed 3 times at sample ",
    "lost": "best is declared with shape=Shape.MAP: it returns every row that it was given; it lost 3 of 4 (samples ",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_exit_code_2_and_one_message(folder: Path, mistake: str):
    environment = {"RAY_ADDRESS": "http://ray-head:8265"} if mistake == "address" else {}
    code, said, imported = launch(folder, "--mistake", mistake, **environment)
    assert code == 2, said
    assert MISTAKES[mistake] in said and said.count("error:") == 1
    assert "Traceback" not in said and len(said.splitlines()) == 1
    assert imported == [], "known without them, so told at once"


def test_a_nan_reward_names_function_and_sample(folder: Path):
    _, said, _ = launch(folder, "--mistake", "nan")
    assert "reward function nan returned nan; a reward is a finite number" in said
    assert re.search(r" at sample \d+ \(row \d+ of source 'prompts'; prompt '", said), (
        "the sample at fault, and its prompt"
    )


def test_a_mistake_on_the_command_line_is_told_too(folder: Path):
    for arguments, message in (
        (("--learning-rat", "1"), "--learning-rate"),
        (("--learning-rate", "fast"), "learning-rate"),
        (("--mode", "fsat"), "'fast', 'slow'"),
    ):
        code, said, imported = launch(folder, *arguments)
        said = " ".join(said.replace("│", " ").split())  # it is drawn in a box
        assert code == 2 and message in said and imported == [] and "Traceback" not in said


def test_the_same_script_without_a_mistake_runs(folder: Path):
    code, said, imported = launch(folder)
    assert (code, said, imported) == (0, "", [])
