"""The order of a replica's responses: the longest expected ones first, whatever the time."""

import random

import numpy as np
import pytest

from weft.workers.generation.longest_first import HandOver, LongestFirst


def test_prompts_without_a_forecast_start_one_response_each_and_then_the_longest_goes_on():
    queue = LongestFirst([["a0", "a1"], ["b0", "b1"], ["c0"]], np.array([np.nan, 300.0, np.nan]))
    assert [queue.take(0) for _ in range(3)] == ["a0", "c0", "b0"]
    queue.finish("c0", tokens=900)
    queue.finish("a0", tokens=200)
    assert [queue.take(900), queue.take(900)] == ["b1", "a1"] and not queue


def test_a_running_response_counts_with_twice_its_tokens():
    queue = LongestFirst([["a0", "a1"], ["b0", "b1"]], np.array([100.0, 90.0]))
    assert queue.take(0) == "a0"
    assert queue.take(30) == "a1", "60 tokens are less than expected"
    queue = LongestFirst([["b0", "b1"], ["a0", "a1"]], np.array([90.0, 100.0]))
    assert queue.take(0) == "a0" and queue.take(0) == "a1" and queue.take(0) == "b0"
    queue = LongestFirst([["a0", "a1"], ["b0", "b1"]])
    assert [queue.take(0), queue.take(10)] == ["a0", "b0"], "neither is known"
    assert queue.take(20) == "a1", "it has run for longer"


def test_the_requests_that_would_start_next_are_given_up_before_running_ones():
    queue = LongestFirst([["a0", "a1", "a2"], ["b0", "b1", "b2"]], np.array([100.0, 200.0]))
    assert [queue.take(0), queue.take(0)] == ["b0", "b1"]
    assert queue.to_give(10, HandOver()) == ["b2", "a0", "a1"], "half of six"
    assert queue.to_give(10, HandOver(parts=3)) == ["b2", "a0", "a1", "a2"], "two thirds"
    assert len(queue) == 4, "the caller drops them"


def test_running_requests_stay_and_go_by_turns_from_the_longest():
    queue = LongestFirst([["a"], ["b"], ["c"], ["d"], ["e"]], np.array([500.0, 400, 300, 200, 100]))
    for _ in range(5):
        queue.take(0)
    assert queue.to_give(10, HandOver()) == ["b", "d"]
    assert queue.to_give(10, HandOver(parts=3)) == ["b", "c", "e"]
    assert queue.to_give(10, HandOver(parts=3, min_tokens=150)) == ["b", "c"]
    queue.drop(lambda request: request != "a")
    assert queue.to_give(10, HandOver()) == [], "the last one stays"


def test_a_running_request_is_expected_to_run_as_long_again_if_nothing_else_is_known():
    queue = LongestFirst([["a0", "a1"]], begun={"a1": 90})
    for _ in range(2):
        queue.take(0)
    assert queue.to_give(20, HandOver(min_tokens=100)) == []
    assert queue.to_give(30, HandOver(min_tokens=30)) == ["a0"], "120 tokens more of a1, which stays"


def test_requests_of_one_prompt_keep_their_order():
    queue = LongestFirst([range(100)])
    assert [queue.take(step) for step in range(100)] == list(range(100))


def expected(forecast: float, finished: list[int], ages: list[int]) -> float:
    """Return the expectation of one prompt from its definition."""
    known = finished + ([] if np.isnan(forecast) else [forecast])
    mean = sum(known) / max(1, len(known))
    running = max(len(ages) * mean, 2 * sum(ages))
    return (sum(known) + running) / max(1, len(known) + len(ages))


@pytest.mark.parametrize("seed", range(20))
def test_random_plays_start_each_request_once_in_the_order_of_the_definition(seed: int):
    chance = random.Random(seed)
    number = chance.randint(2, 6)
    forecast = [chance.choice([float("nan"), 50.0, 200.0]) for _ in range(number)]
    left = [[(p, i) for i in range(chance.randint(0, 5))] for p in range(number)]
    queue = LongestFirst([list(own) for own in left], np.array(forecast))
    finished: list[list[int]] = [[] for _ in range(number)]
    running: dict[tuple[int, int], int] = {}
    step = 0
    while queue or running:
        step += chance.randint(0, 100)
        if queue and chance.random() < 0.6:
            ages = [[step - s for r, s in running.items() if r[0] == p] for p in range(number)]
            waiting = [p for p in range(number) if left[p]]
            new = [p for p in waiting if np.isnan(forecast[p]) and not finished[p] and not ages[p]]
            best = max(waiting, key=lambda p: (expected(forecast[p], finished[p], ages[p]), -p))
            wanted = left[new[0] if new else best].pop(0)
            assert queue.take(step) == wanted
            running[wanted] = step
        elif running:
            request = chance.choice(sorted(running))
            tokens = step - running.pop(request) + 1
            if chance.random() < 0.2:
                queue.drop(lambda other, request=request: other == request)
            else:
                queue.finish(request, tokens)
                finished[request[0]].append(tokens)
        elif chance.random() < 0.2:
            gone = chance.randrange(number)
            queue.drop(lambda other, gone=gone: other[0] == gone)
            left[gone] = []
        assert len(queue) == sum(map(len, left))
