"""RayCluster: the Ray cluster of a run, either an existing one or a local one.

A local cluster listens only on loopback, keeps its files in its own folder, and ends with the run.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...dataflow.child_process import ChildProcess
from ...dataflow.errors import UserError
from ..node_layout import THIS_MACHINE, Nodes, machine_cpus, machine_gpus
from ..placement import Place
from ..signals import signals_deferred
from .token_file import keep_private

# Cluster address. Ray has no timeout for joining a cluster, and this process could not end a
# hanging connection. So a separate program (the probe) connects first.


VARIABLE = "RAY_ADDRESS"
PROBE_TIMEOUT_S = 60.0
"""[s] Longest wait for the probe, including the import of Ray from a slow disk."""
EXAMPLE = "ray-head:6379"
PROGRAMS = Path(__file__).with_name("cluster_programs.py")


def address_of(given: str | None) -> str | None:
    """Return a cluster's address, from the argument or else `RAY_ADDRESS`: `host:port` or "auto";
    None for a local cluster.

    >>> address_of("ray-head:6379")
    'ray-head:6379'
    >>> address_of("http://ray-head:8265")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: RayBackend('http://ray-head:8265') is the address of a dashboard or a job server; a driver \
joins a cluster by host:port, such as ray-head:6379 (`ray job submit --address http://ray-head:8265 -- python SCRIPT` runs it there)

    Raises:
        UserError: The text is not the address of a cluster.
    """
    address = given or os.environ.get(VARIABLE) or "local"
    if address in ("local", "auto"):
        return None if address == "local" else address
    where = f"RayBackend({given!r})" if given else f"{VARIABLE}={address!r}"
    scheme, _, rest = address.rpartition("://")
    if scheme in ("http", "https"):
        raise UserError(
            f"{where} is the address of a dashboard or a job server; a driver joins a cluster by host:port, such as {EXAMPLE} "
            f"(`ray job submit --address {address} -- python SCRIPT` runs it there)"
        )
    if scheme:
        raise UserError(
            f"{where}: a driver runs on a node of its cluster and joins it by host:port, such as {EXAMPLE}, not by {scheme}://"
        )
    try:
        parts = urlsplit(f"//{rest}")
        sound = bool(parts.hostname and parts.port) and rest == parts.netloc and "@" not in rest
    except ValueError:  # the port is not a number, or an IPv6 address has no brackets
        sound = False
    if not sound:
        raise UserError(
            f'{where} is not the address of a Ray cluster; use host:port, such as {EXAMPLE}, or "auto"'
        )
    return address


def may_be_same(address: str, joined: str) -> bool:
    """Whether an address may belong to the cluster that this process has joined.

    >>> may_be_same("auto", "10.0.0.1:6379"), may_be_same("127.0.0.1:6379", "10.0.0.1:6379")
    (True, True)
    >>> may_be_same("10.0.0.2:6379", "10.0.0.1:6379"), may_be_same("127.0.0.1:6380", "10.0.0.1:6379")
    (False, False)

    """
    if address in ("auto", joined):
        return True
    (host, _, port), (joined_host, _, joined_port) = address.rpartition(":"), joined.rpartition(":")
    if port != joined_port:
        return False
    ours, theirs = _addresses(host), _addresses(joined_host)
    return not (ours and theirs) or any(one.is_loopback for one in ours | theirs) or bool(ours & theirs)


def _addresses(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return {
            ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)
        }
    except (OSError, ValueError):
        return set()


def nodes_of(address: str) -> list[Mapping[str, float]]:
    """Return the resources of each node of a cluster: `{"CPU": 16.0, "GPU": 8.0, ...}`.

    Raises:
        UserError: The cluster cannot be joined.
    """
    child = ChildProcess(PROGRAMS, "probe", address, errors=subprocess.DEVNULL)
    last: dict[str, Any]
    try:
        last = child.receive(PROBE_TIMEOUT_S)
    except TimeoutError:
        last = {"error": f"no answer within {PROBE_TIMEOUT_S:.0f} s"}
    except EOFError:
        last = {}
    finally:
        child.kill()
    if "nodes" in last:
        return last["nodes"]
    who = (
        "the Ray cluster of this machine ('auto')"
        if address == "auto"
        else f"the Ray cluster at {address}"
    )
    raise UserError(f"{who} cannot be joined: {last.get('error', 'Ray itself could not be started')}")


# User code: Ray zips these folders, stores them with the job under a hash of their contents, and
# unpacks them once per node. Ranks import from there.


MAX_BYTES = 100 << 20
"""[bytes] Maximum size of a folder before zipping. Ray's head node keeps zip files in memory."""
EXCLUDES = ("runs/", ".venv/", "venv/", ".git/", "__pycache__/")
"""Patterns of files that Weft never sends, in addition to `.gitignore` and `.rayignore`."""
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable with the settings of `ray job submit`."""


@dataclass(frozen=True)
class UserCode:
    working_dir: Path | None
    """Working directory of ranks; they can import from it."""
    py_modules: tuple[Path, ...]
    """Package folders that ranks can import."""
    excludes: tuple[str, ...]
    """Patterns of files to leave out, as in a `.gitignore`."""

    @classmethod
    def of(
        cls, working_dir: str | Path | None, py_modules: Sequence[str | Path], excludes: Sequence[str]
    ) -> UserCode:
        for name, given in (("py_modules", py_modules), ("excludes", excludes)):
            if isinstance(given, str | Path):
                raise UserError(f"RayBackend({name}={str(given)!r}): it must be a list")
        if excludes and working_dir is None and not py_modules:
            raise UserError(
                f"RayBackend(excludes={list(excludes)}) has no effect without a folder to send; give working_dir or py_modules"
            )
        named = [("working_dir", working_dir)] if working_dir is not None else []
        for name, path in [*named, *(("py_modules", module) for module in py_modules)]:
            if not Path(path).expanduser().is_dir():
                raise UserError(f"RayBackend({name}={str(path)!r}): no such folder")
        return cls(
            None if working_dir is None else Path(working_dir).expanduser().absolute(),
            tuple(Path(module).expanduser().absolute() for module in py_modules),
            tuple(excludes),
        )

    @property
    def folders(self) -> Sequence[Path]:
        return [*([self.working_dir] if self.working_dir else []), *self.py_modules]

    def check(self) -> None:
        """Raise a `UserError` that lists the largest entries if a folder is too large."""
        for folder in self.folders:
            sizes = Counter[str]()
            for name, size in self.files(folder).items():
                sizes[name.partition("/")[0]] += size
            if (total := sum(sizes.values())) > MAX_BYTES:
                largest = ", ".join(
                    f"{name} ({size / 1e6:.0f} MB)" for name, size in sizes.most_common(3)
                )
                raise UserError(
                    f"{folder} has {total / 1e6:.0f} MB to send to other nodes, but the limit is {MAX_BYTES / 1e6:.0f} MB; the largest: "
                    f"{largest}. Leave out what ranks do not need by RayBackend(excludes=[...]) or a .gitignore in the folder; models "
                    "in settings are sent separately"
                )

    def files(self, folder: Path) -> dict[str, int]:
        """Return relative path -> bytes, for the files of a folder that Weft would send."""
        from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

        sizes: dict[str, int] = {}

        def add(path: Path) -> None:
            if path.is_file() and not path.is_symlink():
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size

        excludes = [_get_excludes(folder, [*EXCLUDES, *self.excludes])]
        _dir_travel(folder, excludes, add, include_gitignore=True, logger=logging.getLogger(__name__))
        return sizes

    def runtime_env(self, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """The runtime environment for `ray.init`; empty if `ray job submit` sent the folders."""
        job = json.loads(environment.get(_JOB) or "{}").get("runtime_env") or {}
        told: dict[str, Any] = {}
        if self.working_dir is not None and "working_dir" not in job:
            told["working_dir"] = str(self.working_dir)
        if self.py_modules and "py_modules" not in job:
            told["py_modules"] = [str(module) for module in self.py_modules]
        return told | {"excludes": [*EXCLUDES, *self.excludes]} if told else {}


# Ray cluster

CLOSE_TIMEOUT_S = 5.0
"""[s] Longest wait for the reaper to end."""
QUIET: Mapping[str, Any] = {
    "log_to_driver": False,
    "logging_level": logging.ERROR,
    "configure_logging": False,
}


class RayCluster:
    """Connects to Ray and disconnects from it.

    Args:
        address: `host:port` or "auto". None: `RAY_ADDRESS`, or else a local cluster.
        grows: Whether nodes may join while Weft reserves pools.
        code: The user's code, to send to the nodes of an existing cluster.
    """

    def __init__(
        self, address: str | None, *, grows: bool = False, code: UserCode | None = None
    ) -> None:
        self.address = address_of(address)
        self._grows = grows
        self._code = code or UserCode(None, (), ())
        self.folder: str | None = None
        """Folder of the local cluster while it runs."""
        self.is_connected = False
        """Whether this object, not the script, connected to Ray and must disconnect."""
        self._sizes: list[tuple[int, int]] | None = None
        """CPUs and GPUs of each node of the cluster, if known."""
        self._reaper: ChildProcess | None = None

    def nodes(self) -> Nodes:
        """Return the nodes of the cluster, before anything starts there.

        Raises:
            UserError: The cluster cannot be joined, this process is in another one, or the user's code
                is too large to send.
        """
        if not self.address:
            return Nodes([(machine_cpus(), machine_gpus())], THIS_MACHINE)
        _check_joined(self.address)
        self._code.check()
        return Nodes(self._node_sizes(self.address), f"the cluster at {self.address}", self._grows)

    def connect(self, placement: Mapping[str, Place]) -> None:
        """Start or join the cluster, unless this process is connected already.

        Raises:
            UserError: The cluster cannot be joined.
        """
        if not self.address:
            # Ray reads these on import. The first makes it listen only on loopback (test_sockets.py
            # checks this). The second requires a token, as by default; setting it avoids a warning.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            # Ranks have their own environments, so they would not use workers that Ray starts
            # early.
            os.environ.setdefault("RAY_enable_worker_prestart", "0")
            os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        keep_private(os.environ, Path.home(), make=not self.address)
        import ray
        from ray._private import utils

        if self.address:
            _check_joined(self.address)
            self._node_sizes(self.address)  # checks that the cluster answers
            # Nodes may join later, so ask again the next time.
            self._sizes = None
        if ray.is_initialized():
            if self._code.folders and not ray.get_runtime_context().runtime_env.get("working_dir"):
                raise UserError(
                    "RayBackend(working_dir=..., py_modules=...): this process has joined the cluster already, without them; give them to "
                    "ray.init(runtime_env={...}) where it did, or leave it first with ray.shutdown()"
                )
            return
        self.is_connected = True
        with signals_deferred("Ray has started and stopped again"):
            set_handler = utils.set_sigterm_handler
            utils.set_sigterm_handler = lambda *_: None  # Ray's handler would end the process at once
            try:
                if self.address:
                    self._join(self.address)
                else:
                    self._start(placement)
            finally:
                utils.set_sigterm_handler = set_handler

    def disconnect(self) -> None:
        """Leave the cluster. Ends a local cluster and deletes its folder."""
        import ray

        if self.is_connected:
            ray.shutdown()
            self.is_connected = False
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
        if self._reaper is not None:  # the reaper ends once the folder is gone
            self._reaper.close_input()
            # It may still have to end processes that outlive the shutdown.
            if self._reaper.wait(CLOSE_TIMEOUT_S):
                self._reaper.kill()  # closes its pipes
            self._reaper = None

    def _node_sizes(self, address: str) -> list[tuple[int, int]]:
        if self._sizes is None:
            ray = sys.modules.get("ray")
            joined = ray is not None and ray.is_initialized()
            resources = (
                [n["Resources"] for n in ray.nodes() if n["Alive"]]
                if ray and joined
                else nodes_of(address)
            )
            self._sizes = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in resources]
        return self._sizes

    def _join(self, address: str) -> None:
        import ray
        from ray.exceptions import RayError

        try:
            ray.init(
                address=address, namespace="weft", runtime_env=self._code.runtime_env() or None, **QUIET
            )
        except (ConnectionError, RuntimeError, RayError) as error:  # gone since the probe
            raise UserError(f"the Ray cluster at {address} cannot be joined: {error}") from None

    def _start(self, placement: Mapping[str, Place]) -> None:
        import ray
        from ray._private import services

        # Otherwise Ray hides all GPUs from ranks, which request none from it (`rank.py`).
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray's socket paths add 66 characters to this path. The limit is 107.
        where = None if len(tempfile.gettempdir()) <= 28 else "/tmp"
        self.folder = tempfile.mkdtemp(prefix="weft-", dir=where)
        command = "reap", self.folder, str(os.getsid(0))
        self._reaper = reaper = ChildProcess(
            PROGRAMS, *command, errors=subprocess.DEVNULL, detached=True
        )
        start = services.ConsolePopen

        def start_apart(*arguments: Any, **settings: Any) -> Any:
            # A signal to the run's process group (from a terminal or batch system) is meant for the
            # driver. Ray's processes must live until the run is saved. `ConsolePopen` is internal
            # to Ray; test_sockets.py checks that Ray still uses it.
            process = start(*arguments, **settings, process_group=0)
            reaper.send(process.pid)
            return process

        pools = {place.pool.name: place.pool for place in placement.values()}
        services.ConsolePopen = start_apart  # pyright: ignore[reportAttributeAccessIssue]
        try:
            ray.init(
                address="local",
                # Groups without a place share the CPUs of the pools.
                num_cpus=max(machine_cpus(), sum(pool.cpus for pool in pools.values())),
                object_store_memory=_object_store_bytes(),
                include_dashboard=False,
                _temp_dir=f"{self.folder}/r",  # Ray makes it public, but its parent folder is private
                namespace="weft",
                **QUIET,
            )
        finally:
            services.ConsolePopen = start


def _check_joined(address: str) -> None:
    """Reject the address if this process has joined another cluster."""
    ray = sys.modules.get("ray")
    joined: str = (
        ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else address
    )
    if not may_be_same(address, joined):
        raise UserError(
            f"RayBackend({address!r}): this process has joined the Ray cluster at {joined} already, and can be in only one; "
            "leave it first with ray.shutdown(), or give its address"
        )


def _object_store_bytes() -> int:
    """Return an eighth of the free shared memory, but at least 128 MiB and at most 4 GiB: the store
    carries only calls and replies."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 1 << 30
    return max(128 << 20, min(4 << 30, free // 8))
