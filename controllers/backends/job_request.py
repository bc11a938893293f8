"""JobRequest: a script that is to run as a job of a Ray cluster, checked before anybody is asked (`jobs.py` sends it)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...dataflow.errors import UserError, nearest
from ...dataflow.redaction import is_secret_name
from ..job_environment import DEFAULT_ROOT, RESUME, ROOT
from ..run_directory import check_name, check_run_name
from .user_code import UserCode

NUMBER = "WEFT_JOB"
"""Environment variable of a job: its id."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variable of a job: seconds after SIGTERM before Ray kills it."""
_OWN = {ROOT: "--root", RESUME: "--resume", NUMBER: "Weft", STOP_WAIT: "--stop-wait-s"}
"""Variables that are not given by --env, and what sets each."""
_QUEUED = "weft.controllers.backends.queued"
"""The module that waits for the turn of a job."""


@dataclass(frozen=True)
class JobRequest:
    """What is to run as a job.

    Raises:
        UserError: a part of it makes no sense; the message names the part.
    """

    script: Path
    """A Python program in `working_dir`."""
    arguments: Sequence[str] = ()
    """Its arguments."""
    name: str | None = None
    """Folder of the job's runs below `root`, and the beginning of its id; default: the name of the script."""
    working_dir: Path = Path()
    """The folder that is sent."""
    excludes: Sequence[str] = ()
    """Patterns, as in a `.gitignore`, of what is not sent."""
    root: str = DEFAULT_ROOT
    """Folder on the head node below which runs of jobs lie; `~` is the home of the user who started Ray there."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the job."""
    resume: bool = False
    """Go on from the last checkpoint of the runs of that name."""
    queue: str | None = None
    """Jobs of the same queue run one after the other."""
    python: str = "python"
    """The interpreter on the cluster."""
    stop_wait_s: int = 600
    """Seconds that the job has to save itself when it is stopped."""

    def __post_init__(self) -> None:
        folder = self.working_dir.expanduser().absolute()
        script = folder / self.script.expanduser()
        if not script.is_file():
            near = (
                nearest(script.name, [path.name for path in script.parent.glob("*.py")])
                if script.parent.is_dir()
                else ""
            )
            raise UserError(f"script {str(self.script)!r}: there is no such file in {folder}{near}")
        if not script.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"script {str(self.script)!r} lies outside of {folder}, which is sent; choose --working-dir"
            )
        check_run_name(self.run_name, "--name")
        if self.queue is not None:
            check_name(self.queue, "--queue")
        if not self.root.startswith(("/", "~")):
            raise UserError(f"--root={self.root!r} is a folder of the head node: an absolute path, or one below ~")
        if self.stop_wait_s < 1:
            raise UserError(f"--stop-wait-s={self.stop_wait_s}: it is a whole number of seconds above 0")
        for variable, value in self.environment.items():
            _check_variable(variable, value)

    @property
    def run_name(self) -> str:
        return self.name if self.name is not None else self.script.stem

    @property
    def folder(self) -> str:
        """The folder of the job's runs on the head node."""
        return f"{self.root.rstrip('/')}/{self.run_name}"

    @property
    def code(self) -> UserCode:
        """What is sent.

        Raises:
            UserError: there is no such folder.
        """
        return UserCode.of(self.working_dir, (), self.excludes)

    @property
    def entrypoint(self) -> str:
        """The command of the job, for a shell."""
        queued = [self.python, "-m", _QUEUED, self.queue] if self.queue is not None else []
        return shlex.join([*queued, self.python, self.program, *self.arguments])

    @property
    def program(self) -> str:
        """Path of the script below the folder that is sent."""
        folder = self.working_dir.expanduser().absolute().resolve()
        return (folder / self.script.expanduser()).resolve().relative_to(folder).as_posix()

    def variables(self, job: str) -> dict[str, str]:
        """The environment of the job of this id."""
        resume = {RESUME: "latest"} if self.resume else {}
        own = {ROOT: self.folder, NUMBER: job, STOP_WAIT: str(self.stop_wait_s)}
        return {"PYTHONUNBUFFERED": "1", **resume, **own, **self.environment}


def _check_variable(name: str, value: str) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise UserError(f"--env {name}=...: this is no name of a variable")
    if name in _OWN:
        raise UserError(f"--env {name}=...: {_OWN[name]} says that")
    if is_secret_name(name):
        raise UserError(
            f"--env {name}=...: Ray shows the settings of a job to everybody who may use the cluster. Set a secret in the environment in "
            "which the nodes of the cluster start (a Kubernetes secret, for example)"
        )
    if "\0" in value:
        raise UserError(f"--env {name}=...: the value has a character 0")
