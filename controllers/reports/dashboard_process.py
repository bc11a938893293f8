"""Start a run's dashboard in a separate process, which the run never waits for.

The process survives Ctrl-C and the end of the terminal or run. It ends when the run is over and no
page has been open for IDLE_S. `weft dashboard` shows the same pages.
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

PROGRAM = "weft.dashboard.server.serving"
TOKEN = "WEFT_DASHBOARD_TOKEN"
"""Environment variable with the token, only for that process."""
IDLE_S = 3600.0
LOG = "dashboard.log"
"""Output of the process, in the run's `logs/`."""


def start_dashboard(run: Path) -> str:
    """Start a dashboard for the folder that holds this run, without waiting.

    Returns:
        The address, with its token.

    Raises:
        OSError: No port is free, or the process cannot be started.
    """
    token = VIEW + secrets.token_urlsafe(24)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        # Listen here, so that the address works before the process is up.
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
        # Leave no zombie if it ends before this process.
        threading.Thread(target=child.wait, args=(None,), name="dashboard", daemon=True).start()
        return (
            f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}#/curves?run={quote(run.name)}"
        )
