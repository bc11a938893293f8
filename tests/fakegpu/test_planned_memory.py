"""Plans of memory against torch's real allocators on a fake GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpu_tables import ADAPTER, MACHINES, Machine

from weft.controllers.backends.rank import allocator_settings
from weft.controllers.planner.phase_memory import ASLEEP, CUDA
from weft.dataflow.byte_units import GIB
from weft.dataflow.graph import group
from weft.workers.rollout import RolloutWorker

pytestmark = pytest.mark.fakegpu
DOCS = Path(__file__).parents[2] / "docs" / "gpu.md"
Run = Callable[..., dict[str, Any]]
QUICK = (("Qwen2.5-7B", "adapter"), ("Qwen2.5-1.5B", "all"))
"""Rows of one GPU of 80 GB that are measured without waiting for the whole table."""


def rows_of(machine: Machine) -> list[dict[str, Any]]:
    """Return the rows of a machine's table in the docs, with the documented GiB of each GPU."""
    title = f"### {machine.gpus} x {machine.gib} GB, passes of {machine.microbatch_tokens:,} tokens\n"
    found = []
    for line in DOCS.read_text().partition(title)[2].partition("\n###")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) < 7 or not cells[3].isdigit():
            continue
        model, what, said, gib = cells[:4]
        settings = {} if said == "none" else eval_settings(said)
        settings |= {"rank": ADAPTER.rank} if what == "adapter" else {}
        row = {"model": model, "what": what, "settings": settings, "documented": int(gib)}
        row["host_gib"] = int(cells[5])
        place = {"gpus": machine.gpus, "gib": machine.gib, "tokens": machine.microbatch_tokens}
        found.append({**row, **place})
    return found


def eval_settings(said: str) -> dict[str, Any]:
    values = {"True": True, "'elementwise'": "elementwise", "'moments'": "moments"}
    values["'everything'"] = "everything"
    parts = (part.strip(" `").split("=") for part in said.split(","))
    return {name: values[value] for name, value in parts}


def allocators() -> dict[str, str]:
    """Settings of a rank without expandable segments, which the fake driver does not have."""
    return allocator_settings(group(RolloutWorker, model="m"), {})  # pyright: ignore


def check(run: Run, rows: list[dict[str, Any]]) -> None:
    shares: dict[str, float] = {}
    for row in rows:  # each in a separate process, because others leave fragments
        found = run("full_size.py", within_s=1800, ROWS=json.dumps([row]), SHIM_SKIP=1, **allocators())
        name = f"{row['gpus']} x {row['gib']}, {row['model']}, {row['what']}"
        allocated = found["rows"][0]["allocated"] + CUDA + ASLEEP
        shares[name] = allocated / ((row["documented"] + 0.5) * GIB)
    assert all(share <= 1.05 for share in shares.values()), shares


def test_a_gpu_holds_what_the_docs_say(run_on_fake_gpu: Run):
    rows = [row for row in rows_of(MACHINES[1]) if (row["model"], row["what"]) in QUICK]
    assert len(rows) == len(QUICK)
    check(run_on_fake_gpu, rows)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: f"{machine.gpus}x{machine.gib}")
def test_every_row_of_the_docs_fits(run_on_fake_gpu: Run, machine: Machine):
    rows = rows_of(machine)
    assert len(rows) >= 14
    # Pinned memory of the host is real.
    most = psutil.virtual_memory().available / GIB / 3
    check(run_on_fake_gpu, [row for row in rows if row["host_gib"] / row["gpus"] < most])


def test_host_memory_of_an_offloaded_trainer_is_as_planned(run_on_fake_gpu: Run):
    found = run_on_fake_gpu("colocated.py", **allocators())
    assert found["measured"] == pytest.approx(found["planned"], rel=0.1)


@pytest.mark.parametrize("offload", ["moments", "everything"])
def test_pinned_memory_is_as_planned(run_on_fake_gpu: Run, offload: str):
    from gpu_tables import _size

    from weft.controllers.planner.phase_memory import placed
    from weft.workers.actor import ActorConfig
    from weft.workers.training.memory import training_memory

    settings: dict[str, Any] = {"activation_checkpointing": True, "offload": offload}
    row = {"model": "Qwen2.5-0.5B", "gpus": 1, "gib": 80, "tokens": 4096, "settings": settings}
    made = run_on_fake_gpu(
        "full_size.py", ROWS=json.dumps([{**row, "whole": True}]), SHIM_SKIP=1, **allocators()
    )
    config = ActorConfig(model="m", dtype="bfloat16", **settings)
    planned = training_memory(_size(row["model"]), config, ranks=1, trains=True, lora=None, saves=False)
    host = placed(planned, config, on_gpu=True)[2]
    if offload == "everything":  # not pinned
        del host["moments"], host["gradients added"]
    assert made["rows"][0]["offloaded"] < 64 << 20, "the next group on the GPU needs the rest"
    assert made["rows"][0]["pinned"] == pytest.approx(sum(host.values()), rel=0.1)
