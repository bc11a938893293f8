"""Harnesses: settings, commands and environments."""

import functools
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agents import games  # pyright: ignore[reportAttributeAccessIssue]
from agents.rig import Rig
from tokenizers import Tokenizer as Backend
from tokenizers import models

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer
from weft.workers.agents.failures import (
    Discarded,
    EpisodeFailure,
    HarnessDied,
    InvalidResult,
    ModelUnreachable,
    NoVerdict,
    TurnTimedOut,
)
from weft.workers.agents.harness import Command, Environment, Function, Harness, HarnessPlan, Verifiers

# Settings


async def run(row: Mapping[str, Any], *, base_url: str, api_key: str) -> float:
    return 1.0


def with_a_lock() -> Any:
    lock = threading.Lock()
    return lambda row, base_url, api_key: lock.locked()


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (Function, {"function": lambda row: 1.0}, "called as run(row, base_url=..., api_key=...)"),
        (Function, {"function": with_a_lock()}, "cannot be sent to its own process: cannot pickle"),
        (Function, {"function": "agent"}, "must be like 'package.module:name' or 'file.py:name'"),
        (Function, {"function": "no/file.py:run"}, "does not exist"),
        (Function, {"function": "m:run", "python": "no/python"}, "no/python is not a program"),
        (Function, {"function": run, "python": sys.executable}, "name it by its place"),
        (Function, {"function": run, "variables": ("NO_SUCH_KEY",)}, "environment has no NO_SUCH_KEY"),
        (Function, {"function": run, "writes": ("score",)}, "must have 'reward'"),
        (Function, {"function": run, "deadline_s": 0}, "should be greater than 0"),
        (Command, {"command": "python agent.py"}, "must be a program and its arguments"),
        (Command, {"command": ("no-such-agent",)}, "has the program 'no-such-agent'"),
        (Environment, {"environment": games.Count(1)}, "should be callable"),
        (Environment, {"environment": lambda: games.Count(1)}, "a class with a method 'reset'"),
        (Environment, {"environment": games.NeedsArguments}, "fix them with functools.partial"),
        (Environment, {"environment": games.WithoutTypes}, "WithoutTypes.move cannot be a tool"),
        (Verifiers, {"env": {}, "python": "no/python"}, "no/python is not a program"),
    ],
)
def test_a_bad_harness_is_refused_before_anything_starts(kind: Any, settings: Any, said: str):
    with pytest.raises(UserError) as caught:
        kind(**settings).plan()
    assert said in str(caught.value)


def test_a_plan_survives_json():
    import dataclasses

    plan = Function(function=run, variables=("PATH",)).plan()
    again = HarnessPlan(**json.loads(json.dumps(dataclasses.asdict(plan))))
    assert again.environment(Path("/scratch")) == plan.environment(Path("/scratch"))
    assert again.program == plan.program and again.title == "run"


# Commands


AGENT = """
import json, os, sys
row = json.load(open(os.environ["WEFT_ROW"]))
print("working in", os.getcwd())
assert os.listdir() == ["row.json"] and os.environ["OPENAI_BASE_URL"].endswith("/v1")
if row["reward"] is not None:
    open(os.environ["WEFT_REWARD"], "w").write(row["reward"])
if row.get("hang"):
    import time
    time.sleep(3600)
sys.exit(row.get("code", 0))
"""


def command_rig(folder: Path, **settings: Any) -> Rig:
    (folder / "agent.py").write_text(AGENT)
    return Rig(Command(command=(sys.executable, str(folder / "agent.py")), **settings), folder)


def test_a_command_reads_its_row_and_writes_its_reward(tmp_path: Path):
    rig = command_rig(tmp_path, writes=("reward", "steps"))
    results = rig.run({"reward": '{"reward": 0.5, "steps": 3}'}, {"reward": '{"steps": 1, "reward": 1}'})
    rig.close()
    assert results == [{"reward": 0.5, "steps": 3}, {"reward": 1.0, "steps": 1}]


@pytest.mark.pitfall(12)
@pytest.mark.parametrize(
    ("row", "kind", "said"),
    [
        ({"reward": None}, NoVerdict, "the command wrote no reward file"),
        ({"reward": ""}, NoVerdict, "must have a number or a JSON object, not ''"),
        ({"reward": "high"}, NoVerdict, "not 'high'"),
        ({"reward": "NaN"}, InvalidResult, "finite number, not nan"),
        ({"reward": '"1"'}, InvalidResult, "finite number, not '1'"),
        ({"reward": "null"}, Discarded, "None"),
        ({"reward": "1.0", "code": 3}, HarnessDied, "the command ended with exit code 3"),
    ],
)
def test_a_command_without_a_verdict_is_not_scored_zero(
    command: Rig, row: Any, kind: type[EpisodeFailure], said: str
):
    [failure] = command.run(row)
    assert isinstance(failure, EpisodeFailure) and not failure.scored
    assert type(failure) is kind and said in str(failure)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Any:
    rig = command_rig(tmp_path_factory.mktemp("command"))
    yield rig
    rig.close()


@pytest.mark.pitfall(11)
def test_a_command_that_is_cut_off_is_late_even_if_it_wrote_a_reward(tmp_path: Path):
    """A pipe hides the exit code, and the reward file is there."""
    ask = "import os; from agents.odd_harness import ask; ask(os.environ['OPENAI_BASE_URL'], 'key')"
    script = tmp_path / "agent.sh"
    script.write_text(f'echo 1.0 > "$WEFT_REWARD"\n"{sys.executable}" -c "{ask}"\nsleep 3600 | cat\n')
    harness = Command(command=("bash", str(script)), turn_deadline_s=0.3)  # waited out
    rig = Rig(harness, tmp_path)
    [late] = rig.run({})
    rig.close()
    assert isinstance(late, TurnTimedOut) and late.scored and len(rig.requests) == 1


