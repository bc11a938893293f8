"""PromptQueue: the state of a curriculum in one run.

    queued ──drawn──> in flight ──outcome──> queued, in the pool of its solve rate
       ^                  │  └───outcome passes a gate───> retired
       ├──────lost────────┘                                   │
       └──────────────── return ──────────────────────────────┘

- Every prompt of the source is queued, in flight or retired.
- The next prompt depends on the seed and the outcomes so far. The order of outcomes within a step
  does not matter. A checkpoint stores the whole state, so a resumed run draws the same prompts.
- Drawing a prompt and recording an outcome cost O(log prompts). Start, checkpoint and metrics cost
  O(prompts).
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from ..errors import UserError
from ..source import positions
from .curriculum import NEW, Curriculum

RECENT = 2
"""[groups] Number of groups in a prompt's solve rate."""
LEAST = 0.05
"""Smallest mean of `follow` of a source, as a share of the largest one."""
STATE = "prompts.arrow"
"""File of the state in a checkpoint."""
_FORMAT = 1


@dataclass
class _Counts:
    """Counts since the start of the run."""

    returned: int = 0
    """Prompts that returned from retirement."""
    returned_early: int = 0
    """Returns because no other prompt was left to draw."""
    lost: int = 0
    """Groups that ended without an outcome."""


