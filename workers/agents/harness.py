"""Harnesses: programs that let the model act, for `rollout.run(prompts, n=8, harness=...)`.

    Function(function=run)                    async def run(row, *, base_url, api_key) -> float | dict | None
    Command(command=("python", "agent.py"))   a command line that writes a reward file
    Environment(environment=Game)             a class whose methods are the tools, as for TRL
    Verifiers(env=..., python=...)            a task set of verifiers, unmodified

A harness asks the model at `base_url`, with any client of OpenAI's or Anthropic's API. Each episode
runs in its own process, so a harness that hangs or crashes harms no other episode. The result is a
reward, or a dictionary with "reward" and the columns in `writes`. None discards the episode.
"""

from __future__ import annotations

import base64
import functools
import inspect
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from ...dataflow.column import DESCRIBED, FINISH_REASON, IDENTITY, REWARD, TEMPERATURE, TURN_REWARDS
from ...dataflow.config import Config
from ...dataflow.errors import UserError
from ..rewards.function import name_of, signature_of
from ..rewards.signature import MESSAGES
from .programs import play, run_command

if TYPE_CHECKING:
    from ...dataflow.source import Source


@dataclass(frozen=True)
class HarnessPlan:
    """A harness as plain values, for the gateway's process: `HarnessPlan(**dataclasses.asdict(plan))`."""

    title: str
    program: Mapping[str, Any]
    """What `harness_process.load` loads."""
    python: str
    """The interpreter."""
    paths: tuple[str, ...]
    """Folders of the user's modules, for imports."""
    writes: tuple[str, ...]
    variables: tuple[str, ...]
    deadline_s: float
    turn_deadline_s: float
    setup_deadline_s: float
    concurrency: int

    def environment(self, scratch: Path) -> dict[str, str]:
        """Return the environment variables of the harness: no secrets, unless `variables` names them."""
        names = (*_PASSED, *self.variables)
        return {
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(self.paths),
            # Many episodes share the machine, and the model needs the GPUs.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "NO_PROXY": "127.0.0.1",  # the gateway, if `variables` names a proxy
            **{name: os.environ[name] for name in names if name in os.environ},
        }


