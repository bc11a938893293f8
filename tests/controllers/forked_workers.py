"""Fork Ray workers from a server that has already imported their modules, to save startup time.

A worker of Ray spends more than a second of CPU on importing Ray and Weft. A forked one starts at
once and is otherwise just as fresh. Ray runs this file in place of its worker program:
`Cluster(head_node_args={"worker_path": forked_workers.__file__})`.

    this file ──first worker of a job on a node──> fork the server, which imports, then forks a worker per connection
        └──connect──> send arguments, environment, folder and streams ──the worker has ended──> exit

There is one server per job and node, because Ray reads the names of both from the environment when
it is imported. Clusters that Weft starts itself keep Ray's own workers: `test_sockets.py`,
`test_checkpoints.py` and the examples.
"""

import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable

LENGTH = struct.Struct("!I")
IDLE_S = 60
"""[s] How long a server waits for the next connection."""


def main(*modules: str) -> None:
    """Run a worker. The server imports these modules too."""
    raylet = int(os.environ["RAY_RAYLET_PID"])
    address = f"\0weft-tests-{raylet}-{os.environ['RAY_JOB_ID']}"
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError:  # the server already runs
            first = False
        else:
            listener.listen(64)
            first = True
        if first and not os.fork():
            if (connection := serve(listener, raylet, modules)) is not None:
                become_worker(connection)
            return
    hand_over(address)


def hand_over(address: str) -> None:
    """Replace this process by a forked one, and wait until that one ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(server, [LENGTH.pack(len(asked))], [0, 1, 2])
        server.sendall(asked)
        server.recv(1)


def serve(listener: socket.socket, raylet: int, modules: Iterable[str]) -> socket.socket | None:
    """Fork processes until the raylet is gone or no connection comes for IDLE_S.

    Returns:
        The connection in a forked process, None in the server.
    """
    os.setsid()  # Ray kills the process group of a worker that it started
    import gc
    import threading

    gc.disable()  # imported modules are never freed
    from ray._private.workers import default_worker as default_worker

    import weft.controllers.backends.node_links
    import weft.controllers.backends.rank
    import weft.workers.function  # noqa: F401

    for name in modules:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap forked processes without waiting for them
    idle_s = 0
    while idle_s < IDLE_S and os.path.exists(f"/proc/{raylet}"):
        if not select.select([listener], [], [], 1.0)[0]:
            idle_s += 1
            continue
        connection, _ = listener.accept()
        if not os.fork():
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return connection
        connection.close()
        idle_s = 0
    return None


def become_worker(connection: socket.socket) -> None:
    """Run Ray's worker program with the arguments and streams of the connected process."""
    import runpy

    from ray._private.workers import default_worker

    length, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with connection.makefile("rb") as file:
        arguments, environment, folder = json.loads(file.read(*LENGTH.unpack(length)))
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    theirs = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    program = default_worker.__file__
    sys.path[:] = [
        os.path.dirname(program),
        *theirs,
        *(path for path in sys.path[1:] if path not in ours),
    ]
    sys.argv = [program, *arguments]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
