"""EpisodeRunner: runs the episodes of a harness, with deadlines, in the gateway's event loop.

    runner = EpisodeRunner(harness.plan(), scratch, log)
    await runner.start()
    result = await runner.run(key, row, base_url=...)   # {"reward": 1.0}, or raises an EpisodeFailure
    with runner.sampling(key): ...                       # around each turn that the model samples
    await runner.close()

An episode's clock:

    setting up ──sampling──> sampling ──> working ──sampling──> ... ──> ended
    setup_deadline_s         no limit     turn_deadline_s, and deadline_s over all turns

A late episode is killed with all processes that it started. `harness_process.py` has the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...dataflow.column import LARGEST_REWARD, REWARD
from ...dataflow.errors import UserError, nearest
from .failures import (
    Discarded,
    EpisodeFailure,
    EpisodeTimedOut,
    HarnessDied,
    HarnessRaised,
    InvalidResult,
    SetupTimedOut,
    TurnTimedOut,
)
from .harness import HarnessPlan
from .protocol_fields import read_json

LINE_BYTES = 64 << 20
"""[bytes] Maximum size of a message of the fork server, which limits its parts."""
KILL_S = 20.0
"""[s] Time limit for the end of a killed process. After it, Weft kills the processes above."""
STARTS = 3
"""Attempts to load a harness whose process dies meanwhile."""
SHOWN_OUTPUT = 2000
"""[characters] The end of an episode's output that an error message shows."""


