"""Signature: recognise a reward function's library by its parameters, and call it accordingly.

| library | function | called with |
|---|---|---|
| Weft | `f(response, answer, ...)` | columns of one sample, by name |
| TRL | `f(completions, **columns) -> list` | a batch; also `prompts`, `completion_ids` |
| verl | `compute_score(data_source, solution_str, ground_truth, extra_info)` | one sample, or a batch (plural names) |
| OpenRLHF | `reward_func(queries, prompts, labels, **kwargs)` | a batch |
| slime | `async def reward_func(args, sample, **kwargs)` | one sample; a batch, with `samples` |
| verifiers, to 0.3 | `f(completion, answer, prompt, info, state)` | one sample |
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from ...dataflow.batch import Batch
from ...dataflow.column import (
    ANSWER,
    FINISH_REASON,
    GROUP_ID,
    IDENTITY,
    PROMPT,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    SAMPLE_ID,
)
from ...dataflow.errors import UserError, nearest

ANSWERS = ("solution", "ground_truth", "label", "target", "answer")
"""Other libraries' names of the ground truth. Without such a column, Weft uses its `answer`."""
MESSAGES = "prompt_messages"
"""Column with a prompt's messages, if the file has any."""
# Columns that `**columns` omits; functions may get them in another form.
_OURS = {*map(str, (PROMPT, PROMPT_IDS, RESPONSE, RESPONSE_IDS, *IDENTITY)), MESSAGES}


class RewardRows:
    """Rows in the form that reward functions read. `decode` decodes many texts at once."""

    def __init__(self, rows: Batch, decode: Callable[[list[list[int]]], list[str]]) -> None:
        self.rows = rows
        self._decode = decode
        self._lists: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: str) -> bool:
        return name in self.rows or (name in ANSWERS and ANSWER in self.rows)

    def __getitem__(self, name: str) -> list[Any]:
        """Return a column. A name in `ANSWERS` finds the ground truth. Raises a UserError if
        missing."""
        if name not in self._lists:
            source = name if name in self.rows or name not in ANSWERS else str(ANSWER)
            if source not in self.rows:
                raise UserError(f"there is no column {name!r}{nearest(name, self.rows.columns)}")
            self._lists[name] = self.rows[source].to_pylist()
        return self._lists[name]

    def one(self, k: int) -> RewardRows:
        return RewardRows(self.rows.take([k]), self._decode)

    @cached_property
    def responses(self) -> list[str]:
        return self._decode(self[str(RESPONSE_IDS)])

    @cached_property
    def prompts(self) -> list[str]:
        """Texts of the prompts after the chat template, or "" without prompts."""
        if PROMPT in self.rows:
            return self[str(PROMPT)]
        return self._decode(self[str(PROMPT_IDS)]) if PROMPT_IDS in self.rows else [""] * len(self)

    @cached_property
    def dialogues(self) -> tuple[list[Any], list[Any]]:
        """Prompts and responses: messages if the prompts were messages, otherwise texts."""
        if MESSAGES not in self.rows:
            return self.prompts, self.responses
        prompts: list[Any] = []
        for messages in self[MESSAGES]:
            # Arrow gives each message the keys of all messages.
            prompts.append([{k: v for k, v in m.items() if v is not None} for m in messages])
        return prompts, [[{"role": "assistant", "content": text}] for text in self.responses]

    @property
    def rest(self) -> dict[str, list[Any]]:
        """Columns of the data and of other nodes, without tokens, identities and prompts."""
        return {name: self[name] for name in self.rows.columns if name not in _OURS}

    def or_else(self, name: str, default: Any) -> list[Any]:
        """Return a column of the file, with a default for missing or null values."""
        values = self[name] if name in self else [None] * len(self)
        return [default if value is None else value for value in values]


Given = Callable[[RewardRows], Mapping[str, Sequence[Any]]]


@dataclass(frozen=True)
class Signature:
    """The calling convention of a library."""

    library: str
    marks: tuple[str, ...]
    """Parameters that identify the library."""
    gives: tuple[str, ...]
    """Parameters that the library passes. All others are columns."""
    given: Given
    """Maps samples to the values of these parameters."""
    batch: bool = False
    """Whether a call takes lists of all samples, and returns a list of results."""
    positional: bool = False
    """Whether the library passes its parameters by position."""
    reads: tuple[str, ...] = ()
    """Optional columns to read, besides tokens."""
    returns_parts: bool = False
    """Whether a result may be a dictionary."""
    logs: bool = False
    """Whether functions get callbacks for logging."""
    missing: tuple[str, ...] = ()
    """Parameters that only the library's trainer can pass."""

    def __str__(self) -> str:
        """
        >>> str(OPENRLHF)
        "OpenRLHF's signature (queries, prompts, labels), called with a batch"
        """
        return f"{self.library}'s signature ({', '.join(self.gives)}), called with {'a batch' if self.batch else 'one sample'}"


def find_signature(names: Sequence[str]) -> Signature | None:
    """Return another library's signature with these parameters, or None.

    >>> find_signature(["solution_str", "ground_truth"]).library, find_signature(["response", "answer"])
    ('verl', None)
    """
    return next((signature for signature in SIGNATURES if set(signature.marks) <= set(names)), None)


