"""Rank: the Ray actor process of one rank of a group, and how it is started."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from inspect import isfunction, isgeneratorfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import UserError
from ...dataflow.graph import Handle
from ...dataflow.runs.files import make_folder
from ...workers.dispatch import Coordinates
from ...workers.rendezvous import Rendezvous, take_port
from ...workers.worker import Context, Worker
from ..bundles import devices, position
from ..placement import Place
from ..ranks.executor import Activity, ExecutorThread
from ..ranks.tasks import Failure, Reply, Task
from .backend import Files
from .model_folders import ModelFolders
from .pools import ReservedPool
from .sample_note import SampleNote
from .witness import write_on_request

if TYPE_CHECKING:
    from ...dataflow.buffer.flight import Peers


# Rank process
#
# Process of a rank: its class travels to it by value, so that it has its environment before it
# imports anything of Weft or of the user.
#
# Ray can give a process an environment, too. But then it starts each by way of another one, which
# imports Ray as well (0.7 s of a CPU), and writes the variables to its logs.


def rank_process(rank_class: type) -> type:
    """A class for a Ray actor: it takes an environment over, and then has the methods of a rank.

    It is made in a function, so that it is pickled by value, and its methods refer to nothing outside.

    Args:
        rank_class: class of the rank. The process imports it by name.

    Returns:
        A class whose objects are made of an environment, in which `PYTHONPATH` and `OMP_NUM_THREADS` are; of a pickled tuple: the
        class of the rank and its arguments; and of its GPUs, its last argument, where they had to be found (else None).
    """

    def __init__(
        self: Any, environment: dict[str, str], rank: bytes, gpus: list[str] | None = None
    ) -> None:
        import os
        import pickle
        import sys

        sent = os.environ.get("PYTHONPATH")  # what Ray has brought to this node, if it has
        os.environ.update(environment)
        if sent:
            os.environ["PYTHONPATH"] += os.pathsep + sent
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        first = environment["PYTHONPATH"].split(os.pathsep)
        sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
        torch = sys.modules.get("torch")
        if torch is not None:  # Ray gave us a process in which a task of the script has run
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        made_of, *arguments = pickle.loads(rank)
        self.rank = made_of(*arguments, *(() if gpus is None else (gpus,)))

    methods = {
        name: value
        for name, value in vars(rank_class).items()
        if isfunction(value) and not name.startswith("_")
    }
    handed_on = {
        name: _handed_on(name, streams=isgeneratorfunction(value)) for name, value in methods.items()
    }
    return type("RankProcess", (), {"__init__": __init__, **handed_on})


def _handed_on(name: str, *, streams: bool) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self.rank, name)(*arguments, **named)

    def stream(self: Any, *arguments: Any, **named: Any) -> Iterator[Any]:  # Ray tells one from the other
        yield from getattr(self.rank, name)(*arguments, **named)

    found = stream if streams else method
    found.__name__ = name
    return found


# Forwarded
#
# Forwarded: which variables of the driver's environment the ranks get, wherever they stand.
#
# On an existing cluster a process has the environment in which its node joined. What a user sets
# for NCCL, vLLM, the Hugging Face hub or a tracker where the script is started must reach the
# ranks as well.


PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "VLLM_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "WANDB_",
    "MLFLOW_",
    "WEFT_",
)
"""Variables whose names begin so are forwarded. `PYTHONPATH` and the number of threads are, too (`rank.py`)."""
OF_A_NODE = (
    "VLLM_HOST_IP",
    "HF_HOME",
    "TORCH_HOME",
    *(f"HF_{what}_CACHE" for what in ("HUB", "XET", "ASSETS", "MODULES", "DATASETS")),
    "HUGGINGFACE_HUB_CACHE",
    "HUGGINGFACE_ASSETS_CACHE",
    "TRANSFORMERS_CACHE",
    "TORCH_EXTENSIONS_DIR",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "VLLM_ASSETS_CACHE",
    "WANDB_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_CONFIG_DIR",
    "WANDB_DATA_DIR",
    "WEFT_CACHE",
)
"""Not these: an address or a folder of the driver's node may be none of another."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the ranks get before anything in their processes reads them. They travel with the arguments of a rank, and nobody
    writes them to disk: tokens and keys are among them.

    >>> forwarded({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_x", "VLLM_CACHE_ROOT": "/home/me/.cache", "HOME": "/home/me"})
    {'NCCL_DEBUG': 'INFO', 'HF_TOKEN': 'hf_x'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) and name not in OF_A_NODE
    }


# Network interface
#
# The network interface of a node's address, to which gloo, NCCL and vLLM are held: each would take
# the first that it finds.


SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None: this machine has no such interface.

    >>> interface_of("127.0.0.1")
    'lo'
    >>> interface_of("192.0.2.1")
    """
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        table = Path("/proc/net/if_inet6")
        lines = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
        return next((name for digits, *_, name in lines if int(digits, 16) == int(wanted)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def network_environment(address: str) -> dict[str, str]:
    """Variables that hold the libraries of a process to the address of its node.

    >>> network_environment("127.0.0.1")
    {'VLLM_HOST_IP': '127.0.0.1', 'GLOO_SOCKET_IFNAME': 'lo', 'NCCL_SOCKET_IFNAME': '=lo'}
    """
    name = interface_of(address)
    found = {"VLLM_HOST_IP": address}
    return found | ({"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {})


MAX_CALLS = 64
"""Calls with rows on one rank that may be under way. Each has a thread there, and all but one of them wait for their turn."""
CONTROL = "control"
"""Threads for calls without rows (weights, checkpoints, cancelling, closing), which calls with rows cannot occupy."""
CONTROL_CALLS = 16


@dataclass(frozen=True)
class RankFiles:
    """How a rank reaches rows."""

    files: Files
    node_names: Mapping[str, str]
    """Ray's id of a node -> its name in references."""
    replaced: int
    """How often the rank was replaced: each process has files of its own."""
    peers: Peers | None
    """The other nodes, if they are known already."""
    models: ModelFolders | None = None
    """The folders of models that its settings name; None: there are none, or all nodes are the driver's."""
    written_on: str | None = None
    """Name of the driver's node, for a group that writes into the run's directory."""
    alone: bool = False
    """Whether the cluster has one node, and can have no other."""


@dataclass(frozen=True)
class Standing:
    """Where a rank stands."""

    at: Coordinates | Failure
    """In the mesh of its group; or why it could not start."""
    node: str
    """Name of its node in references."""
    node_id: str
    """Ray's id of the node."""


class Rank:
    """One rank of a group in a process of its own (`rank_process.py`), with its log in the run directory.

        started ──take_port (rank 0 of a group whose ranks meet)──> has a port ──begin──> its worker is made ──close──> closed
            └─────────────────────────────────────────────────────────────────┘

    Ray calls in on a thread for each call; the work is done on the executor's thread.
    """

    def __init__(
        self,
        worker_class: type,
        config: Any,
        context: Context,
        files: RankFiles,
        gpus: Sequence[str] | None = None,
    ) -> None:
        import ray

        if gpus is not None:
            context = replace(context, devices=tuple(gpus))
        for variable, value in network_environment(ray.util.get_node_ip_address()).items():
            os.environ.setdefault(variable, value)
        write_on_request()
        self._activity = Activity()
        address = "" if files.alone else ray.util.get_node_ip_address()
        context = replace(context, advance=self._activity, address=address)
        self._note: SampleNote | None = None
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._node = (
            files.node_names.get(self._node_id) or f"node-{self._node_id}"
        )  # it joined the cluster just now
        self._hidden: str | None = None
        """Why its worker cannot be made here."""
        if (run := context.run_dir) is not None:
            logs = files.files.logs_of_node(self._node, run)
            _log_to(logs / f"{context.name}_{context.rank}.log")
            self._note = SampleNote(SampleNote.path(logs, context.name, context.rank))
            context = replace(context, at=self._note)
            if not files.files.are_beside(run):
                if files.written_on not in (None, self._node):
                    self._hidden = (
                        f"node {self._node!r} does not see the run's directory, {run} on the driver's node, and {context.name!r} has "
                        "checkpoints or samples to write there: choose a root that all nodes see (Driver(root=...)), or place "
                        f"{context.name!r} on the driver's node"
                    )
                context = replace(context, run_dir=None)
        again = f"-again{files.replaced}" if files.replaced else ""
        self._data = files.files.access(self._node, f"{context.name}-{context.rank}{again}")
        if files.peers is not None:
            self.connect(files.peers)
        self._worker_class, self._config, self._context = worker_class, config, context
        self._models = files.models
        self._port: socket.socket | None = None
        self._begun: Future[ExecutorThread] = Future()

    def process(self) -> tuple[str, int]:
        """Name of its node, and number of its process there; from here on it writes its stacks when it is asked to."""
        return self._node, os.getpid()

    def take_port(self, host: str, secret: str, timeout_s: float) -> Rendezvous:
        """Take a free port, at which the ranks of its group will meet; returns where they come to.

        Args:
            host: address of this machine.
            secret: of the group.
            timeout_s: longest wait for the others, from when their workers are made.
        """
        self._port = take_port(host)
        return replace(Rendezvous.at(self._port, secret, timeout_s), taken=None)

    def begin(self, rendezvous: Rendezvous | None, *, offload: bool = False) -> Standing:
        """Make the worker, and wait until it is up.

        Args:
            rendezvous: of its group; None: its ranks do not meet.
            offload: give the memory of its devices back at once, for a group that is made next.

        Returns:
            Where it stands, or why it could not start.
        """
        if rendezvous is not None:
            rendezvous = replace(rendezvous, taken=self._port)
        context = replace(self._context, rendezvous=rendezvous)

        def make() -> Worker:
            if self._hidden is not None:
                raise UserError(self._hidden)
            config = self._config
            if self._models is not None:
                config = self._models.on_node(self._node_id, config, self._activity)
            worker = self._worker_class(config, context)
            if offload:
                worker.offload()
            return worker

        thread = ExecutorThread(make, self._data, self._activity)
        self._begun.set_result(thread)
        worker = thread.worker()
        return Standing(
            worker if isinstance(worker, Failure) else worker.coordinates, self._node, self._node_id
        )

    def advanced(self) -> bool:
        """Whether its worker has done anything since this was asked last; one that is being made may fetch a model."""
        return self._activity.is_new()

    def connect(self, peers: Peers) -> None:
        """Tell it where the servers of the other nodes are."""
        self._data.reader.fetch = peers.fetch

    def call(self, task: Task) -> Iterator[Reply]:
        yield from self._begun.result().call(task)

    def cancel(self, number: int) -> None:
        self._begun.result().cancel(number)

    def give_up(self, number: int, sample_ids: list[int]) -> None:
        self._begun.result().give_up(number, sample_ids)

    def close(self) -> None:
        if self._begun.done():
            self._begun.result().close()
        if self._port is not None:
            self._port.close()
        self._data.close()
        if self._note is not None:
            self._note.close()


def start_rank(
    handle: Handle, place: Place, context: Context, pool: ReservedPool, sharing: int, files: RankFiles
) -> Any:
    """Start the process of a rank.

    Args:
        place: of its group; its pool has its number of nodes.
        context: with its group, and its number there.
        sharing: groups on the pool.

    Returns:
        Its actor, which has no worker yet.
    """
    import ray
    from ray import cloudpickle

    at = position(place, context.rank)
    part = pool.parts[at.node_rank]
    gpus = devices(place, context.rank, part.gpus)
    found: Any = None
    if place.gpus and (files.replaced or not part.node):
        first = part.first_gpu + at.local_rank * place.gpus
        found = replace(part, first_gpu=first, own_gpus=place.gpus).find_gpus()
    context = replace(
        context, node_rank=at.node_rank, local_rank=at.local_rank, nodes=at.nodes, devices=gpus
    )
    remote: Any = ray.remote
    actor = remote(concurrency_groups={CONTROL: CONTROL_CALLS})(rank_process(Rank)).options(
        num_cpus=pool.cpus / (sharing * place.ranks),
        num_gpus=0,
        scheduling_strategy=part.strategy,
        max_restarts=0,
        max_concurrency=MAX_CALLS,
    )
    rank = cloudpickle.dumps((Rank, handle.worker_class, handle.config, context, files))  # pyright: ignore[reportPrivateImportUsage]
    return actor.remote(_environment(place, gpus), rank, found)


def _environment(place: Place, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a rank's process, which it has before anything in it imports what reads it."""
    return {
        **forwarded(os.environ),
        # Threads must be known before anything in the process imports torch.
        "OMP_NUM_THREADS": str(place.threads),
        "MKL_NUM_THREADS": str(place.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        # Rank i of every group on a pool sees the same devices; on a pool without GPUs, none. Ray, asked for shares of GPUs, would
        # not promise the former; asked for none, it hides nothing, or hides all, as the last variable says.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _log_to(path: Path) -> None:
    """Send everything that this process prints, libraries in C included, to a file."""
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
