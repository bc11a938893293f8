"""Sequence parallelism: the same log-probabilities, gradients and weights as on one rank."""

from pathlib import Path
from typing import Any

import pytest
from family_cases import asked_of, check, on_one_rank, run_ranks, write_models

from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig

SHARED = ("Qwen2", "Qwen3", "Mistral", "Mixtral", "Gemma 2", "Gemma 3", "GPT-2", "GPT-OSS")
CASES = [*SHARED, "Qwen3 with LoRA"]
QUICK = ("Qwen2", "Mixtral", "Gemma 2", "GPT-2", "GPT-OSS", "Qwen3 with LoRA")
"""Full and sliding attention, capped logits, sinks, experts, learned positions, and an adapter."""


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[str]:
    return asked_of(request, CASES, QUICK)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, asked: list[str]) -> Path:
    uncut = ["StableLM", "dynamic NTK"] if asked == CASES else []
    return write_models(tmp_path_factory.mktemp("families"), [*asked, *uncut])


@pytest.fixture(scope="module")
def alone(models: Path, asked: list[str]) -> dict[str, Any]:
    return on_one_rank(models, asked)


@pytest.fixture(scope="module")
def two(
    models: Path, asked: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(models, folder, 2, asked, sequence_parallel=2, microbatch_tokens=60)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_two_ranks_share_the_tokens_of_a_microbatch(alone: dict[str, Any], two: Any, name: str):
    check(two[0], name, two[1], alone[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replica", "settings"),
    [
        (4, {}),  # more ranks than key-value heads
        (2, {"gather": "layerwise", "microbatch_tokens": 60}),
        (2, {"activation_checkpointing": True}),
        (2, {"offload": "everything"}),
    ],
)
def test_four_ranks(
    models: Path, alone: dict[str, Any], tmp_path: Path, replica: int, settings: dict[str, Any]
):
    ranks = run_ranks(models, tmp_path, 4, CASES, replica, sequence_parallel=replica, **settings)
    for name in CASES:
        check(tmp_path, name, ranks, alone[name], replica)


def test_models_that_cannot_share_tokens_are_refused(models: Path):
    with pytest.raises(
        UserError, match=r"sequence_parallel=3 does not divide the model's attention heads \(4\)"
    ):
        ActorConfig(model=str(models / "Qwen2"), sequence_parallel=3).check()
    with pytest.raises(
        UserError,
        match="sequence_parallel=2 and tensor_parallel=2: ranks share tokens or layers, not both",
    ):
        ActorConfig(model=str(models / "Qwen2"), sequence_parallel=2, tensor_parallel=2).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"), [("StableLM", "its rows cannot be packed"), ("dynamic NTK", "its rope depends on")]
)
def test_models_that_cannot_split_rows_are_refused(models: Path, tmp_path: Path, name: str, why: str):
    with pytest.raises(
        AssertionError, match=f"sequence_parallel=2 cannot share the tokens of model .*{why}"
    ):
        run_ranks(models, tmp_path, 2, [name], sequence_parallel=2)
