"""GRPO steps on GPUs: tokens per second, MFU and seconds per phase, compared with TRL and published
figures.

    python benchmarks/gpu.py                            # every model that fits, on one GPU and on all
    python benchmarks/gpu.py --models 8B --gpus 8
    python benchmarks/gpu.py --small                    # a tiny model on a CPU, to see that it works

A step has 64 prompts of 1,024 tokens with 8 responses of 2,048 tokens each, like docs/gpu.md. The
models have the exact sizes of Qwen3-0.6B, Qwen2.5-1.5B and Qwen3-8B, and random weights; nothing is
downloaded. Weft and TRL with colocated vLLM run one after the other, each alone on the GPUs.
`SETTINGS` has the settings of each model and number of GPUs. docs/gpu.md explains how to install
TRL.

    step_s: seconds of a step, median.
    tokens_per_s, tokens_per_s_per_gpu: prompt and response tokens of all samples, in that time.
    phases: seconds of a step by phase; overlapping time counts once. `driver` is time without a
        call.
    mfu, update_mfu: arithmetic that the update needs, over the peak of the GPUs in a step and in
        the update alone. It counts each prompt once, and recomputes nothing.
    ratio_to_trl: TRL's step_s / step_s.
    published: results of others, from their documents, not measured here.

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parent / each) for each in ("gpu", "steps", "")]
from gpu_model import MODELS, NAMES  # pyright: ignore[reportMissingImports]
from grpo_step import PARTS  # pyright: ignore[reportMissingImports]
from machine import PEERS, describe_machine, has_peers
from published import STEPS, TRAINERS, WEIGHTS, Published  # pyright: ignore[reportMissingImports]
from records import shares
from turns import Steps, ratio, seconds_of
from workloads import Workload

from weft.controllers.node_layout import machine_gpus

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 3600.0
"""[s] Longest time of a system on one model."""
PHASES = {**PARTS, "onload": "turns", "offload": "turns"}
"""Maps a node to its phase: `turns` is the time to hand GPUs to another group."""
SETTINGS: dict[tuple[str, int], dict[str, Any]] = {
    ("0.6B", 1): {"actor": {"activation_checkpointing": "elementwise"}},
    ("1.5B", 1): {},
    ("8B", 1): {"lora": 16},
    ("0.6B", 8): {"actor": {"activation_checkpointing": False}},
    ("1.5B", 8): {"actor": {"activation_checkpointing": False}},
    ("8B", 8): {},
}
"""Changes to the settings of `weft.train`, by model and GPUs (docs/gpu.md). One GPU of 80 GB trains
an adapter of the 8B model. TRL trains an adapter of the same rank."""


def work_of(name: str, asked: argparse.Namespace) -> Workload:
    shape = MODELS[name]
    return Workload(
        name,
        num_prompts=asked.prompts,
        max_tokens=asked.response_tokens,
        vocabulary=shape.vocabulary,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        mlp=shape.intermediate,
        num_samples=asked.samples,
        prompt_tokens=asked.prompt_tokens,
    )


def measure(name: str, gpus: int, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of Weft, and of TRL if it is installed, on one model."""
    work, chosen = work_of(name, asked), SETTINGS.get((name, gpus), {})
    dtype = "bfloat16" if gpus else "float32"
    made = {"name": name, "work": asdict(work), "dtype": dtype}
    device = json.loads(_run([sys.executable, HERE / "gpu" / "gpu_model.py", folder, json.dumps(made)]))
    lora = chosen.get("lora")
    settings = {"workload": asdict(work), "gpus": gpus, "steps": asked.steps, "lora": lora}
    own = {"actor": chosen.get("actor", {}), "rollout": chosen.get("rollout", {})}
    # vLLM computes in float32 on a CPU, and needs little room for a tiny model.
    if not gpus:
        own["rollout"] = {"kv_cache_gib": 0.25}
    program = HERE / "gpu" / "gpu_steps.py"
    _run([sys.executable, program, folder, json.dumps(settings | own)], log=folder / "weft.log")
    weft: Steps = json.loads((folder / "weft.json").read_text())
    trl: Steps = []
    if has_peers(asked.peers, "TRL"):
        try:
            trl = _trl(folder, settings | {"microbatch": asked.trl_microbatch}, gpus)
        except RuntimeError as error:
            # The comparison must not cost Weft's figures.
            print(f"  TRL failed: {error}", flush=True)
    return {**device, **summarize(name, gpus, work, weft, trl, device["peak_flops"], adapter=lora)}


def _trl(folder: Path, settings: Mapping[str, Any], gpus: int) -> Steps:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    program = [HERE / "gpu" / "trl_gpu.py", folder, json.dumps(settings)]
    _run([PEERS, *(launch if gpus > 1 else []), *program], log=folder / "trl.log")
    return json.loads((folder / "trl.json").read_text())


