"""Formats: the columns of prompts and responses in common data sets and in data for TRL, verl,
OpenRLHF and slime. `ReadSettings` can choose other columns.

Add new formats to `FORMATS` and docs/data.md.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, field_validator

from ..batch import is_ragged
from ..config import Config
from ..errors import UserError
from .files import Rows, lone_surrogate, start_of


@dataclass(frozen=True)
class Format:
    """Maps roles to a file's columns. A name with a dot selects a field of a struct column.

    `dialogue` is a column of conversations. If they end with the assistant's turn, Weft splits them
    into prompt and response.
    """

    name: str
    prompt: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    dialogue: str | None = None
    text: str | None = None
    context: str | None = None
    """Column of text, or of lists of lines, to append to the prompt after a blank line."""
    system: str | None = None
    marks: tuple[str, ...] = ()
    """Additional columns that the format requires."""

    @property
    def texts(self) -> tuple[str, ...]:
        prompt = (self.system, self.prompt, self.context, self.dialogue, self.text)
        return tuple(filter(None, (*prompt, self.response, self.chosen, self.rejected)))

    @property
    def columns(self) -> tuple[str, ...]:
        return self.texts + self.marks

    @property
    def responses(self) -> dict[str, str]:
        """Maps token columns to the file's columns of responses."""
        if self.chosen and self.rejected:
            return {"chosen_ids": self.chosen, "rejected_ids": self.rejected}
        return {"response_ids": self.response} if self.response else {}

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"


FORMATS = (
    Format("TRL unpaired preference", prompt="prompt", response="completion", marks=("label",)),
    Format("Orca pairs", system="system", prompt="question", chosen="chosen", rejected="rejected"),
    Format("TRL or OpenRLHF preference", prompt="prompt", chosen="chosen", rejected="rejected"),
    Format("ShareGPT preference", prompt="conversations", chosen="chosen", rejected="rejected"),
    Format("preference of questions", prompt="question", chosen="chosen", rejected="rejected"),
    Format("preference of inputs", prompt="input", chosen="chosen", rejected="rejected"),
    Format("preference of instructions", prompt="instruction", chosen="chosen", rejected="rejected"),
    Format("TRL or OpenRLHF preference, implicit prompt", chosen="chosen", rejected="rejected"),
    Format("TRL prompt-completion", prompt="prompt", response="completion"),
    Format("verl supervised", prompt="prompt", response="response"),
    Format("Alpaca", prompt="instruction", context="input", response="output"),
    Format("Alpaca without inputs", prompt="instruction", response="output"),
    Format("Dolly", prompt="instruction", context="context", response="response"),
    Format("OpenRLHF supervised", prompt="input", response="output"),
    Format("verl prompts", prompt="prompt", marks=("reward_model",)),
    Format("MBPP tasks", prompt="prompt", context="test_list", marks=("code",)),
    Format("MBPP tasks", prompt="text", context="test_list", marks=("code",)),
    Format("slime prompts", prompt="prompt", marks=("label",)),
    Format("OpenRLHF prompts with labels", prompt="input", marks=("label",)),
    Format("TRL prompt-only", prompt="prompt"),
    Format("slime conversations", dialogue="messages", marks=("label",)),
    Format("TRL or verl conversations", dialogue="messages"),
    Format("ShareGPT conversations", dialogue="conversations"),
    Format("OpenRLHF prompts", dialogue="input"),
    Format("OpenRLHF prompt-collection", dialogue="context_messages"),
    Format("GSM8K questions", prompt="question", marks=("answer",)),
    Format("MATH problems", prompt="problem", marks=("solution",)),
    Format("MATH problems with answers", prompt="problem", marks=("answer",)),
    Format("questions", prompt="question"),
    Format("problems", prompt="problem"),
    Format("TRL language modeling", text="text"),
)
"""Known formats, most specific first. The first whose columns a file has is the file's format."""

_SYSTEM_COLUMNS = ("system", "system_prompt")


def find_format(rows: Rows, how: ReadSettings) -> Format:
    """Return the format that the settings give, or else the first known format that the rows match.
    If none matches, raises a `UserError` that names the closest one."""
    format, table = _find_format(rows, how.prompt, how.response), rows.table
    # A column with another role cannot be the system prompt.
    used = {*format.columns, how.answer} - {format.system}
    found = [name for name in _SYSTEM_COLUMNS if name in table.column_names and name not in used]
    system = next((name for name in found if is_text(table.schema.field(name).type)), None)
    return dataclasses.replace(format, system=system)


