"""RayBackend: each rank is a Ray actor. No other file knows Ray, but the program `cluster_probe.py`, which imports nothing of ours.

Ray carries calls and small replies; the columns of rows lie in segments, which workers write and map themselves, and
fetch from other nodes by Arrow Flight. A local
cluster listens on loopback alone, keeps its files in a folder of its own, and is gone when the run ends.
"""

from __future__ import annotations

import functools
import itertools
import logging
import mmap
import os
import queue
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.arguments import names_arguments
from ...dataflow.buffer.disk import make_file, make_folder
from ...dataflow.errors import UserError, WorkerError
from ...dataflow.handle import Handle
from ...workers.worker import Context
from ..executor import Activity, Executor, failure_of, replies_of
from ..group import Call, WorkerGroup
from ..placement import Place, ResourcePool, is_own, machine_cpus, machine_gpus, require_nodes
from ..signals import signals_deferred
from ..tasks import Failure, Reply, Task
from .backend import START_TIMEOUT_S, Event, Files, Setup, plain_name, this_node
from .cluster import address_of, nodes_of, sizes
from .interface import network_environment
from .out_of_memory import kills, why_ended

if TYPE_CHECKING:
    from ...dataflow.buffer.flight import Deletions

NODE_TIMEOUT_S = 5.0
"""Longest wait for a node to accept a connection, when a process is gone, or rows cannot be read."""
MAX_CALLS = 64
"""Calls with rows on one rank that may be under way, each of which has a thread there; all but one of them wait for their turn."""
CONTROL = "control"
"""Calls without rows (weights, checkpoints, cancelling, closing) have threads of their own, which no number of the others can occupy."""
CONTROL_CALLS = 16
POOL_TIMEOUT_S = 30.0
"""Longest wait for the pools of a placement, which others on the cluster may hold."""
OWN_POOL_TIMEOUT_S = 1.0
"""Longest wait for a CPU of its own for a group without a place."""
CLOSE_TIMEOUT_S = 5.0
"""Longest wait for workers to release what they hold, before they are ended without being asked."""


@dataclass(frozen=True)
class Reserved:
    """A resource pool that the cluster has set aside."""

    strategy: Any
    """Schedules an actor into it."""
    gpus: Sequence[str]
    """Its devices, as `CUDA_VISIBLE_DEVICES` names them on its node."""
    cpus: int
    """What Ray counts as taken by it; 0: its groups are guests on another pool's node."""


@dataclass(frozen=True)
class Peers:
    """What every rank is told of the servers of segments."""

    locations: Mapping[str, str]
    """Name of a node -> where its server listens."""
    token: str
    certificates: Mapping[str, bytes]
    """Location -> certificate, of those that encrypt."""


