"""Complete GRPO steps: Weft, the bound without an orchestrator, and TRL, in turns on the same
workloads.

    make bench                                 # everything; `make bench-peers` first, for the comparison with TRL
    make bench ARGS="--workloads a --steps 4"
    make bench ARGS="--small --no-peers"       # seconds, to see that it works

docs/benchmarks.md explains the comparison. The last line printed is one JSON object:

    step_s: seconds of a Weft step, median.
    samples_per_s, tokens_per_s: responses, and their tokens, in that time.
    shares: parts of Weft's time by call, adding up to 1: overlapping time counts for the update
        first and for record (samples) last; driver is time without a call.
    outside_workers: share of the time that calls spend between driver and workers; part of
        shares.
    bound_s, bound_generate_s, bound_train_s: the bound's step and its halves; medians.
    trl_s, trl_vllm_s: TRL's step, without and with vLLM; medians.
    ratio_to_bound: bound_s / step_s; above 1 is possible, because replicas of one thread can be
        faster than one process with several.
    ratio_to_trl: the smaller of TRL's two / step_s; ratio_to_trl_per_token is the same per
        token, because TRL samples other lengths in (c).
    tokens_per_step: response tokens of each system, mean.
    placement: ranks of actor and rollout: the faster of one rank on all cores and one rank per
        core.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from machine import PEERS, cores, describe_machine, has_peers
from records import outside_workers, shares
from turns import Steps, System, ratio, seconds_of, take_turns
from workloads import WORKLOADS, Workload, prepare

HERE = Path(__file__).resolve().parent

PARTS = {
    "actor.update": "update",
    "publish_weights": "weights",
    "finish_publishing": "weights",
    "receive_weights": "weights",
    "rollout.generate": "generate",
    "group_advantages": "advantages",
    "reward.score": "reward",
    "recorder.record": "record",
}
"""Maps a node to its part of a step. Overlapping time counts for the first node here."""
SYSTEMS = ("weft", "bound", "trl", "trl_vllm")


def main() -> None:
    arguments = parse_arguments()
    peers = has_peers(not arguments.no_peers, "TRL")
    results: dict[str, Any] = {"machine": describe_machine()}
    print("  ".join(f"{name}: {value}" for name, value in results["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        for name in arguments.workloads:
            workload = WORKLOADS[name].small() if arguments.small else WORKLOADS[name]
            print(f"\n{workload.described}", flush=True)
            systems = Systems(workload, prepare(workload, Path(folder) / name), peers)
            measured, settings = systems.measure(arguments.steps)
            results[name] = {**summarize(workload, measured), **settings}
            print(json.dumps(results[name]), flush=True)
    print(json.dumps(results))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", default="a,b,c", type=_names, help="some of a, b, c; default: all"
    )
    parser.add_argument("--steps", type=int, help="counted steps per system; default: 8 (--small: 2)")
    parser.add_argument("--no-peers", action="store_true", help="leave TRL out")
    parser.add_argument(
        "--small", action="store_true", help="tiny models and few steps: not a measurement"
    )
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (2 if arguments.small else 8)
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, not {arguments.steps}")
    return arguments


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return names


class Systems:
    def __init__(self, workload: Workload, folder: Path, peers: bool) -> None:
        self._workload, self._folder, self._peers = workload, folder, peers

    def weft(self, placement: tuple[int, int]) -> System:
        actor, rollout = placement
        settings = {"actor_ranks": actor, "rollout_ranks": rollout, "cores": cores()}
        return self._start("weft_steps.py", "grpo", settings, log="weft")

    def bound(self) -> System:
        return self._start("grpo_bound.py", {}, log="bound")

    def trl(self, microbatch: int, *, vllm: bool = False) -> System:
        settings = {"microbatch": microbatch, "use_vllm": vllm}
        return self._start(
            "trl_steps.py", "grpo", settings, log="trl_vllm" if vllm else "trl", python=PEERS
        )

    def _start(
        self, script: str, *words: object, log: str, python: Path | str = sys.executable
    ) -> System:
        *kind, settings = words
        given = json.dumps({"workload": asdict(self._workload), **settings})  # pyright: ignore[reportGeneralTypeIssues]
        return System(
            HERE / script, *kind, self._folder, given, log=self._folder / f"{log}.log", python=python
        )

    def measure(self, steps: int) -> tuple[dict[str, Steps], dict[str, Any]]:
        """Return the counted steps and the settings of each system."""
        actor, rollout = self._workload.placement
        placement = min(actor, cores()), min(rollout, cores())
        microbatch = self._workload.trl_microbatch
        starts: dict[str, Callable[[], System]] = {
            "weft": lambda: self.weft(placement),
            "bound": self.bound,
        }
        if self._peers:
            starts |= {
                "trl": lambda: self.trl(microbatch),
                "trl_vllm": lambda: self.trl(microbatch, vllm=True),
            }

        def told(name: str, made: Steps) -> dict[str, Any]:
            return {"lengths": [step["lengths"] for step in made]} if name == "bound" else {}

        measured, facts = take_turns(starts, steps, told)
        settings: dict[str, Any] = {"placement": {"actor": placement[0], "rollout": placement[1]}}
        settings |= {
            f"{name}_microbatch": fact["microbatch"]
            for name, fact in facts.items()
            if "microbatch" in fact
        }
        return measured, settings


def summarize(workload: Workload, measured: Mapping[str, Steps]) -> dict[str, Any]:
    """Return one workload's results as medians over steps."""

    def token_seconds(name: str) -> float:
        return sum(step["step_s"] for step in measured[name]) / sum(
            step["tokens"] for step in measured[name]
        )

    weft, bound = measured["weft"], measured.get("bound", [])
    seconds = {name: seconds_of(measured.get(name, [])) for name in SYSTEMS}
    weft_s = seconds["weft"]
    assert weft_s is not None
    peers = [name for name in ("trl", "trl_vllm") if name in measured]
    best = min((s for name in peers if (s := seconds[name]) is not None), default=None)
    parts = {f"bound_{part}_s": seconds_of(bound, f"{part}_s") for part in ("generate", "train")}
    return {
        "step_s": round(weft_s, 4),
        "samples_per_s": round(workload.rows / weft_s, 2),
        "tokens_per_s": round(
            seconds_of([{"rate": s["tokens"] / s["step_s"]} for s in weft], "rate") or 0.0, 1
        ),
        "shares": shares(weft, PARTS),
        "outside_workers": outside_workers(weft),
        "ratio_to_bound": ratio(seconds["bound"], weft_s),
        "ratio_to_trl": ratio(best, weft_s),
        "ratio_to_trl_per_token": ratio(
            min(map(token_seconds, peers), default=None), token_seconds("weft")
        ),
        **{f"{name}_s": ratio(seconds[name], 1.0) for name in SYSTEMS[1:]},
        **{name: round(value, 4) for name, value in parts.items() if value is not None},
        "tokens_per_step": {
            n: round(sum(s["tokens"] for s in steps) / len(steps), 1) for n, steps in measured.items()
        },
        "steps": len(weft),
    }


if __name__ == "__main__":
    main()
