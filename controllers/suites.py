"""evaluate_model: measure a model on suites of held-out rows, without training it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..algorithms.evaluation import evaluate
from ..algorithms.graders.instructions import Instructions
from ..algorithms.graders.math import Gsm8k, Math
from ..algorithms.sampling import Sampling
from ..dataflow.errors import UserError, nearest
from ..dataflow.graph import group
from ..dataflow.operation import names_arguments, names_parameters
from ..dataflow.prompts.files import is_rows
from ..dataflow.prompts.formats import ReadArguments
from ..dataflow.prompts.prompts import Prompts
from ..workers.reward import RewardWorker
from ..workers.rewards.code import Code
from ..workers.rollout import RolloutWorker
from .driver import Driver
from .program import Program
from .reports.progress import Form
from .run_spec import Evaluation
from .schedule import Synchronous
from .train import Data, Rewards, cluster_nodes, shared_devices


@names_arguments
@dataclass(frozen=True)
class Suite:
    """Held-out rows, and how to sample and score responses to them.

    Suite("capitals.jsonl", Exact(), n=4, temperature=0.7)
    """

    data: Data
    """A file, several files, or rows; see docs/data.md for the formats."""
    rewards: Rewards
    """A reward function or grader, or several."""
    n: int = 1
    """Responses per prompt. With several, give a temperature above 0."""
    k: tuple[int, ...] = ()
    """Values of k for pass@k and maj@k; empty selects 1 and n."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the likeliest token."""
    reading: ReadArguments | None = None
    """Fields of `ReadSettings`, such as `{"prompt": "problem_text"}`."""


NAMED: Mapping[str, Callable[[Data], Suite]] = {
    "gsm8k": lambda data: Suite(data, Gsm8k()),
    "math": lambda data: Suite(data, Math()),
    # 30 problems are too few for one response each.
    "aime": lambda data: Suite(data, Math(), n=16, temperature=0.6),
    "ifeval": lambda data: Suite(data, Instructions()),
    "humaneval": lambda data: Suite(data, Code()),
    "mbpp": lambda data: Suite(data, Code()),
}
"""Maps the names of known suites to functions of the data."""


@names_parameters("weft.evaluate_model")
def evaluate_model(
    model: str | Path,
    suites: Mapping[str, Data | Suite],
    *,
    n: int | None = None,
    temperature: float | None = None,
    max_tokens: int = 1024,
    limit: int | None = None,
    name: str | None = None,
    root: str | Path = "runs",
    seed: int = 0,
    progress: Form | bool = "auto",
) -> dict[str, float]:
    """Evaluate a model on one or several suites, and return their metrics.

        weft.evaluate_model("Qwen/Qwen3-0.6B", {"gsm8k": "test.jsonl", "mine": Suite(rows, my_reward)})

    This is a run without steps: it has a directory, and the dashboard shows its samples. It uses
    the devices that `weft.train` would use.

    Args:
        model: Folder or Hugging Face id.
        suites: Maps names to suites, or the names gsm8k, math, aime, ifeval, humaneval and mbpp to
            their data.
        n, temperature: Override the values of every suite.
        max_tokens: [tokens] Maximum length of a response.
        limit: [rows] Use only the first rows of each suite.
        name, root, seed, progress: See `Driver`.

    Returns:
        The metrics `SUITE/NAME` of all suites, such as `gsm8k/pass@1` and `gsm8k/prompts_lost`.

    Raises:
        UserError: An argument is wrong. Nothing has started.
    """
    if not suites:
        raise UserError("evaluate_model needs a suite, such as {'gsm8k': 'test.jsonl'}")
    if n is not None and n < 1:
        raise UserError(f"evaluate_model(n={n}): it must be at least 1")
    shared = shared_devices(Program(), ("rollout", "reward"), cluster_nodes())
    rollout = group(RolloutWorker, name="rollout", model=model, **shared.rollout)
    evaluations: list[Evaluation] = []
    for each, given in suites.items():
        suite = _suite(each, given)
        number = suite.n if n is None else n
        each_temperature = suite.temperature if temperature is None else temperature
        if number > 1 and each_temperature == 0:
            raise UserError(
                f"suite {each!r} with n={number} and temperature=0: all responses to a prompt would be equal; "
                "give a temperature above 0, such as 0.6, or n=1"
            )
        reading: ReadArguments = {**(suite.reading or {})}
        if limit is not None:
            reading["limit"] = limit
        data: Any = suite.data
        if is_rows(data):
            prompts = Prompts.from_rows(data, model, name=each, **reading)
        else:
            prompts = Prompts.read(data, model, **reading)
        reward = group(RewardWorker, name=f"{each}_reward", function=suite.rewards, tokenizer=model)
        ks = suite.k if n is None else [k for k in suite.k if k <= n]
        sampling = Sampling(max_tokens=max_tokens, temperature=each_temperature)
        graph = evaluate(prompts, rollout=rollout, reward=reward, sampling=sampling, n=number, k=ks)
        evaluations.append(Evaluation(graph, every=0, name=each, at_end=False))
    with Driver(
        evaluations[0].graph,
        evaluations=evaluations,
        schedule=Synchronous(steps=1),
        stop=lambda _: True,  # before the first step
        name=name,
        root=root,
        seed=seed,
        progress=progress,
        **shared.run,
    ) as driver:
        found = driver.run()[0]
    return {key: found[key] for key in found if key.startswith(tuple(f"{each}/" for each in suites))}


def _suite(name: str, given: Data | Suite) -> Suite:
    if isinstance(given, Suite):
        return given
    if name not in NAMED:
        hint = nearest(name, NAMED) or f"; known suites are {', '.join(NAMED)}"
        raise UserError(
            f"unknown suite {name!r}{hint}; for your own rows, give weft.Suite(data, rewards)"
        )
    return NAMED[name](given)
