"""Runs episodes of a task set of verifiers ≥ 0.4. Another Python runs this file, without Weft.

As a script, it prints the tasks of a task set: `python verifiers_program.py ENV NUMBER`, where ENV is
the environment as JSON.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import (  # pyright: ignore[reportMissingImports]
    SubprocessConfig,
    provision_runtime,
)
from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
    load_environment,
    load_harness,
    resolve_env_config,
)

FAILURES = {
    "ProviderError": "ModelUnreachable",
    "InterceptionError": "ModelUnreachable",
    "TunnelError": "ModelUnreachable",
    "SandboxError": "NoSandbox",
    "TaskError": "NoVerdict",
}
"""Error of verifiers -> class of failures.py; any other is a HarnessRaised."""


def _failure(name: str, text: str) -> Exception:
    error = RuntimeError(text)
    error.failure = name  # pyright: ignore[reportAttributeAccessIssue]
    return error


def make(env: Mapping[str, Any], uv_cache: str) -> Callable[..., Any]:
    """Load an environment: {"taskset": {"id": ..., ...}, "agent": {"harness": {"id": ...}}, ...}."""
    # Programs of harnesses are installed by uv, which may be in this environment only.
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    os.environ["UV_CACHE_DIR"] = uv_cache
    environment = load_environment(resolve_env_config(dict(env)))
    next(iter(environment.taskset), None)  # what the tasks import or download, episodes share
    asyncio.run(_install_harnesses(environment))
    return functools.partial(run_episode, environment)


async def _install_harnesses(environment: Any) -> None:
    """Install the programs of local harnesses once, so that episodes find them."""
    for agent, config in environment.config.agent_harnesses().items():
        runtime = getattr(environment.config, agent).runtime
        if isinstance(runtime, SubprocessConfig):
            async with provision_runtime(runtime) as box:
                await load_harness(config).setup(box)


async def run_episode(environment: Any, row: Mapping[str, Any], *, base_url: str, api_key: str) -> float:
    """Run an episode of the task in the row's column `task`. Return its reward."""
    task_class = type(environment.taskset).task_type()
    data = task_class.data_type().model_validate_json(row["task"])
    # The client reads the key from the environment, where the episode has its own.
    client = EvalClientConfig(base_url=base_url, api_key_var="WEFT_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(
            task_class(data, environment.config.taskset.task),
            ModelContext(model="policy", client=client),
        )
    traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors and not episode.ok:
        name = FAILURES.get(errors[-1].type, "HarnessRaised")
        raise _failure(name, f"{errors[-1].type}: {errors[-1].message}")
    if episode.is_timeout or any(trace.is_timeout for trace in traces):
        raise _failure("EpisodeTimedOut", "a deadline of the verifiers environment expired")
    rewards = [reward for trace in traces for reward in trace.rewards.values()]
    if not rewards or None in rewards:
        raise _failure("NoVerdict", "the task set gave no reward")
    return sum(trace.reward for trace in traces) / len(traces)


def print_tasks(env: Mapping[str, Any], number: int) -> None:
    """Print a row of each task as a line of JSON."""
    environment = load_environment(resolve_env_config(dict(env)))
    for task in itertools.islice(environment.taskset, number):
        data = task.data
        row = {"prompt": data.prompt_text, "task": data.model_dump_json()}
        print(json.dumps({"row": row}), flush=True)


if __name__ == "__main__":
    print_tasks(json.loads(sys.argv[1]), int(sys.argv[2]))
