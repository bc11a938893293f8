"""`weft plan`: preview of a script's run, before anything starts."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from ..dataflow.errors import Planned, UserError
from .command import Answer, ScriptCommand
from .run import run_script, script_file

if TYPE_CHECKING:
    from ..controllers.node_layout import OtherMachine
    from ..controllers.prechecks.dry_run import Planning
    from ..controllers.prechecks.plan import Plan
    from ..controllers.prechecks.plan_memory import GroupMemory
    from ..controllers.settings import Composed
    from ..dataflow.graph import Graph


@dataclass(frozen=True, kw_only=True)
class PlanRun(ScriptCommand):
    """Preview a script's run: its settings and their origins, its graphs, the sizes of a step, and
    the memory and disk space it needs. The script runs up to its first driver; nothing is started
    or written.
    """

    machine: Annotated[str | None, arg(metavar="GPUSxGB", help_behavior_hint="")] = None
    """Plan for the GPUs of another machine, such as 1x80 for one GPU of 80 GB. Four CPUs per GPU
    are assumed."""
    like: Annotated[str | None, arg(metavar="RUN", help_behavior_hint="")] = None
    """Directory of an earlier run, or its name under runs/. Its calls are used to compute the time
    of a step."""

    def answer(self) -> Answer:
        from ..controllers.prechecks.dry_run import planning
        from ..controllers.prechecks.plan import plan_of
        from .command import find_run

        path, other = script_file(self.script), None if self.machine is None else _other(self.machine)
        like = None if self.like is None else find_run(self.like).resolve()
        with planning() as made, nullcontext() if other is None else other.assumed():
            try:
                # Keep the output of the script apart from the plan.
                with redirect_stdout(sys.stderr):
                    code = run_script(path, self.arguments)
            except Planned:
                code = 0
            if made.spec is None:
                if code:
                    return Answer({"script": self.script, "exit_code": code}, exit_code=code)
                raise UserError(f"{path} made no weft.Driver, so there is nothing to plan")
            plan = plan_of(made.spec, like)
            return Answer(_found(plan, made), "\n".join(lines(plan, made)))


def _other(machine: str) -> OtherMachine:
    """Parse `--machine`.

    >>> _other("8x80")
    OtherMachine(gpus=8, gpu_bytes=85899345920)
    """
    from ..controllers.node_layout import OtherMachine

    number, _, size = machine.lower().partition("x")
    if not (number.isdecimal() and size.isdecimal() and int(size)):
        raise UserError(f"--machine {machine}: give the number of GPUs and the GB of each, such as 1x80")
    return OtherMachine(int(number), int(size) << 30)


def _found(plan: Plan, made: Planning) -> dict[str, Any]:
    spec, sizes = plan.spec, plan.sizes
    return {
        "settings": _settings(made.settings) if made.settings else {},
        "sketched": [str(path) for path in made.sketched],
        "passes_before": dict(made.passes),
        "graphs": {name: str(graph).splitlines() for name, graph in spec.graphs.items()},
        "schedule": {"kind": type(spec.schedule).__name__, **dict(spec.schedule)},
        "backend": repr(spec.backend),
        "step": {
            "prompts": sizes.prompts,
            "rows": sizes.rows,
            "prompt_tokens": sizes.prompt_tokens,
            "response_tokens": sizes.response_tokens,
            "updates": [asdict(update) for update in plan.updates],
            "time": asdict(plan.time) if plan.time else None,
            "sequence_groups": [asdict(shared) for shared in plan.sequences],
            "pipelines": [asdict(pipeline) for pipeline in plan.pipelines],
        },
        "groups": {
            g.group: {**asdict(g), "peak": g.peak, "host": g.host, "device": g.device}
            for g in plan.groups
        },
        "driver_bytes": plan.driver_bytes,
        "host_bytes": plan.host_bytes,
        "device_bytes": dict(plan.device_bytes),
        "machine": asdict(plan.machine),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "sample_bytes": plan.sample_bytes,
        "disk_bytes": plan.disk_bytes,
    }


def _settings(settings: Composed) -> dict[str, Any]:
    values = settings.values
    return {
        name: {"value": str(values[name]), "origin": str(origin)}
        for name, origin in settings.origins.items()
    }


# The plan as a page of text.


LEAST = 0.005
"""Smallest share of a rank's memory that is listed separately."""
WIDTH = 118
"""Characters of a line."""


