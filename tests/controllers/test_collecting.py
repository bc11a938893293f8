"""Garbage collection during a run."""

import gc

import pytest

from weft.controllers.loop.start import THRESHOLDS, collected_seldom


def test_garbage_is_collected_seldom_until_the_run_ends():
    before = gc.get_threshold()
    with collected_seldom(True):
        assert gc.get_threshold() == THRESHOLDS != before
    assert gc.get_threshold() == before
    with pytest.raises(RuntimeError), collected_seldom(True):
        raise RuntimeError
    assert gc.get_threshold() == before


def test_nothing_changes_where_workers_share_the_process():
    before = gc.get_threshold()
    with collected_seldom(False):
        assert gc.get_threshold() == before
