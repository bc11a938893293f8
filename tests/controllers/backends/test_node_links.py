"""Segment servers that do not start: the wait ends, names the node, and blocks no other work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from toy import ToyReward
from worker_groups import Asked

from weft.controllers.backends.backend import Event, Files
from weft.controllers.backends.node_links import CONNECT_TIMEOUT_S, NodeLinks, Process, _SegmentServers
from weft.controllers.group import Call
from weft.controllers.placement import ResourcePool
from weft.controllers.ranks.tasks import FailureKind, Reply
from weft.dataflow.errors import WorkerDied, WorkerError


class Mute(_SegmentServers):
    """Servers that start but never report an address. Each look takes at least a second."""

    now_s = 0.0

    def start(self, files: Files, names: Mapping[str, str], run: Path) -> None:
        self._asked = {object(): name for name in names.values()}

    def advance(self, wait_s: float = 0.0) -> bool:
        self.now_s += max(wait_s, 1.0)
        return False

    def forget(self, name: str) -> None:
        self._asked = {}


class Actor:
    """A rank without calls."""


@pytest.fixture
def links() -> NodeLinks:
    servers, processes = Mute(), {("reward", 0): Process(Actor(), is_up=True)}
    made = NodeLinks(processes, lambda who, error: f"{who} died: {error}", lambda: servers.now_s)
    made.servers = servers
    return made


def until(links: NodeLinks) -> list[Event]:
    """Return the first events of `take_events`, which never blocks."""
    for _ in range(2 * int(CONNECT_TIMEOUT_S)):
        if events := links.take_events():
            return events
    raise AssertionError("nothing came")


def registered() -> Call:
    call = Asked().group("reward", ResourcePool(), ToyReward).call("register")
    assert call.ranks == (0,)
    return call


def test_a_start_ends_with_an_error_that_names_the_nodes_and_the_deadline(
    links: NodeLinks, tmp_path: Path
):
    said = r"the segment server on nodes 'a', 'b' did not start within 60 s, so other nodes could not read its rows"
    with pytest.raises(WorkerError, match=said):
        links.connect_all(Files(tmp_path), tmp_path, {"1": "a", "2": "b"}, 60.0)


def test_a_used_node_whose_server_does_not_restart_ends_the_run(links: NodeLinks, tmp_path: Path):
    links.connect_all(Files(tmp_path), tmp_path, {"1": "a"}, 60.0)
    links.came_up(registered(), 0, Reply(done=True))
    links.stands_on["reward", 0] = "a"
    assert [event.reply.failure for event in links.take_events()] == [None], (
        "with one node there is nothing to connect"
    )
    links._used["2"] = "b"  # pyright: ignore[reportPrivateUsage]
    links._connect()  # pyright: ignore[reportPrivateUsage]
    assert links.settling
    with pytest.raises(
        WorkerDied, match=r"the segment server on nodes 'a', 'b' did not start within 60 s"
    ):
        until(links)


def test_a_run_continues_without_an_unreachable_node(links: NodeLinks, tmp_path: Path):
    links.connect_all(Files(tmp_path), tmp_path, {"1": "a"}, 60.0)
    links._used["2"] = "b"  # pyright: ignore[reportPrivateUsage]
    links.servers.start(Files(tmp_path), {"2": "b"}, tmp_path)
    links.came_up(registered(), 0, Reply(done=True))
    links.stands_on["reward", 0] = "b"
    assert links.take_events() == [] and links.settling, "it is waited for beside the loop"
    (event,) = until(links)
    failure: Any = event.reply.failure
    assert failure.kind is FailureKind.DIED
    assert failure.message.startswith("the segment server on node 'b' did not start within 60 s")
    assert links.nodes == ["a"] and not links.settling and links.take_events() == []
