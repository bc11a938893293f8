"""Odd reward functions, on the main thread and on another: signals, exceptions, results,
wrappers."""

import asyncio
import functools
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.errors import Ended, ResultError, SampleError
from weft.workers.reward import RewardConfig, RewardWorker
from weft.workers.rewards.function import Reward


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>")
    ).save(str(folder / "tokenizer.json"))
    return folder


BATCH = Batch.of(sample_id=[7, 8, 9], response_ids=[[1], [2], [1]], answer=["one", "one", "one"])


def beside_the_main_thread(work: Callable[[], Any]) -> Any:
    """Run on another thread, as a rank does under Ray."""
    done: list[Any] = []

    def caught() -> None:
        try:
            done.append(work())
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def on_the_main_thread(work: Callable[[], Any]) -> Any:
    """Run on the main thread, as under Local.

    Browser tests in this process leave their event loop running on it, so hide the loop.
    """
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return work()
    finally:
        asyncio._set_running_loop(loop)


THREADS = pytest.mark.parametrize("run", [on_the_main_thread, beside_the_main_thread])


def shown(value: object) -> str:
    """Format a value for a test name, without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def rewards(function: Any, model: Path, **settings: Any) -> list[float]:
    worker = RewardWorker(RewardConfig(function=function, tokenizer=model, **settings))
    try:
        return [value for rows, _ in worker.score(BATCH) for value in rows["reward"].to_pylist()]
    finally:
        worker.close()


# Signals


def with_alarm(response: str) -> float:
    """A reward with a timeout, as math-verify sets it."""

    def late(number: int, frame: Any) -> None:
        raise ValueError("late")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    try:
        return float(response == "one")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def swallows(response: str) -> float:
    try:
        return with_alarm(response)
    except Exception:
        return 0.0


def interrupts_itself(response: str) -> float:
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(ValueError("late")))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        time.sleep(60)
    except ValueError:
        return 1.0
    return 0.0


def in_batches(response: list[str], answer: list[str]) -> list[float]:
    return [swallows(text) for text in response]


@THREADS
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (with_alarm, [1, 0, 1]),
        (swallows, [1, 0, 1]),
        (interrupts_itself, [1, 1, 1]),
        (Reward(function=in_batches, batch=True), [1, 0, 1]),
        ((swallows, Reward(function=interrupts_itself, weight=2.0)), [3, 2, 3]),
    ],
    ids=["alarm", "swallows", "itself", "batch", "two"],
)
def test_a_function_that_sets_signal_handlers_scores_alike_on_every_thread(
    function: Any, expected: list[float], run: Any, model: Path
) -> None:
    assert run(lambda: rewards(function, model)) == expected


@THREADS
def test_slime_samples_reach_a_function_that_sets_signal_handlers(run: Any, model: Path) -> None:
    def completed(args: Any, sample: Any) -> float:
        with_alarm(sample.response)
        return float(sample.status is sample.Status.COMPLETED)

    def all_completed(args: Any, samples: Any) -> list[float]:
        return [completed(args, sample) for sample in samples]

    for function in (completed, all_completed):
        assert run(lambda function=function: rewards(function, model)) == [1, 1, 1]


@THREADS
def test_math_verify_scores_alike_on_every_thread(run: Any, model: Path) -> None:
    math_verify = pytest.importorskip("math_verify")

    def accuracy(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [
            float(math_verify.verify(math_verify.parse(a), math_verify.parse(r"$\frac{2}{4}$")))
            for a in [r"$0.5$"] * len(answer)
        ]

    assert run(lambda: rewards(accuracy, model)) == [1, 1, 1]


@THREADS
def test_a_function_apart_keeps_its_state_logs_and_fails_as_it_would_here(run: Any, model: Path) -> None:
    seen: list[Any] = []

    def counts(completions: list[str], log_metric: Any) -> Any:
        seen.extend((with_alarm(text) and text) or text for text in completions)
        log_metric("seen", len(seen))
        if "two" in completions and len(completions) == 1:
            raise KeyError("two")
        if len(completions) > 1:
            raise LookupError("one by one")
        return np.array([1.0])

    worker = RewardWorker(RewardConfig(function=counts, tokenizer=model))
    parts: list[Any] = []
    with pytest.raises(KeyError) as caught:
        run(lambda: parts.extend(worker.score(BATCH)))
    worker.close()
    assert caught.value.sample_ids == (8,)  # pyright: ignore[reportAttributeAccessIssue]
    assert [id for rows, _ in parts for id in rows["sample_id"].to_pylist()] == [7, 9]


def test_an_asynchronous_function_with_signal_handlers_must_be_synchronous(model: Path) -> None:
    async def later(response: str) -> float:
        return swallows(response)

    with pytest.raises(RuntimeError, match="an asynchronous function cannot set a signal handler"):
        rewards(later, model)


@pytest.mark.thorough
def test_deadlines_hold_after_a_function_has_used_the_alarm(model: Path) -> None:
    def hangs(response: str) -> float:
        swallows(response)
        if response == "two":
            time.sleep(600)
        return 1.0

    before = signal.getsignal(signal.SIGALRM)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"hangs took longer than 3 s") as caught:
        rewards(hangs, model, deadline_s=3)  # waited out: the other samples return at once
    assert time.monotonic() - started < 300 and caught.value.sample_ids == (8,)  # pyright: ignore[reportAttributeAccessIssue]
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (
        0.0,
        0.0,
    )


def test_an_alarm_that_is_left_behind_rings_nowhere_else(model: Path) -> None:
    def leaves(response: str) -> float:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return 1.0

    before = signal.getsignal(signal.SIGALRM)
    assert rewards(leaves, model) == [1, 1, 1] and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_function_that_catches_its_deadline_has_failed(model: Path) -> None:
    def catches(response: str) -> float:
        try:
            time.sleep(600)
        except Exception:
            return 1.0
        return 0.0

    with pytest.raises(TimeoutError, match="catches took longer"):
        rewards(catches, model, deadline_s=0.05)  # waited out: it sleeps for ten minutes


# Exceptions of any kind


class Failed(BaseException):
    """A failure like pytest's own."""


