"""Harness functions for tests. `run` does what the column `does` of the row says."""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.dataflow.errors import NoSandboxError, SandboxError
from weft.workers.agents.failures import EpisodeFailure, NoSandbox

LOADED_IN = os.getpid()


def ask(base_url: str, api_key: str) -> Any:
    """Ask the model for a turn."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


async def run(row: Mapping[str, Any], *, base_url: str, api_key: str) -> Any:
    for _ in range(row.get("turns", 0)):
        await asyncio.to_thread(ask, base_url, api_key)
    result = ACTIONS[row["does"]](row)
    return await result if asyncio.iscoroutine(result) else result


async def hang(_: Any) -> None:
    await asyncio.sleep(3600)


def busy_loop(_: Any) -> None:
    while True:
        pass


def hold_the_interpreter(_: Any) -> None:
    """Sleep in C code, without letting another thread run."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(3600)


def flood(row: Mapping[str, Any]) -> float:
    chunk = b"x" * (1 << 20)
    for _ in range(row["mib"]):
        os.write(1, chunk)
    print("the last words", flush=True)
    return 1.0


def leave_children(row: Mapping[str, Any]) -> float:
    """Leave processes behind: a child, one in another session, and a daemon."""
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
    told, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(tell, str(os.getpid()).encode())
            time.sleep(3600)
        os._exit(0)
    pids.append(int(os.read(told, 20)))
    Path(row["file"]).write_text(json.dumps(pids))
    if row.get("then"):
        ACTIONS[row["then"]](row)
    return 1.0


def leave_a_hopping_process(row: Mapping[str, Any]) -> float:
    """Leave a process behind that replaces itself by a fork, again and again."""
    if os.fork() == 0:
        for _ in range(100_000):
            with open(row["file"], "a") as file:
                file.write("x")
            if os.fork():
                os._exit(0)
        os._exit(0)
    return 1.0


def raise_in_a_fork(_: Any) -> float:
    pid = os.fork()
    if pid == 0:
        raise RuntimeError("only in the fork")
    os.waitpid(pid, 0)
    return 1.0


def close_all_descriptors(_: Any) -> float:
    os.closerange(0, 1 << 10)
    return 1.0


def close_output(_: Any) -> float:
    os.close(1)
    os.close(2)
    return 1.0


def leave_a_thread(_: Any) -> float:
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return 1.0


def raise_another(_: Any) -> None:
    class OutOfStock(EpisodeFailure):
        pass

    raise OutOfStock("no shop is open")


def throw(error: BaseException) -> None:
    raise error


def numbers(_: Any) -> dict[str, Any]:
    import random

    import numpy as np

    return {"reward": np.float32(0.5), "drawn": [random.random(), float(np.random.random())]}


ACTIONS: dict[str, Callable[[Any], Any]] = {
    name: globals()[name]
    for name in (
        *("hang", "busy_loop", "hold_the_interpreter", "flood", "leave_children", "raise_in_a_fork"),
        "leave_a_hopping_process",
        *("close_all_descriptors", "close_output", "leave_a_thread", "raise_another", "numbers"),
    )
} | {
    "return": lambda row: row["value"],
    "return_nan": lambda _: float("nan"),
    "return_object": lambda _: object(),
    "raise": lambda _: throw(KeyError("no such tool")),
    "raise_no_sandbox": lambda _: throw(NoSandbox("the sandbox does not start")),
    "lose_its_sandbox": lambda _: throw(SandboxError("it was ended from outside")),
    "find_no_sandbox": lambda _: throw(NoSandboxError("none works on this machine")),
    "sys_exit": lambda _: sys.exit(3),
    "os_exit": lambda _: os._exit(0),
    "kill_itself": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop_the_fork_server": lambda _: os.kill(os.getppid(), signal.SIGSTOP),
    "kill_the_fork_server": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "variables": lambda row: {
        "reward": 1.0,
        "seen": json.dumps(dict(os.environ)),
        "loaded_in": LOADED_IN,
    },
    "memory_priority": lambda _: int(Path("/proc/self/oom_score_adj").read_text()),
    "threads": lambda _: threading.current_thread() is threading.main_thread(),
}
