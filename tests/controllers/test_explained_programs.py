"""Programs printed by `weft.train(..., explain=True)` run unchanged, without the original script."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked import program
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from weft.algorithms.methods import METHODS

ROWS = [
    {"prompt": f"{a} {b}", "chosen": f" {a}", "rejected": f" {b}", "label": True}
    for a in range(4)
    for b in range(4)
]
FILES = {
    "prompts": [{"prompt": row["prompt"], "answer": row["chosen"].strip()} for row in ROWS],
    "pairs": ROWS,
    "answered": [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in ROWS],
}
DATA: dict[str, str] = {
    **dict.fromkeys(("sft", "kto", "bco"), "answered"),
    **dict.fromkeys(("dpo", "rpo", "ipo", "simpo", "cpo", "orpo"), "pairs"),
}
TRAIN = 'steps=1, prompts_per_step=4, max_tokens=4, name="run", progress=False'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, one data file of each kind, and a module with rewards."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("explained")
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 40,
    }
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1)).save_pretrained(
        folder / "model"
    )
    tokenizer = Tokenizer(WordLevel({str(token): token for token in range(40)}, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    for name, rows in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def program_of(
    folder: Path, tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch, **files: str
) -> str:
    """Run a script in a folder with the model and the data, and return its output."""
    for each in folder.iterdir():
        if not (tmp_path / each.name).exists():
            (tmp_path / each.name).symlink_to(each)
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "script.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    return program(tmp_path / "script.log", tmp_path / "script.py").finish()


def runs_as_printed(tmp_path: Path, printed: str) -> None:
    """Check that the printed program trains, in a separate process."""
    (tmp_path / "script.py").unlink()
    (tmp_path / "printed.py").write_text(printed)
    try:
        program(tmp_path / "printed.log", tmp_path / "printed.py").finish()
    except AssertionError as error:
        raise AssertionError(f"{error}\n--- the program:\n{printed}") from None
    assert (tmp_path / "runs" / "run" / "model" / "model.safetensors").exists(), printed


THOROUGH = {"sft", "dpo", "grpo", "ppo", "online_dpo", "kto", "bco"}
"""One method per graph; the other methods differ in settings only."""


def marks_of(method: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.thorough if method in THOROUGH else pytest.mark.slow]


@pytest.mark.parametrize("method", [pytest.param(m, marks=marks_of(m)) for m in METHODS])
def test_the_program_of_each_method_runs_as_printed(
    method: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rewards = "reward," if METHODS[method].samples else ""
    script = f"""
import math
import weft

GOAL = 3

def reward(response):
    return math.exp(-abs(len(response) - GOAL))

weft.train("model", "{DATA.get(method, "prompts")}.jsonl", {rewards} method="{method}", {TRAIN}, explain=True)
"""
    runs_as_printed(tmp_path, program_of(folder, tmp_path, script, monkeypatch))


SCRIPTS = {
    "imports, constants, tables that are filled, and other functions": """
from __future__ import annotations
import json, re
import os.path as paths
from collections import Counter as Count
from typing import TYPE_CHECKING
import weft
if TYPE_CHECKING:
    from pathlib import Path
TABLE: dict[str, float] = {}
TABLE["1"] = 0.5
TABLE.update({"2": 1.0})
for each in range(3, 6):
    TABLE[str(each)] = each / 10
try:
    import not_there
except ImportError:
    not_there = None
WORDS = re.compile(r"\\d+"); WEIGHT = 2
WEIGHT += 1
def fill(table):
    table["7"] = 0.7
fill(TABLE)
def value(word: str) -> float:
    return TABLE.get(word, 0.0) * WEIGHT
def measured(function):
    import functools
    @functools.wraps(function)
    def call(response, answer):
        return function(response, answer)
    return call
@measured
def reward(response: str, answer: str) -> float:
    file: Path = "x"
    assert not_there is None and "7" in TABLE and paths.join("a", "b") == "a/b" and json.dumps(1) == "1"
    return sum(value(w) for w in WORDS.findall(response)) + Count(response)["1"]
print_this = weft.train
weft.train("model", "prompts.jsonl", reward, TRAIN, explain=True)
""",
    "a lambda": """
import weft
SIZE = 4
weft.train("model", "prompts.jsonl", lambda response: len(response) / SIZE, TRAIN, explain=True)
""",
    "a curriculum": """
import weft
from weft.dataflow.prompts.curriculum import learnability
def reward(response: str) -> float:
    return len(response) / 4
POOLS = [weft.Pool(name="hard", up_to=0.5), weft.Pool(name="easy", share=2)]
curriculum = weft.Curriculum(pools=POOLS, retire=[weft.Gate(at_least=1.0)], sources="answer", follow=learnability)
weft.train("model", "prompts.jsonl", reward, TRAIN, curriculum=curriculum, explain=True)
""",
    "two lambdas on a line": """
