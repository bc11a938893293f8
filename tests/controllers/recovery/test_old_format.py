"""A run of an earlier version of Weft: its log is refused by name, and its model can be loaded.

`old_format/run.tar.xz` is a toy run with a log of format 1: asynchronous, killed after step 5, with
checkpoints of steps 2 and 4.
"""

import tarfile
from pathlib import Path

import pytest
from saved_runs import SCHEDULES, run, trained

from weft.__main__ import main
from weft.dataflow.buffer.check import check_log
from weft.dataflow.buffer.recovery import restore
from weft.dataflow.errors import FormatError, UserError

OLD = "the log cannot be read: graph 'train' is described in format 1, by an earlier version of Weft; this version reads formats 3 to 6"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "old_format" / "run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_no_reader_takes_a_log_of_an_old_format(root: Path):
    for read in (check_log, restore):
        with pytest.raises(FormatError, match=OLD):
            read(root / "run" / "buffer")


@pytest.mark.parametrize(
    "question",
    [
        ["check"],
        ["why", "3"],
        ["table"],
        ["sql", "select * from rows"],
        ["sql", "select * from samples"],
        ["archive"],
    ],
    ids=" ".join,
)
def test_every_command_names_the_format_of_an_old_log_with_advice(
    root: Path, question: list[str], capsys: pytest.CaptureFixture[str]
):
    command, *more = question
    assert main(["buffer", command, str(root / "run"), *more]) == 1
    said = capsys.readouterr().err
    assert (
        said.startswith(f"FormatError: {OLD}")
        and "resume='weights' continues with the saved model" in said
    )


def test_metrics_and_timeline_of_an_old_run_are_read_as_before(
    root: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["buffer", "sql", str(root / "run"), "select max(step) as last from metrics"]) == 0
    assert capsys.readouterr().out.split() == ["last", "5"]
    assert main(["timeline", str(root / "run")]) == 0


def test_an_old_run_resumes_its_weights_without_its_rows(root: Path):
    with pytest.raises(
        UserError, match=rf"no checkpoint of the run is sound: .*{OLD}.*resume='weights' "
    ):
        run(root, SCHEDULES[2], evaluate=False, resume="latest")
    weights, metrics = run(root, SCHEDULES[2], evaluate=False, resume="weights")
    assert [row["step"] for row in metrics] == list(range(10))
    assert len(trained(weights)) == 27 and (root / "run" / "buffer.given-up-1").is_dir()
    assert not check_log(root / "run" / "buffer").violations
