"""train: do a complete training run in one call, or print the equivalent program."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..algorithms.evaluation import evaluate
from ..algorithms.methods import Method, method_of
from ..algorithms.preference import bco, kto, preference_accuracy
from ..algorithms.sampling import Sampling
from ..dataflow.column import CHOSEN_IDS, RESPONSE_IDS
from ..dataflow.errors import Ended, UserError
from ..dataflow.graph import Graph, group
from ..dataflow.operation import names_parameters
from ..dataflow.prompts.curriculum import Curriculum
from ..dataflow.prompts.files import is_rows
from ..dataflow.prompts.formats import ReadArguments
from ..dataflow.prompts.prompts import Prompts
from ..dataflow.source import Source
from ..dataflow.untrusted_text import show
from ..workers.actor import ActorWorker
from ..workers.critic import CriticWorker
from ..workers.reference import ReferenceWorker
from ..workers.reward import RewardWorker, reward_processes
from ..workers.rewards.function import Reward
from ..workers.rewards.judge import Judge
from ..workers.rollout import RolloutWorker
from ..workers.training.lora import Lora, adapter_off
from .backends.local import Local
from .backends.ray_backend import RayBackend
from .backends.ray_cluster import RayCluster
from .driver import Driver
from .node_layout import OTHER, THIS_MACHINE, Nodes, machine_cpus, machine_gpus
from .placement import Place, ResourcePool
from .program import Program
from .recovery.checkpoints import CheckpointConfig
from .reports.progress import Form
from .run_spec import Evaluation
from .schedule import Synchronous
from .signals import StopOnSignal, endings_noted, write_line

Rewards = Callable[..., Any] | Reward | Judge | Sequence[Callable[..., Any] | Reward | Judge]
"""A reward function, or several whose weighted sum is the reward; see `RewardConfig.function`."""
Data = str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]]
"""A file, several files, or rows; see docs/data.md for the formats."""


@names_parameters(
    "weft.train", "; to change other worker settings, edit the program that explain=True prints"
)
def train(
    model: str | Path,
    data: Data,
    rewards: Rewards | None = None,
    *,
    method: str = "grpo",
    teacher: str | Path | None = None,
    held_out: Data | Mapping[str, Data] | None = None,
    reading: ReadArguments | None = None,
    curriculum: Curriculum | None = None,
    steps: int = 100,
    prompts_per_step: int = 64,
    n: int | None = None,
    max_tokens: int = 1024,
    learning_rate: float | None = None,
    lora: Lora | None = None,
    kl: float = 0.0,
    evaluate_every: int = 10,
    name: str | None = None,
    root: str | Path = "runs",
    seed: int = 0,
    checkpoint: CheckpointConfig = CheckpointConfig(),
    resume: str | Path = "none",
    progress: Form | bool = "auto",
    trackers: Sequence[str] | Mapping[str, int] = (),
    dashboard: bool = False,
    explain: bool = False,
) -> list[dict[str, float]]:
    """Train a model with a named method, and save it in `model/` of the run directory.

        weft.train("Qwen/Qwen3-0.6B", "math.jsonl", weft.Math(), method="grpo", steps=200)

    On a machine with GPUs, all groups share all GPUs, and Weft uses Ray and vLLM. Without GPUs,
    everything runs in this process. In a Ray job, or if `RAY_ADDRESS` is set, the groups share the
    nodes of that cluster.

    Ctrl-C, SIGTERM and SIGHUP end the run after the current step and save the model; a second
    signal ends it at once. With checkpoints, SIGTERM and SIGHUP instead save a checkpoint and end
    the run at once.

    Args:
        model: Folder or Hugging Face id.
        data: Prompts, preference pairs or responses, depending on the method.
        rewards: Reward function, or several. Required if the method samples responses.
        method: Training method; `algorithms/methods.py` lists them.
        teacher: Folder or Hugging Face id of the teacher, with `method="distillation"`. Rewards are
            optional then.
        held_out: Rows to evaluate on before the first step, every `evaluate_every` steps, and at
            the end. Give several sets as a mapping from names to rows.
        reading: Fields of `ReadSettings` for `data` and `held_out`, such as `{"prompt":
            "problem_text", "too_long": "drop"}`.
        curriculum: Draw prompts by their measured solve rates, such as
            `weft.Curriculum(retire=(weft.Gate(at_least=1.0),))`.
        steps: Number of updates.
        prompts_per_step: Number of rows of the data per update.
        n: Number of responses per prompt. None uses the method's default.
        max_tokens: [tokens] Maximum length of a response.
        learning_rate: Learning rate of the actor and the critic. None uses the method's default,
            which suits models of 0.5B to 8B parameters, or ten times that for adapters.
        lora: Train a LoRA adapter with these settings. The frozen model is also the reference.
        kl: [loss/nat] Coefficient of the KL penalty against the initial model. PPO subtracts it
            from the reward, other methods add it to the loss. 0 switches it off.
        evaluate_every: [steps] Interval between evaluations; see `held_out`.
        name, root, seed, checkpoint, resume, progress, trackers, dashboard: See `Driver`.
        explain: Print the equivalent program and run nothing.

    Returns:
        The metrics of every step; empty with `explain`.

    Raises:
        UserError: An argument is wrong. The message names it and the nearest correct value. Nothing
            has started.
    """
    chosen = method_of(method)
    chosen = chosen.with_reward() if rewards is not None else chosen
    _check(chosen, method, rewards, held_out, teacher)
    # The penalty adds a reference group, so it must come before groups are placed.
    chosen = chosen.with_kl(kl) if kl else chosen
    if lora is not None and not isinstance(lora, Lora):
        raise UserError(f"lora={lora!r} is not an adapter; give one, such as lora=weft.Lora(rank=16)")
    program = Program()
    prompts = _read(program, "prompts", data, model, reading)
    if curriculum is not None:
        prompts = program.assign("prompts", Prompts.with_curriculum, prompts, curriculum)
    _check_responses(chosen, method, prompts)
    # With an adapter, the reference is the actor with its adapter off, so it needs no devices.
    placed = [name for name in chosen.groups if lora is None or name != "reference"]
    shared = shared_devices(program, placed, cluster_nodes())
    # Round the product, because the printed program shows it.
    usual = chosen.learning_rate if lora is None else float(f"{chosen.learning_rate * ADAPTER_RATE:.6g}")
    rate = usual if learning_rate is None else learning_rate
    trained = {"learning_rate": rate, **({} if lora is None else {"lora": lora})}
    groups = _groups(program, chosen, shared, model, teacher, rewards, trained)
    sampled: dict[str, Any] = {}
    if chosen.samples:
        sampled = {"sampling": Sampling(max_tokens=max_tokens), **({} if n is None else {"n": n})}
    training = program.assign("training", chosen.graph, prompts, **groups, **sampled, **chosen.settings)
    evaluations: list[Evaluation] = []
    sets = held_out if isinstance(held_out, Mapping) else {} if held_out is None else {"eval": held_out}
    for number, (each, rows) in enumerate(sets.items(), start=1):
        which = f"_{each if each.isidentifier() else number}" if isinstance(held_out, Mapping) else ""
        source = _read(program, f"held_out{which}", rows, model, reading)
        accuracy = _evaluated(program, f"accuracy{which}", chosen, source, groups, max_tokens)
        evaluations.append(Evaluation(accuracy, every=evaluate_every, name=each))
    schedule = Synchronous(steps=steps, prompts_per_step=prompts_per_step)
    settings: dict[str, Any] = {"schedule": schedule}
    settings |= {"evaluations": evaluations} if evaluations else {}
    settings |= {**shared.run, "name": name, "root": root, "seed": seed, "checkpoint": checkpoint}
    settings |= {"resume": resume, "progress": progress, "trackers": trackers, "dashboard": dashboard}
    if explain:
        _explain(program, training, settings)
        return []
    return _run(training, groups["actor"], settings)


ADAPTER_RATE = 10
"""Learning rate of an adapter, as a multiple of the whole model's."""
MODEL = "model"
"""Folder of the trained model, in the run directory."""


