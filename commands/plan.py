"""`weft plan`: what a script's run will be, before anything starts."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from ..dataflow.byte_units import GIB
from ..dataflow.errors import Planned, UserError
from .command import Answer, ScriptCommand
from .script import run_script, script_file

if TYPE_CHECKING:
    from ..controllers.dry_run import Planning
    from ..controllers.placement import OtherMachine
    from ..controllers.planner.plan import Plan
    from ..controllers.settings import Composed


@dataclass(frozen=True, kw_only=True)
class PlanRun(ScriptCommand):
    """Say what a script's run will be: its settings with the origin of each, its graphs, the sizes of a step, the memory of each rank
    beside what this machine has, and bytes on the disk. The script runs up to its first driver; nothing is started or written."""

    machine: Annotated[str | None, arg(metavar="GPUSxGB", help_behavior_hint="")] = None
    """Plan for the GPUs of another machine: 1x80 is one of 80 GB. It is taken to have four CPUs for each."""
    like: Annotated[str | None, arg(metavar="RUN", help_behavior_hint="")] = None
    """Directory of an earlier run, or its name under runs/: the time of a step is computed from what its calls took."""

    def answer(self) -> Answer:
        from ..controllers.dry_run import planning
        from ..controllers.planner.plan import plan_of
        from .plan_page import lines
        from .run_folder import find_run

        path, other = script_file(self.script), None if self.machine is None else _other(self.machine)
        like = None if self.like is None else find_run(self.like).resolve()
        with planning() as made, nullcontext() if other is None else other.assumed():
            try:
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
    """What `--machine` says.

    >>> _other("8x80")
    OtherMachine(gpus=8, gpu_bytes=85899345920)
    """
    from ..controllers.placement import OtherMachine

    number, _, size = machine.lower().partition("x")
    if not (number.isdecimal() and size.isdecimal() and int(size)):
        raise UserError(f"--machine {machine}: it is the number of GPUs and the GB of each, such as 1x80")
    return OtherMachine(int(number), int(size) * GIB)


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
        "groups": {g.group: {**asdict(g), "peak": g.peak, "host": g.host, "device": g.device} for g in plan.groups},
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
    return {name: {"value": str(values[name]), "origin": str(origin)} for name, origin in settings.origins.items()}
