"""Quantised weights in vLLM: each version equals a quantiser in float64, and samples tell their own
log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_model import (
    all_of,
    largest_and_mean_gap,
    prompts_of,
    published,
    requests_of,
    run_apart,
    save_model,
)

import weft
from weft.algorithms.corrections import TruncatedImportance
from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.errors import GenerationError, WeightSyncError
from weft.dataflow.runs.alerts import read_alerts
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import whole
from weft.workers.generation.quantization import Quantization, group_size
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("inspects_models_here")]

SAMPLING = Sampling(max_tokens=24)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
CODES = {
    "int8": torch.arange(-127, 128).double(),
    "fp8": E4M3[E4M3.isfinite()].unique(),
    "w4a16": torch.arange(-8, 8).double(),
}


def scale_and_codes(weight: torch.Tensor, scheme: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise in float64. Return the scale of each element, and its code before rounding."""
    columns = weight.shape[1]
    groups = group_size(columns) if scheme == "w4a16" else columns
    largest = {"int8": 127.0, "fp8": 448.0, "w4a16": 7.5}[scheme]
    dtype = weight.dtype if scheme == "w4a16" else torch.float32
    parts = weight.double().view(len(weight), -1, groups or columns)
    scale = (parts.abs().amax(-1, keepdim=True) / largest).to(dtype).double()
    return scale.expand_as(parts).reshape_as(weight), (parts / scale).view_as(weight)


