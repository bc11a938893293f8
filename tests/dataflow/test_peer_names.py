"""Settings under other libraries' names are answered with Weft's names, in every place."""

import inspect
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.surrogates import Clipped
from weft.controllers.settings import compose
from weft.dataflow.config import Config
from weft.dataflow.errors import UserError
from weft.dataflow.peer_names import LIBRARIES, PEER_NAMES, markdown_table, peer_hint

TRAIN = list(inspect.signature(weft.train).parameters)


def settings_of(owner: str) -> list[str]:
    """Return the settings of a class, by its name in the table."""
    if owner in ("PolicyLoss", "Clipped"):
        return list({"PolicyLoss": PolicyLoss, "Clipped": Clipped}[owner].model_fields)
    public: Any = getattr(weft, owner)
    if owner.endswith("Worker"):
        public = public.Config
    return list(getattr(public, "model_fields", None) or inspect.signature(public).parameters)


@pytest.mark.parametrize("row", PEER_NAMES, ids=lambda row: row.weft)
def test_every_name_of_the_table_is_answered_with_a_setting_that_there_is(row: Any):
    assert len(row.names) == len(LIBRARIES)
    if row.weft.isidentifier():
        assert row.weft in TRAIN
    elif not row.weft.startswith("reading="):
        assert row.setting in settings_of(row.weft.partition("(")[0])
    for library in LIBRARIES:
        for name in row.names_of(library):
            hint = peer_hint(name, TRAIN)
            answers = {
                r.setting for r in PEER_NAMES if any(name in r.names_of(each) for each in LIBRARIES)
            }
            assert any(answer in hint for answer in answers), (name, hint)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("per_device_train_batch_size", "is TRL's name: Weft's is 'prompts_per_step'"),
        ("num_generations", "is TRL's name: Weft's is 'n'"),
        ("beta", "is TRL's name: Weft's is 'kl'"),
        ("max_completion_length", "is TRL's name: Weft's is 'max_tokens'"),
        ("actor.lr", "is verl's name: Weft's is 'learning_rate'"),
        ("actor_rollout_ref.actor.optim.lr", "is verl's name: Weft's is 'learning_rate'"),
        ("data.train_batch_size", "is verl's name: Weft's is 'prompts_per_step'"),
        ("actor_rollout_ref.rollout.n", "is verl's name: Weft's is 'n'"),
        ("gconfig.n_samples", "is AReaL's name: Weft's is 'n'"),
        ("rollout_max_response_len", "is slime's name: Weft's is 'max_tokens'"),
        ("init_kl_coef", "is OpenRLHF's name: Weft's is 'kl'"),
        ("vllm_tensor_parallel_size", "is TRL's name: Weft's is RolloutWorker(tensor_parallel=...)"),
        ("save_steps", "is TRL's name: Weft's is CheckpointConfig(every=...)"),
    ],
)
def test_train_answers_names_of_other_libraries(name: str, says: str):
    given: dict[str, Any] = {name: 8}
    with pytest.raises(UserError) as refused:
        weft.train("model", "data.jsonl", **given)
    assert f"weft.train takes no argument {name!r} (value 8); {name} {says}" in str(refused.value)


def test_classes_answer_them_too():
    with pytest.raises(
        UserError, match="vllm_gpu_memory_utilization is TRL's name: Weft's is 'gpu_memory_utilization'"
    ):
        weft.group(weft.RolloutWorker, model="model", vllm_gpu_memory_utilization=0.5)
    with pytest.raises(UserError, match="max_new_tokens is OpenRLHF's name: Weft's is 'max_tokens'"):
        weft.Sampling(max_new_tokens=5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(UserError, match=r"num_generations is TRL's name: Weft's is weft.train\(n=...\)"):
        weft.Synchronous(num_generations=5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(UserError, match="n_gpus_per_node is verl's name: Weft's is 'placement'"):
        weft.Driver(None, n_gpus_per_node=5)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_a_near_name_of_ones_own_is_still_offered():
    with pytest.raises(UserError, match="did you mean 'prompts_per_step'"):
        weft.Synchronous(prompt_per_step=5)  # pyright: ignore[reportCallIssue]


class Script(Config):
    learning_rate: float = 1e-6
    prompts_per_step: int = 8
    n: int = 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num-generations", "8"], "num_generations is TRL's name: Weft's is 'n'"),
        (["--per_device_train_batch_size=8"], "Weft's is 'prompts_per_step'"),
        (
            ["actor_rollout_ref.actor.optim.lr=1e-6"],
            "settings are given as --name value; actor_rollout_ref",
        ),
        (
            ["--data.train_batch_size", "8"],
            "data.train_batch_size is verl's name: Weft's is 'prompts_per_step'",
        ),
    ],
)
def test_command_lines_answer_them(words: list[str], says: str):
    with pytest.raises(UserError) as refused:
        compose(Script, words)
    assert says in str(refused.value)


def test_a_file_of_settings_answers_them_nested_or_not(tmp_path: Path):
    file = tmp_path / "settings.yaml"
    file.write_text("num_generations: 8\nactor_rollout_ref:\n  actor:\n    optim:\n      lr: 1.0e-6\n")
    with pytest.raises(UserError) as refused:
        compose(Script, ["--config", str(file)])
    first, second = str(refused.value).splitlines()
    assert "'num_generations' (value 8); num_generations is TRL's name: Weft's is 'n'" in first
    assert (
        "no setting 'actor_rollout_ref.actor.optim.lr'; " in second
        and "Weft's is 'learning_rate'" in second
    )


def test_the_page_for_users_of_other_libraries_has_the_same_table():
    page = (Path(__file__).resolve().parents[2] / "docs" / "coming_from.md").read_text()
    code = "from weft.dataflow.peer_names import markdown_table; print(markdown_table())"
    assert markdown_table() in page, f"put what this prints into docs/coming_from.md: python -c '{code}'"
