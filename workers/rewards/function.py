"""Reward: a reward function with its name and weight, and how its signature has it called."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import pydantic

from ...dataflow.column import IDENTITY, RESPONSE, RESPONSE_IDS
from ...dataflow.config import Config
from ...dataflow.errors import SampleError, nearest
from ...dataflow.operation import ALL_COLUMNS
from .samples import ANSWERS, Samples
from .signature import Signature, find_signature

_TOTALS = ("reward", "score", "rewards")
"""Which part of a returned dictionary is the reward, if the function has one of these."""
LARGEST = 3.4028234663852886e38
"""Of a reward: columns of rewards are float32."""
_LOGGERS = ("log_extra", "log_metric")
"""Callbacks that TRL gives."""


class Reward(Config):
    """A reward function, and how it is called. In `RewardWorker(function=...)` a plain function will do where these are the defaults."""

    function: Callable[..., Any]
    """The reward function. The names of its parameters tell whether it has Weft's own form or that of TRL, verl, OpenRLHF, slime or
    verifiers (`signature.py`). Choose it; there is no default."""
    name: str = ""
    """Name of its metric and column; empty: the function's name. Give one where two functions are called alike."""
    weight: float = 1.0
    """[factor] It multiplies the result in the sum. Set it where one reward matters more than another; 0 only measures."""
    batch: bool = False
    """Whether a function of Weft's own form is called with lists, for all samples at once, and returns a list. Set it for a function that
    is quicker so."""
    settings: Mapping[str, Any] = {}
    """Further keyword arguments, such as verl's `reward_kwargs`; the attributes of slime's `args`. Give what the function asks for."""
    part: str = ""
    """Which part of a returned dictionary is the reward; empty: "reward" or "score", and where there is neither, the sum. Give its name
    where another part is."""
    concurrency: int = pydantic.Field(default=64, ge=1)
    """[calls] How many asynchronous ones may be in flight on a rank. Lower it where a service refuses, raise it where it is idle."""
    retries: int = pydantic.Field(default=0, ge=0)
    """[calls] How often an asynchronous one is repeated when it raises, after half a second and then twice as long each time. Raise it
    for a service that fails now and then."""
    per_second: float | None = pydantic.Field(default=None, gt=0)
    """[calls/s] How many asynchronous ones may begin on a rank; None: no limit. Set it to what a service allows."""

    retired: ClassVar[Mapping[str, str]] = {"pause_s": "the first repetition comes after half a second"}

    @pydantic.model_validator(mode="after")
    def _can_be_called(self) -> Reward:
        takes = f"{name_of(self.function)}{inspect.signature(self.function)}"
        parameters = inspect.signature(self.function).parameters.values()
        names = [p.name for p in parameters]
        if self.signature is not None:
            asked = [p.name for p in self._open if p.name in self.signature.missing and p.default is p.empty]
            if asked:
                raise ValueError(
                    f"reward function {takes} takes {asked[0]!r}, which only {self.signature.library}'s own trainer has"
                )
            return self
        if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
            raise ValueError(f"reward function {takes} must name its parameters: each is a column")
        if not self.takes_all and not {str(RESPONSE), str(RESPONSE_IDS)} & set(names):
            hint = next(
                (f"; did you mean 'response' for {n!r}?" for n in names if nearest(n, ["response", "responses"])), ""
            )
            raise ValueError(
                f"reward function {takes} takes neither 'response' nor 'response_ids'{hint}; "
                "docs/rewards.md shows the signatures that are known"
            )
        return self

    @cached_property
    def signature(self) -> Signature | None:
        """Of another library; None: Weft's own."""
        return find_signature(list(inspect.signature(self.function).parameters))

    @property
    def title(self) -> str:
        """Name of its metric and column."""
        return self.name or name_of(self.function).rpartition(".")[2].strip("<>") or "reward"

    @property
    def is_batch(self) -> bool:
        return self.signature.batch if self.signature else self.batch

    @cached_property
    def is_async(self) -> bool:
        """Whether a call returns an awaitable."""
        function = self.function.func if isinstance(self.function, functools.partial) else self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(self._inner)

    @property
    def may_return_parts(self) -> bool:
        """Whether functions of its library return dictionaries, or its annotation names one."""
        returns = str(inspect.signature(self.function).return_annotation).lower()
        annotated = bool(self.part) or "dict" in returns or "mapping" in returns
        return annotated or (self.signature is not None and self.signature.returns_parts)

    @property
    def place(self) -> str:
        """File and line where the function is defined; empty where it has none."""
        code = getattr(self._inner, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else ""

    @property
    def _inner(self) -> Callable[..., Any]:
        """The function itself: what a partial calls, what is decorated, the method of a callable object."""
        inner = inspect.unwrap(self.function.func if isinstance(self.function, functools.partial) else self.function)
        return inner if inspect.isroutine(inner) else type(inner).__call__  # pyright: ignore[reportFunctionMemberAccess]

    # What it reads

    @property
    def takes_all(self) -> bool:
        """Whether it has `**columns`."""
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.function).parameters.values())

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the function requires."""
        needed = (p.name for p in self._columns if p.default is p.empty)
        return tuple(name for name in needed if self.signature is None or name not in ANSWERS)

    @property
    def may_read(self) -> tuple[str, ...]:
        """Columns that it gets where there are any."""
        if self.takes_all:
            return (ALL_COLUMNS,)
        optional = tuple(p.name for p in self._columns if p.name not in self.reads)
        if self.signature is None:
            return optional
        return tuple(dict.fromkeys((*self.signature.reads, *optional, *(("answer",) if optional else ()))))

    @property
    def takes_text(self) -> bool:
        return (
            self.signature is not None or self.takes_all or str(RESPONSE) in inspect.signature(self.function).parameters
        )

    @property
    def lacks(self) -> tuple[str, ...]:
        """Ground truths that it requires, by their names in other libraries."""
        if self.signature is None:
            return ()
        named = tuple(p.name for p in self._columns if p.default is p.empty and p.name in ANSWERS)
        return named + (("ground_truth",) if self.signature.library == "verl" else ())

    @property
    def _open(self) -> list[inspect.Parameter]:
        """Parameters that are left to be given."""
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        fixed = self.function.keywords if isinstance(self.function, functools.partial) else {}
        parameters = inspect.signature(self.function).parameters.values()
        return [p for p in parameters if p.kind not in kinds and p.name not in fixed and p.name not in self.settings]

    @property
    def _columns(self) -> list[inspect.Parameter]:
        """Those that are columns."""
        given = (
            (str(RESPONSE),) if self.signature is None else (*self.signature.gives, *self.signature.missing, *_LOGGERS)
        )
        return [p for p in self._open if p.name not in given]

    # How it is called

    def arguments(self, samples: Samples) -> Mapping[str, Sequence[Any]]:
        """Parameter -> a value for each sample, for all that it takes of what there is."""
        fixed = self.function.keywords if isinstance(self.function, functools.partial) else {}
        columns = samples.rest if self.takes_all else {}
        columns = {name: values for name, values in columns.items() if name not in fixed and name not in self.settings}
        columns |= {p.name: samples[p.name] for p in self._columns if p.name in samples or p.default is p.empty}
        if self.signature is not None:
            taken = {p.name for p in self._open} | set(self.signature.by_position)
            given = self.signature.given(samples)
            return {**columns, **{n: v for n, v in given.items() if self.takes_all or n in taken}}
        if self.takes_all and RESPONSE_IDS in samples.rows:
            columns[str(RESPONSE_IDS)] = samples[str(RESPONSE_IDS)]
            columns |= {n: samples[n] for n in samples.rows.columns if n not in map(str, IDENTITY) and n not in fixed}
        return {**columns, str(RESPONSE): samples.responses} if self.takes_text else columns

    def call(self, arguments: Mapping[str, Any], log: Mapping[str, Callable[..., None]]) -> Any:
        """Call the function, with the arguments of one sample or of all; an asynchronous one returns what is to be awaited.

        Args:
            log: callbacks by name, for a function that takes them.
        """
        named = dict(arguments)
        by_position = self.signature.by_position if self.signature else ()
        if "args" in by_position:
            named["args"] = SimpleNamespace(**self.settings)
        else:
            named |= self.settings
        if self.signature is not None and self.signature.logs:
            taken = inspect.signature(self.function).parameters
            named |= {name: callback for name, callback in log.items() if self.takes_all or name in taken}
        positional = [named.pop(name) for name in by_position]
        return self.function(*positional, **named)


@dataclass(frozen=True)
class SampleScore:
    """The score that a function gives a sample."""

    value: float | None
    """None: it does not apply to the sample."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


