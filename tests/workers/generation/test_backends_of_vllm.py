"""Weights over vLLM's transfer backends, from two FSDP ranks to an engine.

The classes are vLLM's; gloo and host memory carry the bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_ranks import train, without_gpus
from forked import server

from weft.algorithms.sampling import Sampling
from weft.dataflow.errors import GenerationError, WeightSyncError
from weft.resharding.publisher import WeightPublisher
from weft.resharding.vllm_control import Receivers
from weft.resharding.weights import Given, Weights, whole
from weft.workers.generation.engine import GenerationRequest, generate
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings
from weft.workers.rendezvous import LOOPBACK, Rendezvous, take_port
from weft.workers.rollout import RolloutWorker

RANKS, SECRET = 2, "of this test"


class Trainer:
    """Trainer ranks that all run each command at once, on these GPUs or on the CPU."""

    def __init__(self, folder: Path, gpus: Sequence[int | None] = (None,) * RANKS) -> None:
        taken = take_port(LOOPBACK)
        port = Rendezvous.at(taken, SECRET).port
        taken.close()
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank, gpu in enumerate(gpus):
            here, there = server().Pipe()
            arguments = there, folder, Rendezvous(LOOPBACK, port, SECRET, 60.0), rank, len(gpus), gpu
            process = server().Process(target=train, args=arguments)  # pyright: ignore[reportAttributeAccessIssue]
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def begin(self, method: str, *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((method, *arguments))

    def end(self) -> list[Any]:
        found = []
        for pipe in self._pipes:
            assert pipe.poll(60), "a rank answers"
            found.append(pipe.recv())
        return found

    def all(self, method: str, *arguments: Any) -> list[Any]:
        self.begin(method, *arguments)
        return self.end()

    def publish(self, version: int, receivers: list[str]) -> Weights:
        return reduce(add, self.all("publish_weights", version, receivers))

    def give(self, engine: VllmEngine, version: int) -> tuple[str, Given]:
        """Publish a version, and return the checksum of the received weights and the sender's
        report."""
        weights = self.publish(version, ["rollout[0]"])
        self.begin("send_weights", version)
        checksum = engine.update_weights(weights.to("rollout[0]"))
        assert self.end() == [None] * len(self.processes)
        return checksum, reduce(add, self.all("finish_publishing", version))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def shared(vllm_worker: RolloutWorker, folder: Path) -> Iterator[VllmEngine]:
    """The shared engine. Afterwards it gets its initial weights back, over Weft's own transport."""
    engine = vllm_worker.engine
    assert isinstance(engine, VllmEngine)
    yield engine
    publisher, model = WeightPublisher(), TransformersEngine(str(folder)).model
    weights = publisher.publish(
        whole({name: each.detach() for name, each in model.named_parameters()}), 0
    )
    assert engine.update_weights(weights) == publisher.finish()
    publisher.close()


