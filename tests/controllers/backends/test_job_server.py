"""Jobs on a real Ray head with a token: uploads, run directories, stop and resume.

Results equal a run in one process.
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
from sharded import make_model
from tokenizers import models

pytestmark = [pytest.mark.ray, pytest.mark.slow]
HERE = Path(__file__).parent


@dataclass
class Head:
    """The head of a cluster with a job server, and a user's machine."""

    address: str
    environment: Mapping[str, str]
    home: Path
    """Home of the user who started Ray."""
    project: Path
    model: Path

    def weft(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the command line in the project, as the user does."""
        done = subprocess.run(
            [sys.executable, "-m", "weft", *words],
            cwd=self.project,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done

    def submit(
        self, *words: str, script: Sequence[str] = (), code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        ours = ["--address", self.address, "--python", sys.executable]
        return self.weft(
            "submit", *ours, *words, "train.py", "--model", str(self.model), *script, code=code
        )

    def runs(self, name: str) -> list[Path]:
        return sorted((self.home / "weft" / name / "runs").iterdir())


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    if find_spec("aiohttp_cors") is None:
        pytest.skip('a head with a job server takes "ray[default]"')
    root = tmp_path_factory.mktemp("head")
    project, home, temporary = root / "project", root / "home", Path(f"/tmp/weft-{os.getpid()}")
    for folder in (project, home, temporary):
        folder.mkdir()
    shutil.copy(HERE / "job_script.py", project / "train.py")
    (project / "data").mkdir()
    (project / "data" / "large.bin").write_bytes(b"x" * 2_000_000)
    (project / ".gitignore").write_text("data/\n")
    model = make_model(root / "model")
    words = tokenizers.Tokenizer(models.WordLevel({"w" * i: i for i in range(97)}, unk_token="w"))
    words.save(str(model / "tokenizer.json"))
    hidden = ("RAY_", "WEFT_", "HF_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "HOME": str(home),
    }
    try:
        address, process = started(root / "head.log", temporary, environment)
        try:
            yield Head(address, environment, home, project, model)
        finally:
            process.terminate()
            process.wait(60)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def started(
    log: Path, temporary: Path, environment: Mapping[str, str]
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a head, and return the address of its job server and its process.

    Ray gives a node 30 s to start. A busy machine may need longer, so this tries three times.
    """
    for _ in range(3):
        dashboard, agent, client = free_ports(3)
        command = f"start --head --block --disable-usage-stats --port=0 --node-ip-address=127.0.0.1 --num-cpus=4 --temp-dir={temporary} "
        command += f"--dashboard-host=127.0.0.1 --dashboard-port={dashboard} --dashboard-agent-listen-port={agent} "
        command += f"--ray-client-server-port={client} --object-store-memory=200000000"
        with log.open("w") as file:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("ray"), *command.split()],
                env={**environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(lambda p=process: "Ray runtime started" in log.read_text() or p.poll() is not None)
        if process.poll() is None:
            return f"http://127.0.0.1:{dashboard}", process
    raise AssertionError(log.read_text())


def wait_until(condition, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.3)


def digest(said: str) -> str:
    [found] = re.findall(r"^digest (\w+)$", said, re.M)
    return found


def test_a_script_has_the_same_weights_in_process_on_a_local_ray_and_as_a_job(
    head: Head, tmp_path: Path
):
    script = [sys.executable, str(head.project / "train.py"), "--model", str(head.model), "--until", "3"]
    plain = {name: value for name, value in head.environment.items() if not name.startswith("RAY_")}
    settings = {"cwd": tmp_path, "env": plain, "capture_output": True, "text": True, "timeout": 240}
    here = subprocess.run([*script, "--in-process"], check=True, **settings).stdout
    local = subprocess.run(script, check=True, **settings).stdout
    there = head.submit("--name", "same", script=["--until", "3"])
    assert digest(here) == digest(local) == digest(there.stdout)
    [run] = head.runs("same")
    assert f"the run's directory is {run}: this is a job of a cluster" in there.stdout
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000003",
    ]
    assert "sends 2 files of" in there.stderr and "large.bin" not in there.stderr
    assert re.search(
        r"job same-\S+ succeeded; its runs are in ~/weft/same on the head node", there.stdout
    )


def test_a_job_that_is_stopped_is_resumed(head: Head):
    answer = head.submit("--json", "--detach", "--name", "long", script=["--until", "100000"])
    job = json.loads(answer.stdout)["job"]
    wait_until(lambda: (head.home / "weft" / "long" / "runs").exists())
    wait_until(lambda: bool(list((head.runs("long")[0] / "checkpoints").glob("step_*"))))
    listed = json.loads(head.weft("jobs", "list", "--json", "--address", head.address).stdout)["jobs"]
    assert job in [one["id"] for one in listed]
    stopped = head.weft("jobs", "stop", job, "--address", head.address).stdout
    assert f"job {job} stopped; its runs are in ~/weft/long on the head node" in stopped

    [run] = head.runs("long")
    saved = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
    again = head.submit("--resume", "--name", "long", script=["--until", str(saved + 2)]).stdout
    assert f"goes on after step {saved}, from {run}/checkpoints/step_{saved:06d}" in again
    assert head.runs("long") == [run], "it went on in the same directory"


def test_a_failed_job_is_reported(head: Head):
    failed = head.submit("--json", "--name", "fails", script=["--until", "no"], code=1)
    answer = json.loads(failed.stdout)
    assert answer["status"] == "FAILED" and "exit code" in answer["message"]
    assert "--until" in failed.stderr, "the log of the job"
    refused = head.weft("jobs", "stop", answer["job"][:-1], "--address", head.address, code=2)
    assert f"did you mean '{answer['job']}'?" in refused.stderr


def test_a_run_that_rays_own_client_submits_survives_its_job_too(head: Head):
    ray = Path(sys.executable).with_name("ray")
    words = ["job", "submit", "--address", head.address, "--working-dir", ".", "--"]
    script = [sys.executable, "train.py", "--model", str(head.model), "--until", "1"]
    settings = {
        "cwd": head.project,
        "env": head.environment,
        "capture_output": True,
        "text": True,
        "timeout": 240,
    }
    said = subprocess.run([ray, *words, *script], check=True, **settings).stdout
    [run] = (head.home / "weft" / "runs").iterdir()
    assert f"the run's directory is {run}: this is a job of a cluster" in said and digest(said)


def test_a_wrong_token_and_too_large_a_folder_are_refused(head: Head):
    wrong = Head(
        head.address,
        {**head.environment, "RAY_AUTH_TOKEN": "another"},
        head.home,
        head.project,
        head.model,
    )
    assert "does not let us in" in wrong.submit(script=["--until", "1"], code=2).stderr
    (head.project / ".gitignore").write_text("")
    os.truncate(head.project / "data" / "large.bin", 200 << 20)
    refused = head.submit(script=["--until", "1"], code=2).stderr
    assert "the largest: data (210 MB)" in refused
    head.submit("--exclude", "train.py", "data/", "--name", "x", script=["--until", "1"], code=2)
