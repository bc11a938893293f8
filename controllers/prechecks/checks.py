"""Check a whole run before any process starts. Each check raises a `UserError` that names the
setting, group or node, and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, create_model

from ...algorithms.cross_tokenizer import SharedSpans
from ...algorithms.sampling import Sampling
from ...dataflow.batch import Batch
from ...dataflow.buffer.sample_buffer import BufferConfig, expected_rows
from ...dataflow.column import (
    CHOSEN_IDS,
    OLD_LOGPROBS,
    PROMPT_IDS,
    REJECTED_IDS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_VERSIONS,
    TEACHER_RESPONSE_IDS,
)
from ...dataflow.config import Config
from ...dataflow.errors import UserError, nearest
from ...dataflow.graph import TRAIN, Graph, Handle
from ...dataflow.operation import Shape
from ...dataflow.prompts.curriculum import curriculum_of
from ...dataflow.prompts.prompts import Prompts
from ...dataflow.runs.directory import check_name
from ...workers.models.model_folder import different_token, find_model_config
from ..backends.backend import START_TIMEOUT_S
from ..node_layout import shares_gpus
from ..placement import Place
from ..recovery.changed_settings import (
    ORDER_OF_DATA,
    Rule,
    changes,
    refuse_fixed,
    removed_settings,
    with_present_names,
)
from ..recovery.checkpoints import CheckpointConfig, has_state
from ..recovery.resume import WITHOUT_ROWS, ResumePoint
from ..reports.symptoms import check_curriculum, check_group_sizes
from ..run_spec import Evaluation, RunSpec
from ..schedule import Stepwise, Synchronous, Training

_RESPONSES = (RESPONSE_IDS, CHOSEN_IDS, REJECTED_IDS)
"""Columns of responses, which models read after the prompts of a source."""


_EXAMPLES: Mapping[str, tuple[type, str]] = {
    "graph": (Graph, "the result of calling a @weft.graph function with a source"),
    "schedule": (Stepwise, "a value such as weft.Synchronous(steps=100)"),
    "buffer": (BufferConfig, "a weft.BufferConfig(...)"),
    "checkpoint": (CheckpointConfig, "a weft.CheckpointConfig(every=...)"),
}
"""Argument of the driver -> (its type, a valid example)."""


def check_kinds(*, placement: object, backend: object, **others: object) -> None:
    """Check the types of the driver's arguments. A backend, for example, must not be a class."""
    wanted = [(n, others[n], isinstance(others[n], kind), how) for n, (kind, how) in _EXAMPLES.items()]
    of_places = isinstance(placement, Mapping) and all(isinstance(p, Place) for p in placement.values())
    how = 'a mapping of group names to weft.Place(pool, ranks=...), such as {"actor": weft.Place(pool)}'
    wanted.append(("placement", placement, placement is None or of_places, how))
    is_backend = hasattr(backend, "wait") and not isinstance(backend, type)
    how = "weft.Local() or weft.RayBackend()"
    wanted.append(("backend", backend, backend is None or is_backend, how))
    for name, given, right, example in wanted:
        if not right:
            raise UserError(f"Driver({name}=...) takes {example}, not {given!r}")


_NUMBERS: dict[str, Any] = {
    "seed": (int, Field(ge=0, lt=2**63)),
    "record_every": (int, Field(ge=0)),
    "call_timeout_s": (float | None, Field(gt=0)),
}
# Made once: pydantic takes 0.1 s to look for its source in a program with many modules.
_Numbers = create_model("Driver", __base__=Config, **_NUMBERS)


def check_numbers(**numbers: object) -> None:
    _Numbers(**numbers)


def check_names(evaluations: Sequence[Evaluation]) -> list[str]:
    """Check and return the names of a run's graphs, the training graph's first."""
    names = [TRAIN, *(e.name for e in evaluations)]
    for taken in names:
        check_name(taken, "Evaluation(..., name")
        if names.count(taken) > 1:
            raise UserError(
                f"two graphs of the run are called {taken!r}; give each Evaluation(..., name=...) its own"
            )
    return names


