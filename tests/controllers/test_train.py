"""`weft.train` prints a program with the same graph and the same run."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import weft
from weft.algorithms.grpo import grpo
from weft.algorithms.methods import METHODS, supervised
from weft.algorithms.policy_loss import PolicyLoss
from weft.controllers.node_layout import THIS_MACHINE, Nodes
from weft.controllers.program import Program
from weft.controllers.train import shared_devices
from weft.dataflow.column import (
    CHOSEN_IDS,
    IDENTITY,
    IMAGES,
    KNOWN,
    PROMPT_IDS,
    REJECTED_IDS,
    RESPONSE_IDS,
)
from weft.dataflow.metric_names import untimed
from weft.workers.rewards.function import Reward

REWARDS = """
def even(response_ids):
    return sum(token % 2 == 0 for token in response_ids) / len(response_ids)
"""
ROWS = [
    {"prompt": f"{a} {b}", "chosen": f" {a}", "rejected": f" {b}", "label": True}
    for a in range(4)
    for b in range(4)
]
PROMPTS = [{"prompt": row["prompt"]} for row in ROWS]
ANSWERED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in ROWS]
DATA: dict[str, str] = {
    **dict.fromkeys(("sft", "kto", "bco"), "answered"),
    **dict.fromkeys(("dpo", "rpo", "ipo", "simpo", "cpo", "orpo"), "pairs"),
}
"""Method -> file to try it on. The other methods take prompts."""
SAME = (
    "seed",
    "settings",
    "schedule",
    "buffer",
    "checkpoint",
    "placement",
    "groups",
    "graphs",
    "backend",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, data of each kind, and a module with a reward function."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("three-lines")
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
    for name, rows in {"prompts": PROMPTS, "pairs": ROWS, "answered": ANSWERED}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture
def even(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The reward function. The test runs in its folder."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    from my_rewards import even  # pyright: ignore[reportMissingImports]

    return even


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any, **settings: Any) -> str:
    """Return the program that a call prints."""
    capsys.readouterr()
    assert weft.train(*arguments, **settings, explain=True) == []
    return capsys.readouterr().out


def test_the_printed_program_makes_the_same_run(
    even: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    settings: dict[str, Any] = {
        "steps": 2,
        "prompts_per_step": 4,
        "n": 4,
        "max_tokens": 6,
        "learning_rate": 1e-3,
    }
    settings |= {
        "method": "rloo",
        "held_out": "prompts.jsonl",
        "evaluate_every": 2,
        "seed": 3,
        "name": "run",
    }
    short = weft.train("model", "prompts.jsonl", even, **settings, root=tmp_path / "short")
    program = printed(capsys, "model", "prompts.jsonl", even, **settings, root=tmp_path / "long")
    assert len(program.splitlines()) < 40
    names: dict[str, Any] = {}
    exec(compile(program, "program", "exec"), names)
    runs = [tmp_path / which / "run" for which in ("short", "long")]
    first, second = (json.loads((run / "config.json").read_text()) for run in runs)
    assert {key: first[key] for key in SAME} == {key: second[key] for key in SAME}
    measured = [[untimed(row) for row in rows] for rows in (short, names["metrics"])]
    assert measured[0] == measured[1] and len(short) == 3 and "eval/reward/mean" in short[-1]
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1] != (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_the_program_of_each_method_has_its_graph_with_its_settings(
    method: str, even: Any, capsys: pytest.CaptureFixture[str]
):
    chosen, data = METHODS[method], f"{DATA.get(method, 'prompts')}.jsonl"
    rewards = [even] if "reward" in chosen.groups else []
    teacher = {"teacher": "model"} if "teacher" in chosen.groups else {}
    program = printed(capsys, "model", data, *rewards, method=method, max_tokens=6, **teacher)
    names: dict[str, Any] = {}
    exec(compile(program.split("with weft.Driver(")[0], "program", "exec"), names)
    graph = names["training"]
    assert graph.name == chosen.graph.__name__ and {*graph.handles} == {*chosen.groups}
    assert graph.handles["actor"].config.learning_rate == chosen.learning_rate
    settings = dict(graph["actor.update"].arguments)
    if "advantages" in chosen.settings:
        settings["advantages"] = graph["group_advantages"].arguments["estimator"]
    assert {name: settings[name] for name in chosen.settings} == dict(chosen.settings)


@pytest.mark.parametrize(
    "method",
    [
        "grpo",
        "dpo",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("sft", "kto", "remax", "ppo")),
    ],
)
def test_columns_of_a_file_with_reserved_names_do_not_change_training(
    method: str, even: Any, tmp_path: Path
):
    """A file may have a column with any name that Weft uses; its values never affect training."""
    own = {str(c) for c in (IMAGES, *IDENTITY)} | {
        "prompt",
        "answer",
        "response",
        *map(str, (PROMPT_IDS, RESPONSE_IDS, CHOSEN_IDS, REJECTED_IDS)),
    }
    noise = {
        name: [0.01] if pa.types.is_list(c.type) else 0.01
        for name, c in KNOWN.items()
        if name not in own
    }
    data = {"answered": ANSWERED, "pairs": ROWS, "prompts": PROMPTS}[DATA.get(method, "prompts")]
    rewards = () if method in ("sft", "dpo", "kto") else (even,)
    found: list[Any] = []
    texts = dict.fromkeys(noise, "hot")
    for name, more in (("plain", {}), ("noisy", {**noise, "reward/right": 7.0}), ("texts", texts)):
        rows = [{**row, **more} for row in data]
        settings: dict[str, Any] = {
            "method": method,
            "steps": 1,
            "prompts_per_step": 4,
            "root": tmp_path,
            "name": name,
        }
        settings |= {"n": 4, "max_tokens": 4} if rewards else {}
        weft.train("model", rows, *rewards, **settings, learning_rate=1e-2, progress=False)
        found.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert found[0] == found[1] == found[2] != (Path("model") / "model.safetensors").read_bytes()


def test_a_reward_gets_the_columns_of_the_file_as_they_are(even: Any, tmp_path: Path):
    seen: list[Any] = []

    def look(response_ids: list[int], values: Any, advantages: Any, version: Any, reward: Any) -> float:
        seen.append((values, advantages, version, reward))
        return even(response_ids)

    rows = [
        {**row, "values": "high", "advantages": 2**40, "version": 1, "reward": 0.1} for row in PROMPTS
    ]
    short: Any = {
        "steps": 1,
        "prompts_per_step": 2,
        "n": 2,
        "max_tokens": 2,
        "root": tmp_path,
        "progress": False,
    }
    weft.train("model", rows, look, **short)
    assert {*seen} == {("high", 2**40, 1, 0.1)}, "with their types: 0.1 is no float32"


def test_a_column_of_the_file_is_not_taken_for_one_that_no_node_writes(even: Any):
    rows = weft.Prompts.from_rows([{"prompt": "1 2", "completion": " 3", "advantages": 1.0}], "model")
    actor = weft.group(weft.ActorWorker, model="model")
    with pytest.raises(weft.UserError) as refused:
        supervised(rows, actor=actor, loss=PolicyLoss())
    assert "node 'actor.update' reads column 'advantages', which no node writes" in str(refused.value)
    assert "The column 'advantages' of 'rows' belongs to your file" in str(refused.value)


TURNS = (
    "{% for m in messages %}{{ '30 ' if m.role == 'user' else '31 ' }}{{ m.content }}{{ ' 32 ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '31 ' }}{% endif %}"
)


def test_the_turns_that_are_trained_are_a_setting_and_are_printed_before_the_first_step(
    even: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(folder / "model", tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TURNS)
    said = [("user", "1"), ("assistant", "2 3"), ("user", "4"), ("assistant", "5")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in said]}] * 4
    tokens = {}
    for turns in ("last", "all"):
        settings: dict[str, Any] = {
            "method": "sft",
            "steps": 1,
            "prompts_per_step": 4,
            "root": tmp_path,
            "name": turns,
        }
        step = weft.train(
            tmp_path / "chat", rows, **settings, reading={"train_on": turns}, progress="plain"
        )[-1]
        tokens[turns] = step["actor/tokens"]
        printed = capsys.readouterr().out
        assert f"(train_on='{turns}'" in printed.partition("step 1")[0]
    assert "  trains    every assistant turn, 8 in 4 rows (train_on='all')" in printed
    assert (
        "            response '2 3 32'\n            (not trained) '30 4 32 31'\n            response '5 32'"
        in printed
    )
    assert tokens == {"last": 4 * 2, "all": 4 * 5}


@pytest.mark.parametrize(
    "method", [m for m in METHODS if METHODS[m].samples and m not in ("online_dpo", "distillation")]
)
def test_a_penalty_keeps_the_model_near_the_first_one(
    method: str, even: Any, capsys: pytest.CaptureFixture[str]
):
    program = printed(capsys, "model", "prompts.jsonl", even, method=method, kl=0.04, max_tokens=6)
    names: dict[str, Any] = {}
    exec(compile(program.split("with weft.Driver(")[0], "program", "exec"), names)
    graph = names["training"]
    assert "reference" in graph.handles and "reference.logprobs" in {node.name for node in graph.nodes}
    if method == "ppo":
        assert graph["token_rewards"].arguments["coefficient"] == 0.04
    else:
        assert graph["actor.update"].arguments["loss"].kl.coefficient == 0.04


def test_an_adapter_is_trained_with_the_base_model_as_reference(
    even: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tiny: dict[str, Any] = {
        "steps": 1,
        "prompts_per_step": 2,
        "n": 2,
        "max_tokens": 2,
        "name": "run",
        "seed": 1,
    }
    tiny |= {"lora": weft.Lora(rank=2), "kl": 0.1, "progress": False}
    short = weft.train("model", "prompts.jsonl", even, **tiny, root=tmp_path / "short")
    program = printed(capsys, "model", "prompts.jsonl", even, **tiny, root=tmp_path / "long")
    assert "lora=weft.Lora(rank=2)" in program and "reference = weft.adapter_off(actor)" in program
    assert "learning_rate=1e-05" in program, "ten times that of the whole model"
    names: dict[str, Any] = {}
    exec(compile(program, "program", "exec"), names)
    assert [untimed(row) for row in short] == [untimed(row) for row in names["metrics"]]


@pytest.mark.parametrize("method", ["ppo", "dpo", "kto", "sft"])
def test_an_adapter_is_trained_by_methods_of_every_kind(method: str, even: Any, tmp_path: Path):
    rewards = even if METHODS[method].samples else None
    tiny: dict[str, Any] = {
        "steps": 1,
        "prompts_per_step": 2,
        "max_tokens": 2,
        "name": "run",
        "progress": False,
    }
    data = f"{DATA.get(method, 'prompts')}.jsonl"
    weft.train("model", data, rewards, method=method, lora=weft.Lora(rank=2), root=tmp_path, **tiny)
    assert any((tmp_path / "run" / "model").iterdir())


def test_each_held_out_set_that_has_a_name_is_an_evaluation(
    even: Any, capsys: pytest.CaptureFixture[str]
):
    sets = {"easy": "prompts.jsonl", "hard": "prompts.jsonl"}
    program = printed(
        capsys, "model", "prompts.jsonl", even, held_out=sets, evaluate_every=5, max_tokens=6
    )
    names: dict[str, Any] = {}
    exec(compile(program.split("with weft.Driver(")[0], "program", "exec"), names)
    assert (
        names["held_out_easy"].name == names["held_out_hard"].name == "prompts"
        and names["accuracy_hard"].name == "evaluate"
    )
    assert "name='easy'" in program.replace('"', "'") and "name='hard'" in program.replace('"', "'")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "grop"}, "method='grop'; did you mean 'grpo'?"),
        (
            {"mehtod": "grpo"},
            "weft.train takes no argument 'mehtod' (value 'grpo'); did you mean 'method'?",
        ),
        (
            {"offload": "moments"},
            "; to change other worker settings, edit the program that explain=True prints",
        ),
        ({"rewards": None}, "method='grpo' needs a reward for its responses; give rewards=..."),
        ({"method": "gpro"}, "method='gpro'; did you mean 'grpo'?"),
        (
            {"reading": {"promt": "prompt"}},
            "no setting 'promt' (value 'prompt'); did you mean 'prompt'?",
        ),
        (
            {"method": "ipo", "rewards": None},
            "method='ipo' trains on pairs of responses, and the data has none",
        ),
        (
            {"method": "sft", "rewards": None},
            "method='sft' trains on responses, and the data has none: it was read as TRL",
        ),
        (
            {"method": "kto", "rewards": None},
            "method='kto' trains on responses, and the data has none: it was read as TRL",
        ),
        (
            {"method": "dpo"},
            "method='dpo' trains on the responses in the data, without rewards; leave rewards out",
        ),
        (
            {"method": "sft", "rewards": None, "held_out": "prompts.jsonl"},
            "method='sft' has no evaluation",
        ),
        ({"lora": 16}, "lora=16 is not an adapter; give one, such as lora=weft.Lora(rank=16)"),
        ({"kl": -1.0}, "KlPenalty.coefficient: input should be greater than 0, not -1.0"),
        (
            {"method": "dpo", "rewards": None, "kl": 0.1},
            "kl=0.1: only policy-gradient methods have a KL penalty",
        ),
        ({"method": "distillation"}, "method='distillation' with teacher=None: give teacher=..."),
        ({"teacher": "model"}, "method='grpo' with teacher='model': leave it out"),
        (
            {"method": "distillation", "teacher": "model", "rewards": None, "held_out": "prompts.jsonl"},
            "an evaluation needs rewards",
        ),
        ({"method": "online_dpo", "kl": 0.1}, "preference methods have `beta` of their loss"),
        ({"steps": 0}, "Synchronous.steps: input should be greater than or equal to 1, not 0"),
        ({"progress": "josn"}, "progress='josn'; did you mean 'json'?"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    settings: dict[str, Any], says: str, even: Any, tmp_path: Path
):
    given = {
        "model": "model",
        "data": "prompts.jsonl",
        "rewards": even,
        "root": tmp_path / "runs",
        "max_tokens": 6,
    }
    with pytest.raises(weft.UserError) as refused:
        weft.train(**{**given, **settings})
    assert says in str(refused.value) and not (tmp_path / "runs").exists()


def test_data_with_other_column_names_is_read_as_configured(
    even: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"task": row["prompt"], "gold": "4"} for row in PROMPTS[:1]] + [
        {"task": "1 " * 50_000, "gold": "4"}
    ]
    reading: Any = {"prompt": "task", "answer": "gold", "too_long": "drop"}
    program = printed(capsys, "model", rows[:1], even, reading=reading, held_out=rows[:1], max_tokens=6)
    assert program.count('too_long="drop"') == program.count('prompt="task"') == 2, (
        "the held-out rows, too"
    )
    short = {
        "steps": 1,
        "prompts_per_step": 1,
        "n": 2,
        "max_tokens": 2,
        "root": tmp_path,
        "progress": False,
    }
    assert weft.train("model", rows, even, reading=reading, **short)[-1]["samples"] == 2


def test_a_run_with_checkpoints_can_be_resumed(
    even: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    kept: Any = {"checkpoint": weft.CheckpointConfig(every=1), "resume": "latest", "max_tokens": 2}
    assert 'checkpoint=weft.CheckpointConfig(every=1), resume="latest"' in " ".join(
        printed(capsys, "model", "prompts.jsonl", even, **kept).split()
    )
    kept |= {"prompts_per_step": 1, "n": 2, "root": tmp_path, "name": "run", "progress": False}
    weft.train("model", "prompts.jsonl", even, steps=1, **kept)
    assert [row["step"] for row in weft.train("model", "prompts.jsonl", even, steps=2, **kept)] == [
        0,
        1,
        2,
    ]


@pytest.mark.thorough
def test_a_run_resumes_with_its_rows_and_adapter(
    even: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def run(
        steps: int,
        rows: Any = PROMPTS,
        alpha: int = 32,
        rate: float = 1e-3,
        resume: str = "latest",
        **more: Any,
    ) -> None:
        actor = weft.group(
            weft.ActorWorker,
            model="model",
            lora=more.pop("lora", weft.Lora(alpha=alpha)),
            learning_rate=rate,
            **more,
        )
        rollout = weft.group(
            weft.RolloutWorker, model="model", engine="transformers", max_num_seqs=more.pop("seqs", 8)
        )
        rollout.follows(actor)
        prompts = weft.Prompts.from_rows(rows, "model", name="prompts")
        reward = weft.group(weft.RewardWorker, function=even, tokenizer="model")
        graph = grpo(
            prompts,
            rollout=rollout,
            reward=reward,
            actor=actor,
            n=2,
            sampling=weft.Sampling(max_tokens=2),
        )
        schedule = weft.Synchronous(steps=steps, prompts_per_step=1)
        kept: Any = {
            "checkpoint": weft.CheckpointConfig(every=1),
            "root": tmp_path,
            "name": "run",
            "progress": "plain",
        }
        with weft.Driver(graph, schedule=schedule, resume=resume, stop_on=(), **kept) as driver:
            driver.run()

    run(1)
    others = [{"prompt": row["prompt"].replace("3", "4")} for row in PROMPTS]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"rows": others}, "data of train was "),
        ({"rows": PROMPTS[:-1]}, "rows of train was 16, is 15"),
        ({"alpha": 64}, "actor.lora.alpha was 32, is 64"),
        ({"lora": None}, "actor.lora"),
    ]
    for changed, wanted in refused:
        with pytest.raises(weft.UserError, match=wanted):
            run(2, **changed)
    capsys.readouterr()
    run(2, rate=2e-3, microbatch_tokens=64)
    said = capsys.readouterr().out
    assert "changed since the checkpoint: actor.learning_rate was 0.001, is 0.002" in " ".join(
        said.split()
    )
    assert "microbatch_tokens" not in said and "schedule.steps" not in said, (
        "the numbers do not depend on these"
    )
    with pytest.raises(weft.UserError, match=r"actor\.lora\.alpha"):
        run(3, alpha=64, resume="weights")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [3, 16, 40])
def test_a_weights_only_resume_starts_other_data_from_its_first_row(
    even: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
):
    seen: list[str] = []

    def noted(prompt: str, response_ids: list[int]) -> float:
        seen.append(prompt)
        return even(response_ids)

    def run(rows: Any, steps: int, **more: Any) -> float:
        kept = weft.CheckpointConfig(every=2)
        sizes: Any = {
            "n": 2,
            "max_tokens": 2,
            "prompts_per_step": 1,
            "root": tmp_path,
            "name": "run",
            "progress": "plain",
        }
        return weft.train("model", rows, noted, steps=steps, checkpoint=kept, **sizes, **more)[-1][
            "step"
        ]

    run(PROMPTS, 10)
    others = [{"prompt": f"{row % 7} {row // 7} 9"} for row in range(number)]
    capsys.readouterr()
    seen.clear()
    assert run(others, 13, resume="weights") == 13
    said = " ".join(capsys.readouterr().out.split())
    assert "training begins with their first row" in said and "data of train was " in said
    assert len(seen) == 6 and len({*seen}) == 3 and {*seen} <= {row["prompt"] for row in others}
    run(others, 14, resume="latest")
    assert len({*seen}) == min(number, 4), "the order of the new data goes on"


def test_a_program_refuses_an_object_without_source_text_with_advice(
    even: Any, capsys: pytest.CaptureFixture[str]
):
    class Near:
        def __init__(self, *goals: int) -> None:
            self.goal = sum(goals)

        def __call__(self, response: str) -> float:
            return float(len(response) == self.goal)

    with pytest.raises(
        weft.UserError,
        match="cannot be written in a program; give it a name at the top level of the script",
    ):
        weft.train("model", PROMPTS, Near(1, 2), max_tokens=6, explain=True)


def test_a_program_imports_functions_of_modules(even: Any, capsys: pytest.CaptureFixture[str]):
    rows = printed(
        capsys,
        "model",
        PROMPTS[:2],
        [even, Reward(function=even, name="more", weight=0.5)],
        max_tokens=6,
    )
    assert (
        'weft.Prompts.from_rows([{"prompt": "0 0"}, {"prompt": "0 1"}], "model", name="prompts")' in rows
    )
    assert "from my_rewards import even" in rows
    assert "function=[even, " in rows and 'Reward(function=even, name="more", weight=0.5)]' in rows


def test_groups_with_a_model_share_the_gpus_that_there_are():
    program = Program()
    shared = shared_devices(program, METHODS["grpo"].groups, Nodes([(16, 8)], THIS_MACHINE))
    assert shared.rollout["engine"] == "vllm" and shared.rollout["gpu_memory_utilization"] == 0.85
    assert shared.trained["dtype"] == shared.model["dtype"] == "bfloat16"
    assert shared.run["placement"].keys() == {"rollout", "actor"}
    assert program.call_text(dict, **shared.run) == (
        'dict(\n    placement={"rollout": weft.Place(pool=devices, ranks=8), "actor": weft.Place(pool=devices, ranks=8)},\n'
        "    backend=weft.RayBackend(),\n)"
    )
    assert 'devices = weft.ResourcePool("devices", cpus=12, gpus=8)' in program.text
    assert shared_devices(Program(), ("actor",), Nodes([(2, 0)], THIS_MACHINE)).run.keys() == {"backend"}


def test_groups_with_a_model_share_the_nodes_of_a_cluster():
    program = Program()
    shared = shared_devices(
        program, METHODS["grpo"].groups, Nodes([(4, 0), (16, 8), (12, 8)], "the cluster")
    )
    place = shared.run["placement"]["actor"]
    assert (place.ranks, place.pool.gpus, place.pool.nodes, place.pool.cpus) == (16, 16, 2, 18)
    assert shared.rollout["engine"] == "vllm" and isinstance(shared.run["backend"], weft.RayBackend)
    assert (
        'devices = weft.ResourcePool("devices", nodes=2, cpus_per_node=9, gpus_per_node=8)'
        in program.text
    )
    without_gpus = shared_devices(
        Program(), ("actor", "reward"), Nodes([(0, 0), (4, 0), (6, 0)], "the cluster")
    )
    assert without_gpus.rollout == {"engine": "transformers"}
    assert {name: place.ranks for name, place in without_gpus.run["placement"].items()} == {"actor": 2}


@pytest.mark.thorough
@pytest.mark.ray
def test_a_run_in_a_job_uses_the_cluster_of_the_job(
    even: Any, folder: Path, tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_ADDRESS", ray_address)  # as Ray sets it for the program of a job
    tiny: dict[str, Any] = {
        "prompts_per_step": 2,
        "n": 2,
        "max_tokens": 2,
        "root": tmp_path,
        "progress": False,
    }
    weft.train(str(folder / "model"), str(folder / "prompts.jsonl"), even, steps=1, name="run", **tiny)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["backend"] == f"RayBackend({ray_address!r})"
    assert config["placement"]["actor"]["pool"]["cpus"] > 1


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Restore SIGINT, which a shell makes background processes ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize(("number", "said_as"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_a_run_after_its_step_and_saves_the_model(
    even: Any,
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    said_as: str,
):
    def impatient(response_ids: list[int]) -> float:
        calls.append(1)
        if len(calls) == 20:  # in the second step of 16 responses
            signal.raise_signal(number)
        return even(response_ids)

    before = signal.getsignal(number)

    calls: list[int] = []
    tiny: dict[str, Any] = {
        "prompts_per_step": 4,
        "n": 4,
        "max_tokens": 6,
        "method": "rloo",
        "root": tmp_path,
    }
    with pytest.raises(SystemExit) as left:
        weft.train("model", "prompts.jsonl", impatient, steps=500, name="run", **tiny)
    said, errors = capfd.readouterr()
    assert left.value.code == 128 + number
    assert (
        f"{said_as}: the run ends after this step and saves its model; a second one ends it at once"
        in errors
    )
    assert f"the model is saved in {tmp_path / 'run' / 'model'}" in said
    assert "run run: 2 steps" in said and (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_a_second_ctrl_c_ends_it_at_once_with_a_warning_that_nothing_is_saved(
    even: Any, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    def impatient(response_ids: list[int]) -> float:
        signal.raise_signal(signal.SIGINT)
        return even(response_ids)

    tiny: dict[str, Any] = {
        "prompts_per_step": 4,
        "n": 4,
        "max_tokens": 6,
        "method": "rloo",
        "root": tmp_path,
    }
    with pytest.raises(KeyboardInterrupt):
        weft.train("model", "prompts.jsonl", impatient, steps=2, name="run", **tiny)
    assert (
        f"interrupted: the model was not saved in {tmp_path / 'run' / 'model'}" in capfd.readouterr().err
    )
    assert not (tmp_path / "run" / "model").exists()
