"""The three HTTP protocols: OpenAI's Chat Completions and Responses, and Anthropic's Messages.

    request body ── read ──> TurnRequest ── the gateway samples ──> Completion
    reply body   <── write ──┐                                          │
    event stream <── events ─┴──────────────────────────────────────────┘

They keep no state, and need no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from typing_extensions import Unpack

from .chat_protocol import CHAT
from .messages import Completion, TurnRequest
from .messages_protocol import MESSAGES
from .protocol_fields import Head, Json
from .responses_protocol import RESPONSES


class HttpProtocol(Protocol):
    """`CHAT`, `RESPONSES` or `MESSAGES`."""

    path: str
    """Path of its route below `/v1`."""

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        """Read the body of a request. Raises a `RequestError` that names the field."""
        ...

    def write(
        self, request: TurnRequest, completions: Sequence[Completion], **head: Unpack[Head]
    ) -> Json:
        """Return the body of the reply."""
        ...

    def events(
        self, request: TurnRequest, completions: Sequence[Completion], **head: Unpack[Head]
    ) -> Iterator[bytes]:
        """Yield the complete stream of server-sent events of a reply."""
        ...

    def error(self, status: int, kind: str, message: str) -> Json:
        """Return the body of an error."""
        ...


PROTOCOLS: tuple[HttpProtocol, ...] = (CHAT, RESPONSES, MESSAGES)