_PASSED = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "USER", "LOGNAME"),
    *("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)


_OF_WEFT = {
    *map(str, (FINISH_REASON, TEMPERATURE, *IDENTITY)),
    *(str(column) for ids, others in DESCRIBED.items() for column in (ids, *others)),
} - {str(TURN_REWARDS)}
"""Columns that a harness cannot write: identity, tokens, and what describes tokens."""


class Harness(Config):
    """What all harnesses have. Use one of its subclasses."""

    writes: tuple[str, ...] = (str(REWARD),)
    """Columns that the harness returns, "reward" among them. Set it if the harness returns a
    dictionary with more columns, which are numbers, texts or lists."""
    deadline_s: float = pydantic.Field(default=600.0, gt=0)
    """[s] Time limit of an episode from its first turn. Time of sampling does not count. An episode
    that exceeds the limit gets reward 0. Raise it for tasks with many slow tool calls."""
    turn_deadline_s: float = pydantic.Field(default=120.0, gt=0)
    """[s] Time limit of the harness's work after each answer of the model, such as tool calls or
    the final grading. An episode that exceeds it gets reward 0. Raise it for slow tools."""
    setup_deadline_s: float = pydantic.Field(default=120.0, gt=0)
    """[s] Time limit for loading the harness, and for an episode's work before its first turn. An
    episode that exceeds it is run again, and then dropped. Raise it if tasks start slow services."""
    concurrency: int = pydantic.Field(default=32, ge=1, le=100_000)
    """[episodes] Maximum number of episodes at a time, each in a process. Raise it if the model
    waits for slow tools; lower it if the episodes need too much memory or CPU."""
    variables: tuple[str, ...] = ()
    """Environment variables that the harness sees besides PATH, the locale and the like. Set it to
    the names of keys that the tools need; the harness sees no others."""

    @pydantic.model_validator(mode="after")
    def _writes_a_reward(self) -> Harness:
        if str(REWARD) not in self.writes:
            raise ValueError(f"writes={self.writes!r} must have 'reward', the result of an episode")
        for name in self.writes:
            if name in _OF_WEFT or self.writes.count(name) > 1:
                whose = "Weft writes itself" if name in _OF_WEFT else "is there twice"
                raise ValueError(f"writes={self.writes!r} has {name!r}, which {whose}; rename it")
        return self

    @property
    def title(self) -> str:
        raise NotImplementedError

    def program(self) -> dict[str, Any]:
        """Return what the harness's process loads, as JSON values. Raises a UserError if the
        harness cannot be sent to a process."""
        raise NotImplementedError

    @property
    def interpreter(self) -> str:
        return sys.executable

    def plan(self) -> HarnessPlan:
        """Return the harness as plain values. Raises a UserError if it cannot be started."""
        if missing := [name for name in self.variables if name not in os.environ]:
            raise UserError(
                f"{type(self).__name__}.variables: the environment has no {missing[0]}; set it before the run starts"
            )
        return HarnessPlan(
            self.title,
            {"folder": os.getcwd(), **self.program()},
            self.interpreter,
            _own_folders(),
            self.writes,
            self.variables,
            self.deadline_s,
            self.turn_deadline_s,
            self.setup_deadline_s,
            self.concurrency,
        )


class Function(Harness):
    """A Python function that runs an episode and returns its reward.

    async def run(row, *, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...
        return 1.0

    Weft imports the function once and forks a process for each episode. Create clients, connections
    and threads inside the function: a fork has no threads, and shares connections with others.
    """

    function: Callable[..., Any] | str
    """Required. Set it to a function `run(row, *, base_url, api_key)`, asynchronous or not, or to its
    place: "package.module:run" or "folder/file.py:run". `row` is a dictionary with the prompt's
    columns."""
    python: Path | None = None
    """Python interpreter of another environment, which need not have Weft; None selects this one.
    Set it if the harness's packages conflict with Weft's, and name the function by its place."""

    @property
    def title(self) -> str:
        return self.function if isinstance(self.function, str) else name_of(self.function)

    @property
    def interpreter(self) -> str:
        return super().interpreter if self.python is None else str(self.python.absolute())

    def program(self) -> dict[str, Any]:
        if shutil.which(self.interpreter) is None:
            raise UserError(
                f"Function.python: {self.python} is not a program; make the environment first"
            )
        if isinstance(self.function, str):
            place, _, name = self.function.rpartition(":")
            if not place or not name:
                raise UserError(
                    f"Function.function={self.function!r} must be like 'package.module:name' or 'file.py:name'"
                )
            if place.endswith(".py"):
                place = str(Path(place).absolute())
                if not Path(place).is_file():
                    raise UserError(
                        f"Function.function={self.function!r}: the file {place} does not exist"
                    )
            return {"function": f"{place}:{name}"}
        if self.python is not None:
            raise UserError(
                f"Function.python: another Python cannot load {self.title}; name it by its place: function='module:name'"
            )
        try:
            signature_of(self.function).bind({}, base_url="", api_key="")
        except TypeError as error:
            raise UserError(
                f"harness function {self.title}{signature_of(self.function)} cannot be called as "
                f"run(row, base_url=..., api_key=...): {error}"
            ) from None
        return {"pickle": _pickled(self.function, self.title)}


class Command(Harness):
    """A command line that runs an episode and writes its reward to a file.

    The command runs in an empty folder. It finds the address of the model in `OPENAI_BASE_URL` and
    `OPENAI_API_KEY` (or with the prefix `ANTHROPIC` or `WEFT`), the path of the row, a JSON object, in
    `WEFT_ROW`, and the path of the reward file in `WEFT_REWARD`. The file has a number, a JSON object
    with "reward" and the columns in `writes`, or null, which discards the episode.
    """

    command: tuple[str, ...]
    """Required. Set it to the program and its arguments. Paths that exist become absolute."""

    @pydantic.field_validator("command", mode="before")
    @classmethod
    def _has_arguments(cls, command: Any) -> Any:
        if isinstance(command, str) or not command:
            raise ValueError(
                f"must be a program and its arguments, like ('python', 'agent.py'), not {command!r}"
            )
        return command

    @property
    def title(self) -> str:
        return Path(self.command[0]).name

    def program(self) -> dict[str, Any]:
        first, *rest = self.command
        found = shutil.which(first)
        if found is None:
            raise UserError(f"Command.command: neither PATH nor this path has the program {first!r}")
        rest = [os.path.abspath(each) if os.path.exists(each) else each for each in rest]
        command = [os.path.abspath(found), *rest]
        return {"pickle": _pickled(functools.partial(run_command, command), self.title)}


class Environment(Harness):
    """A class whose public methods are the model's tools, as for TRL's `environment_factory`.

    Weft creates an object for each episode and calls `reset` with the prompt's columns. The text that
    it returns, if any, extends the prompt: the column `prompt_messages`, or else `prompt`. Weft then
    calls the methods that the model asks for, until it asks for none. The result is `reward`: an
    attribute, a property or a method. Methods need types and a docstring with `Args:`, which the model
    sees.
    """

    environment: Callable[[], Any]
    """Required. Set it to the class, or to a `functools.partial` of it."""
    max_turns: int = pydantic.Field(default=32, ge=1, le=100_000)
    """[turns] Maximum number of the model's turns. Raise it for tasks with more steps."""

    @property
    def title(self) -> str:
        return name_of(self.environment)

    def program(self) -> dict[str, Any]:
        made = self.environment
        own = made.func if isinstance(made, functools.partial) else made
        if not isinstance(own, type) or not callable(getattr(own, "reset", None)):
            raise UserError(
                f"Environment.environment={self.title} must be a class with a method 'reset', or a functools.partial of one"
            )
        try:
            signature_of(made).bind()
        except TypeError as error:
            raise UserError(
                f"Environment.environment: {self.title}() cannot be created without arguments: {error}; "
                "fix them with functools.partial"
            ) from None
        play_it = functools.partial(play, made, _tools(own), self.max_turns)
        return {"pickle": _pickled(play_it, self.title)}

    def check_prompts(self, source: Source) -> None:
        """Raise a UserError if the prompts are texts that the chat template has made. The gateway
        applies the template, so it would apply twice."""
        understood = getattr(source, "understood", None)
        if understood is not None and understood.chat and MESSAGES not in source.columns:
            raise UserError(
                f"Environment({self.title}): the prompts of {source.name} have the chat template applied, and the gateway "
                "applies it again; read them with chat=False"
            )


class Verifiers(Harness):
    """A task set of verifiers ≥ 0.4 and its harness, in a separate Python environment.

    In a shell: python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers uv

    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = {"taskset": {"id": "my-tasks"}, "agent": agent}
    harness = Verifiers(env=env, python=".venv-verifiers/bin/python")
    prompts = weft.TableSource("tasks", pyarrow.Table.from_pylist(harness.rows(1000)))

    Weft calls the environment itself, so nothing is uploaded.
    """

    env: Mapping[str, Any]
    """Required. Set it to the environment's configuration, like the table `[env]` of its files:
    {"taskset": {"id": ...}, "agent": {"harness": {"id": ...}, "runtime": {"type": ...}}}."""
    python: Path
    """Required. Set it to the Python interpreter of an environment with verifiers and the task set."""

    @property
    def title(self) -> str:
        return str(self.env.get("taskset", {}).get("id", "verifiers"))

    @property
    def interpreter(self) -> str:
        return str(self.python.absolute())

    def program(self) -> dict[str, Any]:
        if shutil.which(self.interpreter) is None:
            raise UserError(
                f"Verifiers.python: {self.python} is not a program; make the environment first"
            )
        # The harness has another home folder, but shall not download its programs in each run.
        cache = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
        arguments = {"env": dict(self.env), "uv_cache": cache}
        return {"function": f"{_VERIFIERS_PROGRAM}:make", "arguments": arguments}

    def rows(self, number: int) -> list[dict[str, Any]]:
        """Return the first tasks as rows with the columns `prompt` and `task`, which an episode needs.

        Raises:
            UserError: the task set cannot be loaded.
        """
        self.program()
        command = [
            self.interpreter,
            "-P",
            str(_VERIFIERS_PROGRAM),
            json.dumps(dict(self.env)),
            str(number),
        ]
        paths = {"PYTHONPATH": os.pathsep.join(_own_folders())}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env={**os.environ, **paths},
                timeout=self.setup_deadline_s,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"the task set {self.title} did not load within setup_deadline_s={self.setup_deadline_s:g}"
            ) from None
        except subprocess.CalledProcessError as error:
            raise UserError(
                f"the task set {self.title} cannot be loaded:\n{error.stderr[-2000:]}"
            ) from None
        # Libraries may print as well.
        return [
            json.loads(line)["row"] for line in done.stdout.splitlines() if line.startswith('{"row": ')
        ]


