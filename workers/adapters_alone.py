"""Which adapters (LoRA) travel alone: what an actor and the groups that follow it are told, before any process starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..dataflow.errors import UserError
from ..dataflow.graph import Handle


def agree_on_adapters(handles: Iterable[Handle]) -> None:
    """Decide for each group with an adapter that others follow whether it publishes the adapter alone or merged weights
    (`Lora.published`), and tell all of them: their `config` says it afterwards.

    Args:
        handles: of a run.

    Raises:
        UserError: an adapter is to be published alone, and a follower cannot take it.
    """
    handles = list(handles)
    for handle in handles:
        handle.config = handle.given
    for leader in handles:
        followers = [handle for handle in handles if handle.leader is leader]
        if followers and getattr(leader.given, "lora", None) is not None:
            _agree(leader, followers)


def _agree(leader: Handle, followers: list[Handle]) -> None:
    given: Any = leader.given
    refusals = [(f, reason) for f in followers if (reason := f.worker_class.refuses_adapter(f.given, given))]
    published = given.lora.published
    if published is None:
        published = "adapter" if given.dtype == "bfloat16" and not refusals else "merged"
    elif published == "adapter" and refusals:
        follower, reason = refusals[0]
        raise UserError(
            f"Lora(published='adapter') of {leader.called!r}: {follower.called!r} cannot take the adapter alone: {reason}; "
            "change that, or say published='merged'"
        )
    lora = given.lora.model_copy(update={"published": published})
    leader.config = given.model_copy(update={"lora": lora})
    for follower in followers if published == "adapter" else ():
        follower.config = follower.given.model_copy(update={"adapter": lora, "dtype": given.dtype})