def _find_format(rows: Rows, prompt: str | None, response: str | None) -> Format:
    table = rows.table
    names = table.column_names
    for role, column in (("prompt", prompt), ("response", response)):
        if column is not None:
            rows.column(column, role)
    if prompt is not None:
        if response is None and {"chosen", "rejected"} <= set(names):
            name = f"preference, prompt={prompt!r}"
            return Format(name, prompt=prompt, chosen="chosen", rejected="rejected")
        said = f"prompt={prompt!r}" + (f", response={response!r}" if response else "")
        whole = response is None and not is_text(rows.column(prompt, "prompt").type)
        # As with OpenRLHF's `--input_key`. Only TRL's `prompt` may end inside a response.
        if whole and prompt != "prompt":
            return Format(said, dialogue=prompt)
        return Format(said, prompt=prompt, response=response)
    for format in FORMATS:
        if not set(format.columns) <= set(names):
            continue
        if format.context == "test_list" and not is_list_of_text(table.schema.field("test_list").type):
            continue  # not MBPP's tests
        if format.text and "role" in names:
            raise rows.error(
                "columns 'role' and 'text' make each row one message (OpenAssistant's trees); a row must be a whole "
                "conversation, in a column 'messages'. To train on the texts alone, leave out 'role'"
            )
        # OpenRLHF's column `input` may be text or messages.
        if format.dialogue == "input" and is_text(table.schema.field("input").type):
            format = dataclasses.replace(format, prompt="input", dialogue=None)
        if format.columns == ("prompt",) and response is None:
            for name in ("messages", "conversations"):
                if name in names and pa.types.is_nested(table.schema.field(name).type):
                    return Format("UltraChat conversations", dialogue=name)
        if format.columns == ("chosen", "rejected") and all(
            is_text(column.type) and matches_all(as_text(column), r"^\n\nHuman:")
            for column in map(table.column, format.columns)
        ):
            format = dataclasses.replace(format, name="HH-RLHF")
        if response is not None:
            if not format.prompt:
                break
            name = f"{format.name}, response={response!r}"
            format = dataclasses.replace(
                format, name=name, response=response, chosen=None, rejected=None
            )
        return format
    raise _unknown(rows)


def refuse_quoted_messages(rows: Rows, format: Format) -> None:
    """Raise a UserError if all texts of a column are messages in JSON or Python syntax."""
    quoted = r"""^\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:"""
    for name in filter(None, (format.prompt, *format.responses.values())):
        column = rows.table.column(name) if name in rows.table.column_names else None
        if column is None or not is_text(column.type) or not len(column):
            continue
        if matches_all(as_text(column), quoted):
            raise rows.error(
                f"the texts of column {name!r} are lists of messages, such as {start_of(column[0].as_py())}; parse them "
                f"(json.loads) and pass the rows to Prompts.from_rows, or set prompt={format.prompt!r} to use the text unchanged"
            )


def _unknown(rows: Rows) -> UserError:
    names = rows.table.column_names
    best = max(
        FORMATS, key=lambda format: sum(_likest(column, names)[0] - 0.7 for column in format.columns)
    )
    found = ", ".join(f"{f.name!r} ({type_name(f.type)})" for f in rows.table.schema)
    hint = ""
    for column in best.columns:
        if column not in names:
            # Suggest only names that are similar enough for a typing error.
            likeness, likest = _likest(column, names)
            hint += f"; it needs {column!r}" + (f", did you mean {likest!r}?" if likeness >= 0.7 else "")
    return rows.error(
        f"no known format has these columns: found {found}; the nearest format is {best}{hint}; "
        "rename the column, or name the prompt column (prompt='...'); docs/data.md shows all formats"
    )


def _likest(wanted: str, found: Sequence[str]) -> tuple[float, str]:
    """Return (similarity from 0 to 1, name) for the name that is most similar to `wanted`."""

    def likeness(name: str) -> float:
        part = 0.9 if wanted in name.split("_") else 0.0  # `chosen_response` is similar to `chosen`
        alike = min(0.9, difflib.SequenceMatcher(None, wanted, name).ratio())
        return 1.0 if name == wanted else max(part, alike)

    return max((likeness(name), name) for name in found)


# Types of columns

Kind = Literal["text", "messages"]


def column_kind(rows: Rows, column: str) -> Kind:
    """Return whether a column holds text or messages. Raises a UserError if neither."""
    kind = rows.column(column).type
    if is_text(kind):
        return "text"
    item = item_type(kind)
    if pa.types.is_struct(item):
        fields = {f.name for f in item}
        if ("role" in fields and fields & {"content", "tool_calls"}) or fields >= {"from", "value"}:
            return "messages"
        raise rows.error(
            f"column {column!r} holds objects with {', '.join(f.name for f in item)}; "
            "messages have 'role' and 'content' (or ShareGPT's 'from' and 'value')"
        )
    if pa.types.is_null(kind):
        raise rows.error(f"column {column!r} is empty (null) in every row")
    raise rows.error(
        f"column {column!r} is {type_name(kind)}; it must be text, or messages: "
        'a list of {"role": ..., "content": ...}'
    )