# Environments


def called(*calls: tuple[str, Any]) -> dict[str, Any]:
    """Return a reply of the model that calls tools."""
    tools = [
        {
            "id": f"call_{at}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            },
        }
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"choices": [{"message": {"role": "assistant", "content": "", "tool_calls": tools}}]}


SAID = {"choices": [{"message": {"role": "assistant", "content": "Done."}}]}


class Model:
    """Gives one reply after the other."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)

    def __call__(self, _: Any) -> tuple[int, dict[str, Any]]:
        reply = self.replies.pop(0)
        return reply if isinstance(reply, tuple) else (200, reply)


def play(folder: Path, environment: Any, *replies: Any, row: Any = None, **settings: Any) -> Any:
    """Run an episode. Return its result, and the requests that the model got."""
    rig = Rig(Environment(environment=environment, **settings), folder, Model(*replies))
    [result] = rig.run(row or {"prompt": "Count to 5.", "target": 5})
    rig.close()
    return result, rig.requests


def test_the_model_calls_the_methods_of_an_environment(tmp_path: Path):
    environment = functools.partial(games.Count, start=1)
    result, requests = play(
        tmp_path,
        environment,
        called(("add", {"number": 1}), ("look", {})),
        called(("add", {"number": 3})),
        SAID,
    )
    assert result == {"reward": 1.0}
    [first, _, last] = requests
    assert first["messages"] == [{"role": "user", "content": "Count to 5. Begin at 1."}]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add", "look"]
    assert first["tools"][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"number": {"type": "integer", "description": "The number to add."}},
        "required": ["number"],
    }
    answers = [(m["tool_call_id"], m["content"]) for m in last["messages"] if m["role"] == "tool"]
    assert answers == [("call_0", "2"), ("call_1", "It is 2."), ("call_0", "5")]


def test_the_model_reads_the_errors_of_its_calls(tmp_path: Path):
    bad = [
        ("add", {"number": -1}),
        ("fly", {}),
        ("add", "{"),
        ("add", "[1]"),
        ("add", {}),
        ("_secret", {}),
        ("reset", {}),
    ]
    result, requests = play(tmp_path, games.Count, called(*bad), SAID)
    assert result == {"reward": 0.0}
    errors = [json.loads(m["content"])["error"] for m in requests[1]["messages"] if m["role"] == "tool"]
    assert errors[0] == "only up" and "no tool is named 'fly', only add, look" in errors[1]
    assert "must be a JSON object" in errors[3] and "missing" in errors[4]
    assert "no tool is named '_secret'" in errors[5] and "no tool is named 'reset'" in errors[6]


def test_an_environment_ends_at_its_maximum_of_turns_or_a_full_context(tmp_path: Path):
    add = called(("add", {"number": 5}))
    result, requests = play(tmp_path, games.Count, add, add, add, max_turns=1)
    assert result == {"reward": 1.0} and len(requests) == 1
    full = (400, {"error": {"code": "context_length_exceeded", "message": "full"}})
    result, requests = play(tmp_path, games.Count, add, full)
    assert result == {"reward": 1.0} and len(requests) == 2


def test_a_model_that_does_not_answer_is_no_fault_of_the_policy(tmp_path: Path):
    failure, _ = play(tmp_path, games.Count, (503, {"error": {"message": "no engine"}}))
    assert isinstance(failure, ModelUnreachable) and "503" in str(failure) and not failure.scored


def test_a_reward_may_be_a_method_and_a_missing_one_is_no_zero(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": "Hello"}]}
    result, requests = play(tmp_path, games.Scored, SAID, row=row, writes=("reward", "parts"))
    assert result == {"reward": 0.5, "parts": [1, 2]} and "tools" not in requests[0]
    failure, _ = play(tmp_path, games.WithoutReward, SAID, row=row)
    assert isinstance(failure, NoVerdict) and "WithoutReward has no attribute or method 'reward'" in str(
        failure
    )


def test_a_harness_has_a_title():
    each: list[Harness] = [
        Function(function=run),
        Command(command=("/bin/ls", "-l")),
        Environment(environment=games.Count),
    ]
    assert [harness.title for harness in each] == ["run", "ls", "Count"]


def test_an_environment_begins_with_the_messages_of_the_data(tmp_path: Path):
    # Arrow gives each message the keys of all messages.
    messages = [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "To 5.", "name": None},
    ]
    row = {"prompt": "<system>Count.<user>To 5.<assistant>", "prompt_messages": messages, "target": 5}
    result, [request] = play(tmp_path, games.Count, SAID, row=row)
    assert result == {"reward": 0.0}
    assert request["messages"][0] == messages[0]
    assert request["messages"][1] == {"role": "user", "content": "To 5. Begin at 0."}


def test_an_environment_refuses_prompts_that_have_the_chat_template():
    backend = Tokenizer(
        Backend(models.WordLevel({"?": 0}, "?")), chat_template="{{ messages[0].content }}?"
    )
    rows, harness = [{"prompt": "Count to 5.", "target": 5}], Environment(environment=games.Count)
    with pytest.raises(
        UserError, match=r"prompts of rows have the chat template.* read them with chat=False"
    ):
        harness.check_prompts(Prompts.from_rows(rows, backend))
    harness.check_prompts(Prompts.from_rows(rows, backend, chat=False))
    rows = [{"prompt": [{"role": "user", "content": "Count to 5."}]}]
    harness.check_prompts(Prompts.from_rows(rows, backend))
