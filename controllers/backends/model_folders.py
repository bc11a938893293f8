"""Copy model folders from the driver's node to the nodes whose ranks need them.

A setting names a folder, or a Hugging Face id in the cache of the driver's node. If a rank's node
has the same files at the same path or in its cache, the rank uses them. Otherwise one process on
that node copies the folder into its cache (`workers/models/node_folder.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...dataflow.errors import UserError, WorkerError
from ...dataflow.graph import Handle
from ...workers.models.node_folder import (
    FolderListing,
    cached_folder,
    copy_of,
    is_model_folder,
    list_folder,
    pieces_of,
    read_piece,
)

AHEAD = 4
"""Number of pieces of a file that a rank requests ahead."""
PIECE_TIMEOUT_S = 120.0
"""[s] Longest wait for a piece."""


class _FolderSource:
    """A Ray actor on the driver's node that reads folders for ranks on other nodes."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = frozenset(folders)

    def listing(self, folder: Path, weights: bool) -> FolderListing:
        self._check(folder)
        return list_folder(folder, weights=weights)

    def piece(self, folder: Path, name: str, start: int) -> tuple[bytes, bytes]:
        self._check(folder)
        # A requested name must not lead out of the folder.
        return read_piece(folder / Path(name).name, start)

    def _check(self, folder: Path) -> None:
        if folder not in self._folders:
            raise ValueError(f"{folder} is not the folder of a model of this run")


@dataclass(frozen=True)
class ModelFolders:
    """The model folders in a group's settings, for its ranks on other nodes."""

    node: str
    """Ray's id of the driver's node."""
    source: Any
    named: Mapping[str, Path] = field(default_factory=dict)
    """Setting -> folder on the driver's node."""

    def on_node(self, node: str, config: Any, advance: Callable[[], None]) -> Any:
        """Return the group's settings with this node's model folders. Copies missing folders.

        Args:
            node: Ray's id of this node.
            advance: Called whenever a copy grows.

        Raises:
            UserError: This node cannot write a copy.
            WorkerError: The driver's node does not answer.
        """
        if node == self.node:
            return config
        found = {
            name: self._here(getattr(config, name), name, folder, advance)
            for name, folder in self.named.items()
        }
        changed = {name: path for name, path in found.items() if path is not None}
        return config.model_copy(update=changed) if changed else config

    def _here(self, given: Any, setting: str, folder: Path, advance: Callable[[], None]) -> Any:
        """Return a copy of the folder, in the setting's type; None if this node has the folder."""
        weights = _has_weights(setting)
        listing: FolderListing = self._ask(self.source.listing.remote(folder, weights), folder)
        own = Path(given).expanduser()
        try:
            own = own if own.is_dir() else cached_folder(given, weights=weights) or own
            if list_folder(own, weights=weights).contents == listing.contents:
                return None
        except (OSError, UserError):  # the folder is missing or damaged
            pass
        copy = copy_of(listing, lambda name, size: self._pieces(folder, name, size), advance=advance)
        return type(given)(str(copy)) if isinstance(given, str) else copy

    def _pieces(self, folder: Path, name: str, size: int) -> Iterator[tuple[bytes, bytes]]:
        asked: deque[Any] = deque()
        for start in pieces_of(size):
            asked.append(self.source.piece.remote(folder, name, start))
            if len(asked) == AHEAD:
                yield self._ask(asked.popleft(), folder)
        while asked:
            yield self._ask(asked.popleft(), folder)

    def _ask(self, promise: Any, folder: Path) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            return ray.get(promise, timeout=PIECE_TIMEOUT_S)
        except GetTimeoutError:
            raise WorkerError(
                f"the driver's node sent nothing of {folder} for {PIECE_TIMEOUT_S:.0f} s"
            ) from None
        except RayError as error:
            raise WorkerError(f"the driver's node cannot send {folder}: {error}") from None


class SentFolders:
    def __init__(self, handles: Mapping[str, Handle], node: str) -> None:
        self._named = {name: named_folders(handle.config) for name, handle in handles.items()}
        self._node = node
        self._source: Any = None

    def of(self, group: str) -> ModelFolders | None:
        """Model folders of a group; None if its settings name none."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not self._named[group]:
            return None
        if self._source is None:
            here: Any = NodeAffinitySchedulingStrategy(self._node, soft=False)
            remote: Any = ray.remote
            options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": 2 * AHEAD}
            folders = {folder for named in self._named.values() for folder in named.values()}
            self._source = remote(_FolderSource).options(**options).remote(folders)
        return ModelFolders(self._node, self._source, self._named[group])

    def kill(self) -> None:
        import ray

        if self._source is not None:
            ray.kill(self._source)
            self._source = None


def named_folders(config: Any) -> dict[str, Path]:
    """Return setting -> folder on this node, for the models and tokenizers in a group's settings.
    Hugging Face ids map to folders in this node's cache.

    Raises:
        UserError: The weight index of a cached model is damaged.
    """
    named: dict[str, Path] = {}
    for name, value in dict(config).items():
        if not isinstance(value, (str, Path)):
            continue
        if is_model_folder(folder := Path(value).expanduser().absolute()):
            named[name] = folder
        elif "model" in name or not _has_weights(name):
            cached = cached_folder(value, weights=_has_weights(name))
            named |= {name: cached} if cached is not None else {}
    return named


def _has_weights(setting: str) -> bool:
    return "tokenizer" not in setting
