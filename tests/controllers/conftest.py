"""Imports and the Ray cluster of these tests.

Tests below this folder, their programs and the processes they start import `toy` and its neighbours
(Weft sends sys.path along with a run). All tests that do not end the cluster share one.
"""

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
    """Start a Ray cluster of one node with a token, and yield its address."""
    # Ray reads these when it is imported. Unlike ray.init, a cluster started by hand creates no
    # token.
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
        ).mkdir()  # Ray notes the address of such a cluster here and expects the folder to exist
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
    """Connect the tests of a module to the cluster; runs find it up and leave it up."""
    import ray

    ray.init(address=ray_address, namespace="weft", **QUIET)
    yield
    ray.shutdown()
