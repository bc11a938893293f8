"""Environments for tests."""

from typing import Any


class Count:
    """Count to a number by adding."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.reward = 0.0

    def reset(self, target: int, **columns: Any) -> str | None:
        self.count, self.target = self.start, target
        return f" Begin at {self.start}." if columns.get("told", True) else None

    def add(self, number: int) -> int:
        """
        Add a number.

        Args:
            number: The number to add.

        Returns:
            The sum.
        """
        if number < 0:
            raise ValueError("only up")
        self.count += number
        self.reward = 1.0 if self.count == self.target else 0.0
        return self.count

    async def look(self) -> str:
        """Look at the count."""
        return f"It is {self.count}."

    def _secret(self) -> None: ...


class Scored:
    """Has its reward as a method, of several columns, and no tools."""

    def reset(self) -> None: ...

    async def reward(self) -> dict[str, Any]:
        return {"reward": 0.5, "parts": [1, 2]}


class WithoutReward:
    def reset(self) -> None: ...


class WithoutTypes:
    def reset(self) -> None: ...

    def move(self, to):
        """Move."""


class NeedsArguments:
    def __init__(self, url: str) -> None: ...

    def reset(self) -> None: ...
