"""`weft jobs`: list, follow and stop jobs on a Ray cluster."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from tyro.conf import Positional, arg

from ..dataflow.errors import UserError
from ..dataflow.untrusted_text import show
from .command_line import Answer, Json, Name, Script, ScriptArguments, Switch

if TYPE_CHECKING:
    from ..controllers.backends.jobs import Job, Jobs

Address: TypeAlias = Annotated[
    str | None,
    arg(
        metavar="URL",
        help="The cluster's job server, such as http://ray-head:8265. Default: the environment variable RAY_API_SERVER_ADDRESS.",
        help_behavior_hint="",
    ),
]
JobId: TypeAlias = Annotated[Positional[str], arg(metavar="JOB", help="The id of the job.")]


def submit(
    script: Script,
    arguments: ScriptArguments = (),
    *,
    address: Address = None,
    name: Name = None,
    resume: Switch = False,
    root: str = "~/weft",
    working_dir: Path = Path(),
    exclude: Annotated[tuple[str, ...], arg(metavar="PATTERNS", help_behavior_hint="")] = (),
    env: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...", help_behavior_hint="")] = (),
    python: str = "python",
    stop_wait_s: int = 600,
    detach: Switch = False,
    json: Json = False,
) -> Answer:
    """Submit a script and its folder to a Ray cluster as a job, and follow its output. Options of
    this command come before the script, its arguments after it.

    Args:
        script: A Python program in the submitted folder.
        arguments: Arguments of the script.
        name: Folder of the job's runs below --root. Default: the name of the script.
        resume: Resume runs of this name from their last checkpoints, unless the script sets resume.
        root: Folder for the runs of jobs, on the head node or a shared file system. A relative root
            in the script is resolved below ROOT/NAME.
        working_dir: The folder to submit, without the files that its .gitignore and .rayignore
            exclude.
        exclude: Patterns of files to exclude, as in a .gitignore.
        env: Environment variables of the job, as NAME=VALUE. Secrets are rejected.
        python: The Python interpreter on the cluster, with Weft installed.
        stop_wait_s: Seconds until a stopped job that has not saved its state is killed.
        detach: Do not follow the job's output.
    """
    from ..controllers.backends.jobs import JobRequest, Jobs

    for one in env:
        if "=" not in one:
            raise UserError(f"--env {one}: use the form NAME=VALUE")
    request = JobRequest(
        script=Path(script),
        arguments=arguments,
        name=name,
        working_dir=working_dir,
        excludes=exclude,
        root=root,
        environment={key: value for key, _, value in (one.partition("=") for one in env)},
        resume=resume,
        python=python,
        stop_wait_s=stop_wait_s,
    )
    jobs = Jobs(address)
    job = jobs.submit(request, show)
    show(f"submitted {job}; its runs are in {request.folder} on the head node")
    if detach:
        return Answer({"job": job, "folder": request.folder}, job, [_hint(job)])
    return _followed(jobs, job, as_json=json)


def list_jobs(*, address: Address = None) -> Answer:
    """List the jobs that the cluster remembers, newest first."""
    from ..controllers.backends.jobs import Jobs

    jobs = Jobs(address).list()
    lines: list[str] = []
    for job in jobs:
        submitted = time.strftime("%m-%d %H:%M", time.localtime(job.submitted_s))
        lines.append(f"{job.id}  {job.status.lower():<9}  {submitted}  {job.entrypoint}")
    text = "\n".join(lines) or "the cluster remembers no jobs"
    return Answer({"jobs": [asdict(job) for job in jobs]}, text)


def follow(job: JobId, *, address: Address = None, json: Json = False) -> Answer:
    """Print the log of a job from its beginning to its end. Exit code 1 if the job failed."""
    from ..controllers.backends.jobs import Jobs

    return _followed(Jobs(address), job, as_json=json)


def stop_job(job: JobId, *, address: Address = None) -> Answer:
    """Stop a job after it has saved its state. `weft submit --resume` continues it."""
    from ..controllers.backends.jobs import Jobs

    return ended(Jobs(address).stop(job))


def _followed(jobs: Jobs, job: str, *, as_json: bool) -> Answer:
    # With --json, standard output is for the answer alone.
    stream = sys.stderr if as_json else sys.stdout

    def write(text: str) -> None:
        # `show` would print the carriage returns of a progress bar as escapes.
        show(text.replace("\r\n", "\n").replace("\r", "\n"), stream, end="")

    try:
        found = jobs.follow(job, write)
    except KeyboardInterrupt:
        show(f"\nthe job continues. {_hint(job)}")
        raise
    return ended(found)


def ended(job: Job) -> Answer:
    said = f"job {job.id} {job.status.lower()}"
    said += f"; its runs are in {job.folder} on the head node" if job.folder else ""
    found = {"job": job.id, "status": job.status, "folder": job.folder, "message": job.message}
    notes = [job.message] if job.status == "FAILED" and job.message else []
    return Answer(found, said, notes, exit_code=int(job.status == "FAILED"))


def _hint(job: str) -> str:
    return f"weft jobs follow {job} | weft jobs stop {job}"
