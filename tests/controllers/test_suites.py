"""A model is measured on suites, without a step of training."""

import json
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.__main__ import main
from weft.algorithms.graders.text import Exact
from weft.controllers.suites import NAMED, Suite
from weft.dataflow.errors import NoSandboxError, UserError
from weft.dataflow.runs.samples import samples
from weft.workers.sandbox import working_engine

SUMS = [{"prompt": f"B{a}+1=", "answer": str(a + 1)} for a in range(4)]


ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    "math": {"problem": "$1 + 1$?", "level": "Level 1", "solution": "It is $\\boxed{2}$."},
    "aime": {"problem": "$1 + 1$?", "answer": "2"},
    "ifeval": {
        "prompt": "Write without commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    },
    "humaneval": {
        "prompt": "def add(a, b):\n",
        "test": "def check(f):\n    assert f(1, 1) == 2\n",
        "entry_point": "add",
    },
    "mbpp": {"text": "Add.", "code": "add = sum", "test_list": ["assert add(1, 1) == 2"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, and one token per byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, vocab_size=256, num_attention_heads=1, num_key_value_heads=1)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: k for k, byte in enumerate(bytes_)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def evaluated(model: Path, tmp_path: Path, suites: Any, **settings: Any) -> dict[str, float]:
    settings = {"max_tokens": 4, "root": tmp_path / "runs", "name": "run", "progress": "none"} | settings
    return weft.evaluate_model(model, suites, **settings)


def test_suites_have_separate_metrics_and_no_weights_change(model: Path, tmp_path: Path):
    def digits(response: str) -> float:
        return sum(map(str.isdigit, response)) / 4

    def odd(response: str, answer: str) -> float:
        if answer == "2":
            raise ValueError("this grader fails for two")
        return float(int(answer) % 2)

    suites = {"digits": Suite(SUMS, digits, n=3, temperature=1.0), "odd": Suite(SUMS, odd)}
    found = evaluated(model, tmp_path, suites)
    assert found["odd/avg@1"] == pytest.approx(2 / 3)
    assert (found["odd/prompts"], found["odd/prompts_lost"], found["odd/prompts_asked"]) == (3, 1, 4)
    assert found["digits/prompts"] == 4 and {"digits/avg@3", "digits/pass@3"} <= {*found}
    run = tmp_path / "runs" / "run"
    recorded = samples(run)
    assert recorded is not None
    rewards = [row["reward"] for row in recorded.to_pylist() if row["graph"] == "digits"]
    assert len(rewards) == 12 and found["digits/avg@3"] == pytest.approx(sum(rewards) / 12)
    again = evaluated(model, tmp_path, suites, name="again")
    assert {n: v for n, v in again.items() if "token" not in n} == {
        n: v for n, v in found.items() if "token" not in n
    }


@pytest.mark.parametrize(
    "names",
    [
        ("gsm8k", "math", "aime", "ifeval"),
        pytest.param(("humaneval", "mbpp"), marks=pytest.mark.thorough),
    ],
)
def test_a_named_suite_reads_its_data_set_and_scores_it(
    names: tuple[str, ...], model: Path, tmp_path: Path
):
    if "mbpp" in names:
        try:
            working_engine()
        except NoSandboxError as error:
            pytest.skip(str(error))
    found = evaluated(model, tmp_path, {name: [ROWS[name]] * 2 for name in names})
    for name in names:
        assert found[f"{name}/prompts"] == 2 and found[f"{name}/prompts_lost"] == 0
        assert f"{name}/pass@1" in found
    assert ("aime/maj@16" in found) == ("aime" in names)


def test_each_named_suite_is_tried():
    assert ROWS.keys() == NAMED.keys()


@pytest.mark.parametrize(
    ("suites", "settings", "message"),
    [
        ({}, {}, "needs a suite"),
        ({"gsm8": SUMS}, {}, "unknown suite 'gsm8'; did you mean 'gsm8k'"),
        ({"mine": SUMS}, {}, "known suites are gsm8k, math, .*; for your own rows, give weft.Suite"),
        ({"gsm8k": SUMS}, {"n": 4}, "suite 'gsm8k' with n=4 and temperature=0"),
        ({"gsm8k": SUMS}, {"n": 0}, "n=0"),
        ({"a": Suite(SUMS, Exact(), n=2, temperature=1.0, k=(4,))}, {}, "pass@4 needs n of at least 4"),
        ({"a/b": Suite(SUMS, Exact())}, {}, "a/b"),
        ({"gsm8k": "missing.jsonl"}, {}, "'missing.jsonl' does not exist"),
    ],
)
def test_wrong_suites_are_refused_before_anything_starts(
    suites: Any, settings: Any, message: str, model: Path, tmp_path: Path
):
    with pytest.raises(UserError, match=message):
        evaluated(model, tmp_path, suites, **settings)
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_argument_is_named(model: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"no argument 'max_token'.*did you mean 'max_tokens'"):
        evaluated(model, tmp_path, {"gsm8k": SUMS}, max_token=4)
    with pytest.raises(UserError, match=r"no argument 'reward'.*did you mean 'rewards'"):
        Suite(SUMS, reward=Exact())  # pyright: ignore[reportCallIssue]


def test_the_command_measures_a_folder_or_the_model_of_a_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "trained" / "buffer").mkdir(parents=True)
    (tmp_path / "runs" / "trained" / "model").symlink_to(model)
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    options = ["--suite", "gsm8k=sums.jsonl", "--limit", "3", "--max-tokens", "4"]
    assert main(["eval", "trained", *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["metrics"]["gsm8k/prompts_asked"] == 3.0
    assert main(["eval", str(model), *options, "--n", "2", "--temperature", "1"]) == 0
    assert "gsm8k: pass@1 0." in capsys.readouterr().out.splitlines()[-1]


def test_a_run_without_a_complete_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "adapted" / "buffer").mkdir(parents=True)
    for name in ("adapted", "runs/adapted"):
        assert main(["eval", name, "--suite", "gsm8k=sums.jsonl"]) == 2
        assert f"run '{name}' has no complete model in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give at least one --suite"),
        (["--suite", "gsm8k"], "--suite gsm8k: give NAME=FILE"),
        (["--suite", "math=a", "--suite", "math=b"], "--suite math is given twice"),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["eval", "model", *options]) == 2
    assert message in capsys.readouterr().err
