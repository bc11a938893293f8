"""Rank: the Ray actor process of one rank of a group, and how it starts."""

from __future__ import annotations

import ipaddress
import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isfunction, isgeneratorfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ...dataflow.errors import UserError
from ...dataflow.graph import Handle
from ...dataflow.runs.files import make_file, make_folder
from ...workers.dispatch import Coordinates
from ...workers.rendezvous import Rendezvous, take_port
from ...workers.rollout import RolloutWorker
from ...workers.training.engine import ModelConfig
from ...workers.training.memory import PINNED_MIB
from ...workers.worker import Context, Worker
from ..node_layout import devices, position
from ..placement import Place
from ..ranks.executor import ExecutorThread
from ..ranks.tasks import Failure, Reply, Task
from .backend import Files
from .model_folders import ModelFolders
from .pools import ReservedPool
from .process_diagnostics import write_on_request

if TYPE_CHECKING:
    from ...dataflow.buffer.flight import Peers


# Rank process: Ray pickles the actor class by value, so that the process sets its environment
# before it imports Weft or the user's code. Setting the environment through Ray would start another
# process that also imports Ray (0.7 s of CPU), and would write the variables to Ray's logs.


def rank_process(rank_class: type) -> type:
    """Return a Ray actor class that first sets its environment and has `rank_class`'s methods.

    Ray pickles the class by value because a function creates it. Its methods use no outside names.
    The actor's arguments are:
    - an environment with `PYTHONPATH` and `OMP_NUM_THREADS`
    - a pickled tuple of the rank class and its arguments
    - the GPUs to use, or None if the environment names them
    """

    def __init__(
        self: Any, environment: dict[str, str], rank: bytes, gpus: list[str] | None = None
    ) -> None:
        import os
        import pickle
        import sys

        sent = os.environ.get("PYTHONPATH")  # code that Ray has sent to this node
        os.environ.update(environment)
        if sent:
            os.environ["PYTHONPATH"] += os.pathsep + sent
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        first = environment["PYTHONPATH"].split(os.pathsep)
        sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
        torch = sys.modules.get("torch")
        if torch is not None:  # Ray reuses a process that has run a task of the script
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        made_of, *arguments = pickle.loads(rank)
        self.rank = made_of(*arguments, *(() if gpus is None else (gpus,)))

    methods = {
        name: _handed_on(name, streams=isgeneratorfunction(value))
        for name, value in vars(rank_class).items()
        if isfunction(value) and not name.startswith("_")
    }
    return type("RankProcess", (), {"__init__": __init__, **methods})


def _handed_on(name: str, *, streams: bool) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self.rank, name)(*arguments, **named)

    def stream(self: Any, *arguments: Any, **named: Any) -> Iterator[Any]:  # Ray must see a generator
        yield from getattr(self.rank, name)(*arguments, **named)

    found = stream if streams else method
    found.__name__ = name
    return found


# Forwarded variables: a process on an existing cluster has its node's environment, but ranks need
# the driver's settings of NCCL, vLLM, the Hugging Face hub and trackers.


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
"""Prefixes of forwarded variables. `_environment` adds others."""
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
"""Variables that Weft does not forward: they hold addresses and folders of the driver's node."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks get from the driver. They may contain secrets, so Weft sends
    them with a rank's arguments and never writes them to disk.

    >>> forwarded({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_x", "VLLM_CACHE_ROOT": "/home/me/.cache", "HOME": "/home/me"})
    {'NCCL_DEBUG': 'INFO', 'HF_TOKEN': 'hf_x'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) and name not in OF_A_NODE
    }


# Network interface of a node's address. Otherwise gloo, NCCL and vLLM use the first one they find.


def interface_of(address: str) -> str | None:
    """Return the network interface with this address, or None if this machine has none.

    >>> interface_of("127.0.0.1"), interface_of("192.0.2.1")
    ('lo', None)
    """
    wanted = ipaddress.ip_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        own = [
            a.address.partition("%")[0]
            for a in addresses
            if a.family in (socket.AF_INET, socket.AF_INET6)
        ]
        if wanted in map(ipaddress.ip_address, own):
            return name
    return None


def network_environment(address: str) -> dict[str, str]:
    """Return environment variables that make gloo, NCCL and vLLM use this address.

    >>> network_environment("127.0.0.1")
    {'VLLM_HOST_IP': '127.0.0.1', 'GLOO_SOCKET_IFNAME': 'lo', 'NCCL_SOCKET_IFNAME': '=lo'}
    """
    name = interface_of(address)
    found = {"VLLM_HOST_IP": address}
    return found | ({"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {})


# Sample notes: a rank records its current sample, so that the driver knows it if the process dies


class _SampleNote:
    """Eight bytes of a memory-mapped file with the current sample's id. The file outlives the
    process. The first call of `Context.at` creates it."""

    FORMAT = struct.Struct("<q")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: mmap.mmap | None = None
        path.unlink(missing_ok=True)  # left by an earlier process of the rank

    def __call__(self, sample_id: int | None) -> None:
        if self._bytes is None:
            make_file(self._path)
            self._path.write_bytes(self.FORMAT.pack(-1))
            with self._path.open("r+b") as file:
                self._bytes = mmap.mmap(file.fileno(), self.FORMAT.size)
        self._bytes[:] = self.FORMAT.pack(-1 if sample_id is None else sample_id)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def noted_sample(logs: Path, group: str, rank: int) -> int | None:
    """Return the id of the last sample that a rank recorded next to its log, or None."""
    path = _note_path(logs, group, rank)
    written = path.read_bytes() if path.exists() else b""
    if len(written) != _SampleNote.FORMAT.size:
        return None
    (sample_id,) = _SampleNote.FORMAT.unpack(written)
    return None if sample_id < 0 else sample_id


def _note_path(logs: Path, group: str, rank: int) -> Path:
    return logs / f"{group}_{rank}.at"


# Rank

MAX_CALLS = 64
"""Maximum number of concurrent calls with rows on a rank, each in its own thread."""
CONTROL = "control"
"""Ray concurrency group for calls without rows, which calls with rows cannot block."""
CONTROL_CALLS = 16


@dataclass(frozen=True)
class RankFiles:
    files: Files
    node_names: Mapping[str, str]
    """Ray's id of a node -> its name in segment references."""
    replaced: int
    """Number of times the rank was replaced. Each of its processes has separate files."""
    peers: Peers | None
    models: ModelFolders | None = None
    """Model folders in the group's settings that other nodes may lack."""
    written_on: str | None = None
    """Name of the driver's node if the group writes into the run's directory."""
    alone: bool = False
    """Whether the cluster can only have one node."""


