"""GRPO over two complete Ray nodes in separate process, mount and network namespaces, like
containers."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SHARED = "mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && mkdir -m 1777 /tmp/home && hostname {name} && exec {command}"
"""Setup of a container: in-memory files where processes write, and a host name."""
PORT = 6379


class Container:
    """A command in separate namespaces.

    Args:
        network: name of the network namespace.
        command: shell command.
        environment: environment of the command.
        output: file for its output.
    """

    def __init__(self, network: str, command: str, environment: dict[str, str], output: IO[str]) -> None:
        own = SHARED.format(name=network, command=command)
        words = [
            "ip",
            "netns",
            "exec",
            network,
            "unshare",
            "--pid",
            "--mount",
            "--uts",
            "--ipc",
            "--fork",
        ]
        self.process = subprocess.Popen(
            [*words, "--kill-child", "--mount-proc", "sh", "-c", own],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        """Kill the first process; the kernel then kills all others of the namespace."""
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def networks() -> Iterator[list[tuple[str, str]]]:
    """Create two connected network namespaces, and yield the name and address of each."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("namespaces take root, `ip` and `unshare`")
    tag = f"{os.getpid() % 100_000:05d}"
    here, there = f"weft-c{tag}", f"weft-d{tag}"
    with ExitStack() as undo:
        for name in (here, there):
            _run_or_skip("ip", "netns", "add", name)
            undo.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        _run_or_skip(
            "ip", *f"link add vc{tag} netns {here} type veth peer name vd{tag} netns {there}".split()
        )
        for name, link, address in ((here, f"vc{tag}", "10.231.8.1"), (there, f"vd{tag}", "10.231.8.2")):
            for words in (
                f"addr add {address}/24 dev {link}",
                f"link set {link} up",
                "link set lo up",
                f"route add default dev {link}",
            ):
                _run_or_skip("ip", "-n", name, *words.split())
        _run_or_skip(
            "ip",
            "netns",
            "exec",
            here,
            "unshare",
            "-p",
            "-m",
            "-u",
            "-i",
            "--fork",
            "--mount-proc",
            "true",
        )
        yield [(here, "10.231.8.1"), (there, "10.231.8.2")]


def _run_or_skip(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"namespaces are not allowed here: {' '.join(words)}: {done.stderr.strip()}")


def test_grpo_trains_over_two_nodes_that_share_nothing(networks: list[tuple[str, str]]):
    (here, head), (there, other) = networks
    ray, program = Path(sys.executable).with_name("ray"), Path(__file__).with_name("namespaces_run.py")
    hidden = ("RAY_", "HF_", "WEFT_", "XDG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "HOME": "/tmp/home",
    }
    environment |= {
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "HF_HUB_OFFLINE": "1",
    }
    start = f"{ray} start --object-store-memory=200000000 --disable-usage-stats"
    first = (
        f"{start} --head --node-ip-address={head} --port={PORT} --num-cpus=2 --include-dashboard=false"
    )
    drive = f"sh -c '{first} && {sys.executable} {program} {head}:{PORT}'"
    second = f"{start} --address={head}:{PORT} --node-ip-address={other} --num-cpus=4 --block"
    # The second node retries until the head is up, and the driver waits for the second node.
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as of_second:
        driver = Container(here, drive, environment, said)
        node: Container | None = None
        try:
            node = Container(there, second, environment, of_second)
            code = driver.process.wait(300)
        finally:
            driver.close()
            if node is not None:
                node.close()
            said.seek(0)
            of_second.seek(0)
            told, told_there = said.read(), of_second.read()
    assert code == 0, f"{told}\n{told_there}"
    result = json.loads(next(line for line in told.splitlines() if line.startswith('{"steps"')))
    looks = result["looks"]
    assert {look["host"] for look in looks["actor"]} == {here}
    assert {look["host"] for look in looks["rollout"] + looks["reward"]} == {there}
    assert all(look["sees_run"] == (who == "actor") for who, each in looks.items() for look in each)
    assert {
        look["model"].startswith("/tmp/home/.cache/weft/folders/model-") for look in looks["rollout"]
    } == {True}
    assert result["steps"] == [0, 1, 2, 3] and result["rows"] == 3 * 4 * 4 and not result["violations"]
    assert result["checkpoints"] == ["step_000002", "step_000003"]
    assert result["versions"] == [[0], [1], [2]], (
        "each step sampled with the weights that the one before made"
    )
    assert {"rollout_0.log", "rollout_1.log", "reward_0.log", "actor_0.log"} <= {*result["logs"]}
