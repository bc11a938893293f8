"""RayBackend: each rank is a Ray actor. The only file that knows Ray.

Batches travel between workers through Ray's object store; the driver holds references and small replies. A local
cluster listens on loopback alone, keeps its files in a folder of its own, and is gone when the run ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..dataflow.batch import Batch
from ..dataflow.errors import UserError
from ..dataflow.handle import Handle
from ..dataflow.ledger import Segment
from ..workers.worker import Context
from .backend import Event, Setup
from .group import Call, WorkerError, WorkerGroup
from .placement import Place, ResourcePool, machine_cpus, require_cpus
from .shell import Failure, Task, failure_of, run

START_TIMEOUT_S = 300.0
"""Longest wait for workers to be up: vLLM's imports and a large model's loading are in it."""
CLOSE_TIMEOUT_S = 5.0
"""Longest wait for workers to release what they hold, before they are ended without being asked."""


class RayBackend:
    """A local Ray cluster made for this run, or the cluster at `address` (or in `RAY_ADDRESS`)."""

    def __init__(self, address: str | None = None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS")
        self._streams: dict[Any, tuple[Call, int]] = {}
        self._actors: dict[tuple[str, int], Any] = {}
        self._groups: list[Any] = []
        self._folder: str | None = None
        self._run_dir = Path()

    def __repr__(self) -> str:
        return f"RayBackend({self.address!r})" if self.address else "RayBackend()"

    def check(self, placement: Mapping[str, Place]) -> None:
        if not self.address:
            require_cpus(placement, machine_cpus(), "this machine")

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        os.environ.setdefault(
            "RAY_AUTH_MODE", "token"
        )  # its default for local clusters; said aloud, it prints no warning
        if not self.address:
            # Ray reads it when it is imported, and listens on loopback alone; test_sockets.py holds it to that.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        import ray

        self._run_dir = setup.run_dir
        self._connect(setup.placement)
        if self.address:
            require_cpus(setup.placement, int(ray.cluster_resources().get("CPU", 0)), f"the cluster at {self.address}")
        pools = self._reserve({p.pool.name: p for p in setup.placement.values()}, setup.placement)
        starting: dict[Any, str] = {}
        for name, handle in setup.handles.items():
            place = setup.placement[name]
            rendezvous = self._rendezvous(name) if place.ranks > 1 else None
            sharing = sum(1 for p in setup.placement.values() if p.pool.name == place.pool.name)
            for rank in range(place.ranks):
                context = Context(name, rank, place.ranks, rendezvous, setup.run_dir, setup.seed)
                actor = self._actor(handle, place, context, pools[place.pool.name], sharing)
                self._actors[name, rank] = actor
                starting[actor.coordinates.remote()] = f"{name}[{rank}]"
        meshes = self._wait_until_up(starting)
        return {
            name: WorkerGroup(
                name,
                handle,
                setup.placement[name],
                [meshes[f"{name}[{r}]"] for r in range(setup.placement[name].ranks)],
                self._submit,
                setup.ids,
            )
            for name, handle in setup.handles.items()
        }

    def _connect(self, placement: Mapping[str, Place]) -> None:
        import ray

        if ray.is_initialized():
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._init_ray(placement)
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():  # Ray puts its own in place, which end the process on the spot
                    signal.signal(number, handler)

    def _init_ray(self, placement: Mapping[str, Place]) -> None:
        import ray

        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        if self.address:
            ray.init(address=self.address, namespace="weft", **quiet)
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray's sockets lie in it, 64 characters deeper, and the path of a socket has at most 107.
        self._folder = tempfile.mkdtemp(prefix="weft-", dir=None if len(tempfile.gettempdir()) <= 30 else "/tmp")
        pools = {p.pool.name: p.pool for p in placement.values()}
        ray.init(
            address="local",
            num_cpus=max(
                machine_cpus(), sum(p.cpus for p in pools.values())
            ),  # groups without a place share the machine
            num_gpus=sum(p.gpus for p in pools.values()) or None,
            object_store_memory=_object_store_bytes(),
            include_dashboard=False,
            _temp_dir=self._folder,
            namespace="weft",
            **quiet,
        )

    def _reserve(self, pools: Mapping[str, Place], placement: Mapping[str, Place]) -> dict[str, Any]:
        """A placement group for each pool: one bundle per device, so that rank i of each group shares bundle i."""
        import ray
        from ray.util.placement_group import placement_group

        reserved = {
            name: placement_group(_bundles(p.pool, _most_ranks(name, placement)), strategy="PACK")
            for name, p in pools.items()
        }
        self._groups = list(reserved.values())
        for name, group in reserved.items():
            ready, _ = ray.wait([group.ready()], timeout=30)
            if not ready:
                raise UserError(
                    f"resource pool {name!r} ({pools[name].pool}) did not get its devices within 30 s; "
                    f"the cluster has {ray.available_resources()}"
                )
        return reserved

    def _actor(self, handle: Handle, place: Place, context: Context, reserved: Any, sharing: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        num_bundles = len(reserved.bundle_specs)
        threads = str(place.threads)
        # Threads are set in the environment: they must be known before anything in the process imports torch.
        env = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        if not self.address:
            env |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
        options: dict[str, Any] = {
            "num_cpus": place.pool.cpus / num_bundles / (sharing * max(1, -(-place.ranks // num_bundles))),
            "num_gpus": place.gpus / sharing if place.gpus else 0,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                reserved, placement_group_bundle_index=context.rank % num_bundles
            ),
            "max_restarts": 0,
        }
        return ray.remote(Rank).options(**options).remote(handle.worker_class, handle.config, context)

    def _rendezvous(self, name: str) -> str:
        """Where the ranks of a group meet: a file on one machine (no port is opened), a TCP port of the driver's host else."""
        if self._folder:
            return f"file://{self._folder}/rendezvous-{name}"
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

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
                    failure, coordinates = ray.get(ref)
                except RayError as error:
                    raise WorkerError(self._died(starting[ref], error)) from None
                if failure is not None:
                    if failure.user_error:
                        raise UserError(f"worker {starting[ref]}: {failure.message}")
                    raise WorkerError(f"worker {starting[ref]} could not start: {failure.message}\n{failure.traceback}")
                meshes[starting[ref]] = coordinates
        return meshes

    def store(self, batch: Batch) -> Segment:
        import ray

        return Segment(ray.put(batch), batch.num_bytes)

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        stream = self._actors[call.group.name, rank].call.options(num_returns="streaming").remote(task)
        self._streams[stream] = (call, rank)

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
                reply: Any = ray.get(next(stream))
                segment = Segment(next(stream), reply.num_bytes) if reply.stored else None
            except (RayError, StopIteration) as error:
                raise WorkerError(f"{call.describe(rank)}: {self._died(f'{call.group.name}[{rank}]', error)}") from None
            if reply.done or reply.failure is not None:
                del self._streams[stream]
            events.append(Event(call, rank, reply, segment))
        return events

    def _died(self, who: str, error: BaseException) -> str:
        """What is known of a process that is gone: the end of its own log says more than Ray does."""
        log = self._run_dir / "logs" / f"{who.replace('[', '_').rstrip(']')}.log"
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else str(error)
        return f"its process ended ({type(error).__name__}); the end of {log.name}:\n{tail}"

    def close(self) -> None:
        import ray

        closing = [actor.close.remote() for actor in self._actors.values()]
        if closing and ray.is_initialized():
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        if self._folder:  # a cluster of our own: everything in it ends with it, also when part of it is dead already
            ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        else:
            for actor in self._actors.values():
                ray.kill(actor)
            for group in self._groups:
                ray.util.remove_placement_group(group)
        self._actors.clear()
        self._streams.clear()
        self._groups.clear()


