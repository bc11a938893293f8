"""Training resumes from a checkpoint as if it had never stopped, on any number of ranks."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_ranks as program
import numpy as np
import pyarrow as pa
import pytest
import torch
from checkpoint_ranks import actor, engine_of, equal, full, state, train
from ranks import run_processes
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.runs.files import Disk
from weft.dataflow.runs.manifest import verify_manifest, write_manifest


@pytest.fixture(scope="module")
def steps() -> list[Batch]:
    """Rows for five updates, all with the same columns."""
    return [make_rows(9, seed) for seed in range(5)]


def make_rows(num_rows: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 14, num_rows)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    return Batch.of(
        prompt_ids=[rng.integers(0, 97, n) for n in rng.integers(1, 9, num_rows)],
        response_ids=(rng.integers(0, 97, cu_seqlens[-1]), cu_seqlens),
        advantages=(rng.normal(size=cu_seqlens[-1]), cu_seqlens),
        old_logprobs=(-4.5 + 0.3 * rng.normal(size=cu_seqlens[-1]), cu_seqlens),
    )


def saved(worker: Any, folder: Path) -> Path:
    worker.save_checkpoint(folder)
    assert worker.checkpoint_written(wait=True) and worker.checkpoint_written()
    return folder


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resume_equals_an_uninterrupted_run_exactly(
    tiny_model: Path, steps: list[Batch], tmp_path: Path, dtype: str
):
    worker = actor(tiny_model, dtype=dtype)
    train(worker, steps[:3], epochs=2, minibatches=2)
    program.seed(3)
    assert worker.save_checkpoint(tmp_path / "step" / "actor") > 0
    drawn = program.draw()
    train(worker, steps[3:], epochs=2, minibatches=2)
    worker.close()  # waits until the checkpoint is written

    again = actor(tiny_model, dtype=dtype)
    again.load_checkpoint(tmp_path / "step" / "actor")
    assert again.version == 3 and engine_of(again).steps == 12
    assert program.draw() == drawn
    train(again, steps[3:], epochs=2, minibatches=2)
    assert equal(state(again), state(worker))
    assert not equal(state(again), state(actor(tiny_model, dtype=dtype)))
    write_manifest(tmp_path / "step")
    assert verify_manifest(tmp_path / "step") == []


def test_the_learning_rate_continues(tiny_model: Path, steps: list[Batch], tmp_path: Path):
    worker = actor(tiny_model)
    train(worker, steps[:3])
    again = actor(tiny_model)
    again.load_checkpoint(saved(worker, tmp_path / "actor"))
    rates = [w.update(steps[3], loss=program.LOSS)["learning_rate"].value for w in (worker, again)]
    assert (
        rates[0] == rates[1] == engine_of(worker).training.rate(3) != engine_of(worker).training.rate(0)
    )


def test_a_worker_goes_back_to_its_own_checkpoint(tiny_model: Path, steps: list[Batch], tmp_path: Path):
    worker = actor(tiny_model)
    saved(worker, tmp_path / "actor")  # AdamW has no state yet
    before = state(worker)
    train(worker, steps[:2])
    first = state(worker)
    worker.load_checkpoint(tmp_path / "actor")
    assert equal(state(worker), before) and worker.version == engine_of(worker).steps == 0
    train(worker, steps[:2])
    assert equal(state(worker), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_in_a_checkpoint_loads_with_transformers(
    tiny_model: Path, steps: list[Batch], tmp_path: Path, dtype: str
):
    worker = actor(tiny_model, dtype=dtype)
    train(worker, steps[:1])
    saved(worker, tmp_path / "actor")
    worker.save(tmp_path / "export")
    assert_is_model(tmp_path / "actor" / "model", dict(worker.engine.named_tensors()))
    exported, kept = (
        {p.name: p.read_bytes() for p in folder.iterdir()}
        for folder in (tmp_path / "export", tmp_path / "actor/model")
    )
    assert exported == kept and kept.keys() >= {"config.json", "model.safetensors", "tokenizer.json"}


def assert_is_model(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


class HeldDisk(Disk):
    """A disk that writes nothing until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def write(self, descriptor: int, data: bytes) -> None:
        assert self.released.wait(60)
        super().write(descriptor, data)


def test_training_continues_while_a_snapshot_is_written(
    tiny_model: Path, steps: list[Batch], tmp_path: Path
):
    disk = HeldDisk()
    worker = actor(tiny_model, disk=disk)
    train(worker, steps[:1])
    before = state(worker)
    worker.save_checkpoint(tmp_path / "actor")
    train(worker, steps[1:])
    assert not worker.checkpoint_written()
    disk.released.set()
    assert worker.checkpoint_written(wait=True)
    again = actor(tiny_model)
    again.load_checkpoint(tmp_path / "actor")
    assert equal(state(again), before)