def _check(method: Method, name: str, rewards: object, held_out: object, teacher: object) -> None:
    if ("teacher" in method.groups) != (teacher is not None):
        hint = "give teacher=..., a model with the same tokenizer" if teacher is None else "leave it out"
        raise UserError(f"method={name!r} with teacher={teacher!r}: {hint}")
    if held_out is not None and rewards is None and teacher is not None:
        raise UserError(
            f"method={name!r}: an evaluation needs rewards; give rewards=..., or leave held_out out"
        )
    if "reward" in method.groups and rewards is None:
        raise UserError(
            f"method={name!r} needs a reward for its responses; give rewards=..., a function of `response`"
        )
    if not method.samples and rewards is not None:
        raise UserError(
            f"method={name!r} trains on the responses in the data, without rewards; leave rewards out"
        )
    if held_out is not None and not method.samples and not method.compares:
        raise UserError(f"method={name!r} has no evaluation; leave held_out out")


def _check_responses(method: Method, name: str, prompts: Source) -> None:
    if method.samples or not isinstance(prompts, Prompts):
        return
    if method.compares:
        what, columns = "pairs of responses", (CHOSEN_IDS,)
        wanted = "pairs have the columns 'prompt', 'chosen' and 'rejected'"
    else:
        what = "responses"
        columns = (RESPONSE_IDS, CHOSEN_IDS) if method.graph in (kto, bco) else (RESPONSE_IDS,)
        wanted = "responses are in columns such as 'messages', 'completion', 'response' or 'output', or in one that reading= names"
    if not any(str(column) in prompts.columns for column in columns):
        raise UserError(
            f"method={name!r} trains on {what}, and the data has none: it was read as {prompts.format}; {wanted}; docs/data.md shows "
            "all formats"
        )