class EpisodeRunner:
    """Runs episodes of one harness.

    Args:
        plan: the harness.
        scratch: a folder for the files of episodes. Each episode's own folder in it is removed.
        log: file for the output of the harness.
    """

    def __init__(self, plan: HarnessPlan, scratch: Path, log: Path) -> None:
        self._plan = plan
        self._scratch = scratch
        self._log = log
        for folder in (scratch, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        self._places = asyncio.Semaphore(plan.concurrency)
        self._starting = asyncio.Lock()
        self._server: _ForkServer | None = None
        self._episodes: dict[str, Clock] = {}
        self._kinds: dict[str, str] = {}
        """Column -> what the results so far have in it."""

    async def start(self) -> None:
        """Load the harness. Raises a UserError if that fails, so that a run can end at once."""
        for left in reversed(range(STARTS)):
            try:
                await self._running_server()
                return
            except EpisodeFailure as failure:
                if not (left and isinstance(failure, HarnessDied)):  # it may have been killed
                    said = f"harness {self._plan.title} cannot be loaded: {failure}"
                    raise UserError(said) from None

    async def run(self, episode_key: str, row: Mapping[str, Any], *, base_url: str) -> Mapping[str, Any]:
        """Run an episode. If this is cancelled, the episode's processes are killed.

        Args:
            episode_key: the key of the episode's session, which the harness gets as API key.
            row: the prompt's columns, as JSON values.
            base_url: address of the session, up to `/v1`.

        Returns:
            "reward", and the other declared columns.

        Raises:
            EpisodeFailure: the episode has no result.
        """
        async with self._places:
            server = await self._running_server()
            clock = Clock(self._plan, asyncio.get_running_loop())
            self._episodes[episode_key] = clock
            number, ended = server.start_episode(episode_key, row, base_url)
            try:
                await asyncio.wait([ended, clock.late], return_when=asyncio.FIRST_COMPLETED)
                if clock.late.done():
                    # The result of a late episode does not count, even if it came at the last moment.
                    raise _with_output(clock.late.result(), await server.kill_episode(number), self._log)
                return self._result_in(ended.result())
            finally:
                clock.close()
                if self._episodes.get(episode_key) is clock:  # not of another attempt
                    del self._episodes[episode_key]
                server.forget_episode(number)

    @contextlib.contextmanager
    def sampling(self, episode_key: str) -> Iterator[None]:
        """Stop the clock of an episode while the model samples a turn."""
        clock = self._episodes.get(episode_key)
        if clock is None:  # it has ended
            yield
            return
        clock.stop()
        try:
            yield
        finally:
            clock.go_on()

    async def close(self) -> None:
        """Kill all episodes and end the harness's processes."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _running_server(self) -> _ForkServer:
        async with self._starting:
            if self._server is None or self._server.has_ended:
                await self.close()
                self._server = await _ForkServer.start(self._plan, self._scratch, self._log)
            return self._server

    def _result_in(self, ended: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns in an episode's last message. Raises an EpisodeFailure."""
        if not ended["result"]:
            status = ended["status"]
            hint = " (out of memory, or killed by another process)" if status == "signal 9" else ""
            died = HarnessDied(f"the harness ended before it returned: {status}{hint}")
            raise _with_output(died, ended, self._log)
        said = read_json(ended["result"].encode())
        if "failure" in said:
            raise _with_output(_failure_in(said), ended, self._log)
        found = result_of(said["value"], self._plan.writes)
        for name, value in found.items():
            kind = kind_of(name, value)
            if kind and kind != self._kinds.setdefault(name, kind):
                raise InvalidResult(
                    f"column {name!r} has a {kind}, {value!r:.100}, and had a {self._kinds[name]} in an earlier episode; "
                    "a column has values of one kind"
                )
        return found


def _failure_in(said: Mapping[str, Any]) -> EpisodeFailure:
    try:
        return EpisodeFailure.from_json(said)
    except KeyError:  # a class of the user
        return HarnessRaised(f"{said['failure']}: {said['text']}")


def _with_output(failure: EpisodeFailure, said: Mapping[str, Any], log: Path) -> EpisodeFailure:
    """Add the end of the harness's output to a failure's message."""
    output = said["output"].strip()[-SHOWN_OUTPUT:]
    if not output:
        return failure
    return type(failure)(f"{failure}\nthe end of its output (log: {log}):\n{output}")


def result_of(value: Any, writes: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the columns in a harness's result.

    Raises:
        Discarded: the result is None.
        InvalidResult: it is neither a finite number, nor a dictionary with the columns in `writes`.

    >>> result_of(1, ("reward",)), result_of({"reward": True, "steps": [3]}, ("reward", "steps"))
    ({'reward': 1.0}, {'reward': 1.0, 'steps': [3]})
    >>> result_of({"reward": 1, "step": 3}, ("reward", "steps"))
    Traceback (most recent call last):
    weft.workers.agents.failures.InvalidResult: the harness returned {'reward': 1, 'step': 3} without 'steps'; did you mean 'step'?
    """
    reward = str(REWARD)
    if value is None:
        raise Discarded("the harness returned None")
    columns = value if isinstance(value, Mapping) else {reward: value}
    shown = repr(value)[:300]
    for name in writes:
        if name not in columns:
            raise InvalidResult(f"the harness returned {shown} without {name!r}{nearest(name, columns)}")
    for name in columns:
        if name not in writes:
            raise InvalidResult(
                f"the harness returned {shown}, but writes={writes!r} does not declare {name!r}"
            )
    number = columns[reward]
    if not is_reward(number):
        raise InvalidResult(f"the reward must be a finite number, not {shown}")
    return {**columns, reward: float(number)}


def is_reward(value: Any) -> bool:
    """Whether a value is a finite number, also in a float32 column."""
    return isinstance(value, int | float) and abs(value) <= LARGEST_REWARD


def kind_of(name: str, value: Any) -> str:
    """Return what a column has; "" for None and an empty list, which go with anything.

    Raises:
        InvalidResult: an Arrow column cannot hold the value.

    >>> [kind_of("steps", value) for value in (3, 0.5, True, "three", [1, 2], [])]
    ['number', 'number', 'truth value', 'text', 'list of number', '']
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
        return "number"
    if isinstance(value, str):
        return "text"
    kinds = {kind_of(name, each) for each in value} - {""} if isinstance(value, list) else None
    if kinds is None or len(kinds) > 1:
        raise InvalidResult(
            f"column {name!r} has {value!r:.100}, and must have a number, a text, or a list of values of one kind; "
            "give other values as JSON text"
        )
    return f"list of {kinds.pop()}" if kinds else ""


class Clock:
    """Measures how long the harness of an episode works. Sets `late` at a missed deadline."""

    def __init__(self, plan: HarnessPlan, loop: asyncio.AbstractEventLoop) -> None:
        self._plan = plan
        self._loop = loop
        self._sampling = 0
        self._turns = 0
        self._worked_s = 0.0
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.late: asyncio.Future[EpisodeFailure] = self._loop.create_future()
        self._start()

    def stop(self) -> None:
        self._sampling += 1
        self._turns += 1
        if self._timer is not None:  # not while another turn is sampled
            self._timer.cancel()
            self._timer = None
            # Work before the first turn has its own deadline.
            self._worked_s += self._loop.time() - self._since if self._turns > 1 else 0.0

    def go_on(self) -> None:
        self._sampling -= 1
        if not self._sampling:
            self._start()

    def close(self) -> None:
        self._sampling = -1  # turns that are still sampled start it no more
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        if self.late.done():
            return
        plan, left = self._plan, self._plan.deadline_s - self._worked_s
        if not self._turns:
            left, failure = plan.setup_deadline_s, SetupTimedOut
            said = f"the harness asked for no turn within setup_deadline_s={plan.setup_deadline_s:g}"
        elif left < plan.turn_deadline_s:
            failure = EpisodeTimedOut
            said = f"the harness worked for longer than deadline_s={plan.deadline_s:g} over {self._turns} turns"
        else:
            left, failure = plan.turn_deadline_s, TurnTimedOut
            said = f"the harness worked for longer than turn_deadline_s={plan.turn_deadline_s:g} after turn {self._turns}"
        self._since = self._loop.time()
        self._timer = self._loop.call_later(left, lambda: self.late.set_result(failure(said)))


class _ForkServer:
    """The processes of a harness, as the gateway sees them."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._started = 0
        self._ends: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._listening: asyncio.Task[None] | None = None
        self.has_ended = False
        """Whether no episode can start, because the fork server has ended or cannot be reached."""

    @classmethod
    async def start(cls, plan: HarnessPlan, scratch: Path, log: Path) -> _ForkServer:
        """Start the processes and load the harness. Raises an EpisodeFailure if that fails."""
        folder = Path(tempfile.mkdtemp(prefix="harness_", dir=scratch))
        ours, theirs = socket.socketpair()
        program = Path(__file__).with_name("harness_process.py")
        arguments = (str(os.getpid()), str(theirs.fileno()), str(log.absolute()), str(folder))
        try:
            process = await asyncio.create_subprocess_exec(
                *(plan.python, "-P", "-u", str(program), *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=plan.environment(folder),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise HarnessDied(f"its process cannot be started: {error}") from None
        finally:
            theirs.close()
        server = cls(process, folder)
        try:
            server._reader, server._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
            server._send(plan.program)
            async with asyncio.timeout(plan.setup_deadline_s):
                said = await server._receive()
        except asyncio.CancelledError:
            process.kill()  # all processes below end with it
            raise
        except TimeoutError:
            said = SetupTimedOut(
                f"it did not load within setup_deadline_s={plan.setup_deadline_s:g}"
            ).to_json()
        if "ready" in said:
            server._listening = asyncio.create_task(server._listen())
            return server
        if not said:
            await server._wait()
        await server.close()
        if not said:
            raise HarnessDied(f"its process ended with {server.status}; its log is {log}")
        raise _with_output(_failure_in(said), {"output": "", **said}, log)

    @property
    def status(self) -> str:
        """How the processes ended, such as "exit code 1"; empty while they run."""
        code = self._process.returncode
        if code is None:
            return ""
        # The guard ends as the fork server did, with 128 and the number for a signal.
        return (
            f"signal {-code}"
            if code < 0
            else f"signal {code - 128}"
            if code > 128
            else f"exit code {code}"
        )

    def start_episode(
        self, key: str, row: Mapping[str, Any], base_url: str
    ) -> tuple[int, asyncio.Future[Mapping[str, Any]]]:
        """Start an episode. Return its number and its last message, with its status and result."""
        self._started += 1
        end = self._ends[self._started] = asyncio.get_running_loop().create_future()
        self._send({"start": self._started, "key": key, "row": row, "base_url": base_url})
        return self._started, end

    async def kill_episode(self, number: int) -> Mapping[str, Any]:
        """Kill the processes of an episode. Return its last message."""
        self._send({"kill": number})
        await asyncio.wait([self._ends[number]], timeout=KILL_S)
        if not self._ends[number].done():
            # The fork server does not run, for example because the harness stopped it.
            await self._kill()
        return await self._ends[number]

    def forget_episode(self, number: int) -> None:
        if not self._ends.pop(number).done():
            self._send({"kill": number})

    async def close(self) -> None:
        """Kill all episodes and end the processes."""
        await self._kill()
        self._writer.close()  # a fork server that is stopped would never close its end
        if self._listening is not None:
            await self._listening
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait(self) -> None:
        """Wait for the end of processes whose connection has ended."""
        self._writer.close()  # ends a fork server that still runs
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), KILL_S)
        await self._kill()

    async def _kill(self) -> None:
        for end in (self._process.terminate, self._process.kill):
            with contextlib.suppress(ProcessLookupError):
                end()  # the guard kills all others before it ends
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), KILL_S)
                return

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _receive(self) -> Mapping[str, Any]:
        """Return the next message; an empty one if the processes have ended."""
        try:
            return json.loads(await self._reader.readline() or b"{}")
        except (OSError, ValueError):  # the connection broke, or its content
            return {}

    async def _listen(self) -> None:
        while said := await self._receive():
            end = self._ends.get(said["end"])
            if end is not None and not end.done():
                end.set_result(said)
        self.has_ended = True
        await self._wait()
        for end in self._ends.values():
            if not end.done():
                end.set_result(
                    {"status": f"its fork server ended with {self.status}", "result": "", "output": ""}
                )