def item_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if is_ragged(kind) else kind


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_list_of_text(kind: pa.DataType) -> bool:
    return is_ragged(kind) and is_text(kind.value_type)


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a text column as plain strings. Large strings stay large, because they may not fit."""
    return column if pa.types.is_large_string(column.type) else column.cast(pa.string())


def count_matches(column: pa.ChunkedArray, pattern: str) -> int:
    """Count the texts that match a regular expression (RE2), without creating Python strings."""
    found = pc.call_function("match_substring_regex", [column], pc.MatchSubstringOptions(pattern))
    return pc.call_function("sum", [found]).as_py() or 0


def matches_all(column: pa.ChunkedArray, pattern: str) -> bool:
    return count_matches(column, pattern) == len(column)


def type_name(kind: pa.DataType) -> str:
    if is_text(kind):
        return "text"
    if is_ragged(kind):
        if pa.types.is_struct(kind.value_type):
            return f"list of {{{', '.join(f.name for f in kind.value_type)}}}"
        return f"list of {type_name(kind.value_type)}"
    return f"object with {', '.join(f.name for f in kind)}" if pa.types.is_struct(kind) else str(kind)


# Settings

TooLong = Literal["error", "drop"]
TrainOn = Literal["last", "all"]


class ReadSettings(Config):
    """How to read rows as prompts: keyword arguments of `Prompts.read` and `Prompts.from_rows`."""

    prompt: str | None = None
    """Column of the prompts; `a.b` names a field of a struct. None uses the detected format's
    column. Set it if the rows have no known format."""
    answer: str | None = None
    """Column of the ground truth. None uses the detected format's column. Set it if the column has
    another name."""
    response: str | None = None
    """Column of the responses, for supervised training. None uses the detected format's column. Set
    it if the column has another name."""
    train_on: TrainOn = "last"
    """Which assistant turns of a conversation to train on: "last" or "all". Set it to "all" to
    learn from every assistant turn."""
    extract_answer: bool = True
    r"""Reduce a worked solution to its final answer: the text after `####`, or the content of
    `\boxed{}`. Set it to False if a grader needs the whole solution."""
    chat: bool | None = None
    """Wrap plain-text prompts in the chat template, as user messages. None does so if the tokenizer
    has a template and the texts have no special tokens. Prompts that are messages always use the
    template. Set it to False for a base model."""
    system: str | None = None
    """System prompt for conversations that do not begin with one. Set it to specify the format of
    answers."""
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Variables for the chat template. {"enable_thinking": False} lets a model answer without
    thinking, whatever its template calls that switch. A row's column `chat_template_kwargs` takes
    precedence. Set it for short responses, or if a template needs variables."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """[tokens] Maximum length of a prompt. None sets no limit besides the model's context. Lower it
    if a few long prompts determine the memory use."""
    too_long: TooLong = "error"
    """How to handle prompts that exceed `max_prompt_tokens`: "error" rejects the data, "drop" drops
    the rows. This also covers rows that exceed the context of one of the run's models: prompts
    without room for a response, and given responses that are too long. The driver finds them before
    it starts workers. Choose "drop" if there is enough data without them."""
    teacher: str | Path | None = None
    """Folder or Hugging Face id of a teacher with another tokenizer: render and tokenise each prompt for
    it too, with its own chat template, as the column `teacher_prompt_ids`. Set it for distillation
    across tokenizers."""
    limit: int | None = Field(default=None, ge=1)
    """[rows] Maximum number of rows to read. None reads all. Set it for a trial run."""

    retired: ClassVar[Mapping[str, str]] = {
        "thinking": 'set chat_template_kwargs={"enable_thinking": False}, for any template'
    }

    @field_validator("system", "chat_template_kwargs")
    @classmethod
    def _is_whole(cls, value: Any) -> Any:
        half = lone_surrogate(value)
        if half is not None:
            raise ValueError(
                f"holds the lone surrogate {half!a}, which is half of a character: the text was cut or decoded wrongly"
            )
        return value


class ReadArguments(TypedDict, total=False):
    """The fields of `ReadSettings` as keyword arguments, for type checkers."""

    prompt: str | None
    answer: str | None
    response: str | None
    train_on: TrainOn
    extract_answer: bool
    chat: bool | None
    system: str | None
    chat_template_kwargs: Mapping[str, Any]
    max_prompt_tokens: int | None
    too_long: TooLong
    teacher: str | Path | None
    limit: int | None
