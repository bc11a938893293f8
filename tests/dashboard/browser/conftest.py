"""A headless Chromium on a dashboard of real runs. Complaints in a page's console fail the test."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from forked import Forked, program
from looking import Look
from serving import Serving
from wicked import make_wicked

ROOT = Path(__file__).resolve().parents[3]
DEMO_RUNS = ROOT / "benchmarks" / "dashboard" / "demo_runs.py"
ENDED = ("first", "killed")
START_S = 60


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """The system's browser, driven by Playwright."""
    binary = (
        shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    )
    if binary is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    if find_spec("playwright") is None:
        pytest.skip("Playwright is not installed: pip install --no-deps -r requirements/browser.txt")
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=binary, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def folder(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: finished, killed, without a step, and with malicious texts."""
    root = tmp_path_factory.mktemp("runs")
    program(root / ".data.txt", DEMO_RUNS, str(root), "--only", "nothing", "--here").process.join(120)
    made = [
        program(root / f".{name}.txt", DEMO_RUNS, str(root), "--only", name, "--here") for name in ENDED
    ]
    for one, name in zip(made, ENDED, strict=True):
        one.process.join(120)
        assert (root / name).is_dir(), one.said
    make_wicked(root / "first", root)
    return root


@pytest.fixture(scope="package")
def under_way(folder: Path) -> Iterator[Forked]:
    """An endless run. It is paused between tests, because it would use half a CPU."""
    run = program(folder / ".live.txt", DEMO_RUNS, str(folder), "--only", "live", "--here")
    _until(lambda: (folder / "live" / "metrics.arrows").exists(), "the live run has no metrics", run)
    run.signal(signal.SIGSTOP)
    yield run
    run.kill()


@pytest.fixture
def live(under_way: Forked) -> Iterator[str]:
    """The name of a run that works during the test."""
    under_way.signal(signal.SIGCONT)
    yield "live"
    under_way.signal(signal.SIGSTOP)


@pytest.fixture(scope="package")
def address(folder: Path) -> Iterator[str]:
    """The address of a dashboard of these runs, with its token."""
    with Serving(folder) as where:
        yield where


@pytest.fixture(scope="module")
def modules(chromium: Any, address: str) -> Iterator[Look]:
    """A window for tests that call exports of the pages' modules, and need no page."""
    window = Look(chromium, address, 1280, dark=False)
    yield window
    window.close()
    assert not window.complaints


@pytest.fixture
def look(chromium: Any, address: str) -> Iterator[Callable[..., Look]]:
    """Opens dashboard windows of a size and colour scheme; afterwards no page may have
    complained."""
    opened: list[Look] = []

    def new(width: int = 1280, dark: bool = False, where: str = address) -> Look:
        opened.append(Look(chromium, where, width, dark))
        return opened[-1]

    yield new
    complaints = [complaint for one in opened for complaint in one.complaints]
    for one in opened:
        one.close()
    assert not complaints


def _until(there: Callable[[], bool], otherwise: str, process: Forked) -> None:
    deadline = time.monotonic() + START_S
    while not there():
        assert process.process.is_alive() and time.monotonic() < deadline, f"{otherwise}: {process.said}"
        time.sleep(0.05)
