"""Process of a rank: its class travels to it by value, so that it has its environment before it imports anything of Weft or of the user.

Ray can give a process an environment, too. But then it starts each by way of another one, which imports Ray as well (0.7 s of a CPU), and
writes the variables to its logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def rank_process() -> type:
    """The class of a rank's Ray actor. It is made in a function, so that it is pickled by value; its methods refer to nothing outside."""

    class RankProcess:
        def __init__(self, environment: dict[str, str], rank: bytes) -> None:
            import os
            import pickle
            import sys

            os.environ.update(environment)
            first = environment["PYTHONPATH"].split(os.pathsep)
            sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
            torch = sys.modules.get("torch")
            if torch is not None:  # Ray gave us a process in which a task of the script has run
                torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
            rank_class, *arguments = pickle.loads(rank)
            self._rank = rank_class(*arguments)

        def take_port(self, *arguments: Any) -> Any:
            return self._rank.take_port(*arguments)

        def begin(self, rendezvous: Any, offload: bool) -> Any:
            return self._rank.begin(rendezvous, offload=offload)

        def connect(self, peers: Any) -> None:
            self._rank.connect(peers)

        def call(self, task: Any) -> Iterator[Any]:
            yield from self._rank.call(task)

        def cancel(self, number: int) -> None:
            self._rank.cancel(number)

        def give_up(self, number: int, sample_ids: list[int]) -> None:
            self._rank.give_up(number, sample_ids)

        def close(self) -> None:
            self._rank.close()

    return RankProcess
