"""Jobs are checked before a cluster is contacted."""

from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.controllers.backends import jobs as backend_jobs
from weft.controllers.backends.jobs import JobRequest, Jobs, server_address
from weft.dataflow.errors import UserError


class JobStatus(Enum):
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "train.py").touch()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").touch()
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"script": Path("trian.py")},
            r"script 'trian.py': there is no such file in .*project; did you mean 'train.py'",
        ),
        (
            {"script": Path("../below/train.py")},
            r"is outside of .*project, the folder that is sent; choose --working-dir",
        ),
        ({"name": "a/b"}, r"--name='a/b' cannot name a folder: .*; did you mean 'a-b'"),
        (
            {"root": "runs"},
            r"--root='runs' must be a folder on the head node: an absolute path, or one below ~",
        ),
        ({"stop_wait_s": 0}, r"--stop-wait-s=0 must be a whole number of seconds above 0"),
        ({"environment": {"WANDB_API_KEY": "x"}}, r"--env WANDB_API_KEY=\.\.\.: Ray shows the settings"),
        ({"environment": {"HF_TOKEN": "x"}}, r"--env HF_TOKEN=\.\.\.: Ray shows the settings"),
        ({"environment": {"1X": "x"}}, r"--env 1X=\.\.\.: this is not the name of a variable"),
        ({"environment": {"WEFT_ROOT": "/x"}}, r"--env WEFT_ROOT=\.\.\.: --root sets this variable"),
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_is_refused_with_its_option(
    project: Path, given: dict[str, Any], says: str
):
    with pytest.raises(UserError, match=says) as refused:
        JobRequest(**{"script": Path("train.py"), "working_dir": project, **given})
    assert "=x" not in str(refused.value)


def test_the_words_of_a_script_reach_it_as_they_are(project: Path):
    request = JobRequest(
        script=Path("train.py"), arguments=["--note", "it's $HOME"], working_dir=project
    )
    assert request.entrypoint == """python train.py --note 'it'"'"'s $HOME'"""
    other = JobRequest(script=project / "train.py", working_dir=project, python="python3.11")
    assert other.entrypoint == "python3.11 train.py"


def test_a_job_knows_its_run_folder_and_that_it_resumes(project: Path):
    request = JobRequest(
        script=Path("train.py"), working_dir=project, name="a", root="/shared/", resume=True
    )
    variables = request.variables("a-1")
    assert (
        variables["WEFT_ROOT"] == "/shared/a" == request.folder and variables["WEFT_RESUME"] == "latest"
    )
    assert "WEFT_RESUME" not in JobRequest(script=Path("train.py"), working_dir=project).variables(
        "train-1"
    )


def test_an_address_that_is_none_of_a_job_server_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    for given, says in (
        (None, "no cluster is given; use --address http://ray-head:8265, or set RAY_API_SERVER_ADDRESS"),
        ("head:6379", "did you mean 'http://head:8265'"),
        ("head:9000", "did you mean 'http://head:9000'"),
        ("ray://head:10001", "did you mean 'http://head:10001'"),
        ("http://me:secret@head:8265", "contains a user name or a password"),
    ):
        with pytest.raises(UserError, match=says) as refused:
            server_address(given)
        assert "secret" not in str(refused.value)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://head/")
    assert server_address(None) == "https://head"
    with pytest.raises(UserError, match=r"no job server answers at http://127.0.0.1:1 .*ray\[default\]"):
        Jobs("http://127.0.0.1:1")


class Server:
    """A job server whose connections break off after each piece of the log but the last."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces, self.connections = pieces, 0

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        self.connections += 1
        for piece in self.pieces[: self.connections]:
            yield piece
        if self.connections < len(self.pieces):
            raise RuntimeError("the connection broke")

    def list_jobs(self) -> list[Any]:
        status = JobStatus.SUCCEEDED if self.connections >= len(self.pieces) else JobStatus.RUNNING
        return [
            SimpleNamespace(
                submission_id="a",
                status=status,
                metadata={},
                runtime_env={},
                message="",
                start_time=0,
                entrypoint="",
            )
        ]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_address")  # which has to be there before Ray is imported
def test_a_log_whose_connection_breaks_off_is_passed_on_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend_jobs, "POLL_S", 0.0)
    jobs, said = object.__new__(Jobs), list[str]()
    jobs.address, jobs._client = "http://head:8265", Server(["one\n", "two\n", "three\n"])
    assert jobs.follow("a", said.append).status == "SUCCEEDED"
    assert said == ["one\n", "two\n", "three\n"] and jobs._client.connections == 3
