"""Findings about this machine, for `weft doctor`.

Nothing is started or imported; the whole look takes well under two seconds.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...dataflow.byte_units import GIB, MIB
from ...workers.node_memory import node_memory
from ..backends.token_file import MODE, TOKEN, token_file
from . import machine_packages
from .finding import Finding, fail, ok, warn

# Environment: variables and files that change what a run does, and the token of Ray.


ENVIRONMENT = "environment"
PACKAGES = (
    "weft",
    "torch",
    "transformers",
    "ray",
    "vllm",
    "peft",
    "pyarrow",
    "numpy",
    "pydantic",
    "tyro",
    "datasets",
)
"""Packages that a file of the same name would hide."""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a launcher such as torchrun; Weft starts its ranks itself."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CHANGES: Mapping[str, tuple[str, str]] = {
    "PYTHONDONTWRITEBYTECODE": (
        "each process compiles all imports, and starts some seconds later",
        "unset it",
    ),
    "PYTHONOPTIMIZE": ("assertions that find errors early are disabled", "unset it"),
    "PYTHONHOME": ("Python looks for its own library there", "unset it"),
    "LD_PRELOAD": ("every process loads that library", "unset it unless you need it"),
    "CUDA_LAUNCH_BLOCKING": (
        "the CPU waits for every kernel: GPUs run at a fraction of their speed",
        "unset it",
    ),
    "RAY_ADDRESS": (
        "RayBackend() joins that cluster instead of starting one",
        "unset it to start a local cluster",
    ),
    "HF_HUB_OFFLINE": ("models and data sets are not downloaded", "unset it to download them"),
    "TRANSFORMERS_OFFLINE": ("models are not downloaded", "unset it to download them"),
}
"""Variable -> (its effect when it is set, advice)."""
OFF = ("", "0", "false", "False")
"""Values of a switch that mean off."""


def look_at_environment(environment: Mapping[str, str], home: Path, cpus: int) -> Iterator[Finding]:
    """Yield findings about the environment.

    Args:
        cpus: CPUs that this process may use.
    """
    yield from variables(environment)
    yield threads(environment, cpus)
    yield interfaces(environment, [name for _, name in socket.if_nameindex()])
    yield hidden_modules(
        [Path(), *(Path(p) for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p)]
    )
    yield token(environment, home)


def variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report each environment variable that affects all runs. Yield a single finding if none is
    set.

    >>> [finding.name for finding in variables({"RAY_ADDRESS": "head:6379", "RANK": "0", "HF_HUB_OFFLINE": "0"})]
    ['RAY_ADDRESS', 'RANK']
    """
    found: list[Finding] = []
    for name, (does, todo) in CHANGES.items():
        if environment.get(name, "") not in OFF:
            found.append(warn(ENVIRONMENT, name, f"{environment[name]!r}: {does}", todo))
    left = [name for name in LAUNCHED if name in environment]
    if left:
        said = f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} set, as by torchrun: Weft starts its ranks itself"
        found.append(warn(ENVIRONMENT, left[0], said, "start the script with python or weft run"))
    yield from found or [ok(ENVIRONMENT, "variables", "none that changes what a run does")]


def threads(environment: Mapping[str, str], cpus: int) -> Finding:
    """Check the number of torch threads in processes without a place: `Local()` and scripts.

    Ray ranks get theirs from their place.
    """
    name, value = "OMP_NUM_THREADS", environment.get("OMP_NUM_THREADS", "")
    if not value:
        return ok(ENVIRONMENT, name, f"not set: {cpus} threads")
    if not value.isdigit() or not int(value):
        return fail(
            ENVIRONMENT,
            name,
            f"{value!r} is not a number of threads",
            f"unset it, or export {name}={cpus}",
        )
    if int(value) > cpus:
        return warn(
            ENVIRONMENT, name, f"{value} threads on {cpus} CPUs", f"unset it, or export {name}={cpus}"
        )
    if int(value) == 1 and cpus > 1:
        return warn(ENVIRONMENT, name, f"1 thread on {cpus} CPUs: Local() uses only one", f"unset {name}")
    return ok(ENVIRONMENT, name, f"{value} of {cpus} CPUs")


