"""Preparations of a script before its run: made once, or sketched for a plan."""

from pathlib import Path

import pytest

from weft.controllers.prechecks.dry_run import planning, prepared


def test_existing_preparations_are_reused_and_missing_ones_made_once(tmp_path: Path):
    made = tmp_path / "model"
    assert prepared(made, make=made.touch, sketch=lambda path: pytest.fail()) == made
    assert prepared(made, make=pytest.fail, sketch=lambda path: pytest.fail()) == made
    with pytest.raises(FileNotFoundError):
        prepared(tmp_path / "other", make=lambda: None, sketch=lambda path: None)


def test_sketches_in_a_plan_have_the_names_of_the_real_files(tmp_path: Path):
    task = tmp_path / "task"
    with planning() as plan:
        model = prepared(task / "model", make=pytest.fail, sketch=lambda path: path.mkdir())
        data = prepared(task / "data", make=pytest.fail, sketch=lambda path: path.touch())
        pairs = prepared(model / "pairs", make=pytest.fail, sketch=lambda path: path.touch())
        assert prepared(model / "pairs", make=pytest.fail, sketch=lambda path: pytest.fail()) == pairs
        assert (
            model.parent == data.parent and pairs.parent == model and pairs.is_relative_to(plan.scratch)
        )
        assert plan.sketched == [task / "model", task / "data", task / "model" / "pairs"]
    assert not model.exists() and not task.exists()
