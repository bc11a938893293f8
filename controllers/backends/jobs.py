"""Jobs: run scripts on a Ray cluster through its job server, from any machine that can reach it.

    checked here ──submit──> pending ──> runs ──> succeeded | failed
                                           └──stop──> saves itself, if it can ──> stopped

Weft sends the user's folder as the job's working directory. Ray stores a job's settings and shows
them to all users of the cluster, so Weft never sends secrets.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...dataflow.errors import RunError, UserError, nearest
from ...dataflow.runs.directory import check_run_name
from ...dataflow.untrusted_text import is_secret_name
from .ray_cluster import UserCode

# Job environment: these variables tell a run in a job where to put its directory, and whether to
# resume. A job works in an unpacked copy of the user's files, which Ray deletes some time later. So
# Weft resolves a relative `root` below `WEFT_ROOT`, or else below `~/weft`.


ROOT = "WEFT_ROOT"
RESUME = "WEFT_RESUME"
"""Environment variable with the `resume` value for runs whose script does not set one."""
DEFAULT_ROOT = "~/weft"
_PACKAGES = ("runtime_resources", "working_dir_files")
"""The nested folders where Ray unpacks the files of jobs."""


def in_package(folder: Path) -> bool:
    """Whether Ray has unpacked this folder for a job.

    >>> in_package(Path("/tmp/ray/session_x/runtime_resources/working_dir_files/_ray_pkg_0a2f/project"))
    True
    """
    return any(pair == _PACKAGES for pair in zip(folder.parts, folder.parts[1:], strict=False))


def root_of(
    root: str | Path, environment: Mapping[str, str] = os.environ, folder: Path | None = None
) -> Path:
    """Return the folder for run directories. A relative `root` goes below `WEFT_ROOT`, or else, in
    a job, below `~/weft`.

    >>> root_of("runs", {"WEFT_ROOT": "/shared/weft"}), root_of("/data/runs", {"WEFT_ROOT": "/shared/weft"}), root_of("runs", {})
    (PosixPath('/shared/weft/runs'), PosixPath('/data/runs'), PosixPath('runs'))
    """
    root = Path(root)
    below = environment.get(ROOT) or (DEFAULT_ROOT if in_package(folder or Path.cwd()) else "")
    return root if root.is_absolute() or not below else Path(below).expanduser().absolute() / root


def resume_of(resume: str | Path, environment: Mapping[str, str] = os.environ) -> str | Path:
    """Return the value of `resume` for a run: the script's, or the job's if the script's is "none".

    Raises:
        UserError: The job's value is not "latest", "weights" or "none".

    >>> resume_of("none", {"WEFT_RESUME": "latest"}), resume_of("weights", {"WEFT_RESUME": "latest"}), resume_of("none", {})
    ('latest', 'weights', 'none')
    """
    said, allowed = environment.get(RESUME) or "none", ("none", "latest", "weights")
    if said not in allowed:
        raise UserError(
            f"{RESUME}={said!r} in the environment is not one of {', '.join(allowed)}{nearest(said, allowed)}"
        )
    return said if resume == "none" else resume


# Job request: a script to run as a job, checked before Weft contacts the cluster


NUMBER = "WEFT_JOB"
"""Environment variable with the job's id."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variable: seconds between SIGTERM and SIGKILL when Ray stops the job."""
_OWN = {ROOT: "--root", RESUME: "--resume", NUMBER: "Weft", STOP_WAIT: "--stop-wait-s"}
"""Environment variables that --env cannot set -> the option that sets each, or "Weft"."""


@dataclass(frozen=True)
class JobRequest:
    """A script to run as a job. The fields are the options of `weft submit`.

    Raises:
        UserError: A value is wrong; the message names it.
    """

    script: Path
    """A Python program in `working_dir`."""
    arguments: Sequence[str] = ()
    name: str | None = None
    """Folder of the job's runs below `root`, and prefix of its id. Default: the script's name."""
    working_dir: Path = Path()
    excludes: Sequence[str] = ()
    root: str = DEFAULT_ROOT
    """Folder on the head node; `~` is the home of the user who started Ray there."""
    environment: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    python: str = "python"
    stop_wait_s: int = 600

    def __post_init__(self) -> None:
        folder = self.working_dir.expanduser().absolute()
        script = folder / self.script.expanduser()
        if not script.is_file():
            near = nearest(script.name, [path.name for path in script.parent.glob("*.py")])
            raise UserError(f"script {str(self.script)!r}: there is no such file in {folder}{near}")
        if not script.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"script {str(self.script)!r} is outside of {folder}, the folder that is sent; choose --working-dir"
            )
        check_run_name(self.run_name, "--name")
        if not self.root.startswith(("/", "~")):
            raise UserError(
                f"--root={self.root!r} must be a folder on the head node: an absolute path, or one below ~"
            )
        if self.stop_wait_s < 1:
            raise UserError(
                f"--stop-wait-s={self.stop_wait_s} must be a whole number of seconds above 0"
            )
        for variable, value in self.environment.items():
            _check_variable(variable, value)

    @property
    def run_name(self) -> str:
        return self.name if self.name is not None else self.script.stem

    @property
    def folder(self) -> str:
        return f"{self.root.rstrip('/')}/{self.run_name}"

    @property
    def code(self) -> UserCode:
        return UserCode.of(self.working_dir, (), self.excludes)

    @property
    def entrypoint(self) -> str:
        return shlex.join([self.python, self.program, *self.arguments])

    @property
    def program(self) -> str:
        """Path of the script, relative to the sent folder."""
        folder = self.working_dir.expanduser().absolute().resolve()
        return (folder / self.script.expanduser()).resolve().relative_to(folder).as_posix()

    def variables(self, job: str) -> dict[str, str]:
        resume = {RESUME: "latest"} if self.resume else {}
        own = {ROOT: self.folder, NUMBER: job, STOP_WAIT: str(self.stop_wait_s)}
        # Users follow the output while the job runs, so disable Python's buffering.
        return {"PYTHONUNBUFFERED": "1", **resume, **own, **self.environment}


