"""EvaluationRules: what evaluations and training wait for of each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationRules:
    """What an evaluation and training wait for of each other. A run has one of three:

    BESIDE     `Synchronous` and `Pipelined`: it takes the groups that the next step leaves idle
    BETWEEN    the same with `Driver(stop=...)`, which decides by what was measured: no step begins before it is over
    AMONG      `Asynchronous`: its rows take their place among those of training
    """

    comes_first: bool
    """Its rows are claimed before those of training, as they become ready. Otherwise they come after them, and a node gets all rows of
    a step at once."""
    keeps_weights: bool
    """Groups keep the weights that it evaluates until it is over. The step after it ends no earlier, and neither does the evaluation of a
    later step begin, nor do weights that wait for it hold it back."""
    holds_training: bool
    """No step begins while one is due or under way, and it begins when nothing else is."""


BESIDE = EvaluationRules(comes_first=False, keeps_weights=True, holds_training=False)
BETWEEN = EvaluationRules(comes_first=False, keeps_weights=True, holds_training=True)
AMONG = EvaluationRules(comes_first=True, keeps_weights=False, holds_training=False)