def _run(command: Sequence[object], log: Path | None = None) -> str:
    """Run a program, and return the last line that it printed. Its errors go to its log.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if log is not None:
        log.write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"{command[1]} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout.strip().rpartition("\n")[2]


def summarize(
    name: str,
    gpus: int,
    work: Workload,
    weft: Steps,
    trl: Steps,
    peak_flops: float,
    *,
    adapter: int | None = None,
) -> dict[str, Any]:
    """Return the figures of one model."""
    devices = max(1, gpus)
    step_s, trl_s = seconds_of(weft), seconds_of(trl)
    assert step_s is not None
    tokens = work.rows * work.context
    nodes = {call["node"] for step in weft for call in step["calls"]}
    # Nodes without a phase keep their own name.
    phases = shares(weft, {**PHASES, **{node: node for node in nodes - PHASES.keys()}})
    seconds = {phase: round(share * step_s, 4) for phase, share in phases.items() if share}
    needed = MODELS[name].training_flops(work, adapter=adapter is not None) / (devices * peak_flops)
    return {
        "model": NAMES[name],
        "gpus": gpus,
        "adapter_rank": adapter,
        "step_s": round(step_s, 4),
        "tokens_per_s": round(tokens / step_s, 1),
        "tokens_per_s_per_gpu": round(tokens / step_s / devices, 1),
        "phases": seconds,
        "mfu": round(needed / step_s, 4),
        "update_mfu": round(needed / seconds["update"], 4) if "update" in seconds else None,
        "trl_step_s": ratio(trl_s, 1.0),
        "ratio_to_trl": ratio(trl_s, step_s),
        "steps": len(weft),
    }


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{'':<44} {'GPUs':>4} {'tokens/s/GPU':>13} {'s/step':>8} {'MFU':>6}  phases [s]")
    for found in results.values():
        adapter = found["adapter_rank"]
        what = f"Weft, {found['model']}" + (f", adapter of rank {adapter}" if adapter else "")
        _print_row(
            what,
            found["gpus"],
            found["tokens_per_s_per_gpu"],
            found["step_s"],
            found["mfu"],
            found["phases"],
        )
        if found["trl_step_s"]:
            each = found["tokens_per_s_per_gpu"] * found["step_s"] / found["trl_step_s"]
            _print_row(f"TRL with vLLM, {found['model']}", found["gpus"], each, found["trl_step_s"])
    print("\nPublished, on other work; nobody measured these here:")
    for title, kind in (
        ("steps", STEPS),
        ("trainers alone, s/microbatch", TRAINERS),
        ("weights", WEIGHTS),
    ):
        print(f"  {title}")
        for each in kind:
            what = f"{each.system}, {each.model}"
            _print_row(what, each.gpus, each.tokens_per_s_per_gpu, each.step_s, each.mfu, each.phases)
            print(f"    {each.work} ({each.source})")


def _print_row(
    what: str,
    gpus: int,
    tokens: float | None,
    step_s: float | None,
    mfu: float | None = None,
    phases: Mapping[str, float] | None = None,
) -> None:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    parts = ", ".join(f"{phase} {seconds:.3g}" for phase, seconds in (phases or {}).items())
    print(
        f"{what:<44} {gpus:>4} {shown(tokens, ',.0f'):>13} {shown(step_s, '.4g'):>8} {shown(mfu, '.1%'):>6}  {parts}"
    )


def published_of(results: Sequence[Published]) -> list[dict[str, Any]]:
    return [asdict(each) for each in results]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("0.6B", "1.5B", "8B"))
    parser.add_argument("--gpus", nargs="+", type=int, help="default: 1, and all GPUs of the machine")
    parser.add_argument("--steps", type=int, default=3, help="counted steps")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--response-tokens", type=int, default=2048)
    parser.add_argument("--trl-microbatch", type=int, default=4, help="rows on each GPU")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave TRL out")
    parser.add_argument(
        "--folder", type=Path, help="for models of up to 16 GB; default: a temporary one"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU: not a measurement")
    asked = parser.parse_args(arguments)
    there = machine_gpus()
    if asked.small:
        asked.models, asked.gpus, asked.steps = ["tiny"], [0], 1
        asked.prompts, asked.samples, asked.prompt_tokens, asked.response_tokens = 2, 4, 16, 8
        return asked
    asked.models = asked.models or ["0.6B", "1.5B", "8B"]
    asked.gpus = asked.gpus or sorted({1, there})
    if not there:
        parser.error("this machine has no GPUs; use --small")
    if max(asked.gpus) > there or min(asked.gpus) < 1:
        parser.error(
            f"this machine has {there} GPUs, so --gpus {' '.join(map(str, asked.gpus))} cannot run; --small needs none"
        )
    return asked


def main() -> None:
    asked = parse_arguments()
    results: dict[str, Any] = {}
    for name in asked.models:
        for gpus in asked.gpus:
            print(
                f"{NAMES[name]} on {gpus} GPUs ..." if gpus else f"{NAMES[name]} on a CPU ...",
                flush=True,
            )
            with tempfile.TemporaryDirectory(prefix="weft-gpu-", dir=asked.folder) as folder:
                results[f"{name}, {gpus} GPUs"] = measure(name, gpus, asked, Path(folder))
    print_table(results)
    published = {
        "steps": published_of(STEPS),
        "trainers": published_of(TRAINERS),
        "weights": published_of(WEIGHTS),
    }
    print(json.dumps({"machine": describe_machine(), "results": results, "published": published}))


if __name__ == "__main__":
    main()
