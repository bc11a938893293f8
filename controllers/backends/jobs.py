"""Jobs: runs on a Ray cluster that this machine need not belong to, through the job server of the cluster's head.

    checked here ──submit──> pending ──> runs ──> succeeded | failed
                                           └──stop──> saves itself, if it can ──> stopped

The user's folder travels as one package of the job's runtime environment, and every process of the run works in it. Ray keeps the settings
of a job, and shows them to everybody who may use the cluster: no secrets are sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shlex
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...dataflow.errors import RunError, UserError, nearest
from ...dataflow.runs.directory import check_run_name
from ...dataflow.untrusted_text import is_secret_name
from .user_code import UserCode

# Job environment
#
# What a job of a Ray cluster tells the run in it, by its environment: the folder in which it lies,
# and whether it goes on.
#
# A job works in a package of the user's files, which Ray removes some time after the job. A
# relative `root` is therefore taken below `WEFT_ROOT`, or below `~/weft` where Weft runs in such a
# package and nothing is said. `weft submit` sets both variables.


ROOT = "WEFT_ROOT"
"""Folder below which relative roots lie."""
RESUME = "WEFT_RESUME"
"""`resume` of runs that write checkpoints and whose script says nothing of it: "latest" or "weights"."""
DEFAULT_ROOT = "~/weft"
_PACKAGES = ("runtime_resources", "working_dir_files")
"""Two folders, one in the other, below which Ray unpacks the files of jobs."""


def in_package(folder: Path) -> bool:
    """Whether a folder is, or is in, a package that Ray has unpacked for a job.

    >>> in_package(Path("/tmp/ray/session_x/runtime_resources/working_dir_files/_ray_pkg_0a2f/project"))
    True
    """
    return any(pair == _PACKAGES for pair in zip(folder.parts, folder.parts[1:], strict=False))


def root_of(
    root: str | Path, environment: Mapping[str, str] = os.environ, folder: Path | None = None
) -> Path:
    """Where the folder of runs lies.

    Args:
        root: as the script gave it.
        environment: of this process.
        folder: in which this process works; None: as the system says.

    Returns:
        `root` itself, unless it is relative and a job moves it.

    >>> root_of("runs", {"WEFT_ROOT": "/shared/weft"}), root_of("/data/runs", {"WEFT_ROOT": "/shared/weft"}), root_of("runs", {})
    (PosixPath('/shared/weft/runs'), PosixPath('/data/runs'), PosixPath('runs'))
    """
    root = Path(root)
    below = environment.get(ROOT) or (DEFAULT_ROOT if in_package(folder or Path.cwd()) else "")
    return root if root.is_absolute() or not below else Path(below).expanduser().absolute() / root


def resume_of(resume: str | Path, environment: Mapping[str, str] = os.environ) -> str | Path:
    """What a run goes on from: as its script says, or, where that says "none", as its job says.

    Raises:
        UserError: the job says something else than "latest", "weights" or "none".

    >>> resume_of("none", {"WEFT_RESUME": "latest"}), resume_of("weights", {"WEFT_RESUME": "latest"}), resume_of("none", {})
    ('latest', 'weights', 'none')
    """
    said, allowed = environment.get(RESUME) or "none", ("none", "latest", "weights")
    if said not in allowed:
        raise UserError(
            f"{RESUME}={said!r} in the environment: it is one of {', '.join(allowed)}{nearest(said, allowed)}"
        )
    return said if resume == "none" else resume


# Job request
#
# JobRequest: a script that is to run as a job of a Ray cluster, checked before anybody is asked
# (`jobs.py` sends it).


NUMBER = "WEFT_JOB"
"""Environment variable of a job: its id."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variable of a job: seconds after SIGTERM before Ray kills it."""
_OWN = {ROOT: "--root", RESUME: "--resume", NUMBER: "Weft", STOP_WAIT: "--stop-wait-s"}
"""Variables that are not given by --env, and what sets each."""


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
        if not self.root.startswith(("/", "~")):
            raise UserError(
                f"--root={self.root!r} is a folder of the head node: an absolute path, or one below ~"
            )
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
        return shlex.join([self.python, self.program, *self.arguments])

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


