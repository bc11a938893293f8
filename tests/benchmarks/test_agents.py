"""The benchmark of agents counts attacks that fail, and only those."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from weft.dataflow.errors import NoSandboxError
from weft.workers.sandbox import working_engine


def test_an_attack_that_succeeds_does_not_count(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
):
    try:
        working_engine()
    except NoSandboxError as error:
        pytest.skip(str(error))
    contained = load("agents/contained")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "workers"))
    import attacks  # pyright: ignore[reportMissingImports]

    def succeeds(engine: str) -> None:
        raise AssertionError("it left the sandbox")

    chosen = {name: attacks.ATTACKS[name] for name in ("/proc", "devices")} | {"escape": succeeds}
    monkeypatch.setattr(attacks, "ATTACKS", chosen)
    figures = contained.measure(repeats=1)
    assert figures["contained"] == 2
    assert figures["sandbox_start_ms"] > 0 < figures["sandbox_run_ms"]
    sys.modules.pop("contained")


def test_two_parts_of_environments_halve_the_time_of_an_episode(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    assert load("agents/embodied").measure() == {"embodied": [320.0, 161.0]}
