"""Settings for all tests: imports of `forked`, one thread per process, and two processes for `make
test`."""

import atexit
import gc
import logging
import os
import sys
import threading
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "docs" / "generate")]
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tiny models gain nothing from more, and lose much on a busy machine

settings.register_profile("no deadline", deadline=None)  # a busy machine needs any time for an example
settings.load_profile("no deadline")

WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:  # freeze imports: collecting garbage among them took half of the collection time
    gc.disable()
    atexit.register(gc.unfreeze)  # otherwise nanobind reports leaks at exit

ENGINES = "engines"
"""Tests with Ray or vLLM run in one process: they share a cluster, and import vLLM once."""
FORKED = "forked"
"""Tests with forked processes share one server that has imported torch.

The examples also share a warm-started model; dashboard tests share a browser and demo runs.
"""
FAILED = pytest.StashKey[bool]()
"""Whether a phase of a test has failed."""
LIBRARIES = {"datasets", "ray", "tensorboardX", "torch", "transformers", "vllm"}
"""Libraries that set environment variables on import."""
FORKING = {"run_processes", "run_ranks", "program", "server"}
"""Imports of modules whose tests fork processes."""


def group_of(item: pytest.Item) -> str:
    """Return the group of a test, which runs in one process: its file, or one of the slow
    groups."""
    forks = FORKING & vars(getattr(item, "module", None) or item).keys()
    if forks or HERE / "examples" in item.path.parents or item.get_closest_marker("browser"):
        return FORKED
    if item.get_closest_marker("ray") or item.get_closest_marker("vllm"):
        return ENGINES
    return item.path.stem


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Assign tests to groups; in parallel runs, put the longest groups first."""
    addressed = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addressed:
        raise pytest.UsageError(
            f"all processes of pytest must give a test one name; give these ids: {addressed[:3]}"
        )
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


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check that a test restores environment, working directory and log handlers, and ends its
    threads."""
    variables, folder, handlers = dict(os.environ), os.getcwd(), list(logging.root.handlers)
    threads, libraries = set(threading.enumerate()), LIBRARIES & sys.modules.keys()
    yield
    changed = {
        name
        for name, value in {**variables, **os.environ}.items()
        if os.environ.get(name) != variables.get(name)
    }
    # Ray sets its debugger on connect; extensions set library paths when they are compiled or
    # loaded.
    changed -= {name for name in changed if name.startswith(("RAY_", "VLLM_"))} | {
        "PYTEST_CURRENT_TEST",
        "PYTHONBREAKPOINT",
        "LD_LIBRARY_PATH",
        # vLLM sets these when an engine starts on a CPU.
        "LD_PRELOAD",
        "LOCAL_WORLD_SIZE",
        "NUMEXPR_MAX_THREADS",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
        "TORCHINDUCTOR_CACHE_DIR",
        "AITER_SITUV2_A4W4",  # set when vLLM's fused mixture of experts is imported
    }
    changed -= os.environ.keys() if libraries != LIBRARIES & sys.modules.keys() else set()
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update({name: variables[name] for name in changed & variables.keys()})
    moved = os.getcwd() != folder
    os.chdir(folder)
    left = [one for one in threading.enumerate() if not one.daemon and one not in threads]
    if left:
        gc.collect()  # the owner of a pool may be part of a cycle
    for one in left:  # threads of an unreferenced pool are about to end
        one.join(10)
    left = [one.name for one in left if one.is_alive()]
    assert not changed, f"this test changed variables of the environment: {sorted(changed)}"
    assert not moved, "this test changed the working directory"
    assert not left, f"this test left threads: {left}"
    assert logging.root.handlers == handlers, "this test left a log handler"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Free what a failed test still holds, such as an open socket, before its warning fails a later
    test."""
    try:
        return (yield)
    finally:
        if item.stash.get(FAILED, False):
            sys.last_type = sys.last_value = sys.last_traceback = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def inspects_models_here() -> Iterator[None]:
    """Let vLLM inspect a model's class in this process.

    Otherwise it starts a process per class, which takes 5 s to import vLLM.
    """
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield
