"""Distillation with real engines: what teachers write, and what students learn."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from toy_tokenizers import save_tokenizer
from training_rows import make_rows

import weft
from weft.algorithms.covariance import KlCov
from weft.algorithms.cross_tokenizer import SharedSpans
from weft.algorithms.distillation import Distillation, ForwardKl, distillation, joined_teachers
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.graph import Graph
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.reference import ReferenceConfig, ReferenceWorker

SAMPLING = weft.Sampling(max_tokens=3)


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student and a teacher with the same words and different weights."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models")
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(97)}, unk_token="w0"))
    for name in ("student", "teacher"):
        shutil.copytree(tiny_model, folder / name)
        words.save(str(folder / name / "tokenizer.json"))
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    teacher.save_pretrained(folder / "teacher")
    return folder / "student", folder / "teacher"


def of_teacher(model: Path) -> ReferenceWorker:
    return ReferenceWorker(ReferenceConfig(model=str(model)))


def prompts(**columns: Any) -> TableSource:
    ids = [[5, 6], [7, 8, 9], [10], [11, 12]]
    return TableSource("prompts", pa.table({"prompt_ids": ids, **columns}))


def step(models: tuple[Path, Path], root: Path, graph: Any = None, **settings: Any) -> dict[str, Any]:
    """Run one step of distillation, and return its metrics and the student's weights."""
    student, teacher = models
    actor = weft.group(ActorWorker, model=str(student), learning_rate=1e-2)
    rollout = weft.group(weft.RolloutWorker, model=str(student), engine="transformers")
    rollout.follows(actor)
    given: dict[str, Any] = {"teacher": weft.group(ReferenceWorker, model=str(teacher)), **settings}
    given = {"sampling": SAMPLING, **given}
    source = given.pop("source", prompts())
    made: Graph = distillation(source, rollout=rollout, actor=actor, n=2, **given)
    schedule = weft.Synchronous(steps=1, prompts_per_step=4)
    with weft.Driver(made, schedule=schedule, root=root, name="run", progress=False) as driver:
        *_, metrics = driver.run()
        driver.call(actor, "save", path=root / "model")
    return {**metrics, "weights": (root / "model" / "model.safetensors").read_bytes()}


def test_a_teacher_writes_its_likeliest_tokens_at_the_temperature_of_the_sample(
    models: tuple[Path, Path],
):
    from transformers import AutoModelForCausalLM

    rows, teacher = make_rows(9), of_teacher(models[1])
    found = teacher.top_logprobs(rows, top=5)
    exact = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float64)
    ids, starts = rows.ragged_numpy("response_ids")
    for row in range(len(rows)):
        prompt = rows["prompt_ids"][row].as_py()
        response = ids[starts[row] : starts[row + 1]].tolist()
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        top = (logits / float(rows.numpy("temperature")[row])).log_softmax(-1).topk(5)
        own = np.array(found["teacher_ids"][row].as_py()).reshape(-1, 5)
        logprobs = np.array(found["teacher_logprobs"][row].as_py()).reshape(-1, 5)
        np.testing.assert_allclose(logprobs, top.values.numpy(), atol=1e-5)
        # Equal probabilities may come in another order.
        of_own = (
            (logits / float(rows.numpy("temperature")[row]))
            .log_softmax(-1)
            .gather(1, torch.from_numpy(own).long())
        )
        np.testing.assert_allclose(of_own.numpy(), top.values.numpy(), atol=1e-5)
    whole = teacher.top_logprobs(rows, top=1000)
    assert whole.lengths("teacher_ids").tolist() == (rows.lengths("response_ids") * 97).tolist()


def test_each_teacher_scores_its_own_rows(models: tuple[Path, Path]):
    rows = make_rows(6).with_columns(domain=["math", "code"] * 3)
    one, two = map(of_teacher, models)
    found = one.top_logprobs(rows, top=4, where=("domain", "math"))
    assert found.lengths("teacher_ids").tolist() == [
        4 * n * (i % 2 == 0) for i, n in enumerate(rows.lengths("response_ids").tolist())
    ]
    student = ActorWorker(ActorConfig(model=str(models[0]), learning_rate=1e-3))
    with pytest.raises(
        UserError, match=r"column 'teacher_ids' has 0 values .* every row needs a teacher"
    ):
        student.update(found, loss=Distillation())
    parts = {"math": one, "code": two}
    for domain, worker in parts.items():
        rows = worker.top_logprobs(rows, top=4, where=("domain", domain), into=f"of_{domain}")
    found = joined_teachers(rows, parts=("of_math", "of_code"))
    for worker, kept in ((one, [0, 2, 4]), (two, [1, 3, 5])):
        own, alone = found.take(np.array(kept)), worker.top_logprobs(rows.take(np.array(kept)), top=4)
        assert own["teacher_ids"].equals(alone["teacher_ids"])
        logprobs = (each.ragged_numpy("teacher_logprobs")[0] for each in (own, alone))
        np.testing.assert_allclose(next(logprobs), next(logprobs), atol=1e-5)
    student.update(found, loss=Distillation())
    for worker in (one, two, student):
        worker.close()


