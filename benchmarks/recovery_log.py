"""What became of the prompts of a run, read from its log without the ledger: the log is the history that the run ended with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from weft.dataflow.buffer.check import read
from weft.dataflow.buffer.checker import Checker
from weft.dataflow.buffer.log import LogReader
from weft.dataflow.buffer.sample_buffer import LOG


@dataclass(frozen=True)
class Account:
    """Samples of one graph, of which each prompt has the same number."""

    prompts: int
    """That were issued, in the end."""
    trained: int
    """Samples that an update was through with."""
    in_flight: int
    """Samples of prompts that are waiting or leased: generation that ran ahead."""
    issued_again: int
    """Prompts of which columns were damaged."""
    lost: int
    """Samples that were neither trained on nor are in flight, those of prompts that were passed over among them."""
    duplicated: int
    """Samples that were trained on more than once, those of prompts that were issued too often among them."""
    violations: list[str]
    """What `weft.dataflow.buffer.check` says."""


def account(buffer: Path, *, samples: int, source: int, seed: int, graph: str = "train") -> Account:
    """
    Args:
        samples: rows of a prompt that an update must be through with.
        source: rows of the source. They are issued epoch after epoch in the order that the run's seed draws.
    """
    prompt_of: dict[int, int] = {}
    """Row -> number of its prompt's group."""
    position_of: dict[int, int] = {}
    """Group -> row of the source."""
    held: dict[int, list[int]] = {}
    trained: Counter[int] = Counter()
    again = 0
    for record in LogReader(buffer / LOG):
        if record.get("graph") != graph:
            continue
        match record["do"]:
            case "issue":
                for k, position in enumerate(record["positions"]):
                    position_of[record["group"] + k] = position
                    prompt_of[record["first"] + k] = record["group"] + k
            case "publish" if "parents" in record:
                for id, parent in zip(record["ids"], record["parents"], strict=True):
                    prompt_of[id] = prompt_of[parent]
            case "claim" if record["node"] == "actor.update":
                held[record["lease"]] = record["ids"]
            case "finish":
                trained.update(held.pop(record["lease"], []))
            case "release":
                held.pop(record["lease"], None)
            case "lose":
                del position_of[record["group"]]
                again += 1
            case _:
                pass
    checker = Checker()
    violations = [str(violation) for _, found in read(buffer, checker, []) for violation in found]
    by_group = Counter(prompt_of[id] for id in trained)
    waiting = {group for group in position_of if not by_group[group] and group in checker.flight.groups}
    epochs = (np.random.default_rng((seed, epoch)).permutation(source).tolist() for epoch in count())
    expected = Counter(islice(chain.from_iterable(epochs), len(position_of)))
    issued = Counter(position_of.values())
    lost = sum(samples - by_group[group] for group in position_of if group not in waiting)
    return Account(
        prompts=len(position_of),
        trained=trained.total(),
        in_flight=samples * len(waiting),
        issued_again=again,
        lost=max(0, lost) + samples * (expected - issued).total(),
        duplicated=sum(times - 1 for times in trained.values())
        + sum(max(0, number - samples) for number in by_group.values())
        + samples * (issued - expected).total(),
        violations=violations,
    )


def incomplete_steps(run: Path, steps: int, samples: int) -> list[str]:
    """Steps of which the metrics are missing, twice there, or count other than so many samples."""
    rows = pq.read_table(run / "metrics.parquet").to_pylist()
    counted: dict[int, list[float]] = {}
    for row in rows:
        counted.setdefault(int(row["step"]), []).append(row.get("samples") or 0.0)
    return [
        f"step {step}: {counted.get(step, 'missing')}" for step in range(1, steps + 1) if counted.get(step) != [samples]
    ]
