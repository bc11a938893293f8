"""The settings page, generated from the settings classes and their docstrings.

`python docs/generate/settings_page.py > docs/settings.md` writes the page. A setting's
docstring explains the setting and says when to change it. If the setting is a number, the docstring
begins with its unit in brackets. Ranges and defaults come from the class.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from weft.algorithms.aggregation import AggregatedLoss
from weft.algorithms.corrections import (
    DivergenceRejection,
    DriftRejection,
    RatioCorrection,
    Rejection,
    TruncatedImportance,
)
from weft.algorithms.covariance import ClipCov, CovarianceRule, KlCov
from weft.algorithms.cross_tokenizer import SharedSpans
from weft.algorithms.distillation import Distillation, Jsd
from weft.algorithms.graders.math import Gsm8k
from weft.algorithms.graders.procedural import ReasoningGym
from weft.algorithms.graders.text import Exact, JsonSchema, LengthReward, RegularExpression, TagFormat
from weft.algorithms.kl import AdaptiveCoefficient, KlPenalty
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.preference_loss import (
    DesirabilityLoss,
    DiscoPop,
    DivergenceRatio,
    LikelihoodScore,
    Logistic,
    LogRatio,
    PairLoss,
    PreferenceLoss,
    Sppo,
    Squared,
)
from weft.algorithms.reward_model import RewardLoss
from weft.algorithms.sampling import Sampling
from weft.algorithms.step_corrections import (
    NormalizedImportance,
    PolicyFiltration,
    SecondMoment,
    TopEntropy,
)
from weft.algorithms.surrogates import Cispo, Clipped, Dppo, GeometricRatio, Sapo, Vespo
from weft.algorithms.values import ValueLoss
from weft.controllers.driver import Driver
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Asynchronous, InParts, Stepwise, Synchronous
from weft.controllers.simulation.costs import (
    CostModel,
    Generation,
    LinearCost,
    LogNormal,
    PipelineCost,
    SequenceParallelCost,
)
from weft.dataflow.buffer.sample_buffer import BufferConfig
from weft.dataflow.config import Config
from weft.dataflow.prompts.curriculum import Curriculum, Gate, Pool
from weft.dataflow.prompts.formats import ReadSettings
from weft.workers.actor import ActorConfig
from weft.workers.adaptive_entropy import AdaptiveEntropyConfig
from weft.workers.adaptive_kl import AdaptiveKlConfig
from weft.workers.agents.harness import Command, Environment, Function, Harness, Verifiers
from weft.workers.critic import CriticConfig
from weft.workers.environment import EnvConfig
from weft.workers.generation.speculation import Speculation
from weft.workers.generation.vllm_settings import VllmSettings
from weft.workers.reference import MovingReferenceConfig
from weft.workers.reward import RewardConfig
from weft.workers.rewards.code import Code
from weft.workers.rewards.function import Reward
from weft.workers.rewards.judge import Judge
from weft.workers.rollout_config import RolloutConfig
from weft.workers.sandbox import Limits
from weft.workers.training.engine import ModelConfig, TrainingConfig
from weft.workers.training.lora import Lora
from weft.workers.training.optimizer import OptimizerConfig

FILLED = {
    "RolloutConfig.adapters": "a run takes them over from the actors that are followed",
    "RolloutConfig.kept_sets": "a run sets it if a trainer reads kept sets",
    "RecorderConfig.tokenizer": "a run finds it among its groups",
    "Interact.env": "`rollout.interact` sets it",
    "Interact.writes": "`rollout.interact` sets it",
    "PlannedHarness.made": "the driver makes it of another harness",
}
"""Fields that the run sets, so the page leaves them out."""


@dataclass(frozen=True)
class Setting:
    """One setting on the page."""

    owner: str
    """The class of the setting."""
    name: str
    unit: str
    """Empty if the setting is not a number."""
    default: str
    allowed: str
    text: str
    """The meaning, and when to change it."""


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    text: str
    owners: Sequence[type]


SECTIONS = (
    Section(
        "A run",
        "Arguments of `weft.Driver`, and classes that configure some of them.",
        (Driver, Stepwise, Synchronous, InParts, Asynchronous, CheckpointConfig, BufferConfig),
    ),
    Section("Data", "Arguments of `Prompts.read` and `Prompts.from_rows`.", (ReadSettings,)),
    Section(
        "Curriculum",
        "Arguments of `weft.Curriculum`, for `Prompts.with_curriculum` and `weft.train(curriculum=...)`.",
        (Curriculum, Pool, Gate),
    ),
    Section(
        "Models that are trained",
        "Arguments of `weft.group(weft.ActorWorker, ...)` and of groups of other workers with a model.",
        (
            *(ModelConfig, OptimizerConfig, TrainingConfig),
            *(ActorConfig, CriticConfig, MovingReferenceConfig, Lora),
        ),
    ),
    Section(
        "Generation",
        "Arguments of `weft.group(weft.RolloutWorker, ...)` and of `generate`.",
        (RolloutConfig, VllmSettings, Speculation, Sampling),
    ),
    Section(
        "Rewards", "Arguments of `weft.group(weft.RewardWorker, ...)`.", (RewardConfig, Reward, Judge)
    ),
    Section("Environments", "Arguments of `weft.group(weft.EnvWorker, ...)`.", (EnvConfig,)),
    Section(
        "Harnesses",
        "Programs that let the model act, for `rollout.run(prompts, harness=...)`.",
        (Harness, Function, Command, Environment, Verifiers),
    ),
    Section(
        "Losses",
        "Loss functions, and the objects that configure their terms, such as `Clipped` and `KlPenalty`.",
        (
            *(
                AggregatedLoss,
                PolicyLoss,
                Clipped,
                Cispo,
                Sapo,
                Vespo,
                Dppo,
                GeometricRatio,
                KlPenalty,
                RatioCorrection,
                TruncatedImportance,
                Rejection,
                DriftRejection,
                DivergenceRejection,
                TopEntropy,
                SecondMoment,
                NormalizedImportance,
                PolicyFiltration,
                CovarianceRule,
                ClipCov,
                KlCov,
                Distillation,
                Jsd,
                SharedSpans,
                ValueLoss,
            ),
            *(
                AdaptiveCoefficient,
                AdaptiveKlConfig,
                AdaptiveEntropyConfig,
                PairLoss,
                PreferenceLoss,
                LikelihoodScore,
                LogRatio,
                DivergenceRatio,
                DiscoPop,
                Logistic,
                Sppo,
            ),
            *(Squared, DesirabilityLoss, RewardLoss),
        ),
    ),
    Section(
        "Graders",
        "Built-in reward functions and their arguments.",
        (
            Gsm8k,
            Exact,
            RegularExpression,
            JsonSchema,
            TagFormat,
            LengthReward,
            ReasoningGym,
            Code,
            Limits,
        ),
    ),
    Section(
        "Simulated runs",
        "Costs for `weft.Simulated`, measured on a machine.",
        (CostModel, LinearCost, PipelineCost, SequenceParallelCost, Generation, LogNormal),
    ),
)


def settings_of(owner: type) -> list[Setting]:
    """Return the settings that a class defines, without inherited ones."""
    return list(_fields(owner)) if issubclass(owner, Config) else list(_arguments(owner))


def counts() -> dict[str, int]:
    """Return the number of settings per section; `Driver` has a separate entry."""
    found = {"Driver": len(settings_of(Driver))}
    return found | {
        s.title: sum(len(settings_of(o)) for o in s.owners if o is not Driver) for s in SECTIONS
    }


def _fields(owner: type[Config]) -> Iterator[Setting]:
    for name in inspect.get_annotations(owner):
        field = owner.model_fields.get(name)
        if field is not None and f"{owner.__name__}.{name}" not in FILLED:
            unit, text = _parts(field.description or "")
            default = "" if field.is_required() else _shown(field.get_default(call_default_factory=True))
            yield Setting(owner.__name__, name, unit, default, _allowed(field), text)


def _arguments(owner: Any) -> Iterator[Setting]:
    """Yield the arguments of a constructor, from the section Args of its docstring."""
    text = inspect.getdoc(owner.__init__) or ""
    _, _, args = text.partition("Args:\n")
    about = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", args.partition("\n\n")[0], re.MULTILINE))
    hints = typing.get_type_hints(owner.__init__, vars(inspect.getmodule(owner)))
    for name, parameter in list(inspect.signature(owner.__init__).parameters.items())[1:]:
        unit, what = _parts(" ".join(about[name].split()))
        default = "" if parameter.default is parameter.empty else _shown(parameter.default)
        yield Setting(owner.__name__, name, unit, default, _kinds(hints[name]), what)


def _parts(docstring: str) -> tuple[str, str]:
    """Split a docstring into unit and text."""
    found = re.fullmatch(r"(?:\[([^\]]+)\] )?(.*)", " ".join(docstring.split()))
    return (found[1] or "", found[2]) if found else ("", docstring)


def _shown(value: Any) -> str:
    if isinstance(value, Config | types.FunctionType):
        return getattr(value, "__name__", f"{type(value).__name__}()")
    if isinstance(value, str):
        return f'"{value}"' if len(value) < 40 else "..."
    return str(value)


def _allowed(field: FieldInfo) -> str:
    """Return the range of a number, or the types of other values."""
    bounds = {type(rule).__name__: rule for rule in field.metadata}
    signs = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}
    limits = [
        f"{sign} {getattr(bounds[kind], kind.lower())}" for kind, sign in signs.items() if kind in bounds
    ]
    if not limits:
        return _kinds(field.annotation)
    return ", ".join(limits) + (" or None" if type(None) in typing.get_args(field.annotation) else "")


_PLAIN = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "True or False",
    Path: "path",
    type(None): "None",
    object: "anything",
}


def _kinds(annotation: Any) -> str:
    """Return a type in words."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f'"{each}"' for each in inner)
    if origin is typing.Annotated:
        return _kinds(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kinds(each) for each in inner))
    if origin is not None and getattr(origin, "__name__", "") == "Callable":
        return "function"
    if origin is not None:
        kinds = list(dict.fromkeys(_kinds(each) for each in inner if each is not Ellipsis))
        return f"{'mapping' if origin.__name__ == 'Mapping' else 'sequence'} of {', '.join(kinds)}"
    return _PLAIN.get(annotation, f"`{getattr(annotation, '__name__', annotation)}`")