@names_arguments
class RayBackend:
    """A local Ray cluster made for this run, or the cluster at `address` (or in `RAY_ADDRESS`)."""

    def __init__(self, address: str | None = None) -> None:
        self.address = address_of(address)
        self._cluster_nodes: list[tuple[int, int]] | None = None
        """CPUs and GPUs of each node of the cluster at `address`, when it has been asked."""
        self._streams: dict[Any, tuple[Call, int]] = {}
        self._actors: dict[tuple[str, int], Any] = {}
        self._lives: dict[tuple[str, int], int] = {}
        """How often each rank was replaced."""
        self._started: tuple[Setup, Mapping[str, Reserved], Mapping[str, str]] | None = None
        self._peers: Peers | None = None
        """What every rank was told of the other nodes, when there are any."""
        self._nodes: Mapping[str, str] = {}
        """Ray's id -> name, of those that ranks stand on, and the driver's."""
        self._groups: list[Any] = []
        self._folder: str | None = None
        self._reaper: subprocess.Popen[str] | None = None
        self._name = f"weft-{uuid.uuid4().hex[:12]}"
        self._kills: dict[str, int] = {}
        """Processes that the kernel of this machine had ended for want of memory, when it was looked at last."""
        self._connected = False
        """Whether it was this backend that connected to Ray, and so disconnects."""
        self._run_dir = Path()
        self._servers: list[Any] = []
        self._deletions: Deletions | None = None

    def __repr__(self) -> str:
        return f"RayBackend({self.address!r})" if self.address else "RayBackend()"

    def check(self, placement: Mapping[str, Place]) -> None:
        if self.address:
            self._find_cluster()
            require_nodes(placement, self._cluster_nodes or (), f"the cluster at {self.address}")
        else:
            require_nodes(placement, [(machine_cpus(), machine_gpus())], "this machine")

    def _find_cluster(self) -> None:
        """Ask the cluster for its nodes, if it has not been asked.

        Raises:
            UserError: it is not there, or does not let us in.
        """
        if self._cluster_nodes is None and self.address:
            ray = sys.modules.get("ray")
            joined = ray is not None and ray.is_initialized()
            nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]] if ray and joined else nodes_of(self.address)
            self._cluster_nodes = sizes(nodes)

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        if not self.address:
            # Ray reads these when it is imported: listen on loopback alone (test_sockets.py holds it to that), and ask
            # for a token, which is its default for local clusters (said aloud, it prints no warning).
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray

        self._run_dir = setup.run_dir
        self._kills = kills()
        self._find_cluster()  # unless `check` has just done so
        self._cluster_nodes = None
        self._connect(setup.placement)
        pools = self._reserve(setup)
        names = _node_names(ray.nodes(), ray.get_runtime_context().get_node_id())
        self._started = setup, pools, names
        starting = {
            self._start_rank(name, rank): f"{name}[{rank}]"
            for name in setup.handles
            for rank in range(setup.placement[name].ranks)
        }
        meshes = self._wait_until_up(starting)
        standing = {who: node for who, (_, node) in meshes.items()}
        _check_weights_stay(setup, standing)
        used = {this_node(), *standing.values()}
        self._nodes = {id: name for id, name in names.items() if name in used}
        if len(used) > 1:
            self._connect_nodes(setup.files, self._nodes)
        return {
            name: WorkerGroup(
                name,
                handle,
                setup.placement[name],
                [meshes[f"{name}[{r}]"][0] for r in range(setup.placement[name].ranks)],
                self._submit,
            )
            for name, handle in setup.handles.items()
        }

    def _start_rank(self, name: str, rank: int, life: int = 0) -> Any:
        """Start a process; returns the promise of where it stands. `life`: how often the rank was replaced."""
        assert self._started is not None
        setup, pools, names = self._started
        place = setup.placement[name]
        rendezvous = self._rendezvous(name) if place.ranks > 1 else None
        sharing = sum(1 for p in setup.placement.values() if p.pool.name == place.pool.name)
        context = Context(name, rank, place.ranks, rendezvous, setup.run_dir, setup.seed, watched=True)
        data = setup.files, names, life, self._peers
        actor = self._actor(setup.handles[name], place, context, pools[place.pool.name], sharing, data)
        self._actors[name, rank] = actor
        self._lives[name, rank] = life
        return actor.coordinates.remote()

    def replace(self, group: WorkerGroup, rank: int) -> None:
        import ray

        for stream in [s for s, (call, r) in self._streams.items() if call.group is group and r == rank]:
            del self._streams[stream]
        ray.kill(self._actors[group.name, rank])  # it may hang, or have lost its connection alone
        self._start_rank(group.name, rank, self._lives[group.name, rank] + 1)

    has_processes = True

    @property
    def nodes(self) -> Collection[str]:
        return self._nodes.values()

    def has_lost_node(self) -> bool:
        if len(self._nodes) == 1:
            return False  # it is the driver's own
        import ray

        return not all(n["Alive"] and _listens(n) for n in ray.nodes() if n["NodeID"] in self._nodes)

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        return SampleNote.read(SampleNote.path(self._run_dir, group.name, rank))

    def _connect_nodes(self, files: Files, names: Mapping[str, str]) -> None:
        """A server of segments on each node, and every rank told where they are."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from ...dataflow.buffer.flight import Deletions

        token = secrets.token_hex(32)
        addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
        loopback = len({addresses[id] for id in names}) == 1  # all of them are this machine
        for id, name in names.items():
            host = "127.0.0.1" if loopback else addresses[id]
            strategy = NodeAffinitySchedulingStrategy(id, soft=False)
            server = ray.remote(SegmentHost).options(num_cpus=0, scheduling_strategy=strategy)
            self._servers.append(server.remote(files.folder / name, name, host, token, encrypted=not loopback))
        found = ray.get([s.found_at.remote() for s in self._servers], timeout=START_TIMEOUT_S)
        peers = {name: location for name, (location, _) in zip(names.values(), found, strict=True)}
        certificates = {location: certificate for location, certificate in found if certificate}
        self._peers = Peers(peers, token, certificates)
        told = [actor.connect.remote(self._peers) for actor in self._actors.values()]
        ray.get(told, timeout=START_TIMEOUT_S)
        self._deletions = Deletions(peers, token, certificates=certificates)

    def delete(self, node: str, file: str) -> None:
        if self._deletions is not None:
            self._deletions(node, file)

    def _connect(self, placement: Mapping[str, Place]) -> None:
        import ray

        if ray.is_initialized():
            return
        from ray._private import utils

        self._connected = True
        with signals_deferred("Ray has started, and is ended again"):
            set_handler = utils.set_sigterm_handler
            utils.set_sigterm_handler = lambda *_: None  # Ray's own ends the process on the spot
            try:
                self._init_ray(placement)
            finally:
                utils.set_sigterm_handler = set_handler

    def _init_ray(self, placement: Mapping[str, Place]) -> None:
        import ray
        from ray._private import services
        from ray.exceptions import RayError

        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        if self.address:
            try:
                ray.init(address=self.address, namespace="weft", **quiet)
            except (ConnectionError, RuntimeError, RayError) as error:  # gone since it was asked
                raise UserError(f"the Ray cluster at {self.address} cannot be joined: {error}") from None
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray's sockets lie in it, 66 characters deeper, and the path of a socket has at most 107.
        self._folder = tempfile.mkdtemp(prefix="weft-", dir=None if len(tempfile.gettempdir()) <= 28 else "/tmp")
        self._reaper = reaper = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py"))),
                *(self._folder, str(os.getsid(0))),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        pools = {p.pool.name: p.pool for p in placement.values()}
        start = services.ConsolePopen

        def start_apart(*arguments: Any, **settings: Any) -> Any:
            # A signal to the process group of a run (from a terminal, or a batch system) is for the driver: Ray's own processes
            # must live for as long as it takes to save. An internal name: test_checkpoints.py sends such a signal.
            process = start(*arguments, **settings, process_group=0)
            assert reaper.stdin is not None
            print(process.pid, file=reaper.stdin, flush=True)
            return process

        services.ConsolePopen = start_apart  # pyright: ignore[reportAttributeAccessIssue]
        try:
            self._start_cluster(pools, quiet)
        finally:
            services.ConsolePopen = start

    def _start_cluster(self, pools: Mapping[str, ResourcePool], quiet: Mapping[str, Any]) -> None:
        import ray

        ray.init(
            address="local",
            # Groups without a place share the machine with the pools.
            num_cpus=max(machine_cpus(), sum(p.cpus for p in pools.values())),
            object_store_memory=_object_store_bytes(),
            include_dashboard=False,
            _temp_dir=f"{self._folder}/r",  # which Ray opens to everybody; nobody else comes through the folder above it
            namespace="weft",
            **quiet,
        )

    def _reserve(self, setup: Setup) -> dict[str, Reserved]:
        """Set the pools aside. Those that a user sized are waited for; those of groups without a place get a CPU of their own where
        one is free, and are guests of another pool else, whose groups are idle when they work."""
        pools = {p.pool.name: p.pool for p in setup.placement.values()}
        own = [name for name, pool in pools.items() if is_own(pool)]
        sized = [name for name in pools if name not in own] or own[:1]
        reserved = self._set_aside({name: pools[name] for name in sized}, POOL_TIMEOUT_S)
        if missing := [name for name in sized if name not in reserved]:
            import ray

            raise UserError(
                f"{', '.join(f'resource pool {name!r} ({pools[name]})' for name in missing)} did not get what it asks for on one node "
                f"within {POOL_TIMEOUT_S:.0f} s; the cluster has {ray.available_resources()} to give"
            )
        reserved |= self._set_aside({n: pools[n] for n in own if n not in reserved}, OWN_POOL_TIMEOUT_S)
        largest = max(reserved, key=lambda name: pools[name].cpus)
        for name in own:
            leader = next((e.leader for e in setup.follows if setup.placement[e.follower].pool.name == name), None)
            host = setup.placement[leader].pool.name if leader else largest
            reserved.setdefault(name, replace(reserved.get(host, reserved[largest]), gpus=(), cpus=0))
        return reserved

    def _set_aside(self, pools: Mapping[str, ResourcePool], timeout_s: float) -> dict[str, Reserved]:
        """Set aside those of the pools that are free in time; the others are not asked for any more."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        def devices(pool: ResourcePool) -> dict[str, float]:
            return {"CPU": pool.cpus, **({"GPU": pool.gpus} if pool.gpus else {})}

        groups = {
            name: ray.util.placement_group([devices(pool)], strategy="STRICT_PACK") for name, pool in pools.items()
        }
        deadline = time.monotonic() + timeout_s
        reserved: dict[str, Reserved] = {}
        for name, group in groups.items():
            if not group.wait(max(0.0, deadline - time.monotonic())):
                ray.util.remove_placement_group(group)
                continue
            self._groups.append(group)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            gpus: list[str] = []
            if pools[name].gpus:  # which ones they are, is known only to who holds them
                held = ray.remote(_gpu_ids).options(num_gpus=pools[name].gpus, num_cpus=0, scheduling_strategy=strategy)
                gpus = ray.get(held.remote(), timeout=START_TIMEOUT_S)
            reserved[name] = Reserved(strategy, gpus, pools[name].cpus)
        return reserved

    def _actor(
        self, handle: Handle, place: Place, context: Context, reserved: Reserved, sharing: int, data: Any
    ) -> Any:
        import ray

        threads = str(place.threads)
        # Threads are set in the environment: they must be known before anything in the process imports torch.
        env = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        # Rank i of every group on a pool sees the same devices; on a pool without GPUs, none. Ray, asked for shares of GPUs, would
        # not promise the former; asked for none, it hides nothing, or hides all, as this variable says.
        own = reserved.gpus[context.rank * place.gpus : (context.rank + 1) * place.gpus]
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(own), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        options: dict[str, Any] = {
            "num_cpus": reserved.cpus / (sharing * place.ranks),
            "num_gpus": 0,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": reserved.strategy,
            "max_restarts": 0,
            "max_concurrency": MAX_CALLS,
        }
        remote: Any = ray.remote
        return (
            remote(concurrency_groups={CONTROL: CONTROL_CALLS})(Rank)
            .options(**options)
            .remote(handle.worker_class, handle.config, context, *data)
        )

    def _rendezvous(self, name: str) -> str:
        """Where the ranks of a group meet: a file on the node of its pool; no port is opened for it."""
        return (
            f"file:///tmp/{self._name}-{self._started[0].files.start if self._started else 0}-{name.replace('/', '_')}"
            if not self._folder
            else f"file://{self._folder}/{name}"
        )

    def _wait_until_up(self, starting: dict[Any, str]) -> dict[str, Any]:
        import ray
        from ray.exceptions import RayError

        meshes: dict[str, Any] = {}
        pending = list(starting)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=START_TIMEOUT_S)
            if not ready:
                raise WorkerError(
                    f"workers {', '.join(starting[r] for r in pending)} were not up after {START_TIMEOUT_S:.0f} s"
                )
            for ref in ready:
                try:
                    failure, coordinates, node = ray.get(ref, timeout=START_TIMEOUT_S)
                except RayError as error:
                    raise WorkerError(self._died(starting[ref], error)) from None
                if failure is not None:
                    if failure.user_error:
                        raise UserError(f"worker {starting[ref]}: {failure.message}")
                    raise WorkerError(f"worker {starting[ref]} could not start: {failure.message}\n{failure.traceback}")
                meshes[starting[ref]] = coordinates, node
        return meshes

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        options = {"num_returns": "streaming"} | ({"concurrency_group": CONTROL} if task.rows is None else {})
        stream = self._actors[call.group.name, rank].call.options(**options).remote(task)
        self._streams[stream] = (call, rank)

    def clock(self) -> float:
        return time.monotonic()

    def cancel(self, call: Call) -> None:
        for rank in call.ranks:
            self._actors[call.group.name, rank].cancel.options(concurrency_group=CONTROL).remote(call.number)

    def wait(self, timeout_s: float) -> Sequence[Event]:
        import ray
        from ray.exceptions import RayError

        streams = list(self._streams)
        ready: Any
        ready, _ = ray.wait(streams, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready and len(streams) > 1:  # whatever else has come by now, at no wait
            ready, _ = ray.wait(streams, num_returns=len(streams), timeout=0, fetch_local=False)
        events: list[Event] = []
        for stream in ready:
            call, rank = self._streams[stream]
            try:
                reply: Any = ray.get(next(stream), timeout=START_TIMEOUT_S)
            except (RayError, StopIteration) as error:
                message = self._died(f"{call.group.name}[{rank}]", error)
                reply = Reply(failure=Failure(message, "", user_error=False, died=True))
            if reply.done or reply.failure is not None:
                del self._streams[stream]
            events.append(Event(call, rank, reply))
        return events

    def _died(self, who: str, error: BaseException) -> str:
        """What is known of a process that is gone: the end of its own log says more than Ray does."""
        log = self._run_dir / "logs" / f"{who.replace('[', '_').rstrip(']')}.log"
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else str(error)
        now = kills()
        why = why_ended(error, self._kills, now)
        self._kills = now
        return f"its process ended ({why or type(error).__name__}); the end of {log.name}:\n{tail}"

    def close(self) -> None:
        if not (self._connected or self._actors or self._groups):
            return
        import ray
        from ray.exceptions import RayError

        try:
            if self._deletions is not None:  # while the servers are there
                self._deletions.close()
            closing = [actor.close.options(concurrency_group=CONTROL).remote() for actor in self._actors.values()]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
            if not self._folder:
                for actor in (*self._actors.values(), *self._servers):
                    ray.kill(actor)
                for group in self._groups:
                    ray.util.remove_placement_group(group)
        except RayError:  # the cluster is gone, and everything in it
            pass
        finally:
            self._actors.clear()
            self._lives.clear()
            self._streams.clear()
            self._peers = self._deletions = None
            self._groups.clear()
            self._servers.clear()
            if self._connected:
                ray.shutdown()
                self._connected = False
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
            if self._reaper is not None:  # it finds nothing to do
                with suppress(subprocess.TimeoutExpired):
                    self._reaper.communicate(timeout=CLOSE_TIMEOUT_S)
                self._reaper = None


class Rank:
    """One rank of a group, inside its Ray actor process: the worker with its executor, and its log in the run directory.

    Ray calls in on a thread for each call; all of the work is done by one thread, which is the worker's own.
    """

    def __init__(
        self,
        worker_class: type,
        config: Any,
        context: Context,
        files: Files,
        names: Mapping[str, str],
        life: int,
        peers: Peers | None,
    ) -> None:
        import ray

        for variable, value in network_environment(ray.util.get_node_ip_address()).items():
            os.environ.setdefault(variable, value)
        self._note: SampleNote | None = None
        self._activity = Activity()
        context = replace(context, advance=self._activity)
        if context.run_dir is not None:
            _log_to(context.run_dir / "logs" / f"{context.name}_{context.rank}.log")
            self._note = SampleNote(SampleNote.path(context.run_dir, context.name, context.rank))
            context = replace(context, at=self._note)
        self.worker: Any = None
        self.failure: Failure | None = None
        self.node = names[ray.get_runtime_context().get_node_id()]
        self.data = files.access(self.node, f"{context.name}-{context.rank}" + (f"-again{life}" if life else ""))
        if peers is not None:
            self.connect(peers)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._executor: Executor | None = None
        self._thread = threading.Thread(target=self._work, args=(worker_class, config, context), daemon=True)
        self._up = threading.Event()
        self._thread.start()

    def _work(self, worker_class: type, config: Any, context: Context) -> None:
        try:
            self.worker = worker_class(config, context)
            self._executor = Executor(self.worker, self.data)
        except Exception as error:  # reported by coordinates(), as text: not every exception survives a pickle
            self.failure = failure_of(error)
        self._up.set()
        try:
            while True:
                if self._executor is not None and self._executor.busy and self._inbox.empty():
                    self._executor.take_turn()
                    continue
                wanted = self._inbox.get()
                if wanted is None:
                    break
                wanted()
        except BaseException:  # a worker that ends its thread ends its process: nobody waits for it in vain
            traceback.print_exc()
            os._exit(1)
        try:
            if self.worker is not None:
                self.worker.close()
        finally:
            self.data.close()
            if self._note is not None:
                self._note.close()

    def coordinates(self) -> tuple[Any, Any, str]:
        self._up.wait()
        return self.failure, None if self.failure else self.worker.coordinates, self.node

    def connect(self, peers: Peers) -> None:
        """Where the other nodes are, and how their servers let one in."""
        reader = self.data.reader
        reader.peers = {node: location for node, location in peers.locations.items() if node != self.node}
        reader.token, reader.certificates = peers.token, peers.certificates

    def call(self, task: Task) -> Iterator[Reply]:
        self._up.wait()
        if self.failure is not None:
            yield Reply(failure=self.failure)
            return
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        assert self._executor is not None
        self._inbox.put(functools.partial(self._executor.add, task, replies.put))
        yield from replies_of(replies, self._activity)

    def cancel(self, number: int) -> None:
        assert self._executor is not None
        self._inbox.put(functools.partial(self._executor.cancel, number))

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()


class SampleNote:
    """The sample that a rank works on, in eight bytes of a file of the run: what is written there outlives the process. The file is
    made when a worker first says what it works on, and goes with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: mmap.mmap | None = None
        path.unlink(missing_ok=True)  # of another process of the rank

    def __call__(self, sample_id: int | None) -> None:
        if self._bytes is None:
            make_file(self._path)
            self._path.write_bytes(_EIGHT.pack(-1))
            with self._path.open("r+b") as file:
                self._bytes = mmap.mmap(file.fileno(), _EIGHT.size)
        self._bytes[:] = _EIGHT.pack(-1 if sample_id is None else sample_id)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)

    @staticmethod
    def read(path: Path) -> int | None:
        if not path.exists():
            return None
        written = path.read_bytes()
        (sample_id,) = _EIGHT.unpack(written) if len(written) == _EIGHT.size else (-1,)
        return None if sample_id < 0 else sample_id

    @staticmethod
    def path(run_dir: Path, group: str, rank: int) -> Path:
        return run_dir / "logs" / f"{group}_{rank}.at"


_EIGHT = struct.Struct("<q")


class SegmentHost:
    """The server of one node's segments, in its Ray actor process."""

    def __init__(self, folder: Path, node: str, host: str, token: str, *, encrypted: bool) -> None:
        from ...dataflow.buffer.certificate import make_certificate
        from ...dataflow.buffer.flight import SegmentServer

        own = make_certificate() if encrypted else None
        self.server = SegmentServer(folder, host=host, token=token, node=node, certificate=own)
        self._certificate = own.certificate if own else None

    def found_at(self) -> tuple[str, bytes | None]:
        """Where it listens, and its certificate, when it encrypts."""
        return self.server.location, self._certificate


def _node_names(nodes: Sequence[Mapping[str, Any]], here: str) -> dict[str, str]:
    """Ray's node id -> what the node is called in references: after its host, the same in the next run."""
    names = {here: this_node()}
    for node in sorted(nodes, key=lambda n: (n["NodeManagerHostname"], n["NodeID"])):
        if node["Alive"] and node["NodeID"] not in names:
            base = name = plain_name(node["NodeManagerHostname"])
            for number in itertools.count(2):
                if name not in names.values():
                    break
                name = f"{base}-{number}"
            names[node["NodeID"]] = name
    return names


def _listens(node: Mapping[str, Any]) -> bool:
    """Whether the node is there; the cluster itself may take a while to notice that it is not."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), NODE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _check_weights_stay(setup: Setup, standing: Mapping[str, str]) -> None:
    """Weights pass through the memory of one node.

    Raises:
        UserError: naming the groups that would need them to travel.
    """
    for edge in setup.follows:
        nodes = {n for who, n in standing.items() if who.split("[")[0] in (edge.leader, edge.follower)}
        if len(nodes) > 1:
            raise UserError(
                f"{edge.follower!r} follows {edge.leader!r}, but they stand on {len(nodes)} nodes ({', '.join(sorted(nodes))}); "
                "weights still pass through the memory of one node: put both groups on one resource pool"
            )


def _log_to(path: Path) -> None:
    """Everything that this process prints, libraries in C included, goes to its own log."""
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _gpu_ids() -> list[str]:
    """The devices of the pool in whose bundle this runs."""
    import ray

    return [str(i) for i in ray.get_gpu_ids()]


def _object_store_bytes() -> int:
    """An eighth of the free shared memory: calls and replies are all that Ray carries, and it would take a third of the machine."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 1 << 30
    return max(128 << 20, min(4 << 30, free // 8))