def check_best(
    checkpoint: CheckpointConfig, evaluations: Sequence[Evaluation], handles: Mapping[str, Handle]
) -> None:
    """Check that `CheckpointConfig.best` names a metric of an evaluation, a group, or the run."""
    best, source, names = checkpoint.best, checkpoint.best_source, [e.name for e in evaluations]
    if source and source not in (*names, *handles):
        known = [*names, *handles]
        raise UserError(
            f"CheckpointConfig(best={best!r}): the run has no evaluation or worker group {source!r}"
            f"{nearest(source, known)}; it has {', '.join(known)}"
        )
    if best and source not in names and not (checkpoint.every or checkpoint.every_s):
        raise UserError(
            f"CheckpointConfig(best={best!r}): this metric is measured at each step; set every=... or every_s=... "
            "to choose the steps with a checkpoint"
        )


def check_graphs(graphs: Sequence[Graph]) -> dict[str, Handle]:
    """Check the graphs, and return the handles of their worker groups by name."""
    for graph in graphs:
        graph.validate(also=graphs)
    handles: dict[str, Handle] = {}
    for name, handle in (item for graph in graphs for item in graph.handles.items()):
        check_name(name, "weft.group(..., name")
        if handles.setdefault(name, handle) is not handle:
            raise UserError(
                f"two worker groups are called {name!r}: give one of them another name with weft.group(..., name=...)"
            )
        if getattr(handle.worker_class, "must_follow", False) and not handle.leaders:
            raise UserError(
                f"worker group {name!r} is a {handle.worker_class.__name__}, but follows no group; add "
                f"{name}.follows(actor, every=...)"
            )
    return handles


def check_workers(graphs: Iterable[Graph]) -> None:
    """Check that every source has rows, and that workers support the operations of their nodes."""
    for graph in graphs:
        if not len(graph.source.table):
            raise UserError(f"source {graph.source.name!r} of graph {graph.name!r} has no rows")
        for group, handle in graph.handles.items():
            handle.worker_class.check(
                handle.config, [n for n in graph.nodes if n.group == group], graph.source
            )
        check_tokenizers(graph)
        check_lengths(graph)


def check_tokenizers(graph: Graph) -> None:
    """Check that token ids mean the same for all models that read or sample them."""
    given = [node.arguments.get("tokenizers") for node in graph.nodes]
    spans = [value for value in given if isinstance(value, SharedSpans)]
    hint = "give both models with the same tokenizer"
    if not spans and "distillation" in (graph.name, *(n for node in graph.nodes for n in node.path)):
        hint += ", or let the teacher read the text: distillation(..., tokenizers=SharedSpans(student=..., teacher=...))"
    for columns, side in (((PROMPT_IDS, *_RESPONSES), "student"), ((TEACHER_RESPONSE_IDS,), "teacher")):
        ids = {str(column) for column in columns}
        models: dict[str, str | Path] = {}
        for node in graph.nodes:
            model = getattr(graph.handles[node.group].config, "model", None) if node.group else None
            if node.group and model is not None and ids & {*node.reads, *node.writes}:
                models[f"group {node.group!r}"] = model
        models |= {f"SharedSpans({side}=...)": getattr(each, side) for each in spans}
        _check_alike(models, hint)


def _check_alike(models: Mapping[str, str | Path], hint: str) -> None:
    """Check that these models, by what reads their tokens, have equal tokenizers."""
    if not models:
        return
    (first, model), *others = models.items()
    for reader, other in others:
        if str(other) != str(model) and (found := different_token(model, other)):
            raise UserError(f"{first} and {reader} read the same token ids, but {found}; {hint}")


