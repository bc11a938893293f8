"""Signals that come while nobody can be interrupted are heeded afterwards."""

import signal

import pytest

from weft.controllers.signals import signals_deferred


class Ended(Exception):
    """What the handler of a test raises."""


@pytest.fixture(autouse=True)
def handlers():
    def end(number: int, frame: object) -> None:
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_heeded_at_the_end_and_said_at_once(number: signal.Signals, capfd: pytest.CaptureFixture[str]):
    went_on = False
    with pytest.raises(Ended), signals_deferred("it is up"):
        signal.raise_signal(number)
        went_on = True
    assert went_on and capfd.readouterr().err == f"{number.name}: the run ends when it is up\n"
    with pytest.raises(Ended):
        signal.raise_signal(number)


def test_a_second_signal_is_heeded_at_once():
    with pytest.raises(Ended), signals_deferred("it is up"):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("not reached")


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_deferred("it is up"):
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)


def test_what_fails_meanwhile_gives_way_to_the_signal():
    with pytest.raises(Ended), signals_deferred("it is up"):
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("half a cluster")