@pytest.fixture
def engine(shared: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    without_gpus(monkeypatch.setattr)
    return shared


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Iterator[Trainer]:
    trainer = Trainer(folder)
    yield trainer
    trainer.close()


def largest_gap(engine: VllmEngine, folder: Path, tensors: dict[str, np.ndarray]) -> float:
    """Return the largest logprob difference from a `transformers` model with these tensors.
    [nats]"""
    requests = [GenerationRequest(n, np.arange(3, 6 + n, dtype=np.int32), seed=n) for n in range(3)]
    responses = [r for step in generate(engine, requests, Sampling(max_tokens=12)) for r in step]
    model: Any = TransformersEngine(str(folder)).model
    model.load_state_dict(
        {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=False
    )
    gap = 0.0
    for response in responses:
        ids = np.concatenate([requests[response.request_id].prompt_ids, response.token_ids])
        logits = model(torch.from_numpy(ids)[None].long()).logits[0, -len(response.token_ids) - 1 : -1]
        said = logits.log_softmax(-1).gather(-1, torch.from_numpy(response.token_ids).long()[:, None])[
            :, 0
        ]
        gap = max(gap, float((said.detach() - torch.from_numpy(response.logprobs)).abs().max()))
    return gap


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.parametrize("backend", ["nccl", "memfd"])
def test_version_after_version_arrives_by_a_backend_of_vllms(
    engine: VllmEngine, trainer: Trainer, folder: Path, backend: str
) -> None:
    trainer.all("use", backend)
    for version in (1, 2, 3):
        trainer.all("change", 1.5)
        checksum, given = trainer.give(engine, version)
        assert given.checksum == checksum and given.version == engine.version == version
        tensors = trainer.all("full")[0]
        assert given.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert largest_gap(engine, folder, tensors) < 5e-4


@pytest.mark.thorough
@pytest.mark.vllm
def test_a_corrupted_tensor_is_named_and_blocks_sampling_until_a_full_version(
    engine: VllmEngine, trainer: Trainer, folder: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    trainer.all("use", "memfd")
    weights = trainer.publish(4, ["rollout[0]"])
    trainer.all("wrong", name)
    trainer.begin("send_weights", 4)
    with pytest.raises(
        WeightSyncError,
        match=f"version 4: tensor '{name}' did not arrive as it was published at rank 0 of rollout",
    ):
        engine.update_weights(weights.to("rollout[0]"))
    assert trainer.end() == [None] * RANKS
    with pytest.raises(GenerationError, match="no complete version"):
        next(
            generate(
                engine, [GenerationRequest(0, np.arange(3, 6, dtype=np.int32))], Sampling(max_tokens=2)
            )
        )
    trainer.all("change", 0.5)
    checksum, given = trainer.give(engine, 5)
    assert given.checksum == checksum
    assert largest_gap(engine, folder, trainer.all("full")[0]) < 5e-4


def begun(receivers: Receivers) -> None:
    receivers.gather(6, ["rollout[0]"], 0)
    receivers.init_weight_transfer_engine({"path": "/dev/null"})
    receivers.start_weight_update()


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.parametrize("way", ["fails", "dies"])
def test_an_update_that_ends_in_the_middle_leaves_an_engine_that_takes_the_next(
    engine: VllmEngine, trainer: Trainer, folder: Path, way: str
) -> None:
    receivers, said = Receivers("", together=False), []

    def drive() -> None:
        begun(receivers)
        if way == "dies":
            receivers.close()
            return
        try:
            receivers.update_weights({"tensors": [("no.such.tensor", torch.uint8, (0,))], "more": 1})
        except WeightSyncError as error:
            said.append(str(error))

    thread = threading.Thread(target=drive)
    thread.start()
    weights = Weights(6, (receivers.endpoint,), "rollout[0]", backend="memfd")
    why = (
        "the trainer has ended"
        if way == "dies"
        else "could not load weights version 6: Invalid update_info"
    )
    with pytest.raises(WeightSyncError, match=why):
        engine.update_weights(weights)
    thread.join()
    receivers.close()
    assert (
        way == "dies"
        or "rollout[0] failed in update_weights: ValueError: Invalid update_info" in said[0]
    )
    with pytest.raises(GenerationError, match="no complete version"):
        next(
            generate(
                engine, [GenerationRequest(0, np.arange(3, 6, dtype=np.int32))], Sampling(max_tokens=2)
            )
        )
    trainer.all("use", "memfd")
    checksum, given = trainer.give(engine, 7)
    assert given.checksum == checksum
    assert largest_gap(engine, folder, trainer.all("full")[0]) < 5e-4


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_a_run_trains_on_samples_with_weights_sent_by_a_vllm_backend(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    program = "import sys, backend_run; backend_run.main(*sys.argv[1:])"
    paths = [str(Path(__file__).parent), *sys.path, os.environ.get("PYTHONPATH", "")]
    said = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(tmp_path), "memfd"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert said.returncode == 0, said.stderr
    rows = json.loads(said.stdout.splitlines()[-1])
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert (
            row["actor/weights_bytes"] > 0
            and row["rollout/weights_transfer_s"] >= row["rollout/weights_pause_s"] > 0
        )
        assert row.get("actor/max_logprob_gap", 0.0) < 5e-4, (
            "it samples with the weights of the step before"
        )
    assert "actor/max_logprob_gap" in rows[3]


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize(("backend", "gpu"), [("ipc", 0), ("nccl", 1)])
def test_version_after_version_arrives_on_a_gpu(folder: Path, backend: str, gpu: int) -> None:
    """Not run yet, for lack of GPUs."""
    if torch.cuda.device_count() <= gpu:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs, and {backend} needs {gpu + 1}")
    settings = VllmSettings(max_num_seqs=8, gpu_memory_utilization=0.2)
    engine, trainer = VllmEngine(str(folder), settings, dtype="float32"), Trainer(folder, [gpu])
    try:
        trainer.all("use", backend)
        for version in (1, 2, 3):
            trainer.all("change", 1.1)
            checksum, given = trainer.give(engine, version)
            assert given.checksum == checksum
            assert largest_gap(engine, folder, trainer.all("full")[0]) < 1e-2
    finally:
        trainer.close()
        engine.close()


def test_ranks_that_have_begun_end_where_another_could_not_begin():
    asked: list[tuple[str, tuple[Any, ...]]] = []

    class Ranks:
        def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            asked.append((method, args))
            if method == "weft_begin_by_vllm":
                raise RuntimeError("rank 1 has no such backend")
            return [{}, {}]

    engine: Any = object.__new__(VllmEngine)
    engine._engine, engine._tensor_parallel, engine._identity = Ranks(), 2, ""
    with pytest.raises(WeightSyncError, match="version 3: rank 1 has no such backend"):
        engine._take_by_vllm(Weights(3, (), backend="nccl"))
    assert asked == [("weft_begin_by_vllm", ("nccl",)), ("weft_end_by_vllm", (False,))]
