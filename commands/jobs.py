"""`weft jobs`: list, follow and stop what was submitted to a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from .command import Answer, Command
from .submit import ended, followed


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """List the jobs that the cluster remembers, the latest first."""

    address: Annotated[str | None, arg(metavar="URL", help_behavior_hint="")] = None
    """The cluster's job server, such as http://ray-head:8265; default: RAY_API_SERVER_ADDRESS of the environment."""

    def answer(self) -> Answer:
        import time
        from dataclasses import asdict

        from ..controllers.backends.jobs import Jobs

        jobs = Jobs(self.address).list()
        lines = [
            f"{job.id}  {job.status.lower():<9}  {time.strftime('%m-%d %H:%M', time.localtime(job.submitted_s))}"
            f"  {job.queue or '-'}  {job.entrypoint}"
            for job in jobs
        ]
        return Answer({"jobs": [asdict(job) for job in jobs]}, "\n".join(lines) or "the cluster remembers no jobs")


@dataclass(frozen=True, kw_only=True)
class Follow(Command):
    """Print the log of a job from its beginning until it is over; exit code 1 if it failed."""

    job: Annotated[Positional[str], arg(metavar="JOB")]
    """Its id."""
    address: Annotated[str | None, arg(metavar="URL", help_behavior_hint="")] = None
    """The cluster's job server, such as http://ray-head:8265; default: RAY_API_SERVER_ADDRESS of the environment."""

    def answer(self) -> Answer:
        from ..controllers.backends.jobs import Jobs

        return followed(Jobs(self.address), self.job, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Stop(Command):
    """Have a job save itself and end, and wait until it has. `weft submit --resume` goes on from there."""

    job: Annotated[Positional[str], arg(metavar="JOB")]
    """Its id."""
    address: Annotated[str | None, arg(metavar="URL", help_behavior_hint="")] = None
    """The cluster's job server, such as http://ray-head:8265; default: RAY_API_SERVER_ADDRESS of the environment."""

    def answer(self) -> Answer:
        from ..controllers.backends.jobs import Jobs

        return ended(Jobs(self.address).stop(self.job))
