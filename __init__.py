"""Weft: an RLHF and post-training orchestrator. One graph, any placement, any schedule.

These names are the public API. Each is imported when it is first used, so `import weft` does not
load torch, Ray or vLLM, and a configuration error is reported at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_MODULES: dict[str, str] = {
    "ActorWorker": "workers.actor",
    "AdaptiveEntropyWorker": "workers.adaptive_entropy",
    "AdaptiveKlWorker": "workers.adaptive_kl",
    "Asynchronous": "controllers.schedule",
    "Batch": "dataflow.batch",
    "BufferConfig": "dataflow.buffer.sample_buffer",
    "CheckpointConfig": "controllers.recovery.checkpoints",
    "Config": "dataflow.config",
    "CriticWorker": "workers.critic",
    "Curriculum": "dataflow.prompts.curriculum",
    "Dispatch": "workers.dispatch",
    "Driver": "controllers.driver",
    "EnvWorker": "workers.environment",
    "Evaluation": "controllers.run_spec",
    "GROUPS": "dataflow.operation",
    "Gate": "dataflow.prompts.curriculum",
    "Local": "controllers.backends.local",
    "Lora": "workers.training.lora",
    "MovingReferenceWorker": "workers.reference",
    "Pipelined": "controllers.schedule",
    "Place": "controllers.placement",
    "Pool": "dataflow.prompts.curriculum",
    "Prompts": "dataflow.prompts.prompts",
    "Quorum": "dataflow.operation",
    "RayBackend": "controllers.backends.ray_backend",
    "ReferenceWorker": "workers.reference",
    "ResourcePool": "controllers.placement",
    "RewardModelWorker": "workers.reward_model",
    "RewardWorker": "workers.reward",
    "RolloutWorker": "workers.rollout",
    "Sampling": "algorithms.sampling",
    "Shape": "dataflow.operation",
    "Simulated": "controllers.simulation.backend",
    "Speculation": "workers.generation.speculation",
    "Suite": "controllers.suites",
    "Synchronous": "controllers.schedule",
    "TableSource": "dataflow.source",
    "TeacherWorker": "workers.teacher",
    "TrainingBatch": "dataflow.operation",
    "UserError": "dataflow.errors",
    "Worker": "workers.worker",
    "adapter_off": "workers.training.lora",
    "evaluate_model": "controllers.suites",
    "graph": "dataflow.tracing",
    "group": "dataflow.graph",
    "launch": "controllers.launch",
    "node": "dataflow.operation",
    "precompute": "controllers.precompute",
    "prepared": "controllers.prechecks.dry_run",
    "remote": "workers.worker",
    "train": "controllers.train",
    "with_policy": "workers.rollout",
}
"""Public name -> the module that defines it."""

_FOLDERS = ("algorithms", "commands", "controllers", "dashboard", "dataflow", "resharding", "workers")

if (
    TYPE_CHECKING
):  # the same names for editors and type checkers; tests/test_packaging.py compares the two
    from . import algorithms as algorithms
    from . import commands as commands
    from . import controllers as controllers
    from . import dashboard as dashboard
    from . import dataflow as dataflow
    from . import resharding as resharding
    from . import workers as workers
    from .algorithms.sampling import Sampling as Sampling
    from .controllers.backends.local import Local as Local
    from .controllers.backends.ray_backend import RayBackend as RayBackend
    from .controllers.driver import Driver as Driver
    from .controllers.launch import launch as launch
    from .controllers.placement import Place as Place
    from .controllers.placement import ResourcePool as ResourcePool
    from .controllers.prechecks.dry_run import prepared as prepared
    from .controllers.precompute import precompute as precompute
    from .controllers.recovery.checkpoints import CheckpointConfig as CheckpointConfig
    from .controllers.run_spec import Evaluation as Evaluation
    from .controllers.schedule import Asynchronous as Asynchronous
    from .controllers.schedule import Pipelined as Pipelined
    from .controllers.schedule import Synchronous as Synchronous
    from .controllers.simulation.backend import Simulated as Simulated
    from .controllers.suites import Suite as Suite
    from .controllers.suites import evaluate_model as evaluate_model
    from .controllers.train import train as train
    from .dataflow.batch import Batch as Batch
    from .dataflow.buffer.sample_buffer import BufferConfig as BufferConfig
    from .dataflow.config import Config as Config
    from .dataflow.errors import UserError as UserError
    from .dataflow.graph import group as group
    from .dataflow.operation import GROUPS as GROUPS
    from .dataflow.operation import Quorum as Quorum
    from .dataflow.operation import Shape as Shape
    from .dataflow.operation import TrainingBatch as TrainingBatch
    from .dataflow.operation import node as node
    from .dataflow.prompts.curriculum import Curriculum as Curriculum
    from .dataflow.prompts.curriculum import Gate as Gate
    from .dataflow.prompts.curriculum import Pool as Pool
    from .dataflow.prompts.prompts import Prompts as Prompts
    from .dataflow.source import TableSource as TableSource
    from .dataflow.tracing import graph as graph
    from .workers.actor import ActorWorker as ActorWorker
    from .workers.adaptive_entropy import AdaptiveEntropyWorker as AdaptiveEntropyWorker
    from .workers.adaptive_kl import AdaptiveKlWorker as AdaptiveKlWorker
    from .workers.critic import CriticWorker as CriticWorker
    from .workers.dispatch import Dispatch as Dispatch
    from .workers.environment import EnvWorker as EnvWorker
    from .workers.generation.speculation import Speculation as Speculation
    from .workers.reference import MovingReferenceWorker as MovingReferenceWorker
    from .workers.reference import ReferenceWorker as ReferenceWorker
    from .workers.reward import RewardWorker as RewardWorker
    from .workers.reward_model import RewardModelWorker as RewardModelWorker
    from .workers.rollout import RolloutWorker as RolloutWorker
    from .workers.rollout import with_policy as with_policy
    from .workers.teacher import TeacherWorker as TeacherWorker
    from .workers.training.lora import Lora as Lora
    from .workers.training.lora import adapter_off as adapter_off
    from .workers.worker import Worker as Worker
    from .workers.worker import remote as remote

    __version__: str

else:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _MODULES:
            value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        elif name in _FOLDERS:
            value = import_module(f".{name}", __name__)
        elif name == "__version__":
            value = import_module("importlib.metadata").version("weft")
        else:
            from .dataflow.errors import nearest

            raise AttributeError(f"module 'weft' has no attribute {name!r}{nearest(name, __dir__())}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({"__version__", *_MODULES, *_FOLDERS, *globals()})
