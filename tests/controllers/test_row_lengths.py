"""Rows longer than a model's context are refused, or dropped and counted, before a run starts."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import weft
from weft.algorithms.methods import supervised
from weft.algorithms.ppo import ppo
from weft.algorithms.preference import dpo, reference_of_pairs
from weft.workers.reference import ReferenceConfig

SHORT, LONG = 16, 64
"""[tokens] Contexts of the two models."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with learned positions in two folders, one with a short and one with a long context."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("contexts")
    tokenizer = Tokenizer(WordLevel({str(token): token for token in range(40)}, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    for name, context in (("short", SHORT), ("long", LONG)):
        torch.manual_seed(0)
        ends: Any = {"bos_token_id": 1, "eos_token_id": 1}
        config = GPT2Config(vocab_size=40, n_positions=context, n_embd=16, n_layer=1, n_head=2, **ends)
        GPT2LMHeadModel(config).save_pretrained(folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))
    return folder


def words(number: int) -> str:
    return " ".join(["7"] * number)


def answered(models: Path, *lengths: int, **reading: Any) -> weft.Prompts:
    """Prompts of 4 tokens with responses of these lengths."""
    rows = [{"prompt": words(4), "completion": f" {words(n)}"} for n in lengths]
    return weft.Prompts.from_rows(rows, str(models / "short"), **reading)


def compared(models: Path, *lengths: int, **reading: Any) -> weft.Prompts:
    rows = [{"prompt": words(4), "chosen": f" {words(2)}", "rejected": f" {words(n)}"} for n in lengths]
    return weft.Prompts.from_rows(rows, str(models / "short"), **reading)


def driver(graph: Any, root: Path, **settings: Any) -> weft.Driver:
    schedule = weft.Synchronous(steps=1, prompts_per_step=1)
    return weft.Driver(graph, schedule=schedule, root=root, progress=False, **settings)


def test_a_supervised_row_that_is_too_long_is_refused_with_the_number_of_them(
    models: Path, tmp_path: Path
):
    actor = weft.group(weft.ActorWorker, model=str(models / "short"))
    driver(supervised(answered(models, 12), actor=actor), tmp_path).close()
    with pytest.raises(weft.UserError) as refused:
        driver(supervised(answered(models, 3, 14, 13, 2), actor=actor), tmp_path)
    assert "row 1 of rows has 18 tokens, more than the context of 16 of 'actor'" in str(refused.value)
    assert "2 of 4 rows are too long; drop these rows (too_long='drop'" in str(refused.value)


def test_rows_to_drop_are_dropped_and_counted(models: Path, tmp_path: Path):
    actor = weft.group(weft.ActorWorker, model=str(models / "short"))
    with driver(supervised(answered(models, 14, 3, 13, too_long="drop"), actor=actor), tmp_path) as run:
        metrics = run.run()
        source: Any = run._spec.graphs["train"].source  # pyright: ignore[reportPrivateUsage]
    assert (len(source), source.dropped) == (1, 2) and metrics[-1]["samples"] == 1
    assert re.search(
        r"2 .*longer than the context of 'actor', 16 tokens", str(source.understood), re.DOTALL
    )


@pytest.mark.parametrize("short", ["actor", "reference"])
def test_the_shortest_context_of_a_run_decides_on_pairs(short: str, models: Path, tmp_path: Path):
    names = {"actor": weft.ActorWorker, "reference": weft.ReferenceWorker}
    groups: Any = {
        n: weft.group(c, model=str(models / ("short" if n == short else "long")))
        for n, c in names.items()
    }
    with pytest.raises(
        weft.UserError, match=rf"row 1 of rows has 24 tokens, more than the context of 16 of {short!r}"
    ):
        driver(dpo(compared(models, 2, 20), **groups), tmp_path)
    kept = dpo(compared(models, 2, 20, too_long="drop"), **groups)
    with driver(kept, tmp_path) as run:
        assert run.run()[-1]["samples"] == 2


def test_precomputed_columns_leave_out_the_same_rows(models: Path, tmp_path: Path):
    reference = weft.group(weft.ReferenceWorker, model=str(models / "short"))
    graph = reference_of_pairs(compared(models, 2, 20, 3, too_long="drop"), reference=reference)
    assert len(weft.precompute(graph, root=tmp_path, progress=False).table) == 2


def test_a_critic_with_a_shorter_context_than_the_rollout_is_found_before_the_start(
    models: Path, tmp_path: Path
):
    def graph(max_tokens: int) -> Any:
        groups: Any = {
            n: weft.group(c, model=str(models / "long")) for n, c in (("actor", weft.ActorWorker),)
        }
        groups["rollout"] = weft.group(
            weft.RolloutWorker, model=str(models / "long"), engine="transformers"
        )
        groups["rollout"].follows(groups["actor"])
        groups["critic"] = weft.group(weft.CriticWorker, model=str(models / "short"))
        groups["reward"] = weft.group(
            weft.RewardWorker, function=short_answer, tokenizer=str(models / "long")
        )
        prompts = weft.Prompts.from_rows([{"prompt": words(4)}], str(models / "long"))
        return ppo(prompts, **groups, sampling=weft.Sampling(max_tokens=max_tokens))

    driver(graph(12), tmp_path).close()
    wanted = (
        "row 0 of rows has 4 prompt tokens and max_tokens=13, more than the context of 16 of 'critic'"
    )
    with pytest.raises(weft.UserError, match=re.escape(wanted)):
        driver(graph(13), tmp_path)


def short_answer(response: str) -> float:
    return 1.0 / (1 + len(response))


def test_a_table_of_tokens_is_checked_too(models: Path, tmp_path: Path):
    ids = pa.array([[1] * 10, [1] * 4], pa.list_(pa.int32()))
    rows = weft.TableSource("tokens", pa.table({"prompt_ids": ids, "response_ids": ids}))
    actor = weft.group(weft.ActorWorker, model=str(models / "short"))
    with pytest.raises(
        weft.UserError, match=r"row 0 of tokens has 20 tokens, .* 1 of 2 rows are too long"
    ):
        driver(supervised(rows, actor=actor), tmp_path)


def test_an_engine_refuses_a_row_that_another_node_made_too_long(models: Path):
    rows = weft.Batch.of(sample_id=[5, 6], prompt_ids=[[1], [1] * 10], response_ids=[[2], [2] * 7])
    worker = weft.ReferenceWorker(ReferenceConfig(model=str(models / "short")))
    with pytest.raises(weft.UserError, match=r"row with sample_id 6 has 17 tokens, .* reads at most 16"):
        worker.logprobs(rows)
    worker.close()