def interfaces(environment: Mapping[str, str], there: Sequence[str]) -> Finding:
    """Check that the network interfaces named by variables exist.

    >>> interfaces({"GLOO_SOCKET_IFNAME": "eth7"}, ["lo", "eth0"]).found
    'GLOO_SOCKET_IFNAME names eth7, and this machine has lo, eth0'
    """
    for name in INTERFACES:
        wanted = [
            word.lstrip("=^") for word in environment.get(name, "").split(",") if not word.startswith("^")
        ]
        # NCCL takes prefixes, or exact names after "=", or exclusions after "^".
        exact = name.startswith("GLOO") or environment.get(name, "").startswith("=")
        for word in filter(None, wanted):
            if not any(one == word if exact else one.startswith(word) for one in there):
                found = f"{name} names {word}, and this machine has {', '.join(there)}"
                return fail(ENVIRONMENT, "interfaces", found, f"unset {name}, or name one of these")
    return ok(ENVIRONMENT, "interfaces", ", ".join(there))


def hidden_modules(folders: Sequence[Path]) -> Finding:
    """Check whether a user's file hides a package or a module of Python's library.

    Args:
        folders: the first folders that Python searches: the script's and PYTHONPATH.
    """
    ours = {
        Path(path).resolve() for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    }
    for folder in folders:
        if folder.resolve() in ours:
            continue
        for name in (*PACKAGES, *sorted(sys.stdlib_module_names)):
            file, package = folder / f"{name}.py", folder / name / "__init__.py"
            hides = next((path for path in (file, package) if path.is_file()), None)
            # A checkout of Weft may be on the path.
            if hides is None or (name == "weft" and hides == package):
                continue
            found = f"{hides.absolute()} is imported instead of {name!r}"
            return fail(ENVIRONMENT, "modules", found, "rename it, or take its folder out of PYTHONPATH")
    return ok(ENVIRONMENT, "modules", "no file here or on PYTHONPATH hides a package")


