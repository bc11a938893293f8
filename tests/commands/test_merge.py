"""`weft merge`: averages of models and adapters, compared with sums of their weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from weft.__main__ import main
from weft.dataflow.runs.manifest import write_manifest


def model(folder: Path, seed: int) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, vocab_size=40, num_attention_heads=1, num_key_value_heads=1)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def adapter(folder: Path, base: Path, seed: int, rank: int) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    made = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=rank, lora_alpha=3 * rank + seed, target_modules=["q_proj", "up_proj"]),
    )
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(str(folder))
    return folder


@pytest.fixture
def saved(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """runs/two with a place for a model in each checkpoint."""
    run = Path(shutil.copytree(done / "two", tmp_path / "runs" / "two"))
    monkeypatch.chdir(tmp_path)
    return [path / "actor" / "model" for path in sorted((run / "checkpoints").glob("step_*"))]


def complete(models: list[Path]) -> None:
    for folder in models:
        (folder.parents[1] / "manifest.json").unlink()
        write_manifest(folder.parents[1])


def weights_of(folder: Path | str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def test_checkpoints_are_averaged_equally_or_by_a_metric(
    saved: list[Path], capsys: pytest.CaptureFixture[str]
):
    for seed, folder in enumerate(saved):
        model(folder, seed)
    complete(saved)
    assert main(["merge", "two", "--out", "even"]) == 0
    assert "the average of 2 checkpoints\n  0.500  runs/two" in capsys.readouterr().out
    one, two = map(weights_of, saved)
    for name, tensor in weights_of("even").items():
        torch.testing.assert_close(tensor, (one[name] + two[name]) / 2)
    table = pq.read_table("runs/two/metrics.parquet")
    scores = pa.array([{2: 0.2, 3: 0.4}.get(int(step)) for step in table["step"].to_pylist()])
    pq.write_table(table.append_column("eval/score", scores), "runs/two/metrics.parquet")
    assert main(["merge", "two", "--out", "good", "--by", "eval/score", "--alpha", "2", "--json"]) == 0
    shares = list(json.loads(capsys.readouterr().out)["weights"].values())
    assert shares == pytest.approx([0.2, 0.8])
    for name, tensor in weights_of("good").items():
        torch.testing.assert_close(tensor, 0.2 * one[name] + 0.8 * two[name])
    steep = ["merge", "two", "--out", "steep", "--by", "eval/score", "--alpha", "5000", "--json"]
    assert main(steep) == 0
    assert list(json.loads(capsys.readouterr().out)["weights"].values()) == [0.0, 1.0]
    assert main(["merge", "two", "--out", "last", "--last", "1"]) == 0
    assert all(torch.equal(t, two[n]) for n, t in weights_of("last").items())
    for words, says in (
        (["--out", "good"], "good exists already"),
        (["--out", "x", "--by", "eval/scroe"], "has no 'eval/scroe' at step 2"),
        (["--out", "x", "--last", "0"], "--last 0: it must be at least 1"),
        (["--out", "x", "--alpha", "nan"], "--alpha nan: it must be 0 or more"),
    ):
        assert main(["merge", "two", *words]) == 2
        assert says in capsys.readouterr().err
    assert not Path("x").exists() and not list(Path().glob(".x*"))


def test_adapters_of_different_ranks_become_the_average_of_their_changes(
    saved: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = model(tmp_path / "base", 0)

    def merged(folder: Path | str) -> dict[str, torch.Tensor]:
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(loaded, str(folder)).merge_and_unload().state_dict()  # pyright: ignore[reportCallIssue]

    adapter(saved[0], base, 0, 2)
    adapter(saved[1], base, 1, 4)
    complete(saved)
    assert main(["merge", "two", "--out", "joined"]) == 0
    assert json.loads(Path("joined/adapter_config.json").read_text())["r"] == 6
    one, two, found = merged(saved[0]), merged(saved[1]), merged("joined")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (one[name] + two[name]) / 2, atol=1e-6, rtol=1e-5)
    capsys.readouterr()
    embedded = load_file(saved[1] / "adapter_model.safetensors")
    embedded["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 40)
    save_file(embedded, saved[1] / "adapter_model.safetensors")
    complete(saved)
    assert main(["merge", "two", "--out", "x"]) == 2
    assert "lora_embedding_A', which cannot be averaged" in capsys.readouterr().err
    shutil.rmtree(saved[1])
    model(saved[1], 1)
    complete(saved)
    assert main(["merge", "two", "--out", "x"]) == 2
    assert "some are adapters and others are complete models" in capsys.readouterr().err
