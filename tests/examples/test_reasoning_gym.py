"""The small example in one process: it trains on a task of reasoning-gym, apart from held-out words."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import EXAMPLES, run, summary

from weft.dataflow.runs.samples import samples

pytest.importorskip("reasoning_gym.factory", exc_type=ImportError)


@pytest.mark.thorough
def test_the_example_runs_in_one_process(root: Path):
    found = summary(run("grpo_reasoning_gym.py", "spelling", root=root))
    assert found["steps"] == 3 and found["samples"] == 3 * 8 * 8
    assert found["mean_logprob_gap"] <= 1e-5 and found["max_logprob_gap"] <= 5e-4
    steps = pq.read_table(root / "spelling" / "metrics.parquet").to_pylist()[1:]
    assert all(row["reward/mean"] > 0 and row["actor/grad_norm"] > 0 for row in steps)
    recorded = samples(root / "spelling")
    assert recorded is not None
    asked: dict[str, set[str]] = {"train": set(), "eval": set()}
    for row in recorded.select(["graph", "prompt"]).to_pylist():
        asked[row["graph"]].add(row["prompt"])
    assert len(asked["eval"]) == 512 and len(asked["train"]) > 10
    assert not asked["train"] & asked["eval"]


def test_no_held_out_word_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import grpo_reasoning_gym as example  # pyright: ignore[reportMissingImports]

    example.make_model(tmp_path, 0)
    for seed in range(3):
        train, held_out = example.read(tmp_path, seed)
        words = [{*source.table["prompt"].to_pylist()} for source in (train, held_out)]
        assert len(words[1]) == 512 and len(words[0]) > 1000 and not words[0] & words[1]
        ids = held_out.table["prompt_ids"].to_pylist()
        assert all(5 <= len(row) <= 7 for row in ids) and not any(0 in row for row in ids)