@THREADS
@pytest.mark.parametrize("form", ["plain", "batch", "async", "async batch", "apart"])
@pytest.mark.parametrize(
    "error", [asyncio.CancelledError("x"), Failed("x"), SystemExit(3), GeneratorExit("x")], ids=shown
)
def test_any_exception_fails_its_own_sample(
    error: BaseException, form: str, run: Any, model: Path
) -> None:
    def plain(response: str) -> float:
        if form == "apart":
            with_alarm(response)
        if response == "two":
            raise error
        return 1.0

    def batch(completions: list[str], **columns: Any) -> list[float]:
        return [plain(text) for text in completions]

    async def later(response: str) -> float:
        return plain(response)

    async def later_batch(completions: list[str], **columns: Any) -> list[float]:
        return batch(completions)

    function: Any = {"batch": batch, "async": later, "async batch": later_batch}.get(form, plain)
    worker = RewardWorker(RewardConfig(function=function, tokenizer=model))
    parts: list[Any] = []
    with pytest.raises(RuntimeError, match=f"it (ended with|raised) {type(error).__name__}") as caught:
        run(lambda: parts.extend(worker.score(BATCH)))
    worker.close()
    failed = (7, 8, 9) if form == "async batch" else (8,)
    assert caught.value.sample_ids == failed  # pyright: ignore[reportAttributeAccessIssue]
    assert [id for rows, _ in parts for id in rows["sample_id"].to_pylist()] == [
        id for id in (7, 8, 9) if id not in failed
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Ended(143)])
def test_ctrl_c_and_the_end_of_the_process_stop_the_run(error: BaseException, model: Path) -> None:
    def interrupted(response: str) -> float:
        raise error

    with pytest.raises(type(error)):
        rewards(interrupted, model)


# Results


class Scalar:
    """A zero-dimensional tensor."""

    def tolist(self) -> float:
        return 1.0

    def __float__(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    "result",
    [
        1.0,
        1,
        True,
        np.float32(1.0),
        np.array(1.0),
        Scalar(),
        [1.0],
        [1.0] * 4,
        (x for x in [1.0, 1.0, 1.0]),
        {1.0, 2.0, 3.0},
        {0: 1.0, 1: 1.0, 2: 1.0},
        {"rewards": 1.0},
        {"rewards": [1.0, 1.0, 1.0], "scores": [1.0]},
        {"right": [1.0, 1.0, 1.0], "form": 0.5},
        {"rewards": [1.0, 1.0, 1.0], "extra_logs": {"length": [1.0, 2.0]}},
        None,
        "abc",
        b"abc",
        {},
    ],
    ids=shown,
)
@pytest.mark.parametrize("form", ["ours", "TRL", "async"])
def test_a_batch_function_returns_a_result_for_each_sample(result: Any, form: str, model: Path) -> None:
    def ours(response: list[str]) -> Any:
        return result

    def trl(completions: list[str], **columns: Any) -> Any:
        return result

    async def later(completions: list[str], **columns: Any) -> Any:
        return result

    function = {"ours": Reward(function=ours, batch=True), "TRL": trl, "async": later}[form]
    with pytest.raises(
        ResultError,
        match=r"reward function .*(ours|trl|later) returned .* for 3 samples; it must return a list with",
    ):
        rewards(function, model)