_VERIFIERS_PROGRAM = Path(__file__).with_name("verifiers_program.py")


def _tools(environment: type) -> list[dict[str, Any]]:
    """Return the schemas of a class's public methods."""
    from transformers.utils.chat_template_utils import get_json_schema

    tools: list[dict[str, Any]] = []
    for name, method in inspect.getmembers(environment, inspect.isroutine):
        if name.startswith("_") or name in ("reset", str(REWARD)):
            continue
        if inspect.isfunction(method):  # bound to any object, it has no parameter `self`
            method = types.MethodType(method, environment)
        try:
            tools.append(get_json_schema(method))
        except Exception as error:  # of transformers, without a common class
            raise UserError(
                f"method {environment.__name__}.{name} cannot be a tool: {error}; tools need types and a docstring "
                "with 'Args:'. Begin its name with _ if the model shall not call it"
            ) from None
    return tools


class Interact(Harness):
    """Episodes in the environments of an `EnvWorker` group. `rollout.interact` makes it."""

    writes: tuple[str, ...] = (str(REWARD), str(TURN_REWARDS))
    env: str
    """Name of the group."""

    @property
    def title(self) -> str:
        return self.env

    def program(self) -> dict[str, Any]:
        return {"env": self.env}


class PlannedHarness(Harness):
    """A harness as the driver sends it to ranks. Harnesses run on the driver's machine, so the driver
    makes the plan: with its folder, its programs and its environment variables."""

    made: HarnessPlan

    @classmethod
    def of(cls, harness: Harness) -> PlannedHarness:
        plan = harness.plan()
        return cls(made=plan, writes=plan.writes)

    def plan(self) -> HarnessPlan:
        return self.made


