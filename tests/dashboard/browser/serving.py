"""A dashboard in a separate process."""

import subprocess
import sys
from pathlib import Path


class Serving:
    """A `weft dashboard` process."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        command = [
            sys.executable,
            "-m",
            "weft",
            "dashboard",
            str(folder),
            "--token",
            "t",
            "--port",
            str(port),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> str:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        return said[said.index("http") :].strip()

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
