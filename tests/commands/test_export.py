"""`weft export`: a checkpoint's model, complete and under its name."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from weft.__main__ import main
from weft.dataflow.runs.manifest import write_manifest


@pytest.fixture
def saved(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/two with a model in each checkpoint."""
    run = Path(shutil.copytree(done / "two", tmp_path / "runs" / "two"))
    for checkpoint in sorted((run / "checkpoints").glob("step_*")):
        (checkpoint / "actor" / "model").mkdir()
        (checkpoint / "actor" / "model" / "config.json").write_text(json.dumps({"of": checkpoint.name}))
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint)
    monkeypatch.chdir(tmp_path)
    return run


def test_the_model_of_the_last_checkpoint_or_of_a_step_is_copied(
    saved: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["export", "two", "last"]) == 0
    assert capsys.readouterr().out == "last: the model of 'actor' in runs/two/checkpoints/step_000003\n"
    assert json.loads(Path("last/config.json").read_text()) == {"of": "step_000003"}
    assert main(["export", "two", "second", "--step", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "model"
    assert json.loads(Path("second/config.json").read_text()) == {"of": "step_000002"}
    assert not list(Path().glob(".*")), "nothing unfinished is left"


def test_models_that_cannot_be_exported_are_reported(
    saved: Path, done: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(done / "one", "runs/one")
    Path("there").mkdir()
    damaged = saved / "checkpoints" / "step_000002" / "actor" / "model" / "config.json"
    damaged.write_text("{}")
    for words, code, says in (
        (["two", "there"], 2, "there exists already; name a new folder"),
        (["one", "new"], 2, "runs/one has no checkpoint: CheckpointConfig(every=...) makes them"),
        (["two", "new", "--step", "1"], 2, "no checkpoint of step 1; it has checkpoints of steps 2, 3"),
        (["two", "new", "--group", "actr"], 2, "no model of a group 'actr'; did you mean 'actor'?"),
        (["two", "new", "--step", "2"], 1, "step_000002 is damaged: "),
    ):
        assert main(["export", *words]) == code
        assert says in capsys.readouterr().err
    assert not Path("new").exists()


def test_a_model_that_cannot_be_written_leaves_nothing(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Path("afile").write_text("")
    assert main(["export", "two", "afile/x"]) == 1
    assert "afile/x cannot be written: [Errno" in capsys.readouterr().err
    monkeypatch.setattr("shutil.copyfile", _on_a_full_disk)
    Path(".new.partial").mkdir()
    Path(".new.partial/of-another-export").touch()
    assert main(["export", "two", "new", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert "new cannot be written: [Errno 28]" in said["error"] and not list(Path().glob("*new*"))


def _on_a_full_disk(source: object, target: str, **more: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", target)