def lines(plan: Plan, made: Planning) -> Iterator[str]:
    """Yield the lines of the page.

    Args:
        made: facts about its script, collected before.
    """
    yield from _before(made)
    if made.settings is not None:
        yield from ("SETTINGS", *_columns(_settings_lines(made.settings)))
    yield from ("", "WHAT HAPPENS", *_columns(_graphs(plan)))
    yield from ("", f"A STEP ({plan.spec.schedule!r})", *_step(plan))
    yield from ("", "MEMORY OF A RANK, at most", *_columns([_group(group) for group in plan.groups]))
    for group in plan.groups:
        for number, stage in enumerate(group.stages):
            yield (
                f"  {group.group}, stage {number}: {amount(stage.peak)} for {_count(stage.layers, 'layer')}: weights "
                f"{amount(stage.made.weights)}, activations {amount(stage.activations)} (of microbatches in flight: {stage.in_flight:g})"
            )
    yield from _machine(plan)
    yield from ("", "DISK", *_columns(_disk(plan)))


def amount(num_bytes: float) -> str:
    """Format bytes.

    >>> amount(200), amount(3 << 19), amount(300 << 20), amount(5 << 30)
    ('0.2 KiB', '1.5 MiB', '300 MiB', '5.0 GiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            found = num_bytes / size
            return f"{found:,.0f} {unit}" if found >= 100 else f"{found:,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} KiB"


def _before(made: Planning) -> Iterator[str]:
    found = [f"makes {path}; this plan uses a sketch of it" for path in made.sketched]
    found += [f"makes one pass over {rows:,} rows with graph {graph}" for graph, rows in made.passes]
    if found:
        yield from ("BEFORE THE RUN the script", *(f"  {each}" for each in found), "")


def _settings_lines(settings: Composed) -> Iterable[Sequence[str]]:
    for name, origin in settings.origins.items():
        yield name, str(settings.values[name]), str(origin)


def _graphs(plan: Plan) -> Iterable[Sequence[str]]:
    spec = plan.spec
    for name, graph in spec.graphs.items():
        evaluation = spec.evaluations.get(name)
        when = (
            f"every {evaluation.every} steps"
            if evaluation and evaluation.every
            else ""
            if evaluation is None
            else "once"
        )
        yield f"{name}{', ' * bool(when)}{when}", _chain(graph)
    yield "by", f"{spec.backend!r}"


def _chain(graph: Graph) -> str:
    nodes = (
        f"{n.name}({n.arguments['n']})" if isinstance(n.arguments.get("n"), int) else n.name
        for n in graph.nodes
    )
    return " → ".join([f"{len(graph.source.table):,} rows of {graph.source.name}", *nodes])


def _step(plan: Plan) -> Iterator[str]:
    sizes, steps = plan.sizes, plan.spec.schedule.steps
    each = sizes.rows // max(1, sizes.prompts)
    yield f"  {_count(sizes.prompts, 'prompt')} × {each} → {_count(sizes.rows, 'row')}"
    if sizes.prompt_tokens:
        response = (
            f"{sizes.response_tokens:,.0f} of {'a response at most' if sizes.sampled else 'a response'}"
        )
        total = sizes.rows * sizes.tokens_a_row
        yield (
            f"  tokens: {sizes.prompt_tokens:,.1f} of a prompt on average + {response} → {total:,.0f} in a step, "
            f"{total * steps:,.0f} in {_count(steps, 'step')}"
        )
    for update in plan.updates:
        per_step = max(1, update.microbatches_per_replica // update.optimizer_steps)
        where = f"{'each of ' * (update.replicas > 1)}{_count(update.replicas, 'replica')}"
        yield (
            f"  {update.node}: {_count(update.rows, 'row')} → {update.rows_per_replica:,} on {where} → "
            f"{_count(update.optimizer_steps, 'optimizer step')} of {_count(per_step, 'microbatch')} of "
            f"{_count(update.rows_per_microbatch, 'row')} at most"
        )
    for pipeline in plan.pipelines:
        chunks = f" in {pipeline.chunks} chunks each" if pipeline.chunks > 1 else ""
        how = "by these costs" if pipeline.played else "if all passes take equally long"
        yield (
            f"  {pipeline.node}: {_count(pipeline.stages, 'stage')}{chunks}, {_count(pipeline.microbatches, 'microbatch')} in turn: "
            f"idle for {pipeline.bubble:.1%} of what a stage computes, {how}"
        )
    for shared in plan.sequences:
        groups = " + ".join(f"{number} × {degree}" for degree, number in Counter(shared.degrees).items())
        where = (
            f" (in the slowest of {shared.optimizer_steps:,} optimizer steps)"
            if shared.optimizer_steps > 1
            else ""
        )
        yield (
            f"  {shared.node}: ranks in groups of {groups}{where} take {shared.seconds:,.3g} s, "
            f"at most {shared.gap:.1%} above the best there can be; groups of {shared.equal_degree} take {shared.equal_s:,.3g} s"
        )
    if plan.time is not None:
        how = "no schedule is quicker" if plan.time.at_best else "one call after the other"
        yield f"  time: {plan.time.seconds:,.3g} s a step, {_duration(plan.time.seconds * steps)} in all, by {plan.time.of} ({how})"
        if plan.time.nodes:
            yield "    " + ", ".join(
                f"{name} {seconds:,.3g}" for name, seconds in plan.time.nodes.items()
            )


def _count(number: int, what: str) -> str:
    """Format a number of things.

    >>> _count(1, "row"), _count(2000, "row"), _count(2, "microbatch")
    ('1 row', '2,000 rows', '2 microbatches')
    """
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def _duration(seconds: float) -> str:
    """Format seconds.

    >>> _duration(12.3), _duration(600), _duration(9000)
    ('12 s', '10 min', '2.5 h')
    """
    return (
        f"{seconds:,.0f} s"
        if seconds < 120
        else f"{seconds / 60:,.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:,.1f} h"
    )


def _group(group: GroupMemory) -> Sequence[str]:
    where = _count(group.ranks, "rank") + ("" if group.pool.endswith("'s own") else f" on {group.pool}")
    parts = {
        "libraries": group.libraries,
        **{f"{what} (host)": number for what, number in group.on_host.items()},
    }
    for phase, found in group.phases.items():
        parts |= {
            what if phase == "at rest" else f"{what} ({phase})": number for what, number in found.items()
        }
    parts = {what: number for what, number in parts.items() if number}
    small = [what for what, number in parts.items() if number < LEAST * sum(parts.values())]
    if len(small) > 1:
        parts["smaller ones"] = sum(parts.pop(what) for what in small)
    told = " + ".join(f"{what} {amount(number)}" for what, number in parts.items())
    total = amount(group.host) + (f" + {amount(group.device)} of a GPU" if group.on_gpu else "")
    unknown = f" ({group.unknown.splitlines()[0]})" if group.unknown else ""
    return group.group, where, total if parts else "-", (told or "in the driver's process") + unknown


def _machine(plan: Plan) -> Iterator[str]:
    machine = plan.machine
    short = "  NOT ENOUGH" if plan.host_bytes > machine.memory_bytes else ""
    there = f"this machine has {amount(machine.memory_bytes)}, {amount(machine.memory_free)} of it free{short}"
    there = "the host memory of the other machine is unknown" if machine.planned_for else there
    ranks = sum(group.ranks for group in plan.groups if group.libraries)
    yield (
        f"  together {amount(plan.host_bytes)} of host memory, {amount(plan.driver_bytes)} of it for the driver"
        f"{f', in {ranks + 1} processes' if ranks else ''}; {there}"
    )
    for pool, needed in plan.device_bytes.items():
        there = (
            f"one of the machine's {machine.gpus} has {amount(machine.gpu_bytes)}"
            if machine.gpus
            else "this machine has none"
        )
        short = "  NOT ENOUGH" if machine.gpus and needed > machine.gpu_bytes else ""
        yield f"  together {amount(needed)} of each GPU of {pool}; {there}{short}"
    if machine.gpus and not plan.device_bytes:
        yield f"  no GPU is used, but the machine has {machine.gpus}: no group with a model has a pool with gpus=..."


def _disk(plan: Plan) -> Iterable[Sequence[str]]:
    if plan.checkpoints:
        yield "checkpoints", f"{amount(plan.checkpoint_bytes)} each, up to {plan.checkpoints} at once"
    else:
        yield "checkpoints", "none"
    every = plan.spec.record_every
    yield (
        "samples",
        f"{amount(plan.sample_bytes)} at most, of each {'step' if every == 1 else f'{every}th step'}"
        if every
        else "none",
    )
    yield "together", f"{amount(plan.disk_bytes)}; {amount(plan.machine.disk_free)} are free here"


def _columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Align the cells of rows in columns. Long text continues below its last cell."""
    table = [list(row) for row in rows]
    if not table:
        return
    number = max(len(row) for row in table)
    widths = [max((len(row[k]) for row in table if len(row) > k), default=0) for k in range(number - 1)]
    for row in table:
        start = "  " + "".join(f"{cell:<{widths[k]}}  " for k, cell in enumerate(row[:-1]))
        yield from _wrapped(start, row[-1])


def _wrapped(start: str, text: str) -> Iterator[str]:
    # Keep a number and its unit on one line.
    line, words = start, re.split(r" (?![KMG]iB)", text)
    for word in words:
        if len(line) + len(word) > WIDTH and line.strip() and line != start:
            yield line.rstrip()
            line = " " * len(start)
        line += f"{word} "
    yield line.rstrip()
