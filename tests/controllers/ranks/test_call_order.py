"""The order of calls on a rank, by hand and against a model: the longest-waiting runnable call is
next."""

import random
from dataclasses import dataclass

import pytest

from weft.controllers.ranks.executor import CallOrder


@dataclass(eq=False)
class Call:
    number: int
    interruptible: bool


def exclusive(number: int) -> Call:
    return Call(number, interruptible=False)


def interruptible(number: int) -> Call:
    return Call(number, interruptible=True)


def numbers_of(order: CallOrder[Call], steps: int) -> list[int]:
    """Return the call numbers of the next steps; exclusive calls take one step."""
    numbers = []
    for _ in range(steps):
        call = order.next
        assert call is not None
        numbers.append(call.number)
        (order.give_way if call.interruptible else order.finish)(call)
    return numbers


def test_interruptible_calls_go_round_and_an_exclusive_one_waits_for_a_step_alone():
    order: CallOrder[Call] = CallOrder()
    for number in (1, 2, 3):
        assert order.add(interruptible(number))
    assert numbers_of(order, 4) == [1, 2, 3, 1]
    order.add(exclusive(4))
    order.add(exclusive(5))
    order.add(interruptible(6))
    assert numbers_of(order, 7) == [4, 5, 2, 3, 1, 6, 2]


def test_an_exclusive_call_that_has_more_to_say_keeps_its_place():
    order: CallOrder[Call] = CallOrder()
    first = exclusive(1)
    order.add(first)
    order.add(exclusive(2))
    order.give_way(first)
    assert order.next is first


def test_a_call_that_is_cancelled_before_it_comes_is_over_when_it_does():
    order: CallOrder[Call] = CallOrder()
    assert order.cancel(7) is None
    assert not order.add(interruptible(7)) and order.next is None
    assert order.add(interruptible(7)), "it was cancelled once"


@pytest.mark.parametrize("seed", range(100))
def test_random_histories_agree_with_a_model(seed: int):
    chance = random.Random(seed)
    order: CallOrder[Call] = CallOrder()
    waiting: dict[Call, int] = {}  # call -> time of its arrival, or of its last turn
    cancelled: set[int] = set()
    for time in range(200):
        ready = sorted(waiting, key=lambda c: (c.interruptible, waiting[c]))
        assert order.next is (ready[0] if ready else None) and len(order) == len(ready)
        verb = chance.choice(["add", "cancel", "step", "step"])
        if verb == "add":
            call = (
                Call(time, chance.random() < 0.6)
                if chance.random() < 0.8
                else Call(time + 5, interruptible=True)
            )
            if any(call.number == c.number for c in waiting):
                continue
            assert order.add(call) == (call.number not in cancelled)
            if call.number in cancelled:
                cancelled.discard(call.number)
            else:
                waiting[call] = time
        elif verb == "cancel":
            number = chance.choice([c.number for c in waiting] + [time + 3])
            call = next((c for c in waiting if c.number == number), None)
            assert order.cancel(number) is call
            if call is None:
                cancelled.add(number)
            else:
                del waiting[call]
        elif ready and chance.random() < 0.4:
            order.finish(ready[0])
            del waiting[ready[0]]
        elif ready:
            order.give_way(ready[0])
            waiting[ready[0]] = time if ready[0].interruptible else waiting[ready[0]]
