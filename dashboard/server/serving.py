"""The process of a dashboard. As a program, it serves a run's folder on a socket that the run
opened."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ...controllers.reports.dashboard_process import TOKEN
from ...dataflow.errors import UserError
from ...dataflow.runs.lock import Life, life_of
from ..reading.catalogue import Catalogue
from .app import new_app
from .safety import Access

LEAVE_S = 1
"""[s] Time for open responses to finish at shutdown."""


class Serving:
    """A dashboard of a folder of runs, or of one run."""

    def __init__(
        self,
        listening: socket.socket,
        folder: Path,
        token: str,
        names: frozenset[str] = frozenset(),
        *,
        any_address: bool = False,
    ) -> None:
        self._socket, self.token = listening, token
        host, self.port = listening.getsockname()[:2]
        self._shown = f"[{host}]" if ":" in host else host
        self.app = new_app(Catalogue(folder), Access(token, names, any_address))

    @classmethod
    def at(
        cls, folder: Path, host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> Serving:
        """Listen on an address.

        Args:
            port: 0 takes a free one.
            token: token that requests must have; None makes a new one. An empty token, allowed only
                on loopback, disables the check.

        Raises:
            UserError: listening fails, or the address would show the runs without a token.
        """
        if not 0 <= port <= 65535:
            raise UserError(f"--port {port} is not a port: choose 1 to 65535, or 0 for a free one")
        loopback = _is_loopback(host)
        if token == "" and not loopback:
            raise UserError(
                f"--host {host} without a token would show the runs to anyone who can reach this machine; leave --token out to get one"
            )
        # An unresponsive name server would take seconds, so skip the lookup on loopback.
        known = () if loopback else (host, socket.gethostname(), socket.getfqdn())
        names = frozenset(name.lower() for name in known)
        token = secrets.token_urlsafe(24) if token is None else token
        return cls(_listen(host, port), folder, token, names, any_address=not loopback)

    @property
    def address(self) -> str:
        where = f"http://{self._shown}:{self.port}/"
        return f"{where}?{urlencode({'token': self.token})}" if self.token else where

    def serve(self, idle_s: float = 0.0, goes_on: Callable[[], bool] = lambda: False) -> None:
        """Serve until the process gets a signal. With `idle_s`, also end after this many seconds
        without a request, unless `goes_on()` is true."""
        app = _LastAsked(self.app)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LEAVE_S,
            ws="none",
        )
        server = uvicorn.Server(config)

        def end_when_idle() -> None:
            while not server.should_exit:
                time.sleep(min(10.0, idle_s))
                server.should_exit |= app.quiet_s() > idle_s and not goes_on()

        if idle_s:
            threading.Thread(target=end_when_idle, daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt), self._socket:
            server.run(sockets=[self._socket])


class _LastAsked:
    """Forwards requests, and records the time of the last one. An open page keeps its event stream
    open."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._asked_at, self._open = time.monotonic(), 0

    def quiet_s(self) -> float:
        """Return the seconds since the last request; 0 while a page is open."""
        return 0.0 if self._open else time.monotonic() - self._asked_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http"
        self._open += counts
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= counts
            self._asked_at = time.monotonic()


def _is_loopback(host: str) -> bool:
    """
    >>> [_is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "node-7")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as undo:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            listening = undo.enter_context(socket.socket(family, kind, protocol))
            # The port of a dashboard that has just ended may otherwise be refused.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(128)
        except (OSError, OverflowError, UnicodeError) as error:
            raise UserError(f"--host {host} --port {port} cannot be listened on: {error}") from None
        undo.pop_all()
        return listening


def main(folder: Path, run: str, descriptor: int, idle_s: float) -> None:
    """Serve until the run has ended and no request has come for `idle_s` seconds."""
    # Remove the token from the environment of child processes.
    serving = Serving(socket.socket(fileno=descriptor), folder, os.environ.pop(TOKEN))
    serving.serve(idle_s, lambda: life_of(folder / run)[0] is Life.ALIVE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
