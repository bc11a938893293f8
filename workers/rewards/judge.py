"""Judge: grade responses with a model behind an OpenAI-compatible API."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pydantic

from ...algorithms.graders.grader import answer_text
from ...dataflow.config import Config
from ...dataflow.errors import UserError
from .function import Reward

QUESTION = """Grade the response to the task. Think it over briefly, and end with one line "Score: N", where N is a number \
from {lowest:g} (useless) to {highest:g} (perfect).

<task>
{prompt}
</task>
<reference>
{answer}
</reference>
<response>
{response}
</response>"""
RUBRIC = """Check whether the response to the task meets each criterion. Think it over briefly, and end with one line for each \
criterion, "N: yes" or "N: no", where N is its number.

<task>
{prompt}
</task>
<reference>
{answer}
</reference>
<response>
{response}
</response>
<criteria>
{criteria}
</criteria>"""
_VERDICT = re.compile(r"^\W*(\d+)\W{1,5}(yes|no)\b", re.IGNORECASE | re.MULTILINE)
REMEMBERED = 10_000
"""Number of questions whose rewards a judge remembers."""
REPEATED = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP status codes to retry."""
RETRIES = 3
"""Number of retries if there is no reply or its status is in `REPEATED`. The pause doubles with
each retry, up to LONGEST_PAUSE_S. Weft requeues a sample that still fails, up to two times."""
LONGEST_PAUSE_S = 30.0
REPLY_S, TOKEN_S = 60.0, 0.1
"""[s] Time limit of a request: the first, or the second for each of its `max_tokens` if longer."""


