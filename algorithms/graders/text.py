"""Graders of text: equality, word overlap (F1), regular expressions, format, length and JSON."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import pydantic

from ...dataflow.errors import SampleError
from ...dataflow.prompts.answers import after_hashes
from . import extraction
from .grader import Grader

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation + "«»“”‘’¿¡")


def normalized(text: str) -> str:
    """Return lower-case words without punctuation and articles (SQuAD, arXiv:1606.05250, §6.1).

    >>> normalized("  The Eiffel-Tower, Paris! ")
    'eiffeltower paris'
    """
    return " ".join(_ARTICLES.sub(" ", text.casefold().translate(_PUNCTUATION)).split())


class Exact(Grader):
    """1 if the final answer of the response equals the given answer, otherwise 0.

    After the reasoning, the final answer is in a box, follows "the answer is", or is the whole
    text.
    """

    is_verdict: ClassVar[bool] = True

    normalize: bool = True
    """Ignore case, punctuation, articles and whitespace. Set it to False if they matter."""

    def __call__(self, response: str, answer: str) -> float:
        """
        >>> Exact()("The answer is Paris.", "paris"), Exact(normalize=False)("paris", "Paris")
        (1.0, 0.0)
        """
        brought = normalized if self.normalize else str.strip
        return float(any(brought(text) == brought(answer) for text in _candidates(response)))

    def final_answer(self, response: str) -> str | None:
        brought = normalized if self.normalize else str.strip
        return brought(_candidates(response)[-1]) or None


class F1(Grader):
    """Word overlap (F1) of the response and the answer (SQuAD, arXiv:1606.05250, §6.1)."""

    def __call__(self, response: str, answer: str) -> float:
        """Return the best F1 score of the final answer, 0 to 1.

        >>> F1()("in Paris, France", "Paris")
        0.5
        """
        return max(_f1(text, answer) for text in _candidates(response))


def _f1(text: str, answer: str) -> float:
    mine, theirs = Counter(normalized(text).split()), Counter(normalized(answer).split())
    if not mine or not theirs:
        return float(mine == theirs)
    return 2 * (mine & theirs).total() / (mine.total() + theirs.total())


class RegularExpression(Grader):
    """1 if a regular expression matches the response, otherwise 0. If it has a group, the group's
    last match must equal the answer."""

    is_verdict: ClassVar[bool] = True

    pattern: str
    """Required. Set it to a regular expression in Python's syntax, with at most one group."""

    @pydantic.field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            if re.compile(pattern).groups > 1:
                raise ValueError(
                    f"{pattern!r} has several groups, but only one is compared with the answer; write (?:...) for the others"
                )
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return pattern

    def __call__(self, response: str, answer: str = "") -> float:
        r"""Search for the pattern, and compare its group, if any, with the answer.

        >>> RegularExpression(pattern=r"Answer: (\w+)")("Answer: B", "B"), RegularExpression(pattern=r"^\d+$")("about 7")
        (1.0, 0.0)
        """
        found = list(re.finditer(self.pattern, response, re.MULTILINE))
        if not found:
            return 0.0
        if not found[-1].re.groups:
            return 1.0
        if not answer.strip():
            raise SampleError("the row has no answer")
        return float((found[-1][1] or "").strip() == answer.strip())


def _candidates(response: str) -> tuple[str, ...]:
    """Return at least one possible final answer of a response."""
    text = (extraction.final_part(response) or "").strip()
    if boxed := extraction.last_boxes(text):
        return (", ".join(boxed),)
    said = after_hashes(text) or extraction.after_phrase(text)
    return (text, said) if said else (text,)