def test_the_weight_of_the_teacher_matters(models: tuple[Path, Path], tmp_path: Path):
    with_reward: dict[str, Any] = {
        "reward": weft.group(weft.RewardWorker, function=first_token, tokenizer=str(models[0]))
    }
    found = {
        weight: step(
            models,
            tmp_path / str(weight),
            **with_reward,
            loss=Distillation(weight=weight, policy=PolicyLoss()),
        )
        for weight in (0.0, 1.0)
    }
    assert found[0.0]["weights"] != found[1.0]["weights"]
    assert found[1.0]["actor/divergence"] > 0.01 and found[1.0]["actor/max_logprob_gap"] < 1e-4


def test_a_run_has_several_teachers(models: tuple[Path, Path], tmp_path: Path):
    teachers = {
        name: weft.group(ReferenceWorker, name=name, model=str(model))
        for name, model in zip(("same", "other"), models, strict=True)
    }
    divergences = [
        step(models, tmp_path / name, teacher=teachers, source=prompts(teacher=column))[
            "actor/divergence"
        ]
        for name, column in (("mixed", ["same", "same", "other", "other"]), ("one", ["same"] * 4))
    ]
    assert divergences[0] > 0.01 and divergences[1] == pytest.approx(0, abs=1e-5)


def first_token(response_ids: list[int]) -> float:
    return response_ids[0] / 97


def test_a_student_approaches_its_teacher(models: tuple[Path, Path]):
    rows, teacher = make_rows(12, seed=3), of_teacher(models[1])
    scored = teacher.top_logprobs(rows, top=20)
    student = ActorWorker(ActorConfig(model=str(models[0]), learning_rate=1e-2))
    loss = Distillation(divergence=ForwardKl())
    divergences = [student.update(scored, loss=loss)["divergence"].value for _ in range(15)]
    assert divergences[-1] < 0.3 * divergences[0]
    student.close()
    teacher.close()


def test_a_student_that_is_its_teacher_with_a_hint_learns_from_the_hint(
    models: tuple[Path, Path], tmp_path: Path
):
    student = models[0]
    plain = step((student, student), tmp_path / "plain")
    assert plain["actor/divergence"] == pytest.approx(0, abs=1e-5)
    hinted = prompts(hinted_ids=[[5, 6, 40], [7, 8, 9, 41], [10, 42], [11, 12, 43]])
    found = step((student, student), tmp_path / "hinted", source=hinted, hints="hinted_ids")
    assert found["actor/divergence"] > 1e-4


def test_one_log_probability_per_token_is_an_advantage(models: tuple[Path, Path], tmp_path: Path):
    reward = weft.group(weft.RewardWorker, function=first_token, tokenizer=str(models[0]))
    loss = PolicyLoss(covariance=KlCov(share=0.1))
    alone = step(models, tmp_path / "alone", top=0)
    both = step(models, tmp_path / "both", top=0, reward=reward, loss=loss)
    for found in (alone, both):
        assert "actor/clip_fraction" in found and found["actor/grad_norm"] > 0
    assert alone["weights"] != both["weights"] and both["actor/high_covariance_fraction"] > 0


def test_models_with_different_tokens_are_refused(models: tuple[Path, Path], tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(models[1], other)
    words = {f"w{token}": token for token in range(97)} | {"w3": 4, "w4": 3}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(other / "tokenizer.json"))
    with pytest.raises(UserError, match=r"token 3 is 'w3' in .*student and 'w4' in .*other; give both"):
        step((models[0], other), tmp_path / "runs")
    with pytest.raises(UserError, match=r"or let the teacher read the text: .*tokenizers=SharedSpans"):
        step((models[0], other), tmp_path / "runs", top=0)
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": PolicyLoss()}, "the loss ignores the teacher's tokens; take a Distillation, or top=0"),
        ({"loss": Distillation(), "top": 0}, "the loss must be a PolicyLoss"),
        ({"loss": Distillation(policy=PolicyLoss())}, "no node computes a reward; give reward=..."),
        ({"top": -1}, "top must be an integer of at least 1, not -1"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    settings: dict[str, Any], says: str, models: tuple[Path, Path], tmp_path: Path
):
    with pytest.raises(UserError) as refused:
        step(models, tmp_path, **settings)
    assert says in str(refused.value)


def test_rows_that_a_teacher_damaged_are_refused(models: tuple[Path, Path]):
    student = ActorWorker(ActorConfig(model=str(models[0]), learning_rate=1e-3))
    rows = Batch.of(
        prompt_ids=[[1], [2]],
        response_ids=[[3, 4], [5]],
        teacher_ids=[[1, 2, 3, 99], [5, 6]],
        teacher_logprobs=[[-1.0] * 4, [-1.0] * 2],
    )
    with pytest.raises(
        UserError, match=r"column .teacher_ids. has token id 99; .* must have the vocabulary"
    ):
        student.update(rows, loss=Distillation())
    student.close()


