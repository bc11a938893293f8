"""Replicas: the rollout ranks that sample turns, as the gateway sees them.

    ask ──> waiting ──a replica has room──> being sampled ──Sampled──> done
               ^                                  │
               └── the replica has died, or rests ┘

- Turns wait in order of arrival, for each group of ranks.
- A turn goes to the replica that it prefers, unless that one is busy while another is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from ..generation.engine import Response
from .link import Abort, Hello, Record, Sample, Sampled, to_bytes, to_record

BUSY = 4
"""An idle replica takes over sessions of a replica with this number of turns."""

# The gateway's side of a link


async def send(websocket: WebSocket, record: Record) -> bool:
    """Send a record. Return False if the other side is gone, as its reader will notice too."""
    try:
        await websocket.send_bytes(to_bytes(record))
    except (RuntimeError, WebSocketDisconnect):
        return False
    return True


async def records_of(websocket: WebSocket) -> AsyncIterator[Any]:
    """Yield the records of a rank until it is gone."""
    while True:
        try:
            content = await websocket.receive_bytes()
        except (RuntimeError, WebSocketDisconnect):  # the former if a record could not be sent
            return
        yield to_record(content)


# Replicas


@dataclass(eq=False)
class Replica:
    """A rollout rank that is connected."""

    socket: WebSocket
    hello: Hello
    serves: bool = False
    """Whether it has an open call, and takes turns."""
    turns: dict[int, AskedTurn] = field(default_factory=dict[int, "AskedTurn"])

    @property
    def room(self) -> int:
        return self.hello.capacity - len(self.turns) if self.serves else 0


@dataclass(eq=False)
class AskedTurn:
    """A turn that waits for a replica, or is being sampled by one."""

    group: str
    sample: Sample
    prefers: Replica | None
    """The replica that has the turn's prompt in its cache."""
    done: asyncio.Future[Response]
    """The response; a RuntimeError if the engine refuses the turn."""
    replica: Replica | None = None

    @property
    def waits_for(self) -> str:
        return self.replica.hello.who if self.replica else f"a free rank of {self.group}"


class Replicas:
    def __init__(self) -> None:
        self._replicas: set[Replica] = set()
        self._queues: defaultdict[str, deque[AskedTurn]] = defaultdict(deque)
        """Group -> turns that wait for a replica."""

    def add(self, replica: Replica) -> None:
        self._replicas.add(replica)

    async def remove(self, replica: Replica) -> None:
        """Let other replicas sample the turns of one that is gone."""
        self._replicas.discard(replica)
        await self.rest(replica)

    async def serve(self, replica: Replica) -> None:
        replica.serves = True
        await self._hand_out(replica.hello.group)

    async def rest(self, replica: Replica) -> None:
        """Give a replica no further turns, and let its turns wait for another one, before all others."""
        replica.serves = False
        queue = self._queues[replica.hello.group]
        for turn in sorted(replica.turns.values(), key=lambda one: -one.sample.turn):
            turn.replica = None
            queue.appendleft(turn)
        replica.turns.clear()
        await self._hand_out(replica.hello.group)

    async def ask(self, turn: AskedTurn) -> None:
        """Have a turn sampled."""
        self._queues[turn.group].append(turn)
        await self._hand_out(turn.group)

    async def take(self, replica: Replica, sampled: Sampled) -> None:
        """Take the response of a replica, unless the turn was aborted or taken back."""
        turn = replica.turns.pop(sampled.turn, None)
        if turn is not None and not turn.done.done():
            if sampled.response is None:
                turn.done.set_exception(RuntimeError(sampled.error))
            else:
                turn.done.set_result(sampled.response)
        await self._hand_out(replica.hello.group)

    async def abort(self, turn: AskedTurn) -> None:
        turn.done.cancel()
        if turn.replica is None:
            with contextlib.suppress(ValueError):
                self._queues[turn.group].remove(turn)
        elif turn.replica.turns.pop(turn.sample.turn, None) is not None:
            await send(turn.replica.socket, Abort(turn.sample.turn))
            await self._hand_out(turn.group)

    async def _hand_out(self, group: str) -> None:
        """Send waiting turns to replicas with room."""
        queue = self._queues[group]
        while queue:
            replica = self._choose(queue[0])
            if replica is None:
                return
            turn = queue.popleft()
            turn.replica, replica.turns[turn.sample.turn] = replica, turn
            await send(replica.socket, turn.sample)

    def _choose(self, turn: AskedTurn) -> Replica | None:
        able = [r for r in self._replicas if r.hello.group == turn.group and r.room > 0]
        if not able:
            return None
        own, idlest = turn.prefers, min(able, key=lambda r: (len(r.turns), r.hello.rank))
        stays = own in able and (len(own.turns) < BUSY or idlest.turns)
        return own if stays else idlest
