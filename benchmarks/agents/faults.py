"""An independent check: compare the published rows of an agents' run with the records of its harness."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from killed_agents import EPISODES, EVIDENCE, MODEL, PROMPTS, QUESTIONS, TURNS

sys.path.append(str(Path(__file__).resolve().parents[1] / "recovery"))

from async_kills import wrong_steps  # pyright: ignore[reportMissingImports]

from weft.dataflow.buffer.check import check_log
from weft.dataflow.prompts.tokenizer import Tokenizer
from weft.dataflow.runs.files import BUFFER, LOG
from weft.dataflow.runs.log import LogReader
from weft.dataflow.runs.samples import samples as recorded_samples

Row = Mapping[str, Any]


def faults(run: Path, folder: Path, steps: int, staleness: int) -> list[str]:
    """Return what is wrong with a finished run.

    Args:
        run: its directory.
        folder: folder with the model and the evidence.
        steps: number of its steps.
        staleness: [updates] maximum staleness of a token.
    """
    samples = recorded_samples(run)
    rows = [] if samples is None else samples.to_pylist()
    tokenizer, seen = Tokenizer.load(folder / MODEL), [*map(_read, (folder / EVIDENCE).iterdir())]
    of_rows = faults_of_rows(rows, seen, steps, staleness, lambda ids: tokenizer.decode([ids])[0])
    return [*_of_log(run, steps), *_of_metrics(run, steps), *of_rows]


def faults_of_rows(
    rows: Sequence[Row],
    seen: Sequence[Row],
    steps: int,
    staleness: int,
    decode: Callable[[list[int]], str],
) -> list[str]:
    """Return what is wrong with the rows of a run.

    Args:
        seen: the records of each attempt (`killed_agents.solve`).
    """
    found = [*_of_steps(rows, steps)]
    evidence: dict[tuple[float, ...], list[Row]] = {}
    for one in seen:
        key = _key(value for turn in one["logprobs"] for value in turn)
        evidence.setdefault(key, []).append(one)
    for row in rows:
        where = f"sample {row['sample_id']} of step {row['step']}"
        found += [f"{where}: {fault}" for fault in _of_tokens(row, staleness)]
        found += [f"{where}: {fault}" for fault in _of_evidence(row, evidence, decode)]
    return found


def _read(path: Path) -> Row:
    return json.loads(path.read_text())


def _of_log(run: Path, steps: int) -> Iterator[str]:
    report = check_log(run / BUFFER)
    yield from map(str, report.violations)
    if report.leases["open"]:
        yield f"{report.leases['open']} leases are open"
    if wrong := wrong_steps(run, steps):
        yield f"{wrong} steps have no update, or several"
    position_of: dict[int, int] = {}
    times: Counter[int] = Counter()
    for record in LogReader(run / BUFFER / LOG):
        if record["do"] == "issue":
            position_of |= dict(enumerate(record["positions"], record["group"]))
            times.update(record["positions"])
        elif record["do"] == "lose" and record.get("again", True):
            # The driver was resumed so late that rows in flight were gone. It issues the prompt again.
            times[position_of[record["group"]]] -= 1
        elif record["do"] in ("drop", "lose"):
            yield f"the run gave up rows: {record}"
    if max(times.values()) - min(times[position] for position in range(QUESTIONS)) > 1:
        yield f"questions were issued unequally often: {times}"


def _of_metrics(run: Path, steps: int) -> Iterator[str]:
    metrics = {row["step"]: row for row in pq.read_table(run / "metrics.parquet").to_pylist()}
    if {*metrics} - {0} != {*range(1, steps + 1)}:
        yield f"the metrics have the steps {sorted(metrics)}"
    for step in range(1, steps + 1):
        row = metrics.get(step, {})
        if row.get("samples") != PROMPTS * EPISODES:
            yield f"step {step} trained on {row.get('samples')} rows"
        for name in ("rollout/dropped_episodes", "failed_rows", "rollout/retokenised"):
            if row.get(name):
                yield f"step {step}: {name} is {row[name]}"


def _of_steps(rows: Sequence[Row], steps: int) -> Iterator[str]:
    for name in ("sample_id", "episode_id"):
        again = [one for one, times in Counter(row[name] for row in rows).items() if times > 1]
        if again:
            yield f"{name} {again[0]} and {len(again) - 1} others are there more than once"
    if missing := {*range(1, steps + 1)} ^ {row["step"] for row in rows}:
        yield f"steps {sorted(missing)} have no rows, or do not exist"
    in_step: dict[int, Counter[int]] = {}
    prompts: dict[int, set[str]] = {}
    for row in rows:
        in_step.setdefault(row["step"], Counter())[row["group_id"]] += 1
        prompts.setdefault(row["group_id"], set()).add(row["prompt"])
        if row["episode_rows"] != 1:
            yield f"episode {row['episode_id']} has {row['episode_rows']} rows"
    for step, groups in in_step.items():
        if sorted(groups.values()) != [EPISODES] * PROMPTS:
            yield f"step {step} has episodes per prompt: {sorted(groups.values())}"
    for group, texts in prompts.items():
        if len(texts) != 1:
            yield f"group {group} has the prompts {sorted(texts)}"


def _of_tokens(row: Row, staleness: int) -> Iterator[str]:
    length, mask, versions = len(row["response_ids"]), row["response_mask"], row["response_versions"]
    ends = row["turn_ends"]
    if {len(mask), len(versions), len(row["response_logprobs"])} != {length}:
        yield "its columns have different lengths"
        return
    if len(ends) != TURNS or sorted({*ends}) != ends or ends[-1] != length:
        yield f"its turns end at {ends}, of {length} tokens"
    starts = [k for k in range(length) if mask[k] and (k == 0 or not mask[k - 1])]
    if len(starts) != len(ends) or sum(mask) != sum(e - s for s, e in zip(starts, ends, strict=False)):
        yield f"its sampled tokens {starts} do not match its turns {ends}"
        return
    if row["episode_tokens"] != sum(mask):
        yield f"it has {sum(mask)} trained tokens, not {row['episode_tokens']}"
    for start, end in zip(starts, ends, strict=True):
        if sorted(versions[start:end]) != versions[start:end]:
            yield f"the versions of a turn decrease: {versions[start:end]}"
    now = row["step"] - 1
    if not now - staleness <= min(versions) <= max(versions) <= now:
        yield f"it has the versions {sorted({*versions})} in step {row['step']}"
    if any(logprob for logprob, own in zip(row["response_logprobs"], mask, strict=True) if not own):
        yield "a given token has a log-probability"


def _key(logprobs: Iterable[float]) -> tuple[float, ...]:
    return tuple(np.array([*logprobs], np.float32).tolist())


def _of_evidence(
    row: Row, evidence: Mapping[tuple[float, ...], list[Row]], decode: Callable[[list[int]], str]
) -> Iterator[str]:
    """Find the attempts that sampled a row by its log-probabilities, and compare their records with the row."""
    pairs = zip(row["response_logprobs"], row["response_mask"], strict=True)
    seen = evidence.get(_key(logprob for logprob, own in pairs if own), [])
    own = [one for one in seen if np.float32(one["reward"]) == np.float32(row["reward"])]
    if not own:
        yield f"no attempt has seen it with its reward; {len(seen)} have seen its tokens"
        return
    if own[0]["question"] not in row["prompt"]:
        yield f"its prompt {row['prompt']!r} is not {own[0]['question']!r}"
    at = np.flatnonzero(np.array(row["response_mask"]) == 0)
    given = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    texts = [decode([row["response_ids"][k] for k in part]) for part in given]
    if len(texts) != len(own[0]["results"]) or not all(
        result in text for result, text in zip(own[0]["results"], texts, strict=True)
    ):
        yield f"its given tokens {texts} are not the results {own[0]['results']}"