def test_a_snapshot_waits_for_the_previous_one_and_reports_the_time(
    tiny_model: Path, steps: list[Batch], tmp_path: Path
):
    disk = HeldDisk()
    worker = actor(tiny_model, disk=disk)
    worker.save_checkpoint(tmp_path / "first")
    train(worker, steps[:1])
    threading.Timer(0.3, disk.released.set).start()
    assert worker.save_checkpoint(tmp_path / "second") > 0.25
    assert worker.checkpoint_written(wait=True)
    again = actor(tiny_model)
    for name, version in (("first", 0), ("second", 1)):
        again.load_checkpoint(tmp_path / name)
        assert again.version == version
    assert equal(state(again), state(worker))


def test_a_full_disk_is_reported_once_and_the_next_snapshot_tries_again(
    tiny_model: Path, tmp_path: Path
):
    disk = program.FullDisk(1000)
    worker = actor(tiny_model, disk=disk)
    worker.save_checkpoint(tmp_path / "first")
    with pytest.raises(
        OSError, match=r"the disk is full: [\d,]{7,} bytes are needed, [\d,]+ are free: '.*rank_0.safet"
    ):
        worker.checkpoint_written(wait=True)
    assert not list((tmp_path / "first" / "state").iterdir()), "what was written of it only takes room"
    assert worker.checkpoint_written()
    disk.room = 1 << 30
    actor(tiny_model).load_checkpoint(saved(worker, tmp_path / "second"))


def test_an_older_checkpoint_is_not_written_over(tiny_model: Path, tmp_path: Path):
    worker = actor(tiny_model)
    saved(worker, tmp_path / "actor")
    worker.save_checkpoint(tmp_path / "actor")
    with pytest.raises(FileExistsError, match="a snapshot needs a new folder"):
        worker.checkpoint_written(wait=True)


def test_gradients_that_are_not_applied_are_not_lost_in_silence(
    tiny_model: Path, steps: list[Batch], tmp_path: Path
):
    worker = actor(tiny_model)
    worker.update(steps[0], loss=program.LOSS, last=False)
    with pytest.raises(RuntimeError, match="take snapshots between two steps"):
        worker.save_checkpoint(tmp_path / "actor")


def cut(folder: Path) -> None:
    file = folder / "state" / "rank_0.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def scramble(folder: Path) -> None:
    file = folder / "state" / "rank_0.safetensors"
    file.write_bytes(b"\xff" * 100)


def grow(folder: Path) -> None:
    known = json.loads((folder / "rank_0.json").read_text())
    (folder / "rank_0.json").write_text(json.dumps({**known, "format": 2}))