def check_schedule(spec: RunSpec) -> None:
    train, *evaluated = spec.graphs.values()
    check_group_sizes(train)
    check_curriculum(train)
    rounds, rows = getattr(spec.schedule, "rounds", 1), len(train.source.table)
    each = spec.schedule.prompts_per_step
    if rounds > 1 and rounds * each > rows:
        raise UserError(
            f"Synchronous(rounds={rounds}) sorts the {rounds * each:,} prompts of {rounds} steps, and the source has {rows:,}, "
            f"so copies of a prompt would share a step; use rounds={max(1, rows // each)} or less"
        )
    if rounds > 1 and curriculum_of(train.source) is not None:
        raise UserError(
            f"Synchronous(rounds={rounds}) sorts prompts of later steps by length, and a curriculum chooses them one step at a time; "
            "use rounds=1, or data without with_curriculum"
        )
    check_followed(train, spec.schedule)
    check_capacity(train, spec.schedule, spec.buffer)
    for graph in evaluated:
        check_rows(graph, len(graph.source.table), f"a source of {len(graph.source.table):,} rows")
    check_apart(train, spec.schedule, spec.placement, evaluated)
    check_partners(spec.graphs.values(), spec.placement)
    check_transports(spec.handles.values(), spec.placement)


def check_resumes(spec: RunSpec, handles: Mapping[str, Handle], point: ResumePoint | None) -> None:
    """Check that the run can resume from a checkpoint, and that every updated group can be saved.
    `point` is the checkpoint to resume from, or None for a new run."""
    if point is not None:
        if point.state.seed != spec.seed:
            raise UserError(f"{point.path} is of a run with seed={point.state.seed}, not {spec.seed}")
        kind = type(spec.schedule).__name__
        if point.with_rows and point.state.schedule != kind:
            raise UserError(
                f"{point.path} is of a run under {point.state.schedule}, not {kind}, so the staleness of its rows differs. {WITHOUT_ROWS}"
            )
        refuse_fixed(point.path, changed_settings(spec, point, "fixed"))
    by = next(
        (f"{n}={v!r}" for n in ("every", "every_s", "best") if (v := getattr(spec.checkpoint, n))), ""
    )
    updated = {
        n.group for graph in spec.graphs.values() for n in graph.nodes if n.operation.updates and n.group
    }
    for name in sorted(updated if spec.checkpoint.writes else ()):
        if not has_state(handles[name]):
            raise UserError(
                f"CheckpointConfig({by}): worker group {name!r} is updated, but {handles[name].worker_class.__name__} "
                "has no method save_checkpoint (with checkpoint_written and load_checkpoint; dispatch ONE_TO_ALL)"
            )
    for name, handle in handles.items():
        if point is not None and has_state(handle) and name not in point.groups:
            raise UserError(
                f"{point.path} has nothing of worker group {name!r}; it has {', '.join(point.groups) or 'none'}"
            )


def changed_settings(spec: RunSpec, point: ResumePoint, rule: Rule) -> list[str]:
    """Return the settings under `rule` that have changed since the checkpoint."""
    settings, rules = spec.recorded
    # Without rows in flight, the data may change. Training then starts at its first row.
    alone: dict[str, Rule] = {} if point.with_rows else dict.fromkeys(ORDER_OF_DATA, "reported")
    before = with_present_names(point.state.settings, settings)
    changed = changes(before, settings, {**rules, **alone}, rule)
    return changed + removed_settings(before, settings) if rule == "reported" else changed


def at_place_in_data(spec: RunSpec, point: ResumePoint | None) -> ResumePoint | None:
    """Return the point to resume from: without rows in flight and with new data, the first row."""
    if point is None or point.with_rows:
        return point
    rules: dict[str, Rule] = dict.fromkeys(ORDER_OF_DATA, "fixed")
    changed = changes(point.state.settings, spec.recorded[0], rules, "fixed")
    return point.at_first_row() if changed else point


