"""Files on the driver's node (models, tokenizers, modules) reach other nodes; shared files stay in
place."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.backends.ray_cluster import MAX_BYTES, UserCode
from weft.dataflow.errors import UserError


@pytest.mark.slow
@pytest.mark.ray
def test_a_node_without_model_and_modules_gets_both(scenes: Any):
    result = scenes["folders"]
    assert result["without"].startswith(
        "worker reward[0]: its node cannot import 'my_rewards', which the driver has from "
    )
    assert (
        "RayBackend(working_dir='/proc/self/cwd/project') sends that folder to all nodes"
        in result["without"]
    )

    home, looks = str(scenes.root / "home_of_added_nodes"), result["sent"]["looks"]
    assert result["sent"]["rows"] == [8]
    (copy,) = {look["model"] for look in looks["rollout"]}
    (tokenizer,) = {look["tokenizer"] for look in looks["reward"]}
    assert copy.startswith(f"{home}/.cache/weft/folders/tiny-") and tokenizer.startswith(
        f"{home}/.cache/weft/"
    )
    files = ["config.json", "generation_config.json", "tokenizer.json"]
    assert result["sent"]["copies"] == {
        Path(copy).name: [*files[:2], "model.safetensors", files[2]],
        Path(tokenizer).name: files,
    }
    assert {look["home"] for look in looks["rollout"] + looks["reward"]} == {home}
    (folder,) = {look["folder"] for look in looks["rollout"] + looks["reward"]}
    assert "/runtime_resources/working_dir_files/" in folder
    assert not (scenes.root / "home" / ".cache" / "weft").exists(), "the driver's node needs no copy"

    seen = str(scenes.root / "home" / "models" / "tiny")
    assert {look["tokenizer"] for look in looks["judge"]} == {seen}, "both nodes see this path"


def test_folders_to_send_are_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"working_dir": tmp_path / "nothing"},
            r"RayBackend\(working_dir='.*nothing'\): no such folder",
        ),
        ({"py_modules": [tmp_path, "no"]}, r"RayBackend\(py_modules='no'\): no such folder"),
        ({"py_modules": "package"}, r"RayBackend\(py_modules='package'\): it must be a list"),
        ({"excludes": ["data"]}, r"RayBackend\(excludes=\['data'\]\) has no effect without a folder"),
    ]
    for settings, said in wrong:
        with pytest.raises(UserError, match=said):
            RayBackend("head:6379", **settings)
    with pytest.raises(UserError, match=r"give its address \(a local one sees them\)"):
        RayBackend(working_dir=tmp_path)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_address")  # Ray reads a setting of that cluster on import
def test_a_folder_too_large_to_send_is_refused_with_its_largest_files(tmp_path: Path):
    for name in ("data/x.bin", "runs/y.bin", ".venv/z.bin", "small.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        if name != "small.py":
            os.truncate(tmp_path / name, MAX_BYTES + 1)
    with pytest.raises(
        UserError,
        match=r"has 105 MB to send to other nodes, but the limit is 105 MB; the largest: data \(105 MB\)",
    ) as refused:
        UserCode.of(tmp_path, (), ()).check()
    assert "runs" not in str(refused.value) and ".venv" not in str(refused.value)
    UserCode.of(tmp_path, (), ["data/"]).check()
    (tmp_path / ".gitignore").write_text("*.bin\n")
    UserCode.of(tmp_path, (), ()).check()


def test_files_of_a_submitted_job_are_sent_once(tmp_path: Path):
    code = UserCode.of(tmp_path, (tmp_path,), ["data/"])
    assert code.runtime_env({}) == {
        "working_dir": str(tmp_path),
        "py_modules": [str(tmp_path)],
        "excludes": ["runs/", ".venv/", "venv/", ".git/", "__pycache__/", "data/"],
    }
    job = json.dumps({"runtime_env": {"working_dir": "gcs://x.zip"}})
    assert [*code.runtime_env({"RAY_JOB_CONFIG_JSON_ENV_VAR": job})] == ["py_modules", "excludes"]
    assert UserCode.of(tmp_path, (), ()).runtime_env({"RAY_JOB_CONFIG_JSON_ENV_VAR": job}) == {}
