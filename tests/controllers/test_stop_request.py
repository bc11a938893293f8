"""StopRequests: a driver heeds a request for its own epoch, and looks once a second."""

from pathlib import Path

from weft.controllers.stop_request import StopRequests, request_stop
from weft.dataflow.buffer.run_files import STOP


def test_a_request_is_for_one_epoch(tmp_path: Path):
    now = [0.0]
    second, third = (StopRequests(tmp_path, epoch, clock=lambda: now[0]) for epoch in (2, 3))
    assert not second.asked
    request_stop(tmp_path, 2)
    assert not second.asked, "it was looked at within this second"
    now[0] = 1.0
    assert second.asked and not third.asked
    (tmp_path / STOP).unlink()
    assert second.asked, "what was asked for is not forgotten"


def test_a_file_that_says_nothing_is_passed_over(tmp_path: Path):
    for text in ("", "[]", "{}", '"stop"'):
        (tmp_path / STOP).write_text(text)
        assert not StopRequests(tmp_path, 1).asked
