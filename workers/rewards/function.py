"""Reward: a reward function with a name and weight, called according to its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import pydantic

from ...dataflow.column import IDENTITY, PROMPT, PROMPT_IDS, RESPONSE, RESPONSE_IDS
from ...dataflow.config import Config
from ...dataflow.errors import nearest
from ...dataflow.operation import ALL_COLUMNS
from .signature import ANSWERS, RewardRows, Signature, find_signature


class Reward(Config):
    """A reward function with options. `RewardWorker(function=...)` also takes plain functions."""

    function: Callable[..., Any]
    """Required. Set it to the reward function or a grader. `functools.partial` binds further
    arguments, such as verl's `reward_kwargs` or slime's `args`. From the parameter names, Weft
    infers whether the function was written for Weft, TRL, verl, OpenRLHF, slime or verifiers 0.1 to
    0.3 (`signature.py`)."""
    name: str = ""
    """Name of the metric and column; empty selects the function's name. Set it if two functions
    have the same name."""
    weight: float = pydantic.Field(default=1.0, allow_inf_nan=False)
    """[factor] Weight of the result in the total reward; 0 only measures it. Set it if one reward
    matters more than another."""
    batch: bool = False
    """Call the function once per batch, with a list for each argument; it returns a list. Weft
    ignores this for functions with another library's signature. Set it for a function that is
    faster in batches."""
    part: str = ""
    """Key of the reward in a dictionary that the function returns; empty selects "reward" or
    "score", or else the sum of all values. Set it if the reward has another key."""
    concurrency: int = pydantic.Field(default=64, ge=1, le=100_000)
    """[calls] Maximum number of asynchronous calls in flight per rank. Lower it if a service
    rejects calls; raise it if the service is idle."""
    retries: int = pydantic.Field(default=0, ge=0)
    """[calls] Number of retries for an asynchronous call that raises. The first retry waits 0.5 s;
    each later one waits twice as long as the one before. Raise it for an unreliable service."""
    per_second: float | None = pydantic.Field(default=None, gt=0)
    """[calls/s] Rate limit for asynchronous calls per rank; None disables it. Set it to a service's
    limit, divided by the number of ranks."""

    retired: ClassVar[Mapping[str, str]] = {
        "pause_s": "the first retry comes after half a second",
        "settings": "fix arguments with functools.partial(function, name=value), and slime's with args=types.SimpleNamespace(...)",
    }

    @pydantic.model_validator(mode="after")
    def _can_be_called(self) -> Reward:
        takes = f"{name_of(self.function)}{self._takes}"
        parameters = self._takes.parameters.values()
        names = [p.name for p in parameters]
        if self.signature is not None:
            missing = self.signature.missing
            asked = [p.name for p in self._open if p.name in missing and p.default is p.empty]
            if asked:
                raise ValueError(
                    f"reward function {takes} takes {asked[0]!r}, which only {self.signature.library}'s own trainer has"
                )
            return self
        if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
            raise ValueError(f"reward function {takes} must name its parameters: each is a column")
        if not self.takes_all and not {str(RESPONSE), str(RESPONSE_IDS)} & set(names):
            close = [n for n in names if nearest(n, ["response", "responses"])]
            hint = f"; did you mean 'response' for {close[0]!r}?" if close else ""
            raise ValueError(
                f"reward function {takes} takes neither 'response' nor 'response_ids'{hint}; "
                "docs/rewards.md shows the signatures that are known"
            )
        return self

    @cached_property
    def signature(self) -> Signature | None:
        """The signature, if another library defines it; otherwise None."""
        return find_signature(list(self._takes.parameters))

    @cached_property
    def _takes(self) -> inspect.Signature:
        return signature_of(self.function)

    @property
    def title(self) -> str:
        return self.name or name_of(self.function).rpartition(".")[2].strip("<>") or "reward"

    @property
    def is_batch(self) -> bool:
        return self.signature.batch if self.signature else self.batch

    @cached_property
    def is_async(self) -> bool:
        """Whether a call returns an awaitable. This depends on the callable itself, not on a
        function that it wraps."""
        own = self.function
        while isinstance(own, functools.partial):
            own = own.func
        if inspect.iscoroutinefunction(own):
            return True
        if inspect.isroutine(own) or isinstance(own, type):
            return False
        return inspect.iscoroutinefunction(type(own).__call__)  # pyright: ignore[reportFunctionMemberAccess]

    @property
    def may_return_parts(self) -> bool:
        """Whether the function may return a dictionary, according to its library or annotation."""
        returns = str(self._takes.return_annotation).lower()
        annotated = bool(self.part) or "dict" in returns or "mapping" in returns
        return annotated or (self.signature is not None and self.signature.returns_parts)

    @property
    def place(self) -> str:
        """File and line where the function is defined, or ""."""
        # The innermost function of a partial, a decorated function or a callable object.
        own = self.function
        inner: Any = inspect.unwrap(own.func if isinstance(own, functools.partial) else own)
        code = getattr(inner if inspect.isroutine(inner) else type(inner).__call__, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else ""

    # Columns

    @property
    def takes_all(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self._takes.parameters.values())

    @property
    def needs(self) -> tuple[str, ...]:
        needed = (p.name for p in self._columns if p.default is p.empty)
        return tuple(name for name in needed if self.signature is None or name not in ANSWERS)

    @property
    def may_read(self) -> tuple[str, ...]:
        if self.takes_all:
            return (ALL_COLUMNS,)
        optional = tuple(p.name for p in self._columns if p.name not in self.needs)
        if self.signature is None:
            return optional
        answer = ("answer",) if optional else ()
        return tuple(dict.fromkeys((*self.signature.reads, *optional, *answer)))

    @property
    def takes_text(self) -> bool:
        return self.signature is not None or self.takes_all or str(RESPONSE) in self._takes.parameters

    @property
    def lacks(self) -> tuple[str, ...]:
        """Required ground truths, under other libraries' names."""
        if self.signature is None:
            return ()
        named = tuple(p.name for p in self._columns if p.default is p.empty and p.name in ANSWERS)
        return named + (("ground_truth",) if self.signature.library == "verl" else ())

    @property
    def answers(self) -> tuple[str, ...]:
        """Required ground truths whose parameter types exclude None."""
        needed = [p for p in self._open if p.default is p.empty and not _takes_none(p.annotation)]
        # verl's batch functions have plural names, such as `ground_truths`.
        names = (p.name.removesuffix("s") for p in needed)
        return tuple(name for name in names if name in ANSWERS)

    @property
    def _open(self) -> list[inspect.Parameter]:
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = self._takes.parameters.values()
        return [p for p in parameters if p.kind not in several and p.name not in self._fixed]

    @cached_property
    def _fixed(self) -> set[str]:
        return {*self.function.keywords} if isinstance(self.function, functools.partial) else set()

    @property
    def _columns(self) -> list[inspect.Parameter]:
        given = (str(RESPONSE),)
        if self.signature is not None:  # the last two are callbacks of TRL
            given = (*self.signature.gives, *self.signature.missing, "log_extra", "log_metric")
        return [p for p in self._open if p.name not in given]

    # Calls

    def arguments(self, samples: RewardRows) -> Mapping[str, Sequence[Any]]:
        """Map each parameter to one value per sample, from the columns that exist."""
        fixed, rest = self._fixed, samples.rest if self.takes_all else {}
        columns = {name: values for name, values in rest.items() if name not in fixed}
        wanted = [p.name for p in self._columns if p.name in samples or p.default is p.empty]
        columns |= {name: samples[name] for name in wanted}
        if self.signature is None and str(PROMPT) not in columns and PROMPT_IDS in samples.rows:
            # A source may have only token ids.
            columns |= {p.name: samples.prompts for p in self._columns if p.name == str(PROMPT)}
        if self.signature is not None:
            taken = {p.name for p in self._open} | (
                {*self.signature.gives} if self.signature.positional else set()
            )
            given = self.signature.given(samples)
            return {**columns, **{n: v for n, v in given.items() if self.takes_all or n in taken}}
        if self.takes_all and RESPONSE_IDS in samples.rows:
            columns[str(RESPONSE_IDS)] = samples[str(RESPONSE_IDS)]
            ignored = {*map(str, IDENTITY), *fixed}
            columns |= {n: samples[n] for n in samples.rows.columns if n not in ignored}
        return {**columns, str(RESPONSE): samples.responses} if self.takes_text else columns

    def call_function(self, arguments: Mapping[str, Any], log: Mapping[str, Callable[..., None]]) -> Any:
        """Call the function with the arguments of one sample or of all, and with the callbacks in
        `log` that it takes. An asynchronous function returns an awaitable."""
        named = dict(arguments)
        by_position = self.signature.gives if self.signature and self.signature.positional else ()
        if "args" in by_position and "args" in self._fixed:
            by_position = ()  # parameters after a fixed one must be passed by name
        elif "args" in by_position:
            named["args"] = SimpleNamespace()
        if self.signature is not None and self.signature.logs:
            taken = self._takes.parameters
            named |= {
                name: callback for name, callback in log.items() if self.takes_all or name in taken
            }
        positional = [named.pop(name) for name in by_position]
        return self.function(*positional, **named)


