"""A dashboard beside a run: a process of its own, which the run starts and never waits for. It reads what runs have written.

It is in a session of its own, so that neither Ctrl-C nor the end of the terminal or of the run ends it, and ends by itself when nobody has
looked for IDLE_S and the run is over. One that dies costs the run nothing; `weft dashboard` shows the same.
"""

from __future__ import annotations

import secrets
import socket
import threading
from pathlib import Path
from urllib.parse import quote

from ...dataflow.child_process import ChildProcess
from ...dataflow.runs.files import LOGS
from ...dataflow.untrusted_text import VIEW

PROGRAM = "weft.dashboard.server.beside_run"
TOKEN = "WEFT_DASHBOARD_TOKEN"
"""Variable of the environment of that process alone."""
IDLE_S = 3600.0
LOG = "dashboard.log"
"""What the process has printed, in `logs/` of the run."""


def start_dashboard(run: Path) -> str:
    """Start a dashboard over the folder that has this run; returns at once.

    Args:
        run: its directory.

    Returns:
        The address to open, with its token.

    Raises:
        OSError: there is no port, or no process can be started.
    """
    token = VIEW + secrets.token_urlsafe(24)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        child = ChildProcess(
            PROGRAM,
            str(run.parent),
            run.name,
            str(listening.fileno()),
            str(IDLE_S),
            log=run / LOGS / LOG,
            environment={TOKEN: token},
            detached=True,
            descriptors=[listening.fileno()],
        )
        child.close_input()
        # If it ends before this process, it is no zombie.
        threading.Thread(target=child.wait, args=(None,), name="dashboard", daemon=True).start()
        return (
            f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}#/curves?run={quote(run.name)}"
        )
