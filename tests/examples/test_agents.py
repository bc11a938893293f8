"""The small examples of agents in one process, with either engine."""

import contextlib
import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import forked
import pyarrow.parquet as pq
import pytest
from small import EXAMPLES, run, summary

from weft.dataflow.errors import UserError

PYTHON = Path(os.environ.get("WEFT_VERIFIERS", EXAMPLES.parent / ".venv-verifiers" / "bin" / "python"))
"""Interpreter of an environment with verifiers[ta]."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]
)
@pytest.mark.parametrize(("example", "most_turns"), [("agent_calculator", 4), ("agent_gridworld", 8)])
def test_the_example_runs_in_one_process(root: Path, example: str, most_turns: int, engine: str):
    name = f"{example}-{engine}"
    check(root, name, most_turns, summary(run(f"{example}.py", name, "--engine", engine, root=root)))


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.is_file(), reason="verifiers is not installed in .venv-verifiers")
def test_a_task_set_of_verifiers_trains_a_model_in_one_process(root: Path):
    name = "agent_verifiers"
    said = run("agent_verifiers.py", name, "--python", str(PYTHON), root=root)
    check(root, name, 16, summary(said))


def test_without_verifiers_the_example_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("agent_verifiers")
    settings = example.Settings(root=tmp_path, python=tmp_path / "none" / "bin" / "python")
    with pytest.raises(UserError, match=r"-m venv .*/none; .*/none/bin/pip install 'verifiers\[ta\]"):
        example.main(settings)
    assert not [*tmp_path.iterdir()]


def check(root: Path, name: str, most_turns: int, found: dict[str, Any]) -> None:
    assert found["steps"] == 3 and 1 <= found["turns"] <= most_turns
    assert found["max_logprob_gap"] <= 5e-4
    metrics = pq.read_table(root / name / "metrics.parquet").to_pylist()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[3]["eval/pass@1"] is not None
    assert all(row["rollout/retokenised"] == 0 for row in metrics[1:])
    assert all(row["actor/grad_norm"] > 0 for row in metrics[1:]), "it has something to learn"
    assert (root / name / "model" / "model.safetensors").exists()
    assert (root / name / "curve.png").exists()


@pytest.mark.thorough
def test_the_programs_of_the_page_on_agents_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a tiny model, fewer steps, and in one process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    template = importlib.import_module("tiny_agents").TEMPLATE
    texts = ["What is 2 + 3?", "Count to 5.", "The sum is 5.", "<tool_call>", "tool_response"]
    importlib.import_module("tiny_qwen3").make_model(tmp_path / "model", texts, chat_template=template)
    rows = [{"question": f"What is 2 + {k}?", "answer": f"{2 + k}", "target": k} for k in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = (EXAMPLES.parent / "docs" / "agents.md").read_text()
    first, second = re.findall(r"^```python test=\"compile\"\n(.*?)^```", page, re.M | re.S)[:2]
    small = "actor=actor, n=2, sampling=weft.Sampling(max_tokens=8))"
    for was, becomes in (
        ('"Qwen/Qwen3-0.6B"', '"model"'),
        (
            "RolloutWorker, model=model)",
            'RolloutWorker, model=model, engine="transformers", max_context=256)',
        ),
        ("actor=actor, n=8)", small),
        ("steps=100, prompts_per_step=32", "steps=1, prompts_per_step=4"),
        ("schedule=schedule)", "schedule=schedule, backend=weft.Local(), root='runs', name='first')"),
    ):
        assert first.count(was) == 1, f"the first program of the page has not {was!r}"
        first = first.replace(was, becomes)
    prompts = 'prompts = weft.Prompts.read("train.jsonl", model, chat=False)'
    second = second.replace("actor=actor, n=8)", small)
    driver = first[first.index("with weft.Driver") :].replace("'first'", "'second'")
    (tmp_path / "program.py").write_text("\n".join([first, prompts, second, driver]))
    with contextlib.chdir(tmp_path):
        forked.program(tmp_path / "log", tmp_path / "program.py").finish()
    for name in ("first", "second"):
        metrics = pq.read_table(tmp_path / "runs" / name / "metrics.parquet").to_pylist()
        assert metrics[-1]["step"] == 1 and metrics[-1]["rollout/dropped_episodes"] == 0
