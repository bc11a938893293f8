"""What lies on the driver's node only (models, tokenizers, the user's modules) reaches the others; what all see stays where it is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.backends.user_code import MAX_BYTES, UserCode
from weft.dataflow.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=97, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    words = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.ray
def test_a_node_that_sees_neither_model_nor_modules_gets_both(tmp_path: Path, model: Path):
    script = Path(__file__).with_name("folders_run.py")
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "HF_HUB_CACHE")}
    command = [sys.executable, script, tmp_path, model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert result["without"].startswith(
        "worker reward[0]: its node cannot import 'my_rewards', which the driver has from "
    )
    assert "RayBackend(working_dir='/proc/self/cwd/project') sends that folder to all nodes" in result["without"]

    home, looks = str(tmp_path / "home_of_node_2"), result["sent"]["looks"]
    assert result["sent"]["rows"] == [8]
    (copy,) = {look["model"] for look in looks["rollout"]}
    (tokenizer,) = {look["tokenizer"] for look in looks["reward"]}
    assert copy.startswith(f"{home}/.cache/weft/folders/tiny-") and tokenizer.startswith(f"{home}/.cache/weft/")
    files = ["config.json", "generation_config.json", "tokenizer.json"]
    assert result["sent"]["copies"] == {
        Path(copy).name: [*files[:2], "model.safetensors", files[2]],
        Path(tokenizer).name: files,
    }
    assert {look["home"] for look in looks["rollout"] + looks["reward"]} == {home}
    (folder,) = {look["folder"] for look in looks["rollout"] + looks["reward"]}
    assert "/runtime_resources/working_dir_files/" in folder
    assert not (tmp_path / "home" / ".cache" / "weft").exists(), "the driver's node needs no copy"

    seen = str(tmp_path / "home" / "models" / "tiny")
    assert {look["model"] for look in result["seen"]["looks"]["rollout"]} == {seen}, "both nodes see this path"
    assert result["seen"]["copies"] == result["sent"]["copies"]


def test_what_is_to_be_sent_is_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"working_dir": tmp_path / "nothing"}, r"RayBackend\(working_dir='.*nothing'\): no such folder"),
        ({"py_modules": [tmp_path, "no"]}, r"RayBackend\(py_modules='no'\): no such folder"),
        ({"py_modules": "package"}, r"RayBackend\(py_modules='package'\): it is a list"),
        ({"excludes": ["data"]}, r"RayBackend\(excludes=\['data'\]\) leaves nothing out"),
    ]
    for settings, said in wrong:
        with pytest.raises(UserError, match=said):
            RayBackend("head:6379", **settings)
    with pytest.raises(UserError, match="give its address; a local one sees them"):
        RayBackend(working_dir=tmp_path)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_address")  # Ray reads a setting of that cluster when it is imported
def test_a_folder_that_is_too_large_to_send_is_refused_with_what_is_largest_in_it(tmp_path: Path):
    for name in ("data/x.bin", "runs/y.bin", ".venv/z.bin", "small.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        if name != "small.py":
            os.truncate(tmp_path / name, MAX_BYTES + 1)
    with pytest.raises(
        UserError, match=r"has 105 MB to send to other nodes, and 105 MB .* the largest: data \(105 MB\)"
    ) as refused:
        UserCode.of(tmp_path, (), ()).check()
    assert "runs" not in str(refused.value) and ".venv" not in str(refused.value)
    UserCode.of(tmp_path, (), ["data/"]).check()
    (tmp_path / ".gitignore").write_text("*.bin\n")
    UserCode.of(tmp_path, (), ()).check()


def test_what_a_submitted_job_has_sent_is_not_sent_again(tmp_path: Path):
    code = UserCode.of(tmp_path, (tmp_path,), ["data/"])
    assert code.runtime_env({}) == {
        "working_dir": str(tmp_path),
        "py_modules": [str(tmp_path)],
        "excludes": ["runs/", ".venv/", "venv/", ".git/", "__pycache__/", "data/"],
    }
    job = json.dumps({"runtime_env": {"working_dir": "gcs://x.zip"}})
    assert [*code.runtime_env({"RAY_JOB_CONFIG_JSON_ENV_VAR": job})] == ["py_modules", "excludes"]
    assert UserCode.of(tmp_path, (), ()).runtime_env({"RAY_JOB_CONFIG_JSON_ENV_VAR": job}) == {}
