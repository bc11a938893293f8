"""Compares formulas in a process that `math.py` starts.

It reads requests from standard input, one line of JSON each, and writes replies in the same format.
An alarm ends this process if a request takes much longer than its deadline, in case the parent is
no longer there to kill it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from . import equality

MEMORY_BYTES = 4 * 2**30
"""[bytes] Address space that comparisons may add to the process."""


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # keep the output of libraries out of the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.setrecursionlimit(5000)
    equality.are_equal("x+1", "1+x")
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + MEMORY_BYTES, present + MEMORY_BYTES))
    replies.write(b'{"ready": true}\n')
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * request["deadline_s"] + 5)
        replies.write(json.dumps(_reply(request)).encode() + b"\n")
        signal.setitimer(signal.ITIMER_REAL, 0)


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"right": equality.is_right(request["response"], request["answer"])}
    except (MemoryError, RecursionError) as error:
        answer, what = request["answer"][:80], type(error).__name__
        return {"error": f"the comparison with {answer!r} ended with {what}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
