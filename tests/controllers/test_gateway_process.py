"""The driver starts the gateway of a run's agents, and starts it again if it dies."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from weft.algorithms.sampling import Sampling
from weft.controllers.gateway_process import GatewayProcess
from weft.dataflow.errors import GatewayLost
from weft.workers.agents.harness import Function
from weft.workers.agents.link import EpisodeRequest, Hello, Link, Open

DEADLINE_S = 60.0
pytestmark = pytest.mark.thorough


def wait_for_note(gateway: GatewayProcess, text: str) -> str:
    by = time.monotonic() + DEADLINE_S
    while time.monotonic() < by:
        for note in gateway.take_notes():
            if text in note:
                return note
        time.sleep(0.05)
    raise AssertionError(f"no note has {text!r} within {DEADLINE_S:g} s")


def test_a_gateway_that_dies_starts_again_at_the_same_address(tmp_path: Path):
    gateway = GatewayProcess(tmp_path)
    try:
        address, before = gateway.address, gateway.pid
        came = threading.Event()
        link = Link(address, Hello("rollout", 0, 8), came.set)
        url = address.url("http", "/v1/models")
        assert httpx.get(url, timeout=DEADLINE_S).status_code == 401
        os.kill(before, signal.SIGKILL)
        assert "signal 9" in wait_for_note(gateway, "starts again")
        assert came.wait(DEADLINE_S)
        with pytest.raises(GatewayLost, match="the gateway is gone"):
            link.take()
        link.close()
        assert gateway.address == address
        # A new connection waits until the process listens.
        Link(address, Hello("rollout", 0, 8)).close()
        assert httpx.get(url, timeout=DEADLINE_S).status_code == 401
        assert gateway.pid != before
    finally:
        gateway.close()
    with pytest.raises(ProcessLookupError):
        os.kill(gateway.pid, 0)


def test_a_gateway_that_dies_while_it_starts_is_started_again(tmp_path: Path):
    gateway = GatewayProcess(tmp_path)
    try:
        before = gateway.pid
        os.kill(before, signal.SIGKILL)
        by = time.monotonic() + DEADLINE_S
        while not (
            after := [p for p in psutil.Process().children() if is_gateway(p) and p.pid != before]
        ):
            assert time.monotonic() < by
            time.sleep(0.001)
        after[0].kill()
        Link(gateway.address, Hello("rollout", 0, 8)).close()
        assert gateway.pid not in (before, after[0].pid)
    finally:
        gateway.close()


def is_gateway(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "weft.workers.agents.gateway" in process.cmdline()
    return False


def test_a_gateway_that_is_killed_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(scratch))
    gateway = GatewayProcess(tmp_path)
    try:
        [folder] = scratch.iterdir()
        (folder / "of an episode").mkdir()
        os.kill(gateway.pid, signal.SIGKILL)
        wait_for_note(gateway, "starts again")
        by = time.monotonic() + DEADLINE_S
        while left := [path.name for path in scratch.glob("*/*")]:
            assert time.monotonic() < by, left
            time.sleep(0.05)
        link = Link(gateway.address, Hello("rollout", 0, 8))  # it is up again
        link.close()
        os.kill(gateway.pid, signal.SIGKILL)
    finally:
        gateway.close()
    assert not [*scratch.iterdir()]


def test_a_connection_outlives_a_slow_tool(tmp_path: Path):
    gateway = GatewayProcess(tmp_path)
    connection = http.client.HTTPConnection(gateway.address.host, gateway.address.port, DEADLINE_S)
    try:
        for pause_s in (7.0, 0.0):
            connection.request("GET", "/v1/models")
            reply = connection.getresponse()
            reply.read()
            assert reply.status == 401 and not reply.will_close
            time.sleep(pause_s)
    finally:
        connection.close()
        gateway.close()


def test_ranks_on_other_nodes_connect_by_tls_with_the_key(tmp_path: Path):
    gateway = GatewayProcess(tmp_path, "127.0.0.1")
    try:
        address = gateway.address
        assert address.certificate.startswith("-----BEGIN CERTIFICATE")
        link = Link(address, Hello("rollout", 0, 8))
        assert link.take() == []
        link.close()
        wrong = type(address)(address.host, address.port, "another key", address.certificate)
        with pytest.raises(GatewayLost):
            gone = threading.Event()
            refused = Link(wrong, Hello("rollout", 0, 8), gone.set)
            assert gone.wait(DEADLINE_S)
            refused.take()
        with pytest.raises(httpx.HTTPError):  # no client takes another certificate
            httpx.get(address.url("http", "/v1/models"), timeout=DEADLINE_S)
    finally:
        gateway.close()


def test_a_connection_stays_open_while_a_tool_works(tmp_path: Path):
    gateway = GatewayProcess(tmp_path)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.address.port, timeout=DEADLINE_S)
        for pause_s in (0, 6):  # more than servers wait by default
            time.sleep(pause_s)
            connection.request("GET", "/v1/models")
            reply = connection.getresponse()
            assert (reply.status, reply.will_close, bool(reply.read())) == (401, False, True)
        connection.close()
    finally:
        gateway.close()


def test_a_model_without_a_tokenizer_ends_the_run(tmp_path: Path):
    gateway = GatewayProcess(tmp_path)
    try:
        came = threading.Event()
        link = Link(gateway.address, Hello("rollout", 0, 8), came.set)
        plan = Function(function="module:run").plan()
        link.send(Open(str(tmp_path), 100, Sampling(), plan, (EpisodeRequest(7, None, {}),)))
        assert came.wait(DEADLINE_S)
        (ended,) = link.take()
        assert (ended.episode_id, ended.fatal, ended.scored) == (7, True, False), ended
        assert "tokenizer" in ended.failure
        link.close()
    finally:
        gateway.close()
