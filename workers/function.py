"""FunctionWorker: runs the pure functions of the graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..dataflow.batch import Batch
from ..dataflow.config import Config
from .dispatch import Dispatch
from .remote import remote
from .worker import Worker


class FunctionConfig(Config):
    """Empty: a function brings its own arguments."""


class FunctionWorker(Worker):
    """A process beside the driver that runs what is too small for its own group. Each of several ranks gets a part of the rows, and
    complete groups where the function takes groups."""

    Config = FunctionConfig
    replaceable = True

    @remote(dispatch=Dispatch.SPLIT_BY_DP)
    def apply(self, rows: Batch, *, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Run the function of a node, and its `measure`, if it has one.

        Returns:
            What the function returns, or, with `measure`, a pair of that and the metrics.
        """
        result = function(rows, **arguments)
        measure = getattr(function, "__measure__", None)
        return result if measure is None else (result, measure(rows, **arguments))
