"""Serving: the process of a dashboard, from its socket to its end."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path
from urllib.parse import urlencode

import uvicorn

from ...dataflow.errors import UserError
from ..reading.catalogue import Catalogue
from .app import new_app
from .safety import Access, new_token

LEAVE_S = 1
"""Seconds that answers under way have when the server ends."""


class Serving:
    """A dashboard that listens.

    Args:
        folder: of runs, or of one.
        host: address to listen on.
        port: 0: one that is free.
        token: that requests must have; None: a new one; empty: none, on loopback alone.

    Raises:
        UserError: the address cannot be listened on, or would show runs to everybody.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        loopback = _is_loopback(host)
        if token == "" and not loopback:
            raise UserError(
                f"--host {host} without a token would show the runs to everybody who reaches this machine; leave --token out to get one"
            )
        self.token = new_token() if token is None else token
        self._socket = _listen(host, port)
        self.port = self._socket.getsockname()[1]
        self._shown = f"[{host}]" if ":" in host else host
        names = (
            frozenset()
            if loopback
            else frozenset({host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()})
        )
        access = Access(self.token, names, any_address=not loopback)
        self.app = new_app(Catalogue(folder), access)

    @property
    def address(self) -> str:
        """What a person opens."""
        where = f"http://{self._shown}:{self.port}/"
        return f"{where}?{urlencode({'token': self.token})}" if self.token else where

    def serve(self) -> None:
        """Answer until the process is asked to end."""
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LEAVE_S,
            ws="none",
        )
        with contextlib.suppress(KeyboardInterrupt), self._socket:
            uvicorn.Server(config).run(sockets=[self._socket])


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
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
        return listening
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port} cannot be listened on: {error}") from None
