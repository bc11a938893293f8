"""Signals that arrive in an uninterruptible section are handled after it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weft.controllers.signals import endings_noted, signals_deferred


class Ended(Exception):
    """Raised by the handler of a test."""


@pytest.fixture(autouse=True)
def handlers():
    def end(number: int, frame: object) -> None:
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_deferred_signal_is_reported_at_once_and_handled_at_the_end(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
):
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


def test_a_deferred_signal_wins_over_an_error():
    with pytest.raises(Ended), signals_deferred("it is up"):
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("half a cluster")


def test_a_handler_that_ray_has_left_behind_gives_way_for_the_time_of_a_run():
    ray_private = pytest.importorskip("ray._private.utils")

    def of_ray(number: int, frame: object) -> None:
        raise AssertionError("it would end the process without a checkpoint")

    of_ray.__module__ = "ray._private.node"
    ray_private.set_sigterm_handler(of_ray)
    with endings_noted("it ends", of_systems=True) as noted:
        signal.raise_signal(signal.SIGTERM)
        assert noted() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is of_ray


CLOSED = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from toy import prompts, toy_grpo
from toy_runs import handles
from weft.controllers.driver import Driver
from weft.controllers.schedule import Synchronous
graph, schedule = toy_grpo(prompts(8), **handles()), Synchronous(steps=2, prompts_per_step=4)
with Driver(graph, schedule=schedule, root=Path(sys.argv[1]), name="run") as driver:
    driver.run()
    os.write(1, b"a library says something")
    os.write(2, b"a library says something")
print("not shown")
"""


def test_closed_standard_streams_do_not_end_a_run_or_get_reused(tmp_path: Path):
    here = str(Path(__file__).parent)
    command = 'exec "$0" "$@" <&- >&- 2>&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, "-c", CLOSED, str(tmp_path), here],
        check=False,
        timeout=120,
    )
    assert done.returncode == 0
    assert (tmp_path / "run" / "metrics.parquet").exists()
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in written if b"a library says" in file.read_bytes()]