def _of_trl(samples: RewardRows) -> Mapping[str, Sequence[Any]]:
    prompts, completions = samples.dialogues
    return {"prompts": prompts, "completions": completions, "completion_ids": samples[str(RESPONSE_IDS)]}


def _of_verifiers(samples: RewardRows) -> Mapping[str, Sequence[Any]]:
    prompts, completions = samples.dialogues
    given = {
        "prompt": prompts,
        "completion": completions,
        "answer": samples.or_else("answer", ""),
        "info": samples.or_else("info", {}),
    }
    states = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
    return {**given, "state": states}


def _of_openrlhf(samples: RewardRows) -> Mapping[str, Sequence[Any]]:
    texts = zip(samples.prompts, samples.responses, strict=True)
    queries = [prompt + response for prompt, response in texts]
    return {"queries": queries, "prompts": samples.prompts, "labels": samples.or_else("label", None)}


def _of_verl(samples: RewardRows) -> Mapping[str, Sequence[Any]]:
    return {
        "data_source": samples.or_else("data_source", ""),
        "solution_str": samples.responses,
        "ground_truth": samples["ground_truth"],
        "extra_info": samples.or_else("extra_info", {}),
    }


def _plural(given: Given) -> Given:
    return lambda samples: {f"{name}s": values for name, values in given(samples).items()}


class _SlimeSample(SimpleNamespace):
    """A sample with the attributes of slime's samples during scoring."""

    # A `ForkedCaller` pickles samples, which needs the full name.
    Status: Any = enum.Enum(
        "Status",
        {s.upper(): s for s in ("pending", "completed", "truncated", "aborted", "failed")},
        module=__name__,
        qualname="_SlimeSample.Status",
    )
    """How generation ended."""


def _of_slime(samples: RewardRows) -> Mapping[str, Sequence[Any]]:
    status = _SlimeSample.Status
    response_ids, reasons = samples[str(RESPONSE_IDS)], samples.or_else(str(FINISH_REASON), "stop")
    tokens = zip(samples.or_else("prompt_ids", []), response_ids, strict=True)
    fields = {
        "prompt": samples.dialogues[0],
        "response": samples.responses,
        "response_length": [len(ids) for ids in response_ids],
        "tokens": [[*prompt, *response] for prompt, response in tokens],
        "label": samples.or_else("label", None),
        "metadata": samples.or_else("metadata", {}),
        "index": samples[str(SAMPLE_ID)],
        "group_index": samples.or_else(str(GROUP_ID), None),
        "status": [status("truncated" if reason == "length" else "completed") for reason in reasons],
    }
    # Attributes that are None during scoring.
    unset = ("reward", "loss_mask", "rollout_log_probs", "train_metadata", "custom_rm_path")
    each = (dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True))
    return {"sample": [_SlimeSample(**dict.fromkeys(unset), **sample) for sample in each]}


_TEXTS = (str(PROMPT), str(PROMPT_IDS), MESSAGES)
_SLIME, _SLIME_BATCH = ("args", "sample"), ("args", "samples")
_SLIME_READS = (*_TEXTS, "label", "answer", "metadata", str(FINISH_REASON))
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = tuple(f"{name}s" for name in _VERL)
_VERL_READS = ("data_source", "ground_truth", "extra_info", "answer")
_OPENRLHF = ("queries", "prompts", "labels")
_TRL = ("prompts", "completions", "completion_ids")
_TRL_MISSING = ("trainer_state", "environments")
_VERIFIERS = ("prompt", "completion", "answer", "info", "state")
_VERIFIERS_MISSING = ("parser", "judge", "client")

SLIME = Signature(
    "slime", _SLIME, _SLIME, _of_slime, positional=True, reads=_SLIME_READS, returns_parts=True
)
VERL = Signature("verl", ("solution_str",), _VERL, _of_verl, reads=_VERL_READS, returns_parts=True)
OPENRLHF = Signature(
    "OpenRLHF",
    ("queries", "prompts"),
    _OPENRLHF,
    _of_openrlhf,
    batch=True,
    positional=True,
    reads=(*_TEXTS, "label", "answer"),
    returns_parts=True,
)
TRL = Signature(
    "TRL", ("completions",), _TRL, _of_trl, batch=True, reads=_TEXTS, logs=True, missing=_TRL_MISSING
)
# OpenRLHF's marks include one of TRL's, so the order matters.
SIGNATURES = (
    SLIME,
    replace(SLIME, marks=_SLIME_BATCH, gives=_SLIME_BATCH, given=_plural(_of_slime), batch=True),
    VERL,
    replace(VERL, marks=("solution_strs",), gives=_VERL_BATCH, given=_plural(_of_verl), batch=True),
    OPENRLHF,
    *(replace(TRL, marks=(name,)) for name in ("completions", "completion_ids", "prompts")),
    Signature(
        "verifiers",
        ("completion",),
        _VERIFIERS,
        _of_verifiers,
        reads=(*_TEXTS, "answer", "info"),
        missing=_VERIFIERS_MISSING,
    ),
)
"""Signatures of other libraries, in the order in which Weft tries them."""
