"""RayBackend: each rank is a Ray actor.

Ray carries calls and small replies; the columns of rows lie in segments, which workers write and map themselves, and fetch from other
nodes by Arrow Flight.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...dataflow.arguments import names_arguments
from ...dataflow.buffer.segments import Segment
from ...dataflow.errors import UserError, WorkerError
from ...dataflow.handle import Handle
from ...dataflow.node import ParameterEdge
from ...workers.dispatch import Coordinates
from ...workers.rendezvous import LOOPBACK
from ...workers.worker import Context
from ..bundles import check_follows, lay_out, shares_gpus, start_turns
from ..group import REGISTER, Call, WorkerGroup
from ..placement import Place
from ..ranks.tasks import Failure, FailureKind, Reply, Task
from .backend import START_TIMEOUT_S, Event, Setup, this_node
from .model_folders import SentFolders
from .node_logs import LOGS
from .out_of_memory import kills, why_ended
from .pools import WAIT_S, Reservations
from .rank import CONTROL, RankFiles, Standing, start_rank
from .ray_cluster import RayCluster
from .sample_note import SampleNote
from .segment_servers import SegmentServers, node_names
from .user_code import UserCode, cannot_import

NODE_TIMEOUT_S = 5.0
"""Longest wait for a node to accept a connection, when a process is gone, or rows cannot be read."""
ADVANCED_TIMEOUT_S = 5.0
"""Longest wait for ranks that are starting to say whether they have done anything."""
CLOSE_TIMEOUT_S = 5.0
"""Longest wait for workers to release what they hold, before they are ended without being asked."""


@dataclass
class _Process:
    """The process of a rank."""

    actor: Any
    replaced: int
    """How often another took the rank's place."""
    standing: Any = None
    """Promise of where it stands, if it was asked."""


