"""The two engines that isolate a sandbox: bubblewrap and gVisor.

Each starts process 1 (`sandbox_program.py`) with its own processes, users, mounts and network, on the
same file system: the system's programs and Python read-only, and a scratch directory in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from .sandbox_program import PROGRAM_USER
from .seccomp import filter_program

START_S = 60.0
"""[s] Time limit for starting a sandbox, and for the launcher to make namespaces."""
SCRATCH = "/tmp"
"""Working directory of programs: the only place that they can write to. It is in memory."""
_SLACK_BYTES = 1 << 20
"""A scratch directory has some more space than the limit, so that a check can see the limit exceeded."""
_INIT = "/run/sandbox.py"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_PTRACE")
"""Process 1 drops to another user, kills its processes, and reads their memory use. Programs have no
capabilities."""
_OTHER_USERS = range(61184, 65520)
"""Users of the host that the programs of a sandbox started by root become. systemd reserves them for
temporary users."""
_BASE_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
_PROCESS_1 = [_BASE_PYTHON, "-I", "-S", _INIT, SCRATCH]


@dataclass(frozen=True)
class SandboxPlan:
    """A sandbox to start."""

    disk_bytes: int
    readable: Sequence[Path]
    folder: Path
    """For files of the launcher. Programs do not see it."""
    log: IO[bytes]

    @property
    def visible(self) -> tuple[str, ...]:
        """Folders that programs see besides the system's: Python, its packages, and `readable`."""
        folders = [sys.base_prefix, sys.prefix, *(os.path.abspath(path) for path in self.readable)]
        return tuple(dict.fromkeys(f for f in folders if not PurePosixPath(f).is_relative_to("/usr")))

    def start(self, command: Sequence[str], descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        path = os.environ.get("PATH", os.defpath)
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={"PATH": path},
            cwd="/",
            start_new_session=True,
            pass_fds=descriptors,
        )


# bubblewrap


def _start_bubblewrap(program: str, plan: SandboxPlan) -> subprocess.Popen[bytes]:
    own_user = str(PROGRAM_USER)
    with contextlib.ExitStack() as ends:

        def pipe() -> tuple[IO[bytes], IO[bytes]]:
            read, write = os.pipe()
            read, write = os.fdopen(read, "rb", buffering=0), os.fdopen(write, "wb", buffering=0)
            return ends.enter_context(read), ends.enter_context(write)

        filters, filters_end = pipe()
        filters_end.write(filter_program())
        filters_end.close()
        system = [_system_path(path) for path in _SYSTEM if os.path.lexists(path)]
        parents = {str(p): None for path in plan.visible for p in reversed(PurePosixPath(path).parents)}
        command = [
            *(program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
            *("--as-pid-1", "--hostname", "sandbox", "--seccomp", str(filters.fileno())),
            *("--size", str(plan.disk_bytes + _SLACK_BYTES), "--perms", "1777"),
            *("--tmpfs", SCRATCH, "--proc", "/proc", "--dir", "/dev"),
            *(word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
            *("--symlink", SCRATCH, "/dev/shm", "--symlink", "/proc/self/fd", "/dev/fd"),
            *(word for words in system for word in words),
            # bubblewrap would make the folders above a mount private to root.
            *(word for path in [*parents][1:] for word in ("--perms", "0755", "--dir", path)),
            *(w for p in (*_SETTINGS, *plan.visible) for w in ("--ro-bind-try", p, p)),
            *("--ro-bind", str(Path(__file__).with_name("sandbox_program.py")), _INIT),
            *("--remount-ro", "/", "--chdir", SCRATCH, "--clearenv", "--cap-drop", "ALL"),
        ]
        if os.geteuid() != 0:
            return plan.start(
                [*command, "--uid", own_user, "--gid", own_user, *_PROCESS_1], [filters.fileno()]
            )
        # The kernel does not limit the processes of the host's root, so programs become another user
        # of the host. Process 1 stays root in the sandbox, and can start them.
        info, info_end = pipe()
        mapped, mapped_end = pipe()
        command += ["--uid", "0", "--gid", "0", "--info-fd", str(info_end.fileno())]
        command += ["--userns-block-fd", str(mapped.fileno())]
        command += [word for name in _CAPABILITIES for word in ("--cap-add", name)]
        inherited = [end.fileno() for end in (filters, info_end, mapped)]
        process = plan.start([*command, *_PROCESS_1], inherited)
        info_end.close()
        mapped.close()
        try:
            _map_users(info, secrets.choice(_OTHER_USERS))
            with contextlib.suppress(BrokenPipeError):  # the log of the launcher says why it ended
                mapped_end.write(b"1")
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process


def _map_users(info: IO[bytes], other: int) -> None:
    """Give the sandbox two users: root, and one that is `other` outside. Nothing if it has ended."""
    said, end_s = b"", time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(info, selectors.EVENT_READ)
        while selector.select(max(0.0, end_s - time.monotonic())) and (data := info.read(4096)):
            said += data
    if not said.strip().endswith(b"}"):
        return
    process = json.loads(said)["child-pid"]
    for ids in ("uid_map", "gid_map"):
        Path(f"/proc/{process}/{ids}").write_text(f"0 0 1\n{PROGRAM_USER} {other} 1\n")


def _system_path(path: str) -> tuple[str, ...]:
    link = os.readlink(path) if os.path.islink(path) else None
    return ("--ro-bind", path, path) if link is None else ("--symlink", link, path)


# gVisor


def _start_gvisor(program: str, plan: SandboxPlan) -> subprocess.Popen[bytes]:
    root = plan.folder / "root"
    root.mkdir()
    memory = ["nosuid", "nodev", "mode=1777", f"size={plan.disk_bytes + _SLACK_BYTES}"]
    mounts: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    for folder in (SCRATCH, "/dev/shm"):
        mount = {"destination": folder, "type": "tmpfs", "source": "tmpfs", "options": memory}
        mounts.append(mount)
    binds = {path: path for path in (*_SYSTEM, *_SETTINGS, *plan.visible) if os.path.exists(path)}
    binds[_INIT] = str(Path(__file__).with_name("sandbox_program.py"))
    for inside, outside in binds.items():
        if os.path.islink(outside) and inside in _SYSTEM:
            (root / inside[1:]).symlink_to(os.readlink(outside))
        else:
            bind = {"destination": inside, "type": "bind", "source": outside}
            mounts.append(bind | {"options": ["rbind", "ro", "nosuid", "nodev"]})
    capabilities = {name: [*_CAPABILITIES] for name in ("bounding", "effective", "permitted")}
    specification = {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": _PROCESS_1,
            "env": [],
            "cwd": SCRATCH,
            "capabilities": capabilities,
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": t} for t in ("pid", "mount", "ipc", "uts", "network")]},
    }
    (plan.folder / "config.json").write_text(json.dumps(specification))
    options = ["--rootless", "--ignore-cgroups", "--network=none", "--root", str(plan.folder / "state")]
    return plan.start([program, *options, "run", "--bundle", str(plan.folder), "weft"])


ENGINES: dict[str, tuple[str, Callable[[str, SandboxPlan], subprocess.Popen[bytes]]]] = {
    "gvisor": ("runsc", _start_gvisor),
    "bubblewrap": ("bwrap", _start_bubblewrap),
}
