"""Wait until earlier jobs of the same queue have ended, then execute the job's command.

    python -m weft.controllers.backends.queued QUEUE COMMAND...

The queue is Ray's list of jobs, so a job that ended or was killed does not block others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from ...dataflow.errors import RunError
from ...dataflow.untrusted_text import show
from .jobs import NUMBER, Job, Jobs

LOOK_S = 3.0
"""[s] Time between two checks of the jobs ahead."""
MAX_WAIT_S = 30 * 86400.0
"""[s] Longest wait."""


def ahead_of(job: str, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs of the same queue that come first, next one last."""
    own = next((one for one in jobs if one.id == job), None)
    if own is None:
        return []
    line = [one for one in jobs if one.queue == own.queue and not one.is_over]
    return sorted(
        (one for one in line if (one.submitted_s, one.id) < (own.submitted_s, own.id)),
        key=lambda one: (one.submitted_s, one.id),
    )


def wait_for_turn(
    job: str,
    jobs: Callable[[], Sequence[Job]],
    tell: Callable[[str], None],
    rest: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until no job of the queue is ahead of this one.

    Args:
        job: Id of this job.
        jobs: Returns all jobs of the cluster.
        tell: Receives a line whenever the jobs ahead change.
        rest: Sleeps for some seconds.
        clock: [s] Clock.

    Raises:
        RunError: The turn did not come within MAX_WAIT_S.
    """
    end, told = clock() + MAX_WAIT_S, ""
    while ahead := ahead_of(job, jobs()):
        if clock() > end:
            raise RunError(
                f"job {job} waited {MAX_WAIT_S:.0f} s for its turn; ahead of it: {ahead[-1].id}"
            )
        said = f"{len(ahead)} jobs of the queue {ahead[-1].queue!r} are ahead; the one that runs is {ahead[0].id}"
        if said != told:
            tell(said)
            told = said
        rest(LOOK_S)


def main(words: Sequence[str]) -> None:
    """Wait, then execute the command."""
    _, *command = words
    server = Jobs(_server_of_this_cluster())
    wait_for_turn(os.environ[NUMBER], server.list, lambda line: show(line, sys.stdout))
    os.execvp(command[0], command)


def _server_of_this_cluster() -> str:
    """Address of the job server of this job's cluster."""
    from ray.dashboard.utils import get_address_for_submission_client

    return get_address_for_submission_client(os.environ["RAY_ADDRESS"])


if __name__ == "__main__":
    main(sys.argv[1:])
