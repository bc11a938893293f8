"""Processes of Ray's workers that are forked from a server for each job on a node, which has imported what they import.

A worker of Ray imports Ray and Weft in more than a second of a CPU; a forked one has them at once, and else is as fresh as any. Ray starts
this file where it else starts its own program of a worker: `Cluster(head_node_args={"worker_path": forked_workers.__file__})`.

    this file ──the first of a job on a node──> forks the server, which imports, and forks a worker for each that connects
        └──connects──> hands its arguments, environment, folder and streams over ──its worker has ended──> ends

A server is that of a job and a node because Ray reads the names of both from the environment while it is imported. Clusters that Weft
starts have workers as Ray starts them: those of `test_sockets.py`, `test_checkpoints.py` and of the examples.
"""

import json
import os
import select
import signal
import socket
import struct
import sys

LENGTH = struct.Struct("!I")
IDLE_S = 60
"""So long a server waits for the next who connects."""


def main() -> None:
    raylet = int(os.environ["RAY_RAYLET_PID"])
    address = f"\0weft-tests-{raylet}-{os.environ['RAY_JOB_ID']}"
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError:  # there is a server
            first = False
        else:
            listener.listen(64)
            first = True
        if first and not os.fork():
            if (connection := serve(listener, raylet)) is not None:
                become_worker(connection)
            return
    hand_over(address)


def hand_over(address: str) -> None:
    """Have a forked process in place of this one, and wait for its end."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(server, [LENGTH.pack(len(asked))], [0, 1, 2])
        server.sendall(asked)
        server.recv(1)


def serve(listener: socket.socket, raylet: int) -> socket.socket | None:
    """Fork processes until the raylet is gone, or nobody comes any more.

    Returns:
        In a forked process: the connection that asks for it; in the server: None.
    """
    os.setsid()  # Ray ends the process group of a worker that it has started
    import gc
    import threading

    gc.disable()  # what is imported stays for good
    from ray._private.workers import default_worker as default_worker

    import weft.controllers.backends.nodes
    import weft.controllers.backends.rank
    import weft.workers.function  # noqa: F401

    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that were forked
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
    """Be the process that whoever has connected was started as."""
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
