"""Hardware expectations: the first training layout that fits, and the tables in the docs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_tables as module
import pytest
from gpu_tables import ADAPTER, MACHINES, MODELS, WAYS, Machine, expected, first_that_fits, table

from weft.controllers.planner.phase_memory import ASLEEP, CUDA, with_activations
from weft.dataflow.byte_units import GIB
from weft.workers.actor import ActorConfig
from weft.workers.training.memory import ModelSize, training_memory

DOCS = Path(__file__).parents[3] / "docs" / "gpu.md"
MODEL = "Qwen2.5-0.5B"
PARAMETERS = 494_032_768
"""Parameters of the model, from its model card."""


def without_activations(*_: Any) -> int:
    return 0


def test_each_way_takes_less_of_a_gpu_than_the_one_before(monkeypatch: pytest.MonkeyPatch):
    again: list[Any] = [False, "elementwise", True]
    monkeypatch.setattr(module, "_activations", lambda _, __, ___, which: (3 - again.index(which)) * GIB)
    found = [one for way in WAYS if (one := expected(MODEL, Machine(1, 24, 4096), way))]
    assert [one.device for one in found] == sorted((one.device for one in found), reverse=True)
    none, moments, everything = found[0], found[3], found[4]
    assert none.device == CUDA + ASLEEP + 3 * GIB + PARAMETERS * (3 * 4 + 4 + 2)
    # Weights and moments move to the host in any case; small pinned blocks are rounded.
    assert 0 <= moments.host - none.host < 0.01 * none.host
    assert 4 * PARAMETERS < everything.host - none.host < 7 * PARAMETERS


def test_a_way_whose_weights_alone_are_too_large_needs_no_pass(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> int:
        raise AssertionError("no pass is planned")

    monkeypatch.setattr(module, "_activations", refuse)
    assert expected(MODEL, Machine(1, 8, 4096), {}) is None


def test_the_largest_gradients_of_one_rank_come_when_its_activations_and_weights_are_gone():
    streamed = ActorConfig(model="m", offload="everything")
    size = ModelSize(
        {"embed": (10, 2), "norm": (2,), **{f"layers.{n}.up": (3, 4) for n in range(2)}},
        vocabulary=10,
        layers=2,
    )
    made = training_memory(size, streamed, ranks=1, trains=True, lora=None, saves=False)
    weights, layer, outer = (20 + 13) * 4, 2 * 13 * 4, 2 * 20 * 4
    assert (made.gathered, made.exchanged, made.outer_gradients) == (weights, layer, outer)
    rest = {"gathered weights": weights}
    assert sum(with_activations(rest, 20, made).values()) == weights + 20 + layer
    large = replace(made, outer_gradients=1000)
    assert sum(with_activations(rest, 20, large).values()) == 1000
    shared = training_memory(size, streamed, ranks=2, trains=True, lora=None, saves=False)
    assert (
        shared.outer_gradients == 0
        and sum(with_activations({}, 7, shared).values()) == shared.exchanged + 7
    )


def test_the_first_layout_that_fits_is_used_if_any(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_activations", without_activations)
    roomy, tight = (first_that_fits(MODEL, Machine(1, gib, 4096), None) for gib in (24, 13))
    assert roomy is not None and roomy.settings == {}
    assert tight is not None and tight.settings["offload"] == "moments"
    assert first_that_fits(MODEL, Machine(1, 2, 4096), None) is None


def test_the_docs_have_a_row_of_each_model_on_each_machine():
    docs = DOCS.read_text()
    for machine in MACHINES:
        title = (
            f"### {machine.gpus} x {machine.gib} GB, passes of {machine.microbatch_tokens:,} tokens\n"
        )
        part = docs.partition(title)[2].partition("\n###")[0]
        rows = [
            line.split(" | ")[:2]
            for line in part.splitlines()
            if line.startswith("| ") and "---" not in line
        ]
        assert rows[1:] == [[f"| {model}", what] for model in MODELS for what in ("all", "adapter")]


@pytest.mark.slow
def test_the_docs_match_the_commands_output(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MODELS", {MODEL: MODELS[MODEL]})
    docs = DOCS.read_text()
    for machine in MACHINES:
        for line in table(machine):
            assert line in docs
    assert first_that_fits(MODEL, MACHINES[0], ADAPTER) is not None


def test_offload_rounds_small_pinned_blocks_and_holds_the_largest_gradients_twice():
    size = ModelSize(
        {"embed": (48, 1 << 18), "layers.0.up": (3, 1 << 18)},  # 48 and 3 MiB in float32
        vocabulary=48,
        layers=1,
    )

    def extra(**settings: Any) -> tuple[int, int]:
        config = ActorConfig(model="m", **settings)
        made = training_memory(size, config, ranks=1, trains=True, lora=None, saves=False)
        return made.rounding >> 20, made.added >> 20

    assert extra() == (0, 0)
    assert extra(offload="moments") == (2 * 1, 0)
    # A parameter and its gradient take 4 MiB each; the embedding's gradient is there twice.
    assert extra(offload="everything") == (2 * 1, 48)
