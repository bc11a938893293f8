"""The program that compares formulas: `python -m weft.algorithms.graders.math_program`, started by `math_process.py`.

It reads requests from its standard input, a line of JSON each, and answers in kind. It ends with its input; and by an alarm of the
operating system when a request takes much longer than its deadline, because then nobody is left to kill it.
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
"""Address space that a comparison may take beyond what the program has when it starts."""


def main() -> None:
    """Answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print must not come between replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.setrecursionlimit(5000)
    equality.are_equal("x+1", "1+x")  # imports and caches
    _limit_memory()
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
        return {
            "error": f"the comparison with {request['answer'][:80]!r} ended with {type(error).__name__}"
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + MEMORY_BYTES, present + MEMORY_BYTES))


if __name__ == "__main__":
    main()