class TagFormat(Grader):
    """1 if the response begins with the tagged parts, in order, each once and none empty, and text
    follows them (with `rest=False`, nothing follows). Otherwise 0. If the prompt ends with the
    first tag, the response begins inside it.

    >>> TagFormat()("<think>6 * 7</think> 42"), TagFormat()("42"), TagFormat()("<think>6 * 7</think>")
    (1.0, 0.0, 0.0)
    >>> TagFormat(tags=("think", "answer"), rest=False)("<think>6 * 7</think>\\n<answer>42</answer>")
    1.0
    """

    tags: tuple[str, ...] = pydantic.Field(default=("think",), min_length=1)
    """Names of the tags, in order, with only whitespace before and between them. Give the tags that
    the system prompt asks for."""
    rest: bool = True
    """Require text after the last tag; False forbids it. Set it to False if the answer has its own
    tag."""

    retired: ClassVar[Mapping[str, str]] = {
        "opened": "the end of the prompt shows whether the chat template opens the first tag"
    }

    def __call__(self, response: str, prompt: str = "") -> float:
        first = f"<{self.tags[0]}>"
        text = first + response if prompt.rstrip().endswith(first) else response
        tags = map(re.escape, self.tags)
        parts = r"\s*".join(rf"<{tag}>\s*\S(?:(?!</?{tag}>).)*</{tag}>" for tag in tags)
        after = r"\s*\S.*" if self.rest else r"\s*"
        found = re.fullmatch(rf"\s*{parts}{after}", text, re.DOTALL)
        # The expression would allow more tags after the last one.
        once = all(text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1 for tag in self.tags)
        return float(found is not None and once)


class LengthReward(Grader):
    """1 for a response of at most `full_tokens` tokens, falling linearly to 0 at `no_tokens`.

    >>> [LengthReward(full_tokens=2, no_tokens=6)([7] * tokens) for tokens in (2, 4, 9)]
    [1.0, 0.5, 0.0]
    """

    full_tokens: int = pydantic.Field(ge=0)
    """[tokens] Required. Set it to the longest length with the full reward."""
    no_tokens: int
    """[tokens] Required. Set it to the shortest length with a reward of 0."""

    @pydantic.model_validator(mode="after")
    def _falls(self) -> LengthReward:
        if self.no_tokens <= self.full_tokens:
            raise ValueError(
                f"no_tokens must be more than full_tokens={self.full_tokens}, not {self.no_tokens}"
            )
        return self

    def __call__(self, response_ids: Sequence[int]) -> float:
        share = (self.no_tokens - len(response_ids)) / (self.no_tokens - self.full_tokens)
        return min(max(share, 0.0), 1.0)


_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


class JsonSchema(Grader):
    """1 if the response is JSON that matches a schema, otherwise 0.

    `json_schema={}` accepts any JSON.
    """

    is_verdict: ClassVar[bool] = True

    json_schema: Mapping[str, Any]
    """Required. Set it to a JSON Schema. Its `$schema` names the draft; the default is 2020-12."""

    @pydantic.field_validator("json_schema")
    @classmethod
    def _is_schema(cls, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        import jsonschema
        from jsonschema.validators import validator_for

        try:
            validator_for(schema).check_schema(dict(schema))
        except jsonschema.SchemaError as error:
            raise ValueError(f"it is not a JSON Schema: {error.message} at {error.json_path}") from None
        return schema

    @cached_property
    def _validator(self) -> Any:
        from jsonschema.validators import validator_for

        return validator_for(self.json_schema)(self.json_schema)

    def __call__(self, response: str) -> float:
        """Return 1 if the response is valid, otherwise 0.

        >>> person = JsonSchema(json_schema={"type": "object", "required": ["name"]})
        >>> person('{"name": "Ada"}'), person('{"age": 36}'), person("Ada")
        (1.0, 0.0, 0.0)
        """
        text = extraction.without_tag(extraction.without_reasoning(response)).strip()
        fenced = _FENCE.findall(text)
        try:
            # Python's parser accepts NaN and Infinity.
            value = json.loads(fenced[-1] if fenced else text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        return float(self._validator.is_valid(value))


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")
