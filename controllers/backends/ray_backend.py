"""RayBackend: run each rank as a Ray actor.

Ray carries calls and small replies. Columns of rows are in segments, which workers write and map,
and fetch from other nodes by Arrow Flight.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...dataflow.buffer.segments import Segment
from ...dataflow.errors import UserError, WorkerError
from ...dataflow.graph import Handle
from ...dataflow.metric_names import entry_of, undeclared
from ...dataflow.operation import names_arguments
from ...dataflow.runs.files import LOGS
from ...dataflow.runs.log import SYNC_INTERVAL_S
from ...dataflow.untrusted_text import redacted
from ...workers.dispatch import Coordinates
from ...workers.rendezvous import LOOPBACK
from ...workers.worker import Context
from ..group import REGISTER, Call, WorkerGroup
from ..node_layout import lay_out, position, shares_gpus, start_turns
from ..placement import Place
from ..ranks.tasks import Failure, FailureKind, Reply, Task
from .backend import START_TIMEOUT_S, Event, Setup, check_machine, this_node
from .model_folders import SentFolders
from .nodes import POLL_S, NodeLinks, Process, node_names
from .pools import WAIT_S, Reservations
from .rank import CONTROL, RankFiles, Standing, start_rank
from .ray_cluster import RayCluster
from .sample_note import SampleNote
from .user_code import UserCode, cannot_import
from .witness import Memory, log_name
from .witnesses import Witnesses

# Ray gauges: metrics of a run at the Prometheus endpoint of its Ray cluster, as `ray_weft_NAME`


class RayGauges:
    """A gauge for each metric, labelled with the run and the evaluation (empty for training). It
    keeps the latest value."""

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def report(self, run: str, metrics: Mapping[str, float]) -> None:
        """Set the gauges."""
        for name, value in metrics.items():
            gauge, evaluation = labelled(name)
            if gauge not in self._gauges:
                self._gauges[gauge] = _new_gauge(gauge, name)
            self._gauges[gauge].set(value, tags={"run": run, "evaluation": evaluation})


def _new_gauge(gauge: str, metric: str) -> Any:
    from ray.util.metrics import Gauge

    described = (
        metric if undeclared([metric]) else f"{(entry := entry_of(metric)).meaning} ({entry.unit})"
    )
    return Gauge(gauge, description=described, tag_keys=("run", "evaluation"))


def labelled(name: str) -> tuple[str, str]:
    """Return the gauge of a metric, and its evaluation.

    >>> labelled("actor/entropy"), labelled("heldout/failed_rows"), labelled("eval/reward/mean"), labelled("reward/my own")
    (('weft_actor_entropy', ''), ('weft_failed_rows', 'heldout'), ('weft_reward_mean', 'eval'), ('weft_reward_my_own', ''))
    """
    parts, evaluation = name.split("/"), ""
    if not undeclared([name]):
        entry = entry_of(name)
        own = 1 + entry.name.count("/") + (entry.place == "group")
        evaluation, parts = "/".join(parts[:-own]), parts[-own:]
    plain = re.sub(r"[^A-Za-z0-9]+", "_", "_".join(parts).replace("@", "_at_"))
    return f"weft_{plain}", evaluation


# Ray backend

LOOK_S = 1.0
"""[s] While workers start, longest wait between two readings of their memory."""
ADVANCED_TIMEOUT_S = 5.0
"""[s] Longest wait for starting ranks to report progress."""
CLOSE_TIMEOUT_S = 5.0
"""[s] Longest wait for workers to close before they are killed."""


@names_arguments
class RayBackend:
    """Run worker groups on a Ray cluster: the one at `address` (or in `RAY_ADDRESS`), or else a new
    local one.

    Args:
        address: `host:port`, or "auto".
        wait_s: [s] How long to wait for the pools of a placement while the cluster grows. By
            default 30 s, and a placement that is larger than the cluster is rejected at once.
        working_dir: Folder to send to every node; ranks work there and import from it. By default
            ranks import from the paths of this process, so all nodes must see them. With `ray job
            submit --working-dir` they do.
        py_modules: More folders of packages to send.
        excludes: Patterns of files not to send, as in a `.gitignore`.

    Raises:
        UserError: An argument is wrong; the message names it and its rule.
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
            raise UserError(f"RayBackend(wait_s={wait_s!r}): wait_s must be a number of seconds above 0")
        code = UserCode.of(working_dir, py_modules, excludes)
        self._cluster = RayCluster(address, grows=wait_s is not None, code=code)
        if code.folders and not self._cluster.address:
            raise UserError(
                "RayBackend(working_dir=..., py_modules=...) sends folders to nodes of a cluster; give its address (a local one sees them)"
            )
        if wait_s is not None and not self._cluster.address:
            raise UserError(
                f"RayBackend(wait_s={wait_s!r}) waits for a cluster to grow, but a local cluster does not grow; give an address"
            )
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._setup: Setup | None = None
        self._run_dir = Path()
        self._is_open = False
        self._node_names: Mapping[str, str] = {}
        """Ray's id -> name in references, for all nodes of the cluster."""
        self._pools = Reservations(self._wait_s)
        self._gauges = RayGauges()
        self._models = SentFolders({}, "")
        self._processes: dict[tuple[str, int], Process] = {}
        self._links = NodeLinks(self._processes, self._died)
        self._starts: Counter[tuple[str, int]] = Counter()
        """(group, rank) -> number of processes started for it."""
        self._unheard: list[tuple[Call, int]] = []
        """Calls to ranks that have no process anymore."""
        self._streams: dict[Any, tuple[Call, int]] = {}
        self._witnesses = Witnesses(Path())

    @property
    def address(self) -> str | None:
        return self._cluster.address

    def __repr__(self) -> str:
        return f"RayBackend({self.address!r})" if self.address else "RayBackend()"

    def check(
        self,
        placement: Mapping[str, Place],
        handles: Mapping[str, Handle] = MappingProxyType({}),
    ) -> None:
        if self.address is None:
            check_machine(handles, placement)
        self._lay_out(placement, handles)

    def _lay_out(self, placement: Mapping[str, Place], handles: Mapping[str, Handle]) -> dict[str, Place]:
        return lay_out(placement, handles, self._cluster.nodes())

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        setup = replace(setup, placement=self._lay_out(setup.placement, setup.handles))
        self._setup, self._run_dir, self._is_open = setup, setup.run_dir, True
        self._witnesses = Witnesses(setup.run_dir / LOGS)
        self._cluster.connect(setup.placement)
        for note in self._cluster.notes:
            setup.tell(note)
        import ray

        self._pools.reserve(setup)
        here = ray.get_runtime_context().get_node_id()
        self._node_names = node_names(ray.nodes(), here)
        self._models = SentFolders(setup.handles, here)
        for name in setup.handles:
            parts = self._pools[setup.placement[name].pool.name].parts
            for rank in range(setup.placement[name].ranks):
                if parts[position(setup.placement[name], rank).node_rank].node:
                    self._start_rank(name, rank)
        meshes = self._begin_in_turn(setup)
        names = {this_node(), *self._links.stands_on.values()}
        used = {id: name for id, name in self._node_names.items() if name in names}
        self._links.begin(setup.files, setup.run_dir / LOGS, used, setup.start_timeout_s)
        groups = {
            name: WorkerGroup(name, handle, setup.placement[name], meshes[name], self._submit)
            for name, handle in setup.handles.items()
        }
        for name, group in groups.items():
            group.absent = {
                rank for rank in range(len(group.mesh)) if (name, rank) not in self._processes
            }
        return groups

    def _start_rank(self, name: str, rank: int) -> None:
        setup = self._setup
        assert setup is not None
        place = setup.placement[name]
        sharing = sum(1 for p in setup.placement.values() if p.pool.name == place.pool.name)
        context = Context(name, rank, place.ranks, run_dir=setup.run_dir, seed=setup.seed, watched=True)
        replaced = self._starts[name, rank]
        self._starts[name, rank] += 1
        models = self._models.of(name) if len(self._node_names) > 1 else None
        written_on = this_node() if name in setup.writers else None
        alone = bool(self._cluster.folder)
        peers = self._links.servers.peers
        files = RankFiles(setup.files, self._node_names, replaced, peers, models, written_on, alone)
        actor = start_rank(
            setup.handles[name], place, context, self._pools[place.pool.name], sharing, files
        )
        self._processes[name, rank] = Process(actor)
        self._witnesses.meet(f"{name}[{rank}]", actor.process.options(concurrency_group=CONTROL).remote())

    def _begin_in_turn(self, setup: Setup) -> dict[str, list[Coordinates]]:
        """Make all workers: groups that share GPUs one after the other, all others at once."""
        # Absent ranks of elastic groups are independent, so their coordinates are known.
        meshes = {
            name: [Coordinates(dp=r) for r in range(setup.placement[name].ranks)]
            for name in setup.handles
        }
        for groups in start_turns(setup.placement, setup.follows):
            for (name, rank), standing in sorted(self._wait_for(self._begin(setup, groups)).items()):
                self._links.stands_on[name, rank] = standing.node
                self._processes[name, rank].is_up = True
                assert isinstance(standing.at, Coordinates)  # `_wait_for` has raised any failure
                meshes[name][rank] = standing.at
        return meshes

    def _begin(self, setup: Setup, groups: Sequence[str]) -> dict[Any, tuple[str, int]]:
        """Start making the workers of groups, and return promises of their `Standing`."""

        meeting: dict[Any, str] = {}
        for name in groups:
            place, handle = setup.placement[name], setup.handles[name]
            if (
                place.ranks > 1 and not handle.worker_class.replaceable
            ):  # ranks that can be replaced do not meet
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
            if (name, rank) in self._processes
        }

    def _meeting_host(self, place: Place) -> str:
        """Address where the ranks of a group meet: loopback if all are on one machine."""
        addresses = [part.address for part in self._pools[place.pool.name].parts]
        return LOOPBACK if len({*addresses}) == 1 else addresses[0]

    def _wait_for(self, promises: Mapping[Any, tuple[str, int]]) -> dict[tuple[str, int], Any]:
        """Wait for the answers of starting ranks. The timeout restarts whenever a rank answers or
        makes progress.

        Args:
            promises: Promise -> group and rank.

        Raises:
            WorkerError: A rank did not answer in time, died, or could not start.
            UserError: A worker could not start, and the user can fix it.
        """
        import ray
        from ray.exceptions import RayError

        assert self._setup is not None
        timeout_s = self._setup.start_timeout_s
        found: dict[tuple[str, int], Any] = {}
        pending, by = list(promises), time.monotonic() + timeout_s
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(LOOK_S, timeout_s))
            self._witnesses.look(self._links.hosts)
            if not ready and time.monotonic() < by:
                continue
            if not ready and not self._some_advanced({promises[promise] for promise in pending}):
                raise WorkerError(self._late([promises[promise] for promise in pending]))
            by = time.monotonic() + timeout_s
            for promise in ready:
                who = "{}[{}]".format(*promises[promise])
                try:
                    answer = ray.get(promise, timeout=timeout_s)
                except RayError as error:
                    if (said := cannot_import(error)) is not None:
                        raise UserError(f"worker {who}: {said}") from None
                    raise WorkerError(self._died(who, error)) from None
                if isinstance(answer, Standing) and isinstance(
                    failure := answer.at, Failure
                ):  # raise at once: others may wait for this rank
                    if failure.kind is FailureKind.USER_ERROR:
                        raise UserError(f"worker {who}: {failure.message}")
                    raise WorkerError(
                        f"worker {who} could not start: {failure.message}\n{failure.traceback}"
                    )
                found[promises[promise]] = answer
        return found

    def _late(self, ranks: Sequence[tuple[str, int]]) -> str:
        """Error message for ranks that did not start in time, with their stacks."""
        assert self._setup is not None
        late = ["{}[{}]".format(*at) for at in ranks]
        stacks = self._witnesses.stacks(late, self._links.hosts)
        said = f"workers {', '.join(late)} were not up after {self._setup.start_timeout_s:.0f} s (Driver(start_timeout_s=...))"
        return "\n".join([said, *(f"{who}: {text}" for who, text in stacks.items())])

    def _some_advanced(self, ranks: Iterable[tuple[str, int]]) -> bool:
        """Whether a starting rank has made progress since the last call, such as downloading a
        model."""
        import ray
        from ray.exceptions import RayError

        asked = [
            self._processes[at].actor.advanced.options(concurrency_group=CONTROL).remote() for at in ranks
        ]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ADVANCED_TIMEOUT_S)
        try:
            return any(ray.get(answered))
        except RayError:  # a process died: the wait for its worker reports it
            return True

    has_processes = True
    in_process = False
    sync_interval_s = SYNC_INTERVAL_S
    has_endpoint = True

    def report(self, run: str, metrics: Mapping[str, float]) -> None:
        self._gauges.report(run, metrics)

    @property
    def spans_machines(self) -> bool:
        return self.address is not None

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        return self._links.servers.unreadable(segments)

    def replace(self, group: WorkerGroup, rank: int) -> None:
        import ray

        self.release(group, rank)
        here = ray.get_runtime_context().get_node_id()
        self._node_names = node_names(ray.nodes(), here, self._node_names)
        self._start_rank(group.name, rank)
        process = self._processes[group.name, rank]
        process.standing = process.actor.begin.remote(None)

    def release(self, group: WorkerGroup, rank: int) -> None:
        import ray

        for stream in [s for s, (call, r) in self._streams.items() if call.group is group and r == rank]:
            del self._streams[stream]
        if (process := self._processes.pop((group.name, rank), None)) is not None:
            ray.kill(process.actor)  # it may be alive but hang, or have lost its connection
        self._witnesses.forget(f"{group.name}[{rank}]")

    def vacant(self, group: WorkerGroup) -> Collection[int]:
        room = self._pools.room(group.place.pool.name)
        return {
            rank
            for rank in group.absent & room.keys()
            if self._node_names.get(room[rank]) not in self._links.lost
        }

    @property
    def wait_s(self) -> float:
        return self._wait_s

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        noted = SampleNote.read(SampleNote.path(self._run_dir / LOGS, group.name, rank))
        node = self._links.stands_on.get((group.name, rank))
        if noted is not None or node is None or node in self._links.lost:
            return noted
        return self._links.servers.sample_at(node, group.name, rank)

    @property
    def nodes(self) -> Collection[str]:
        return self._links.nodes

    def lost_nodes(self, *, look: bool) -> Collection[str]:
        if look:
            self._links.look_for_lost()
        return self._links.lost

    def node_of(self, group: WorkerGroup, rank: int) -> str:
        return self._links.stands_on[group.name, rank]

    def delete(self, node: str, file: str) -> None:
        self._links.servers.delete(node, file)

    def clock(self) -> float:
        return time.monotonic()

    def stacks(self, group: WorkerGroup, ranks: Sequence[int]) -> Mapping[int, str]:
        found = self._witnesses.stacks([f"{group.name}[{rank}]" for rank in ranks], self._links.hosts)
        return {rank: text for rank in ranks if (text := found.get(f"{group.name}[{rank}]"))}

    hanging: Collection[str] = ()

    def memory(self) -> Mapping[str, Memory]:
        return self._witnesses.memory()

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        if (
            process := self._processes.get((call.group.name, rank))
        ) is None:  # the rank left after the call was requested
            self._unheard.append((call, rank))
            return
        options = {"num_returns": "streaming"} | (
            {"concurrency_group": CONTROL} if task.rows is None else {}
        )
        stream = process.actor.call.options(**options).remote(task)
        self._streams[stream] = (call, rank)

    def _actors_of(self, call: Call) -> list[Any]:
        processes = (self._processes.get((call.group.name, rank)) for rank in call.ranks)
        return [process.actor for process in processes if process is not None]

    def cancel(self, call: Call) -> None:
        for actor in self._actors_of(call):
            actor.cancel.options(concurrency_group=CONTROL).remote(call.number)

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        for actor in self._actors_of(call):
            actor.give_up.options(concurrency_group=CONTROL).remote(call.number, list(sample_ids))

    def wait(self, timeout_s: float) -> Sequence[Event]:
        import ray
        from ray.exceptions import RayError

        self._witnesses.look(self._links.hosts)
        events, streams = self._links.take(), list(self._streams)
        if self._links.settling:
            timeout_s = min(timeout_s, POLL_S)
        if events or self._unheard or not streams:
            return events + self._without_streams(0.0 if events else timeout_s)
        ready: Any
        ready, _ = ray.wait(streams, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready and len(streams) > 1:  # take all other streams that are ready
            ready, _ = ray.wait(streams, num_returns=len(streams), timeout=0, fetch_local=False)
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
                    self._links.came_up(call, rank, reply)
                    continue
            events.append(Event(call, rank, reply))
        return events

    def _without_streams(self, timeout_s: float) -> list[Event]:
        """Return failures of calls to ranks without processes. If there are none, sleep."""
        if not self._unheard:
            time.sleep(timeout_s)
        unheard, self._unheard = self._unheard, []
        failure = Failure("its process had ended when it was called", kind=FailureKind.DIED)
        return [Event(call, rank, Reply(failure=failure)) for call, rank in unheard]

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def _died(self, who: str, error: BaseException) -> str:
        """Describe a process that died. Quote the end of its log, which says more than Ray's
        error."""
        self._links.servers.bring_logs()
        log = self._run_dir / LOGS / log_name(who)
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else str(error)
        why = self._witnesses.ending(who, error, self._links.hosts)
        return redacted(f"its process ended ({why}); the end of {log.name}:\n{tail}")

    def close(self) -> None:
        if not self._is_open:
            return
        from ray.exceptions import RayError

        try:
            self._end_processes()
        except RayError:  # the cluster is gone, with everything in it
            pass
        finally:
            self._processes.clear()
            self._streams.clear()
            self._starts.clear()
            self._unheard.clear()
            self._witnesses.close()
            self._links, self._pools = NodeLinks(self._processes, self._died), Reservations(self._wait_s)
            self._is_open = False
            self._cluster.disconnect()

    def _end_processes(self) -> None:
        import ray

        self._links.servers.tell_deletions()
        actors = [process.actor for process in self._processes.values()]
        closing = [actor.close.options(concurrency_group=CONTROL).remote() for actor in actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        self._links.servers.bring_logs()
        if not self._cluster.folder:  # a local cluster ends with everything on it
            for actor in actors:
                ray.kill(actor)
            self._links.servers.kill()
            self._models.kill()
            self._pools.release()
