"""`weft export --push`: the model and its card arrive whole at a Hub, or nothing is sent."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import save_file
from small_hub import TOKEN, SmallHub

from weft.__main__ import main
from weft.commands.export import _without_local_base
from weft.dataflow.runs.manifest import write_manifest
from weft.dataflow.runs.model_card import model_card

# huggingface_hub uploads large files with an argument that httpx deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")


def write_model(folder: Path, value: float) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "value": value}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("the card of the base model")
    save_file({"weight": np.full(8, value, np.float32)}, folder / "model.safetensors")


@pytest.fixture
def saved(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/two with a model in each checkpoint, of steps 2 and 3."""
    run = Path(shutil.copytree(done / "two", tmp_path / "runs" / "two"))
    for checkpoint in sorted((run / "checkpoints").glob("step_*")):
        write_model(checkpoint / "actor" / "model", float(checkpoint.name[-1]))
        seal(checkpoint)
    monkeypatch.chdir(tmp_path)
    return run


def seal(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    with SmallHub() as made:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


def test_a_model_is_pushed_with_its_card_in_one_commit(
    saved: Path, hub: SmallHub, capsys: pytest.CaptureFixture[str]
):
    assert main(["export", "two", "--push", "ann/first", "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert (
        said == f"{hub.endpoint}/ann/first: the model of 'actor' in runs/two/checkpoints/step_000002\n"
    )
    model = saved / "checkpoints" / "step_000002" / "actor" / "model"
    files = hub.files["ann/first"]
    assert {*files} == {path.name for path in model.iterdir()}
    assert all(files[n] == (model / n).read_bytes() for n in files if n != "README.md")
    assert files["README.md"].startswith(b"---\nlibrary_name: transformers\n"), "not the base model's"
    assert hub.commits == ["Add two, step 000002"]
    assert hub.repositories["ann/first"]["visibility"] == "private"


def test_a_folder_and_a_public_repository_get_the_same_files(
    saved: Path, hub: SmallHub, capsys: pytest.CaptureFixture[str]
):
    words = ["export", "two", "out", "--card", "--push", "second", "--public", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["folder"], found["pushed"]) == ("out", f"{hub.endpoint}/ann/second")
    assert hub.repositories["ann/second"]["visibility"] == "public"
    assert hub.files["ann/second"] == {p.name: p.read_bytes() for p in Path("out").iterdir()}
    hub.requests.clear()
    assert main(["export", "two", "alone", "--card"]) == 0
    assert Path("alone/README.md").read_bytes() == Path("out/README.md").read_bytes()
    assert not hub.requests


def test_a_repository_that_is_public_already_gets_nothing_without_public(
    saved: Path, hub: SmallHub, capsys: pytest.CaptureFixture[str]
):
    assert main(["export", "two", "--push", "open", "--public"]) == 0
    commits = list(hub.commits)
    assert main(["export", "two", "--push", "open"]) != 0
    assert "the repository exists and is public; add --public" in capsys.readouterr().err
    assert hub.commits == commits


def test_an_adapter_is_pushed_without_the_folder_of_its_base(tmp_path: Path):
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({"r": 8, "base_model_name_or_path": "/home/ann/models/tiny"}))
    pushed = _without_local_base(settings)
    assert isinstance(pushed, bytes)
    assert json.loads(pushed) == {"r": 8, "base_model_name_or_path": "tiny"}
    settings.write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B"}))
    pushed = _without_local_base(settings)
    assert isinstance(pushed, bytes) and b'"Qwen/Qwen3-8B"' in pushed
    assert _without_local_base(tmp_path / "model.safetensors") == tmp_path / "model.safetensors"


def test_wrong_names_tokens_and_models_are_refused_before_the_first_request(
    saved: Path, hub: SmallHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model = saved / "checkpoints" / "step_000003" / "actor" / "model"

    def refused(says: str, *words: str) -> None:
        assert main(["export", "two", *words]) == 2
        assert says in capsys.readouterr().err
        assert not hub.requests and not Path("out").exists()

    refused("name a folder to create, or a repository: --push NAME")
    refused("--public needs a repository; add --push NAME", "out", "--public")
    refused("a name is REPOSITORY or OWNER/REPOSITORY", "out", "--push", "datasets/ann/first")
    refused("no checkpoint of step 7", "--push", "first", "--step", "7")
    with monkeypatch.context() as then:
        then.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        refused("HF_HUB_OFFLINE is set; unset it", "--push", "first")
    with monkeypatch.context() as then:
        then.delenv("HF_TOKEN")
        then.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "nowhere")
        refused("--push needs a token with write access: set HF_TOKEN", "out", "--push", "first")
    whole = (model / "model.safetensors").read_bytes()
    for content, says in ((whole[:-1], "bytes, not"), (None, "it has no weights")):
        (model / "model.safetensors").unlink()
        if content is not None:
            (model / "model.safetensors").write_bytes(content)
        seal(model.parents[1])
        refused(f"{model.relative_to(Path.cwd())} is not complete: ", "out", "--push", "first")
        assert says
    (model / "adapter_config.json").write_text("{}")
    seal(model.parents[1])
    refused("--merged writes a new model; name a folder", "--push", "first", "--merged")
    refused("is not complete: [Errno 2]", "--push", "first")


@pytest.mark.parametrize("at", ["/api/repos/create", "/commit/"])
def test_a_push_that_the_hub_refuses_ends_with_its_reason_and_without_the_token(
    saved: Path, hub: SmallHub, capsys: pytest.CaptureFixture[str], at: str
):
    hub.refuses[at] = 403
    assert main(["export", "two", "out", "--push", "ann/first"]) == 1
    said = capsys.readouterr().err
    assert f"ann/first cannot be pushed to {hub.endpoint}: " in said and "403" in said
    assert TOKEN not in said and not hub.files
    assert Path("out/model.safetensors").exists(), "the folder is written before the push"


def test_a_card_tells_data_evaluations_curves_settings_and_versions(saved: Path):
    config = json.loads((saved / "config.json").read_text())
    config["groups"]["actor"]["model"] = "/home/ann/models/tiny"
    config["data"] = {"train": {"source": "/home/ann/sums.jsonl"}}
    (saved / "config.json").write_text(json.dumps(config))
    table = pq.read_table(saved / "metrics.parquet")
    for name, value in (("eval/pass@1", 0.25), ("eval/pass@1_low", 0.125), ("eval/pass@1_high", 0.375)):
        steps = table["step"].to_pylist()
        column = pa.array([value if step in (0, 3) else None for step in steps], pa.float64())
        table = table.append_column(name, column)
    pq.write_table(table, saved / "metrics.parquet")
    settings = {
        "actor.learning_rate": "1e-06",
        "actor.model": "'/home/ann/models/tiny'",
        "data of train": "checksum",
        "reward.function": "a|b <script>",
        "note": f"the token is {TOKEN}",
    }
    card = model_card(saved, 3, "actor", settings)
    _, metadata, text = card.split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["weft", "toy_grpo"],
    }
    assert "# two, step 3" in text
    for line in (
        "Trained from `tiny` with the graph `toy_grpo` of Weft ",
        "| train | sums.jsonl | 8 |",
        "| eval | rows of a program | 2 |",
        "| 3 | eval/pass@1 | 0.25 | 0.125 to 0.375 |",
        "| actor.learning_rate | 1e-06 |",
        "| actor.model | 'tiny' |",
        r"| reward.function | a\|b \<script> |",
        "| note | the token is [hidden] |",
        f"| weft | {config['versions']['weft']} |",
    ):
        assert line in text, line
    assert "/home/ann" not in card and "checksum" not in card and TOKEN not in card
    curves = text.partition("## Curves")[2].partition("## Settings")[0].strip().splitlines()
    assert curves[0].startswith("| step | reward/mean |") and len(curves) == 2 + 4
    early = model_card(saved, 1, "actor", {}, adapter=True)
    assert "library_name: peft" in early and "| 0 | eval/pass@1 | 0.25" in early


def test_a_card_names_a_base_model_of_the_hub_and_does_without_files_of_the_run(saved: Path):
    config = json.loads((saved / "config.json").read_text())
    config["groups"]["actor"]["model"] = "Qwen/Qwen3-0.6B"
    (saved / "config.json").write_text(json.dumps(config))
    assert "base_model: Qwen/Qwen3-0.6B\n" in model_card(saved, 3, "actor", {})
    (saved / "config.json").write_text("[damaged")
    (saved / "metrics.parquet").unlink()
    bare = model_card(saved, 3, "actor", {})
    assert "The run has no metrics." in bare and "with the graph `unknown`" in bare
