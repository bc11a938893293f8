"""How calls take turns, by hand and against a model: of the calls that may go first, the one goes that has waited longest."""

import random
from dataclasses import dataclass

import pytest

from weft.controllers.turns import KEEPALIVE_S, Turns


@dataclass(eq=False)
class Call:
    number: int
    interruptible: bool


def exclusive(number: int) -> Call:
    return Call(number, interruptible=False)


def interruptible(number: int) -> Call:
    return Call(number, interruptible=True)


def order(turns: Turns[Call], steps: int) -> list[int]:
    """Numbers of the calls that make the next steps; exclusive ones are over after one."""
    numbers = []
    for _ in range(steps):
        call = turns.next
        assert call is not None
        numbers.append(call.number)
        (turns.give_way if call.interruptible else turns.finish)(call)
    return numbers


def test_interruptible_calls_go_round_and_an_exclusive_one_waits_for_a_step_alone():
    turns: Turns[Call] = Turns()
    for number in (1, 2, 3):
        assert turns.add(interruptible(number))
    assert order(turns, 4) == [1, 2, 3, 1]
    turns.add(exclusive(4))
    turns.add(exclusive(5))
    turns.add(interruptible(6))
    assert order(turns, 7) == [4, 5, 2, 3, 1, 6, 2]


def test_an_exclusive_call_that_has_more_to_say_keeps_its_place():
    turns: Turns[Call] = Turns()
    first = exclusive(1)
    turns.add(first)
    turns.add(exclusive(2))
    turns.give_way(first)
    assert turns.next is first


def test_a_call_that_is_cancelled_before_it_comes_is_over_when_it_does():
    turns: Turns[Call] = Turns()
    assert turns.cancel(7) is None
    assert not turns.add(interruptible(7)) and turns.next is None
    assert turns.add(interruptible(7)), "it was cancelled once"


def test_silence_is_counted_from_what_was_said_last():
    turns: Turns[Call] = Turns(now_s=100.0)
    assert not turns.is_silent(100.0 + KEEPALIVE_S) and turns.is_silent(100.1 + KEEPALIVE_S)
    turns.spoke(101.0)
    assert not turns.is_silent(100.1 + KEEPALIVE_S)


@pytest.mark.parametrize("seed", range(100))
def test_random_histories_go_as_a_model_says(seed: int):
    chance = random.Random(seed)
    turns: Turns[Call] = Turns()
    waiting: dict[Call, int] = {}  # call -> when it came, or gave way last
    cancelled: set[int] = set()
    for time in range(200):
        ready = sorted(waiting, key=lambda c: (c.interruptible, waiting[c]))
        assert turns.next is (ready[0] if ready else None) and len(turns) == len(ready)
        verb = chance.choice(["add", "cancel", "step", "step"])
        if verb == "add":
            call = Call(time, chance.random() < 0.6) if chance.random() < 0.8 else Call(time + 5, interruptible=True)
            if any(call.number == c.number for c in waiting):
                continue
            assert turns.add(call) == (call.number not in cancelled)
            if call.number in cancelled:
                cancelled.discard(call.number)
            else:
                waiting[call] = time
        elif verb == "cancel":
            number = chance.choice([c.number for c in waiting] + [time + 3])
            call = next((c for c in waiting if c.number == number), None)
            assert turns.cancel(number) is call
            if call is None:
                cancelled.add(number)
            else:
                del waiting[call]
        elif ready and chance.random() < 0.4:
            turns.finish(ready[0])
            del waiting[ready[0]]
        elif ready:
            turns.give_way(ready[0])
            waiting[ready[0]] = time if ready[0].interruptible else waiting[ready[0]]
