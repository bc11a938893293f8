"""Replica: simulates a continuous batch, and the other calls on the same ranks, in virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...dataflow.buffer.leases import Published
from ...dataflow.buffer.segments import Segment
from ...dataflow.column import RESPONSE_VERSIONS
from ...dataflow.metrics import Mean, Metrics, Sum
from ...workers.generation.longest_first import HandOver, LongestFirst
from ..group import Call
from ..ranks.executor import CallOrder
from ..ranks.tasks import HandedOver, Reply, RowTask, Task
from .costs import Generation

LOOK_STEPS = 16
"""[steps] A replica that was asked for responses looks this often whether it has some to give up.
(Real replicas look after every step.)"""
OnReply = Callable[[float, Call, int, Reply], None]
"""Called with the time, the call, the rank and the reply."""


@dataclass(eq=False)
class Work:
    """A call that runs to its end without interruption."""

    call: Call
    seconds: float
    replies: list[tuple[int, Reply]]
    """Pairs (rank, reply)."""
    version: int | None = None
    """Version of the weights that the call receives, if any."""
    policy: str = ""
    """The leader of these weights, if the group follows several."""
    interruptible = False

    @property
    def number(self) -> int:
        return self.call.number


@dataclass(eq=False)
class Generating:
    """A call that generates. Its responses join the replica's batch."""

    call: Call
    tasks: list[tuple[int, Task]]
    """Pairs (rank, task)."""
    rows: RowTask
    lengths: list[np.ndarray]
    """[prompts] of [n] response lengths in tokens."""
    prompt_tokens: list[int]
    started: float
    so_far: Sequence[int] = ()
    """[prompts] tokens that another replica has made of the response to continue, if any."""
    to_make: list[list[int]] = field(init=False)
    """[prompts] lists of the numbers of the responses to make; earlier calls made the others."""
    left: list[int] = field(init=False)
    """[prompts] number of unfinished responses."""
    versions: list[np.ndarray] = field(init=False)
    """[prompts] of [n] versions of the responses (`row_versions`). A response is one turn."""
    queue: LongestFirst[tuple[int, int]] = field(init=False)
    """(prompt, response number) of responses that wait for the batch."""
    open_prompts: int = field(init=False)
    policy: str = field(init=False)
    ended: list[tuple[int, int]] = field(default_factory=list)
    """(prompt, response number) of finished responses that the batching delay holds back
    (`../ranks/row_io.py`)."""
    due_s: float = math.inf
    """[s] Time when the delayed responses are published."""
    hand_over: HandOver | None = None
    """A request of the driver to give up responses, until there are some to give."""
    interruptible = True

    def __post_init__(self) -> None:
        self.to_make = [
            [index for index in range(len(own)) if index not in made]
            for own, made in zip(self.lengths, self.rows.made or [()] * len(self.lengths), strict=True)
        ]
        if self.rows.begun is not None:
            self.to_make = [[number] for number in self.rows.begun.tolist()]
        self.so_far = self.so_far or [0] * len(self.lengths)
        self.left = [len(own) for own in self.to_make]
        pairs = [[(k, index) for index in own] for k, own in enumerate(self.to_make)]
        begun = {own[0]: tokens for own, tokens in zip(pairs, self.so_far, strict=True) if tokens}
        if self.rows.expected is None:
            self.queue = LongestFirst([[pair for own in pairs for pair in own]], begun=begun)
        else:
            self.queue = LongestFirst(pairs, self.rows.expected, begun)
        self.versions = [np.zeros(len(own), np.int64) for own in self.lengths]
        self.open_prompts = sum(number > 0 for number in self.left)
        self.policy = "" if self.call.node is None else self.call.node.policy

    @property
    def number(self) -> int:
        return self.call.number