def _takes_none(annotation: Any) -> bool:
    """Return whether a parameter accepts None, as one without a type does."""
    said = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return annotation is inspect.Parameter.empty or any(
        word in said for word in ("None", "Optional", "Any", "object")
    )


def as_failure(error: BaseException) -> Exception:
    """Turn any exception of a reward function into one that fails only its sample.

    >>> as_failure(SystemExit(3)), as_failure(GeneratorExit("gone"))
    (RuntimeError('it ended with SystemExit(3)'), RuntimeError("it raised GeneratorExit('gone')"))
    """
    if isinstance(error, Exception):
        return error
    what = "ended with" if isinstance(error, SystemExit) else "raised"
    return RuntimeError(f"it {what} {type(error).__name__}({', '.join(map(repr, error.args))})")


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return a callable's signature, or the wrapped one if it takes only `*args` and `**kwargs`.

    >>> def inner(response: str, answer: str) -> float: ...
    >>> @functools.wraps(inner)
    ... def handing_on(*args, **kwargs): return inner(*args, **kwargs)
    >>> @functools.wraps(inner)
    ... def adapting(completions, **kwargs): ...
    >>> list(signature_of(handing_on).parameters), list(signature_of(adapting).parameters)
    (['response', 'answer'], ['completions', 'kwargs'])
    """
    if isinstance(function, functools.partial):

        def stands_for(*_: Any, **__: Any) -> None: ...

        # `inspect` removes the arguments that the partial fixes.
        stands_for.__signature__ = signature_of(function.func)  # pyright: ignore[reportFunctionMemberAccess]
        return inspect.signature(functools.partial(stands_for, *function.args, **function.keywords))
    if inspect.ismethod(function):
        own = signature_of(function.__func__)
        first = next(iter(own.parameters.values()), None)
        if first is None or first.kind is first.VAR_POSITIONAL:
            return own
        return own.replace(parameters=list(own.parameters.values())[1:])
    if inspect.isroutine(function) or isinstance(function, type) or hasattr(function, "__signature__"):
        try:
            own = inspect.signature(function, follow_wrapped=False)
        except ValueError:  # a C wrapper, such as a cache, has no signature
            if not hasattr(function, "__wrapped__"):
                raise
            return signature_of(function.__wrapped__)  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    else:
        own = signature_of(function.__call__)
    wrapped = getattr(function, "__wrapped__", None)
    kinds = {parameter.kind for parameter in own.parameters.values()}
    several = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    hands_on = inspect.Parameter.VAR_KEYWORD in kinds <= several
    return signature_of(wrapped) if hands_on and callable(wrapped) else own


def name_of(function: Any) -> str:
    """Return a readable name: of a function, a partial's function, or a callable object's class."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", type(inner).__name__)
