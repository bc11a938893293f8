"""Logs of other machines arrive in the run's directory in pieces; a log that grows too fast is
cut."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.controllers.backends import node_links
from weft.controllers.backends.backend import Files
from weft.controllers.backends.node_links import MAX_BYTES, NewText, _NodeLogs, new_text
from weft.dataflow.buffer.scratch import Scratch


def brought(there: Path, logs: _NodeLogs, known: dict[str, int]) -> None:
    found = new_text(there, known)
    logs.append_text("n1", found)
    known |= {name: begin + len(text) for name, (begin, text) in found.items()}


def test_new_values_are_appended_once(tmp_path: Path):
    there, here, known = tmp_path / "there", tmp_path / "here", dict[str, int]()
    logs = _NodeLogs(here)
    brought(there, logs, known)
    assert not here.exists()
    there.mkdir()
    for text in ("first\n", "", "second\n"):
        with (there / "actor_0.log").open("a") as file:
            file.write(text)
        (there / "actor_0.at").write_bytes(b"12345678")
        brought(there, logs, known)
    assert (here / "actor_0.log").read_text() == "first\nsecond\n"
    assert [p.name for p in here.iterdir()] == ["actor_0.log"] and (
        here / "actor_0.log"
    ).stat().st_mode & 0o777 == 0o600


def test_the_middle_of_a_fast_growing_log_is_left_out_with_a_notice(tmp_path: Path):
    there, here, known = tmp_path / "there", tmp_path / "here", {}
    there.mkdir()
    (there / "x_0.log").write_bytes(b"a" * 100 + b"b" * MAX_BYTES)
    brought(there, _NodeLogs(here), known)
    said, text = (here / "x_0.log").read_bytes().split(b"\n")
    assert (
        said == b"... 100 bytes are left out here; they are on node n1 ..." and text == b"b" * MAX_BYTES
    )


def test_overlapping_answers_are_written_once(tmp_path: Path):
    logs = _NodeLogs(tmp_path)
    logs.append_text("n1", {"x_0.log": (0, b"one ")})
    logs.append_text("n1", {"x_0.log": (0, b"one two ")})
    logs.append_text("n1", {"x_0.log": (4, b"two ")})
    assert (tmp_path / "x_0.log").read_bytes() == b"one two "


def test_logs_that_cannot_be_written_end_no_run_and_come_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    logs = _NodeLogs(tmp_path / "logs")
    (tmp_path / "logs").touch()
    logs._store([("n1", {"x_0.log": (0, b"text")})])
    assert "the logs of node n1 cannot be written for now" in caplog.text
    (tmp_path / "logs").unlink()
    logs.append_text("n1", {"x_0.log": (0, b"text")})
    assert (tmp_path / "logs" / "x_0.log").read_bytes() == b"text"


def test_a_name_that_leads_elsewhere_is_skipped(tmp_path: Path):
    _NodeLogs(tmp_path / "here").append_text("n1", {"../x.log": (0, b"mine")})
    assert not (tmp_path / "x.log").exists()


def test_a_machine_that_sees_the_directory_of_the_run_writes_into_it(tmp_path: Path):
    run = tmp_path / "run"
    files = Files(tmp_path / "s", scratch=Scratch.of(run / "buffer", tmp_path / "s"))
    assert (
        files.logs_of_node("n1", run)
        == run / "logs"
        == Files(run / "buffer" / "segments").logs_of_node("n1", run)
    )
    assert files.scratch is not None
    elsewhere = files.logs_of_node("n1", tmp_path / "not" / "here")
    assert elsewhere == files.scratch.path / "n1" / "logs" and not (tmp_path / "not").exists()
    files.scratch.let_go(over=True)


class Host:
    """A node's server that answers once a file exists."""

    def __init__(self, answers: Path) -> None:
        self._answers = answers

    def new_text(self, known: dict[str, int]) -> NewText:
        while not self._answers.exists():
            time.sleep(0.02)
        text = b"one two "
        seen = known.get("x_0.log", 0)
        return {"x_0.log": (seen, text[seen:])}


def test_a_node_that_named_no_sample_in_time_stays_silent_until_it_answers(tmp_path: Path):
    logs = _NodeLogs(tmp_path)
    logs.silent.add("n1")  # as `NodeLinks.sample_at` does
    logs.look({})
    assert logs.silent == {"n1"}


@pytest.mark.ray
def test_a_node_that_does_not_answer_is_waited_for_once_and_the_others_bring_their_logs(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
):
    import ray

    remote: Any = ray.remote
    (tmp_path / "go").touch()
    hosts = {
        node: remote(Host).options(num_cpus=0).remote(tmp_path / file)
        for node, file in (("n1", "go"), ("n2", "later"))
    }
    ray.get(hosts["n1"].new_text.remote({}), timeout=60)

    class OfOne(_NodeLogs):
        """Continues when one of the nodes has answered."""

        def _ask(self, hosts: Mapping[str, Any]) -> None:
            super()._ask(hosts)
            ray.wait([promise for promise, node in self._asked.items() if node == "n1"], timeout=60)

    logs = OfOne(tmp_path / "logs", clock=lambda: 0.0)
    monkeypatch.setattr(
        node_links, "BRING_S", 0.01
    )  # waited out: one has answered, and the other does not
    logs.bring(hosts)
    assert logs.silent == {"n2"} and (tmp_path / "logs" / "x_0.log").read_bytes() == b"one two "
    monkeypatch.setattr(node_links, "BRING_S", 600.0)
    logs.bring(hosts)  # waiting for both would take ten minutes
    logs._clock = lambda: 20.0
    logs.look(hosts)
    assert "n1" in logs._asked.values(), "a node that is silent keeps the others from nothing"
    assert list(logs._asked.values()).count("n2") == 1
    (tmp_path / "later").touch()
    deadline = time.monotonic() + 60
    while logs.silent and time.monotonic() < deadline:
        logs.look(hosts)
    assert not logs.silent
    for host in hosts.values():
        ray.kill(host)
