"""`weft plan`: what a script's run will be, before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dataflow.errors import Planned, UserError
from .command import Answer, ScriptCommand
from .script import run_script, script_file

if TYPE_CHECKING:
    from ..controllers.planner.plan import Plan
    from ..controllers.settings import Composed

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PlanRun(ScriptCommand):
    """Say what a script's run will be: its settings with the origin of each, its graph, groups and ranks, the sizes of a step, memory, and
    bytes on the disk. The script runs up to its first driver; nothing is started, and nothing is written."""

    def answer(self) -> Answer:
        from ..controllers.planner.plan import plan_of
        from ..controllers.planning import planning

        path = script_file(self.script)
        with planning() as made:
            try:
                with redirect_stdout(sys.stderr):
                    code = run_script(path, self.arguments)
            except Planned:
                code = 0
            if made.spec is None:
                if code:
                    return Answer({"script": self.script, "exit_code": code}, exit_code=code)
                raise UserError(f"{path} made no weft.Driver, so there is nothing to plan")
            plan = plan_of(made.spec)
            return Answer(_found(plan, made.settings), "\n".join(_text(plan, made.settings)))


def _found(plan: Plan, settings: Composed | None) -> dict[str, Any]:
    spec = plan.spec
    return {
        "settings": _settings(settings) if settings else {},
        "graphs": {name: str(graph).splitlines() for name, graph in spec.graphs.items()},
        "schedule": {"kind": type(spec.schedule).__name__, **dict(spec.schedule)},
        "backend": repr(spec.backend),
        "step": {
            "prompts": plan.prompts,
            "samples": plan.samples,
            "rows": plan.prompts * plan.samples,
            "prompt_tokens": plan.prompt_tokens,
            "max_tokens": plan.max_tokens,
            "updates": [asdict(update) for update in plan.updates],
        },
        "groups": {g.group: {**asdict(g), "peak": g.peak} for g in plan.groups},
        "pools": dict(plan.needed),
        "machine": dict(plan.machine),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "disk_bytes": plan.disk_bytes,
    }


def _settings(settings: Composed) -> dict[str, Any]:
    values = settings.values
    return {name: {"value": str(values[name]), "origin": str(origin)} for name, origin in settings.origins.items()}


def _text(plan: Plan, settings: Composed | None) -> Iterator[str]:
    if settings is not None:
        yield "settings"
        for name, origin in settings.origins.items():
            value = settings.values[name]
            value = str(value) if isinstance(value, Path) else value
            yield f"  {name} = {value!r}  ({origin})"
    spec = plan.spec
    for name, graph in spec.graphs.items():
        yield f"graph {name}"
        yield from (f"  {line}" for line in str(graph).splitlines())
    yield f"schedule {spec.schedule!r}, backend {spec.backend!r}"
    yield "a step"
    yield f"  {plan.prompts:,} prompts × {plan.samples} samples = {plan.prompts * plan.samples:,} rows"
    if plan.prompt_tokens:
        yield f"  prompts of {plan.prompt_tokens:,.1f} tokens on average, responses of up to {plan.max_tokens:,}"
    for update in plan.updates:
        yield (
            f"  {update.node}: {update.rows:,} rows, {update.rows_per_replica:,} on each replica, up to {update.tokens:,} tokens; "
            f"up to {update.microbatches_per_replica:,} microbatches on each replica, optimizer steps: {update.optimizer_steps}"
        )
    yield "memory of each rank, in MiB, without activations and without what Python and its libraries take"
    for group in plan.groups:
        yield f"  {group.group}: {group.ranks} rank{'s' * (group.ranks != 1)} on pool {group.pool!r}" + _unknown(
            group.unknown
        )
        yield from (f"    {phase}: {_mib(found)}" for phase, found in group.phases.items() if found)
    machine = plan.machine
    for pool, needed in plan.needed.items():
        if needed:
            yield f"  pool {pool!r}: {needed / MIB:,.1f} MiB in all, if all of its groups are at their peak at once"
    yield f"this machine: {machine['cpus']} CPUs, {machine['gpus']} GPUs, {machine['memory_bytes'] / MIB:,.0f} MiB of memory"
    if plan.disk_bytes:
        yield f"a checkpoint: {plan.checkpoint_bytes / MIB:,.1f} MiB; those of the run: up to {plan.disk_bytes / MIB:,.1f} MiB"
    else:
        yield "no checkpoints"


def _mib(found: Mapping[str, int]) -> str:
    return ", ".join(f"{what} {number / MIB:,.2f}" for what, number in found.items())


def _unknown(why: str) -> str:
    return f" (memory unknown: {why})" if why else ""