def results(reward: Reward, result: Any, number: int) -> list[Any]:
    """The result of a call with a batch, sample by sample.

    Raises:
        SampleError: it is not a list of this length.
    """
    if isinstance(result, Mapping):  # of lists, as OpenRLHF returns them
        lists = {
            name: _listed(values, number) for name, values in {**result, **(result.get("extra_logs") or {})}.items()
        }
        kept = {name: values for name, values in lists.items() if values is not None}
        if kept:
            return [{name: values[k] for name, values in kept.items()} for k in range(number)]
    elif (listed := _listed(result, number)) is not None:
        return listed
    raise SampleError(
        f"reward function {name_of(reward.function)} returned {_shown(result)} for {number} samples; "
        "it returns a list with a reward for each"
    )


def score(reward: Reward, result: Any) -> SampleScore:
    """The result of a call with one sample.

    Raises:
        SampleError: it is no finite number, no None, and no dictionary of numbers.
    """
    if result is None:
        return SampleScore(None)
    if not isinstance(result, Mapping):
        return SampleScore(number_of(reward, result))
    parts = {str(name): value for name, each in result.items() if (value := _number(each)) is not None}
    total = reward.part or next((name for name in _TOTALS if name in result), "")
    if total and result.get(total) is None and total in result:
        return SampleScore(None, parts)
    if total and total not in parts:
        raise SampleError(
            f"reward function {name_of(reward.function)} returned {_shown(result)}; its {total!r} is no finite number"
        )
    if not parts:
        raise SampleError(
            f"reward function {name_of(reward.function)} returned {_shown(result)}; it has no finite number"
        )
    if total:
        return SampleScore(parts[total], {name: value for name, value in parts.items() if name != total})
    return SampleScore(sum(parts.values()), parts)


def number_of(reward: Reward, result: Any) -> float:
    value = _number(result)
    if value is None:
        raise SampleError(
            f"reward function {name_of(reward.function)} returned {_shown(result)}; a reward is a finite number that float32 can hold"
        )
    return value


def _number(value: object) -> float | None:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def _listed(values: Any, number: int) -> list[Any] | None:
    """A list, array or tensor of this length as a list; a single number counts for all samples."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, list | tuple):
        return list(values) if len(values) == number else None
    return [values] * number if isinstance(values, float) else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def name_of(function: Any) -> str:
    """A readable name: that of the function, of a partial's function, or of a callable object's class."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", type(inner).__name__)
