"""Nodes of a Ray cluster on this machine."""

import os
from pathlib import Path
from typing import Any

import forked_workers
from ray.cluster_utils import Cluster

CPUS, GPUS = 8, 3
"""Per node except the head. The GPUs are not real."""
SETTINGS = {"worker_path": forked_workers.__file__, "include_log_monitor": False}


class Nodes:
    """The head with two CPUs, and added nodes with `CPUS` and `GPUS` each.

    Args:
        root: folder with "elsewhere", the working directory and home of processes on added nodes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.home = root / "home_of_added_nodes"
        self.home.mkdir()
        head = {"num_cpus": 2, "include_dashboard": False, **SETTINGS}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        assert self.cluster.address is not None
        self.address = self.cluster.address

    @property
    def added(self) -> list[Any]:
        return list(self.cluster.worker_nodes)

    def add(self) -> None:
        home, folder = os.environ["HOME"], Path.cwd()
        os.environ["HOME"] = str(self.home)
        os.chdir(self._root / "elsewhere")
        try:
            self.cluster.add_node(num_cpus=CPUS, num_gpus=GPUS, **SETTINGS)
        finally:
            os.environ["HOME"] = home
            os.chdir(folder)

    def grow_to(self, number: int) -> None:
        """Add nodes until there are this many besides the head."""
        while len(self.added) < number:
            self.add()

    def lose(self, id: str) -> None:
        """Kill a node abruptly, as when its machine is taken away.

        Args:
            id: Ray's id of the node.
        """
        self.cluster.remove_node(next(n for n in self.added if n.node_id == id), allow_graceful=False)

    def shutdown(self) -> None:
        self.cluster.shutdown()
