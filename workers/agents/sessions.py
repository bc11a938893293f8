"""Sessions: the exact tokens of one episode.

A session is a forest of sampled turns. Each turn holds the token ids that were given before it (a
prompt, or tool results after the parent turn) and the ids that the model sampled. A request that
continues a conversation finds its parent turn by the messages so far, reuses that turn's ids, and
renders only the new messages.

    root: given 42 ids, sampled 17
     ├─ given 9 ids (tool result), sampled 30      row 1: both turns
     └─ given 12 ids (another branch), sampled 5   row 2: the root's tokens are context here

Each path from a root to a leaf is one training row. A turn on several paths is trained once, in the
first of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...dataflow.errors import UserError
from ..generation.engine import Response
from ..kept_sets import KeptSets
from .failures import ContextFull
from .messages import Conversation, Message, TurnRequest
from .rendering import Renderer

LONG = 8
"""[characters] Length of a text that may be too long, for each token of the context."""


@dataclass(eq=False)
class Turn:
    """One sampled turn, or one that is being sampled."""

    parent: Turn | None
    given: np.ndarray
    """[G] int32 ids before the sampled ones, after those of the parent."""
    key: bytes
    """Key of the request's conversation; of the whole conversation after `end`."""
    request: TurnRequest | None
    """None for a turn of the token route."""
    same: bytes
    """Equal for equal requests."""
    max_tokens: int | None = None
    """[tokens] The client's limit."""
    stop_token_ids: tuple[int, ...] = ()
    """The client's stop tokens, besides the model's."""
    number: int = 0
    """Number among the turns with the same prompt tokens, for seeds."""
    length: int = 0
    """[tokens] Length of the prompt; `Session` sets it."""
    message: Message | None = None
    response: Response | None = None
    children: list[Turn] = field(default_factory=list)
    stop_string: str = ""
    """The client's stop string that ended the turn. The message leaves it out."""
    abandoned: bool = False
    """Whether the client hung up before it had the reply."""

    def path(self) -> list[Turn]:
        """Return the turns from the root to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def prompt_ids(self) -> np.ndarray:
        """Return the ids to sample from: [P] int32."""
        parts: list[np.ndarray] = []
        for turn in self.path():
            parts.append(turn.given)
            if turn is not self and turn.response is not None:
                parts.append(turn.response.token_ids)
        return np.concatenate(parts).astype(np.int32, copy=False)


@dataclass(frozen=True)
class SessionRow:
    """One training row of an episode, with L response tokens: sampled ones, and given ones between
    them."""

    prompt_ids: np.ndarray
    """[P] int32."""
    response_ids: np.ndarray
    """[L] int32."""
    mask: np.ndarray
    """[L] uint8: 1 for tokens that were sampled and belong to this row."""
    logprobs: np.ndarray
    """[L] float32 nats; 0 for given tokens."""
    versions: np.ndarray
    """[L] int32. Given tokens have the version of the next sampled token."""
    turn_ends: np.ndarray
    """[turns] int32: end of each trained turn, as a position in the response."""
    turns: np.ndarray
    """[turns] int32: number of each trained turn in the episode, in the order of the requests."""
    finish_reason: str
    kept_sets: KeptSets | None = None
    """The kept sets of the L tokens, whole for given tokens; None if the engine has not recorded
    them."""


class Session:
    """The turns of one episode. Not thread-safe.

    Args:
        renderer: turns messages into token ids.
        max_context: [tokens] maximum length of a prompt and its response.
        most_rows: maximum number of paths.
    """

    def __init__(self, renderer: Renderer, max_context: int, most_rows: int) -> None:
        self._renderer = renderer
        self._max_context = max_context
        self._most_rows = most_rows
        self._turns: list[Turn] = []
        """All turns, in the order of their requests."""
        self._by_key: dict[bytes, list[Turn]] = {}
        """Finished turns, by the key of their conversation."""
        self._by_ids: dict[int, dict[bytes, Turn]] = {}
        """Length of prompt and response -> digest of their ids -> finished turn."""
        self._sampled: set[str] = set()
        """Identities of the messages that the model sampled."""
        self.retokenised = 0
        """Number of rows whose context contains sampled text that was tokenised again."""

    @property
    def num_turns(self) -> int:
        return sum(turn.response is not None for turn in self._turns)

    # Turns from messages

    def begin(self, request: TurnRequest, *, retry: bool = False) -> list[Turn]:
        """Return the turns to sample for a request, one for each of its `n` choices.

        A request that the client repeats gets the turns of its first try: with `retry`, or if the
        client hung up before it had the reply.

        Raises:
            ContextFull: the conversation leaves no room for a response, or the episode has too many
                conversations.
        """
        conversation = request.conversation
        keys = _keys(conversation)
        options = (request.n, request.max_tokens, request.stop)
        same = _digest(keys[-1], repr(options))
        if repeated := self._repeated(same, request.n, retry):
            return repeated
        parent, given = self._continued(conversation, keys)
        turn = Turn(parent, _ids(given), keys[-1], request, same, request.max_tokens)
        return self._add(turn, request.n)

    def end(self, turn: Turn, response: Response) -> Message:
        """Store a sampled turn, and return its message."""
        assert turn.request is not None
        ids = response.token_ids.tolist()
        message = self._renderer.parse(ids, turn.request.conversation)
        if response.finish_reason == "stop" and ids[-1] not in self._renderer.stop_token_ids:
            message, turn.stop_string = _before_stop(message, turn.request.stop)
        turn.message = message
        identity = message.identity
        self._sampled.add(identity)
        turn.key = _digest(turn.key, identity)
        self._by_key.setdefault(turn.key, []).append(turn)
        self._store(turn, response)
        return message

    def _continued(
        self, conversation: Conversation, keys: Sequence[bytes]
    ) -> tuple[Turn | None, list[int]]:
        """Return the turn that a conversation continues, and the ids to append to it."""
        messages = conversation.messages
        parent, known = None, 0
        for number in range(len(messages) - 1, 0, -1):
            if found := self._by_key.get(keys[number]):
                # Of several equal turns, continue one that nothing has continued.
                parent, known = next((t for t in found if not t.children), found[-1]), number
                break
        # It would take seconds to render a text that is much too long, and the gateway waits for it.
        texts = [message.content for message in messages[known:] if message.role != "assistant"]
        if sum(map(len, texts)) > LONG * self._max_context and self._renderer.has_more(
            texts, self._max_context
        ):
            raise ContextFull(
                f"the new messages have more tokens than the context of the model, {self._max_context}"
            )
        given: list[int] | None = None
        if parent is not None and parent.response is not None:
            try:
                given = self._renderer.tail(conversation, known, int(parent.response.token_ids[-1]))
            except UserError:  # the template defeats it
                parent, known = None, 0
        if given is None:
            given = self._renderer.render(conversation)
        if any(m.role == "assistant" and m.identity in self._sampled for m in messages[known:]):
            self.retokenised += 1
        return parent, given

    # Turns from token ids

    def begin_tokens(
        self,
        token_ids: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        retry: bool = False,
    ) -> list[Turn]:
        """Like `begin`, for a client that sends token ids itself."""
        ids = _ids(token_ids)
        same = _digest(b"", ids.tobytes(), repr((n, max_tokens, stop_token_ids)))
        if repeated := self._repeated(same, n, retry):
            return repeated
        parent, start = None, 0
        for length, found in sorted(self._by_ids.items(), reverse=True):
            if length < len(ids) and (turn := found.get(_digest(b"", ids[:length].tobytes()))):
                parent, start = turn, length
                break
        if parent is None and any(_starts_with(ids, t.given) for t in self._turns if t.parent is None):
            self.retokenised += 1
        return self._add(Turn(parent, ids[start:], same, None, same, max_tokens, stop_token_ids), n)

    def end_tokens(self, turn: Turn, response: Response) -> None:
        """Store a sampled turn of the token route."""
        self._store(turn, response)

    # Both

    def drop(self, turn: Turn) -> None:
        """Forget a turn that was not sampled to its end."""
        self._turns.remove(turn)
        if turn.parent is not None:
            turn.parent.children.remove(turn)

    def rows(self) -> list[SessionRow]:
        """Return one row for each path to a leaf. Turns that no client has received have no row."""
        leaves = [
            turn for turn in self._turns if _is_seen(turn) and not any(map(_is_seen, turn.children))
        ]
        paths = [leaf.path() for leaf in leaves]
        with_row = {turn for path in paths for turn in path}
        left = {turn: k for k, turn in enumerate(turn for turn in self._turns if turn in with_row)}
        return [_row(path, left) for path in paths]

    def room(self, turn: Turn, max_tokens: int) -> int:
        """Return how many tokens a turn may sample: at most `max_tokens`, and as many as fit."""
        asked = turn.max_tokens or max_tokens
        return min(max_tokens, asked, self._max_context - turn.length)

    def _add(self, turn: Turn, n: int) -> list[Turn]:
        """Add n equal turns. Raises ContextFull."""
        length, parent = len(turn.given), turn.parent
        if parent is not None and parent.response is not None:
            length += parent.length + len(parent.response.token_ids)
        if length >= self._max_context:
            raise ContextFull(
                f"the conversation has {length} tokens, and the context of the model has {self._max_context}: "
                "there is no room for a response"
            )
        paths = sum(not each.children for each in self._turns if each is not parent) + n
        if paths > self._most_rows:
            raise ContextFull(
                f"the episode has {paths} conversations, and at most {self._most_rows} become rows: its harness starts a new one for "
                "each turn, or changes earlier messages"
            )
        equal = [t for t in self._turns if t.parent is parent and np.array_equal(t.given, turn.given)]
        number = max((t.number + 1 for t in equal), default=0)
        turns = [
            replace(turn, number=number + choice, length=length, children=[]) for choice in range(n)
        ]
        self._turns += turns
        if parent is not None:
            parent.children += turns
        return turns

    def _repeated(self, same: bytes, n: int, retry: bool) -> list[Turn]:
        """Return the turns of an equal request whose client has hung up; with `retry`, or those of the
        last equal request. Empty if there is none."""
        equal = [turn for turn in self._turns if turn.same == same]
        turns = [turn for turn in equal if turn.abandoned][:n] or (equal[-n:] if retry else [])
        if len(turns) < n:  # the others were aborted
            return []
        for turn in turns:
            turn.abandoned = False
        return turns

    def _store(self, turn: Turn, response: Response) -> None:
        turn.response = response
        ids = np.concatenate([turn.prompt_ids(), response.token_ids]).astype(np.int32, copy=False)
        self._by_ids.setdefault(len(ids), {})[_digest(b"", ids.tobytes())] = turn


def _ids(values: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def _is_seen(turn: Turn) -> bool:
    return turn.response is not None and not turn.abandoned


def _before_stop(message: Message, stops: Sequence[str]) -> tuple[Message, str]:
    """Return a message up to the stop string that ended it, as APIs do, and this string."""
    for name, text in (("content", message.content), ("reasoning", message.reasoning)):
        if found := [(text.rfind(stop), stop) for stop in stops if stop in text]:
            start, stop = min(found)
            return replace(message, **{name: text[:start]}), stop
    return message, ""


def _row(path: Sequence[Turn], left: dict[Turn, int]) -> SessionRow:
    """Return the row of a path. `left` has the numbers of turns that no earlier row trains. The row's
    own turns are removed from it."""
    ids: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    versions: list[np.ndarray] = []
    mask: list[np.ndarray] = []
    kept: list[KeptSets] = []
    ends: list[int] = []
    own: list[int] = []
    length, reason = 0, ""
    for turn in path:
        response = turn.response
        assert response is not None
        given = turn.given if turn is not path[0] else turn.given[:0]
        is_own = turn in left
        ids += [given, response.token_ids]
        logprobs += [np.zeros(len(given), np.float32), response.logprobs]
        versions += [np.full(len(given), response.versions[0], np.int32), response.versions]
        mask += [
            np.zeros(len(given), np.uint8),
            np.full(len(response.token_ids), is_own, np.uint8),
        ]
        if response.kept_sets is not None:
            kept += [KeptSets.whole(len(given)), response.kept_sets]
        length += len(given) + len(response.token_ids)
        if is_own:
            ends.append(length)
            own.append(left.pop(turn))
        reason = response.finish_reason
    return SessionRow(
        path[0].given,
        np.concatenate(ids).astype(np.int32, copy=False),
        np.concatenate(mask),
        np.concatenate(logprobs).astype(np.float32, copy=False),
        np.concatenate(versions).astype(np.int32, copy=False),
        np.array(ends, np.int32),
        np.array(own, np.int32),
        reason,
        KeptSets.concat(kept) if kept else None,
    )


def _starts_with(ids: np.ndarray, start: np.ndarray) -> bool:
    return len(ids) >= len(start) and np.array_equal(ids[: len(start)], start)


# Keys of conversations


def _keys(conversation: Conversation) -> list[bytes]:
    """Return a key for each number of leading messages, from 0 to all of them."""
    settings = _canonical([conversation.tools, conversation.template_arguments])
    keys = [_digest(b"", settings)]
    for message in conversation.messages:
        keys.append(_digest(keys[-1], message.identity))
    return keys


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return repr(value)


def _digest(*parts: bytes | str) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.digest()
