"""Harnesses that Weft brings. They run in the processes of episodes, and import no heavy packages."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .failures import EpisodeFailure, HarnessDied, ModelUnreachable, NoVerdict


def run_command(command: Sequence[str], row: Mapping[str, Any], *, base_url: str, api_key: str) -> Any:
    """Run a command line in the episode's empty folder. Return the content of its reward file."""
    folder = Path(os.environ["HOME"])
    row_file, reward_file = folder / "row.json", folder / "reward.json"
    row_file.write_text(json.dumps(row))
    files = {"WEFT_ROW": str(row_file), "WEFT_REWARD": str(reward_file)}
    code = subprocess.run(command, cwd=folder, env={**os.environ, **files}, check=False).returncode
    if code:
        raise HarnessDied(
            f"the command ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        )
    try:
        text = reward_file.read_text()
    except FileNotFoundError:
        raise NoVerdict("the command wrote no reward file; WEFT_REWARD has its path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NoVerdict(f"the reward file cannot be read: {error}") from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise NoVerdict(
            f"the reward file must have a number or a JSON object, not {text[:200]!r}: {error}"
        ) from None


# Environments


async def play(
    make: Callable[[], Any],
    tools: Sequence[Mapping[str, Any]],
    max_turns: int,
    row: Mapping[str, Any],
    *,
    base_url: str,
    api_key: str,
) -> Any:
    """Let the model call an environment's methods until it calls none. Return the reward.

    Args:
        make: the environment's class.
        tools: a schema of each method that the model may call, in OpenAI's format.
        max_turns: maximum number of the model's turns.
        row: the columns of the prompt, which `reset` gets by name.
    """
    environment = make()
    takes = inspect.signature(environment.reset).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    given = {name: value for name, value in row.items() if takes_all or name in takes}
    prompt = row.get("prompt_messages") or row.get("prompt")
    messages = _conversation(prompt, await _waited(environment.reset(**given)))
    names = {tool["function"]["name"] for tool in tools}
    for _ in range(max_turns):
        request = {"model": "policy", "messages": messages, **({"tools": tools} if tools else {})}
        message = await asyncio.to_thread(_ask, base_url, api_key, request)
        if message is None:
            break
        messages.append(message)
        calls = message.get("tool_calls") or []
        for call in calls:
            content = await _answer(environment, names, call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not calls:
            break
    if not hasattr(environment, "reward"):
        raise NoVerdict(f"{type(environment).__name__} has no attribute or method 'reward'")
    reward = environment.reward
    return await _waited(reward() if callable(reward) else reward)


def _conversation(prompt: Any, observation: str | None) -> list[dict[str, Any]]:
    """Return the first messages, with the observation at the end of the last one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    # Arrow gives each message the keys of all messages.
    messages = [{name: value for name, value in m.items() if value is not None} for m in messages]
    if not observation:
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": observation}]
    content = messages[-1]["content"]
    if isinstance(content, str):
        content += observation
    else:
        content = [*content, {"type": "text", "text": observation}]
    return [*messages[:-1], {**messages[-1], "content": content}]


async def _answer(environment: Any, names: set[str], call: Mapping[str, Any]) -> str:
    """Call a tool. The model reads its errors, and may try again."""
    try:
        arguments = json.loads(call["arguments"] or "{}")
        if call["name"] not in names:
            raise ValueError(f"no tool is named {call['name']!r}, only {', '.join(sorted(names))}")
        if not isinstance(arguments, dict):
            raise ValueError("the arguments must be a JSON object")
        result = await _waited(getattr(environment, call["name"])(**arguments))
        return result if isinstance(result, str) else json.dumps(result, default=str)
    except EpisodeFailure:
        raise
    except Exception as error:
        return json.dumps({"error": f"{error}" or type(error).__name__})


def _ask(base_url: str, api_key: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the model's next message, or None if the conversation is too long for the model."""
    asked = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(request).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    try:
        # The runner limits the time. A proxy would not reach this machine's loopback.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as reply:
            return json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        if error.code == 400 and "context_length_exceeded" in text:
            return None
        raise ModelUnreachable(f"the gateway answered {error.code}: {text[:500]}") from None
    except (OSError, http.client.HTTPException) as error:
        raise ModelUnreachable(f"the gateway at {base_url} did not answer: {error}") from None


async def _waited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
