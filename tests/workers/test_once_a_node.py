"""Work that one process per node does for all."""

import os
from pathlib import Path
from typing import Any

import pytest

from weft.workers.models.node_folder import growth_told


def test_a_folder_that_is_renamed_while_it_is_looked_at_ends_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    partial, whole, scan = tmp_path / ".copy", tmp_path / "copy", os.scandir
    partial.mkdir()
    looked: list[Any] = []

    def rename_first(path: Any) -> Any:
        if partial.exists():
            partial.rename(whole)
        looked.append(path)
        return scan(path)

    monkeypatch.setattr("os.scandir", rename_first)
    with growth_told(partial, lambda: None):  # an exception in its thread fails this test
        pass
    assert looked and whole.exists()
