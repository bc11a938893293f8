"""The summary of its data that a run shows at the start."""

import json
from pathlib import Path

import pytest
from saved_runs import SavingActor
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from toy import ToyReward, ToyRollout, toy_grpo

from weft.controllers.driver import Driver
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Synchronous
from weft.dataflow.graph import group
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer


def test_the_summary_of_the_data_is_printed_once_and_kept_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"prompt": f"t{k}", "answer": f"It is #### t{k}"} for k in range(4)] + [{"prompt": "t1 t2"}]
    words = Tokenizer(Backend(WordLevel({f"t{k}": k for k in range(9)}, unk_token="t0")))
    words.backend.pre_tokenizer = Whitespace()
    data = Prompts.from_rows(rows, words, name="words", max_prompt_tokens=1, too_long="drop")
    checkpoint = CheckpointConfig(every=1)

    def said(steps: int, resume: str) -> str:
        train = toy_grpo(
            data, rollout=group(ToyRollout), reward=group(ToyReward), actor=group(SavingActor)
        )
        schedule = Synchronous(steps=steps, prompts_per_step=2)
        driver = Driver(
            train, schedule=schedule, root=tmp_path, name="a", checkpoint=checkpoint, resume=resume
        )
        with driver:
            driver.run()
        return capsys.readouterr().out

    first = said(1, "none")
    assert (
        first.count(
            "data 'words': words: 5 rows, read as TRL prompt-only\n  reads     prompt (text) as prompt;"
        )
        == 1
    )
    assert (
        "  answers   from 'answer': what follows ####, in 4 of 5 rows; none in 1 of 5 rows, the first words, row 5"
        in first
    )
    assert "  left out  1 of 5: longer than max_prompt_tokens=1" in first
    kept = json.loads((tmp_path / "a" / "config.json").read_text())["data"]["train"]
    assert kept["prompts"]["longest"] == 2
    assert kept["examples"][2] == {
        "prompt": "t2",
        "response": None,
        "answer": "t2",
        "rejected": None,
        "parts": {},
    }
    again = said(2, "latest")
    assert "data 'words'" not in again
    assert again.count("1 of 5 prompts of 'words' are left out: longer than max_prompt_tokens=1") == 1