def check_followed(graph: Graph, schedule: Training) -> None:
    """Check that a group that generates samples for a policy gradient follows the trained group,
    and often enough for the schedule's maximum staleness."""
    generating = {n.group for n in graph.nodes if str(RESPONSE_VERSIONS) in n.writes and n.group}
    for node in graph.nodes:
        loss = node.arguments.get("loss")
        reads = {*getattr(loss, "reads", ()), *getattr(loss, "may_read", ())}
        needs_policy = reads & {str(RESPONSE_LOGPROBS), str(OLD_LOGPROBS)}
        for group in generating if node.operation.updates and needs_policy else ():
            edges = [edge for edge in graph.follows if edge.follower == group]
            if not edges:
                raise UserError(
                    f"node {node.name!r} compares its policy with the one that generated, but {group!r} follows no group: "
                    f"add {group}.follows({node.group})"
                )
            # Between two weight syncs, the follower lags by up to every - 1 versions.
            every = next((edge.every for edge in edges if edge.leader == node.group), 1)
            if every - 1 > schedule.max_staleness:
                raise UserError(
                    f"{group!r} follows {node.group!r} every {every} updates, but {type(schedule).__name__} "
                    f"allows a staleness of {schedule.max_staleness}; take every={schedule.max_staleness + 1}"
                )


def with_rows_that_fit(graph: Graph) -> Graph:
    """Drop source rows that are too long for a model, if the source has `too_long="drop"`.
    Otherwise, `check_workers` refuses such rows."""
    if not isinstance(graph.source, Prompts):
        return graph
    longest = (
        handle.worker_class.longest_prompt(handle.config, [n for n in graph.nodes if n.group == name])
        for name, handle in graph.handles.items()
    )
    limit = min((tokens for tokens in longest if tokens is not None), default=None)
    if limit is not None:
        graph = replace(graph, source=graph.source.up_to(limit))
    if (tokens := _row_tokens(graph)) is not None and (context := _shortest_context(graph)) is not None:
        name, most = context
        reason = f"longer than the context of {name!r}, {most} tokens"
        return replace(graph, source=graph.source.keeping_short(tokens <= most, reason))  # pyright: ignore[reportAttributeAccessIssue]
    return graph


def check_lengths(graph: Graph) -> None:
    """Check that every row, with `max_tokens` of response, fits the contexts of the models."""
    tokens, context = _row_tokens(graph), _shortest_context(graph)
    if tokens is None or context is None or not len(tokens):
        return
    (name, most), row = context, int(np.argmax(tokens))
    if tokens[row] <= most:
        return
    has, lower = f"{tokens[row]} tokens", ""
    if (generated := _generated_tokens(graph)) is not None:
        has = f"{tokens[row] - generated} prompt tokens and max_tokens={generated}"
        lower = "lower max_tokens, "
    raise UserError(
        f"row {row} of {graph.source.name} has {has}, more than the context of {most} of {name!r} "
        f"({graph.handles[name].config.model}); {int((tokens > most).sum())} of {len(tokens)} rows are too long; {lower}drop these rows "
        "(too_long='drop' where they are read), or take a model with a longer context"
    )


def _row_tokens(graph: Graph) -> np.ndarray | None:
    """Return the longest model input of each source row, in tokens: [rows].

    The input is the prompt plus the longest response, from the source or from a node that samples.
    Return None if the source has no prompts or no node reads prompts with responses.
    """
    if str(PROMPT_IDS) not in graph.source.columns:
        return None
    given = {c for n in graph.nodes for c in map(str, _RESPONSES) if n.writers.get(c) == ""}
    generated = _generated_tokens(graph)
    if not given and generated is None:
        return None
    rows = Batch.of_table(graph.source.table.select([str(PROMPT_IDS), *sorted(given)]))
    longest = np.full(len(rows), generated or 0)
    for column in given:
        longest = np.maximum(longest, rows.lengths(column))
    return rows.lengths(PROMPT_IDS) + longest


