"""A cluster of several nodes, shared by all tests here: one program plays all scenes once."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("several_nodes.py")
SCENES = ("folders", "pools", "nodes")
"""The scenes of `test_folders.py` and so on."""


@dataclass
class Scenes:
    """Results of the scenes."""

    root: Path
    """A folder with one subfolder per scene."""
    said: str
    found: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        played = self.found.get(name, {"error": self.said})
        assert "error" not in played, f"the scenes {name!r} failed: {played['error']}"
        return played["result"]


@pytest.fixture(scope="session")
def scenes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """Play the scenes of the collected test modules."""
    root = tmp_path_factory.mktemp("several_nodes")
    asked = {item.path.stem.removeprefix("test_") for item in request.session.items}
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HF_HOME", "HF_HUB_CACHE")
    }
    command = [sys.executable, str(PROGRAM), str(root), *(name for name in SCENES if name in asked)]
    with (root / "said").open("w+") as said:
        try:
            subprocess.run(
                command, env=environment, stdout=said, stderr=subprocess.STDOUT, timeout=600, check=False
            )
        except subprocess.TimeoutExpired:
            said.write("\nit did not end in 600 s")
    lines = (root / "said").read_text().splitlines()
    # Ray prints other lines
    found = [json.loads(line) for line in lines if line.startswith('{"scenes"')]
    return Scenes(root, "\n".join(lines)[-4000:], {played["scenes"]: played for played in found})