@pytest.mark.parametrize("rows", [0, 2])
def test_rows_that_no_teacher_scored_are_refused_and_a_rank_may_have_none(
    rows: int, models: tuple[Path, Path]
):
    student = ActorWorker(ActorConfig(model=str(models[0]), learning_rate=1e-3))
    batch = make_rows(2).with_columns(domain=["math", "code"])
    teacher = of_teacher(models[1])
    found = teacher.top_logprobs(batch, top=4, where=("domain", "law")).slice(0, rows)
    if rows:
        with pytest.raises(UserError, match=r"column 'teacher_ids' has 0 values .* every row needs"):
            student.update(found, loss=Distillation())
    else:
        assert student.update(found, loss=Distillation())["tokens"].value == 0
    teacher.close()
    student.close()


ASCII = "".join(map(chr, range(32, 127)))


@pytest.fixture(scope="module")
def across(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """A student that writes characters, a teacher with the same tokens, and one that lacks some
    characters and has pairs of others."""
    folder = tmp_path_factory.mktemp("across")
    pairs = [a + b for a in "0123" for b in "4567"]
    tokens = {"student": (ASCII, ()), "alike": (ASCII, ()), "teacher": (ASCII[:79], pairs)}
    for name, (characters, merges) in tokens.items():
        shutil.copytree(models[name != "student"], folder / name)
        end = "<end>" if name == "teacher" else "</s>"
        save_tokenizer(folder / name, characters, merges, end=end)
    return folder / "student", folder / "alike", folder / "teacher"


def asked_twice() -> TableSource:
    ids = [[5, 6], [7, 8, 9], [10], [11, 12]]
    return TableSource("prompts", pa.table({"prompt_ids": ids, "teacher_prompt_ids": ids}))


@pytest.mark.parametrize("top", [0, 6])
def test_across_equal_tokenizers_distillation_is_plain(
    top: int, across: tuple[Path, Path, Path], tmp_path: Path
):
    student, alike, _ = across
    plain = step((student, alike), tmp_path / "plain", top=top)
    tokenizers = SharedSpans(student=student, teacher=alike)
    found = step(
        (student, alike), tmp_path / "across", top=top, tokenizers=tokenizers, source=asked_twice()
    )
    assert found["weights"] == plain["weights"]
    assert found["compared_fraction"] == found["one_to_one_fraction"] == 1
    for name in ("actor/loss", "actor/grad_norm", *(["actor/divergence"] if top else [])):
        assert found[name] == plain[name]


@pytest.mark.parametrize("top", [0, 6])
def test_a_teacher_with_other_tokens_reads_the_text(
    top: int, across: tuple[Path, Path, Path], tmp_path: Path
):
    student, _, teacher = across
    tokenizers = SharedSpans(student=student, teacher=teacher)
    ways: dict[str, Any] = {"top": top, "tokenizers": tokenizers, "source": asked_twice()}
    found = step((student, teacher), tmp_path / "one", **ways)
    assert 0.3 < found["compared_fraction"] <= 1 and found["actor/grad_norm"] > 0
    if not top:
        return
    assert found["actor/divergence"] > 0
    loss = Distillation(weight=0.0, policy=PolicyLoss())
    off = step((student, teacher), tmp_path / "off", **ways, loss=loss)
    assert off["actor/grad_norm"] == 0 and off["weights"] != found["weights"]


def test_a_teacher_reads_its_own_prompt_and_response(across: tuple[Path, Path, Path]):
    worker, rows = of_teacher(across[2]), make_rows(3)
    columns = {"teacher_response_ids": [[4, 5], [], [6]], "teacher_prompt_ids": [[1, 2], [3], [4]]}
    ways: dict[str, Any] = {"of": "teacher_response_ids", "prompts": "teacher_prompt_ids"}
    given = rows.with_columns(**columns)
    found = worker.top_logprobs(given, top=3, **ways)
    swapped = dict(zip(("response_ids", "prompt_ids"), columns.values(), strict=True))
    alone = worker.top_logprobs(rows.select(["sample_id", "temperature"]).with_columns(**swapped), top=3)
    assert found["teacher_ids"].equals(alone["teacher_ids"])
    assert found["response_ids"].equals(rows["response_ids"])
    worker.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"loss": Distillation()},
            "the loss ignores spans of several tokens, which train by advantages",
        ),
        ({"sampling": weft.Sampling(top_p=0.9)}, "kept sets hold tokens of the student"),
        ({"teacher": {"math": None}}, "takes one teacher; several need top=1 or more"),
        ({"source": None}, "reads column 'teacher_prompt_ids', which no node writes"),
        ({"wrong": True}, "group 'teacher' and SharedSpans(teacher=...) read the same token ids, but"),
    ],
)
def test_distillation_across_tokenizers_that_cannot_be_is_refused(
    settings: dict[str, Any], says: str, across: tuple[Path, Path, Path], tmp_path: Path
):
    student, alike, teacher = across
    given = {"source": asked_twice(), **settings}
    if given["source"] is None:
        given["source"] = prompts()
    named = alike if given.pop("wrong", False) else teacher
    tokenizers = SharedSpans(student=student, teacher=named)
    with pytest.raises(UserError) as refused:
        step((student, teacher), tmp_path, tokenizers=tokenizers, **given)
    assert says in str(refused.value)
