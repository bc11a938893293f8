"""The tests below this folder import `toy` and its neighbours; so do the processes that they start (sys.path travels with a run), and
the programs. And there is one Ray cluster for all tests that do not end it."""

import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])

CPUS = 16
QUIET: dict[str, Any] = {
    "log_to_driver": False,
    "logging_level": logging.ERROR,
    "configure_logging": False,
}


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Where the cluster listens: one node, a token."""
    # Ray reads these when it is imported. A cluster by hand makes no token, unlike ray.init.
    assert "ray" not in sys.modules, (
        "a test module imports Ray while tests are collected, or a test before the cluster is started"
    )
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    import forked_workers
    from ray.cluster_utils import Cluster

    settings: dict[str, Any] = {
        "num_cpus": CPUS,
        "object_store_memory": 200 << 20,
        "worker_path": forked_workers.__file__,
    }
    settings |= {"include_dashboard": False, "include_log_monitor": False}
    with tempfile.TemporaryDirectory(
        prefix="weft-", dir="/tmp"
    ) as folder:  # a socket's path has at most 107 characters
        (
            Path(folder) / "ray"
        ).mkdir()  # Ray notes the address of such a cluster there, and expects the folder
        only_here = {
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_TMPDIR": folder,
        }
        os.environ |= only_here
        cluster = Cluster(initialize_head=True, head_node_args={**settings, "temp_dir": f"{folder}/r"})
        for name in only_here:
            del os.environ[name]
        assert cluster.address is not None
        yield cluster.address
        cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[None]:
    """The tests of a module are connected to the cluster: runs find it up, and leave it up."""
    import ray

    ray.init(address=ray_address, namespace="weft", **QUIET)
    yield
    ray.shutdown()
