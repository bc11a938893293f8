"""A Ray cluster of several nodes on this machine, and scenes that run on it. Prints one JSON line
per scene.

The fixture `scenes` runs this as a program, because a process can connect to one cluster only.
Added nodes have a different home and working directory, so they see neither the user's modules nor
the files in the user's home.

    folders   the head and one node
    pools     a second node joins while a pool waits for it
    nodes     a third node joins, and one is lost
"""

import json
import logging
import os
import secrets
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "HF_HUB_OFFLINE": "1"}
os.environ |= {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}  # those settings belong to other clusters
# unlike ray.init, a cluster started by hand creates none
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import folders_scenes
import nodes_scenes
import pools_scenes
import ray
from nodes import Nodes
from ray import cloudpickle

SCENES: dict[str, Callable[[Path, Nodes], dict[str, Any]]] = {
    "folders": folders_scenes.play,
    "pools": pools_scenes.play,
    "nodes": nodes_scenes.play,
}


for module in (
    folders_scenes,
    pools_scenes,
    nodes_scenes,
):  # ranks need not import the modules of the scenes
    cloudpickle.register_pickle_by_value(module)  # pyright: ignore[reportPrivateImportUsage]


def main(root: Path, names: list[str]) -> None:
    for name in ("home", "elsewhere", *names):
        (root / name).mkdir()
    os.environ["HOME"] = str(root / "home")
    os.chdir(root)
    nodes = Nodes(root)
    try:
        nodes.add()
        for name in (name for name in SCENES if name in names):
            if name != "folders" and not ray.is_initialized():
                ray.init(
                    address=nodes.address,
                    namespace="weft",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            print(json.dumps({"scenes": name, **played(name, root / name, nodes)}), flush=True)
    finally:
        ray.shutdown()
        nodes.shutdown()


def played(name: str, root: Path, nodes: Nodes) -> dict[str, Any]:
    try:
        return {"result": SCENES[name](root, nodes)}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
