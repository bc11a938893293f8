"""The harness of `exact.py`: random conversations, with all that agents do to their histories.

An episode continues its conversation or an earlier state of it, asks for several choices, compacts or
edits its history, starts two sub-agents at the same time, and repeats requests. It returns its requests
and the log-probabilities of the replies, so that `exact.py` finds the engine's turns.

Each message has a unique word, such as `n17z`. Only the standard library is imported here, because
each episode is a process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>", "<|python_tag|>", "<s>", "</s>", "[INST]"),
    *("[/INST]", "[TOOL_CALLS]", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
    "<|im_end|>\n<|im_start|>assistant\n",
)  # fmt: skip
PIECES = (
    *("It is 42.", "  two spaces\tand a tab ", "\n\nline\r\n", "空は青い。", "Großmutter fährt", "🏳️‍🌈👩‍👩‍👧‍👦"),
    *("e\u0301\u0302", "\u202eright to left\u202c שלום", "\u200b\ufeff\u00a0", "\x01\x07\x1b", "'\"\\\\", "{"),
    *('{"name": "add", "arguments": {}}', "{{ messages }}", "{% raise %}", "", " ", "\n"),
)  # fmt: skip


def text(draw: random.Random, *more: str) -> str:
    """Return some pieces of text, in random order."""
    kinds = (PIECES, PIECES, SPECIAL)
    pieces = [draw.choice(draw.choice(kinds)) for _ in range(draw.randint(0, 4))] + list(more)
    draw.shuffle(pieces)
    return draw.choice(("", " ", "\n")).join(pieces)


@dataclass
class Talk:
    """One conversation. It ends with a reply of the model."""

    messages: list[Message]
    tools: list[Message]
    n: int = 1
    """Choices that the last request asked for."""


class Refused(Exception):
    """The gateway or the template refuses a request."""


class ContextFull(Exception):
    pass


@dataclass
class Agent:
    """Holds conversations, with its own random numbers."""

    row: Mapping[str, Any]
    base_url: str
    draw: random.Random
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    numbers: Any = field(default_factory=itertools.count)

    # Conversations

    def run(self) -> None:
        talks = [self.begin()]
        for _ in range(self.draw.randint(2, 10)):
            at = min(self.draw.randrange(len(talks)), self.draw.randrange(len(talks)))
            go_on, repeat, delegate = self.go_on, self.repeat, self.delegate
            others = (self.branch, self.choices, self.compact, self.edit, self.again)
            each = [go_on, go_on, go_on, repeat, delegate]
            if not self.row["append_only"]:
                each += others
            try:
                talks += self.draw.choice(each)(talks[at])
            except Refused:
                continue

    def begin(self) -> Talk:
        """Begin a conversation, perhaps with a system message, tools and examples."""
        messages: list[Message] = []
        if self.draw.random() < 0.4:
            messages.append(self.given("system"))
        if self.draw.random() < 0.1:
            messages += [self.given("user"), self.given("assistant")]
        talk = Talk([*messages, self.given("user")], self.some_tools())
        return self.said(talk)

    def go_on(self, talk: Talk) -> list[Talk]:
        talk.messages, talk.n = self.said(self.answered(talk)).messages, 1
        return []

    def branch(self, talk: Talk) -> list[Talk]:
        """Continue an earlier state in another way."""
        replies = [at for at, each in enumerate(talk.messages) if each["role"] == "assistant"]
        earlier = Talk(talk.messages[: self.draw.choice(replies) + 1], talk.tools)
        return [self.said(self.answered(earlier))]

    def choices(self, talk: Talk) -> list[Talk]:
        asked = self.answered(talk)
        asked.n = self.draw.randint(2, 3)
        replies = self.ask(asked)
        return [Talk([*asked.messages, reply], talk.tools, asked.n) for reply in replies]

    def compact(self, talk: Talk) -> list[Talk]:
        """Replace the history by a summary that quotes it, perhaps with the last reply."""
        said = talk.messages[-1].get("content") or ""
        messages = [self.given("user", said[:40])]
        if self.draw.random() < 0.5:
            short = self.answered(Talk([*messages, talk.messages[-1]], talk.tools))
        else:
            short = Talk(messages, talk.tools)
        return [self.said(short)]

    def edit(self, talk: Talk) -> list[Talk]:
        """Change an earlier message of the history."""
        messages = [*talk.messages]
        at = self.draw.choice([k for k, each in enumerate(messages) if each["role"] != "assistant"])
        messages[at] = messages[at] | {"content": self.word()}
        return [self.said(self.answered(Talk(messages, talk.tools)))]

    def again(self, talk: Talk) -> list[Talk]:
        """Ask the last request again, for another sample."""
        return [self.said(Talk(talk.messages[:-1], talk.tools))]

    def repeat(self, talk: Talk) -> list[Talk]:
        """Repeat the last request, as a client does that had no reply."""
        self.ask(Talk(talk.messages[:-1], talk.tools, talk.n), retry=True)
        return []

    def delegate(self, talk: Talk) -> list[Talk]:
        """Let two sub-agents work at the same time, and return their conversations."""

        def work(seed: int) -> list[Talk]:
            agent = Agent(self.row, self.base_url, random.Random(seed), self.asked, self.numbers)
            try:
                mine = agent.begin()
                agent.go_on(mine)
            except Refused:
                return []
            return [mine]

        seeds = [self.draw.getrandbits(32) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            return [*itertools.chain(*pool.map(work, seeds))]

    def run_ids(self) -> None:
        """Hold a conversation on the token route, and branch it."""
        ids = [self.draw.randrange(self.row["vocabulary"]) for _ in range(self.draw.randint(1, 20))]
        states = [ids]
        for _ in range(self.draw.randint(2, 5)):
            ids = states[-1] if self.row["append_only"] else self.draw.choice(states)
            body = {"model": "policy", "token_ids": ids, "sampling_params": {"logprobs": 1}}
            (choice,) = self.post("/inference/v1/generate", body)["choices"]
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            self.asked.append({"token_ids": ids, "logprobs": [logprobs], "retry": False})
            more = [self.draw.randrange(self.row["vocabulary"]) for _ in range(self.draw.randint(1, 9))]
            states.append([*ids, *choice["token_ids"], *more])

    # Messages

    def word(self) -> str:
        return f"n{next(self.numbers)}z"

    def given(self, role: str, *quoted: str) -> Message:
        return {"role": role, "content": text(self.draw, self.word(), *quoted)}

    def some_tools(self) -> list[Message]:
        numbers = {name: {"type": "integer", "description": "A number."} for name in ("a", "b")}
        schema = {"type": "object", "properties": numbers, "required": ["a"]}
        return [
            {"type": "function", "function": {"name": name, "description": "Über 空.", "parameters": schema}}
            for name in ("add", "ls")[: self.draw.choice((0, 1, 2, 2))]
        ]  # fmt: skip

    def answered(self, talk: Talk) -> Talk:
        """Return a conversation with the results of the last reply's calls, or a user's message."""
        *before, reply = talk.messages
        reply = self.echo(reply)
        results: list[Message] = []
        for call in reply.get("tool_calls", ()):
            found = self.given("tool") | {"tool_call_id": call["id"]}
            results.append(
                found | ({"name": call["function"]["name"]} if self.draw.random() < 0.5 else {})
            )
        return Talk([*before, reply, *(results or [self.given("user")])], talk.tools)

    def echo(self, reply: Message) -> Message:
        """Return a reply as clients send it back: some drop thinking, change ids, or write arguments in another way."""
        reply = json.loads(json.dumps(reply))
        if self.draw.random() < 0.3:
            for name in ("reasoning", "reasoning_content", "refusal"):
                reply.pop(name, None)
        if self.draw.random() < 0.3 and reply["content"]:
            reply["content"] = reply["content"].strip()
        for call in reply.get("tool_calls", ()):
            if self.draw.random() < 0.3:
                call["id"] = f"{self.draw.getrandbits(32):09x}"
            arguments = json.loads(call["function"]["arguments"])
            if self.draw.random() < 0.3 and isinstance(arguments, dict):
                arguments = dict(reversed(arguments.items()))
                call["function"]["arguments"] = json.dumps(arguments, indent=1)
        return reply

    # Requests

    def said(self, talk: Talk) -> Talk:
        (reply,) = self.ask(talk)
        return Talk([*talk.messages, reply], talk.tools)

    def ask(self, talk: Talk, *, retry: bool = False) -> list[Message]:
        body: dict[str, Any] = {"model": "policy", "messages": talk.messages, "n": talk.n}
        body |= {"logprobs": True} | ({"tools": talk.tools} if talk.tools else {})
        variables = {"enable_thinking": False} if self.row["thinks_not"] else {}
        body |= {"chat_template_kwargs": variables} if variables else {}
        choices = self.post("/v1/chat/completions", body, retry=retry)["choices"]
        logprobs = [[e["logprob"] for e in one["logprobs"]["content"]] for one in choices]
        request = {"messages": talk.messages, "tools": talk.tools, "variables": variables}
        self.asked.append({**request, "logprobs": logprobs, "retry": retry})
        return [one["message"] for one in choices]

    def post(self, path: str, body: Message, *, retry: bool = False) -> Message:
        headers = {"Content-Type": "application/json", "x-stainless-retry-count": str(int(retry))}
        url = self.base_url.removesuffix("/v1") + path
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            said = error.read().decode()
            if error.code == 400 and "context_length_exceeded" in said:
                raise ContextFull(said) from None
            if error.code == 400:
                self.asked.append({"refused": re.sub(r"\d+", "", said)[:200]})
                raise Refused(said) from None
            raise


def converse(row: Mapping[str, Any], *, base_url: str, api_key: str) -> dict[str, Any]:
    """Hold a conversation. Return its requests as JSON, in the column `asked`."""
    agent = Agent(row, base_url, random.Random(row["seed"]))
    with contextlib.suppress(ContextFull, Refused):  # the requests before still count
        agent.run_ids() if row["by_ids"] else agent.run()
    return {"reward": 1.0, "asked": json.dumps(agent.asked)}
