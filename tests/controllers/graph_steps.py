"""A graph run without workers: a test claims and finishes rows, and asks the schedule in
between."""

from typing import Any

import numpy as np
from toy import PartsActor, ToyLoss, prompts

from weft.controllers.graph_run import EvaluationRun, TrainingRun
from weft.controllers.schedule import Share
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.graph import Graph, group
from weft.dataflow.operation import Shape, node
from weft.dataflow.source import positions
from weft.dataflow.tracing import graph


@node(reads=("prompt_ids",), writes=("response_ids", "response_versions"))
def answered(rows: Batch) -> Batch:
    """Placeholder that is never called: tests publish the rows themselves."""
    return rows


@node(shape=Shape.FILTER, reads=("response_ids",))
def kept(rows: Batch) -> Batch:
    return rows


@node(reads=("response_ids",))
def watched(rows: Batch) -> None:
    """Placeholder for a node that writes nothing."""


@graph
def walked(prompts: Any, *, actor: Any) -> Any:
    rows = kept(answered(prompts))
    watched(rows)
    return actor.update(rows, loss=ToyLoss(column="response_ids"))


@graph
def looked_at(prompts: Any, *, actor: Any) -> Any:
    rows = answered(prompts)
    watched(rows)
    return actor.logprobs(rows)


def training(number: int = 20) -> TrainingRun:
    made = walked(prompts(number), actor=group(PartsActor, name="actor"))
    return TrainingRun(
        "train", made, Ledger(made, name="train"), positions(number, 0, shuffle=False), tokens(number)
    )


def evaluation(number: int = 4) -> EvaluationRun:
    made: Graph = looked_at(prompts(number), actor=group(PartsActor, name="actor"))
    return EvaluationRun(
        "eval", made, Ledger(made, name="eval"), positions(number, 0, shuffle=False), tokens(number)
    )


def tokens(number: int) -> np.ndarray:
    return np.full(number, 3)


def work(
    run: Any, name: str, number: int | None = None, *, version: int | None = None, drop: int = 0
) -> None:
    """Claim rows for a node, publish all but the first `drop`, and finish the lease."""
    node = run.graph[name]
    limits = {"max_groups": number} if node.operation.takes_groups else {"max_rows": number}
    lease = run.ledger.claim(node, **limits)
    ids = lease.ids[drop:]
    versions = None if version is None else np.full(len(ids), version)
    run.ledger.publish(lease, Published(ids, np.ones(len(ids), np.int64), versions), None)
    if node.operation.updates:
        run.taken[name] += lease.num_groups
        run.trains(lease)
    run.ledger.finish(lease)


def share(schedule: Any, run: Any, name: str, version: int = 0, **where: int) -> Share | None:
    return schedule.share(run, run.graph[name], version, **where)
