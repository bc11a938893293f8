"""The benchmark for GPUs: models, arithmetic and summary; and the whole program on a CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

PARAMETERS = {"0.6B": 596_049_920, "1.5B": 1_543_714_304, "8B": 8_190_735_360}
"""Numbers that the model cards give, exactly."""


def skeleton(model: Any, folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(model.settings))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), attn_implementation="sdpa"
        )


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_exactly_the_parameters_of_those_they_are_named_for(
    load: Any, tmp_path: Path, name: str
):
    made = skeleton(load("gpu/gpu_model").MODELS[name], tmp_path)
    assert sum(parameter.numel() for parameter in made.parameters()) == PARAMETERS[name]


def small_work(load: Any, **sizes: int) -> Any:
    gpu = load("gpu")
    asked = gpu.parse_arguments(["--small"])
    for name, value in sizes.items():
        setattr(asked, name, value)
    return gpu.work_of("tiny", asked)


def test_an_update_computes_each_prompt_once_and_the_head_for_responses(load: Any):
    model = load("gpu/gpu_model").MODELS["tiny"]
    one, eight = (
        small_work(load, prompts=1, samples=samples, prompt_tokens=384, response_tokens=128)
        for samples in (1, 8)
    )
    # By hand, for 2 layers: attention of 2 query heads and 1 key head of 32, an MLP of 128.
    layers = 2 * (2 * 64 * 32 * (2 + 1) + 3 * 64 * 128)
    pairs = 512 * 513 / 2
    expected = 3 * 2 * (512 * layers + 128 * 64 * 256 + 2 * 2 * 64 * pairs)
    assert model.training_flops(one, adapter=False) == expected
    assert model.training_flops(one, adapter=True) == expected - 2 * (512 * layers + 128 * 64 * 256)
    more = 7 * 3 * 2 * (128 * (layers + 64 * 256) + 2 * 2 * 64 * (pairs - 384 * 385 / 2))
    assert model.training_flops(eight, adapter=False) == expected + more


def test_a_written_model_loads_with_all_of_its_weights(load: Any, tmp_path: Path):
    module = load("gpu/gpu_model")
    module.write(tmp_path, module.MODELS["tiny"], small_work(load), "float32")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    made, told = loaded
    assert not any(told[which] for which in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert 0.01 < made.get_input_embeddings().weight.std().item() < 0.03
    prompts = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["prompt"].split()) for line in prompts] == [16, 16]


def test_figures_are_those_of_the_median_step(load: Any):
    gpu, model = load("gpu"), load("gpu/gpu_model").MODELS["tiny"]
    work = small_work(load)

    def step(seconds: float) -> dict[str, Any]:
        ends = {"rollout.generate": 0.5, "onload": 0.6, "actor.update": 1.0}
        begins = {"rollout.generate": 0.0, "onload": 0.5, "actor.update": 0.6}
        calls = [
            {"node": n, "start_s": seconds * begins[n], "end_s": seconds * end, "worker_s": 0.0}
            for n, end in ends.items()
        ]
        return {"step_s": seconds, "calls": calls}

    weft = [step(seconds) for seconds in (2.0, 2.0, 2.0)]
    found = gpu.summarize("tiny", 4, work, weft, [{"step_s": 5.0}], 1e9)
    assert found["tokens_per_s"] == 2 * 4 * 24 / 2.0 and found["tokens_per_s_per_gpu"] == 24.0
    assert found["phases"] == {"update": 0.8, "generate": 1.0, "turns": 0.2}
    assert found["mfu"] == pytest.approx(model.training_flops(work, adapter=False) / 8e9, abs=1e-4)
    assert found["update_mfu"] == pytest.approx(found["mfu"] / 0.4, abs=2e-4)
    assert (found["trl_step_s"], found["ratio_to_trl"]) == (5.0, 2.5)
    alone = gpu.summarize("tiny", 4, work, weft, [], 1e9)
    assert alone["trl_step_s"] is None and alone["ratio_to_trl"] is None


def test_a_machine_without_gpus_is_told_so(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "machine_gpus", lambda: 0)
    with pytest.raises(SystemExit, match="2"):
        gpu.parse_arguments(["--models", "8B"])
    assert "this machine has no GPUs; use --small" in capsys.readouterr().err
    monkeypatch.setattr(gpu, "machine_gpus", lambda: 8)
    asked = gpu.parse_arguments([])
    assert asked.gpus == [1, 8] and asked.models == ["0.6B", "1.5B", "8B"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_the_small_run_measures_weft_with_vllm_on_a_cpu(load: Any):
    program = Path(load("gpu").__file__)
    done = subprocess.run(
        [sys.executable, str(program), "--small", "--no-peers"],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    (figures,) = found["results"].values()
    assert figures["device"] == "CPU" and figures["steps"] == 1
    assert 0 < figures["mfu"] < figures["update_mfu"] < 1
    assert {"generate", "update", "weights"} <= figures["phases"].keys()
    assert sum(figures["phases"].values()) == pytest.approx(figures["step_s"], rel=0.01)
    assert len(found["published"]["steps"]) == 10