@dataclass(frozen=True)
class Standing:
    at: Coordinates | Failure
    """The rank's coordinates in the group's mesh, or why it did not start."""
    node: str
    """Name of the rank's node in segment references."""
    node_id: str


class _Rank:
    """One rank of a group, in a process of `rank_process`, with a log in the run's directory.

        started ──take_port──> has a port ──begin──> its worker is made ──close──> closed
            └───────────────────────────────┘

    Only rank 0 of a group with a rendezvous takes a port. Ray runs each call on its own thread, but
    only the executor's thread runs the worker.
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
            # The user's settings win.
            os.environ.setdefault(variable, value)
        write_on_request()
        address = "" if files.alone else ray.util.get_node_ip_address()
        context = replace(context, address=address)
        self._note: _SampleNote | None = None
        self._node_id: str = ray.get_runtime_context().get_node_id()
        # A node without a name has joined only recently.
        self._node = files.node_names.get(self._node_id) or f"node-{self._node_id}"
        self._hidden: str | None = None
        """Reason that the worker cannot be made on this node."""
        if (run := context.run_dir) is not None:
            logs = files.files.logs_of_node(self._node, run)
            _log_to(logs / f"{context.name}_{context.rank}.log")
            self._note = _SampleNote(_note_path(logs, context.name, context.rank))
            context = replace(context, at=self._note)
            if not files.files.are_beside(run):
                if files.written_on not in (None, self._node):
                    self._hidden = (
                        f"node {self._node!r} does not see the run's directory, {run} on the driver's node, but {context.name!r} has "
                        "checkpoints or samples to write there; choose a root that all nodes see (Driver(root=...)), or place "
                        f"{context.name!r} on the driver's node"
                    )
                context = replace(context, run_dir=None)
        again = f"-again{files.replaced}" if files.replaced else ""
        self._data = files.files.access(self._node, f"{context.name}-{context.rank}{again}")
        if files.peers is not None:
            self.connect(files.peers)
        self._executor = ExecutorThread(self._data)
        self._context = replace(context, advance=self._executor.advance, wake=self._executor.wake)
        self._worker_class, self._config = worker_class, config
        self._models = files.models
        self._port: socket.socket | None = None

    def process(self) -> tuple[str, int]:
        return self._node, os.getpid()

    def take_port(self, host: str, secret: str, timeout_s: float) -> Rendezvous:
        """Reserve a free port of this machine for the group's rendezvous."""
        self._port = take_port(host)
        return replace(Rendezvous.at(self._port, secret, timeout_s), taken=None)

    def begin(self, rendezvous: Rendezvous | None, *, offload: bool = False) -> Standing:
        """Make the worker, and wait until it is up.

        Args:
            rendezvous: Where the ranks of the group meet; None if they do not.
            offload: Offload the worker at once, to free GPU memory for the group that starts next.
        """
        if rendezvous is not None:
            rendezvous = replace(rendezvous, taken=self._port)
        context = replace(self._context, rendezvous=rendezvous)

        def make() -> Worker:
            if self._hidden is not None:
                raise UserError(self._hidden)
            config = self._config
            if self._models is not None:
                config = self._models.on_node(self._node_id, config, context.advance)
            worker = self._worker_class(config, context)
            if offload:
                worker.offload()
            return worker

        worker = self._executor.begin(make)
        return Standing(
            worker if isinstance(worker, Failure) else worker.coordinates, self._node, self._node_id
        )

    def advanced(self) -> bool:
        return self._executor.has_advanced()

    def connect(self, peers: Peers) -> None:
        self._data.reader.fetch = peers.fetch

    def call(self, task: Task) -> Iterator[Reply]:
        yield from self._executor.replies_to(task)

    def cancel_call(self, number: int) -> None:
        self._executor.between_turns(lambda executor: executor.cancel_call(number))

    def give_up_rows(self, number: int, sample_ids: list[int]) -> None:
        self._executor.between_turns(lambda executor: executor.give_up_rows(number, sample_ids))

    def close(self) -> None:
        self._executor.close()
        if self._port is not None:
            self._port.close()
        self._data.close()
        if self._note is not None:
            self._note.close()


