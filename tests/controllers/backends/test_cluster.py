"""A missing or foreign cluster leads to one clear line, soon."""

import socket
import subprocess
import time
from pathlib import Path

import pytest

from weft.controllers.backends import ray_cluster
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.backends.ray_cluster import RayCluster, nodes_of
from weft.controllers.placement import Place, ResourcePool
from weft.dataflow.child_process import ChildProcess
from weft.dataflow.errors import UserError


def test_a_malformed_address_is_refused_with_its_place(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("RAY_ADDRESS", "http://ray-head:8265")
    with pytest.raises(
        UserError, match=r"^RAY_ADDRESS='http://ray-head:8265' is the address of a dashboard"
    ):
        RayBackend()
    assert RayBackend("ray-head:6379").address == "ray-head:6379", "what is said in the script counts"
    for wrong, why in (
        ("ray://ray-head:10001", "joins it by host:port"),
        ("ray-head", "not the address of a Ray cluster"),
        ("ray-head:", "not the address of a Ray cluster"),
        ("ray-head:six", "not the address of a Ray cluster"),
        ("ray-head:6379/x", "not the address of a Ray cluster"),
        ("::1:6379", "not the address of a Ray cluster"),
    ):
        with pytest.raises(UserError, match=f"RayBackend.'{wrong}'..*{why}"):
            RayBackend(wrong)
    assert RayBackend("[::1]:6379").address == "[::1]:6379"


def test_a_reaper_that_takes_long_is_left_to_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program, done = tmp_path / "reaper.py", tmp_path / "done"
    program.write_text(
        f"import pathlib, sys, time\nsys.stdin.read()\ntime.sleep(1)\npathlib.Path({str(done)!r}).touch()"
    )
    monkeypatch.setattr(ray_cluster, "CLOSE_TIMEOUT_S", 0.01)  # waited out
    cluster = RayCluster(None)
    cluster._reaper = reaper = ChildProcess(program, errors=subprocess.DEVNULL)
    cluster.disconnect()
    assert reaper.wait(60) and done.exists()
    reaper.kill()  # closes its pipes


def test_a_local_cluster_is_asked_for_in_rays_own_word(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert RayBackend().address is None and RayBackend("auto").address == "auto"


def test_a_missing_cluster_is_named_before_ray_is_imported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError) as caught:
        RayBackend(f"127.0.0.1:{port}").check({}, {})
    assert str(caught.value) == (
        f"the Ray cluster at 127.0.0.1:{port} cannot be joined: no server listens there (Connection refused)"
    )
    with pytest.raises(UserError, match=r"the host 'no-such-host\.invalid' is not known"):
        nodes_of("no-such-host.invalid:6379")


@pytest.mark.slow
@pytest.mark.ray
def test_a_listener_that_is_not_a_cluster_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(UserError, match="did not answer as a Ray cluster does"):
            nodes_of(f"127.0.0.1:{port}")
        assert time.monotonic() - started < 30, "6 s after Ray is imported"


@pytest.mark.thorough
@pytest.mark.ray
def test_a_missing_token_and_resources_that_no_node_has_are_named(
    ray_address: str, monkeypatch: pytest.MonkeyPatch
):
    too_large = {"actor": Place(ResourcePool("pool", cpus=17))}
    with pytest.raises(UserError, match=r"asks for 17 CPUs \(pool: 17\), but the cluster at .* has 16"):
        RayBackend(ray_address).check(too_large, {})
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another's")
    with pytest.raises(UserError, match="the authentication token is not that of the cluster"):
        RayBackend(ray_address).check({}, {})
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(UserError, match="RAY_AUTH_MODE is not set"):
        RayBackend(ray_address).check({}, {})


@pytest.mark.ray
def test_a_process_that_has_joined_a_cluster_is_not_sent_to_another(cluster: None, ray_address: str):
    RayBackend(ray_address).check({"actor": Place(ResourcePool("pool", cpus=16))}, {})
    other = f"127.0.0.1:{int(ray_address.rpartition(':')[2]) - 1}"
    with pytest.raises(
        UserError,
        match=f"^RayBackend..{other}..: this process has joined the Ray cluster at {ray_address}",
    ):
        RayBackend(other).check({}, {})
