"""Slices written into vLLM's model: errors during a transfer, and generation afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_models import (
    MODELS,
    TOY,
    Ranks,
    Slices,
    Tensors,
    Toy,
    assert_equal,
    described,
    first,
    make_model,
    numbered,
    parameters_of,
    record,
    saved,
    slices_of,
    writer_of,
)

from weft.dataflow.errors import WeightSyncError
from weft.resharding.weights import Box, Layout
from weft.workers.generation.vllm_settings import VllmSettings

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("group")]

A = TOY["a"]
WHOLE = Box.full((4, 6))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([("a", WHOLE, A.bfloat16())], "tensor 'a' came as bfloat16, and vLLM holds it as float32"),
        ([("aa", WHOLE, A)], "tensor 'aa': this rank holds nothing of it"),
        (
            [("a", WHOLE, A[:3])],
            r"tensor 'a' of shape \(4, 6\): \(3, 6\) elements came for Box\(\[0:4, 0:6\]\)",
        ),
        (
            [("a", Box((0, 0), (2, 6)), A[:2]), ("a", WHOLE, A)],
            r"'a': elements of Box\(\[0:4, 0:6\]\) came twice",
        ),
        (
            [("a", Box((0, 0), (5, 6)), torch.zeros(5, 6))],
            r"'a': Box\(\[4:5, 0:6\]\) was sent to a rank that holds nothing",
        ),
        ([("a", Box((1, 0), (4, 6)), A[1:])], r"weights are missing: 'a' Box\(\[0:1, 0:6\]\), 'b' Box"),
    ],
)
def test_a_wrong_slice_is_refused_and_the_model_keeps_its_weights(slices: Slices, message: str):
    from weft.resharding.vllm_writer import _ModelState

    toy = Toy(first(lambda weight, a: weight.copy_(a)))
    before = parameters_of(toy)
    writer = writer_of(toy, record(toy, TOY))
    with pytest.raises(WeightSyncError, match=message):
        writer.apply(slices)
    assert writer.state is _ModelState.WHOLE
    assert_equal(parameters_of(toy), before)


def test_a_bias_is_written_at_once_and_makes_a_model_of_two_versions():
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from weft.resharding.vllm_writer import _ModelState

    def load(toy: Toy, tensors: Tensors) -> None:
        toy.first.weight.data.copy_(tensors["a"])
        toy.second.weight.data.copy_(tensors["b"])
        toy.first.bias.data.copy_(tensors["bias"])

    toy, tensors = Toy(load), TOY | {"bias": torch.ones(4)}
    toy.first.bias = torch.nn.Parameter(
        torch.zeros(4), requires_grad=False
    )  # vLLM gives a bias no loading format
    record_metadata_for_reloading(toy)
    writer = writer_of(toy, record(toy, tensors))
    assert torch.equal(toy.first.bias, torch.zeros(4))
    weight = toy.first.weight.clone()
    with pytest.raises(WeightSyncError, match="weights are missing: 'a'"):
        writer.apply([("bias", Box((0,), (4,)), tensors["bias"])])
    assert writer.state is _ModelState.PARTIAL
    assert torch.equal(toy.first.bias, torch.ones(4)) and torch.equal(toy.first.weight, weight)


def test_one_layer_at_a_time_has_memory_besides_the_models_own(ranks: Ranks, tmp_path: Path):
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    kind, settings = MODELS["experts"]
    tensors = numbered(saved(make_model(kind, **settings), tmp_path))
    model = ranks.build(tmp_path, 1, 2)
    recording = record(
        model, dict(reversed(tensors.items()))
    )  # independent of the order in the checkpoint
    most = 0

    def watched() -> Iterator[tuple[str, Box, torch.Tensor]]:
        nonlocal most
        for entry in slices_of(recording.layout, tensors, rows=16):
            yield entry
            waiting = [layer for layer in model.modules() if get_layerwise_info(layer).can_load()]
            most = max(
                most,
                sum(any(not p.is_meta for p in layer.parameters(recurse=False)) for layer in waiting),
            )

    writer_of(model, recording).apply(watched())
    assert most == 1


def test_a_model_reports_mixed_versions_until_a_transfer_is_complete():
    from weft.resharding.vllm_writer import _ModelState

    toy = Toy(first(lambda weight, a: weight.copy_(a)))
    recording = record(toy, TOY)
    writer = writer_of(toy, recording)
    slices = slices_of(recording.layout, TOY)

    def broken() -> Iterator[tuple[str, Box, torch.Tensor]]:
        yield slices[0]
        assert writer.state is _ModelState.WRITING
        with pytest.raises(WeightSyncError, match="under way"):
            writer.begin_update()
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError):
        writer.apply(broken())
    assert writer.state is _ModelState.PARTIAL
    with pytest.raises(WeightSyncError, match="'b' came outside an update"):
        writer.write_slice(*slices[1])
    with pytest.raises(WeightSyncError, match="missing"):
        writer.apply([])
    assert writer.state is _ModelState.PARTIAL  # no slice arrived, so it still mixes two versions
    writer.apply(slices)
    assert writer.state is _ModelState.WHOLE
    assert_equal(parameters_of(toy), {"first.weight": TOY["a"], "second.weight": TOY["b"]})


def test_later_versions_may_come_in_other_parts_and_each_element_once():
    toy = Toy(first(lambda weight, a: weight.copy_(a)))
    recording = record(toy, TOY)
    writer = writer_of(toy, recording)
    for factor, rows in enumerate((2, 2, 3, 1, 2), start=1):
        tensors = {name: tensor * factor for name, tensor in TOY.items()}
        slices = slices_of(recording.layout, tensors, rows=rows)
        with pytest.raises(WeightSyncError, match=r"'a': elements of Box\(\[0:\d, 0:6\]\) came twice"):
            writer.apply([slices[0], slices[0]])
        with pytest.raises(WeightSyncError, match="weights are missing: 'b'"):
            writer.apply(slices[:-1])
        with pytest.raises(WeightSyncError, match="came twice"):
            writer.apply([*slices[:-1], ("b", WHOLE, tensors["b"])])
        writer.apply(slices)
        assert_equal(parameters_of(toy), {"first.weight": tensors["a"], "second.weight": tensors["b"]})


# In an engine, where vLLM repacks loaded weights


def check_engine(folder: Path, tensors: Tensors, *, size: int = 1) -> None:
    """Write other weights by a recorded layout, and compare generation with vLLM's own loading."""
    import numpy as np

    from weft.algorithms.sampling import Sampling
    from weft.workers.generation.engine import GenerationRequest, generate
    from weft.workers.generation.vllm_engine import VllmEngine

    settings = VllmSettings(max_num_seqs=8, kv_cache_gib=0.05, tensor_parallel=size)
    engine = VllmEngine(str(folder), settings)

    def generated() -> list[tuple[list[int], list[float]]]:
        requests = [
            GenerationRequest(row, np.arange(3, 9 + row).astype(np.int32), seed=row) for row in range(4)
        ]
        found = [
            each
            for part in generate(engine, requests, Sampling(max_tokens=16, stop=None))
            for each in part
        ]
        return [
            (each.token_ids.tolist(), each.logprobs.tolist())
            for each in sorted(found, key=lambda x: x.request_id)
        ]

    # vLLM calls both on each of its ranks, with the rank's worker.
    def recorded(worker: Any) -> Layout:
        from weft.resharding.vllm_writer import WeightWriter, record_layout

        model = worker.model_runner.model
        recording = record_layout(model, described(tensors))
        worker.weft_writer = WeightWriter(model, worker.vllm_config.model_config, recording)
        worker.weft_layout = recording.layout
        return recording.layout

    def written(worker: Any, factor: float) -> None:
        worker.weft_writer.apply(
            slices_of(worker.weft_layout, {name: factor * each for name, each in tensors.items()})
        )

    def reloaded(worker: Any, factor: float) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        from weft.resharding.vllm_writer import experts_packed_anew, process_tied

        model = worker.model_runner.model
        with experts_packed_anew(model.modules()):
            initialize_layerwise_reload(model)
            model.load_weights((name, factor * each) for name, each in tensors.items())
            finalize_layerwise_reload(model, worker.vllm_config.model_config)
            process_tied(model)

    try:
        first = generated()
        layouts = engine._engine.collective_rpc(recorded)  # pyright: ignore[reportArgumentType]
        assert len(layouts) == size and generated() == first
        engine._engine.collective_rpc(written, args=(0.9,))  # pyright: ignore[reportArgumentType]
        other = generated()
        assert other != first
        engine._engine.collective_rpc(written, args=(1.0,))  # pyright: ignore[reportArgumentType]
        assert generated() == first  # updates must leave the same state as the start
        engine._engine.collective_rpc(reloaded, args=(0.9,))  # pyright: ignore[reportArgumentType]
        assert generated() == other
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("odd experts", 1),
        ("one key head", 2),
        ("Mixtral", 2),
    ],
)
@pytest.mark.slow
def test_an_engine_generates_the_same_after_recording_and_after_each_update(
    tmp_path: Path, name: str, size: int
):
    program = """
        import sys
        from pathlib import Path
        import cloudpickle
        import test_vllm_writer as t
        import vllm_models as m

        if __name__ == "__main__":
            cloudpickle.register_pickle_by_value(t)
            cloudpickle.register_pickle_by_value(m)
            folder, (kind, settings) = Path(sys.argv[1]), m.MODELS[sys.argv[2]]
            t.check_engine(folder, m.saved(m.make_model(kind, **settings), folder), size=int(sys.argv[3]))
            print("done", flush=True)
    """
    # Run a separate program: vLLM's ranks are processes that import the main module.
    file = tmp_path / "engine.py"
    file.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, str(file), str(tmp_path), name, str(size)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
