"""Throughput and utilisation of groups, against their calls counted by hand."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from simulated_runs import KNOWN, Actor, Rollout, costs
from toy import ToyConfig, ToyReward, prompts, toy_grpo

from weft.controllers.backends.process_diagnostics import Memory
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.planner.devices import device
from weft.controllers.schedule import Asynchronous, Synchronous, Training
from weft.controllers.simulation.backend import Simulated
from weft.dataflow.graph import group
from weft.workers.models.transformer import Transformer
from weft.workers.training.lora import Lora

SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
MODEL = Transformer.of(SIZES)
LENGTHS = {0: (2, KNOWN[0]), 1: (3, KNOWN[1])}
"""Position -> tokens of the prompt, and of the two responses."""


class OnGpus(Simulated):
    gpu = "NVIDIA H100 80GB HBM3"

    def memory(self) -> Mapping[str, Memory]:
        return {node: Memory({}, gpu=self.gpu) for node in self.nodes}


class TrainedConfig(ToyConfig):
    head: str = "logprobs"
    lora: Lora | None = None
    dtype: str = "bfloat16"


class Trained(Actor):
    Config = TrainedConfig


class SharesPrompts(Trained):
    @classmethod
    def shares_prompts(cls, config: Any) -> bool:
        return True


def on_gpus(rollout: int = 1, actor: int = 1) -> dict[str, Place]:
    return {
        "rollout": Place(ResourcePool("generating", gpus=rollout), rollout),
        "actor": Place(ResourcePool("training", gpus=actor), actor),
    }


def run(
    root: Path,
    placement: dict[str, Place] | None,
    *,
    worker: type[Trained] = Trained,
    backend: Simulated | None = None,
    schedule: Training = Synchronous(steps=2, prompts_per_step=2),
    **settings: Any,
) -> Driver:
    """Run two steps of two prompts on a model in a folder."""
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SIZES))
    handles = {
        "rollout": group(Rollout, model=str(model)),
        "reward": group(ToyReward),
        "actor": group(worker, model=str(model), **settings),
    }
    handles["rollout"].follows(handles["actor"])
    driver = Driver(
        toy_grpo(prompts(2), n=2, **handles),
        schedule=schedule,
        placement=placement,
        backend=backend or OnGpus(costs(KNOWN)),
        root=root,
        name="run",
        progress=False,
        record_every=0,
    )
    with driver:
        driver.run()
    return driver


def seconds_of(driver: Driver, node: str, step: int) -> float:
    """Return the length of the only call of a node in a step."""
    (call,) = (c for c in driver.directory.timeline if c["node"] == node and c["step"] == step)
    return call["end_s"] - call["start_s"]


def test_generation_counts_prompts_once_and_each_response(tmp_path: Path):
    driver = run(tmp_path, on_gpus())
    flops = 0.0
    for prompt, responses in LENGTHS.values():
        flops += MODEL.forward_flops(prompt, predicted=1)
        flops += sum(MODEL.forward_flops(n, after=prompt, predicted=n) for n in responses)
    for step in (1, 2):
        row, seconds = driver.directory.metrics[step], seconds_of(driver, "rollout.generate", step)
        assert row["rollout/tokens_per_s_per_device"] == pytest.approx((3 + 5 + 2 + 7) / seconds)
        assert row["rollout/flops_utilisation"] == pytest.approx(flops / (seconds * 989.5e12))


@pytest.mark.parametrize("worker", [Trained, SharesPrompts])
@pytest.mark.parametrize(
    "settings", [{}, {"lora": Lora(rank=2)}, {"head": "values"}], ids=["all", "adapter", "critic"]
)
def test_an_update_counts_what_it_needs(tmp_path: Path, worker: type[Trained], settings: dict[str, Any]):
    driver = run(tmp_path, on_gpus(), worker=worker, **settings)
    flops, about = 0.0, {"adapter": "lora" in settings}
    for prompt, responses in LENGTHS.values():
        if worker is SharesPrompts:
            flops += MODEL.training_flops(prompt, **about)
        for n in responses:
            predicted = 0 if "head" in settings else n
            if worker is SharesPrompts:
                flops += MODEL.training_flops(n, after=prompt, predicted=predicted, **about)
            else:
                flops += MODEL.training_flops(prompt + n, predicted=predicted, **about)
    row, seconds = driver.directory.metrics[1], seconds_of(driver, "actor.update", 1)
    assert row["actor/tokens_per_s_per_device"] == pytest.approx((12 + 15) / seconds)
    assert row["actor/flops_utilisation"] == pytest.approx(flops / (seconds * 989.5e12))


def test_several_devices_share_the_work(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = run(tmp_path / "one", on_gpus())
    two = run(tmp_path / "two", on_gpus(2, 2))
    for name, node in (("rollout", "rollout.generate"), ("actor", "actor.update")):
        device_s = [seconds_of(one, node, 1), 2 * seconds_of(two, node, 1)]
        for metric in ("tokens_per_s_per_device", "flops_utilisation"):
            work = [
                driver.directory.metrics[1][f"{name}/{metric}"] * seconds
                for driver, seconds in zip((one, two), device_s, strict=True)
            ]
            assert work[0] == pytest.approx(work[1]), (name, metric)


def test_the_dtype_of_a_group_decides_its_peak(tmp_path: Path):
    (tmp_path / "half").mkdir()
    (tmp_path / "single").mkdir()
    half = run(tmp_path / "half", on_gpus(), dtype="bfloat16")
    single = run(tmp_path / "single", on_gpus(), dtype="float32")
    used = [d.directory.metrics[1]["actor/flops_utilisation"] for d in (half, single)]
    rates = device("H100").flops
    assert used[1] / used[0] == pytest.approx(rates["bfloat16"] / rates["float32"])


def test_unknown_gpus_and_cpus_have_tokens_alone(tmp_path: Path):
    class Unknown(OnGpus):
        gpu = "NVIDIA GeForce RTX 4090"

    (tmp_path / "gpus").mkdir()
    (tmp_path / "cpus").mkdir()
    unknown = run(tmp_path / "gpus", on_gpus(), backend=Unknown(costs(KNOWN)))
    cpus = run(tmp_path / "cpus", None)
    for driver in (unknown, cpus):
        row = driver.directory.metrics[1]
        assert row["rollout/tokens_per_s_per_device"] > 0 and row["actor/tokens_per_s_per_device"] > 0
        assert not any("flops_utilisation" in name for name in row)
        assert "reward/tokens_per_s_per_device" not in row, "it has no model"


def test_all_tokens_are_counted_once_under_any_schedule(tmp_path: Path):
    schedule = Asynchronous(steps=4, prompts_per_step=2, max_staleness=1)
    driver = run(tmp_path, on_gpus(), schedule=schedule)
    counted = 0.0
    for before, row in pairwise(driver.directory.metrics):
        updating_s = sum(
            max(0.0, min(call["end_s"], row["time_s"]) - max(call["start_s"], before["time_s"]))
            for call in driver.directory.timeline
            if call["node"] == "actor.update"
        )
        counted += row["actor/tokens_per_s_per_device"] * updating_s
    assert counted == pytest.approx(4 * (12 + 15))
