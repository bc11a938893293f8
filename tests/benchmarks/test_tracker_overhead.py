"""The tracker benchmark really runs trackers."""

from collections.abc import Callable
from types import ModuleType


def test_the_figures_are_those_of_runs_with_a_tracker(load: Callable[[str], ModuleType]):
    figures = load("operate/tracker_overhead").measure(steps=4, rounds=1, step_s=0.02)
    assert set(figures) == {"tracker_overhead_share", "tracker_step_ratio", "tracker_cpu_s"}
    assert 0 < figures["tracker_overhead_share"] < 1