def nearest_codes(codes: torch.Tensor, scheme: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest code of each element, and whether two codes are equally near."""
    distances, order = (codes[..., None] - CODES[scheme]).abs().topk(2, largest=False)
    tied = distances[..., 1] - distances[..., 0] < 1e-4 * codes.abs().clamp(min=1)
    return CODES[scheme][order[..., 0]], tied


def dequantised(weight: torch.Tensor, scheme: Quantization) -> torch.Tensor:
    scale, codes = scale_and_codes(weight, scheme)
    return nearest_codes(codes, scheme)[0] * scale


def assert_quantised(found: torch.Tensor, weight: torch.Tensor, scheme: Quantization) -> None:
    """Compare dequantised weights with the quantiser in float64, except in the middle between two
    codes, where float32 may round to either."""
    scale, codes = scale_and_codes(weight, scheme)
    expected, tied = nearest_codes(codes, scheme)
    assert tied.float().mean() < 0.02
    assert (found.double() / scale - expected).abs()[~tied].max() < 1e-3, "units of a code"


def test_quantisers_by_hand():
    from weft.workers.generation.vllm_quantization import to_fp8, to_int8, to_w4a16

    rows = torch.tensor([[127.0, -50.2, 12.5, 0.4], [0.0, 0.0, 0.0, 0.0], [-254.0, 254.0, 3.0, 1.0]])
    found = to_int8(rows)
    # 12.5 / 1, 3 / 2 and 1 / 2 are in the middle: half to even
    assert found["weight"].tolist() == [[127, -50, 12, 0], [0, 0, 0, 0], [-127, 127, 2, 0]]
    assert found["weight_scale"][[0, 2], 0].tolist() == [1.0, 2.0]
    found = to_fp8(torch.tensor([[448.0, -30.4, 17.0, 0.0]]))
    # above 16, codes are 2 apart, and above 256, 32
    assert found["weight"].float().tolist() == [[448.0, -30.0, 16.0, 0.0]]
    assert found["weight_scale"].tolist() == [[1.0]]
    row = torch.tensor([[7.5, -7.5, 3.0, 1.4, -1.6, 0.0, 0.0, 0.0] + [0.0] * 24])
    found = to_w4a16(row, 32)
    codes = [(int(found["weight_packed"][0, 0]) >> 4 * place) & 15 for place in range(8)]
    assert codes == [15, 0, 11, 9, 6, 8, 8, 8], "codes plus 8, the first in the lowest bits"
    assert found["weight_scale"].tolist() == [[1.0]] and found["weight_shape"].tolist() == [1, 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["int8", "fp8", "w4a16"])
def test_quantisers_equal_float64_and_are_half_a_code_off_at_most(
    scheme: Quantization, dtype: torch.dtype
):
    from weft.workers.generation import vllm_quantization as own

    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] *= 1e-3
    if scheme == "w4a16":
        made = own.to_w4a16(weight, 128)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = ((made["weight_packed"][..., None] >> shifts) & 15).view(weight.shape) - 8
        scale = made["weight_scale"].repeat_interleave(128, 1)
        assert made["weight_scale"].dtype == dtype
    else:
        made = own.to_int8(weight) if scheme == "int8" else own.to_fp8(weight)
        codes, scale = made["weight"], made["weight_scale"]
    found = codes.double() * scale.double()
    assert_quantised(found, weight, scheme)
    error = (found - weight.double()).abs() / scale.double()
    # Codes of fp8 above 256 are 32 apart. A scale rounded to bfloat16 moves 7.5 by up to 0.03.
    half = {"int8": 0.501, "fp8": 16.01, "w4a16": 0.53}[scheme]
    assert error.max() <= half
    assert codes.double().abs().amax(-1).min() >= {"int8": 127, "fp8": 448, "w4a16": 7}[scheme]


def projections(engine: VllmEngine) -> dict[str, torch.Tensor]:
    """Return the weight that each quantised layer multiplies with, [rows, columns]: the products
    with unit vectors, which int8 activations represent exactly."""

    def read(worker: Any) -> dict[str, torch.Tensor]:
        from weft.workers.generation.vllm_quantization import _QuantisedLinear

        found: dict[str, torch.Tensor] = {}
        for name, module in worker.model_runner.get_model().named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, _QuantisedLinear):
                columns = getattr(module, "input_size_per_partition", module.input_size)
                unit = torch.eye(columns, dtype=method._dtype, device=worker.device)
                found[name] = method.apply(module, unit).T.float().cpu()
        return found

    return engine._engine.collective_rpc(read)[0]  # pyright: ignore[reportArgumentType]


def weight_of(model: Any, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the model's weight that vLLM holds under this name."""
    *path, last = name.split(".")
    parts = [model.get_submodule(".".join([*path, own])).weight for own in FUSED.get(last, (last,))]
    return torch.cat(parts).detach().to(dtype)


def scaled(model: Any, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def assert_version(engine: VllmEngine, model: Any, scheme: Quantization, dtype: torch.dtype) -> None:
    found = projections(engine)
    assert len(found) == 8, "four of each of two layers"
    for name, weight in found.items():
        assert_quantised(weight, weight_of(model, name, dtype), scheme)


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("quantised") / "model")


@pytest.fixture
def own_model(own_folder: Path) -> Any:
    return TransformersEngine(str(own_folder)).model


@pytest.fixture(scope="module")
def int8(own_folder: Path, inspects_models_here: None) -> Iterator[VllmEngine]:
    engine = VllmEngine(str(own_folder), settings("int8"))
    yield engine
    engine.close()


def settings(scheme: Quantization) -> VllmSettings:
    return VllmSettings(max_num_seqs=64, kv_cache_gib=0.05, quantization=scheme)


def fake_quantise(model: Any, scheme: Quantization, dtype: torch.dtype = torch.float32) -> None:
    """Quantise the projections of a model in place: weights of this dtype in float64, and for int8,
    activations per token."""

    def quantise(module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = inputs
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        return ((x / scale).round() * scale,)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = dequantised(module.weight.data.to(dtype), scheme).float()
            if scheme == "int8":
                module.register_forward_pre_hook(quantise)


def test_each_version_is_quantised_as_it_arrives(
    int8: VllmEngine, own_model: Any, publisher: WeightPublisher
):
    first, version = projections(int8), int8.version
    for number, factor in ((version + 1, 1.2), (version + 2, 0.5)):
        scaled(own_model, factor)
        weights = published(own_model, publisher, version=number, scale=1.0)
        assert int8.update_weights(weights) == publisher.finish(), "the checksum of what arrived"
        assert_version(int8, own_model, "int8", torch.float32)
    name = "model.layers.1.mlp.down_proj"
    assert not torch.allclose(first[name], projections(int8)[name], rtol=0.1)


def test_log_probabilities_are_those_of_the_quantised_model(
    int8: VllmEngine, own_model: Any, publisher: WeightPublisher
):
    number = int8.version + 1
    int8.update_weights(published(own_model, publisher, version=number, scale=1.0))
    requests = requests_of(prompts_of(6))
    responses = all_of(int8, requests, SAMPLING)
    _, off = largest_and_mean_gap(own_model, requests, responses.values(), SAMPLING)
    fake_quantise(own_model, "int8")
    largest, mean = largest_and_mean_gap(own_model, requests, responses.values(), SAMPLING)
    assert mean <= 2e-3 and largest <= 0.1, "the model with weights and activations of int8"
    assert 0.01 <= off <= 0.1, "the unquantised model, whose gap a correction must cover"
    assert {token for each in responses.values() for token in each.versions.tolist()} == {number}


def test_an_incomplete_version_serves_nothing_until_another_has_arrived(
    int8: VllmEngine, own_model: Any, publisher: WeightPublisher
):
    number = int8.version + 1
    tensors = {name: p.detach() for name, p in own_model.named_parameters()}
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(WeightSyncError, match=r"lacks weights .*layers\.1\.mlp\.down_proj\.weight"):
        int8.update_weights(publisher.publish(whole(tensors), number))
    with pytest.raises(GenerationError, match="complete version"):
        all_of(int8, requests_of(prompts_of(1)), SAMPLING)
    scaled(own_model, 1.1)
    int8.update_weights(published(own_model, publisher, version=number + 1, scale=1.0))
    assert_version(int8, own_model, "int8", torch.float32)


def test_a_staged_version_is_quantised_when_it_is_taken_over(
    int8: VllmEngine, own_model: Any, publisher: WeightPublisher
):
    before = projections(int8)
    scaled(own_model, 0.8)
    weights = published(own_model, publisher, version=int8.version + 1, scale=1.0)
    for _ in int8.stage_weights(weights):
        pass
    during = projections(int8)
    assert all(torch.equal(during[name], before[name]) for name in before), "samples go on as before"
    assert int8.update_weights(weights) == publisher.finish()
    assert_version(int8, own_model, "int8", torch.float32)
    arriving = sum(p.nbytes for n, p in own_model.named_parameters() if n.endswith("_proj.weight"))
    assert int8.weight_bytes() >= arriving, "the unquantised version needs memory beside the model"


def test_a_canary_of_quantised_weights_is_not_exact(int8: VllmEngine, own_folder: Path):
    class Served(RolloutWorker):
        def new_engine(self, **named: Any) -> Any:
            return int8

    canary = Served(RolloutConfig(model=own_folder, quantization="int8")).canary()
    assert not canary.exact and np.isfinite(np.concatenate(canary.logprobs)).all()


# These tests start engines. Closing one ends the process groups of the shared engine.


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["int8", "w4a16"])
def test_half_precision_follows_new_weights(
    own_folder: Path, own_model: Any, publisher: WeightPublisher, scheme: Quantization
):
    engine = VllmEngine(str(own_folder), settings(scheme), dtype="bfloat16")
    try:
        for number, factor in ((1, 1.25), (2, 0.75)):
            scaled(own_model, factor)
            engine.update_weights(published(own_model, publisher, version=number, scale=1.0))
        for name, found in projections(engine).items():
            scale, codes = scale_and_codes(weight_of(own_model, name, torch.bfloat16), scheme)
            expected, tied = nearest_codes(codes, scheme)
            off = (found.double() / scale - expected).abs()
            # The products are rounded to bfloat16, which has 8 bits.
            assert (off <= 0.01 * expected.abs() + 1e-6)[~tied].all() and tied.float().mean() < 0.02
        requests = requests_of(prompts_of(6))
        responses = all_of(engine, requests, SAMPLING)
        fake_quantise(own_model.bfloat16().float(), scheme, torch.bfloat16)
        _, mean = largest_and_mean_gap(own_model, requests, responses.values(), SAMPLING)
        assert mean <= 0.08, "the rounding of bfloat16"
    finally:
        engine.close()


@pytest.mark.slow
def test_two_tensor_parallel_ranks_quantise_their_own_parts(own_folder: Path):
    program = """
        import sys
        import torch
        import test_quantised_weights as t
        from weft.resharding.publisher import WeightPublisher
        from weft.workers.generation.transformers_engine import TransformersEngine
        from weft.workers.generation.vllm_engine import VllmEngine
        from weft.workers.generation.vllm_settings import VllmSettings

        if __name__ == "__main__":
            model, publisher = TransformersEngine(sys.argv[1]).model, WeightPublisher()
            settings = VllmSettings(
                tensor_parallel=2, max_num_seqs=64, kv_cache_gib=0.05, quantization="int8"
            )
            engine = VllmEngine(sys.argv[1], settings)
            t.scaled(model, 1.2)
            weights = t.published(model, publisher, version=1, scale=1.0)
            assert engine.update_weights(weights) == publisher.finish()
            requests = t.requests_of(t.prompts_of(6))
            responses = t.all_of(engine, requests, t.SAMPLING)
            _, mean = t.largest_and_mean_gap(model, requests, responses.values(), t.SAMPLING)
            assert 1e-3 <= mean <= 0.2, mean
            engine.close()
            print("done", flush=True)
    """
    run_apart(program, own_folder)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int8", "fp8", "w4a16"])
def test_a_gpu_follows_new_weights(
    own_folder: Path, own_model: Any, publisher: WeightPublisher, scheme: Quantization
):
    used = settings(scheme).model_copy(update={"gpu_memory_utilization": 0.3})
    engine = VllmEngine(str(own_folder), used, dtype="bfloat16")
    requests = requests_of(prompts_of(6))
    try:
        for number in (1, 2):
            scaled(own_model, 1.2)
            engine.update_weights(published(own_model, publisher, version=number, scale=1.0))
            responses = all_of(engine, requests, SAMPLING)
            _, mean = largest_and_mean_gap(own_model, requests, responses.values(), SAMPLING)
            assert mean <= (0.5 if scheme == "w4a16" else 0.2)
            if scheme == "w4a16":  # activations are exact
                for name, weight in projections(engine).items():
                    exact = dequantised(weight_of(own_model, name, torch.bfloat16), scheme)
                    assert (weight.double() - exact).abs().max() <= 0.02 * exact.abs().max()
    finally:
        engine.close()


# Runs


@weft.node(reads=("response_ids",), writes=("reward",))
def parity(batch: Batch) -> Batch:
    return batch.with_columns(reward=[float(sum(ids) % 2) for ids in batch["response_ids"].to_pylist()])


class Parity:
    """Stands in for a group of reward workers."""

    score = staticmethod(parity)


@pytest.mark.thorough
def test_a_run_measures_the_gap_of_its_quantised_rollouts(own_folder: Path, tmp_path: Path):
    import pyarrow as pa

    (own_folder / "tokenizer.json").write_text("{}")
    actor = weft.group(weft.ActorWorker, model=str(own_folder), learning_rate=1e-4)
    rollout = weft.group(
        weft.RolloutWorker,
        model=str(own_folder),
        quantization="int8",
        kv_cache_gib=0.05,
        max_num_seqs=16,
    )
    rollout.follows(actor)
    graph = grpo(
        weft.TableSource("prompts", pa.table({"prompt_ids": [[5, 6, 7], [8, 9], [10, 11], [12]]})),
        rollout=rollout,
        reward=Parity(),
        actor=actor,
        n=4,
        sampling=Sampling(max_tokens=12),
        loss=PolicyLoss(correction=TruncatedImportance()),
    )
    schedule = weft.Synchronous(steps=2, prompts_per_step=4)
    with weft.Driver(graph, schedule=schedule, root=tmp_path, name="run", progress=False) as driver:
        _, *rows = driver.run()
    for row in rows:
        assert 1e-3 < row["actor/mean_logprob_gap"] < 0.3 and row["actor/mean_importance_weight"] > 0
    gaps = [row["actor/mean_logprob_gap"] for row in rows]
    told = [alert for alert in read_alerts(tmp_path / "run") if alert.name == "quantised_gap"]
    assert bool(told) == (max(gaps) > 0.05 or max(r["actor/generator_kl_k3"] for r in rows) > 0.01)