@names_arguments
class RayBackend:
    """A local Ray cluster made for this run, or the cluster at `address` (or in `RAY_ADDRESS`).

    Args:
        address: `host:port`, or "auto".
        wait_s: how long the pools of a placement are waited for, on a cluster that grows meanwhile; default: 30 s, and a placement that
            is larger than the cluster is refused at once.
        working_dir: a folder that is sent to every node: ranks work there, and import from it. Default: they import from the paths of
            this process, which a folder that all nodes see, or `ray job submit --working-dir`, makes true.
        py_modules: folders of packages that are sent, too.
        excludes: patterns, as in a `.gitignore`, of what is not sent.

    Raises:
        UserError: naming the argument and its rule.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        wait_s: float | None = None,
        working_dir: str | Path | None = None,
        py_modules: Sequence[str | Path] = (),
        excludes: Sequence[str] = (),
    ) -> None:
        if wait_s is not None and not wait_s > 0:
            raise UserError(f"RayBackend(wait_s={wait_s!r}): it is a number of seconds above 0")
        code = UserCode.of(working_dir, py_modules, excludes)
        self._cluster = RayCluster(address, grows=wait_s is not None, code=code)
        if code.folders and not self._cluster.address:
            raise UserError(
                "RayBackend(working_dir=..., py_modules=...) sends folders to nodes of a cluster: give its address; a local one sees them"
            )
        if wait_s is not None and not self._cluster.address:
            raise UserError(
                f"RayBackend(wait_s={wait_s!r}) waits for a cluster to grow; a local one does not: give its address"
            )
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._setup: Setup | None = None
        self._run_dir = Path()
        self._is_open = False
        self._node_names: Mapping[str, str] = {}
        """Ray's id -> name in references, of all nodes of the cluster."""
        self._used_nodes: dict[str, str] = {}
        """The same of those that ranks stand on, or stood on, and the driver's."""
        self._lost_nodes: set[str] = set()
        """The names of those among them that are gone."""
        self._stands_on: dict[tuple[str, int], str] = {}
        """(group, rank) -> name of its node."""
        self._pools = Reservations(self._wait_s)
        self._servers = SegmentServers()
        self._models = SentFolders({}, "")
        self._processes: dict[tuple[str, int], _Process] = {}
        """(group, rank) -> its process."""
        self._streams: dict[Any, tuple[Call, int]] = {}
        """Stream of replies -> call and rank."""
        self._kills: dict[str, int] = {}
        """Processes that the kernel of this machine had ended for want of memory, when it was looked at last."""

    @property
    def address(self) -> str | None:
        return self._cluster.address

    def __repr__(self) -> str:
        return f"RayBackend({self.address!r})" if self.address else "RayBackend()"

    def check(
        self,
        placement: Mapping[str, Place],
        handles: Mapping[str, Handle] = MappingProxyType({}),
        follows: Sequence[ParameterEdge] = (),
    ) -> None:
        self._lay_out(placement, handles, follows)

    def _lay_out(
        self, placement: Mapping[str, Place], handles: Mapping[str, Handle], follows: Sequence[ParameterEdge]
    ) -> dict[str, Place]:
        """The placement with the number of nodes of each pool."""
        found = lay_out(placement, handles, self._cluster.nodes())
        check_follows(found, follows)
        return found

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        setup = replace(setup, placement=self._lay_out(setup.placement, setup.handles, setup.follows))
        self._setup, self._run_dir, self._is_open = setup, setup.run_dir, True
        self._kills = kills()
        self._cluster.connect(setup.placement)
        import ray

        self._pools.reserve(setup)
        here = ray.get_runtime_context().get_node_id()
        self._node_names = node_names(ray.nodes(), here)
        self._models = SentFolders(setup.handles, here)
        self._stands_on = {}
        nodes = {name: self._nodes_of(name) for name in setup.handles}
        _check_weights_stay(setup, nodes)
        for name in setup.handles:
            for rank in range(setup.placement[name].ranks):
                self._start_rank(name, rank)
        meshes = self._begin_in_turn(setup)
        used = {this_node(), *self._stands_on.values()}
        self._used_nodes = {id: name for id, name in self._node_names.items() if name in used}
        self._lost_nodes = set()
        self._connect_nodes()
        return {
            name: WorkerGroup(name, handle, setup.placement[name], meshes[name], self._submit)
            for name, handle in setup.handles.items()
        }

    def _connect_nodes(self) -> None:
        """Have every node that is used serve its segments, and tell all ranks where, if there are several."""
        import ray

        nodes = {id: name for id, name in self._used_nodes.items() if name not in self._lost_nodes}
        if self._setup is None or (len(nodes) == 1 and self._servers.peers is None):
            return
        peers = self._servers.start(self._setup.files, nodes)
        self._servers.keep_logs(self._run_dir / LOGS)
        up = [p for at, p in self._processes.items() if self._stands_on.get(at) in nodes.values()]
        promises = [p.actor.connect.remote(peers) for p in up]
        ray.wait(promises, num_returns=len(up), timeout=self._setup.start_timeout_s)

    def _nodes_of(self, name: str) -> list[str]:
        """The names of the nodes of a group."""
        assert self._setup is not None
        return [self._node_names[p.node] for p in self._pools[self._setup.placement[name].pool.name].parts]

    def _start_rank(self, name: str, rank: int, replaced: int = 0) -> None:
        """Start a process, which has no worker yet."""
        setup = self._setup
        assert setup is not None
        place = setup.placement[name]
        sharing = sum(1 for p in setup.placement.values() if p.pool.name == place.pool.name)
        context = Context(name, rank, place.ranks, run_dir=setup.run_dir, seed=setup.seed, watched=True)
        models = self._models.of(name) if len(self._node_names) > 1 else None
        files = RankFiles(setup.files, self._node_names, replaced, self._servers.peers, models)
        actor = start_rank(setup.handles[name], place, context, self._pools[place.pool.name], sharing, files)
        self._processes[name, rank] = _Process(actor, replaced)

    def _begin_in_turn(self, setup: Setup) -> dict[str, list[Coordinates]]:
        """Have all workers made: of groups that share GPUs one group after the other, of all others at once.

        Returns:
            Group -> where its ranks stand in its mesh.
        """
        meshes: dict[str, list[Coordinates]] = {name: [] for name in setup.handles}
        for groups in start_turns(setup.placement, setup.follows):
            for (name, rank), standing in sorted(self._wait_for(self._begin(setup, groups)).items()):
                self._stands_on[name, rank] = standing.node
                assert isinstance(standing.at, Coordinates)  # `_wait_for` has raised the failures
                meshes[name].append(standing.at)
        return meshes

    def _begin(self, setup: Setup, groups: Sequence[str]) -> dict[Any, tuple[str, int]]:
        """Have the workers of groups made; returns promises of where they stand."""

        meeting: dict[Any, str] = {}
        for name in groups:
            place, handle = setup.placement[name], setup.handles[name]
            if place.ranks > 1 and not handle.worker_class.replaceable:  # a rank that can be replaced meets nobody
                first = self._processes[name, 0].actor
                host = self._meeting_host(place)
                meeting[first.take_port.remote(host, secrets.token_hex(32), setup.start_timeout_s)] = name
        found = self._wait_for({promise: (name, 0) for promise, name in meeting.items()})
        rendezvous = {name: found[name, 0] for name in meeting.values()}
        return {
            self._processes[name, rank].actor.begin.remote(
                rendezvous.get(name), offload=shares_gpus(setup.placement, name)
            ): (name, rank)
            for name in groups
            for rank in range(setup.placement[name].ranks)
        }

    def _meeting_host(self, place: Place) -> str:
        """The address at which the ranks of a group meet: loopback, if all are on one machine."""
        addresses = [part.address for part in self._pools[place.pool.name].parts]
        return LOOPBACK if len({*addresses}) == 1 else addresses[0]

    def _wait_for(self, promises: Mapping[Any, tuple[str, int]]) -> dict[tuple[str, int], Any]:
        """What ranks answer as they start. The deadline holds from when the last of them answered, or did something that shows.

        Args:
            promises: promise -> group and rank.

        Raises:
            WorkerError: naming those that did not answer in time, whose process ended, or who could not start.
            UserError: a worker could not start, and the user can mend it.
        """
        import ray
        from ray.exceptions import RayError

        assert self._setup is not None
        timeout_s = self._setup.start_timeout_s
        found: dict[tuple[str, int], Any] = {}
        pending = list(promises)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=timeout_s)
            if not ready and self._some_advanced({promises[promise] for promise in pending}):
                continue
            if not ready:
                late = ", ".join("{}[{}]".format(*promises[promise]) for promise in pending)
                raise WorkerError(f"workers {late} were not up after {timeout_s:.0f} s (Driver(start_timeout_s=...))")
            for promise in ready:
                who = "{}[{}]".format(*promises[promise])
                try:
                    answer = ray.get(promise, timeout=timeout_s)
                except RayError as error:
                    if (said := cannot_import(error)) is not None:
                        raise UserError(f"worker {who}: {said}") from None
                    raise WorkerError(self._died(who, error)) from None
                if isinstance(answer, Standing) and isinstance(failure := answer.at, Failure):  # others may wait for it
                    if failure.kind is FailureKind.USER_ERROR:
                        raise UserError(f"worker {who}: {failure.message}")
                    raise WorkerError(f"worker {who} could not start: {failure.message}\n{failure.traceback}")
                found[promises[promise]] = answer
        return found

    def _some_advanced(self, ranks: Iterable[tuple[str, int]]) -> bool:
        """Whether some of the ranks that are starting have done anything since this was asked last, such as fetching a model."""
        import ray
        from ray.exceptions import RayError

        asked = [self._processes[at].actor.advanced.options(concurrency_group=CONTROL).remote() for at in ranks]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ADVANCED_TIMEOUT_S)
        try:
            return any(ray.get(answered))
        except RayError:  # a process ended; the wait for its worker says so
            return True

    has_processes = True
    in_process = False

    @property
    def spans_machines(self) -> bool:
        return self.address is not None

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        return self._servers.unreadable(segments)

    def replace(self, group: WorkerGroup, rank: int) -> None:
        import ray

        for stream in [s for s, (call, r) in self._streams.items() if call.group is group and r == rank]:
            del self._streams[stream]
        process = self._processes[group.name, rank]
        ray.kill(process.actor)  # it may hang, or have lost its connection alone
        here = ray.get_runtime_context().get_node_id()
        self._node_names = node_names(ray.nodes(), here, self._node_names)
        self._start_rank(group.name, rank, process.replaced + 1)
        process = self._processes[group.name, rank]
        process.standing = process.actor.begin.remote(None)

    def _is_up(self, name: str, rank: int) -> None:
        """A process that replaced another is up, perhaps on another node."""
        import ray

        assert self._setup is not None
        standing: Standing = ray.get(self._processes[name, rank].standing, timeout=self._setup.start_timeout_s)
        self._stands_on[name, rank] = standing.node
        if standing.node_id not in self._used_nodes:
            self._used_nodes[standing.node_id] = standing.node
            self._connect_nodes()

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        noted = SampleNote.read(SampleNote.path(self._run_dir / LOGS, group.name, rank))
        return noted if noted is not None else self._servers.sample_at(self.node_of(group, rank), group.name, rank)

    @property
    def nodes(self) -> Collection[str]:
        return [name for name in self._used_nodes.values() if name not in self._lost_nodes]

    def lost_nodes(self) -> Collection[str]:
        if len(self._used_nodes) > 1:  # else it is the driver's own
            import ray

            used = [n for n in ray.nodes() if n["NodeID"] in self._used_nodes]
            gone = [n["NodeID"] for n in used if not (n["Alive"] and _listens(n))]
            self._lost_nodes |= {self._used_nodes[id] for id in gone}
        return self._lost_nodes

    def node_of(self, group: WorkerGroup, rank: int) -> str:
        return self._stands_on[group.name, rank]

    def delete(self, node: str, file: str) -> None:
        self._servers.delete(node, file)

    def clock(self) -> float:
        return time.monotonic()

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        options = {"num_returns": "streaming"} | ({"concurrency_group": CONTROL} if task.rows is None else {})
        stream = self._processes[call.group.name, rank].actor.call.options(**options).remote(task)
        self._streams[stream] = (call, rank)

    def cancel(self, call: Call) -> None:
        for rank in call.ranks:
            actor = self._processes[call.group.name, rank].actor
            actor.cancel.options(concurrency_group=CONTROL).remote(call.number)

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        for rank in call.ranks:
            actor = self._processes[call.group.name, rank].actor
            actor.give_up.options(concurrency_group=CONTROL).remote(call.number, list(sample_ids))

    def wait(self, timeout_s: float) -> Sequence[Event]:
        import ray
        from ray.exceptions import RayError

        self._servers.look_at_logs()
        if self._servers.take_ended():
            self.lost_nodes()  # else a server would be started on a node that is gone, too
            with suppress(RayError):  # this one has ended, too: it is looked again
                self._connect_nodes()
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
                reply = Reply(failure=Failure(message, kind=FailureKind.DIED))
            if reply.is_last:
                del self._streams[stream]
                if call.method == REGISTER and reply.failure is None:
                    self._is_up(call.group.name, rank)
            events.append(Event(call, rank, reply))
        return events

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def _died(self, who: str, error: BaseException) -> str:
        """Description of a process that died. It quotes the end of the process's own log, which says more than Ray does."""
        self._servers.bring_logs()
        log = self._run_dir / LOGS / f"{who.replace('[', '_').rstrip(']')}.log"
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else str(error)
        before, self._kills = self._kills, kills()
        why = why_ended(error, before, self._kills) or type(error).__name__
        return f"its process ended ({why}); the end of {log.name}:\n{tail}"

    def close(self) -> None:
        if not self._is_open:
            return
        from ray.exceptions import RayError

        try:
            self._end_processes()
        except RayError:  # the cluster is gone, and everything in it
            pass
        finally:
            self._processes.clear()
            self._streams.clear()
            self._servers, self._pools = SegmentServers(), Reservations(self._wait_s)
            self._is_open = False
            self._cluster.disconnect()

    def _end_processes(self) -> None:
        import ray

        self._servers.tell_deletions()
        actors = [process.actor for process in self._processes.values()]
        closing = [actor.close.options(concurrency_group=CONTROL).remote() for actor in actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        self._servers.bring_logs()
        if not self._cluster.folder:  # a local cluster ends with all that is on it
            for actor in actors:
                ray.kill(actor)
            self._servers.kill()
            self._models.kill()
            self._pools.release()


def _listens(node: Mapping[str, Any]) -> bool:
    """Whether the node is there; the cluster itself may take a while to notice that it is not."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), NODE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _check_weights_stay(setup: Setup, nodes: Mapping[str, Sequence[str]]) -> None:
    """Check that no weights would have to travel: they pass through the memory of one node.

    Args:
        nodes: group -> names of its nodes.

    Raises:
        UserError: naming the groups whose weights would.
    """
    for edge in setup.follows:
        apart = {*nodes[edge.leader], *nodes[edge.follower]}
        if len(apart) > 1:
            leader = setup.placement[edge.leader].pool.name
            raise UserError(
                f"{edge.follower!r} follows {edge.leader!r}, but they stand on {len(apart)} nodes ({', '.join(sorted(apart))}); "
                "weights still pass through the memory of one node: put both groups on one resource pool, or the follower's beside the "
                f"leader's, ResourcePool(..., beside={leader!r})"
            )
