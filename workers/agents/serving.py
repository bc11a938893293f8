"""Serving: a rollout rank's side of agents. It opens episodes at the gateway, samples the turns of any
session, and makes rows of finished episodes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.batch import Batch
from ...dataflow.buffer.rows import MAX_CHILDREN
from ...dataflow.column import (
    DRAW_PATH,
    EPISODE_ID,
    EPISODE_ROWS,
    EPISODE_TOKENS,
    FINISH_REASON,
    GROUP_ID,
    IDENTITY,
    MADE_BEFORE,
    PARENT_ID,
    POLICY,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    RESPONSE_VERSIONS,
    REWARD,
    SAMPLE_ID,
    TEMPERATURE,
    TURN_ENDS,
    TURN_REWARDS,
)
from ...dataflow.errors import GatewayLost, GenerationError, SampleError, UserError
from ...dataflow.metrics import Mean, Metrics, Sum
from ..generation.engine import GenerationEngine, GenerationRequest, Requests, stable_hash
from ..kept_sets import kept_columns
from ..worker import Children
from .harness import Harness, as_harness
from .link import (
    AGAIN_S,
    CONNECT_S,
    Abort,
    Close,
    Ended,
    EpisodeRequest,
    Link,
    Open,
    Rest,
    Sample,
    Sampled,
)


class EpisodeServer:
    """Samples the turns that the gateway sends, for all open calls of a rank.

    Args:
        engine: samples the turns. Other calls may share it.
        connect: connects to the gateway.
    """

    def __init__(self, engine: GenerationEngine, connect: Callable[[], Link]) -> None:
        self._requests = Requests(engine)
        self._connect = connect
        self._link: Link | None = None
        self._opened: dict[int, Open] = {}
        """Unfinished episode -> the last call that has opened it, as its `Open`."""
        self._ended: list[tuple[Open, Ended]] = []
        self._turns: dict[int, int] = {}
        """Ticket in the engine -> turn at the gateway."""

    def open(self, opened: Open) -> None:
        """Start a call's episodes, or join those that another rank has begun. An earlier call on this
        rank that has the same episodes, and has not heard yet that it is cancelled, loses them."""
        self._opened |= dict.fromkeys((one.episode_id for one in opened.episodes), opened)
        if self._link is not None:
            try:
                self._link.send(opened)
            except GatewayLost:  # it has died since the last call
                self._forget_link()
        if self._link is None:
            self._reconnect()  # opens them

    def take_ended(self, opened: Open) -> list[Ended]:
        """Return the call's episodes that have ended since the last time."""
        found = [ended for of, ended in self._ended if of is opened]
        self._ended = [one for one in self._ended if one[0] is not opened]
        return found

    def close(self, opened: Open, episode_ids: Collection[int]) -> None:
        """Give up episodes of a call. Without open ones of any call, take no further turns."""
        given_up = [id for id in episode_ids if self._opened.get(id) is opened]
        for id in given_up:
            del self._opened[id]
        self._ended = [
            (of, one) for of, one in self._ended if of is not opened or one.episode_id not in episode_ids
        ]
        try:
            if self._link is not None and given_up:
                self._link.send(Close(tuple(given_up)))
            if self._link is not None and not self._opened:
                # The gateway gives the turns of other ranks' sessions to a rank that still serves.
                self._requests.abort([*self._turns])
                self._turns.clear()
                self._link.send(Rest())
        except GatewayLost:
            self._forget_link()

    @property
    def is_sampling(self) -> bool:
        return bool(self._turns)

    def work(self) -> None:
        """Take the gateway's requests, and make one step of the engine if there is a turn to sample.

        Raises:
            GatewayLost: the gateway is gone, and no other answers in time.
        """
        try:
            link = self._link or self._reconnect()
            for record in link.take():
                self._handle(record, link)
            if self._turns:
                for response in self._requests.step():
                    link.send(Sampled(self._turns.pop(response.ticket), response))
        except GatewayLost:
            self._forget_link()
            self._reconnect()

    def _handle(self, record: Any, link: Link) -> None:
        if isinstance(record, Sample):
            request = GenerationRequest(
                record.turn,
                record.prompt_ids,
                record.seed,
                stop_token_ids=record.stop_token_ids,
                policy=record.policy,
            )
            try:
                ticket = self._requests.submit(request, record.sampling)
            except (GenerationError, ValueError) as error:
                link.send(Sampled(record.turn, None, str(error)))
            else:
                self._turns[ticket] = record.turn
        elif isinstance(record, Abort):
            tickets = [ticket for ticket, turn in self._turns.items() if turn == record.turn]
            self._requests.abort(tickets)
            for ticket in tickets:
                del self._turns[ticket]
        elif isinstance(record, Ended) and (opened := self._opened.pop(record.episode_id, None)):
            self._ended.append((opened, record))

    def _forget_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._requests.abort([*self._turns])
        self._turns.clear()

    def _reconnect(self) -> Link:
        """Connect, and open the unfinished episodes."""
        by_s = time.monotonic() + CONNECT_S
        while self._link is None:
            try:
                link = self._connect()
                for opened in {id(one): one for one in self._opened.values()}.values():
                    left = [one for one in opened.episodes if self._is_open(one, opened)]
                    link.send(replace(opened, episodes=tuple(left)))
                self._link = link
            except GatewayLost:
                if time.monotonic() > by_s:
                    raise
                time.sleep(AGAIN_S)
        return self._link

    def _is_open(self, request: EpisodeRequest, opened: Open) -> bool:
        return self._opened.get(request.episode_id) is opened