def _generated_tokens(graph: Graph) -> int | None:
    """Return the longest response that a node samples for a source prompt [tokens], or None."""
    samplings = [
        n.arguments.get("sampling") for n in graph.nodes if n.writers.get(str(PROMPT_IDS)) == ""
    ]
    return max((each.max_tokens for each in samplings if isinstance(each, Sampling)), default=None)


def _shortest_context(graph: Graph) -> tuple[str, int] | None:
    """Return the group with the smallest row limit and that limit [tokens], or None."""
    found = ((name, one.worker_class.longest_row(one.config)) for name, one in graph.handles.items())
    limits = [(name, tokens) for name, tokens in found if tokens is not None]
    return min(limits, key=lambda limit: limit[1], default=None)


def check_capacity(graph: Graph, schedule: Training, buffer: BufferConfig) -> None:
    """Check that the rows of a step fit into the buffer and the driver's memory."""
    rows = schedule.prompts_per_step * expected_rows(graph)
    setting = f"{type(schedule).__name__}(prompts_per_step={schedule.prompts_per_step})"
    check_rows(graph, schedule.prompts_per_step, setting)
    if buffer.max_rows is not None and rows > buffer.max_rows:
        raise UserError(
            f"{setting} has {rows} rows in flight at once ({expected_rows(graph)} a prompt), "
            f"but BufferConfig(max_rows={buffer.max_rows}) holds fewer"
        )


MAX_ROWS = 10_000_000
"""Maximum number of rows that a graph may have in flight. The driver keeps an entry for each."""


def check_rows(graph: Graph, prompts: int, setting: str) -> None:
    """Check that the driver can hold the rows of this many prompts, which `setting` decides."""
    rows = prompts * expected_rows(graph)
    if rows > MAX_ROWS:
        several = [n for n in graph.nodes if n.arguments.get("n", 1) != 1]
        made = [f"node {n.name!r} has n={n.arguments['n']}" for n in several]
        raise UserError(
            f"{', '.join([*made, setting])} of graph {graph.name!r}: {rows:,} rows in flight at once, "
            f"but at most {MAX_ROWS:,} are allowed. Lower these numbers"
        )


def _filters_before(graph: Graph, name: str) -> frozenset[str]:
    node = graph[name]
    own = {a for a in node.after if graph[a].operation.shape is Shape.FILTER}
    return frozenset(own.union(*(_filters_before(graph, a) for a in node.after)))


def check_transports(handles: Iterable[Handle], placement: Mapping[str, Place]) -> None:
    """Check that GPU-to-GPU weight transports have the right GPUs on both sides.

    CUDA IPC needs both groups on the same GPUs, and one sending rank on each GPU; NCCL needs
    separate GPUs. vLLM's backends need a vLLM engine.
    """
    for handle, followed in ((one, leader) for one in handles for leader in one.leaders):
        leader, follower, transport = followed.called, handle.called, followed.transport
        who = f'transport="{transport}" of {leader!r}, which {follower!r} follows'
        backend = followed.vllm_backend
        if backend and (reason := handle.worker_class.refuses_vllm_backends(handle.given)):
            raise UserError(f'{who}: {reason}; change that, or take transport="auto"')
        way = backend or transport
        if way not in ("nccl", "ipc"):
            continue
        pools = {name: placement[name].pool for name in (leader, follower)}
        for name, pool in pools.items():
            if not pool.gpus:
                raise UserError(
                    f'{who}, goes from GPU to GPU, and pool {pool.name!r} of {name!r} has none; take transport="auto"'
                )
        shared = pools[leader].name == pools[follower].name
        if shared != (way == "ipc"):
            where, other = ("on one pool", "ipc") if shared else ("on separate pools", "nccl")
            raise UserError(
                f'{who}, cannot be used {where}; take transport="{transport.replace(way, other)}"'
            )
        if shared and placement[leader].gpus > 1:
            raise UserError(
                f"{who}, is sent by one rank per GPU, but {leader!r} has {placement[leader].ranks} ranks for the "
                f"{pools[leader].gpus} GPUs of pool {pools[leader].name!r}; take ranks={pools[leader].gpus} or "
                'transport="auto"'
            )