VARIABLE = "RAY_API_SERVER_ADDRESS"
"""Environment variable with the address of the job server, as Ray's own commands read it."""
EXAMPLE = "http://ray-head:8265"
GCS_PORT = 6379
"""At which drivers join a cluster, by Ray's default."""
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 10.0, 120.0
"""Longest waits for the job server: to accept a connection, and to answer a request."""
LOST_TIMEOUT_S = 300.0
"""Longest time for which a job is followed while its server does not answer."""
QUIET_S = 300.0
"""Longest time without a line of a job's log, after which it is seen whether the job and the connection are still there."""
POLL_S = 1.0
"""Seconds between two questions how a job is doing."""
OVER = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Job:
    """A job as its server knows it."""

    id: str
    status: str
    """PENDING, RUNNING, or one of OVER."""
    message: str
    """What Ray says about that."""
    submitted_s: float
    """Seconds since 1970."""
    entrypoint: str
    folder: str
    """The folder of its runs on the head node; empty if something else than `weft submit` submitted it."""
    stop_wait_s: float
    """Seconds that it has to save itself."""

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @classmethod
    def of(cls, details: Any) -> Job:
        """From what Ray's client returns."""
        variables = (details.runtime_env or {}).get("env_vars", {})
        return cls(
            id=str(details.submission_id or details.job_id),
            status=str(details.status.value),
            message=" ".join((details.message or "").split()),
            submitted_s=(details.start_time or 0) / 1e3,
            entrypoint=details.entrypoint,
            folder=variables.get(ROOT, ""),
            stop_wait_s=float(variables.get(STOP_WAIT, 3)),
        )


class Jobs:
    """The jobs of a cluster.

    Args:
        address: of its job server, such as http://ray-head:8265; None: as `RAY_API_SERVER_ADDRESS` says.

    Raises:
        UserError: it is no such address, nobody answers there, or the token is not that of the cluster.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = server_address(address)
        _require_listener(self.address)
        with _answers(self.address):
            self._client = _client(self.address)

    def submit(self, request: JobRequest, tell: Callable[[str], None] = lambda line: None) -> str:
        """Send the files of a job and start it.

        Args:
            request: what is to run.
            tell: told what is sent, in lines.

        Returns:
            The id of the job.

        Raises:
            UserError: the files are too many, or the script is not among them.
            RunError: the cluster does not take the job.
        """
        _check_files(request, tell)
        job = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', request.run_name)}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        environment = request.code.runtime_env({}) | {"env_vars": request.variables(job)}
        with _answers(self.address):
            return self._client.submit_job(
                entrypoint=request.entrypoint,
                submission_id=job,
                runtime_env=environment,
            )

    def list(self) -> list[Job]:
        """All jobs that the cluster remembers, the latest first."""
        with _answers(self.address):
            found = [Job.of(details) for details in self._client.list_jobs() if details.submission_id]
        return sorted(found, key=lambda job: (job.submitted_s, job.id), reverse=True)

    def get(self, job: str) -> Job:
        """One job.

        Raises:
            UserError: there is none of this id.
        """
        with _answers(self.address):
            known = {
                details.submission_id: details
                for details in self._client.list_jobs()
                if details.submission_id
            }
        if job not in known:
            raise UserError(f"the cluster at {self.address} has no job {job!r}{nearest(job, known)}")
        return Job.of(known[job])

    def stop(self, job: str) -> Job:
        """Stop a job, and wait until it has saved itself and is over.

        Raises:
            UserError: there is no such job.
            RunError: it is not over in time.
        """
        found = self.get(job)
        if found.is_over:
            return found
        with _answers(self.address):
            self._client.stop_job(job)
        return self._until_over(job, found.stop_wait_s + ANSWER_TIMEOUT_S)

    def _until_over(self, job: str, timeout_s: float) -> Job:
        end = time.monotonic() + timeout_s
        while not (found := self.get(job)).is_over:
            if time.monotonic() > end:
                raise RunError(
                    f"job {job} is not over after {timeout_s:.0f} s; the cluster says {found.status}"
                )
            time.sleep(POLL_S)
        return found

    def follow(self, job: str, write: Callable[[str], None]) -> Job:
        """Pass on what a job prints, from its beginning, until it is over.

        Args:
            job: its id.
            write: called with text as it comes.

        Returns:
            The job.

        Raises:
            UserError: there is no such job.
            RunError: its server did not answer for LOST_TIMEOUT_S.
        """
        log, heard = _Log(write), time.monotonic()
        while True:
            try:
                asyncio.run(self._tail(job, log))
                found, heard = self.get(job), time.monotonic()
                if found.is_over:
                    return found
            except (RunError, RuntimeError, OSError) as error:
                if time.monotonic() - heard > LOST_TIMEOUT_S:
                    raise RunError(
                        f"the job server at {self.address} has not answered for {LOST_TIMEOUT_S:.0f} s ({error}); the job {job} "
                        f"may go on: `weft jobs follow {job}`"
                    ) from error
            time.sleep(POLL_S)

    async def _tail(self, job: str, log: _Log) -> None:
        """Follow the log of a job until its server ends that, or sends nothing for QUIET_S.

        Raises:
            RunError: the connection broke.
        """
        import aiohttp

        seen, stream = 0, self._client.tail_job_logs(job)
        try:
            while True:
                text = await asyncio.wait_for(anext(stream), QUIET_S)
                seen += len(text)
                log.take(text, seen)
        except (StopAsyncIteration, TimeoutError):
            return
        except aiohttp.ClientError as error:
            raise RunError(f"the log of job {job} broke off: {error}") from error
        finally:
            await stream.aclose()


class _Log:
    """Passes on the text of a log once, though it comes from its beginning after each break.

    Args:
        write: called with new text.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._written = 0
        """Characters of the log that were passed on."""

    def take(self, text: str, end: int) -> None:
        """A piece has come.

        Args:
            text: the piece.
            end: characters of the log up to its end.
        """
        if end > self._written:
            self._write(text[max(0, len(text) - (end - self._written)) :])
            self._written = end