# One call


class EpisodeCall:
    """The episodes of one call on some prompts.

    A child's number is its episode's number times the most rows of an episode, plus its row's number.
    So the numbers of children that were made before tell which episodes are finished.

    Args:
        prompts: any columns.
        n: episodes of each prompt.
        new_seed: `RolloutWorker._seed`.
        policy: the actor whose adapter samples, if the engine serves several; otherwise "".

    Raises:
        UserError: a prompt cannot have as many episodes.
    """

    def __init__(
        self,
        prompts: Batch,
        harness: Harness,
        n: int,
        sampling: Sampling,
        new_seed: Callable[[int, Sequence[int], bytes, int], int | None],
        policy: str = "",
    ) -> None:
        if not 1 <= n <= MAX_CHILDREN:
            raise UserError(f"n={n}: a prompt has at most {MAX_CHILDREN} episodes")
        self._harness, self._n, self._sampling, self._policy = harness, n, sampling, policy
        self._most_rows = MAX_CHILDREN // n
        self._ids = prompts.numpy(SAMPLE_ID)
        groups, number = prompts.numpy(GROUP_ID), len(prompts)
        draws = prompts[DRAW_PATH].to_pylist() if DRAW_PATH in prompts else [[]] * number
        made = prompts[MADE_BEFORE].to_pylist() if MADE_BEFORE in prompts else [[]] * number
        self._requests: list[EpisodeRequest] = []
        self.pending: dict[int, tuple[int, int]] = {}
        """Episode -> its prompt's row and its number among the prompt's episodes."""
        self._has_rows = [bool(numbers) for numbers in made]
        self._failures: dict[int, str] = {}
        """Row of a prompt -> why its last dropped episode failed."""
        for row, columns in enumerate(prompts.record.to_pylist()):
            shown = _json_row(columns)
            content = json.dumps(shown, sort_keys=True).encode()
            before = {child // self._most_rows for child in made[row] or ()}
            for index in (index for index in range(n) if index not in before):
                episode_id = stable_hash(int(self._ids[row]), *draws[row], index)
                seed = new_seed(int(groups[row]), draws[row], content, index)
                self._requests.append(EpisodeRequest(episode_id, seed, shown))
                self.pending[episode_id] = row, index
        self._left = Counter(row for row, _ in self.pending.values())

    def opened(self, model: str, max_context: int, tool_parser: str, reasoning_parser: str) -> Open:
        """Return the request to start the episodes."""
        plan, requests = self._harness.plan(), tuple(self._requests)
        more = tool_parser, reasoning_parser, self._policy
        return Open(model, max_context, self._sampling, plan, requests, self._most_rows, *more)

    def take(self, ended: Sequence[Ended]) -> tuple[Children, Metrics] | None:
        """Return the rows and metrics of episodes that have ended; None without any.

        Raises:
            UserError: no episode of the harness can run.
        """
        if not ended:
            return None
        kept: list[Ended] = []
        parents: list[int] = []
        numbers: list[int] = []
        finished: list[int] = []
        for end in ended:
            row, index = self.pending.pop(end.episode_id)
            self._left[row] -= 1
            if end.fatal:
                raise UserError(end.failure)
            if end.rows and end.scored:
                self._has_rows[row] = True
                kept.append(end)
                parents.append(int(self._ids[row]))
                first = index * self._most_rows
                numbers += range(first, first + len(end.rows))
            else:
                self._failures[row] = end.failure or "the harness sampled no turn"
            if not self._left[row] and self._has_rows[row]:
                finished.append(int(self._ids[row]))
        batch = _to_rows(kept, parents, self._harness, self._sampling)
        if self._policy:
            batch = batch.with_columns(**{str(POLICY): [self._policy] * len(batch)})
        children = Children(batch, np.array(numbers, np.int64), np.array(finished, np.int64))
        return children, _metrics_of(ended)

    def give_up(self, sample_ids: Collection[int]) -> list[int]:
        """Forget the unfinished episodes of these prompts, and return their ids."""
        lost = set(np.flatnonzero(np.isin(self._ids, list(sample_ids))).tolist()) if sample_ids else ()
        given_up = [id for id, (row, _) in self.pending.items() if row in lost]
        for id in given_up:
            del self.pending[id]
        return given_up

    def check(self) -> None:
        """Raise a SampleError if all episodes of a prompt were dropped."""
        failed = [row for row in self._failures if not self._has_rows[row]]
        if failed:
            raise SampleError(
                f"sample {self._ids[failed[0]]}: all of its {self._n} episodes failed, the last one: {self._failures[failed[0]]}",
                self._ids[failed].tolist(),
            )


# Rows


def episode_columns(harness: object, sampling: Sampling) -> tuple[str, ...]:
    """Return the columns of the rows of episodes."""
    columns = (RESPONSE_VERSIONS, RESPONSE_MASK, TURN_ENDS, FINISH_REASON, TEMPERATURE)
    episode = (EPISODE_ID, EPISODE_ROWS, EPISODE_TOKENS)
    tokens = (str(PROMPT_IDS), str(RESPONSE_IDS), *sampling.writes)
    return (*tokens, *map(str, (*columns, *episode)), *as_harness(harness).writes)


def _to_rows(
    ended: Sequence[Ended], parent_ids: Sequence[int], harness: Harness, sampling: Sampling
) -> Batch:
    """Return the rows of these episodes. `parent_ids` are the sample ids of their prompts."""
    rows = [
        (end, parent, row) for end, parent in zip(ended, parent_ids, strict=True) for row in end.rows
    ]
    trained = {end.episode_id: sum(int(row.mask.sum()) for row in end.rows) for end in ended}
    columns: dict[str, Any] = {
        str(PARENT_ID): np.array([parent for _, parent, _ in rows], np.int64),
        str(EPISODE_ID): np.array([end.episode_id for end, _, _ in rows], np.int64),
        str(EPISODE_ROWS): np.array([len(end.rows) for end, _, _ in rows], np.int32),
        str(EPISODE_TOKENS): np.array([trained[end.episode_id] for end, _, _ in rows], np.int32),
        str(PROMPT_IDS): _ragged([row.prompt_ids for _, _, row in rows]),
        str(RESPONSE_IDS): _ragged([row.response_ids for _, _, row in rows]),
        str(RESPONSE_LOGPROBS): _ragged([row.logprobs for _, _, row in rows]),
        str(RESPONSE_VERSIONS): _ragged([row.versions for _, _, row in rows]),
        str(RESPONSE_MASK): _ragged([row.mask for _, _, row in rows]),
        str(TURN_ENDS): _ragged([row.turn_ends for _, _, row in rows]),
        str(FINISH_REASON): [row.finish_reason for _, _, row in rows],
        str(TEMPERATURE): np.full(len(rows), sampling.temperature or 1.0, np.float32),
    }
    for name in harness.writes:
        # A failed episode that counts has reward 0 and no other values.
        columns[name] = [
            end.result.get(name, 0.0 if name == str(REWARD) else None) for end, _, _ in rows
        ]
    if str(TURN_REWARDS) in harness.writes:
        columns[str(TURN_REWARDS)] = [part for end in ended for part in _turn_rewards(end)]
    kept = [row.kept_sets for _, _, row in rows if row.kept_sets is not None]
    if sampling.truncates and len(kept) == len(rows):
        columns |= kept_columns(kept)
    return Batch.of(**columns)


def _turn_rewards(end: Ended) -> list[np.ndarray]:
    """Return the rewards of the turns of each row, which need not be successive."""
    number = sum(len(row.turns) for row in end.rows)
    rewards = np.asarray(end.result.get(str(TURN_REWARDS), np.zeros(number)), np.float32)
    return [rewards[row.turns] for row in end.rows]


def _ragged(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return np.concatenate(parts) if parts else np.zeros(0, np.int32), offsets


def _metrics_of(ended: Sequence[Ended]) -> Metrics:
    """Return the metrics of ended episodes."""
    kept = [end for end in ended if end.rows and end.scored]
    number = float(len(kept))
    tokens = float(sum(int(row.mask.sum()) for end in kept for row in end.rows))
    cut = float(sum(row.finish_reason == "length" for end in kept for row in end.rows[-1:]))
    found: Metrics = {
        "tokens": Sum(tokens),
        "response_length": Mean(tokens, number),
        "truncation_rate": Mean(cut, number),
        "turns": Mean(float(sum(end.turns for end in kept)), number),
        "episode_rows": Mean(float(sum(len(end.rows) for end in kept)), number),
        "retokenised": Sum(float(sum(end.retokenised for end in ended))),
        "dropped_episodes": Sum(float(len(ended)) - number),
    }
    found["reward"] = Mean(sum(float(end.result.get(str(REWARD), 0.0)) for end in kept), number)
    for end in ended:
        if end.where:
            name = f"{end.where}_failures"
            before = found.get(name)
            found[name] = Sum(1.0 + (before.value if before is not None else 0.0))
    return found


def _json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a prompt that a harness can read: all but token ids, images and the
    identity of the row, which another run of the same prompt would not repeat."""
    return {name: value for name, value in row.items() if name not in _UNSEEN and _is_json(value)}


_UNSEEN = frozenset(map(str, (PROMPT_IDS, RESPONSE_IDS, *IDENTITY)))


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_json(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)