class Rank:
    """One rank of a group, inside its Ray actor process: the worker and its shell, its log in the run directory."""

    def __init__(self, worker_class: type, config: Any, context: Context) -> None:
        if context.run_dir is not None:
            _log_to(context.run_dir / "logs" / f"{context.name}_{context.rank}.log")
        self.worker: Any = None
        self.failure: Failure | None = None
        try:
            self.worker = worker_class(config, context)
        except Exception as error:  # reported by coordinates(), as text: not every exception survives a pickle
            self.failure = failure_of(error)

    def coordinates(self) -> tuple[Any, Any]:
        return self.failure, None if self.failure else self.worker.coordinates

    def call(self, task: Task) -> Iterator[Any]:
        for reply, batch in run(self.worker, task, _fetch):
            yield reply
            if batch is not None:
                yield batch

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


def _fetch(references: Sequence[Any]) -> Sequence[Batch]:
    import ray

    return ray.get(list(references))


def _log_to(path: Path) -> None:
    """Everything that this process prints, libraries in C included, goes to its own log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _most_ranks(pool: str, placement: Mapping[str, Place]) -> int:
    return max(p.ranks for p in placement.values() if p.pool.name == pool)


def _bundles(pool: ResourcePool, ranks: int) -> list[dict[str, float]]:
    """The pool cut into as many equal bundles as its widest group has ranks (fewer when there are fewer CPUs)."""
    number = max(1, min(ranks, pool.gpus or pool.cpus))
    bundle: dict[str, float] = {"CPU": pool.cpus / number}
    if pool.gpus:
        bundle["GPU"] = pool.gpus / number
    return [bundle] * number


def _object_store_bytes() -> int:
    """An eighth of the free shared memory: rows are small beside weights, and Ray would take a third of the machine."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 1 << 30
    return max(128 << 20, min(4 << 30, free // 8))
