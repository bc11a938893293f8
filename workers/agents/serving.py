"""Serving: a rollout rank's side of agents. It opens episodes at the gateway, samples the turns of any
session, and makes rows of finished episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.batch import Batch
from ...dataflow.column import (
    EPISODE_ID,
    EPISODE_ROWS,
    EPISODE_TOKENS,
    FINISH_REASON,
    IDENTITY,
    PARENT_ID,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    RESPONSE_VERSIONS,
    REWARD,
    TEMPERATURE,
    TURN_ENDS,
    TURN_REWARDS,
)
from ...dataflow.errors import GatewayLost, GenerationError
from ...dataflow.metrics import Mean, Metrics, Sum
from ..generation.engine import GenerationEngine, GenerationRequest, Requests
from .harness import Harness
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
        """Unfinished episodes, each with its own `Open`, to open them again at a new gateway."""
        self._ended: dict[int, Ended] = {}
        self._turns: dict[int, int] = {}
        """Ticket in the engine -> turn at the gateway."""

    def open(self, opened: Open) -> None:
        """Start episodes, or join those that another rank has begun."""
        for request in opened.episodes:
            self._opened[request.episode_id] = replace(opened, episodes=(request,))
        if self._link is None:
            self._reconnect()  # opens them
        else:
            self._link.send(opened)

    def take_ended(self, episode_ids: Collection[int]) -> list[Ended]:
        """Return those of these episodes that have ended since the last call."""
        return [self._ended.pop(id) for id in episode_ids if id in self._ended]

    def close(self, episode_ids: Collection[int]) -> None:
        """Give up episodes. Without open ones, take no further turns."""
        given_up = [id for id in episode_ids if self._opened.pop(id, None) is not None]
        for id in episode_ids:
            self._ended.pop(id, None)
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

    def work(self, patience_s: float) -> None:
        """Take the gateway's requests and make one step of the engine. Without a turn to sample, wait
        for a request, at most `patience_s`.

        Raises:
            GatewayLost: the gateway is gone, and no other answers in time.
        """
        try:
            link = self._link or self._reconnect()
            records = link.take()
            if not records and not self._turns:
                link.wait(patience_s)
                records = link.take()
            for record in records:
                self._handle(record, link)
            if self._turns:
                for response in self._requests.step():
                    link.send(Sampled(self._turns.pop(response.ticket), response))
        except GatewayLost:
            self._forget_link()
            self._reconnect()

    def _handle(self, record: Any, link: Link) -> None:
        if isinstance(record, Sample):
            if not self._opened:  # sent before the gateway knew that this rank rests
                return
            request = GenerationRequest(
                record.turn, record.prompt_ids, record.seed, stop_token_ids=record.stop_token_ids
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
        elif isinstance(record, Ended) and self._opened.pop(record.episode_id, None) is not None:
            self._ended[record.episode_id] = record

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
                for opened in self._opened.values():
                    link.send(opened)
                self._link = link
            except GatewayLost:
                if time.monotonic() > by_s:
                    raise
                time.sleep(AGAIN_S)
        return self._link


# Rows


def to_rows(
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
    return Batch.of(
        **{name: column for name, column in columns.items() if name not in sampling.leaves_out}
    )


def _turn_rewards(end: Ended) -> list[np.ndarray]:
    """Return the rewards of the turns of each row. Rows come in the order of their turns."""
    turns = np.cumsum([len(row.turn_ends) for row in end.rows])
    rewards = end.result.get(str(TURN_REWARDS), np.zeros(turns[-1] if len(turns) else 0))
    return np.split(np.asarray(rewards, np.float32), turns[:-1])


def _ragged(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return np.concatenate(parts) if parts else np.zeros(0, np.int32), offsets


def metrics_of(ended: Sequence[Ended]) -> Metrics:
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


def opened(
    model: str,
    max_context: int,
    sampling: Sampling,
    harness: Harness,
    episodes: Sequence[EpisodeRequest],
) -> Open:
    return Open(model, max_context, sampling, harness.plan(), tuple(episodes))


def json_row(row: Mapping[str, Any]) -> dict[str, Any]:
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