class PromptQueue(Iterator[int]):
    """Yields source rows without end, in the order that a curriculum gives them.

    - A *queue* holds the prompts of one source and pool. Each queue is passed through again and again,
      each pass in a new random order if `shuffle` is set; a prompt that comes back waits for the next pass.
    - Sources, and then the pools of a source, take turns in proportion to their weights (smooth
      weighted round-robin). Empty ones are left out.
    - If all queues are empty, the prompt that retired first returns. Without retired prompts, the
      queues get the prompts in flight.

    Args:
        table: rows of the source.
        name: name of the source, for messages.
        seed, shuffle: see `positions`, whose order the first pass has.
    """

    def __init__(
        self, curriculum: Curriculum, table: pa.Table, *, name: str, seed: int, shuffle: bool
    ) -> None:
        self.curriculum = curriculum
        self._seed, self._shuffle = seed, shuffle
        self.source_names, self._source = curriculum.sources_of(table, name)
        self.pool_names = [NEW, *(pool.name for pool in curriculum.pools)] if curriculum.pools else [NEW]
        size, self._depth = len(table), max([RECENT, *(gate.times for gate in curriculum.retire)])
        self._solved = np.zeros((size, self._depth), np.uint16)
        """[prompts, groups] Solved responses of the last groups, newest first."""
        self._votes = np.zeros((size, self._depth), np.uint16)
        self._pool = np.zeros(size, np.int16)
        self._pass = np.zeros(size, np.int32)
        """[prompts] Pass that draws the prompt from its queue."""
        self._queue = self._source * len(self.pool_names)
        """[prompts] Queue of a queued prompt, otherwise -1."""
        self._retired = np.full(size, -1, np.int32)
        """[prompts] Step of a prompt's retirement, or -1."""
        self._gate = np.zeros(size, np.int16)
        self._in_flight: Counter[int] = Counter()
        self._again: deque[int] = deque()
        """Prompts to draw before the queues."""
        self._counts = _Counts()
        queues = len(self.source_names) * len(self.pool_names)
        self._current = [0] * queues
        """Pass of the prompt that each queue gave last."""
        self._source_credit = [0.0] * len(self.source_names)
        self._pool_credit = [0.0] * queues
        first = np.arange(size)
        if shuffle:
            first = np.empty(size, np.int64)
            order = positions(size, seed, shuffle=True)
            first[[next(order) for _ in range(size)]] = np.arange(size)
        self._first_pass = first
        """[prompts] Place of each prompt in the first pass."""
        self._fill()

    def _fill(self) -> None:
        """Make everything that follows from the arrays."""
        self._heaps: list[list[tuple[int, int, int]]] = [[] for _ in self._current]
        self._lengths = [0] * len(self._current)
        for prompt in np.flatnonzero(self._queue >= 0).tolist():
            queue = int(self._queue[prompt])
            number = int(self._pass[prompt])
            self._heaps[queue].append((number, self._place(number, prompt), prompt))
            self._lengths[queue] += 1
        for heap in self._heaps:
            heapq.heapify(heap)
        self._due: list[tuple[int, int]] = []
        """Heap of (step, prompt) of the prompts that return by themselves."""
        for prompt in np.flatnonzero(self._retired >= 0).tolist():
            self._plan_return(prompt)
        active = self._retired < 0
        self._active = np.bincount(self._source[active], minlength=len(self.source_names)).tolist()
        self._tallies: list[Counter[tuple[int, int]]] = [Counter() for _ in self.source_names]
        """For each source: (solved, votes) of recent groups -> number of active prompts."""
        self._factors: list[float] | None = None
        if self.curriculum.follow is not None:
            recent = zip(self._source.tolist(), *self._recent(), active.tolist(), strict=True)
            for source, solved, votes, is_active in recent:
                if is_active:
                    self._tallies[source][solved, votes] += 1

    # Draw prompts

    def __iter__(self) -> PromptQueue:
        return self

    def __next__(self) -> int:
        prompt = self._again.popleft() if self._again else self._draw()
        self._in_flight[prompt] += 1
        return prompt

    def _draw(self) -> int:
        while not any(self._lengths):
            self._refill()
        pools = len(self.pool_names)
        lengths = [
            sum(self._lengths[s * pools : (s + 1) * pools]) for s in range(len(self.source_names))
        ]
        weights = [w * (number > 0) for w, number in zip(self._weights(), lengths, strict=True)]
        first = _take_turn(self._source_credit, weights) * pools
        shares = [1.0, *(pool.share for pool in self.curriculum.pools)]
        shares = [share * (self._lengths[first + k] > 0) for k, share in enumerate(shares)]
        credit = self._pool_credit[first : first + pools]
        queue = first + _take_turn(credit, shares)
        self._pool_credit[first : first + pools] = credit
        return self._pop(queue)

    def _pop(self, queue: int) -> int:
        heap = self._heaps[queue]
        while True:
            number, _, prompt = heapq.heappop(heap)
            # Entries of prompts that left the queue otherwise are stale.
            if self._queue[prompt] == queue and self._pass[prompt] == number:
                self._current[queue] = number
                self._leave_queue(prompt)
                return prompt

    def _leave_queue(self, prompt: int) -> None:
        self._lengths[int(self._queue[prompt])] -= 1
        self._queue[prompt] = -1

    def _push(self, prompt: int, number: int) -> None:
        queue = int(self._source[prompt]) * len(self.pool_names) + int(self._pool[prompt])
        self._queue[prompt], self._pass[prompt] = queue, number
        heapq.heappush(self._heaps[queue], (number, self._place(number, prompt), prompt))
        self._lengths[queue] += 1

    def _place(self, number: int, prompt: int) -> int:
        """Return a prompt's place in a pass, as a sort key."""
        if number == 0 or not self._shuffle:
            return int(self._first_pass[prompt])
        return xxhash.xxh3_64_intdigest(f"{self._seed} {number} {prompt}".encode())

    def _next_pass(self, prompt: int) -> int:
        queue = int(self._source[prompt]) * len(self.pool_names) + int(self._pool[prompt])
        return self._current[queue] + 1

    def _refill(self) -> None:
        retired = np.flatnonzero(self._retired >= 0)
        if len(retired):
            first = retired[self._retired[retired] == self._retired[retired].min()]
            self._counts.returned_early += 1
            self._return(int(first[self._pass[first].argmin()]))
            return
        for prompt in self._in_flight:
            self._push(prompt, self._next_pass(prompt))

    def begin(self, step: int, at_work: Iterable[int]) -> None:
        """Prepare to draw prompts for a step: return retired prompts that are due, and prompts whose
        group ended without an outcome.

        Args:
            at_work: source rows of the groups in flight, one for each group.
        """
        there = Counter(at_work)
        for prompt, number in list(self._in_flight.items()):
            if (gone := number - there[prompt]) <= 0:
                continue
            self._counts.lost += gone
            self._leave_flight(prompt, gone)
            # In the present pass it would be drawn at once, and a prompt that always fails for ever.
            if not self._in_flight[prompt] and self._is_idle(prompt):
                self._push(prompt, self._next_pass(prompt))
        while self._due and self._due[0][0] <= step:
            due, prompt = heapq.heappop(self._due)
            if self._retired[prompt] >= 0 and self._due_step(prompt) == due:
                self._return(prompt)

    def draw_again(self, prompts: Iterable[int]) -> None:
        """Draw these prompts first. A resumed run discarded their groups."""
        self._again.extend(prompts)
        for prompt in self._again:
            if self._queue[prompt] >= 0:
                self._leave_queue(prompt)
            if self._retired[prompt] >= 0:
                self._set_active(prompt, step=-1)

    def _leave_flight(self, prompt: int, number: int = 1) -> None:
        self._in_flight[prompt] -= number
        if self._in_flight[prompt] <= 0:
            del self._in_flight[prompt]

    def _is_idle(self, prompt: int) -> bool:
        waits = self._queue[prompt] >= 0 or prompt in self._again
        return not waits and self._retired[prompt] < 0

    # Outcomes

    def record(self, prompt: int, solved: int, votes: int, step: int) -> None:
        """Record the outcome of a prompt's group: `solved` of `votes` responses."""
        if prompt in self._in_flight:
            self._leave_flight(prompt)
        before, queue = int(self._pass[prompt]), int(self._pool[prompt])
        if votes >= self.curriculum.votes:
            self._tally(prompt, -1)
            self._solved[prompt, 1:] = self._solved[prompt, :-1]
            self._votes[prompt, 1:] = self._votes[prompt, :-1]
            self._solved[prompt, 0], self._votes[prompt, 0] = solved, votes
            self._pool[prompt] = self._pool_of(prompt)
            self._tally(prompt, 1)
            gate = self._passed_gate(prompt)
            if gate is not None and self._retired[prompt] < 0:
                self._gate[prompt] = gate
                if self._queue[prompt] >= 0:
                    self._leave_queue(prompt)
                self._set_active(prompt, step=step)
                self._plan_return(prompt)
            elif gate is None and self._retired[prompt] >= 0:
                # Another group was in flight when the prompt retired, and tells the opposite.
                self._counts.returned += 1
                self._set_active(prompt, step=-1)
        if self._is_idle(prompt) and not self._in_flight[prompt]:
            # In its own queue, the prompt has had its turn in the pass that it was drawn in.
            same = queue == self._pool[prompt]
            next_pass = self._next_pass(prompt)
            self._push(prompt, max(before + 1, next_pass - 1) if same else next_pass)

    def _groups(self, prompt: int) -> list[tuple[int, int]]:
        pairs = zip(self._solved[prompt].tolist(), self._votes[prompt].tolist(), strict=True)
        return [(solved, votes) for solved, votes in pairs if votes]

    def _passed_gate(self, prompt: int) -> int | None:
        groups = self._groups(prompt)
        return next((k for k, g in enumerate(self.curriculum.retire) if g.passes(groups)), None)

    def _pool_of(self, prompt: int) -> int:
        recent = self._groups(prompt)[:RECENT]
        solved, votes = sum(s for s, _ in recent), sum(v for _, v in recent)
        if not votes or not self.curriculum.pools:
            return 0
        fits = (k for k, pool in enumerate(self.curriculum.pools, 1) if solved / votes <= pool.up_to)
        return next(fits)

    def _set_active(self, prompt: int, step: int) -> None:
        """Retire a prompt at a step, or with -1 make it active again."""
        by = 1 if step < 0 else -1
        self._active[int(self._source[prompt])] += by
        # Retired prompts have no tally.
        if step >= 0:
            self._tally(prompt, -1)
        self._retired[prompt] = step
        if step < 0:
            self._tally(prompt, 1)

    def _plan_return(self, prompt: int) -> None:
        if (due := self._due_step(prompt)) is not None:
            heapq.heappush(self._due, (due, prompt))

    def _due_step(self, prompt: int) -> int | None:
        after = self.curriculum.retire[int(self._gate[prompt])].return_after
        return None if after is None else int(self._retired[prompt]) + after

    def _return(self, prompt: int) -> None:
        self._counts.returned += 1
        self._set_active(prompt, step=-1)
        if not self._in_flight[prompt]:
            self._push(prompt, self._next_pass(prompt))

    # Weights of sources

    def _weights(self) -> list[float]:
        given = self.curriculum.weights
        names = zip(self.source_names, self._active, strict=True)
        base = [float(given[name]) if given else float(max(active, 1)) for name, active in names]
        if self.curriculum.follow is None:
            return base
        if self._factors is None:
            means = [self._mean_of_follow(tally) for tally in self._tallies]
            least = LEAST * max(means) or 1.0
            self._factors = [max(mean, least) for mean in means]
        return [weight * factor for weight, factor in zip(base, self._factors, strict=True)]

    def _mean_of_follow(self, tally: Counter[tuple[int, int]]) -> float:
        """Return the mean of `follow` over prompts, or 0 without prompts. Uses the rate of
        succession, (solved + 1) / (votes + 2), because few votes say little."""
        follow, number = self.curriculum.follow, tally.total()
        assert follow is not None
        values: list[float] = []
        # Sorted, so that the sum does not depend on the order of outcomes.
        for (solved, votes), prompts in sorted(tally.items()):
            rate = (solved + 1) / (votes + 2)
            value = follow(rate)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                name = getattr(follow, "__name__", repr(follow))
                raise UserError(
                    f"Curriculum(follow={name}): {name}({rate:.3f}) returned {value!r}; it must return a number of at least 0"
                )
            values.append(prompts * value)
        return math.fsum(values) / number if number else 0.0

    def _tally(self, prompt: int, by: int) -> None:
        if self.curriculum.follow is None or self._retired[prompt] >= 0:
            return
        recent = self._groups(prompt)[:RECENT]
        key = sum(s for s, _ in recent), sum(v for _, v in recent)
        tally = self._tallies[int(self._source[prompt])]
        tally[key] += by
        if not tally[key]:
            del tally[key]
        self._factors = None

    def _recent(self) -> tuple[list[int], list[int]]:
        """Return the solved responses and the votes of each prompt's recent groups, [prompts]."""
        solved, votes = (a[:, :RECENT].sum(axis=1).tolist() for a in (self._solved, self._votes))
        return solved, votes

    # Metrics

    def metrics(self) -> dict[str, float]:
        """Return the metrics `curriculum/...` of a step."""
        active = self._retired < 0
        votes = self._votes[:, :RECENT].sum(axis=1)
        solved = self._solved[:, :RECENT].sum(axis=1)
        measured = votes > 0
        rates = solved / np.maximum(votes, 1)
        found: dict[str, float] = {
            "curriculum/active": float(active.sum()),
            "curriculum/retired": float((~active).sum()),
            "curriculum/unmeasured": float((~measured).sum()),
            "curriculum/returned": float(self._counts.returned),
            "curriculum/returned_early": float(self._counts.returned_early),
            "curriculum/lost_groups": float(self._counts.lost),
        }
        if measured.any():
            found["curriculum/solve_rate"] = float(rates[measured].mean())
        if len(self.pool_names) > 1:
            prompts = np.bincount(self._pool[active], minlength=len(self.pool_names)).tolist()
            named = zip(self.pool_names, prompts, strict=True)
            found |= {f"curriculum/in_{name}": float(number) for name, number in named}
        if self.curriculum.sources is not None:
            weights = self._weights()
            for source, name in enumerate(self.source_names):
                shown = re.sub(r"[^\w.-]", "_", name)
                found[f"curriculum/weight_of_{shown}"] = weights[source] / math.fsum(weights)
                own = measured & (self._source == source)
                if own.any():
                    found[f"curriculum/solve_rate_of_{shown}"] = float(rates[own].mean())
        return found

    # Checkpoints

    @property
    def _shape(self) -> dict[str, Any]:
        """Settings that determine the saved queues."""
        return {
            "sources": self.source_names,
            "pools": [dict(pool) for pool in self.curriculum.pools],
            "gates": [dict(gate) for gate in self.curriculum.retire],
        }

    def table(self) -> pa.Table:
        """Return the state: a row for each prompt, and the rest in the metadata of the schema."""
        size = len(self._queue)
        flight = np.zeros(size, np.int16)
        for prompt, number in self._in_flight.items():
            flight[prompt] = number

        def groups(values: np.ndarray) -> pa.Array:
            return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), self._depth)

        names = pa.array(self.pool_names)
        rest = {
            "format": _FORMAT,
            **self._shape,
            "current": self._current,
            "source_credit": self._source_credit,
            "pool_credit": self._pool_credit,
            "counts": asdict(self._counts),
        }
        return pa.table(
            {
                "pool": pa.DictionaryArray.from_arrays(pa.array(self._pool), names),
                "solved": groups(self._solved),
                "votes": groups(self._votes),
                "retired_at": pa.array(self._retired),
                "gate": pa.array(self._gate),
                "in_flight": pa.array(flight),
                "queue": pa.array(self._queue.astype(np.int32)),
                "pass": pa.array(self._pass),
            }
        ).replace_schema_metadata({"weft": json.dumps(rest)})

    def restore(self, table: pa.Table) -> None:
        """Continue from the state that `table` returned for the same prompts.

        Pools and gates may have changed since. Then prompts move to their present pools, retired
        prompts return, and all queues begin a new pass.

        Raises:
            UserError: the state is of other prompts, or of a later version of Weft.
        """
        rest = json.loads((table.schema.metadata or {}).get(b"weft", b"{}"))
        if len(table) != len(self._queue) or rest.get("format") != _FORMAT:
            raise UserError(
                f"{STATE} has {len(table):,} prompts in format {rest.get('format')}; the data has {len(self._queue):,}, and this version "
                f"of Weft reads format {_FORMAT}"
            )
        for name, own in (("solved", self._solved), ("votes", self._votes)):
            column = table.column(name).combine_chunks()
            saved = column.values.to_numpy().reshape(len(table), column.type.list_size)
            kept = min(saved.shape[1], self._depth)
            own[:, :kept] = saved[:, :kept]
        self._pass[:] = table.column("pass").to_numpy()
        flight = table.column("in_flight").to_numpy()
        self._in_flight = Counter({int(p): int(flight[p]) for p in np.flatnonzero(flight)})
        self._counts = _Counts(**rest["counts"])
        queue, retired = table.column("queue").to_numpy(), table.column("retired_at").to_numpy()
        if {name: rest[name] for name in self._shape} == json.loads(json.dumps(self._shape)):
            self._queue[:], self._retired[:] = queue, retired
            self._gate[:] = table.column("gate").to_numpy()
            self._pool[:] = table.column("pool").combine_chunks().indices.to_numpy()
            self._current = list(rest["current"])
            self._source_credit = list(rest["source_credit"])
            self._pool_credit = list(rest["pool_credit"])
        else:
            self._pool[:] = [self._pool_of(prompt) for prompt in range(len(table))]
            own = self._source * len(self.pool_names) + self._pool
            self._queue[:] = np.where((queue >= 0) | (retired >= 0), own, -1)
            self._current = [int(self._pass.max(initial=0))] * len(self._current)
        self._fill()


def _take_turn(credit: list[float], weights: Sequence[float]) -> int:
    """Return the index whose turn it is by its weight, and update the credits. Indices of weight 0
    are left out (smooth weighted round-robin).

    >>> credit = [0.0, 0.0]
    >>> [_take_turn(credit, [3, 1]) for _ in range(8)]
    [0, 0, 1, 0, 0, 0, 1, 0]
    """
    total, best = sum(weights), -1
    for k, weight in enumerate(weights):
        if weight:
            credit[k] += weight / total
            if best < 0 or credit[k] > credit[best]:
                best = k
    credit[best] -= 1
    return best


def read_state(folder: Path) -> pa.Table | None:
    """Return the state in the folder of a checkpoint, or None without a curriculum."""
    path = folder / STATE
    if not path.exists():
        return None
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def write_state(folder: Path, table: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(folder / STATE), "wb") as file,
        pa.ipc.new_file(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table)
