"""A disk that crashes a test's process on demand, and loses unsynced data when the power fails."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from weft.dataflow.runs.files import Disk


class Crash(BaseException):
    """The process is killed, or the power fails. No code may catch it."""


@dataclass
class FragileDisk(Disk):
    """Crashes before, during or after its n-th operation; `lose_power` undoes everything unsynced.

    It only records which data is synced, and leaves the real disk unsynced.
    """

    crash_at: int | None = None
    when: str | float = "before"
    """Either "before", "after", or the share of a write that is done."""
    operations: list[str] = field(default_factory=list)
    dead: bool = False
    paths: dict[int, Path] = field(default_factory=dict)
    synced: dict[Path, int] = field(default_factory=dict)
    renames: list[tuple[Path, Path, bytes | None]] = field(default_factory=list)
    """Renames that may be undone, with the replaced content."""
    cut: dict[Path, bytes] = field(default_factory=dict)
    """Content of files whose truncation may be undone."""

    def _reach(self, what: str) -> str | float | None:
        if self.dead:
            raise Crash
        self.operations.append(what)
        if len(self.operations) - 1 != self.crash_at:
            return None
        self.dead = True
        if self.when == "before":
            raise Crash
        return self.when

    def open(self, path: Path) -> int:
        when = self._reach("open")
        size = path.stat().st_size if path.exists() else 0
        descriptor = super().open(path)
        self.paths[descriptor] = path
        self.synced.setdefault(path, size)
        self._end(when)
        return descriptor

    def write(self, descriptor: int, data: bytes) -> None:
        when = self._reach("write")
        self.cut.pop(self.paths[descriptor], None)
        super().write(descriptor, data[: int(when * len(data))] if isinstance(when, float) else data)
        self._end(when)

    def sync(self, descriptor: int) -> None:
        when = self._reach("sync")
        path = self.paths[descriptor]
        self.synced[path] = path.stat().st_size
        self.cut.pop(path, None)
        self._end(when)

    def truncate(self, descriptor: int, size: int) -> None:
        when = self._reach("truncate")
        path = self.paths[descriptor]
        if path.stat().st_size > size:
            self.cut[path] = path.read_bytes()
        super().truncate(descriptor, size)
        self.synced[path] = min(self.synced[path], size)
        self._end(when)

    def rename(self, source: Path, target: Path) -> None:
        when = self._reach("rename")
        before = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        self.synced[target] = self.synced.pop(source)
        self.paths = {d: target if path == source else path for d, path in self.paths.items()}
        self.renames.append((source, target, before))
        self._end(when)

    def sync_folder(self, folder: Path) -> None:
        when = self._reach("sync_folder")
        self.renames.clear()
        self._end(when)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        del self.paths[descriptor]

    def _end(self, when: str | float | None) -> None:
        if when is not None:
            raise Crash

    def bury(self) -> None:
        """Close the descriptors, as the kernel does for a dead process."""
        for descriptor in list(self.paths):
            self.close(descriptor)

    def lose_power(self, chance: random.Random) -> None:
        self.bury()
        for source, target, before in reversed(self.renames):
            if chance.random() < 0.5 and target.exists():
                target.rename(source)
                self.synced[source] = self.synced.pop(target)
                if before is not None:
                    target.write_bytes(before)
        for path, content in self.cut.items():
            if chance.random() < 0.5:
                path.write_bytes(content)
                self.synced[path] = len(content)
        for path, size in self.synced.items():
            if path.exists() and (now := path.stat().st_size) > size:
                with path.open("r+b") as file:
                    file.truncate(chance.randint(size, now))
