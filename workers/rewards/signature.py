"""Signature: how the reward functions of a library are called. A function is recognised by the names of its parameters.

| library | function | called with |
|---|---|---|
| Weft | `f(response, answer, ...)` | columns of one sample, by name |
| TRL | `f(completions, **columns) -> list` | a batch; also `prompts`, `completion_ids` |
| verl | `compute_score(data_source, solution_str, ground_truth, extra_info)` | one sample; a batch, with names in the plural |
| OpenRLHF | `reward_func(queries, prompts, labels, **kwargs)` | a batch |
| slime | `async def reward_func(args, sample, **kwargs)` | one sample; a batch, with `samples` |
| verifiers, to 0.3 | `f(completion, answer, prompt, info, state)` | one sample |
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from ...dataflow.column import FINISH_REASON, GROUP_ID, PROMPT, PROMPT_IDS, RESPONSE_IDS, SAMPLE_ID
from .samples import MESSAGES, Samples


@dataclass(frozen=True)
class Signature:
    """How the functions of a library are called."""

    library: str
    marks: tuple[str, ...]
    """Parameters that a function must have to be one of this library's."""
    gives: tuple[str, ...]
    """Parameters that the library gives by itself; all others are columns."""
    given: Callable[[Samples], Mapping[str, Sequence[Any]]]
    """What it gives: parameter -> a value for each sample."""
    batch: bool = False
    """Whether a call has all samples, as lists, and returns one result for each."""
    by_position: tuple[str, ...] = ()
    """Parameters that are given by position."""
    reads: tuple[str, ...] = ()
    """Columns beside the tokens that it uses where there are any."""
    returns_parts: bool = False
    """Whether a result may be a dictionary."""
    logs: bool = False
    """Whether functions are given callbacks to log with."""
    missing: tuple[str, ...] = ()
    """Parameters that only the library's own trainer can give."""

    def __str__(self) -> str:
        """
        >>> str(OPENRLHF)
        "OpenRLHF's signature (queries, prompts, labels), called with a batch"
        """
        return f"{self.library}'s signature ({', '.join(self.gives)}), called with {'a batch' if self.batch else 'one sample'}"


def find_signature(names: Sequence[str]) -> Signature | None:
    """The signature of another library that a function with these parameters has; None: it has none.

    >>> find_signature(["solution_str", "ground_truth"]).library, find_signature(["response", "answer"])
    ('verl', None)
    """
    return next((signature for signature in SIGNATURES if set(signature.marks) <= set(names)), None)


def _of_trl(samples: Samples) -> Mapping[str, Sequence[Any]]:
    prompts, completions = samples.dialogues
    return {"prompts": prompts, "completions": completions, "completion_ids": samples[str(RESPONSE_IDS)]}


def _of_verifiers(samples: Samples) -> Mapping[str, Sequence[Any]]:
    prompts, completions = samples.dialogues
    given = {
        "prompt": prompts,
        "completion": completions,
        "answer": samples.or_else("answer", ""),
        "info": samples.or_else("info", {}),
    }
    states = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
    return {**given, "state": states}


def _of_openrlhf(samples: Samples) -> Mapping[str, Sequence[Any]]:
    queries = [prompt + response for prompt, response in zip(samples.prompts, samples.responses, strict=True)]
    return {"queries": queries, "prompts": samples.prompts, "labels": samples.or_else("label", None)}


def _of_verl(samples: Samples) -> Mapping[str, Sequence[Any]]:
    return {
        "data_source": samples.or_else("data_source", ""),
        "solution_str": samples.responses,
        "ground_truth": samples["ground_truth"],
        "extra_info": samples.or_else("extra_info", {}),
    }


def _of_verl_batch(samples: Samples) -> Mapping[str, Sequence[Any]]:
    return {f"{name}s": values for name, values in _of_verl(samples).items()}


class SlimeSample(SimpleNamespace):
    """A sample with the attributes that slime's has while it is scored."""

    class Status(enum.Enum):
        """How its generation ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"


def _of_slime(samples: Samples) -> Mapping[str, Sequence[Any]]:
    status = SlimeSample.Status
    fields = {
        "prompt": samples.dialogues[0],
        "response": samples.responses,
        "response_length": [len(ids) for ids in samples[str(RESPONSE_IDS)]],
        "tokens": [
            [*prompt, *response]
            for prompt, response in zip(samples.or_else("prompt_ids", []), samples[str(RESPONSE_IDS)], strict=True)
        ],
        "label": samples.or_else("label", None),
        "metadata": samples.or_else("metadata", {}),
        "index": samples[str(SAMPLE_ID)],
        "group_index": samples.or_else(str(GROUP_ID), None),
        "status": [
            status.TRUNCATED if reason == "length" else status.COMPLETED
            for reason in samples.or_else(str(FINISH_REASON), "stop")
        ],
    }
    unset = dict.fromkeys(("reward", "loss_mask", "rollout_log_probs", "train_metadata", "custom_rm_path"))
    made = [SlimeSample(**unset, **dict(zip(fields, row, strict=True))) for row in zip(*fields.values(), strict=True)]
    return {"sample": made}


def _of_slime_batch(samples: Samples) -> Mapping[str, Sequence[Any]]:
    return {"samples": _of_slime(samples)["sample"]}


_TEXTS = (str(PROMPT), str(PROMPT_IDS), MESSAGES)
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_READS = ("data_source", "ground_truth", "extra_info", "answer")
_SLIME_READS = (*_TEXTS, "label", "answer", "metadata", str(FINISH_REASON))
_TRL = ("prompts", "completions", "completion_ids")

SLIME = Signature(
    "slime",
    ("args", "sample"),
    ("args", "sample"),
    _of_slime,
    by_position=("args", "sample"),
    reads=_SLIME_READS,
    returns_parts=True,
)
SLIME_BATCH = replace(
    SLIME,
    marks=("args", "samples"),
    gives=("args", "samples"),
    given=_of_slime_batch,
    batch=True,
    by_position=("args", "samples"),
)
VERL = Signature("verl", ("solution_str",), _VERL, _of_verl, reads=_VERL_READS, returns_parts=True)
VERL_BATCH = replace(
    VERL, marks=("solution_strs",), gives=tuple(f"{name}s" for name in _VERL), given=_of_verl_batch, batch=True
)
OPENRLHF = Signature(
    "OpenRLHF",
    ("queries", "prompts"),
    ("queries", "prompts", "labels"),
    _of_openrlhf,
    batch=True,
    by_position=("queries", "prompts", "labels"),
    reads=(*_TEXTS, "label", "answer"),
    returns_parts=True,
)
TRL = Signature(
    "TRL",
    ("completions",),
    _TRL,
    _of_trl,
    batch=True,
    reads=_TEXTS,
    logs=True,
    missing=("trainer_state", "environments"),
)
VERIFIERS = Signature(
    "verifiers",
    ("completion",),
    ("prompt", "completion", "answer", "info", "state"),
    _of_verifiers,
    reads=(*_TEXTS, "answer", "info"),
    missing=("parser", "judge", "client"),
)
SIGNATURES = (
    SLIME,
    SLIME_BATCH,
    VERL,
    VERL_BATCH,
    OPENRLHF,
    TRL,
    replace(TRL, marks=("completion_ids",)),
    replace(TRL, marks=("prompts",)),
    VERIFIERS,
)
"""The signatures of other libraries, in the order in which they are tried."""
