"""Examples for real models, with a tiny Qwen3 in one process. Their benchmark runs them under
Ray."""

import json
from pathlib import Path

import forked
import pyarrow.parquet as pq
import pytest
from small import EXAMPLES, summary

from examples.tiny_qwen3 import DEMONSTRATIONS, PROBLEMS, word_problems


def tiny(example: str, root: Path, name: str, *arguments: str) -> str:
    arguments = (
        "--tiny",
        "--backend",
        "local",
        "--root",
        str(root),
        "--name",
        name,
        "--steps",
        "1",
        *arguments,
    )
    return forked.program(root / f"{example}.log", EXAMPLES / example, *arguments).finish()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where the first example leaves its tiny model for the others."""
    return tmp_path_factory.mktemp("tiny")


@pytest.mark.thorough
def test_grpo_learns_from_problems_of_a_file(tmp_path: Path):
    rows = [
        {"question": f"What is {a} + {a}?", "answer": f"{a} + {a} = {2 * a}\n#### {2 * a}"}
        for a in range(100)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = tiny("grpo_gsm8k.py", tmp_path, "tiny", "--data", str(tmp_path / "train.jsonl"))
    assert summary(said)["steps"] == 1
    assert "what follows ####, in 100 of 100 rows" in said and "template  applied" in said, (
        "what was understood"
    )
    rows = pq.read_table(tmp_path / "tiny" / "metrics.parquet").to_pylist()
    assert rows[1]["actor/grad_norm"] > 0 and rows[1]["actor/mean_logprob_gap"] < 1e-5
    assert 0 < rows[1]["reward/boxed"] <= 1, "the warm start has taught the form of an answer"
    assert (tmp_path / "tiny" / "model" / "model.safetensors").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("example", ["ppo_gsm8k.py", "dpo_pairs.py"])
def test_ppo_and_dpo_take_a_model_and_data_in_the_same_way(made: Path, example: str):
    name = Path(example).stem
    assert summary(tiny(example, made, name, "--prompts-per-step", "6"))["steps"] == 1
    rows = pq.read_table(made / name / "metrics.parquet").to_pylist()
    assert rows[1]["samples"] == 6 * (2 if example == "dpo_pairs.py" else 1)
    assert rows[1]["actor/loss"] is not None and (made / name / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("example", ["grpo_gsm8k.py", "ppo_gsm8k.py", "dpo_pairs.py"])
def test_a_model_and_data_are_asked_for(tmp_path: Path, example: str):
    program = forked.program(tmp_path / "log", EXAMPLES / example, "--root", str(tmp_path))
    with pytest.raises(AssertionError, match="give --model PATH"):
        program.finish()


@pytest.mark.slow
@pytest.mark.parametrize("example", ["grpo_gsm8k.py", "ppo_gsm8k.py", "dpo_pairs.py"])
def test_a_trial_learns(made: Path, example: str):
    arguments = ("--tiny", "--backend", "local", "--root", str(made), "--name", f"trial_{example}")
    found = summary(
        forked.program(made / f"trial_{example}.log", EXAMPLES / example, *arguments).finish()
    )
    assert found["accuracy_after"] - found["accuracy_before"] >= 0.15 and found["accuracy_after"] > 0.6


def test_the_problems_of_a_trial_are_all_different():
    questions = [row["question"] for row in word_problems(PROBLEMS + DEMONSTRATIONS)]
    assert len({*questions}) == len(questions) == PROBLEMS + DEMONSTRATIONS
