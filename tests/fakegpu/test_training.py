"""Device memory, copies and synchronisations of the training engine."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
GIB = 2**30
pytestmark = pytest.mark.fakegpu


LONG = {"ROWS": 16, "PROMPT": 1024, "RESPONSE": 2048}
SHORT = {"ROWS": 8, "PROMPT": 20, "RESPONSE": 40}


def phases(found: dict[str, Any], name: str) -> list[dict[str, int]]:
    return [phase for phase in found["phases"] if phase["phase"] == name]


def test_checkpointing_keeps_no_products_of_an_adapter(run_on_fake_gpu: Run):
    """With them, the model needs more than 80 GiB."""
    settings = json.dumps({"lora": {}, "activation_checkpointing": "elementwise"})
    found = run_on_fake_gpu("train.py", MODEL="Qwen3-8B", SETTINGS=settings, SHIM_SKIP=1, **LONG)
    assert max(phase["peak"] for phase in found["phases"]) < 71 * GIB


def test_checkpointing_keeps_the_results_of_attention(run_on_fake_gpu: Run):
    def computed(again: object) -> int:
        settings = json.dumps({"activation_checkpointing": again})
        found = run_on_fake_gpu("train.py", MODEL="tiny", SETTINGS=settings, **SHORT)
        return found["attentions"] // found["microbatches"]

    # 4 layers, each with one call for shared prompts and one for responses
    assert (computed(False), computed("elementwise"), computed(True)) == (8, 8, 16)


def test_an_error_names_the_memory_in_use(run_on_fake_gpu: Run):
    found = run_on_fake_gpu("train.py", MODEL="tiny", SETTINGS="{}", LIMIT_MIB=44, **SHORT)
    error = found["error"]
    assert re.match(
        r"the GPU \(80.0 GiB\) ran out of memory: this process used 0.0 GiB and cached ", error
    )
    assert re.search(r" during a forward and backward pass and asked for [\d.]+ [KM]iB more\. ", error)
    assert 'microbatch_tokens=8192 (now 16384); activation_checkpointing="elementwise"; ' in error


@pytest.mark.parametrize("settings", [{}, {"lora": {}}, {"offload": "moments"}])
def test_a_turn_copies_each_tensor_once_through_one_block(
    run_on_fake_gpu: Run, settings: dict[str, Any]
):
    found = run_on_fake_gpu("train.py", MODEL="tiny", SETTINGS=json.dumps(settings), **SHORT)
    assert found["unchanged"] and found["same_places"]
    first, second = phases(found, "offload")
    for turn in (first, second, *phases(found, "onload")):
        assert turn["syncs"] == 1
    # Frozen parameters do not change, so their copies stay.
    assert first["d2h"] == found["on_device"]
    assert second["d2h"] == found["on_device"] - found["frozen"]
    assert all(turn["h2d"] == found["on_device"] for turn in phases(found, "onload"))


@pytest.mark.parametrize("again", [False, True])
def test_a_step_reads_little_from_the_device(run_on_fake_gpu: Run, again: bool):
    """Up to 4 synchronisations a microbatch, and bytes for tokens only."""
    settings = json.dumps({"activation_checkpointing": again, "microbatch_tokens": 120})
    found = run_on_fake_gpu("train.py", MODEL="tiny", SETTINGS=settings, **SHORT)
    assert found["microbatches"] > 3
    for step in phases(found, "accumulate"):
        assert step["syncs"] <= 4 * found["microbatches"]
        assert step["d2h"] <= 64 * found["microbatches"]