def token(environment: Mapping[str, str], home: Path) -> Finding:
    """Check that the token of the Ray cluster exists, and that only its owner can read it."""
    name = "Ray's token"
    if environment.get(MODE, "").lower() not in ("", "token"):
        found = f"{MODE}={environment[MODE]}: anyone who reaches the ports of a cluster can run programs on it"
        return warn(ENVIRONMENT, name, found, f"unset {MODE}, or export {MODE}=token")
    file = token_file(environment, home)
    if file is None:
        return ok(ENVIRONMENT, name, f"{TOKEN} has it")
    try:
        found = file.stat()
        empty = not file.read_text().strip()
    except FileNotFoundError:
        return ok(ENVIRONMENT, name, f"{file} is not there yet; the first local cluster makes it")
    except OSError as error:
        return fail(ENVIRONMENT, name, f"{error}", f"chown and chmod 600 {file}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        said = f"others can read {file} (mode {stat.S_IMODE(found.st_mode):04o})"
        return warn(ENVIRONMENT, name, said, f"chmod 600 {file}")
    if empty:
        return fail(
            ENVIRONMENT, name, f"{file} is empty", f"rm {file}: the next local cluster makes a new one"
        )
    # A folder that others can write lets them replace the file.
    with suppress(OSError):
        if file.parent.stat().st_mode & 0o022:
            return warn(ENVIRONMENT, name, f"others may replace {file}", f"chmod 700 {file.parent}")
    return ok(ENVIRONMENT, name, f"{file}, mode {stat.S_IMODE(found.st_mode):04o}")


# Kernel limits of this process and its children: open files, processes, locked memory, CPUs.


LIMITS = "limits"
FILES_WARN_BELOW, FILES_FAIL_BELOW = 4096, 256
"""Open files: Ray opens some for each worker, and the driver some for each rank."""
PROCESSES_WARN_BELOW, PROCESSES_FAIL_BELOW = 4096, 512
"""Processes and threads: a rank with torch and Ray has about a hundred threads."""


def look_at_limits(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield findings about limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files(soft, hard)
    yield processes(resource.getrlimit(resource.RLIMIT_NPROC)[0], pids_left(root))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield locked_memory(locked, fast_network=any((root / "dev/infiniband").glob("uverbs*")))
    yield cpus(len(os.sched_getaffinity(0)), cpu_quota(root))


def open_files(soft: int, hard: int) -> Finding:
    """Check the limit on open files.

    >>> open_files(1024, 524288).todo
    'ulimit -n 65536 (up to 524288 without an administrator)'
    """
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    todo = f"ulimit -n {65536 if most == 'any number' else min(65536, hard)} (up to {most} without an administrator)"
    return _counted("open files (nofile)", soft, FILES_WARN_BELOW, FILES_FAIL_BELOW, todo)


def processes(limit: int, left: int | None) -> Finding:
    """Check the limit on processes and threads.

    Args:
        left: processes left in this container, or None without a limit.
    """
    todo = "ulimit -u, or the container's own limit (docker run --pids-limit, podPidsLimit)"
    limits = [number for number in (limit, left) if number not in (None, resource.RLIM_INFINITY)]
    return _counted(
        "processes (nproc)",
        min(limits, default=resource.RLIM_INFINITY),
        PROCESSES_WARN_BELOW,
        PROCESSES_FAIL_BELOW,
        todo,
    )


def _counted(name: str, limit: int, warn_below: int, fail_below: int, todo: str) -> Finding:
    if limit == resource.RLIM_INFINITY or limit >= warn_below:
        return ok(LIMITS, name, "unlimited" if limit == resource.RLIM_INFINITY else f"{limit}")
    return (fail if limit < fail_below else warn)(LIMITS, name, f"{limit}", todo)


def locked_memory(limit: int, *, fast_network: bool) -> Finding:
    """Check the limit on locked memory, which only RDMA networks such as InfiniBand need."""
    name, unlimited = "locked memory (memlock)", limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{limit / MIB:.0f} MiB"
    if fast_network and not unlimited:
        return warn(
            LIMITS,
            name,
            f"{found}, and there is an RDMA network",
            "ulimit -l unlimited: NCCL locks its buffers",
        )
    return ok(LIMITS, name, found)


def cpus(there: int, quota: float | None) -> Finding:
    """Check the CPUs that this process may use.

    torch starts a thread for each CPU that it sees, even if the container may use fewer.

    >>> cpus(64, 4.0).outcome, cpus(64, None).outcome
    ('warn', 'ok')
    """
    if quota is None or quota >= there:
        return ok(LIMITS, "CPUs", f"{there}")
    found = f"{there} are visible, but this container may use only {quota:g}: torch would start too many threads"
    return warn(
        LIMITS, "CPUs", found, f"export OMP_NUM_THREADS={max(1, round(quota))} for scripts on Local()"
    )


def cpu_quota(root: Path) -> float | None:
    """Return the CPUs that the container may use, or None for all."""
    # cgroup v2, then v1
    words = _words(root / "sys/fs/cgroup/cpu.max")
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota = _words(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _words(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def pids_left(root: Path) -> int | None:
    """Return the processes and threads that the container may still start, or None without a limit."""
    most, now = (_words(root / f"sys/fs/cgroup/pids.{name}") for name in ("max", "current"))
    return int(most[0]) - int(now[0]) if most and now and most[0] != "max" else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


# Network: the loopback interface, ports, and proxies between processes of this machine.


NETWORK = "network"
PORTS_WARN_BELOW = 5_000
"""Free ports: a Ray node with its workers takes several hundred."""
LOOPBACK = "127.0.0.1"


def look_at_network(environment: Mapping[str, str], root: Path = Path("/")) -> Iterator[Finding]:
    """Yield findings about the network."""
    yield loopback()
    yield host_name()
    yield ports(root)
    yield proxies(environment)


def loopback() -> Finding:
    """Check that processes of this machine reach each other over the loopback interface."""
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=1),
        ):
            return ok(NETWORK, "loopback", f"{LOOPBACK} answers")
    except OSError as error:
        return fail(
            NETWORK, "loopback", f"{LOOPBACK}: {error}", "ip link set lo up, and let no firewall close it"
        )


def host_name() -> Finding:
    """Check that the name of this machine resolves to an address; gloo needs it."""
    name = socket.gethostname()
    with suppress(OSError):
        return ok(NETWORK, "host name", f"{name} is {socket.gethostbyname(name)}")
    return warn(NETWORK, "host name", f"{name} has no address", f"add '{LOOPBACK} {name}' to /etc/hosts")


def ports(root: Path) -> Finding:
    """Check how many ephemeral ports are free."""
    try:
        low, high = map(int, (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return ok(NETWORK, "ports", "unknown: the kernel does not report the range")
    free = high - low + 1 - len(_taken(root, low, high))
    found = f"{free} free between {low} and {high}"
    if free >= PORTS_WARN_BELOW:
        return ok(NETWORK, "ports", found)
    return warn(
        NETWORK,
        "ports",
        found,
        "sysctl net.ipv4.ip_local_port_range='32768 60999', or end the processes that hold them",
    )


def _taken(root: Path, low: int, high: int) -> set[int]:
    """Return the ports in a range that sockets of this machine use."""
    found: set[int] = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        with suppress(OSError):
            lines = (root / table).read_text().splitlines()[1:]
            # The second word is the local address, as hexadecimal IP:port.
            found |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    return {port for port in found if low <= port <= high}


def proxies(environment: Mapping[str, str]) -> Finding:
    """Check that no proxy intercepts traffic between processes of this machine.

    >>> proxies({"http_proxy": "http://proxy:3128", "no_proxy": "localhost"}).outcome, proxies({}).outcome
    ('warn', 'ok')
    """
    names = [
        name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environment.get(name)
    ]
    if not names:
        return ok(NETWORK, "proxies", "none")
    direct = environment.get("no_proxy", "") + "," + environment.get("NO_PROXY", "")
    if {LOOPBACK, "127.0.0.0/8", "127.0.0.0", "*"}.intersection(
        word.strip() for word in direct.split(",")
    ):
        return ok(NETWORK, "proxies", f"{', '.join(names)}, not for {LOOPBACK}")
    found = f"{', '.join(names)} sends traffic for {LOOPBACK} through a proxy"
    return warn(NETWORK, "proxies", found, f"export no_proxy=localhost,{LOOPBACK}")


# Room: disks, shared memory and memory, as a run needs them.


ROOM = "room"
DISK_WARN_BELOW, DISK_FAIL_BELOW = 20 * GIB, 1 * GIB
"""[bytes] A small model's checkpoint with moments; the log and the segments of a small run."""
OPEN_FILES_WARN_BELOW = 10_000
"""Files that may still be created on a disk."""
MEMORY_WARN_BELOW, MEMORY_FAIL_BELOW = 4 * GIB, 1 * GIB
"""[bytes] A driver, Ray and a rank with torch take about 3 GiB."""
SHARED_WARN_BELOW = 1 * GIB
"""[bytes] Of /dev/shm. NCCL, vLLM's tensor parallelism and Ray's object store use it; containers
often have 64 MiB."""
NETWORK_FILE_SYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "fuse.sshfs",
    "fuse.gcsfuse",
    "fuse.s3fs",
}
"""File systems on other machines."""


def look_at_room(runs: Path) -> Iterator[Finding]:
    """Yield findings about disks and memory.

    Args:
        runs: the folder of runs, which need not exist.
    """
    yield disk(
        "runs", runs, "remove old runs and checkpoints (weft runs), or give Driver(root=...) another disk"
    )
    yield disk(
        "temporary files",
        Path(tempfile.gettempdir()),
        "remove unused files, or set TMPDIR to another disk",
    )
    yield _segments(runs, Path("/proc/mounts"))
    yield shared_memory(Path("/dev/shm"))
    yield memory()


def disk(name: str, folder: Path, todo: str) -> Finding:
    """Check that a folder can be written, and that its disk has free space."""
    # The folder need not exist: check the nearest parent that does.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        return fail(ROOM, name, f"{there} cannot be written", todo)
    free = shutil.disk_usage(there).free
    found = f"{free / GIB:.1f} GiB free at {folder}"
    if free < DISK_WARN_BELOW:
        return (fail if free < DISK_FAIL_BELOW else warn)(ROOM, name, found, todo)
    status = os.statvfs(there)
    # Some file systems have no limit on files, and report 0.
    if status.f_files and status.f_favail < OPEN_FILES_WARN_BELOW:
        return warn(ROOM, name, f"only {status.f_favail} more files can be created at {folder}", todo)
    return ok(ROOM, name, found)


def _segments(runs: Path, mounts: Path) -> Finding:
    """Check that rows in flight, which are files in the folder of the run, stay on a local disk."""
    kind = file_system(runs, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        found = f"{runs} is on another machine ({kind}), which slows down the rows in flight"
        return warn(
            ROOM, "segments", found, "give BufferConfig(scratch=...) a folder on a disk of this machine"
        )
    return ok(ROOM, "segments", f"rows in flight are stored at {runs} ({kind or 'file system unknown'})")


def file_system(folder: Path, mounts: Path) -> str:
    """Return the type of a folder's file system, such as ext4, or an empty string if unknown."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    place = folder.resolve()
    over = [
        (len(Path(words[1]).parts), at, words[2])
        for at, words in enumerate(lines)
        if place.is_relative_to(words[1])
    ]
    # The deepest mount point counts, and of equal ones the last.
    return max(over)[2] if over else ""


def shared_memory(folder: Path) -> Finding:
    """Check the size of /dev/shm."""
    name, todo = (
        str(folder),
        "enlarge it: mount -o remount,size=8G /dev/shm, docker run --shm-size=8g, an emptyDir of medium Memory",
    )
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return fail(ROOM, name, "it cannot be written", todo)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    return ok(ROOM, name, found) if usage.free >= SHARED_WARN_BELOW else warn(ROOM, name, found, todo)


def memory(root: Path = Path("/")) -> Finding:
    """Check how much memory is free, by the tightest limit."""
    found = node_memory(root)
    if found is None:
        return warn(
            ROOM,
            "memory",
            "unknown: the kernel does not report it",
            "check the limits of this container",
        )
    said = f"{found.free_bytes / GIB:.1f} GiB free; {found} used"
    if found.free_bytes >= MEMORY_WARN_BELOW:
        return ok(ROOM, "memory", said)
    todo = "end other processes, or raise the limit; weft plan shows the needs of a run"
    return (fail if found.free_bytes < MEMORY_FAIL_BELOW else warn)(ROOM, "memory", said, todo)


# Machine


def look(runs: Path, variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return all findings about this machine.

    Args:
        runs: the folder of runs, which need not exist.
    """
    return [
        *machine_packages.look_at_packages(),
        *look_at_room(runs),
        *look_at_limits(),
        *look_at_network(variables),
        *machine_packages.look_at_gpus(variables),
        *look_at_environment(variables, Path.home(), len(os.sched_getaffinity(0))),
    ]