@pytest.mark.parametrize(
    "result",
    [
        [1.0, 2, True],
        (1.0, 2.0, 1.0),
        np.array([1.0, 2.0, 1.0]),
        [{"right": 1.0}, {"right": 2.0}, {"right": 1.0}],
        {"rewards": np.array([1.0, 2.0, 1.0]), "extra_logs": {"length": 3.0, "why": "text"}},
        {"right": [1.0, 1.0, 0.5], "form": [0.0, 1.0, 0.5]},
    ],
    ids=shown,
)
def test_lists_arrays_and_dictionaries_of_lists_are_rewards_of_a_batch(result: Any, model: Path) -> None:
    assert rewards(lambda completions, **columns: result, model) == [1, 2, 1]


@pytest.mark.parametrize(
    "odd", [math.nan, math.inf, -math.inf, np.float32("nan"), 1e39, 10**400], ids=shown
)
@pytest.mark.parametrize("key", ["right", "reward"])
def test_a_part_that_is_not_finite_fails_the_sample(odd: Any, key: str, model: Path) -> None:
    def parts(response: str) -> dict[str, Any]:
        return {key: 1.0, "form": odd if response == "two" else 0.1}

    with pytest.raises(SampleError, match="its 'form' is not a finite number") as caught:
        rewards(parts, model)
    assert caught.value.sample_ids == (8,) and not isinstance(caught.value, ResultError)


def test_a_sum_that_is_not_finite_fails_the_sample(model: Path) -> None:
    for function in (
        lambda response: {"a": 3e38, "b": 3e38},
        (Reward(function=lambda response: 3e38, weight=10.0),),
    ):
        with pytest.raises(SampleError, match="float32"):
            rewards(function, model)


@pytest.mark.parametrize(
    "result",
    [
        [0.5],
        (0.5,),
        "0.5",
        {"right": [1.0]},
        {"right": "1.0", "form": 0.1},
        {"reward": "x"},
        {1},
        object,
        {},
    ],
    ids=shown,
)
def test_a_result_that_is_not_a_reward_ends_the_run_at_the_first_sample(
    result: Any, model: Path
) -> None:
    tried: list[str] = []

    def odd(response: str) -> Any:
        tried.append(response)
        return result

    with pytest.raises(ResultError, match=r"reward function .*odd returned .*number") as caught:
        rewards(odd, model)
    assert tried == ["one"] and "response 'one'" in getattr(caught.value, "sample", "")


# Wrappers


async def inner(response: str, answer: str) -> float:
    return float(response == answer)


def plainly(response: str, answer: str) -> float:
    return float(response == answer)


@functools.wraps(inner)
def runs_it(*arguments: Any, **columns: Any) -> float:
    return asyncio.run(inner(*arguments, **columns))


@functools.wraps(inner)
def hands_it_on(*arguments: Any, **columns: Any) -> Any:
    return inner(*arguments, **columns)


@functools.wraps(plainly)
async def asynchronously(*arguments: Any, **columns: Any) -> float:
    return plainly(*arguments, **columns)


@functools.wraps(inner)
def adapted(completions: list[str], answer: list[str]) -> list[float]:
    return [plainly(c, a) for c, a in zip(completions, answer, strict=True)]


class Callable1:
    async def __call__(self, response: str, answer: str) -> float:
        return plainly(response, answer)


class Callable2:
    """A decorator implemented as a class."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        return asyncio.run(self.function(*arguments, **columns))


class Callable3:
    @functools.wraps(plainly)
    def method(self, *arguments: Any, **columns: Any) -> float:
        return plainly(*arguments, **columns)

    @functools.wraps(inner)
    async def __call__(self, response: str, answer: str) -> float:
        return plainly(response, answer)


@THREADS
@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        (runs_it, False),
        (hands_it_on, False),
        (asynchronously, True),
        (adapted, False),
        (inner, True),
        (Callable1(), True),
        (functools.partial(Callable1()), True),
        (functools.partial(inner, answer="one"), True),
        (functools.partial(hands_it_on, answer="one"), False),
        (functools.partial(functools.partial(runs_it), answer="one"), False),
        (Callable2(inner), False),
        (Callable3().__call__, True),
        (Callable3(), True),
        (functools.lru_cache(plainly), False),
        (lambda response, answer: inner(response, answer), False),
    ],
)
def test_a_wrapped_function_is_called_as_its_outermost_callable_is(
    function: Any, is_async: bool, run: Any, model: Path
) -> None:
    assert Reward(function=function).is_async is is_async
    assert run(lambda: rewards(function, model)) == [1, 0, 1]
