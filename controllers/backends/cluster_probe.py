"""Check whether a Ray cluster answers and accepts us. A program without Weft's imports:
`cluster_probe.py ADDRESS`.

Its last line is JSON: {"nodes": [...]} with the resources of each node, or {"error": "..."}.
"""

import json
import logging
import os
import socket
import sys
import threading
from typing import Any

CONNECT_TIMEOUT_S = 3.0
"""[s] Longest wait for a connection."""
JOIN_TIMEOUT_S = 6.0
"""[s] Longest wait for an answer, after Ray has been imported."""
PORT = " (its address has the port of its GCS, 6379 by default)"
PATIENCE = {"RAY_gcs_server_port_wait_time_s": "3", "RAY_gcs_server_request_timeout_seconds": "4"}
"""Ray's retry limits, which it reads on import."""


def main(address: str) -> None:
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
    """The reason that we cannot join, from an error and its causes."""
    said: list[str] = []
    while error is not None:
        said.append(str(error))
        error = error.__cause__ or error.__context__
    text = "\n".join(said)
    if "authentication token" in text.lower():
        mode, given = (
            os.environ.get("RAY_AUTH_MODE"),
            "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ,
        )
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


if __name__ == "__main__":
    main(sys.argv[1])
