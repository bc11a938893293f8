"""`weft jobs`: list, follow and stop jobs on a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ..dataflow.errors import UserError
from ..dataflow.untrusted_text import show
from .command import Answer, Command, Switch

if TYPE_CHECKING:
    from ..controllers.backends.jobs import Job, Jobs


# `weft submit`


@dataclass(frozen=True, kw_only=True)
class Submit(Command):
    """Send a script and its folder to a Ray cluster as a job, and follow it there. Options of this
    command come before the script, and arguments of the script after it."""

    script: Annotated[Positional[Path], arg(metavar="SCRIPT.py")]
    """A Python program in the submitted folder."""
    arguments: Annotated[Positional[tuple[str, ...]], arg(metavar="ARGUMENTS")] = ()
    """Arguments of the script."""
    address: Annotated[str | None, arg(metavar="URL", help_behavior_hint="")] = None
    """The cluster's job server, such as http://ray-head:8265. Default: the environment variable
    RAY_API_SERVER_ADDRESS."""
    name: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Folder of the job's runs below --root. Default: the name of the script."""
    resume: Switch = False
    """Resume runs of this name from their last checkpoints, unless the script sets resume."""
    root: str = "~/weft"
    """Folder for the runs of jobs, on the head node or shared. A relative root in the script is
    taken relative to ROOT/NAME."""
    working_dir: Path = Path()
    """The folder to submit, without the files that its .gitignore and .rayignore exclude."""
    exclude: Annotated[tuple[str, ...], arg(metavar="PATTERNS", help_behavior_hint="")] = ()
    """Patterns of files to exclude, as in a .gitignore."""
    env: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...", help_behavior_hint="")] = ()
    """Variables of the job, as NAME=VALUE; no secrets."""
    python: str = "python"
    """The Python interpreter on the cluster, with Weft installed."""
    stop_wait_s: int = 600
    """Seconds for the job to save itself when it is stopped."""
    detach: Switch = False
    """Do not follow the job."""

    @classmethod
    def split(cls, words: Sequence[str]) -> list[str]:
        return cls.split_at_script(words)

    def answer(self) -> Answer:
        from ..controllers.backends.jobs import JobRequest, Jobs

        request = JobRequest(
            script=self.script,
            arguments=self.arguments,
            name=self.name,
            working_dir=self.working_dir,
            excludes=self.exclude,
            root=self.root,
            environment=_variables(self.env),
            resume=self.resume,
            python=self.python,
            stop_wait_s=self.stop_wait_s,
        )
        jobs = Jobs(self.address)
        job = jobs.submit(request, _say)
        _say(f"submitted {job}; its runs are in {request.folder} on the head node")
        if self.detach:
            return Answer({"job": job, "folder": request.folder}, job, [_hint(job)])
        return followed(jobs, job, as_json=self.json)


def followed(jobs: Jobs, job: str, *, as_json: bool) -> Answer:
    """Follow a job to its end.

    Args:
        as_json: print the log of the job to standard error, since standard output is for the
            answer.

    Returns:
        The result of the job, with exit code 1 if it failed.
    """
    stream = sys.stderr if as_json else sys.stdout

    def write(text: str) -> None:
        show(text.replace("\r\n", "\n").replace("\r", "\n"), stream, end="")

    try:
        found = jobs.follow(job, write)
    except KeyboardInterrupt:
        _say(f"\nthe job continues. {_hint(job)}")
        raise
    return ended(found)


def ended(job: Job) -> Answer:
    """Return the answer about a job that has ended."""
    said = f"job {job.id} {job.status.lower()}"
    found: dict[str, Any] = {
        "job": job.id,
        "status": job.status,
        "folder": job.folder,
        "message": job.message,
    }
    said += f"; its runs are in {job.folder} on the head node" if job.folder else ""
    notes = [job.message] if job.status == "FAILED" and job.message else []
    return Answer(found, said, notes, exit_code=int(job.status == "FAILED"))


def _variables(given: Sequence[str]) -> dict[str, str]:
    for one in given:
        if "=" not in one:
            raise UserError(f"--env {one}: use the form NAME=VALUE")
    return {name: value for name, _, value in (one.partition("=") for one in given)}


def _hint(job: str) -> str:
    return f"weft jobs follow {job} | weft jobs stop {job}"


def _say(line: str) -> None:
    show(line)


# Jobs


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """List the jobs that the cluster remembers, latest first."""

    address: Annotated[str | None, arg(metavar="URL", help_behavior_hint="")] = None
    """The cluster's job server, such as http://ray-head:8265. Default: the environment variable
    RAY_API_SERVER_ADDRESS."""

    def answer(self) -> Answer:
        import time
        from dataclasses import asdict

        from ..controllers.backends.jobs import Jobs

        jobs = Jobs(self.address).list()
        lines = [
            f"{job.id}  {job.status.lower():<9}  {time.strftime('%m-%d %H:%M', time.localtime(job.submitted_s))}"
            f"  {job.entrypoint}"
            for job in jobs
        ]
        return Answer(
            {"jobs": [asdict(job) for job in jobs]}, "\n".join(lines) or "the cluster remembers no jobs"
        )


@dataclass(frozen=True, kw_only=True)
class Follow(Command):
    """Print the log of a job from its beginning to its end. Exit code 1 if the job failed."""

    job: Annotated[Positional[str], arg(metavar="JOB")]
    """The id of the job."""
    address: Annotated[str | None, arg(metavar="URL", help_behavior_hint="")] = None
    """The cluster's job server, such as http://ray-head:8265. Default: the environment variable
    RAY_API_SERVER_ADDRESS."""

    def answer(self) -> Answer:
        from ..controllers.backends.jobs import Jobs

        return followed(Jobs(self.address), self.job, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Stop(Command):
    """Stop a job after it has saved itself, and wait for its end. `weft submit --resume` continues it."""

    job: Annotated[Positional[str], arg(metavar="JOB")]
    """The id of the job."""
    address: Annotated[str | None, arg(metavar="URL", help_behavior_hint="")] = None
    """The cluster's job server, such as http://ray-head:8265. Default: the environment variable
    RAY_API_SERVER_ADDRESS."""

    def answer(self) -> Answer:
        from ..controllers.backends.jobs import Jobs

        return ended(Jobs(self.address).stop(self.job))
