"""What holds for all tests: `forked` is found, each process computes with one thread, and `make test` spreads them over two processes."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more, and on a busy machine lose much

WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:  # what it imports while it collects stays for good: half of that time went into looking for garbage
    gc.disable()
    atexit.register(gc.unfreeze)  # nanobind complains of what is left when a process ends

ENGINES = "engines"
"""Tests that use Ray or vLLM run one after the other: they share a cluster, and vLLM is imported once."""
FORKED = "forked"
"""Tests whose processes are forked share the server that has imported torch, the examples a warm-started model, and those of the
dashboard a browser and the runs that it shows."""
FORKING = {"run_processes", "run_ranks", "program"}
"""What a module imports whose tests fork processes."""


def group_of(item: pytest.Item) -> str:
    """Tests of a group run in the same process: those of one file, but for two groups that take longest."""
    forks = FORKING & vars(getattr(item, "module", None) or item).keys()
    if forks or HERE / "examples" in item.path.parents or item.get_closest_marker("browser"):
        return FORKED
    if item.get_closest_marker("ray") or item.get_closest_marker("vllm"):
        return ENGINES
    return item.path.stem


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say which tests stay together; in one of several processes, put the longest groups first."""
    groups = {item: group_of(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    if hasattr(config, "workerinput"):
        order = {ENGINES: 0, FORKED: 1}
        items.sort(key=lambda item: order.get(groups[item], 2))


def pytest_collection_finish() -> None:
    if WORKER:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def inspects_models_here() -> Iterator[None]:
    """vLLM looks at a model's class before it starts, in a process that imports vLLM once more: 5 s for each class. Here it does so in
    the test's own process."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield
