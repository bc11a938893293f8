"""Process of a rank: its class travels to it by value, so that it has its environment before it imports anything of Weft or of the user.

Ray can give a process an environment, too. But then it starts each by way of another one, which imports Ray as well (0.7 s of a CPU), and
writes the variables to its logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import isfunction, isgeneratorfunction
from typing import Any


def rank_process(rank_class: type) -> type:
    """A class for a Ray actor: it takes an environment over, and then has the methods of a rank.

    It is made in a function, so that it is pickled by value, and its methods refer to nothing outside.

    Args:
        rank_class: class of the rank. The process imports it by name.

    Returns:
        A class whose objects are made of an environment, in which `PYTHONPATH` and `OMP_NUM_THREADS` are; of a pickled tuple: the
        class of the rank and its arguments; and of its GPUs, its last argument, where they had to be found (else None).
    """

    def __init__(self: Any, environment: dict[str, str], rank: bytes, gpus: list[str] | None = None) -> None:
        import os
        import pickle
        import sys

        sent = os.environ.get("PYTHONPATH")  # what Ray has brought to this node, if it has
        os.environ.update(environment)
        if sent:
            os.environ["PYTHONPATH"] += os.pathsep + sent
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        first = environment["PYTHONPATH"].split(os.pathsep)
        sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
        torch = sys.modules.get("torch")
        if torch is not None:  # Ray gave us a process in which a task of the script has run
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        made_of, *arguments = pickle.loads(rank)
        self.rank = made_of(*arguments, *(() if gpus is None else (gpus,)))

    methods = {
        name: value for name, value in vars(rank_class).items() if isfunction(value) and not name.startswith("_")
    }
    handed_on = {name: _handed_on(name, streams=isgeneratorfunction(value)) for name, value in methods.items()}
    return type("RankProcess", (), {"__init__": __init__, **handed_on})


def _handed_on(name: str, *, streams: bool) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self.rank, name)(*arguments, **named)

    def stream(self: Any, *arguments: Any, **named: Any) -> Iterator[Any]:  # Ray tells one from the other
        yield from getattr(self.rank, name)(*arguments, **named)

    found = stream if streams else method
    found.__name__ = name
    return found
