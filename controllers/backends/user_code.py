"""UserCode: folders with the user's modules, which Ray sends to every node of a cluster.

Ray zips them, stores them with the job under a hash of their contents, and unpacks them once per
node. Ranks import from there.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dataflow.errors import UserError

MAX_BYTES = 100 << 20
"""[bytes] Maximum size of a folder before zipping. Ray keeps the zip files in the memory of its
head node."""
EXCLUDES = ("runs/", ".venv/", "venv/", ".git/", "__pycache__/")
"""Patterns that are never sent, in addition to the folder's `.gitignore` and `.rayignore`."""
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable with the settings of `ray job submit`."""


@dataclass(frozen=True)
class UserCode:
    working_dir: Path | None
    """Working directory of ranks; they can import from it."""
    py_modules: tuple[Path, ...]
    """Folders of packages that they can import."""
    excludes: tuple[str, ...]
    """Patterns of files not to send, as in a `.gitignore`."""

    @classmethod
    def of(
        cls, working_dir: str | Path | None, py_modules: Sequence[str | Path], excludes: Sequence[str]
    ) -> UserCode:
        """Check the user's arguments.

        Raises:
            UserError: An argument is wrong; the message names it and the folder.
        """
        for name, given in (("py_modules", py_modules), ("excludes", excludes)):
            if isinstance(given, str | Path):
                raise UserError(f"RayBackend({name}={str(given)!r}): it must be a list")
        if excludes and working_dir is None and not py_modules:
            raise UserError(
                f"RayBackend(excludes={list(excludes)}) has no effect without a folder to send; give working_dir or py_modules"
            )
        named = [("working_dir", working_dir)] if working_dir is not None else []
        for name, path in [*named, *(("py_modules", module) for module in py_modules)]:
            if not Path(path).expanduser().is_dir():
                raise UserError(f"RayBackend({name}={str(path)!r}): no such folder")
        return cls(
            None if working_dir is None else Path(working_dir).expanduser().absolute(),
            tuple(Path(module).expanduser().absolute() for module in py_modules),
            tuple(excludes),
        )

    @property
    def folders(self) -> Sequence[Path]:
        return [*([self.working_dir] if self.working_dir else []), *self.py_modules]

    def check(self) -> None:
        """Check the sizes of the folders.

        Raises:
            UserError: A folder is too large; the message lists its largest entries.
        """
        for folder in self.folders:
            sizes = Counter[str]()
            for name, size in self.files(folder).items():
                sizes[name.partition("/")[0]] += size
            if (total := sum(sizes.values())) > MAX_BYTES:
                largest = ", ".join(
                    f"{name} ({size / 1e6:.0f} MB)" for name, size in Counter(sizes).most_common(3)
                )
                raise UserError(
                    f"{folder} has {total / 1e6:.0f} MB to send to other nodes, but the limit is {MAX_BYTES / 1e6:.0f} MB; the largest: "
                    f"{largest}. Leave out what ranks do not need by RayBackend(excludes=[...]) or a .gitignore in the folder; models "
                    "in settings are sent separately"
                )

    def files(self, folder: Path) -> dict[str, int]:
        """Files of a folder that would be sent: path below it -> bytes."""
        from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

        sizes: dict[str, int] = {}

        def add(path: Path) -> None:
            if path.is_file() and not path.is_symlink():
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size

        excludes = [_get_excludes(folder, [*EXCLUDES, *self.excludes])]
        _dir_travel(folder, excludes, add, include_gitignore=True, logger=logging.getLogger(__name__))
        return sizes

    def runtime_env(self, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """The runtime environment for `ray.init`; empty if `ray job submit` has sent the working
        directory."""
        job = json.loads(environment.get(_JOB) or "{}").get("runtime_env") or {}
        told: dict[str, Any] = {}
        if self.working_dir is not None and "working_dir" not in job:
            told["working_dir"] = str(self.working_dir)
        if self.py_modules and "py_modules" not in job:
            told["py_modules"] = [str(module) for module in self.py_modules]
        return told | {"excludes": [*EXCLUDES, *self.excludes]} if told else {}


def cannot_import(error: Exception) -> str | None:
    """Return an error message if a process died because its node lacks a module that this process
    has, else None."""
    lacking = re.search(r"No module named '([\w.]+)'", str(error))
    top = lacking.group(1).partition(".")[0] if lacking else ""
    file = getattr(sys.modules.get(top), "__file__", None)
    if lacking is None or file is None:
        return None
    folder = Path(file).parent.parent if Path(file).name == "__init__.py" else Path(file).parent
    return (
        f"its node cannot import {lacking.group(1)!r}, which the driver has from {file}. RayBackend(working_dir={str(folder)!r}) sends "
        "that folder to all nodes. It is not needed if all nodes see the folder, or with `ray job submit --working-dir`"
    )
