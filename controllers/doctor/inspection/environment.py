"""Environment: variables and files that change what a run does, often without anybody's knowledge, and the token of Ray."""

from __future__ import annotations

import os
import socket
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...backends.token_file import MODE, TOKEN, token_file
from .finding import Finding, fail, ok, warn

ABOUT = "environment"
PACKAGES = ("weft", "torch", "transformers", "ray", "vllm", "peft", "pyarrow", "numpy", "pydantic", "tyro", "datasets")
"""Packages that files of the same name hide."""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a launcher such as torchrun; Weft starts its ranks itself."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CHANGES: Mapping[str, tuple[str, str]] = {
    "PYTHONDONTWRITEBYTECODE": ("each process compiles all that it imports, and starts some seconds later", "unset it"),
    "PYTHONOPTIMIZE": ("assertions that find mistakes early are left out", "unset it"),
    "PYTHONHOME": ("Python looks for its own library there", "unset it"),
    "LD_PRELOAD": ("every process loads that library", "unset it, unless it is wanted"),
    "CUDA_LAUNCH_BLOCKING": ("every kernel is waited for: GPUs work at a fraction of their speed", "unset it"),
    "RAY_ADDRESS": ("RayBackend() joins that cluster instead of starting one", "unset it, if that is not wanted"),
    "HF_HUB_OFFLINE": ("models and data sets are not downloaded", "unset it, if one has to be"),
    "TRANSFORMERS_OFFLINE": ("models are not downloaded", "unset it, if one has to be"),
}
"""Variable -> (what it does when it is set, what to do)."""
OFF = ("", "0", "false", "False")
"""Values of a switch that is off."""


def look(environment: Mapping[str, str], home: Path, cpus: int) -> Iterator[Finding]:
    """Findings about the environment.

    Args:
        environment: of this process.
        home: folder of the user.
        cpus: that this process may use.
    """
    yield from variables(environment)
    yield threads(environment, cpus)
    yield interfaces(environment, [name for _, name in socket.if_nameindex()])
    yield hidden_modules([Path(), *(Path(p) for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p)])
    yield token(environment, home)


def variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What each variable does that is set and changes every run; one finding where there is none.

    >>> [finding.name for finding in variables({"RAY_ADDRESS": "head:6379", "RANK": "0", "HF_HUB_OFFLINE": "0"})]
    ['RAY_ADDRESS', 'RANK']
    """
    found: list[Finding] = []
    for name, (does, todo) in CHANGES.items():
        if environment.get(name, "") not in OFF:
            found.append(warn(ABOUT, name, f"{environment[name]!r}: {does}", todo))
    left = [name for name in LAUNCHED if name in environment]
    if left:
        said = (
            f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} set, as by torchrun: Weft starts its ranks itself"
        )
        found.append(warn(ABOUT, left[0], said, "start the script with python or weft run"))
    yield from found or [ok(ABOUT, "variables", "none that changes what a run does")]


def threads(environment: Mapping[str, str], cpus: int) -> Finding:
    """Threads of torch in processes that nobody places: those of Local() and of a script. Ranks of Ray get theirs from their place."""
    name, value = "OMP_NUM_THREADS", environment.get("OMP_NUM_THREADS", "")
    if not value:
        return ok(ABOUT, name, f"not set: {cpus} threads")
    if not value.isdigit() or not int(value):
        return fail(ABOUT, name, f"{value!r} is no number of threads", f"unset it, or export {name}={cpus}")
    if int(value) > cpus:
        return warn(ABOUT, name, f"{value} threads on {cpus} CPUs", f"unset it, or export {name}={cpus}")
    if int(value) == 1 and cpus > 1:
        return warn(ABOUT, name, f"1 thread, on {cpus} CPUs: Local() uses one of them", f"unset {name}")
    return ok(ABOUT, name, f"{value} of {cpus} CPUs")


def interfaces(environment: Mapping[str, str], there: Sequence[str]) -> Finding:
    """Whether the network interfaces that variables name are there.

    >>> interfaces({"GLOO_SOCKET_IFNAME": "eth7"}, ["lo", "eth0"]).found
    'GLOO_SOCKET_IFNAME names eth7, and this machine has lo, eth0'
    """
    for name in INTERFACES:
        wanted = [word.lstrip("=^") for word in environment.get(name, "").split(",") if not word.startswith("^")]
        exact = name.startswith("GLOO") or environment.get(name, "").startswith("=")
        for word in filter(None, wanted):
            if not any(one == word if exact else one.startswith(word) for one in there):
                found = f"{name} names {word}, and this machine has {', '.join(there)}"
                return fail(ABOUT, "interfaces", found, f"unset {name}, or name one of these")
    return ok(ABOUT, "interfaces", ", ".join(there))


def hidden_modules(folders: Sequence[Path]) -> Finding:
    """Whether a file of one's own has the name of a package or of a module of Python, and is imported instead.

    Args:
        folders: that Python looks into first: that of the script, and those of PYTHONPATH.
    """
    ours = {Path(path).resolve() for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))}
    for folder in folders:
        if folder.resolve() in ours:
            continue
        for name in (*PACKAGES, *sorted(sys.stdlib_module_names)):
            file, package = folder / f"{name}.py", folder / name / "__init__.py"
            hides = next((path for path in (file, package) if path.is_file()), None)
            if hides is None or (name == "weft" and hides == package):
                continue
            found = f"{hides.absolute()} is imported instead of {name!r}"
            return fail(ABOUT, "modules", found, "rename it, or take its folder out of PYTHONPATH")
    return ok(ABOUT, "modules", "no file here or on PYTHONPATH hides a package")


def token(environment: Mapping[str, str], home: Path) -> Finding:
    """Whether the token that lets programs into a Ray cluster is there, and is nobody else's to read."""
    name = "Ray's token"
    if environment.get(MODE, "").lower() not in ("", "token"):
        found = f"{MODE}={environment[MODE]}: whoever reaches its ports runs programs on a cluster"
        return warn(ABOUT, name, found, f"unset {MODE}, or export {MODE}=token")
    file = token_file(environment, home)
    if file is None:
        return ok(ABOUT, name, f"{TOKEN} has it")
    try:
        found = file.stat()
        empty = not file.read_text().strip()
    except FileNotFoundError:
        return ok(ABOUT, name, f"{file} is not there yet; the first local cluster makes it")
    except OSError as error:
        return fail(ABOUT, name, f"{error}", f"chown and chmod 600 {file}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        said = f"{file} may be read by others (mode {stat.S_IMODE(found.st_mode):04o})"
        return warn(ABOUT, name, said, f"chmod 600 {file}")
    if empty:
        return fail(ABOUT, name, f"{file} is empty", f"rm {file}: the next local cluster makes it anew")
    with suppress(OSError):
        if file.parent.stat().st_mode & 0o022:
            return warn(ABOUT, name, f"others may replace {file}", f"chmod 700 {file.parent}")
    return ok(ABOUT, name, f"{file}, mode {stat.S_IMODE(found.st_mode):04o}")