def start_rank(
    handle: Handle, place: Place, context: Context, pool: ReservedPool, sharing: int, files: RankFiles
) -> Any:
    """Start a rank's process, and return its actor, which has no worker yet. `sharing` is the number
    of groups on the pool."""
    import ray
    from ray import cloudpickle

    at = position(place, context.rank)
    part = pool.parts[at.node_rank]
    gpus = devices(place, context.rank, part.gpus)
    found: Any = None
    # Ray may have moved the bundle to another node, with other GPUs.
    if place.gpus and (files.replaced or not part.node):
        first = part.first_gpu + at.local_rank * place.gpus
        found = replace(part, first_gpu=first, own_gpus=place.gpus).find_gpus()
    context = replace(
        context, node_rank=at.node_rank, local_rank=at.local_rank, nodes=at.nodes, devices=gpus
    )
    remote: Any = ray.remote
    actor = remote(concurrency_groups={CONTROL: CONTROL_CALLS})(rank_process(_Rank)).options(
        # Groups on a pool take turns, so together they request only the pool's CPUs.
        num_cpus=pool.cpus / (sharing * place.ranks),
        num_gpus=0,
        scheduling_strategy=part.strategy,
        # A new process has no weights, so the driver replaces ranks itself.
        max_restarts=0,
        max_concurrency=MAX_CALLS,
    )
    rank = cloudpickle.dumps((_Rank, handle.worker_class, handle.config, context, files))  # pyright: ignore[reportPrivateImportUsage]
    return actor.remote(_environment(handle, place, gpus), rank, found)


def _environment(handle: Handle, place: Place, gpus: Sequence[str]) -> dict[str, str]:
    """Environment of a rank's process, to be set before any import that reads it."""
    # Waiting OpenMP threads spin, which slows the thread that starts vLLM's kernels.
    generates = issubclass(handle.worker_class, RolloutWorker)
    threads = 1 if place.gpus and generates else place.threads
    given = forwarded(os.environ)
    return {
        **given,
        **(allocator_settings(handle, given) if gpus else {}),
        # Thread counts must be set before torch is imported.
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        # Rank i of every group on a pool sees the same devices. Ray cannot guarantee this with
        # fractional GPUs, so Weft requests none from it. The last variable stops Ray from changing
        # CUDA_VISIBLE_DEVICES.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def allocator_settings(handle: Handle, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that sets up torch's allocators on a rank with GPUs. Options in the
    variables `given` by the user win.

    >>> allocator_settings(Handle(Worker, None, "reward"), {"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_cached_size_mb:4"})
    {'PYTORCH_ALLOC_CONF': 'pinned_max_round_threshold_mb:16,pinned_max_cached_size_mb:4'}
    """
    own: dict[str, str] = {}
    # Microbatches of changing sizes would leave gaps. Other processes cannot map such memory.
    if isinstance(handle.config, ModelConfig) and not handle.transport.endswith("ipc"):
        own["expandable_segments"] = "True"
    # Large blocks get their exact size, not the next power of two. It needs the second option:
    # torch 2.13 would serve a request from a freed block of the same power of two, even from a smaller
    # one.
    own["pinned_max_round_threshold_mb"] = own["pinned_max_cached_size_mb"] = str(PINNED_MIB)
    # torch reads the first of these that is set.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    users = next((given[name] for name in names if given.get(name)), "")
    chosen = {option.partition(":")[0].strip() for option in users.split(",")}
    options = [f"{name}:{value}" for name, value in own.items() if name not in chosen]
    return {names[0]: ",".join([*options, *filter(None, [users])])}


def _log_to(path: Path) -> None:
    """Redirect all output of this process, including C libraries, to a file."""
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