import weft
from weft.workers.rewards.function import Reward
few = [lambda response: len(response) / 2, lambda response, answer: float(response == answer)]
few = [Reward(function=function, name=name) for function, name in zip(few, "ab")]
weft.train("model", "prompts.jsonl", few, TRAIN, explain=True)
""",
    "closures of one factory, with different values": """
import math
import weft
from weft.workers.rewards.function import Reward
def near(goal, scale=1.0):
    def reward(response):
        return math.exp(-abs(len(response) - goal) / scale)
    return reward
both = [Reward(function=near(2), name="two"), Reward(function=near(5, 3.0), name="five")]
weft.train("model", "prompts.jsonl", both, TRAIN, explain=True)
""",
    "everything in main": """
import weft
def main():
    import re
    pattern, limit = re.compile("1"), 3
    def count(text):
        return len(pattern.findall(text))
    def reward(response):
        return count(response) / limit
    weft.train("model", "prompts.jsonl", reward, TRAIN, explain=True)
if __name__ == "__main__":
    main()
""",
    "definitions under the check of the name": """
import weft
if __name__ == "__main__":
    import math
    GOAL = 3
    def reward(response):
        return math.exp(-abs(len(response) - GOAL))
    weft.train("model", "prompts.jsonl", reward, TRAIN, explain=True)
""",
    "names of the program": """
import weft
prompts = {"1": 1.0}
rollout = 2.0
def actor(text):
    return prompts.get(text, rollout)
def training(text):
    return actor(text)
def reward(response):
    return training(response)
metrics = driver = 3
weft.train("model", "prompts.jsonl", reward, TRAIN, held_out="prompts.jsonl", explain=True)
""",
    "an instance of a class of the script": """
import weft
class Near:
    def __init__(self, goal, scale=1.0):
        self.goal, self._scale = goal, scale
    def __call__(self, response):
        return -abs(len(response) - self.goal) / self._scale
weft.train("model", "prompts.jsonl", Near(3, scale=2.0), TRAIN, explain=True)
""",
    "an instance with a name, and a method": """
import weft
class Base:
    unit = 1.0
class Near(Base):
    def __init__(self, *goals):
        self.state = sum(goals)
    def score(self, response):
        return -abs(len(response) - self.state) * self.unit
near = Near(1, 2)
weft.train("model", "prompts.jsonl", near.score, TRAIN, explain=True)
""",
    "a dataclass, a static method and a partial": """
import functools
from dataclasses import dataclass, field
import weft
@dataclass
class Near:
    goal: int = 3
    weights: list[float] = field(default_factory=lambda: [1.0])
    def __call__(self, response):
        return -abs(len(response) - self.goal) * self.weights[0]
    @staticmethod
    def long(response):
        return float(len(response))
def scaled(response, scale):
    return len(response) * scale
weft.train("model", "prompts.jsonl", [Near(4), Near.long, functools.partial(scaled, scale=0.5)], TRAIN, explain=True)
""",
    "graders and a module": """
import weft
import mine
from mine import strict
from weft.algorithms.graders.text import *
from weft.algorithms.graders.math import Gsm8k
from weft.workers.rewards.function import Reward
several = [Reward(function=Gsm8k(strict=True), weight=2.0), mine.even, strict, mine.made(2)]
weft.train("model", "prompts.jsonl", several, TRAIN, explain=True)
""",
    "two modules with functions of one name": """
import weft
import mine, more
from weft.workers.rewards.function import Reward
weft.train("model", "prompts.jsonl", [mine.even, Reward(function=more.even, name="more")], TRAIN, explain=True)
""",
    "an asynchronous function, and settings that are no plain values": """
import asyncio
from pathlib import Path
import numpy
import weft
HERE = Path("model")
async def reward(response):
    await asyncio.sleep(0)
    return float(len(response))
settings = {"learning_rate": numpy.float64(1e-3), "checkpoint": weft.CheckpointConfig(every=1)}
weft.train(HERE, [Path("prompts.jsonl")], reward, TRAIN, **settings, explain=True)
""",
    "a star import and a path of its own": """
import sys
from pathlib import Path
sys.path.insert(0, str(Path.cwd() / "lib"))
from stars import *
import weft
def reward(response):
    return shine(response)
weft.train("model", "prompts.jsonl", reward, TRAIN, explain=True)
""",
}
MINE = """
import re
def even(response):
    return float(len(response) % 2 == 0)
class _Strict:
    def __call__(self, response, answer):
        return float(response == answer)
strict = _Strict()
DIGIT = re.compile("[0-9]")
def made(scale):
    def digits(response):
        return len(DIGIT.findall(response)) * scale + even(response)
    return digits
"""


@pytest.mark.thorough
@pytest.mark.parametrize("case", SCRIPTS)
def test_a_program_contains_everything_its_rewards_need(
    case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "stars.py").write_text("def shine(text):\n    return float(len(text))\n")
    script = SCRIPTS[case].replace("TRAIN", TRAIN)
    runs_as_printed(tmp_path, program_of(folder, tmp_path, script, monkeypatch, mine=MINE, more=MINE))
