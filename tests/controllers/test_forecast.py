"""Forecasts of response lengths: from the latest epoch, or else from the prompt's length."""

import random

import numpy as np
import pytest

from weft.controllers.forecast import LengthForecast, Rounds


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_nothing_is_expected_before_the_first_response():
    forecast = LengthForecast(3).expect(array(0, 2), array(5, 6))
    assert forecast.is_empty and not forecast.observed.any() and np.isnan(forecast.of_observed).all()


def test_a_row_has_the_mean_of_the_latest_epoch():
    forecast = LengthForecast(3)
    forecast.observe(1, array(0, 0, 2, 2), array(5, 5, 6, 6), array(200, 200, 70, 90))
    forecast.observe(2, array(2), array(6), array(15))
    forecast.observe(2, array(2), array(6), array(15))
    found = forecast.expect(array(2, 1, 0), array(6, 5, 5))
    assert found.tokens[[0, 2]].tolist() == [15, 200], "responses to one prompt are equally long"
    assert found.observed.tolist() == [True, False, True]
    assert np.isnan(found.of_observed).tolist() == [False, True, False]


def test_the_mean_counts_as_far_as_the_responses_to_a_prompt_resemble_each_other():
    chance = np.random.default_rng(0)
    for of_prompt, own in ((0.0, 30.0), (20.0, 30.0), (60.0, 10.0)):
        number, n = 4000, 4
        prompts = 300 + of_prompt * chance.standard_normal(number)
        lengths = np.rint(prompts[:, None] + own * chance.standard_normal((number, n))).astype(np.int64)
        forecast, rows = LengthForecast(number), np.arange(number)
        forecast.observe(1, np.repeat(rows, n), np.full(number * n, 7), lengths.ravel())
        found = forecast.expect(rows, np.full(number, 7)).tokens
        weight = of_prompt**2 / (of_prompt**2 + own**2 / n)
        best = 300 + weight * (lengths.mean(1) - 300)
        assert found == pytest.approx(best, abs=4)
        assert np.std(found - prompts) < np.std(lengths.mean(1) - prompts) + 0.1


def test_other_rows_have_the_length_that_a_line_through_all_responses_predicts():
    chance = np.random.default_rng(0)
    prompts = chance.integers(1, 500, 400)
    lengths = np.rint(80 + 3 * prompts + chance.normal(0, 50, 400)).astype(np.int64).clip(1)
    forecast = LengthForecast(1000)
    for part in np.split(np.arange(400), 8):
        forecast.observe(int(part[0]), part, prompts[part], lengths[part])
    slope, begin = np.polyfit(prompts, lengths, 1)
    asked = array(20, 250, 499)
    found = forecast.expect(array(700, 800, 900), asked).tokens
    assert found == pytest.approx(begin + slope * asked, rel=0.01)
    largest = forecast.expect(array(700), array(10**6)).tokens
    assert largest == [lengths.max()], "it does not extrapolate beyond the longest response"


def test_a_slope_that_chance_explains_does_not_count():
    chance = np.random.default_rng(1)
    spreads: list[float] = []
    for _ in range(20):
        forecast = LengthForecast(99)
        rows, prompts = np.arange(64), chance.integers(1, 500, 64)
        forecast.observe(1, rows, prompts, np.rint(chance.lognormal(5, 1, 64)).astype(np.int64))
        unseen = forecast.expect(np.arange(64, 99), prompts[:35]).tokens
        spreads.append(float(np.ptp(unseen)))
    assert np.median(spreads) == 0


def test_prompts_of_equal_length_have_the_mean():
    forecast = LengthForecast(9)
    forecast.observe(1, array(0, 1, 2), array(7, 7, 7), array(10, 20, 60))
    assert forecast.expect(array(5), array(100)).tokens.tolist() == [30]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_arrival_does_not_matter(seed: int):
    chance = random.Random(seed)
    rows = [(chance.randrange(6), chance.randrange(50), chance.randrange(10**9)) for _ in range(60)]
    found: list[list[float]] = []
    for _ in range(2):
        chance.shuffle(rows)
        forecast = LengthForecast(9)
        for k in range(0, 60, cut := chance.randint(1, 20)):
            forecast.observe(3, *(array(*column) for column in zip(*rows[k : k + cut], strict=True)))
        found.append(forecast.expect(np.arange(9), np.arange(9)).tokens.tolist())
    assert found[0] == found[1]


def test_a_restored_forecast_goes_on_as_before():
    first, second, other = LengthForecast(5), LengthForecast(5), LengthForecast(4)
    first.observe(1, array(0, 3), array(4, 9), array(70, 10**12))
    second.restore(first.state)
    for forecast in (first, second):
        forecast.observe(1, array(3), array(9), array(30))
    rows, tokens = np.arange(5), array(1, 2, 3, 4, 5)
    assert second.expect(rows, tokens).tokens.tolist() == first.expect(rows, tokens).tokens.tolist()
    other.restore(first.state)
    assert other.expect(array(0), array(4)).is_empty, "the source has other rows"


def test_rounds_sort_the_prompts_of_several_steps_and_return_each_once():
    lengths = np.array([5, 1, 9, 3, 2, 8, 7, 7])
    rounds = Rounds(iter(range(8)), 4, lambda rows: lengths[rows])
    assert [next(rounds) for _ in range(3)] == [1, 3, 0] and list(rounds.pending) == [2]
    again = Rounds(iter(range(4, 8)), 4, lambda rows: lengths[rows], pending=rounds.pending)
    assert list(again) == [2, 4, 6, 7, 5]


def test_a_prompt_that_comes_again_ends_a_round():
    rounds = Rounds(iter([2, 0, 1, 2, 0, 1]), 5, lambda rows: -rows)
    assert list(rounds) == [2, 1, 0, 2, 1, 0]


def test_rounds_keep_the_order_if_nothing_is_expected():
    for size, known in ((5, np.nan), (1, 1.0)):
        expect = lambda rows, known=known: known * -rows  # noqa: E731
        assert list(Rounds(iter(range(12)), size, expect)) == list(range(12))
