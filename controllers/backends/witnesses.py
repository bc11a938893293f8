"""Witnesses: collect memory, stacks and exit reasons of the run's processes, from this node and
others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...dataflow.metric_names import DRIVER
from .backend import this_node
from .witness import EXIT_S, SAMPLE_S, Memory, Witness, said_by_ray

ASK_S = 10.0
"""[s] Time between two requests to other nodes."""
ANSWER_S = 8.0
"""[s] Longest wait for another node to report stacks or an exit reason."""


class Witnesses:
    """Information about the run's processes on all nodes. Stacks may be requested from another
    thread than the loop's.

    Args:
        logs: Folder of logs in the run's directory.
    """

    def __init__(self, logs: Path) -> None:
        self._own = Witness(logs)
        self._lock = threading.RLock()
        """Protects the fields below. It is never held while waiting for an answer."""
        self._coming: dict[Any, str] = {}
        """Promise of a process's node and pid -> its worker."""
        self._processes: dict[str, tuple[str, int]] = {DRIVER: (this_node(), os.getpid())}
        """Worker -> name of its node, and its pid there."""
        self._asked: dict[Any, str] = {}
        """Promise of the memory of a node -> the node."""
        self._told: dict[str, dict[str, int]] = {}
        """Other node -> processes that it was told to watch."""
        self._elsewhere: dict[str, Memory] = {}
        """Other node -> its last known memory."""
        self._looked = self._asked_at = float("-inf")

    def meet(self, who: str, process: Any) -> None:
        """Start watching the new process of a worker."""
        with self._lock:
            self.forget(who)
            self._coming[process] = who

    def forget(self, who: str) -> None:
        with self._lock:
            self._coming = {promise: other for promise, other in self._coming.items() if other != who}
            self._processes.pop(who, None)

    def look(self, hosts: Mapping[str, Any]) -> None:
        """Process answers, and take or request new readings if it is time, without waiting."""
        now = time.monotonic()
        if now - self._looked < SAMPLE_S:
            return
        self._looked = now
        self._watch()
        self._own.look()
        self._take_asked()
        told = {node: self._on(node) for node in hosts}
        if hosts and not self._asked and (now - self._asked_at >= ASK_S or told != self._told):
            self._asked_at, self._told = now, told
            self._asked = {host.look.remote(told[node]): node for node, host in hosts.items()}

    def _watch(self) -> None:
        with self._lock:
            self._take_coming()
            self._own.watch(self._on(this_node()))

    def _take_coming(self) -> None:
        import ray
        from ray.exceptions import RayError

        with self._lock:
            ready, _ = (
                ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0)
                if self._coming
                else ([], [])
            )
            for promise in ready:
                who = self._coming.pop(promise)
                try:
                    self._processes[who] = ray.get(promise)
                except RayError:  # the process died first
                    continue

    def _take_asked(self) -> None:
        import ray
        from ray.exceptions import RayError

        ready, _ = (
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
            if self._asked
            else ([], [])
        )
        for promise in ready:
            node = self._asked.pop(promise)
            try:
                self._elsewhere[node] = ray.get(promise)
            except RayError:  # its server has died and will be restarted
                continue

    def _on(self, node: str) -> dict[str, int]:
        with self._lock:
            return {who: pid for who, (at, pid) in self._processes.items() if at == node}

    def memory(self) -> dict[str, Memory]:
        """Node -> last known memory of the node and its processes."""
        return {this_node(): self._own.memory(), **self._elsewhere}

    def stacks(self, whose: Collection[str], hosts: Mapping[str, Any]) -> dict[str, str]:
        """Stack traces of workers, in words; unknown ones are left out."""
        with self._lock:
            self._watch()
            nodes = {self._processes[who][0] for who in whose if who in self._processes} - {this_node()}
            asked = {
                hosts[node].stacks.remote(self._on(node), list(whose)): node
                for node in nodes
                if node in hosts
            }
        found = self._own.stacks(whose)
        for answer in self._answers(asked):
            found |= answer
        return found

    def ending(self, who: str, error: BaseException, hosts: Mapping[str, Any]) -> str:
        """Describe how the process of a worker ended."""
        self._take_coming()
        by_ray = said_by_ray(f"{type(error).__name__}: {error}")
        with self._lock:
            node, _ = self._processes.pop(who, ("", 0))
        if node == this_node():
            said = self._own.ending(who, EXIT_S, blamed=bool(by_ray))
        else:
            asked = {hosts[node].ending.remote(who, blamed=bool(by_ray)): node} if node in hosts else {}
            said = next(iter(self._answers(asked)), "")
        return "; ".join(part for part in (by_ray, said) if part) or type(error).__name__

    def _answers(self, asked: Mapping[Any, str]) -> Iterable[Any]:
        import ray
        from ray.exceptions import RayError

        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        for promise in ready:
            try:
                yield ray.get(promise)
            except RayError:  # the node is gone
                continue

    def close(self) -> None:
        self._own.close()