class Judge(Config):
    """A reward function that asks a model for a score, and maps the score to a reward from 0 to 1.

    >>> judge = Judge(address="http://127.0.0.1:8000/v1", model="qwen3-8b")
    >>> judge.reward_in("Sound, but wordy.\\nScore: 8/10")
    0.8

    With `criteria`, it asks which of them the response meets. The reward is the sum of the weights of
    those it meets, divided by the sum of the positive weights (Rubrics as Rewards, arXiv:2507.17746,
    eq. 1), between 0 and 1:

        Judge(address=..., model=..., criteria={"States the result": 2, "Names a source": 1, "Is rude": -2})
    """

    address: str
    """Required. Set it to the address of the server up to `/v1`, without a key:
    `http://127.0.0.1:8000/v1`."""
    model: str
    """Required. Set it to the model's name on the server."""
    question: str = QUESTION
    """Prompt for the judge. Weft replaces `{prompt}`, `{response}`, `{answer}`, `{lowest}` and
    `{highest}` by their values, and `{criteria}` by the criteria. Set one that names your task's criteria."""
    criteria: Mapping[str, float] = {}
    """Criteria with their weights, instead of one score; a negative weight is a penalty. A column
    `rubric` with such a mapping (or its JSON text) adds the criteria of a row. Set them if one score
    is too coarse."""
    score: str = r"(?i:score)\W{0,5}(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the score. The last match counts. Change it if the
    question asks for another format."""
    scale: tuple[float, float] = (0.0, 10.0)
    """[score] Worst and best score, which map to rewards 0 and 1. Change it with the question."""
    key_variable: str = ""
    """Environment variable with the API key, on the driver and the ranks; empty sends no key. Weft
    never stores the key. Set it for a service that requires one."""
    max_tokens: int = pydantic.Field(default=512, ge=1, le=100_000_000)
    """[tokens] Maximum length of a reply. Raise it for a judge that reasons at length."""
    retired: ClassVar[Mapping[str, str]] = {
        "lowest": "set scale=(lowest, highest)",
        "highest": "set scale=(lowest, highest)",
        "concurrency": "set Reward(function=Judge(...), concurrency=...)",
        "per_second": "set Reward(function=Judge(...), per_second=...)",
        "temperature": "the temperature is always 0, because a random reward adds noise",
        "deadline_s": f"a reply may take {REPLY_S:g} s, or {TOKEN_S:g} s for each of max_tokens",
        "retries": f"a request is retried {RETRIES} times",
    }

    @pydantic.model_validator(mode="after")
    def _is_well_formed(self) -> Judge:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"address={self.address!r} must be like http://host:port/v1")
        # Error messages show the address, so it must not have a password.
        if parts.password or parts.username:
            raise ValueError(
                "address must not contain a password; name the environment variable with the key: key_variable='...'"
            )
        if self.scale[1] <= self.scale[0]:
            raise ValueError(f"scale must rise, from the worst score to the best; {self.scale} does not")
        if re.compile(self.score).groups != 1:
            raise ValueError(f"score={self.score!r} must have one group, which is the number")
        if self.criteria:
            _check_criteria(self.criteria)
            self._check_question()
        return self

    def _check_question(self) -> None:
        if self.question != QUESTION and "{criteria}" not in self.question:
            raise ValueError(
                "question lacks {criteria}, where Weft puts the criteria; add it, or leave question out"
            )

    @property
    def reward(self) -> Reward:
        """This judge as a reward function. `Reward(function=judge, ...)` sets other options."""
        return Reward(function=self, name="judge")

    def check(self) -> None:
        self._headers()

    async def __call__(
        self, response: str, prompt: str = "", answer: Any = "", rubric: Any = None
    ) -> float:
        """Grade one response. Raises a RuntimeError (without the key) if it gets no score. The same
        question is asked once."""
        lowest, highest = (f"{end:g}" for end in self.scale)
        if criteria := {**self.criteria, **_rubric_of(rubric)}:
            self._check_question()
        reference = "(none)" if answer in (None, "") else answer_text(answer)
        values = {"prompt": prompt, "answer": reference, "response": response}
        values |= {"lowest": lowest, "highest": highest}
        values["criteria"] = "\n".join(f"{k}. {text}" for k, text in enumerate(criteria, start=1))
        question = RUBRIC if criteria and self.question == QUESTION else self.question
        # Substitute in one pass, to keep braces in a response.
        asked = re.sub(r"\{(\w+)(?::g)?\}", lambda m: values.get(m[1], m[0]), question)
        key = hashlib.sha256(asked.encode("utf-8", "surrogatepass")).digest()
        if key not in self._remembered:
            reply = await self._reply(asked)
            reward = self.share_met(reply, criteria) if criteria else self.reward_in(reply)
            if len(self._remembered) >= REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)), None)
            self._remembered[key] = reward
        return self._remembered[key]

    def share_met(self, reply: str, criteria: Mapping[str, float]) -> float:
        """Return the reward in a reply about criteria, from 0 to 1. Raises a RuntimeError if it lacks
        one.

        >>> judge = Judge(address="http://127.0.0.1:8000/v1", model="qwen3-8b")
        >>> judge.share_met("1: yes\\n2: no\\n3: yes", {"correct": 3, "short": 1, "rude": -1})
        0.5
        """
        met = {int(number): said.lower() == "yes" for number, said in _VERDICT.findall(reply)}
        missing = [text for k, text in enumerate(criteria, start=1) if k not in met]
        if missing:
            raise RuntimeError(
                f"the judge {self.model} gave no verdict on {missing[0]!r}: {reply[-300:]!r}"
            )
        gained = math.fsum(weight for k, weight in enumerate(criteria.values(), start=1) if met[k])
        return min(max(gained / math.fsum(w for w in criteria.values() if w > 0), 0.0), 1.0)

    def reward_in(self, reply: str) -> float:
        """Return the reward in a reply, from 0 to 1. Raises a RuntimeError if it has no score."""
        found = re.findall(self.score, reply)
        if not found:
            raise RuntimeError(f"the judge {self.model} gave no score: {reply[-300:]!r}")
        worst, best = self.scale
        # Judges may mention scores while they reason: use the last one.
        share = (float(found[-1]) - worst) / (best - worst)
        return min(max(share, 0.0), 1.0)

    @property
    def _timeout_s(self) -> float:
        return max(REPLY_S, TOKEN_S * self.max_tokens)

    async def _reply(self, asked: str) -> str:
        import asyncio

        import httpx

        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": 0.0,  # a random reward would add noise to training
            "max_tokens": self.max_tokens,
        }
        address = f"{self.address.rstrip('/')}/chat/completions"
        failure = ""
        for attempt in range(RETRIES + 1):
            pause_s = min(0.5 * 2**attempt, LONGEST_PAUSE_S)
            try:
                reply = await self._client.post(
                    address, json=request, headers=self._headers(), timeout=self._timeout_s
                )
            except httpx.TransportError as error:
                failure = f"the judge at {self.address} did not answer: {type(error).__name__} {error}"
            else:
                if reply.status_code == 200:
                    return _text_of(reply.json(), self.model)
                status, text = reply.status_code, reply.text[:300]
                failure = f"the judge at {self.address} answered {status}: {text!r}"
                if reply.status_code not in REPEATED:
                    raise RuntimeError(failure)
                pause_s = _retry_after(reply.headers.get("retry-after"), pause_s)
            if attempt < RETRIES:
                await asyncio.sleep(pause_s)
        raise RuntimeError(f"{failure} ({RETRIES + 1} times)")

    @cached_property
    def _remembered(self) -> dict[bytes, float]:
        return {}

    @cached_property
    def _client(self) -> Any:
        import httpx

        # Redirects could send the key to another host. `Reward.concurrency` limits the connections.
        return httpx.AsyncClient(limits=httpx.Limits(max_connections=None), follow_redirects=False)

    async def aclose(self) -> None:
        """Close the connections. Later calls open new ones."""
        if (client := vars(self).pop("_client", None)) is not None:
            await client.aclose()

    def _headers(self) -> dict[str, str]:
        if not self.key_variable:
            return {}
        key = os.environ.get(self.key_variable)
        if not key:
            raise UserError(f"Judge.key_variable: the environment has no {self.key_variable}")
        return {"Authorization": f"Bearer {key}"}

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        kept = {k: v for k, v in state["__dict__"].items() if k not in ("_client", "_remembered")}
        return {**state, "__dict__": kept}


def _rubric_of(rubric: Any) -> Mapping[str, float]:
    if rubric in (None, ""):
        return {}
    found = json.loads(rubric) if isinstance(rubric, str) else rubric
    _check_criteria(found)
    return found


def _check_criteria(criteria: Any) -> None:
    weights = list(criteria.values()) if isinstance(criteria, Mapping) else []
    numbers = all(isinstance(w, int | float) and math.isfinite(w) for w in weights)
    if not numbers or not any(w > 0 for w in weights):
        raise ValueError(
            f"criteria must map texts to finite weights, at least one of them above 0, not {criteria!r}"
        )


def _text_of(reply: Any, model: str) -> str:
    try:
        return str(reply["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError):
        raise RuntimeError(
            f"the judge {model} did not answer in OpenAI's format: {str(reply)[:300]!r}"
        ) from None


def _retry_after(header: str | None, otherwise_s: float) -> float:
    try:
        seconds = float(header or "nan")
    except ValueError:
        return otherwise_s
    return min(seconds, LONGEST_PAUSE_S) if math.isfinite(seconds) and seconds >= 0 else otherwise_s
