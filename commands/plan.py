"""`weft plan`: preview of a script's run, before anything starts."""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ..dataflow.byte_units import gib
from ..dataflow.errors import Planned, UserError
from .command_line import Answer, ScriptArguments, Switch, find_run
from .run import run_script, script_file

if TYPE_CHECKING:
    from ..controllers.prechecks.dry_run import Planning
    from ..controllers.prechecks.plan import Plan
    from ..controllers.prechecks.plan_memory import GroupMemory
    from ..dataflow.graph import Graph


def plan(
    script: Annotated[Positional[str], arg(metavar="SCRIPT.py", help_behavior_hint="")] = "",
    arguments: ScriptArguments = (),
    *,
    machine: Annotated[str | None, arg(metavar="[NODESx]GPUSxGB", help_behavior_hint="")] = None,
    like: Annotated[str | None, arg(metavar="RUN", help_behavior_hint="")] = None,
    search: Switch = False,
    out: Annotated[Path, arg(metavar="FILE")] = Path("plan.json"),
    fleet: Annotated[Path | None, arg(metavar="PRICES.toml", help_behavior_hint="")] = None,
) -> Answer:
    """Preview a script's run: its settings and their origins, its graphs, the sizes of a step, and
    the memory and disk space it needs. The script runs until it creates its first Driver. Weft
    starts nothing, and writes nothing without --search.

    Args:
        script: A Python file.
        arguments: The script's arguments: all words after SCRIPT.
        machine: Plan for the GPUs of another machine, such as 1x80 for one GPU of 80 GB, or 4x8x80
            for four nodes of eight. The plan assumes four CPUs per GPU.
        like: An earlier run: its directory, or its name under runs/. The plan estimates the time of
            a step from the durations of its calls.
        search: Print the best placements of the worker groups instead, and write the best one to
            a file for the script's option --placement. Needs --like, or a simulated script.
        out: The file that --search writes.
        fleet: Without SCRIPT, print the cheapest GPUs of several kinds for a load. The file has the
            load, and the price and rates of each kind.
    """
    if fleet is not None:
        return _fleet(fleet)
    if not script:
        raise UserError("name a script, such as weft plan train.py, or --fleet PRICES.toml")
    from ..controllers.node_layout import assumed_machine
    from ..controllers.prechecks.dry_run import not_planning, planning
    from ..controllers.prechecks.plan import plan_of

    path, other = script_file(script), None if machine is None else _other(machine)
    earlier = None if like is None else find_run(like).resolve()
    assumed = nullcontext() if other is None else assumed_machine(other[0] * other[1], other[2])
    with planning() as made, assumed:
        try:
            # Standard output is for the plan alone.
            with redirect_stdout(sys.stderr):
                code = run_script(path, arguments)
        except Planned:
            code = 0
        if made.spec is None:
            if code:
                return Answer({"script": script, "exit_code": code}, exit_code=code)
            raise UserError(f"{path} made no weft.Driver, so there is nothing to plan")
        if search:
            from .placements import search as search_placements

            with not_planning():
                return search_placements(made.spec, other, earlier, out)
        planned = plan_of(made.spec, earlier)
        return Answer(_found(planned, made), "\n".join(lines(planned, made)))


