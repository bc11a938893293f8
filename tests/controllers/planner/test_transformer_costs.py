"""Costs of transformers: cases by hand and from papers, fits, and what predictions state."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.controllers.planner.devices import device
from weft.controllers.planner.transformer_costs import (
    ASSUMED_BANDWIDTH,
    ASSUMED_UTILISATION,
    UTILISATION_ERROR,
    TransformerCosts,
    batch_seconds,
    best_checkpoints,
    best_microbatch,
    fit_decode,
    gradient_bytes,
    max_concurrent,
    roofline_s,
    stage_bytes,
    tensor_parallel_bytes,
)
from weft.controllers.simulation.costs import LogNormal
from weft.dataflow.errors import UserError
from weft.workers.models.transformer import Transformer
from weft.workers.training.pipeline_schedule import interleaved, one_forward_one_backward, run

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
}
H100 = device("H100")
COSTS = TransformerCosts(Transformer.of(QWEN), H100)


# Megatron-LM's cases (arXiv:2104.04473)


@pytest.mark.parametrize(
    ("flops", "devices", "rate", "seconds"),
    [
        (4.5109707533231063e18, 96, 140e12, 335.6377048603502),
        (2.221594167685939e19, 2520, 163e12, 54.084968538463805),
    ],
)
def test_an_iteration_takes_its_operations_at_the_measured_rate(
    flops: float, devices: int, rate: float, seconds: float
):
    assert roofline_s(0, flops / devices, bandwidth=1, peak_flops=rate) == pytest.approx(seconds)


def test_devices_exchange_megatrons_bytes():
    assert stage_bytes(2048, 12_288) == 50_331_648
    assert stage_bytes(2048, 12_288, tensor=8) == 6_291_456
    assert stage_bytes(2048, 20_480) == 83_886_080
    assert stage_bytes(2048, 20_480, tensor=8) == 10_485_760
    assert tensor_parallel_bytes(2048, 12_288, tensor=8) == 352_321_536
    assert tensor_parallel_bytes(2048, 20_480, tensor=8) == 587_202_560
    assert tensor_parallel_bytes(2048, 12_288, tensor=1) == 0
    assert gradient_bytes(529_600_778_240 / (35 * 8), data=9) == pytest.approx(6725089247.4920635)
    assert gradient_bytes(174_615_822_336 / 96, data=1) == 0


def test_the_bubble_is_that_of_the_schedule():
    assert one_forward_one_backward(12, 1536).bubble == pytest.approx(0.007161458333333333)
    assert one_forward_one_backward(35, 280).bubble == pytest.approx(0.12142857142857143)
    assert interleaved(4, 8, 2).bubble == 3 / 16


@pytest.mark.parametrize(("stages", "number", "seconds", "ideal"), [(2, 4, 15, 12), (4, 3, 18, 9)])
def test_a_pipeline_takes_the_time_of_the_formula(
    stages: int, number: int, seconds: float, ideal: float
):
    played = run(one_forward_one_backward(stages, number), 1.0, 2.0)
    assert played.seconds == seconds == batch_seconds(number, 1, stages, 1.0, 2.0)
    assert max(played.busy_s) == ideal


def test_the_best_microbatch_depends_on_the_batch():
    forward = {1: 10.0, 2: 16.0, 4: 29.0, 8: 56.0, 16: 111.0}
    backward = {1: 20.0, 2: 32.0, 4: 58.0, 8: 112.0, 16: 222.0}
    assert best_microbatch(128, 8, forward, backward) == 4
    assert batch_seconds(128, 4, 8, forward[4], backward[4]) == 3393
    assert best_microbatch(16, 8, forward, backward) == 1
    assert batch_seconds(16, 1, 8, forward[1], backward[1]) == 690


def test_the_best_number_of_checkpoints_has_the_least_memory():
    best = best_checkpoints(96, 1, 34)
    assert best == pytest.approx(57.1314274283428)

    def memory(number: float) -> float:
        return number * 1 + 96 / number * 34

    assert memory(best) <= min(memory(number) for number in range(1, 97))


# Decoding and keys and values


def test_a_decode_step_reads_weights_keys_and_values():
    rates: dict[str, float] = {"bandwidth": 2e12, "peak_flops": 312e12}
    assert roofline_s(2 * 7e9, 2 * 7e9, **rates) == 0.007
    assert roofline_s(2 * 34e9 + 12_288_000_000, 2 * 34e9, **rates) == pytest.approx(0.040144)
    assert roofline_s(2 * 7e9, 2 * 7e9 * 1000, **rates) == pytest.approx(14e12 / 312e12)


@pytest.mark.parametrize(
    ("weights", "tensor", "bytes_a_sequence", "most"),
    [(68e9, 1, 12_288_000_000, 0), (68e9, 2, 12_288_000_000, 7), (15.231e9, 1, 1_879_048_192, 34)],
    ids=["Yi on one GPU", "Yi on two", "Qwen"],
)
def test_as_many_users_fit_as_have_room_beside_the_weights(
    weights: float, tensor: int, bytes_a_sequence: float, most: int
):
    assert max_concurrent(80e9 * tensor - weights, bytes_a_sequence) == most


def test_sequences_fit_beside_the_weights_of_a_model():
    assert COSTS.concurrent(32_768, share=1.0) == 34
    assert COSTS.concurrent(32_768) == 30, "8 GB less"
    assert replace(COSTS, device=device("L40S")).concurrent(32_768) == 14
    two = replace(COSTS, tensor=2)
    assert two.concurrent(32_768, share=1.0) == 77, "(160 - 15.231) / 1.879"


def test_devices_beyond_the_key_heads_hold_copies_of_keys():
    fourteen = replace(COSTS, tensor=14)
    assert fourteen.kv_bytes(100) == COSTS.kv_bytes(100) / 4


def test_the_roofline_is_that_of_bytes_or_of_operations():
    small = COSTS.least_decode_s(1, 1000)
    read = 2 * (COSTS.model.products + COSTS.model.head_products) + COSTS.model.kv_bytes(1000)
    assert small == pytest.approx(read / 3.35e12)
    large = COSTS.least_decode_s(4096, 0)
    flops = 2 * 4096 * (COSTS.model.products + COSTS.model.head_products)
    assert large == pytest.approx(flops / 989.5e12, rel=1e-3)
    assert replace(COSTS, tensor=4).least_decode_s(1, 1000) == pytest.approx(small / 4)


def test_a_fit_finds_the_terms_of_measured_steps():
    def roofline(batch: int) -> float:
        return 1e-3 * batch**0.5

    batches = (1, 4, 16, 64, 256)
    steps = {batch: 1.5 * roofline(batch) + 2e-5 * batch + 3e-3 for batch in batches}
    found = fit_decode(steps, roofline)
    assert (found.scale, found.per_row_s, found.fixed_s) == pytest.approx((1.5, 2e-5, 3e-3))
    assert found.error == pytest.approx(0, abs=1e-6)


def test_fitted_costs_predict_steps_between_the_measured_ones():
    def measured(batch: int) -> float:
        return 1.5 * COSTS.least_decode_s(batch, 500) + 2e-5 * batch + 3e-3

    costs = COSTS.fitted({batch: measured(batch) for batch in (1, 4, 16, 64, 256)}, context=500)
    step = costs.decode_step(100, 500)
    assert step.seconds == pytest.approx(measured(100))
    assert step.source == "roofline of H100: 5 measured batches"
    assert step.error == pytest.approx(0, abs=1e-6)


def test_the_error_of_a_fit_is_that_of_unseen_batches():
    def flat(batch: int) -> float:
        return 1.0

    # The first three batches fit 1 + batch, which predicts 9 instead of 12 for the last one.
    found = fit_decode({1: 2.0, 2: 3.0, 4: 5.0, 8: 12.0}, flat)
    assert found.error is not None and found.error >= 0.25
    assert fit_decode({1: 2.0, 2: 3.0}, flat).error is None
    noise = np.random.default_rng(0).normal(1, 0.02, 6)
    noisy = {2**k: (1 + 0.1 * 2**k) * noise[k] for k in range(6)}
    assert 0 < (fit_decode(noisy, flat).error or 0) < 0.2
    with pytest.raises(UserError, match=r"needs seconds above 0 by batch, not \{1: 0.0\}"):
        fit_decode({1: 0.0}, flat)
    with pytest.raises(UserError, match="needs seconds above 0"):
        fit_decode({}, flat)


# Passes


def test_a_pass_takes_its_operations_at_the_assumed_or_measured_utilisation():
    flops = COSTS.model.training_flops([4096] * 2, predicted=[3072] * 2)
    assumed = COSTS.training([4096] * 2, predicted=[3072] * 2)
    assert assumed.seconds == pytest.approx(flops / (989.5e12 * ASSUMED_UTILISATION))
    assert assumed.error == UTILISATION_ERROR
    assert str(assumed).endswith("± 40%; table of devices: 35% of the peak of H100, assumed)")
    measured = replace(COSTS, utilisation=0.5).training([4096] * 2, predicted=[3072] * 2)
    assert measured.seconds == pytest.approx(flops / (989.5e12 * 0.5))
    assert measured.source.endswith("50% of the peak of H100, measured") and measured.error is None
    assert COSTS.forward([4096] * 2, predicted=[3072] * 2).seconds == pytest.approx(assumed.seconds / 3)


def test_tensor_parallel_passes_also_exchange_activations():
    one, four = COSTS.training(4096), replace(COSTS, tensor=4).training(4096)
    sent = 28 * tensor_parallel_bytes(4096, 3584, 4)
    assert four.seconds == pytest.approx(one.seconds / 4 + sent / 450e9)


def test_decoding_states_its_source_and_error():
    step = COSTS.decode_step(1, 0)
    assert step.seconds == pytest.approx(COSTS.least_decode_s(1, 0) / ASSUMED_BANDWIDTH)
    assert step.source == "roofline of H100: 60% of the peak bandwidth, assumed" and step.error == 0.5


def test_the_simulator_gets_decode_steps_and_updates():
    lengths = LogNormal(mean=100, max_tokens=400)
    cost = COSTS.generation(lengths, context=1500, max_num_seqs=100, prompt_tokens=1000)
    seconds = cost.seconds_by_batch(100)
    for batch in (1, 64, 100):
        assert seconds[batch] == pytest.approx(COSTS.decode_step(batch, 1500).seconds)
    assert cost.prefill_s == pytest.approx(COSTS.forward(1000).seconds / 1000)
    alone = COSTS.update_cost(2000, predicted=1500)
    parameters = COSTS.model.parameters
    assert alone.per_token_s == pytest.approx(COSTS.training(2000, predicted=1500).seconds / 2000)
    assert alone.fixed_s == pytest.approx(28 * parameters / (3.35e12 * ASSUMED_BANDWIDTH))
    eight = COSTS.update_cost(2000, predicted=1500, data=8, bandwidth=50e9)
    exchanged = 2 * 7 / 8 * parameters * 4 / 50e9
    assert eight.fixed_s == pytest.approx(alone.fixed_s / 8 + exchanged)
    assert COSTS.update_cost(2000, data=8, adapter=True).fixed_s == 0


def test_costs_need_only_the_settings_of_a_model(tmp_path: Path):
    import json

    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert TransformerCosts.of(tmp_path, H100, tensor=2) == replace(COSTS, tensor=2)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="tensor=5 does not divide the model's 28 attention heads"):
        replace(COSTS, tensor=5)
    with pytest.raises(UserError, match="device 'CPU' has no peak for dtype 'bfloat16'"):
        replace(COSTS, device=device("CPU"))
    assert replace(COSTS, device=device("CPU"), dtype="float32").forward(10).seconds > 0
