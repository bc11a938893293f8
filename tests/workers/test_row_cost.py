"""Costs of rows, against torch's count of floating-point operations, and the balance of ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.dispatch import Coordinates, Dispatch, RowCost, RowSizes, row_cost_of
from weft.workers.worker import Worker

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_costs_are_in_the_ratio_of_floating_point_operations(tmp_path: Path, kind: str):
    if kind == "dense":
        config: Any = Qwen2Config(**SIZES)
    else:
        mixture: dict[str, Any] = SIZES | {"head_dim": 16}
        config = Qwen3MoeConfig(
            **mixture, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, mlp_only_layers=[]
        )
    config.save_pretrained(tmp_path)
    cost = row_cost_of(tmp_path)
    lengths = np.array([64, 256, 1024])
    if kind == "dense":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        counted = []
        for length in lengths.tolist():
            with (
                FlopCounterMode(display=False) as counter,
                sdpa_kernel(SDPBackend.MATH),
                torch.no_grad(),
            ):
                model(torch.zeros(1, length, dtype=torch.long, device="meta"))
            found = counter.get_flop_counts()["Global"]
            attention = sum(n for op, n in found.items() if "bmm" in str(op) or "attention" in str(op))
            counted.append(
                sum(found.values()) - attention / 2
            )  # torch counts all pairs of tokens, although the mask hides half
        counted = np.array(counted)
    else:  # by hand: attention projections, two of four experts, and the head
        linear = 3 * (2 * 64 * (64 + 32) + 3 * 64 * 2 * 96) + 64 * 300
        counted = lengths * (linear + 3 * 64 * lengths)
    assert cost(lengths) / cost(lengths)[0] == pytest.approx(counted / counted[0], rel=0.02)


def test_models_that_do_not_say_enough_cost_their_tokens(tmp_path: Path):
    assert row_cost_of(tmp_path / "none") == RowCost()
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert row_cost_of(tmp_path) == RowCost()
    windows = {**SIZES, "layer_types": ["sliding_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(windows))
    assert row_cost_of(tmp_path) == RowCost()
    (tmp_path / "config.json").write_text(
        json.dumps(windows | {"layer_types": ["full_attention", *["sliding"] * 2]})
    )
    one = row_cost_of(tmp_path).attention_length
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert one == pytest.approx(3 * row_cost_of(tmp_path).attention_length)
    assert RowCost()(np.array([3, 0])).tolist() == [3, 0]


def test_workers_that_train_know_the_cost_of_a_row_and_others_take_tokens(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    config = ActorConfig(model=str(tmp_path))
    assert ActorWorker.row_cost(config) == row_cost_of(tmp_path) != RowCost()
    assert Worker.row_cost(config) == RowCost()


def test_long_tails_are_balanced_by_cost():
    cost = RowCost(23_000)  # Qwen2.5-0.5B
    chance, before, after = np.random.default_rng(0), [], []
    mesh = [Coordinates(dp=rank) for rank in range(8)]
    for _ in range(20):
        tokens = np.clip(chance.lognormal(8.5, 1.2, 64).astype(int), 16, 65_536)
        for costs, ratios in ((None, before), (cost(tokens), after)):
            shares = Dispatch.SPLIT_BY_DP.distribute(RowSizes(tokens, np.arange(64), costs=costs), mesh)
            of_ranks = [cost(tokens[np.array(share)]).sum() for share in shares if share is not None]
            ratios.append(max(of_ranks) / np.mean(of_ranks))
    # A single row may cost more than an equal share. Balancing cannot help then.
    assert np.mean(after) < np.mean(before) and np.median(after) < np.median(before) - 0.1, (
        before,
        after,
    )


def test_groups_stay_together_when_they_are_balanced_by_cost():
    tokens, groups = np.array([10, 10, 40, 10, 10]), np.array([1, 1, 2, 3, 3])
    sizes = RowSizes(tokens, groups, whole_groups=True, costs=RowCost(10)(tokens))
    assert Dispatch.SPLIT_BY_DP.distribute(sizes, [Coordinates(), Coordinates(dp=1)]) == [
        [2],
        [0, 1, 3, 4],
    ]
    by_tokens = RowSizes(tokens, groups, whole_groups=True)
    assert Dispatch.SPLIT_BY_DP.distribute(by_tokens, [Coordinates(), Coordinates(dp=1)]) == [
        [2],
        [0, 1, 3, 4],
    ]
