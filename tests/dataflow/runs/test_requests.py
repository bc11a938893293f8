"""Requests by file: a driver obeys each request for its epoch once."""

from pathlib import Path

from weft.dataflow.runs.files import STACKS, STOP
from weft.dataflow.runs.requests import RunRequests, request_stacks, request_stop


def test_a_request_is_for_one_epoch(tmp_path: Path):
    now = [0.0]
    second, third = (RunRequests(tmp_path, epoch, clock=lambda: now[0]) for epoch in (2, 3))
    assert not second.stop_asked
    request_stop(tmp_path, 2)
    assert not second.stop_asked, "it was looked at within this second"
    now[0] = 1.0
    assert second.stop_asked and not third.stop_asked
    (tmp_path / STOP).unlink()
    assert second.stop_asked, "what was asked for is not forgotten"


def test_a_file_without_a_request_is_skipped(tmp_path: Path):
    for text in ("", "[]", "{}", '"stop"'):
        (tmp_path / STOP).write_text(text)
        assert not RunRequests(tmp_path, 1).stop_asked
        (tmp_path / STACKS).write_text(text)
        assert "worker" not in RunRequests(tmp_path, 1).new(STACKS)


def test_a_question_about_a_worker_is_answered_once(tmp_path: Path):
    requests = RunRequests(tmp_path, 2)
    request_stacks(tmp_path, 1, "actor[0]")
    assert not requests.new(STACKS), "it was for another driver"
    for worker in ("actor[0]", "actor[1]", "actor[1]"):
        request_stacks(tmp_path, 2, worker)
        assert requests.new(STACKS)["worker"] == worker and not requests.new(STACKS)