DAMAGES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "cut": (cut, ValueError, r"rank_0.safetensors is \d+ bytes, not \d+"),
    "scrambled": (
        scramble,
        ValueError,
        "rank_0.safetensors is damaged or not a safetensors file: its 100 bytes end before its header does",
    ),
    "no checkpoint": (
        lambda f: (f / "rank_0.json").unlink(),
        UserError,
        "is not a snapshot of training: it has no rank_0",
    ),
    "of later": (grow, UserError, "is a snapshot of format 2; this version reads 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_cannot_be_read_is_named(tiny_model: Path, tmp_path: Path, damage: str):
    worker = actor(tiny_model)
    folder = saved(worker, tmp_path / "actor")
    change, error, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(error, match=message):
        actor(tiny_model).load_checkpoint(folder)


def test_a_checkpoint_of_another_model_is_refused(tiny_model: Path, tmp_path: Path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = saved(actor(tiny_model), tmp_path / "actor")
    settings = Qwen2Config.from_pretrained(tiny_model)
    for name, change, message in (
        (
            "deeper",
            {"num_hidden_layers": 3, "layer_types": None},
            "'model.model.layers.2.*' is missing there, and has shape",
        ),
        (
            "wider",
            {"intermediate_size": 96},
            r"mlp.*' has shape \[64, 128\] there, and has shape \[64, 96\] in the model",
        ),
    ):
        other = Qwen2Config.from_dict({**settings.to_dict(), **change})
        Qwen2ForCausalLM(other).save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match=message):
            actor(tmp_path / name).load_checkpoint(folder)


# Other numbers of ranks


def run_ranks(folder: Path, model: Path, steps: list[Batch], ranks: int, **case: Any) -> dict[str, Any]:
    """Return the results of `checkpoint_ranks.py` on `ranks` ranks."""
    with pa.ipc.new_file(folder / "rows.arrow", steps[0].record.schema) as file:
        for rows in steps:
            file.write_batch(rows.record)
    case = {
        "folder": str(folder),
        "model": str(model),
        "ranks": ranks,
        "settings": {},
        "restores": {},
        **case,
    }
    (folder / "case.json").write_text(json.dumps(case))
    run_processes(program.main, folder / "case.json", ranks)
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def alone(
    tiny_model: Path, steps: list[Batch], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A checkpoint of one rank after three steps, and its state after five."""
    folder = tmp_path_factory.mktemp("alone") / "actor"
    worker = actor(tiny_model)
    train(worker, steps[:3])
    saved(worker, folder)
    train(worker, steps[3:])
    return folder, full(worker)


@pytest.fixture(scope="module")
def two_ranks(
    tiny_model: Path,
    steps: list[Batch],
    alone: tuple[Path, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, Any]]:
    """Two ranks that stop and resume: as two replicas in both dtypes, and as one replica."""
    folder = tmp_path_factory.mktemp("two")
    results = run_ranks(
        folder,
        tiny_model,
        steps,
        2,
        settings={
            "float32": {},
            "bfloat16": {"dtype": "bfloat16"},
            "tensor parallel": {"tensor_parallel": 2},
        },
        restores={
            "one to two": (str(alone[0]), {}),
            "one to tensor parallel": (str(alone[0]), {"tensor_parallel": 2}),
            "two to tensor parallel": (str(folder / "float32"), {"tensor_parallel": 2}),
            "tensor parallel to two": (str(folder / "tensor parallel"), {}),
        },
    )
    return folder, results


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["two", "tensor parallel"])
def test_one_rank_becomes_several(
    alone: tuple[Path, Any], two_ranks: tuple[Path, dict[str, Any]], to: str
):
    assert difference(two_ranks[1][f"one to {to}"], alone[1]) < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("source", "to"),
    [("float32", "two to tensor parallel"), ("tensor parallel", "tensor parallel to two")],
)
def test_ranks_take_other_places(two_ranks: tuple[Path, dict[str, Any]], source: str, to: str):
    assert difference(two_ranks[1][to], two_ranks[1][f"{source}, never stopped"]) < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["float32", "tensor parallel"])
def test_several_ranks_become_one(
    tiny_model: Path, steps: list[Batch], two_ranks: tuple[Path, dict[str, Any]], source: str
):
    worker = actor(tiny_model)
    program.seed(5)
    drawn = program.draw()
    program.seed(5)
    worker.load_checkpoint(two_ranks[0] / source)
    assert program.draw() == drawn, "random states are those of ranks that are there no more"
    assert worker.version == engine_of(worker).steps == 3
    train(worker, steps[3:])
    assert difference(full(worker), two_ranks[1][f"{source}, never stopped"]) < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["float32", "bfloat16", "tensor parallel"])
def test_the_model_of_several_ranks_is_whole(two_ranks: tuple[Path, dict[str, Any]], source: str):
    assert_is_model(two_ranks[0] / source / "model", two_ranks[1][f"{source}, model"])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_state_is_one_of_torch_distributed_checkpoint(two_ranks: tuple[Path, dict[str, Any]]):
    expected = two_ranks[1]["float32, model"]
    found = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in expected.items()}
    moment, step = "optimizer.model.norm.weight.exp_avg", "optimizer.model.norm.weight.step"
    found |= {moment: torch.zeros(64), step: torch.zeros(())}
    load(
        found,
        storage_reader=HuggingFaceStorageReader(str(two_ranks[0] / "float32" / "state")),
        no_dist=True,
    )
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in expected.items())
    assert found[moment].abs().min() > 0 and found[step] == 3


@pytest.mark.slow
def test_parts_that_are_not_equal_fit_together(tiny_model: Path, steps: list[Batch], tmp_path: Path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    odd = Qwen2Config.from_dict(
        {**Qwen2Config.from_pretrained(tiny_model).to_dict(), "intermediate_size": 130}
    )
    Qwen2ForCausalLM(odd).save_pretrained(tmp_path / "odd")
    worker = actor(tmp_path / "odd")
    train(worker, steps[:3])
    saved(worker, tmp_path / "one")
    train(worker, steps[3:])
    results = run_ranks(
        tmp_path,
        tmp_path / "odd",
        steps,
        4,
        settings={"four": {}, "two by two": {"tensor_parallel": 2}},
        restores={
            "one to four": (str(tmp_path / "one"), {}),
            "four to two by two": (str(tmp_path / "four"), {"tensor_parallel": 2}),
            "two by two to four": (str(tmp_path / "two by two"), {}),
        },
    )
    assert difference(results["one to four"], full(worker)) < 1e-6
    assert difference(results["four to two by two"], results["four, never stopped"]) < 1e-6
    assert difference(results["two by two to four"], results["two by two, never stopped"]) < 1e-6
    for name in ("four", "two by two"):
        assert_is_model(tmp_path / name / "model", results[f"{name}, model"])