def as_harness(given: object) -> Harness:
    """Return a harness. A function becomes a `Function`, and a class an `Environment`.

    Raises:
        UserError: it is none of these.
    """
    if isinstance(given, Harness):
        return given
    if isinstance(given, type):
        return Environment(environment=given)
    if callable(given):
        return Function(function=given)
    raise UserError(
        f"harness={given!r} is no harness; give a function `async def run(row, *, base_url, api_key)`, a class whose methods "
        "are the tools, or a Command(...) of weft.workers.agents.harness"
    )


def _pickled(value: Any, title: str) -> str:
    import cloudpickle

    try:
        return base64.b64encode(cloudpickle.dumps(value)).decode()
    except Exception as error:  # any object of the user may refuse
        raise UserError(
            f"harness {title} cannot be sent to its own process: {error}; create such objects inside the function, "
            "or name it by its place: 'module:name'"
        ) from None


def _own_folders() -> tuple[str, ...]:
    """Return the folders of `sys.path` that belong to the user, not to a Python environment."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [Path(path) for path in (*map(sysconfig.get_path, names), *site.getsitepackages())]
    folders = [Path(path or os.getcwd()).absolute() for path in sys.path]
    return tuple(
        dict.fromkeys(
            str(folder)
            for folder in folders
            if folder.is_dir() and not any(folder.is_relative_to(each) for each in installed)
        )
    )