INTRODUCTION = """\
# Settings

All settings of a run, with units, defaults, allowed values, and advice on when to change them. This page is generated from the classes
(`python docs/generate/settings_page.py > docs/settings.md`), and a test checks that it is current.

A class inherits the settings of its parents: an `ActorConfig` has those of `ModelConfig`, `TrainingConfig` and `OptimizerConfig`. Pass
the settings of a worker to `weft.group` by name: `weft.group(weft.ActorWorker, model=..., learning_rate=1e-6)`. Before it starts any
process, Weft refuses unknown names, with the nearest known one, and bad values, with the allowed range.
"""


def page() -> str:
    """Return the text of docs/settings.md."""
    number = counts()
    apart = ("Curriculum", "Losses", "Graders", "Simulated runs")
    run = sum(number[s.title] for s in SECTIONS if s.title not in apart)
    parts = [
        INTRODUCTION,
        f"There are {run} settings of a run, {number['Driver']} arguments of the driver, {number['Losses']} settings of losses, "
        f"{number['Curriculum']} of curricula, {number['Graders']} of graders, and {number['Simulated runs']} costs of simulated runs.\n",
    ]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n\n{section.text}\n")
        parts += [_table(owner) for owner in section.owners]
    return "\n".join(parts)


def _table(owner: type) -> str:
    parents = [
        each.__name__ for each in owner.__mro__[1:] if issubclass(each, Config) and settings_of(each)
    ]
    about = (inspect.getdoc(owner) or "").split("\n\n")[0].replace("\n", " ")
    also = (
        f" This class also has the settings of {', '.join(f'`{name}`' for name in parents)}."
        if parents
        else ""
    )
    rows = [
        f"| `{s.name}` | {s.unit or '-'} | {f'`{s.default}`' if s.default else 'required'} | {_cell(s.allowed)} | {_cell(s.text)} |"
        for s in settings_of(owner)
    ]
    head = (
        "| setting | unit | default | allowed | meaning, and when to change it |\n|---|---|---|---|---|"
    )
    return "\n".join([f"### {owner.__name__}\n\n{about}{also}\n", head, *rows]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
