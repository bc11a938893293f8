"""Two helper programs for Ray clusters. They start quickly, because they do not import Weft.

cluster_programs.py probe ADDRESS          checks whether a cluster answers and accepts us
cluster_programs.py reap FOLDER SESSION    cleans up a local cluster after its driver was killed
"""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# Probe: its last line of output is JSON, either {"nodes": [...]} with the resources of each node,
# or {"error": "..."}.

CONNECT_TIMEOUT_S = 3.0
JOIN_TIMEOUT_S = 6.0
"""[s] Longest wait for an answer, once Ray is imported."""
PORT = " (its address has the port of its GCS, 6379 by default)"
PATIENCE = {"RAY_gcs_server_port_wait_time_s": "3", "RAY_gcs_server_request_timeout_seconds": "4"}
"""Environment variables with Ray's retry limits, which Ray reads on import."""


def probe(address: str) -> None:
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except socket.gaierror as error:
            reply(error=f"the host {host!r} is not known ({error.strerror})")
            return
        except TimeoutError:
            reply(error=f"no answer within {CONNECT_TIMEOUT_S:.0f} s")
            return
        except OSError as error:
            reply(error=f"no server listens there ({error.strerror})")
            return
    os.environ |= PATIENCE
    import ray

    # Ray has no timeout for joining a cluster, so this thread ends the process.
    late = threading.Timer(
        JOIN_TIMEOUT_S, end, ("it took the connection, but did not answer as a Ray cluster does" + PORT,)
    )
    late.daemon = True
    late.start()
    try:
        ray.init(address=address, namespace="weft", log_to_driver=False, logging_level=logging.CRITICAL)
        reply(nodes=[node["Resources"] for node in ray.nodes() if node["Alive"]])
    except Exception as error:
        reply(error=reason_of(error))
    late.cancel()


def reason_of(error: BaseException | None) -> str:
    """Why joining failed, from an error and its causes."""
    said: list[str] = []
    while error is not None:
        said.append(str(error))
        error = error.__cause__ or error.__context__
    text = "\n".join(said)
    if "authentication token" in text.lower():
        mode = os.environ.get("RAY_AUTH_MODE")
        given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
        way = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token) to what its head node has"
        if mode == "token":
            return f"the authentication token is {'not that of the cluster' if given or 'was found' not in text else 'missing'}; {way}"
        return f"it asks for an authentication token, and RAY_AUTH_MODE is {mode or 'not set'}; {way}"
    if "when trying to resolve node to connect to" in text:
        return "no node of it runs on this machine: start the script on one of its nodes (`ray start`, or `ray job submit`)"
    if "Failed to connect to GCS" in text:
        return f"the server there does not answer as a Ray cluster does{PORT}"
    return " ".join(said[0].split())


def end(error: str) -> None:
    reply(error=error)
    os._exit(1)


def reply(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# Reaper: the driver writes the ids of the cluster's process groups to the reaper's standard input,
# one per line, and keeps it open. If the cluster's folder still exists when the input ends, the
# reaper kills the cluster's processes and removes the folder.


GRACE_S = 3.0
"""[s] Time for the cluster's processes to notice that the driver is gone."""


def reap(folder: Path, session: int) -> None:
    groups = {int(line) for line in sys.stdin}
    deadline = time.monotonic() + GRACE_S
    while folder.exists() and time.monotonic() < deadline:
        if not any(processes_of(folder, groups, session)):
            break
        time.sleep(0.1)
    if folder.exists():
        for process in processes_of(folder, groups, session):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path, groups: set[int], session: int) -> Iterator[int]:
    """Yield the ids of processes in one of these process groups of the driver's session, or whose
    command line or environment contains the folder's path."""
    name = os.fsencode(folder)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process is gone, or belongs to another user
            state, _, group, of_session = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
            # Another session may have reused the group's number.
            ours = int(group) in groups and int(of_session) == session
            named = any(name in (entry / of).read_bytes() for of in ("cmdline", "environ"))
            if (ours or named) and state != "Z" and int(entry.name) != os.getpid():
                yield int(entry.name)


if __name__ == "__main__":
    if sys.argv[1] == "probe":
        probe(sys.argv[2])
    else:
        reap(Path(sys.argv[2]), int(sys.argv[3]))
