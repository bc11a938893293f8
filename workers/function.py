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
    """Nothing: a function brings its arguments along."""


class FunctionWorker(Worker):
    """A process beside the driver for what is too small for a group of its own. Of several ranks each gets a part of the rows, and
    whole groups where the function sees groups."""

    Config = FunctionConfig
    replaceable = True

    @remote(dispatch=Dispatch.SPLIT_BY_DP)
    def apply(self, rows: Batch, *, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Run the function of a node, and measure what it says is to be measured."""
        result = function(rows, **arguments)
        measure = getattr(function, "__measure__", None)
        return result if measure is None else (result, measure(rows, **arguments))
