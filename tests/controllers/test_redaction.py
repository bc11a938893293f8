"""Secrets of the environment appear in no message and no file of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
from toy import ToyConfig, ToyReward, prompts, toy_reinforce
from toy_runs import handles

from weft.controllers.driver import Driver
from weft.controllers.launch import launch
from weft.controllers.schedule import Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.config import Config
from weft.dataflow.errors import WorkerError
from weft.dataflow.graph import group
from weft.dataflow.runs.alerts import read_alerts

TOKEN = "hf_of_nobody_0123456789/+="


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


class KeyConfig(ToyConfig):
    api_key: str = ""


class TalkativeReward(ToyReward):
    """A reward whose error contains the address it called."""

    Config = KeyConfig

    def score(self, samples: Batch) -> Any:
        raise ConnectionError(f"401 for https://judge.example/?key={TOKEN}")


class Settings(Config):
    hub_token: str = TOKEN
    password: str = "a word that is in no variable"
    max_tokens: int = 7


def assert_nowhere(text: str) -> None:
    assert TOKEN not in text and "hf_of_nobody" not in text and "in no variable" not in text


def test_a_failing_rank_reveals_no_secret_in_messages_or_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    made = {
        **handles(),
        "reward": group(TalkativeReward, name="reward", api_key="a word that is in no variable"),
    }
    with (
        Driver(
            toy_reinforce(prompts(8), **made),
            schedule=Synchronous(steps=2, prompts_per_step=4),
            root=tmp_path,
            name="run",
            settings=Settings(),
            progress="plain",
        ) as driver,
        pytest.raises(WorkerError) as caught,
    ):
        driver.run()
    assert "401 for https://judge.example/?key=[value of HF_TOKEN]" in str(caught.value)
    assert_nowhere(str(caught.value) + "".join(capfd.readouterr()))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    for file in files:
        assert_nowhere(file.read_bytes().decode(errors="replace"))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["settings"] == {"hub_token": "[hidden]", "password": "[hidden]", "max_tokens": 7}
    assert config["groups"]["reward"]["api_key"] == "[hidden]"
    assert "[value of HF_TOKEN]" in read_alerts(tmp_path / "run")[-1].text


def test_an_error_that_ends_a_script_does_not_say_it(capsys: pytest.CaptureFixture[str]):
    def main(settings: Settings) -> None:
        raise ConnectionError(f"401 for {TOKEN}")

    assert launch(main, []) == 1
    said = capsys.readouterr().err
    assert "401 for [value of HF_TOKEN]" in said
    assert_nowhere(said)