def server_address(given: str | None) -> str:
    """The address of the job server that an option or `RAY_API_SERVER_ADDRESS` names.

    >>> server_address("http://ray-head:8265/")
    'http://ray-head:8265'
    >>> server_address("ray-head:6379")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: --address 'ray-head:6379' is none of a job server; did you mean 'http://ray-head:8265'?

    Raises:
        UserError: it is none.
    """
    address = given or os.environ.get(VARIABLE) or ""
    if not address:
        raise UserError(f"no cluster is named: give --address {EXAMPLE}, or set {VARIABLE}")
    where = f"--address {given!r}" if given else f"{VARIABLE}={address!r}"
    if "@" in address:
        raise UserError(
            f"{where.split('=')[0].split()[0]} holds a name or a password; a token is given by RAY_AUTH_TOKEN or its file"
        )
    meant = f"; it is one such as {EXAMPLE}"
    try:
        scheme, _, rest = address.rpartition("://")
        parts = urlsplit(f"//{rest}")
        if parts.hostname:
            if scheme in ("http", "https") and parts.port != 0:
                return address.rstrip("/")
            port = 8265 if parts.port in (None, GCS_PORT) else parts.port
            meant = f"; did you mean 'http://{parts.hostname}:{port}'?"
    except ValueError:  # the port is no number
        pass
    raise UserError(f"{where} is none of a job server{meant}")


def _require_listener(address: str) -> None:
    """See that somebody listens: Ray's client has no deadline of its own."""
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise UserError(
            f"no job server answers at {address} ({error}). The head of the cluster has one if it was started with "
            "`ray[default]` installed, without --include-dashboard=false"
        ) from None


def _client(address: str) -> Any:
    """Ray's client, whose requests have deadlines."""
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise UserError(
            'jobs take Ray\'s client, which is not complete here: pip install "weft[jobs]"'
        ) from None
    from ray.job_submission import JobSubmissionClient

    for talks in (
        "dashboard.modules.job.sdk",
        "dashboard.modules.dashboard_sdk",
        "_private.runtime_env.packaging",
    ):
        logging.getLogger(f"ray.{talks}").setLevel(logging.WARNING)

    class Client(JobSubmissionClient):
        def _do_request(self, *arguments: Any, **settings: Any) -> Any:
            return super()._do_request(
                *arguments, timeout=(CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S), **settings
            )

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = address  # it goes before what is passed, and RAY_ADDRESS too
    try:
        return Client(address)
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


@contextmanager
def _answers(address: str) -> Iterator[None]:
    """Say plainly what Ray's client raises.

    Raises:
        UserError: the token is wrong, or is lacking.
        RunError: anything else.
    """
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        said = str(error).strip().partition("\n")[0]
        raise UserError(
            f"the cluster at {address} does not let us in ({said}): set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from None
    except (RuntimeError, ConnectionError, OSError) as error:
        if isinstance(error, UserError | RunError):
            raise
        raise RunError(f"the cluster at {address}: {' '.join(str(error).split())[:500]}") from error


def _check_files(request: JobRequest, tell: Callable[[str], None]) -> None:
    """Refuse too large a folder, and one without its script; tell what is sent."""
    code = request.code
    code.check()
    assert code.working_dir is not None
    files = code.files(code.working_dir)
    if request.program not in files:
        raise UserError(
            f"script {str(request.script)!r} would not be sent: a .gitignore, a .rayignore or an exclude leaves it out"
        )
    largest = ", ".join(f"{name} ({_readable(size)})" for name, size in Counter(files).most_common(3))
    tell(
        f"sends {len(files)} files of {code.working_dir}, {_readable(sum(files.values()))}; the largest: {largest}"
    )


def _readable(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
