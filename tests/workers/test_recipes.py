"""Every recipe in the docs can be recorded, printed, and run for a step."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import weft
from weft.algorithms.grpo import grpo
from weft.algorithms.preference import bco, dpo, kto, online_dpo
from weft.algorithms.preference_loss import ClassifierLoss, PreferenceLoss
from weft.dataflow.graph import Graph, group
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorWorker
from weft.workers.reference import ReferenceWorker
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker

DOCS = Path(__file__).resolve().parents[2] / "docs"
SAMPLING = weft.Sampling(max_tokens=3)


def of_docs(page: str, beginning: str, **known: Any) -> dict[str, Any]:
    """Run the block of a page that contains this line, and return its variables."""
    blocks = re.findall(r"^```python.*\n((?s:.*?))^```", (DOCS / page).read_text(), re.M)
    namespace = dict(known)
    exec(
        next(block for block in blocks if re.search(f"^{re.escape(beginning)}", block, re.M)), namespace
    )
    return namespace


METHODS = of_docs("algorithms.md", "methods = {")["methods"]
LOSSES = of_docs("preferences.md", "losses = {", PreferenceLoss=PreferenceLoss)["losses"]
OWN = of_docs("algorithms.md", "def dapo(", weft=weft)


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model, with a tokenizer of one word per token."""
    folder = tmp_path_factory.mktemp("models") / "words"
    shutil.copytree(tiny_model, folder)
    words = {str(token): token for token in range(97)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(folder / "tokenizer.json"))
    return str(folder)


def mean_token(response_ids: list[int]) -> float:
    return float(np.mean(response_ids)) / 97


def prompts() -> TableSource:
    return TableSource("prompts", pa.table({"prompt_ids": [[5, 6], [7, 8, 9], [10], [11, 12]]}))


def pairs() -> TableSource:
    chosen, rejected = [[13, 14], [15], [16, 17], [18]], [[19], [20, 21], [22], [23, 24]]
    columns = {
        "prompt_ids": prompts().table["prompt_ids"],
        "chosen_ids": chosen,
        "rejected_ids": rejected,
    }
    return TableSource("pairs", pa.table(columns))


def workers(model: str) -> dict[str, Any]:
    made = {
        "rollout": group(RolloutWorker, model=model, engine="transformers"),
        "reward": group(RewardWorker, function=mean_token, tokenizer=model),
        "actor": group(ActorWorker, model=model, learning_rate=1e-3),
    }
    made["rollout"].follows(made["actor"])
    return made


def reference(model: str) -> Any:
    return group(ReferenceWorker, model=model)


def step(graph: Graph, root: Path) -> dict[str, float]:
    """Run one step, check that it had signal, and return its metrics."""
    assert str(graph).startswith(f"graph {graph.name}") and "actor.update" in graph.mermaid()
    schedule = weft.Synchronous(steps=1, prompts_per_step=4)
    with weft.Driver(
        graph, schedule=schedule, root=root, name="run", progress=False, record_every=0
    ) as driver:
        *_, metrics = driver.run()
    assert metrics["actor/tokens"] > 0 and metrics["actor/skipped_steps"] == 0
    assert math.isfinite(metrics["actor/loss"]) and metrics["actor/grad_norm"] > 0
    return metrics


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_docs_takes_a_step(model: str, tmp_path: Path, method: str):
    estimator, loss = METHODS[method]
    judged = {"reference": reference(model)} if "reference_logprobs" in loss.reads else {}
    graph = grpo(
        prompts(), **workers(model), **judged, n=2, sampling=SAMPLING, advantages=estimator, loss=loss
    )
    metrics = step(graph, tmp_path)
    assert metrics["actor/clip_fraction"] == 0, "the rows are on-policy"
    if method == "ReMax":
        assert "reward/baseline_reward_mean" in metrics
        assert metrics["actor/tokens"] == 24, "greedy responses are not trained on"


@pytest.mark.parametrize("method", ["GRPO", "GSPO", "RLOO", "decoupled PPO", "ReMax"])
def test_methods_take_several_steps_an_update(model: str, tmp_path: Path, method: str):
    estimator, loss = METHODS[method]
    judged = {"reference": reference(model)} if "reference_logprobs" in loss.reads else {}
    settings = {
        "advantages": estimator,
        "loss": loss,
        "epochs": 2,
        "minibatches": 2,
        "sampling": SAMPLING,
    }
    metrics = step(grpo(prompts(), **workers(model), **judged, n=2, **settings), tmp_path)
    assert metrics["actor/tokens"] == 48 and metrics["actor/approx_kl"] > 0, (
        "steps after the first see another policy"
    )


@pytest.mark.parametrize("method", LOSSES)
def test_every_preference_loss_of_the_docs_takes_a_step(model: str, tmp_path: Path, method: str):
    loss, actor = LOSSES[method], group(ActorWorker, model=model, learning_rate=1e-3)
    recipe = dpo if loss.whole_groups else bco if isinstance(loss, ClassifierLoss) else kto
    judged = {"reference": reference(model)} if "reference_logprobs" in loss.reads else {}
    assert "actor/chosen_reward" in step(recipe(pairs(), actor=actor, **judged, loss=loss), tmp_path)


def test_preferences_among_own_samples_take_a_step(model: str, tmp_path: Path):
    graph = online_dpo(prompts(), **workers(model), reference=reference(model), n=3, sampling=SAMPLING)
    assert step(graph, tmp_path)["samples"] == 8


@pytest.mark.parametrize("name", ["dapo", "reinforce_plus_plus"])
def test_graphs_of_the_docs_made_of_nodes_take_a_step(model: str, tmp_path: Path, name: str):
    judged = {"reference": reference(model)} if name == "reinforce_plus_plus" else {}
    metrics = step(OWN[name](prompts(), **workers(model), **judged, sampling=SAMPLING), tmp_path)
    assert name != "dapo" or metrics["zero_variance_groups"] == 0
