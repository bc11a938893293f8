"""RayBackend: run each rank as a Ray actor.

Ray carries calls and small replies. Workers write row columns to segment files. They map the files
of the same node, and fetch other nodes' segments by Arrow Flight.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...dataflow.buffer.segments import Segment
from ...dataflow.errors import UserError, WorkerError
from ...dataflow.graph import Handle
from ...dataflow.metric_names import entry_of, undeclared
from ...dataflow.operation import names_arguments
from ...dataflow.runs.files import LOGS
from ...dataflow.untrusted_text import redacted
from ...workers.dispatch import Coordinates
from ...workers.rendezvous import LOOPBACK
from ...workers.worker import Context
from ..group import REGISTER, Call, WorkerGroup
from ..node_layout import lay_out, position, shares_gpus, start_turns
from ..placement import Place
from ..ranks.tasks import Failure, FailureKind, Reply, Task
from .backend import START_TIMEOUT_S, Backend, Cluster, Event, Setup, check_machine, this_node
from .model_folders import SentFolders
from .node_links import POLL_S, NodeLinks, Process, node_names
from .pools import WAIT_S, Reservations
from .process_diagnostics import Memory, ProcessDiagnostics, log_name, take_answers
from .rank import CONTROL, RankFiles, Standing, noted_sample, start_rank
from .ray_cluster import RayCluster, UserCode
from .token_file import unprotected

# Ray gauges: metrics of a run at the Prometheus endpoint of its Ray cluster, as `ray_weft_NAME`,
# labelled with the run and the evaluation (empty for training)


def _new_gauge(gauge: str, metric: str) -> Any:
    from ray.util.metrics import Gauge

    described = metric
    if not undeclared([metric]):
        described = f"{(entry := entry_of(metric)).meaning} ({entry.unit})"
    return Gauge(gauge, description=described, tag_keys=("run", "evaluation"))


def labelled(name: str) -> tuple[str, str]:
    """Return a metric's gauge name, and its evaluation (empty for training).

    >>> labelled("actor/entropy"), labelled("heldout/failed_rows"), labelled("eval/reward/mean"), labelled("reward/my own")
    (('weft_actor_entropy', ''), ('weft_failed_rows', 'heldout'), ('weft_reward_mean', 'eval'), ('weft_reward_my_own', ''))
    """
    parts, evaluation = name.split("/"), ""
    if not undeclared([name]):
        entry = entry_of(name)
        own = 1 + entry.name.count("/") + entry.shown.startswith("GROUP/")
        evaluation, parts = "/".join(parts[:-own]), parts[-own:]
    plain = re.sub(r"[^A-Za-z0-9]+", "_", "_".join(parts).replace("@", "_at_"))
    return f"weft_{plain}", evaluation


# Ray backend

LOOK_S = 1.0
"""[s] Longest wait between readings of memory while workers start."""
ADVANCED_TIMEOUT_S = 5.0
"""[s] Longest wait for starting ranks to report progress."""
CLOSE_TIMEOUT_S = 5.0
"""[s] Longest wait for workers to close before they are killed."""


@names_arguments
class RayBackend(Backend, Cluster):
    """Run worker groups on the Ray cluster at `address` (or in `RAY_ADDRESS`), or else on a new
    local cluster.

    Args:
        address: `host:port`, or "auto".
        wait_s: [s] How long to wait for the pools of a placement while the cluster grows. The
            default waits 30 s, and rejects at once a placement larger than the cluster.
        working_dir: Folder to send to every node, as the ranks' working directory and import path.
            By default, ranks import from the paths of this process, which all nodes must see. With
            `ray job submit --working-dir`, they do.
        py_modules: Other package folders to send.
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
        self.address = self._cluster.address
        if code.folders and not self.address:
            raise UserError(
                "RayBackend(working_dir=..., py_modules=...) sends folders to nodes of a cluster; give its address (a local one sees them)"
            )
        if wait_s is not None and not self.address:
            raise UserError(
                f"RayBackend(wait_s={wait_s!r}) waits for a cluster to grow, but a local cluster does not grow; give an address"
            )
        self.wait_s = WAIT_S if wait_s is None else wait_s
        self._gauges: dict[str, Any] = {}
        self._setup: Setup
        self._is_open = False
        self._reset()

    def _reset(self) -> None:
        self._node_names: Mapping[str, str] = {}
        """Ray's id -> name in segment references, for all nodes of the cluster."""
        self._pools = Reservations(self.wait_s)
        self._models = SentFolders({}, "")
        self._processes: dict[tuple[str, int], Process] = {}
        self._links = NodeLinks(self._processes, self._died)
        self._diagnostics = ProcessDiagnostics(this_node(), Path())
        self._starts: Counter[tuple[str, int]] = Counter()
        """(group, rank) -> number of processes started for it."""
        self._unheard: list[tuple[Call, int]] = []
        self._streams: dict[Any, tuple[Call, int]] = {}

    def __repr__(self) -> str:
        return f"RayBackend({self.address!r})" if self.address else "RayBackend()"

    def check(self, placement: Mapping[str, Place], handles: Mapping[str, Handle] = {}) -> None:
        if self.address is None:
            check_machine(handles, placement)
        lay_out(placement, handles, self._cluster.nodes())

    def start(self, setup: Setup) -> dict[str, WorkerGroup]:
        placement = lay_out(setup.placement, setup.handles, self._cluster.nodes())
        self._setup = setup = replace(setup, placement=placement)
        self._is_open = True
        self._diagnostics = ProcessDiagnostics(this_node(), setup.run_dir / LOGS)
        self._cluster.connect(placement)
        if self.address and (warning := unprotected(self.address, os.environ)):
            setup.tell(warning)
        import ray

        self._pools.reserve(setup)
        here = ray.get_runtime_context().get_node_id()
        self._node_names = node_names(ray.nodes(), here)
        self._models = SentFolders(setup.handles, here)
        for name, place in ((name, placement[name]) for name in setup.handles):
            parts = self._pools[place.pool.name].parts
            for rank in range(place.ranks):
                if parts[position(place, rank).node_rank].node:
                    self._start_rank(name, rank)
        # Ranks of elastic groups are independent, so absent ones have known coordinates.
        meshes = {
            name: [Coordinates(dp=r) for r in range(placement[name].ranks)] for name in setup.handles
        }
        # Groups that share GPUs make their workers in turn.
        for names in start_turns(placement, setup.follows):
            for (name, rank), standing in sorted(self._wait_for(self._begin(names)).items()):
                self._links.stands_on[name, rank] = standing.node
                self._processes[name, rank].is_up = True
                assert isinstance(standing.at, Coordinates)  # `_wait_for` has raised any failure
                meshes[name][rank] = standing.at
        nodes = {this_node(), *self._links.stands_on.values()}
        used = {id: name for id, name in self._node_names.items() if name in nodes}
        self._links.connect_all(setup.files, setup.run_dir, used, setup.start_timeout_s)
        groups = {
            name: WorkerGroup(name, handle, placement[name], meshes[name], self._submit)
            for name, handle in setup.handles.items()
        }
        for name, group in groups.items():
            group.absent = {r for r in range(len(group.mesh)) if (name, r) not in self._processes}
        return groups

    def _start_rank(self, name: str, rank: int) -> None:
        setup = self._setup
        place = setup.placement[name]
        files = RankFiles(
            setup.files,
            self._node_names,
            replaced=self._starts[name, rank],
            peers=self._links.servers.peers,
            models=self._models.of(name) if len(self._node_names) > 1 else None,
            written_on=this_node() if name in setup.writers else None,
            alone=bool(self._cluster.folder),
        )
        self._starts[name, rank] += 1
        deadline_s = max(setup.start_timeout_s, setup.call_timeout_s)
        context = Context(
            name,
            rank,
            place.ranks,
            run_dir=setup.run_dir,
            seed=setup.seed,
            watched=True,
            deadline_s=deadline_s,
            gateway=setup.gateway,
        )
        sharing = sum(1 for p in setup.placement.values() if p.pool.name == place.pool.name)
        pool = self._pools[place.pool.name]
        actor = start_rank(setup.handles[name], place, context, pool, sharing, files)
        self._processes[name, rank] = Process(actor)
        self._diagnostics.meet(
            _who(name, rank), actor.process.options(concurrency_group=CONTROL).remote()
        )

    def _begin(self, names: Sequence[str]) -> dict[Any, tuple[str, int]]:
        setup, meeting = self._setup, dict[Any, tuple[str, int]]()
        for name in names:
            place = setup.placement[name]
            if place.ranks > 1 and not setup.handles[name].worker_class.replaceable:
                addresses = [part.address for part in self._pools[place.pool.name].parts]
                host = LOOPBACK if len({*addresses}) == 1 else addresses[0]
                take_port, secret = self._processes[name, 0].actor.take_port, secrets.token_hex(32)
                meeting[take_port.remote(host, secret, setup.start_timeout_s)] = name, 0
        rendezvous = self._wait_for(meeting)  # replaceable ranks have none
        return {
            process.actor.begin.remote(
                rendezvous.get((name, 0)), offload=shares_gpus(setup.placement, name)
            ): (name, rank)
            for (name, rank), process in self._processes.items()
            if name in names
        }

    def _wait_for(self, promises: Mapping[Any, tuple[str, int]]) -> dict[tuple[str, int], Any]:
        """Wait for ranks to start. Return (group, rank) -> answer. Progress restarts the timeout.

        Args:
            promises: Promise of an answer -> (group, rank).

        Raises:
            WorkerError: A rank did not answer in time, died, or could not start.
            UserError: A worker could not start because of an error that the user can fix.
        """
        import ray
        from ray.exceptions import RayError

        timeout_s = self._setup.start_timeout_s
        found: dict[tuple[str, int], Any] = {}
        pending, by = list(promises), time.monotonic() + timeout_s
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(LOOK_S, timeout_s))
            self._diagnostics.look(self._links.hosts)
            if not ready and time.monotonic() < by:
                continue
            if not ready and not self._some_advanced({promises[promise] for promise in pending}):
                late = [_who(*promises[promise]) for promise in pending]
                said = f"workers {', '.join(late)} were not up after {timeout_s:.0f} s (a larger Driver(call_timeout_s=...) allows more)"
                stacks = self._diagnostics.stacks(late, self._links.hosts)
                raise WorkerError("\n".join([said, *(f"{who}: {text}" for who, text in stacks.items())]))
            by = time.monotonic() + timeout_s
            for promise in ready:
                who = _who(*promises[promise])
                try:
                    answer = found[promises[promise]] = ray.get(promise, timeout=timeout_s)
                except RayError as error:
                    if (said := _cannot_import(error)) is not None:
                        raise UserError(f"worker {who}: {said}") from None
                    raise WorkerError(self._died(who, error)) from None
                failure = answer.at if isinstance(answer, Standing) else None
                if isinstance(failure, Failure):  # raise at once: others may wait for this rank
                    if failure.kind is FailureKind.USER_ERROR:
                        raise UserError(f"worker {who}: {failure.message}")
                    raise WorkerError(
                        f"worker {who} could not start: {failure.message}\n{failure.traceback}"
                    )
        return found

    def _some_advanced(self, ranks: Iterable[tuple[str, int]]) -> bool:
        """Whether a starting rank has made progress since the last call, or has died."""
        actors = [self._processes[at].actor for at in ranks]
        asked = {actor.advanced.options(concurrency_group=CONTROL).remote(): None for actor in actors}
        answers = take_answers(asked, ADVANCED_TIMEOUT_S)
        return len(answers) + len(asked) < len(actors) or any(advanced for _, advanced in answers)

    @property
    def own_address(self) -> str:
        if self.address is None:
            return ""
        import ray

        return ray.util.get_node_ip_address()

    @property
    def cluster(self) -> Cluster:
        return self

    def report(self, run: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            gauge, evaluation = labelled(name)
            if gauge not in self._gauges:
                self._gauges[gauge] = _new_gauge(gauge, name)
            self._gauges[gauge].set(value, tags={"run": run, "evaluation": evaluation})

    def unreadable(self, segments: Collection[Segment]) -> Mapping[Segment, str]:
        peers = self._links.servers.peers
        return peers.unreadable(segments) if peers is not None else {}

    def replace(self, group: WorkerGroup, rank: int) -> None:
        import ray

        self.release(group, rank)
        # The new process may start on a node that has just joined.
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
        self._diagnostics.forget(_who(group.name, rank))

    def vacant(self, group: WorkerGroup) -> Collection[int]:
        room = self._pools.room(group.place.pool.name)
        return {
            rank
            for rank in group.absent & room.keys()
            if self._node_names.get(room[rank]) not in self._links.lost
        }

    def sample_at(self, group: WorkerGroup, rank: int) -> int | None:
        noted = noted_sample(self._setup.run_dir / LOGS, group.name, rank)
        return noted if noted is not None else self._links.sample_at(group.name, rank)

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
        if (deletions := self._links.servers.deletions) is not None:
            deletions(node, file)

    def stacks(self, group: WorkerGroup, ranks: Sequence[int]) -> Mapping[int, str]:
        found = self._diagnostics.stacks([_who(group.name, rank) for rank in ranks], self._links.hosts)
        return {rank: text for rank in ranks if (text := found.get(_who(group.name, rank)))}

    def memory(self) -> Mapping[str, Memory]:
        return self._diagnostics.memory()

    def _submit(self, rank: int, task: Task, call: Call) -> None:
        process = self._processes.get((call.group.name, rank))
        if process is None:  # the rank left after the call was requested
            self._unheard.append((call, rank))
            return
        group = {"concurrency_group": CONTROL} if task.rows is None else {}
        stream = process.actor.call.options(num_returns="streaming", **group).remote(task)
        self._streams[stream] = (call, rank)

    def _actors_of(self, call: Call) -> list[Any]:
        processes = (self._processes.get((call.group.name, rank)) for rank in call.ranks)
        return [process.actor for process in processes if process is not None]

    def cancel(self, call: Call) -> None:
        for actor in self._actors_of(call):
            actor.cancel_call.options(concurrency_group=CONTROL).remote(call.number)

    def give_up(self, call: Call, sample_ids: Sequence[int]) -> None:
        for actor in self._actors_of(call):
            actor.give_up_rows.options(concurrency_group=CONTROL).remote(call.number, list(sample_ids))

    def wait(self, timeout_s: float) -> Sequence[Event]:
        import ray
        from ray.exceptions import RayError

        self._diagnostics.look(self._links.hosts)
        events, streams = self._links.take_events(), list(self._streams)
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
                message = self._died(_who(call.group.name, rank), error)
                reply = Reply(failure=Failure(message, kind=FailureKind.DIED))
            if reply.is_last:
                del self._streams[stream]
                if call.method == REGISTER and reply.failure is None:
                    self._links.came_up(call, rank, reply)
                    continue
            events.append(Event(call, rank, reply))
        return events

    def _without_streams(self, timeout_s: float) -> list[Event]:
        """Return failures of calls to ranks without processes; sleep if there are none."""
        if not self._unheard:
            time.sleep(timeout_s)
        unheard, self._unheard = self._unheard, []
        failure = Failure("its process had ended when it was called", kind=FailureKind.DIED)
        return [Event(call, rank, Reply(failure=failure)) for call, rank in unheard]

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def _died(self, who: str, error: BaseException) -> str:
        """Describe a process that died, with the end of its log."""
        # The process may have run on a machine that does not see the run's directory.
        self._links.bring_logs()
        log = self._setup.run_dir / LOGS / log_name(who)
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else str(error)
        why = self._diagnostics.ending(who, error, self._links.hosts)
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
            self._diagnostics.close()
            self._reset()
            self._is_open = False
            self._cluster.disconnect()

    def _end_processes(self) -> None:
        import ray

        self._links.servers.tell_deletions()
        actors = [process.actor for process in self._processes.values()]
        closing = [actor.close.options(concurrency_group=CONTROL).remote() for actor in actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        self._links.bring_logs()
        if not self._cluster.folder:  # a local cluster ends with everything on it
            for actor in actors:
                ray.kill(actor)
            self._links.servers.kill()
            self._models.kill()
            self._pools.remove()


def _who(group: str, rank: int) -> str:
    return f"{group}[{rank}]"


def _cannot_import(error: Exception) -> str | None:
    """Return a message if a process died for lack of a module that the driver has, else None."""
    lacking = re.search(r"No module named '([\w.]+)'", str(error))
    top = lacking.group(1).partition(".")[0] if lacking else ""
    file = getattr(sys.modules.get(top), "__file__", None)
    if lacking is None or file is None:
        return None
    folder = Path(file).parent.parent if Path(file).name == "__init__.py" else Path(file).parent
    return (
        f"its node cannot import {lacking.group(1)!r}, which the driver has from {file}. RayBackend(working_dir={str(folder)!r}) sends "
        "that folder to all nodes. It is not needed if all nodes see the folder, or with `ray job submit --working-dir`"
    )