def _groups(
    program: Program,
    method: Method,
    shared: _SharedDevices,
    model: str | Path,
    teacher: str | Path | None,
    rewards: Rewards | None,
    trained: Mapping[str, Any],
) -> dict[str, Any]:
    trained = {"model": model, **trained, **shared.trained}
    workers: Mapping[str, tuple[type, Mapping[str, Any]]] = {
        "rollout": (RolloutWorker, {"model": model, **shared.rollout}),
        "reward": (RewardWorker, {"function": rewards, "tokenizer": model}),
        "teacher": (ReferenceWorker, {"model": teacher, **shared.model}),
        "actor": (ActorWorker, trained),
        "critic": (CriticWorker, trained),
        "reference": (ReferenceWorker, {"model": model, **shared.model}),
    }
    groups: dict[str, Any] = {}
    for each in method.groups:
        if each == "reference" and "lora" in trained:
            groups[each] = program.assign(each, adapter_off, groups["actor"])
        else:
            groups[each] = program.assign(each, group, workers[each][0], **workers[each][1])
    if method.samples:
        groups["rollout"].follows(groups["actor"])
        # Deferred, because the program may still rename its results.
        program.add_statement(lambda: f"{program.named('rollout')}.follows({program.named('actor')})")
    return groups


def _explain(program: Program, training: Graph, settings: Mapping[str, Any]) -> None:
    defaults = inspect.signature(Driver).parameters
    given = {key: value for key, value in settings.items() if value != defaults[key].default}

    def run() -> str:
        driver, metrics, actor = map(program.named, ("driver", "metrics", "actor"))
        return (
            f"with {program.call_text(Driver, training, **given)} as {driver}:\n"
            f"    {metrics} = {driver}.run()\n"
            f'    {driver}.call({actor}, "save", path={driver}.directory.path / "{MODEL}")'
        )

    program.add_statement(run)
    show(program.text, sys.stdout)


def _run(training: Graph, actor: Any, settings: Mapping[str, Any]) -> list[dict[str, float]]:
    said = (
        "the run ends after this step and saves its model; a second one ends it at once, without saving"
    )
    checkpoint: CheckpointConfig = settings["checkpoint"]
    with (
        # With checkpoints, the driver handles SIGTERM and SIGHUP.
        endings_noted(said, of_systems=not checkpoint.writes) as noted,
        Driver(training, stop=StopOnSignal(noted), **settings) as driver,
    ):
        path = driver.directory.path / MODEL
        try:
            metrics = driver.run()
            driver.call(actor, "save", path=path)
        except (KeyboardInterrupt, Ended):
            write_line(f"interrupted: the model was not saved in {path}")
            raise
        driver.say(f"the model is saved in {path}")
    # Exit as the signal would have, now that the model is saved.
    if noted():
        raise Ended(128 + noted())
    return metrics


def _read(
    program: Program, name: str, data: Data, model: str | Path, reading: ReadArguments | None
) -> Source:
    rows = is_rows(data)
    more = {**({"name": name} if rows else {}), **(reading or {})}
    return program.assign(name, Prompts.from_rows if rows else Prompts.read, data, model, **more)