def _check_variable(name: str, value: str) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise UserError(f"--env {name}=...: this is not the name of a variable")
    if name in _OWN:
        raise UserError(f"--env {name}=...: {_OWN[name]} sets this variable")
    if is_secret_name(name):
        raise UserError(
            f"--env {name}=...: Ray shows the settings of a job to all users of the cluster. Set secrets in the environment of the nodes "
            "instead (a Kubernetes secret, for example)"
        )
    if "\0" in value:
        raise UserError(f"--env {name}=...: the value contains a null character")


# Jobs

VARIABLE = "RAY_API_SERVER_ADDRESS"
"""Environment variable with the job server's address, which Ray's commands read, too."""
EXAMPLE = "http://ray-head:8265"
GCS_PORT = 6379
"""Ray's default port for drivers that join a cluster."""
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 10.0, 120.0
"""[s] Longest waits for the job server to accept a connection, and to answer a request."""
LOST_TIMEOUT_S = 300.0
"""[s] How long `follow` retries an unresponsive job server."""
QUIET_S = 300.0
"""[s] After this long without log output, `follow` checks the job and the connection."""
POLL_S = 1.0
"""[s] Interval between status requests."""
OVER = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Job:
    id: str
    status: str
    """PENDING, RUNNING, or one of OVER."""
    message: str
    submitted_s: float
    entrypoint: str
    folder: str
    """Folder of its runs on the head node; empty unless `weft submit` submitted it."""
    stop_wait_s: float

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @classmethod
    def of(cls, details: Any) -> Job:
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
    """Client of a cluster's job server.

    Args:
        address: Address of the job server. Default: `RAY_API_SERVER_ADDRESS`.

    Raises:
        UserError: The address or the token is wrong, or the server does not answer.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = server_address(address)
        _require_listener(self.address)
        with _answers(self.address):
            self._client = _client(self.address)

    def submit(self, request: JobRequest, tell: Callable[[str], None] = lambda line: None) -> str:
        """Send a job's files, start it, and return its id. `tell` receives a summary of the files.

        Raises:
            UserError: The files are too large, or do not include the script.
            RunError: The cluster rejects the job.
        """
        _check_files(request, tell)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.run_name)
        # Two jobs may start in the same second, so a random part makes the id unique.
        job = f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        environment = request.code.runtime_env({}) | {"env_vars": request.variables(job)}
        with _answers(self.address):
            return self._client.submit_job(
                entrypoint=request.entrypoint, submission_id=job, runtime_env=environment
            )

    def list(self) -> list[Job]:
        """Return all jobs that the cluster remembers, newest first."""
        with _answers(self.address):
            found = [Job.of(details) for details in self._client.list_jobs() if details.submission_id]
        return sorted(found, key=lambda job: (job.submitted_s, job.id), reverse=True)

    def get(self, job: str) -> Job:
        """Return a job, or raise a `UserError` if the cluster does not know it."""
        known = {one.id: one for one in self.list()}
        if job not in known:
            raise UserError(f"the cluster at {self.address} has no job {job!r}{nearest(job, known)}")
        return known[job]

    def stop(self, job: str) -> Job:
        """Stop a job, wait until it has saved itself and ended, and return it.

        Raises:
            UserError: The cluster does not know this job.
            RunError: The job did not end in time.
        """
        found = self.get(job)
        if found.is_over:
            return found
        with _answers(self.address):
            self._client.stop_job(job)
        timeout_s = found.stop_wait_s + ANSWER_TIMEOUT_S
        end = time.monotonic() + timeout_s
        while not (found := self.get(job)).is_over:
            if time.monotonic() > end:
                raise RunError(f"job {job} is still {found.status} after {timeout_s:.0f} s")
            time.sleep(POLL_S)
        return found

    def follow(self, job: str, write: Callable[[str], None]) -> Job:
        """Pass all output of a job to `write` until the job ends, and return the job.

        Raises:
            UserError: The cluster does not know this job.
            RunError: The job server did not answer for LOST_TIMEOUT_S.
        """
        written, heard = 0, time.monotonic()

        def pass_on(text: str, end: int) -> None:
            """Write the part of a text that earlier connections did not deliver. `end` is the
            text's end position in the log."""
            nonlocal written
            if end > written:
                write(text[max(0, len(text) - (end - written)) :])
                written = end

        while True:
            try:
                asyncio.run(self._tail(job, pass_on))
                found, heard = self.get(job), time.monotonic()
                if found.is_over:
                    return found
            except (RunError, RuntimeError, OSError) as error:
                if time.monotonic() - heard > LOST_TIMEOUT_S:
                    raise RunError(
                        f"the job server at {self.address} has not answered for {LOST_TIMEOUT_S:.0f} s ({error}); the job {job} "
                        f"may still run: `weft jobs follow {job}`"
                    ) from error
            time.sleep(POLL_S)

    async def _tail(self, job: str, pass_on: Callable[[str, int], None]) -> None:
        """Read the log of a job until the server ends it, or sends nothing for QUIET_S."""
        import aiohttp

        seen, stream = 0, self._client.tail_job_logs(job)
        try:
            while True:
                text = await asyncio.wait_for(anext(stream), QUIET_S)
                seen += len(text)
                pass_on(text, seen)
        except (StopAsyncIteration, TimeoutError):
            return
        except aiohttp.ClientError as error:
            raise RunError(f"the log of job {job} broke off: {error}") from error
        finally:
            await stream.aclose()