def check_apart(
    graph: Graph, schedule: Training, placement: Mapping[str, Place], evaluated: Sequence[Graph] = ()
) -> None:
    """Check that overlapping work has separate devices.

    Groups on one pool take turns. A group that generates without pause never gives up its turn, not
    even to a group that only evaluations use.
    """
    updates = [n for n in graph.nodes if n.operation.updates]
    seen = {n.name: _filters_before(graph, n.name) for n in updates}
    if not isinstance(schedule, Synchronous) and len(set(seen.values())) > 1:
        raise UserError(
            f"{type(schedule).__name__}: updates {', '.join(seen)} come after different filters "
            f"({'; '.join(', '.join(sorted(f)) or 'none' for f in seen.values())}), so their batches differ; take weft.Synchronous"
        )
    if not schedule.overlaps:
        return
    generating = {n.group for n in graph.nodes if n.operation.interruptible and n.group}
    others = {n.group for one in (graph, *evaluated) for n in one.nodes if n.group} - generating
    for group in sorted(generating):
        pool = placement[group].pool.name
        for other in sorted(others):
            if placement[other].pool.name == pool:
                raise UserError(
                    f"{type(schedule).__name__} generates without pause, but {group!r} and {other!r} take turns on pool {pool!r}: "
                    "give each group a separate resource pool"
                )


def check_partners(graphs: Iterable[Graph], placement: Mapping[str, Place]) -> None:
    """Check that groups that work together do not take turns on different pools."""
    for node in (node for graph in graphs for node in graph.nodes):
        for other in node.uses:
            pool = placement[other].pool
            if shares_gpus(placement, other) and placement[str(node.group)].pool.name != pool.name:
                raise UserError(
                    f"node {node.name!r} needs {node.group!r} and {other!r} at the same time, but {other!r} takes turns with others on "
                    f"pool {pool.name!r}; give {other!r} a separate pool, or place it on the pool of {node.group!r}"
                )


# Default deadlines. Larger models take longer to start and to answer.

CALL_S = 600.0
"""[s] Longest time without progress of a call, not counting the time to copy the model."""
READ_BYTES_PER_S = 50e6
"""[bytes/s] Lowest speed assumed for loading a model, from a network disk that many ranks share."""
COPY_BYTES_PER_S = 200e6
"""[bytes/s] Lowest speed assumed for copying all parameters, to publish, receive or offload."""


def model_bytes(handles: Iterable[Handle]) -> int:
    """Return the bytes of the largest model's safetensors files, or 0 if no group has any."""
    return max((_stored_bytes(getattr(handle.config, "model", None)) for handle in handles), default=0)


def longest_start_s(num_bytes: int) -> float:
    """[s] Return the time limit for the workers of a group to start.

    >>> longest_start_s(0), longest_start_s(140_000_000_000)
    (300.0, 3100.0)
    """
    return START_TIMEOUT_S + num_bytes / READ_BYTES_PER_S


def set_deadlines(call_timeout_s: float | None, handles: Iterable[Handle]) -> dict[str, float]:
    """Return a run's time limits: the user's, or defaults from the size of its largest model."""
    num_bytes = model_bytes(handles)
    longest_call_s = CALL_S + num_bytes / COPY_BYTES_PER_S
    return {
        "start_timeout_s": max(longest_start_s(num_bytes), call_timeout_s or 0.0),
        "call_timeout_s": longest_call_s if call_timeout_s is None else call_timeout_s,
    }


def _stored_bytes(model: str | Path | None) -> int:
    if model is None:
        return 0
    try:
        folder = find_model_config(model).parent
    except UserError:  # loading the model raises the error with its cause
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