def _fleet(path: Path) -> Answer:
    """Find the cheapest fleet for the load and the prices of a TOML file."""
    from ..controllers.planner.fleet import GpuKind, cheapest_fleet

    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        load = [float(rate) for rate in found["load"]]
        kinds = {
            name: GpuKind(float(each["price"]), [float(rate) for rate in each["rates"]])
            for name, each in found["kinds"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--fleet {path}: {error!r}; the file has load = [requests per second of each slice] and, for each kind of GPU, "
            "[kinds.NAME] with price = ... and rates = [requests per second that one GPU serves of each slice]"
        ) from None
    best = cheapest_fleet(kinds, load)
    counts = ", ".join(f"{number} {name}" for name, number in best.gpus.items() if number)
    slices = [
        f"  slice {k}: {rate:g} requests/s on {name}"
        for k, (rate, name) in enumerate(zip(load, best.kinds, strict=True))
    ]
    text = "\n".join([f"cheapest fleet: {counts} for {best.price:g}", *slices])
    return Answer({"price": best.price, "gpus": dict(best.gpus), "kinds": list(best.kinds)}, text)


def _other(machine: str) -> tuple[int, int, int]:
    """Parse `--machine` into the number of nodes, the GPUs of each, and the bytes of each GPU.

    >>> _other("8x80"), _other("4x8x80")
    ((1, 8, 85899345920), (4, 8, 85899345920))
    """
    parts = machine.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(
            f"--machine {machine}: give the number of GPUs and the GB of each, such as 1x80, or also of nodes, such as 4x8x80"
        )
    *nodes, gpus, size = map(int, parts)
    return nodes[0] if nodes else 1, gpus, size << 30


def _found(plan: Plan, made: Planning) -> dict[str, Any]:
    spec, sizes = plan.spec, plan.sizes
    return {
        "settings": {
            name: {"value": value, "origin": origin} for name, value, origin in made.settings or ()
        },
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


# The plan as text


def lines(plan: Plan, made: Planning) -> Iterator[str]:
    yield from _before(made)
    if made.settings is not None:
        yield from ("SETTINGS", *_columns(made.settings))
    yield from ("", "WHAT HAPPENS", *_columns(_graphs(plan)))
    yield from ("", f"A STEP ({plan.spec.schedule!r})", *_step(plan))
    yield from ("", "MEMORY OF A RANK, at most", *_columns([_group(group) for group in plan.groups]))
    for group in plan.groups:
        for number, stage in enumerate(group.stages):
            yield (
                f"  {group.group}, stage {number}: {gib(stage.peak)} for {_count(stage.layers, 'layer')}: weights "
                f"{gib(stage.made.weights)}, activations {gib(stage.activations)} (of microbatches in flight: {stage.in_flight:g})"
            )
    yield from _machine(plan)
    yield from ("", "DISK", *_columns(_disk(plan)))


def _before(made: Planning) -> Iterator[str]:
    found = [f"makes {path}; this plan uses a sketch of it" for path in made.sketched]
    found += [f"makes one pass over {rows:,} rows with graph {graph}" for graph, rows in made.passes]
    if found:
        yield from ("BEFORE THE RUN the script", *(f"  {each}" for each in found), "")


def _graphs(plan: Plan) -> Iterable[Sequence[str]]:
    spec = plan.spec
    for name, graph in spec.graphs.items():
        evaluation = spec.evaluations.get(name)
        every = evaluation.every if evaluation is not None else None
        when = "" if evaluation is None else f", every {every} steps" if every else ", once"
        yield f"{name}{when}", _chain(graph)
    yield "by", f"{spec.backend!r}"


def _chain(graph: Graph) -> str:
    several = {n.name: n.arguments.get("n") for n in graph.nodes}
    nodes = (f"{name}({n})" if isinstance(n, int) else name for name, n in several.items())
    return " → ".join([f"{len(graph.source.table):,} rows of {graph.source.name}", *nodes])


def _step(plan: Plan) -> Iterator[str]:
    sizes, steps = plan.sizes, plan.spec.schedule.steps
    each = sizes.rows // max(1, sizes.prompts)
    yield f"  {_count(sizes.prompts, 'prompt')} × {each} → {_count(sizes.rows, 'row')}"
    if sizes.prompt_tokens:
        most = " at most" if sizes.sampled else ""
        response = f"{sizes.response_tokens:,.0f} of a response{most}"
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
        number = shared.optimizer_steps
        where = f" (in the slowest of {number:,} optimizer steps)" if number > 1 else ""
        yield (
            f"  {shared.node}: ranks in groups of {groups}{where} take {shared.seconds:,.3g} s, "
            f"at most {shared.gap:.1%} above the best there can be; groups of {shared.equal_degree} take {shared.equal_s:,.3g} s"
        )
    if plan.time is not None:
        how = "no schedule is quicker" if plan.time.at_best else "one call after the other"
        yield f"  time: {plan.time.seconds:,.3g} s a step, {_duration(plan.time.seconds * steps)} in all, by {plan.time.of} ({how})"
        by_node = [f"{name} {seconds:,.3g}" for name, seconds in plan.time.nodes.items()]
        if by_node:
            yield f"    {', '.join(by_node)}"


def _count(number: int, what: str) -> str:
    """Format a count with its noun.

    >>> _count(1, "row"), _count(2000, "row"), _count(2, "microbatch")
    ('1 row', '2,000 rows', '2 microbatches')
    """
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def _duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> _duration(12.3), _duration(600), _duration(9000)
    ('12 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _group(group: GroupMemory) -> Sequence[str]:
    where = _count(group.ranks, "rank") + ("" if group.pool.endswith("'s own") else f" on {group.pool}")
    parts = {"libraries": group.libraries}
    for phase, found in {"host": group.on_host, **group.phases}.items():
        suffix = "" if phase == "at rest" else f" ({phase})"
        parts |= {f"{what}{suffix}": number for what, number in found.items()}
    parts = {what: number for what, number in parts.items() if number}
    small = [what for what, number in parts.items() if number < 0.005 * sum(parts.values())]
    if len(small) > 1:
        parts["smaller ones"] = sum(parts.pop(what) for what in small)
    told = " + ".join(f"{what} {gib(number)}" for what, number in parts.items())
    total = gib(group.host) + (f" + {gib(group.device)} of a GPU" if group.on_gpu else "")
    unknown = f" ({group.unknown.splitlines()[0]})" if group.unknown else ""
    return group.group, where, total if parts else "-", (told or "in the driver's process") + unknown


def _machine(plan: Plan) -> Iterator[str]:
    machine = plan.machine
    short = "  NOT ENOUGH" if plan.host_bytes > machine.memory_bytes else ""
    there = f"this machine has {gib(machine.memory_bytes)}, {gib(machine.memory_free)} of it free{short}"
    there = "the host memory of the other machine is unknown" if machine.planned_for else there
    ranks = sum(group.ranks for group in plan.groups if group.libraries)
    yield (
        f"  together {gib(plan.host_bytes)} of host memory, {gib(plan.driver_bytes)} of it for the driver"
        f"{f', in {ranks + 1} processes' if ranks else ''}; {there}"
    )
    for pool, needed in plan.device_bytes.items():
        has = f"one of the machine's {machine.gpus} has {gib(machine.gpu_bytes)}"
        there = has if machine.gpus else "this machine has none"
        short = "  NOT ENOUGH" if machine.gpus and needed > machine.gpu_bytes else ""
        yield f"  together {gib(needed)} of each GPU of {pool}; {there}{short}"
    if machine.gpus and not plan.device_bytes:
        yield f"  no GPU is used, but the machine has {machine.gpus}: no group with a model has a pool with gpus=..."


def _disk(plan: Plan) -> Iterable[Sequence[str]]:
    if plan.checkpoints:
        yield "checkpoints", f"{gib(plan.checkpoint_bytes)} each, up to {plan.checkpoints} at once"
    else:
        yield "checkpoints", "none"
    every = plan.spec.record_every
    step = "step" if every == 1 else f"{every}th step"
    of_samples = f"{gib(plan.sample_bytes)} at most, of each {step}"
    yield "samples", of_samples if every else "none"
    yield "together", f"{gib(plan.disk_bytes)}; {gib(plan.machine.disk_free)} are free here"


def _columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Align the cells of rows in columns, and wrap a long last cell within its column."""
    table = [list(row) for row in rows]
    if not table:
        return
    number = max(len(row) for row in table)
    widths = [max((len(row[k]) for row in table if len(row) > k), default=0) for k in range(number - 1)]
    for row in table:
        start = "  " + "".join(f"{cell:<{widths[k]}}  " for k, cell in enumerate(row[:-1]))
        text = re.sub(r" ([KMG]iB)", "\xa0\\1", row[-1])  # keep a number and its unit on one line
        wrapped = textwrap.wrap(
            text,
            118,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield from (line.replace("\xa0", " ") for line in wrapped or [start.rstrip()])
