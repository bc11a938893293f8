"""The policies of a generation engine: its model or, over this model, one adapter for each actor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...dataflow.errors import GenerationError, WeightSyncError, nearest

NOT_WHOLE = (
    "no complete version of the weights has arrived, or a later update failed: nothing is generated"
)
"""Error of an engine that must not generate, because its weights are not one complete version."""


class Policies:
    """Versions of an engine's policies, and whether their weights are complete.

        lacking ──an update ends──> whole
           ^──an update begins────────┘

    An engine without adapters has one policy, its model, which is whole from the start. A policy
    that lacks weights rejects requests; the other policies continue.

    >>> policies = Policies(["terse", "polite"])
    >>> with policies.update("terse", version=3):
    ...     pass
    >>> policies.whole("terse"), policies.versions
    ('terse', {'terse': 3, 'polite': 0})

    Args:
        adapters: names of the actors whose adapters the engine serves; none for a whole model.
    """

    def __init__(self, adapters: Iterable[str] = ()) -> None:
        names = tuple(adapters)
        self.versions = dict.fromkeys(names or ("",), 0)
        """Policy -> version of its weights; 0 means the weights in the model's folder."""
        self._lacking = set(names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.versions)

    @property
    def version(self) -> int:
        """The newest version of any policy."""
        return max(self.versions.values())

    def named(self, policy: str) -> str:
        """Return the name of a request's or version's policy. With one policy, any name is its name.
        Raises a GenerationError if there are several and none has this name."""
        if len(self.versions) == 1:
            return next(iter(self.versions))
        if policy not in self.versions:
            raise GenerationError(
                f"the engine serves no policy {policy!r}{nearest(policy, self.names)}; it serves {', '.join(self.names)}"
            )
        return policy

    def whole(self, policy: str) -> str:
        """Return the name of a request's policy. Raises a GenerationError if it lacks weights."""
        name = self.named(policy)
        if name in self._lacking:
            raise GenerationError(
                NOT_WHOLE if len(self.versions) == 1 else f"policy {name!r}: {NOT_WHOLE}"
            )
        return name

    def check(self, policies: Iterable[str]) -> None:
        """Raise a GenerationError if one of these policies lacks weights."""
        for policy in policies if self._lacking else ():
            self.whole(policy)

    def discard(self) -> None:
        """Let all policies reject requests until their weights arrive again."""
        self._lacking = {*self.versions}

    @contextmanager
    def update(self, policy: str, version: int) -> Iterator[str]:
        """While open, the policy rejects requests; afterwards it has this version. If the update
        raises an error, it rejects requests until a later one. Yields the policy's name."""
        try:
            name = self.named(policy)
        except GenerationError as error:
            raise WeightSyncError(f"weights version {version}: {error}") from error
        self._lacking.add(name)
        yield name
        self._lacking.discard(name)
        self.versions[name] = version