@dataclass(frozen=True)
class _SharedDevices:
    """Settings with which all groups share the devices of a machine or cluster."""

    run: Mapping[str, Any]
    rollout: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    trained: Mapping[str, Any] = field(default_factory=dict)


def cluster_nodes() -> Nodes:
    """Return the nodes of the cluster at `RAY_ADDRESS`, set in Ray jobs, or this machine."""
    if OTHER.get() is not None:  # `weft plan` for another machine
        return Nodes([(machine_cpus(), machine_gpus())], THIS_MACHINE)
    return RayCluster(None).nodes()


GPU_SHARE = 0.85
"""Share of a GPU for vLLM. Offloaded groups keep their CUDA contexts, buffers and fragments."""


def shared_devices(program: Program, groups: Sequence[str], nodes: Nodes) -> _SharedDevices:
    """Return settings with which all groups share the nodes.

    Groups with a model take turns on all GPUs and compute in bfloat16; vLLM leaves memory for the
    others, and all leave CPUs for processes that compute rewards. Without GPUs, they have one rank
    on each node of a cluster, and a single machine runs everything in one process. Groups without a
    model run on any free CPU.

    >>> from weft.controllers.node_layout import Nodes
    >>> shared_devices(Program(), ("actor",), Nodes([(0, 0), (16, 8), (16, 8)], "the cluster at head:6379")).run["placement"]
    {'actor': Place(pool=ResourcePool('devices', cpus=32, gpus=16, nodes=2), ranks=16, min_ranks=None)}
    """
    is_cluster = nodes.where != THIS_MACHINE
    cpus, gpus, number = _equal_nodes(nodes.sizes)
    if gpus and "reward" in groups:
        # The reward group has no place, and takes some of the other CPUs.
        cpus = max(1, cpus - reward_processes(cpus))
    if not gpus and not is_cluster:
        return _SharedDevices({"backend": Local()}, {"engine": "transformers"})
    if number == 1:
        sizes = {"cpus": cpus, **({"gpus": gpus} if gpus else {})}
    else:
        sizes = {"nodes": number, "cpus_per_node": cpus, **({"gpus_per_node": gpus} if gpus else {})}
    pool = program.assign("devices", ResourcePool, "devices", **sizes)
    placement = {name: Place(pool, ranks=number * max(1, gpus)) for name in groups if name != "reward"}
    run = {"placement": placement, "backend": RayBackend()}
    if not gpus:
        return _SharedDevices(run, {"engine": "transformers"})
    model = {"dtype": "bfloat16"}
    return _SharedDevices(
        run,
        rollout={"engine": "vllm", "gpu_memory_utilization": GPU_SHARE},
        model=model,
        trained={**model, "activation_checkpointing": True},
    )


def _equal_nodes(sizes: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Return (CPUs per node, GPUs per node, nodes) of the largest pool with equal nodes.

    >>> _equal_nodes([(2, 0), (16, 8), (12, 8), (16, 1)]), _equal_nodes([(0, 0), (4, 0), (4, 0)])
    ((12, 8, 2), (4, 0, 2))
    """
    kind = 1 if any(gpus for _, gpus in sizes) else 0
    # A few large nodes may have more devices than many small ones.
    least = max(
        (size[kind] for size in sizes),
        key=lambda each: (each * sum(s[kind] >= each for s in sizes), each),
    )
    chosen = [size for size in sizes if size[kind] >= max(1, least)]
    return (
        max(1, min((cpus for cpus, _ in chosen), default=1)),
        least if kind else 0,
        max(1, len(chosen)),
    )


def _evaluated(
    program: Program, name: str, method: Method, rows: Source, groups: Mapping[str, Any], max_tokens: int
) -> Graph:
    """Return a graph that evaluates greedy responses or, for methods that do not sample, the share
    of pairs whose chosen response is the more likely one."""
    if not method.samples:
        return program.assign(name, preference_accuracy, rows, actor=groups["actor"])
    greedy = Sampling(max_tokens=max_tokens, temperature=0)
    judges = {n: groups[n] for n in ("rollout", "reward")}
    return program.assign(name, evaluate, rows, **judges, sampling=greedy)
