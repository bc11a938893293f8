"""Players: the ranks with environments, as the gateway sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.websockets import WebSocket

from .failures import EpisodeFailure, HarnessDied, SetupTimedOut
from .link import Hello, Play, Played, Stop
from .replicas import send

ENVIRONMENTS_S = 300.0
"""[s] Longest wait for a rank with environments, which the driver may be replacing."""


@dataclass(eq=False)
class Player:
    """A rank with environments that is connected."""

    socket: WebSocket
    hello: Hello
    playing: dict[str, asyncio.Future[Mapping[str, Any]]] = field(
        default_factory=dict[str, "asyncio.Future[Mapping[str, Any]]"]
    )
    """Key of an episode -> its result."""


class Players:
    """Plays episodes with the ranks of a group of environments. Interface of `EpisodeRunner`.

    An episode waits for a free environment as long as there are ranks. It has no deadline here: the
    ranks limit each call of a simulator and the number of turns.

    Args:
        ask: tells the driver that ranks have come or gone, or that there are none.
    """

    def __init__(self, group: str, ask: Callable[[], None]) -> None:
        self._group = group
        self._ask = ask
        self._players: set[Player] = set()
        self._changed = asyncio.Event()

    def add(self, player: Player) -> None:
        self._players.add(player)
        self._tell()
        self._ask()

    def remove(self, player: Player) -> None:
        self._players.discard(player)
        for result in player.playing.values():
            if not result.done():
                result.set_exception(HarnessDied(f"{player.hello.who} is gone"))
        self._tell()
        self._ask()

    def take(self, player: Player, played: Played) -> None:
        result = player.playing.get(played.key)
        if result is not None and not result.done():
            if played.failure is not None:
                result.set_exception(EpisodeFailure.from_json(played.failure))
            else:
                result.set_result(played.result)

    async def run(self, key: str, row: Mapping[str, Any], *, base_url: str) -> Mapping[str, Any]:
        player = await self._free()
        result = player.playing[key] = asyncio.get_running_loop().create_future()
        try:
            await send(player.socket, Play(key, row))  # if it is gone, `remove` follows
            return await result
        finally:
            del player.playing[key]
            self._tell()
            if result.cancelled():
                await send(player.socket, Stop(key))

    @contextlib.contextmanager
    def sampling(self, key: str) -> Iterator[None]:
        yield

    async def _free(self) -> Player:
        """Return a rank with a free environment."""
        while True:
            able = [p for p in self._players if len(p.playing) < p.hello.capacity]
            if able:
                return min(able, key=lambda p: (len(p.playing), p.hello.rank))
            if not self._players:
                self._ask()
            try:
                await asyncio.wait_for(self._changed.wait(), ENVIRONMENTS_S)
            except TimeoutError:
                if not self._players:
                    raise SetupTimedOut(
                        f"no rank of the environments {self._group!r} is up, for {ENVIRONMENTS_S:g} s"
                    ) from None

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