class Replica:
    """One replica, or all ranks of a group that does not generate.

    Calls take turns as on a real rank (`../ranks/executor.py`). Generating calls share the batch
    and their turn; a turn is one decode step. Other calls run to their end between two decode
    steps. Consecutive decode steps in which no response ends or joins form one event.

    `at` is the latest processed boundary between two steps, or end of a call. It may be ahead of
    the clock.

    Args:
        cost: the cost of generation, or None for a group that does not generate.
        invent: returns an invented reference to a number of bytes.
        max_num_seqs: the maximum number of responses in the batch.
        begun: sample id -> tokens so far of each response that a replica has handed over. All
            replicas share it.
    """

    def __init__(
        self,
        cost: Generation | None,
        on_reply: OnReply,
        invent: Callable[[int], Segment],
        max_num_seqs: int,
        at: float = 0.0,
        begun: dict[int, int] | None = None,
    ) -> None:
        self.cost = cost
        self.at = at
        self._max_num_seqs = max_num_seqs
        self._begun = {} if begun is None else begun
        self._seconds_by_batch = cost.seconds_by_batch(max_num_seqs).tolist() if cost else []
        self._on_reply = on_reply
        self._invent = invent
        self._calls: CallOrder[Work | Generating] = CallOrder()
        self._steps = 0
        """Number of decode steps made until `at`."""
        self._running: list[tuple[int, int, int, Generating, int, int]] = []
        """Heap of responses in the batch: (last step, order, steps made before the first, call,
        prompt, response number)."""
        self._waiting: deque[Generating] = deque()
        """Calls with responses that wait for the batch."""
        self._due_s = math.inf
        """[s] Time when the first delayed responses are published."""
        self._gathering: dict[Generating, None] = {}
        self._order = itertools.count()
        self._received: defaultdict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([0], [0]))
        """Policy -> decode step when each version was received, and the versions."""

    @property
    def next_s(self) -> float:
        """[s] Time of the next event, if no new call arrives."""
        current = self._calls.next
        if isinstance(current, Work):
            return min(self.at + current.seconds, self._due_s)
        if self._running:
            step_s = self._seconds_by_batch[len(self._running)]
            return min(self.at + self._steps_to_event * step_s, self._due_s)
        return self._due_s

    def run(self, until: float) -> None:
        while (next_s := self.next_s) <= until:
            current = self._calls.next
            if next_s == self._due_s:
                self._publish_due()
            elif isinstance(current, Work):
                self._end_work(current)
            else:
                self._decode(self._steps_to_event)

    @property
    def _steps_to_event(self) -> int:
        """Number of decode steps until a response ends, or a call may have some to give up."""
        steps = self._running[0][0] - self._steps
        asked = (c for c in self._calls if isinstance(c, Generating) and c.hand_over is not None)
        return min(steps, LOOK_STEPS) if any(sum(call.left) > 1 for call in asked) else steps

    def add_call(self, call: Work | Generating, at: float) -> None:
        """Add a call. Its first turn comes when the current decode step ends."""
        self._reach_boundary(at)
        self._calls.add(call)
        if isinstance(call, Generating):
            self._waiting.append(call)
            if not call.open_prompts:
                self._finish(call, at)
            self._admit()

    def cancel_call(self, number: int, at: float, parents: Container[int] | None = None) -> None:
        """End a generating call, or only its work on the prompts `parents`, if it still runs."""
        call = self._calls.find(number)
        if not isinstance(call, Generating):
            return
        self._reach_boundary(at)
        if not call.open_prompts:  # it ended with the current step
            return
        over = {k for k, id in enumerate(call.rows.ids.tolist()) if parents is None or id in parents}
        self._running = [r for r in self._running if r[3] is not call or r[4] not in over]
        heapq.heapify(self._running)
        call.queue.drop(lambda response: response[0] in over)
        if call.ended:
            self._publish(call, at)
        for k in over:
            call.open_prompts -= call.left[k] > 0
            call.left[k] = 0
        if not call.open_prompts:
            self._finish(call, at)
        self._admit()

    def _reach_boundary(self, at: float) -> None:
        if isinstance(self._calls.next, Work):
            return
        if not self._running:
            self.at = max(self.at, at)
        elif at > self.at:
            # Changes take effect after the current decode step. The small number absorbs rounding.
            steps = math.ceil((at - self.at) / self._seconds_by_batch[len(self._running)] - 1e-9)
            self._decode(min(steps, self._running[0][0] - self._steps))

    def _decode(self, steps: int) -> None:
        """Simulate decode steps. Responses may end only in the last one."""
        self.at += steps * self._seconds_by_batch[len(self._running)]
        self._steps += steps
        ended: dict[Generating, list[tuple[int, int]]] = {}
        while self._running and self._running[0][0] == self._steps:
            _, _, first, call, k, index = heapq.heappop(self._running)
            counts = call.rows.version_of  # token whose version counts
            token = 0 if isinstance(counts, str) else int(counts * call.lengths[k][index])
            changes, versions = self._received[call.policy]
            call.versions[k][index] = versions[bisect_right(changes, first + token) - 1]
            call.left[k] -= 1
            call.queue.finish((k, index), int(call.lengths[k][index]))
            ended.setdefault(call, []).append((k, index))
        for call, responses in ended.items():
            self._gather(call, sorted(responses))
        for call in [call for call in self._calls if isinstance(call, Generating)]:
            self._give(call)
        self._admit()

    def hand_over(self, request: HandOver, at: float) -> None:
        """Let the calls that generate give up responses, now or as soon as they have some to give."""
        self._reach_boundary(at)
        for call in [call for call in self._calls if isinstance(call, Generating)]:
            call.hand_over = request
            self._give(call)
        self._admit()

    def _give(self, call: Generating) -> None:
        if (request := call.hand_over) is None or not call.open_prompts:
            return
        given = call.queue.to_give(self._steps, request)
        if not given:
            return
        call.hand_over, gone = None, set(given)
        if call.ended:  # all of them were finished before
            self._publish(call)
        starts = {(r[4], r[5]): r[2] for r in self._running if r[3] is call}
        self._running = [r for r in self._running if r[3] is not call or (r[4], r[5]) not in gone]
        heapq.heapify(self._running)
        call.queue.drop(gone.__contains__)
        rows = call.rows
        assert rows.first_children is not None
        prompts, numbers = (np.array(column, np.int64) for column in zip(*given, strict=True))
        ids = rows.first_children[prompts] + numbers
        for (k, number), id in zip(given, ids.tolist(), strict=True):
            made = self._steps - starts[k, number] if (k, number) in starts else 0
            self._begun[id] = call.so_far[k] + made
            call.left[k] -= 1
        left = [k for k in dict.fromkeys(prompts.tolist()) if not call.left[k]]
        call.open_prompts -= len(left)
        parents = rows.ids[prompts]
        handed_over = HandedOver(ids, parents, numbers, rows.ids[left])
        segment = self._invent(12 * max(1, sum(self._begun[id] for id in ids.tolist())))
        metrics: Metrics = {"moved_responses": Sum(float(len(given)))}
        rank = next((rank for rank, task in call.tasks if task.keep), call.tasks[0][0])
        reply = Reply(segment=segment, metrics=metrics, handed_over=handed_over)
        self._on_reply(self.at, call.call, rank, reply)
        if not call.open_prompts:
            self._finish(call, self.at)

    def _admit(self) -> None:
        """Let queued responses join the batch, unless another call has its turn."""
        if isinstance(self._calls.next, Work) or self.cost is None:
            return
        while self._waiting and len(self._running) < self._max_num_seqs:
            call = self._waiting[0]
            if not call.queue:
                self._waiting.popleft()
                continue
            k, index = call.queue.take(self._steps)
            # Prefill a prompt once, with its first response.
            if index == call.to_make[k][0]:
                self.at += self.cost.prefill_s * (call.prompt_tokens[k] + call.so_far[k])
            last = self._steps + int(call.lengths[k][index]) - call.so_far[k]
            # The order breaks ties, because calls cannot be compared.
            heapq.heappush(self._running, (last, next(self._order), self._steps, call, k, index))

    def _gather(self, call: Generating, responses: list[tuple[int, int]]) -> None:
        """Hold back responses (prompt, number) that ended in one step for the batching delay.
        Publish them at once if there is no delay, or if they are the call's last."""
        call.open_prompts -= sum(not call.left[k] for k in {k for k, _ in responses})
        gather_s = call.tasks[0][1].gather_s
        call.ended += responses
        if not (gather_s and call.open_prompts):
            self._publish(call)
        elif call.due_s == math.inf:
            call.due_s = self.at + gather_s
            self._due_s = min(self._due_s, call.due_s)
            self._gathering[call] = None

    def _publish_due(self) -> None:
        for call in [call for call in self._gathering if call.due_s <= self._due_s]:
            self._publish(call, call.due_s)

    def _publish(self, call: Generating, at: float | None = None) -> None:
        """Publish the call's finished responses, and finish the call after its last one."""
        responses, call.ended, call.due_s = call.ended, [], math.inf
        # The values are None, so another default marks a missing call.
        if self._gathering.pop(call, self) is None:
            self._due_s = min((other.due_s for other in self._gathering), default=math.inf)
        if responses:
            self._report(call, responses, self.at if at is None else at)
        if not call.open_prompts:
            self._finish(call, self.at)

    def _report(self, call: Generating, responses: list[tuple[int, int]], at: float) -> None:
        rows = call.rows
        assert rows.first_children is not None
        prompts, indexes = zip(*responses, strict=True)
        lengths = np.array([call.lengths[k][index] for k, index in responses], np.int64)
        ids = rows.first_children[list(prompts)] + np.array(indexes, np.int64)
        finished = [k for k in dict.fromkeys(prompts) if not call.left[k]]
        knows = str(RESPONSE_VERSIONS) in rows.writes
        versions = np.array([call.versions[k][index] for k, index in responses]) if knows else None
        tokens = float(lengths.sum())
        metrics: Metrics = {"tokens": Sum(tokens), "response_length": Mean(tokens, float(len(lengths)))}
        # A token id, its log-probability and its version count towards `BufferConfig.max_bytes`.
        segment = self._invent(12 * int(tokens))
        rank = next((rank for rank, task in call.tasks if task.keep), call.tasks[0][0])
        newest = self._received[call.policy][1][-1] if knows else -1
        published = Published(
            ids, lengths, versions, rows.ids[list(prompts)], rows.ids[finished], newest
        )
        self._on_reply(at, call.call, rank, Reply(published, segment, metrics))

    def _finish(self, call: Generating, at: float) -> None:
        self._calls.finish(call)
        for rank, _ in call.tasks:
            self._on_reply(at, call.call, rank, Reply(done=True, seconds=at - call.started))

    def _end_work(self, work: Work) -> None:
        self._calls.finish(work)
        self.at += work.seconds
        if work.version is not None:
            changes, versions = self._received[work.policy]
            changes.append(self._steps)
            versions.append(work.version)
        for rank, reply in work.replies:
            self._on_reply(self.at, work.call, rank, reply)
        self._admit()
