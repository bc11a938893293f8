"""Alerts of a run reach the disk, whatever happens to the file."""

import json
from pathlib import Path

import pytest

from weft.dataflow.runs import alerts as module
from weft.dataflow.runs.alerts import Alert, Alerts, read_alerts
from weft.dataflow.runs.files import ALERTS


def test_alerts_are_read_as_they_were_written_over_several_starts(tmp_path: Path):
    first = Alerts(tmp_path, clock=lambda: 7.0)
    first.step = 3
    first.report("replaced", "worker rollout[0]\nwas replaced")
    Alerts(tmp_path, clock=lambda: 9.0).report("failed", "no room", ends=True)
    assert read_alerts(tmp_path) == [
        Alert("replaced", "worker rollout[0]\nwas replaced", 3, 7.0, ends=False),
        Alert("failed", "no room", 0, 9.0, ends=True),
    ]
    assert (tmp_path / ALERTS).stat().st_mode & 0o777 == 0o600
    assert read_alerts(tmp_path / "nothing") == []


def test_a_line_that_a_killed_process_has_left_half_written_spoils_no_other(tmp_path: Path):
    Alerts(tmp_path).report("replaced", "one")
    with (tmp_path / ALERTS).open("a") as file:
        file.write(json.dumps({"name": "torn"})[:7])
    Alerts(tmp_path).report("replaced", "two")
    assert [alert.text for alert in read_alerts(tmp_path)] == ["one", "two"]


def test_lines_that_cannot_be_written_are_written_with_the_next(tmp_path: Path):
    alerts = Alerts(tmp_path / "gone")
    alerts.report("disk_full", "one")
    (tmp_path / "gone").mkdir()
    alerts.report("replaced", "two")
    assert [alert.text for alert in read_alerts(tmp_path / "gone")] == ["one", "two"]


def test_a_half_written_line_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alerts = Alerts(tmp_path)
    alerts.report("replaced", "one")
    whole = module.os.writev
    with monkeypatch.context() as full:
        full.setattr(module.os, "writev", lambda descriptor, parts: whole(descriptor, [parts[1][:5]]))
        alerts.report("disk_full", "two")
    assert [alert.text for alert in read_alerts(tmp_path)] == ["one"]
    alerts.flush()
    assert [alert.text for alert in read_alerts(tmp_path)] == ["one", "two"]