def server_address(given: str | None) -> str:
    """Return the job server's address, from `--address` or else `RAY_API_SERVER_ADDRESS`.

    >>> server_address("http://ray-head:8265/")
    'http://ray-head:8265'
    >>> server_address("ray-head:6379")
    Traceback (most recent call last):
    weft.dataflow.errors.UserError: --address 'ray-head:6379' is not the address of a job server; did you mean 'http://ray-head:8265'?

    Raises:
        UserError: The address is missing, or is not a job server's.
    """
    address = given or os.environ.get(VARIABLE) or ""
    if not address:
        raise UserError(f"no cluster is given; use --address {EXAMPLE}, or set {VARIABLE}")
    where = f"--address {given!r}" if given else f"{VARIABLE}={address!r}"
    if "@" in address:
        raise UserError(
            f"{where.split('=')[0].split()[0]} contains a user name or a password; give a token by RAY_AUTH_TOKEN or its file instead"
        )
    meant = f"; use one such as {EXAMPLE}"
    try:
        scheme, _, rest = address.rpartition("://")
        parts = urlsplit(f"//{rest}")
        if parts.hostname:
            if scheme in ("http", "https") and parts.port != 0:
                return address.rstrip("/")
            port = 8265 if parts.port in (None, GCS_PORT) else parts.port
            meant = f"; did you mean 'http://{parts.hostname}:{port}'?"
    except ValueError:  # the port is not a number
        pass
    raise UserError(f"{where} is not the address of a job server{meant}")


def _require_listener(address: str) -> None:
    """Raise a `UserError` if no server listens there. Ray's client has no connection timeout."""
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
    if find_spec("aiohttp") is None:
        raise UserError(
            'jobs need Ray\'s complete client, which is not installed; run: pip install "weft[jobs]"'
        )
    from ray.job_submission import JobSubmissionClient

    for talks in ("dashboard.modules", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{talks}").setLevel(logging.WARNING)

    class _Client(JobSubmissionClient):
        def _do_request(self, *arguments: Any, **settings: Any) -> Any:
            timeout = CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S
            return super()._do_request(*arguments, timeout=timeout, **settings)

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = address  # takes precedence over the argument and RAY_ADDRESS
    try:
        return _Client(address)
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


@contextmanager
def _answers(address: str) -> Iterator[None]:
    """Convert Ray's errors: a wrong or missing token to `UserError`, others to `RunError`."""
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
    """Check that the files are small enough and include the script. Pass a summary to `tell`."""
    code = request.code
    code.check()
    assert code.working_dir is not None
    files = code.files(code.working_dir)
    if request.program not in files:
        raise UserError(
            f"script {str(request.script)!r} would not be sent, because a .gitignore, a .rayignore or an exclude leaves it out"
        )
    largest = ", ".join(f"{name} ({_readable(size)})" for name, size in Counter(files).most_common(3))
    tell(
        f"sends {len(files)} files of {code.working_dir}, {_readable(sum(files.values()))}; the largest: {largest}"
    )


def _readable(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
