"""Start the gateway of a run's agents as a process of the driver, and start it again if it dies."""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..dataflow.buffer.flight import make_certificate
from ..dataflow.child_process import ChildProcess
from ..dataflow.errors import RunError
from ..dataflow.runs.files import LOGS, make_folder
from ..workers.rendezvous import LOOPBACK, GatewayAddress

PROGRAM = "weft.workers.agents.gateway"
LOG = "gateway.log"
"""Output of the process, in the run's `logs/`."""
START_S = 120.0
"""[s] Longest wait for the process to be up."""
STARTS = 3
"""Attempts to start a process that dies during its start."""
CLOSE_S = 10.0
"""[s] Longest wait for the process to end."""
MOST_STARTS = 20
"""A gateway that has died this often stays down, and one that cannot start."""


class GatewayProcess:
    """The gateway of a run. Its address stays the same when it is started again.

        starting ──> up ──dies──> starting ──> ...
                      └──close──> closed

    Args:
        run: the run's folder, for logs.
        host: address of this node for ranks on other nodes; empty if there are none. Only they use
            TLS. Harnesses run on this node, and use its loopback address.

    Raises:
        OSError: no port is free, or the process cannot be started.
        RunError: the process is not up in time.
    """

    def __init__(self, run: Path, host: str = "") -> None:
        self._logs = run / LOGS
        make_folder(self._logs)
        self._key = secrets.token_urlsafe(32)
        self._host = host
        # Both stay open here, so that connections wait while the process is started again.
        self._local = socket.create_server((LOOPBACK, 0))
        self._remote: socket.socket | None = None
        self._certificate = make_certificate() if host else None
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._remote = socket.create_server((host, 0), family=family)
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = False
        self._scratch = Path(tempfile.mkdtemp(prefix="weft-harness-"))
        try:
            self._child = self._start()
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        self._watching = threading.Thread(target=self._watch, name="weft-gateway", daemon=True)
        self._watching.start()

    @property
    def address(self) -> GatewayAddress:
        """Where ranks connect."""
        if self._remote is None or self._certificate is None:
            return GatewayAddress(LOOPBACK, self._local.getsockname()[1], self._key)
        port, certificate = self._remote.getsockname()[1], self._certificate.certificate.decode()
        return GatewayAddress(self._host, port, self._key, certificate)

    @property
    def pid(self) -> int:
        return self._child.pid

    def take_notes(self) -> list[str]:
        """Return lines to tell the user."""
        return _taken(self._notes)

    def take_asked(self) -> set[str]:
        """Return groups of environments whose ranks have come or gone since the last call."""
        return {*_taken(self._asked)}

    def close(self) -> None:
        self._closed = True
        self._child.close_input()
        self._child.wait(CLOSE_S)
        self._child.kill()
        self._watching.join(START_S)  # it may be starting the next process
        self._local.close()
        if self._remote is not None:
            self._remote.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self) -> ChildProcess:
        """Start the process, and wait until it is up. Start it again if it dies before that."""
        for left in reversed(range(STARTS)):
            child, settings = self._begin()
            try:
                child.send(settings)
                child.receive(START_S)
                return child
            except (TimeoutError, EOFError) as error:
                child.kill()
                if self._closed or not left or isinstance(error, TimeoutError):
                    raise RunError(
                        f"the gateway of the run's agents is not up ({error}); its log: {self._logs / LOG}"
                    ) from None
        raise AssertionError("the last attempt returns or raises")

    def _begin(self) -> tuple[ChildProcess, dict[str, Any]]:
        """Begin the process. Return it and the settings to send it."""
        sockets = [each for each in (self._local, self._remote) if each is not None]
        log = os.open(self._logs / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child = ChildProcess(
                PROGRAM,
                errors=log,
                detached=True,
                descriptors=[each.fileno() for each in sockets],
                # It renders and parses text, and leaves the GPUs to the ranks.
                environment={"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
            )
        finally:
            os.close(log)
        settings: dict[str, Any] = {
            "key": self._key,
            "address": f"http://{LOOPBACK}:{self._local.getsockname()[1]}",
            "logs": str(self._logs),
            "scratch": str(self._scratch),
            "descriptors": [each.fileno() for each in sockets],
        }
        if self._certificate is not None:
            settings["certificate"] = self._certificate.certificate.decode()
            settings["private_key"] = self._certificate.key.decode()
        return child, settings

    def _watch(self) -> None:
        for _ in range(MOST_STARTS):
            self._listen(self._child)
            self._child.wait(None)
            ended = self._child.kill()  # closes its pipes
            if self._closed:
                return
            self._notes.put(f"the gateway of the run's agents ended ({ended}); it starts again")
            for left in self._scratch.iterdir():  # the folder itself stays, readable by this user only
                shutil.rmtree(left, ignore_errors=True)
            try:
                self._child = self._start()
            except (OSError, RunError) as error:
                self._notes.put(str(error))
                break
            if self._closed:  # during the start, so that `close` has ended the process before
                self._child.kill()
                return
        self._notes.put("the gateway of the run's agents stays down; the run ends when a rank needs it")

    def _listen(self, child: ChildProcess) -> None:
        """Take the lines of the process until it ends."""
        for line in child.stdout:
            with suppress(ValueError):
                said = json.loads(line)
                for name, told in (("note", self._notes), ("ask", self._asked)):
                    if name in said:
                        told.put(said[name])


def _taken(told: queue.SimpleQueue[str]) -> list[str]:
    found: list[str] = []
    with suppress(queue.Empty):
        while True:
            found.append(told.get_nowait())
    return found
