"""The training engine: logprobs, gradients independent of the batch split, weights in and out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import spmd
import torch
from ranks import run_processes
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from training_rows import make_groups
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from weft import Lora
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.metrics import merge
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.dispatch import Coordinates, Dispatch, RowSizes
from weft.workers.reference import ReferenceConfig, ReferenceWorker
from weft.workers.training.microbatch_plan import plan_microbatches
from weft.workers.training.microbatches import check_rows, tokens_of
from weft.workers.training.optimizer import OptimizerConfig


def actor(model: Path, **settings: Any) -> ActorWorker:
    return ActorWorker(
        ActorConfig(model=str(model), **{"learning_rate": 1e-3, "max_grad_norm": None, **settings})
    )


def straight_logprobs(model: Path, rows: Batch) -> list[torch.Tensor]:
    """Compute logprobs with plain `transformers`, row by row."""
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    out = []
    for row in rows.to_rows():
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            log_p = F.log_softmax(causal_lm(ids).logits / row["temperature"], -1)
        out.append(log_p[0, :-1].gather(1, ids[0, 1:, None])[len(row["prompt_ids"]) - 1 :, 0])
    return out


def difference(gradient: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the difference of two gradients, relative to the norm of the second."""
    assert gradient.keys() == other.keys()
    squares = sum(float((gradient[n].double() - other[n].double()).square().sum()) for n in other)
    return (squares / sum(float(g.double().square().sum()) for g in other.values())) ** 0.5


def run_ranks(
    folder: Path,
    model: Path,
    rows: Batch,
    shares: list[list[int]],
    parts: Sequence[list[int]] = (),
    **settings: Any,
) -> list[dict]:
    """Take one step on `len(shares)` processes, and return their results."""
    folder.mkdir()
    with pa.ipc.new_file(folder / "rows.arrow", rows.record.schema) as file:
        file.write_batch(rows.record)
    config = {"model": str(model), "learning_rate": 1e-3, "max_grad_norm": None, **settings}
    (folder / "case.json").write_text(
        json.dumps({"folder": str(folder), "shares": shares, "config": config, "parts": parts})
    )
    run_processes(spmd.main, folder / "case.json", len(shares))
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(len(shares))]


def test_logprobs_are_those_of_a_straight_forward_pass(tiny_model: Path, rows: Batch):
    scored = actor(tiny_model, microbatch_tokens=50).logprobs(rows, into="scored")
    for mine, straight in zip(
        scored["scored"].to_pylist(), straight_logprobs(tiny_model, rows), strict=True
    ):
        assert torch.tensor(mine).double().sub(straight).abs().max() < 1e-5


@pytest.mark.parametrize("which", [True, 2, "elementwise"])
def test_activation_checkpointing_changes_no_gradient(tiny_model: Path, rows: Batch, which: Any):
    plain, _ = spmd.one_step(actor(tiny_model), rows)
    again, _ = spmd.one_step(actor(tiny_model, activation_checkpointing=which), rows)
    assert difference(again, plain) < 1e-6


class Products(TorchDispatchMode):
    """Counts matrix products of an adapter of this rank, and all others."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.number = rank, {True: 0, False: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.number[self.rank in (*args[0].shape, *args[1].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_elementwise_checkpointing_recomputes_the_products_of_an_adapter_only(
    tiny_model: Path, rows: Batch
):
    def run(which: Any) -> tuple[dict[str, torch.Tensor], dict[bool, int]]:
        worker = actor(tiny_model, activation_checkpointing=which, lora=Lora(rank=5))
        with Products(5) as products:
            return spmd.one_step(worker, rows)[0], products.number

    (plain, once), (again, counted) = run(False), run("elementwise")
    assert difference(again, plain) < 1e-6
    # With checkpointing, `transformers` also computes the gradient of the first layer's input.
    assert counted[False] == once[False] + len(("q_proj", "k_proj", "v_proj"))
    assert counted[True] > once[True] > 0


@pytest.mark.parametrize("which", [-1, "products"])
def test_activation_checkpointing_of_nothing_that_exists_is_refused(which: Any):
    with pytest.raises(UserError, match="activation_checkpointing"):
        ActorConfig(model="m", activation_checkpointing=which)


SPLITS = {
    "two ranks": ([list(range(0, 23, 2)), list(range(1, 23, 2))], {}),
    "two ranks, layer by layer": (
        [list(range(20)), [20, 21, 22]],
        {"gather": "layerwise", "microbatch_tokens": 60},
    ),
    "two ranks, from host memory": (
        [list(range(20)), [20, 21, 22]],
        {"offload": "everything", "microbatch_tokens": 60},
    ),
    "two ranks, moments on the host": ([list(range(20)), [20, 21, 22]], {"offload": "moments"}),
    "two ranks, one without rows": ([list(range(23)), []], {"microbatch_tokens": 100}),
    "four ranks, one without rows": (
        [[22, 3], list(range(3)), [], list(range(4, 22))],
        {"microbatch_tokens": 50},
    ),
}


IN_EVERY_TEST_RUN = ("two ranks, layer by layer", "two ranks, one without rows")


@pytest.mark.parametrize(
    "split",
    [pytest.param(name, marks=() if name in IN_EVERY_TEST_RUN else pytest.mark.slow) for name in SPLITS],
)
def test_the_gradient_does_not_depend_on_the_number_of_ranks(
    tiny_model: Path, rows: Batch, tmp_path: Path, split: str
):
    shares, settings = SPLITS[split]
    ranks = check_ranks(tiny_model, rows, tmp_path, shares, settings)
    if (
        split == "two ranks, layer by layer"
    ):  # in lockstep, three rows spread over as many microbatches as twenty
        assert ranks[1]["microbatches"] == [1, 1, 1] + [0] * (len(ranks[0]["microbatches"]) - 3)


@pytest.mark.parametrize("gather", ["once", pytest.param("layerwise", marks=pytest.mark.thorough)])
def test_two_ranks_compute_each_prompt_once_and_the_gradient_of_one_rank(
    tiny_model: Path, tmp_path: Path, gather: str
):
    rows = make_groups(6, 40, [7, 3, 9, 5])
    config = ActorConfig(model=str(tiny_model), learning_rate=1e-3)
    assert ActorWorker.shares_prompts(config)
    lengths, groups, cost = np.full(24, 40), rows.numpy("group_id"), ActorWorker.row_cost(config)
    total = lengths + rows.lengths("response_ids")

    def dealt(prompt_costs: np.ndarray | None) -> list[list[int]]:
        sizes = RowSizes(total, groups, costs=cost(total), prompt_costs=prompt_costs)
        mesh = [Coordinates(), Coordinates(dp=1)]
        return [list(share or ()) for share in Dispatch.SPLIT_BY_DP.distribute(sizes, mesh)]

    shares = dealt(cost(lengths))
    ranks = check_ranks(tiny_model, rows, tmp_path, shares, {"gather": gather})
    assert [len(set(groups[share])) for share in shares] == [3, 3]
    # The model reads all tokens of a response but the last.
    assert sum(rank["tokens"] for rank in ranks) == 6 * 40 + 6 * 24 - 24
    by_rows = dealt(None)
    assert sum(len(set(groups[share])) for share in by_rows) > 9, (
        "dealt alone, prompts are computed again"
    )


def test_the_gradient_does_not_depend_on_the_parts_that_rows_come_in(tiny_model: Path, rows: Batch):
    whole, metrics = spmd.one_step(actor(tiny_model), rows)
    order = np.random.default_rng(1).permutation(len(rows)).tolist()
    for cuts in ([1], [7, 8, 20], [22]):
        parts = [part.tolist() for part in np.split(np.array(order), cuts)]
        gradient, found = spmd.one_step(actor(tiny_model, microbatch_tokens=60), rows, parts=parts)
        assert difference(gradient, whole) < 1e-6
        for name in ("loss", "tokens", "grad_norm"):
            assert found[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


def test_in_bfloat16_microbatches_and_parts_change_less_than_rounding(tiny_model: Path, rows: Batch):
    exact, half = spmd.one_step(actor(tiny_model), rows)[0], {"dtype": "bfloat16"}
    whole, metrics = spmd.one_step(actor(tiny_model, **half), rows)
    rounding = difference(whole, exact)
    assert 1e-3 < rounding < 0.05
    for parts in ([list(range(23))], [list(range(22, 6, -1)), list(range(7))]):
        gradient, found = spmd.one_step(
            actor(tiny_model, microbatch_tokens=60, **half), rows, parts=parts
        )
        assert difference(gradient, whole) < rounding and difference(gradient, exact) < 1.3 * rounding
        assert found["tokens"] == metrics["tokens"]
        assert found["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=rounding)


PARTS = ([3, 1, 22], [0, 2], [20, 21], [k for k in range(23) if k not in (0, 1, 2, 3, 20, 21, 22)])


@pytest.mark.parametrize(
    "gather",
    [
        pytest.param("once", marks=pytest.mark.slow),
        pytest.param("layerwise", marks=pytest.mark.thorough),
    ],
)
def test_gradients_of_parts_do_not_depend_on_their_ranks(
    tiny_model: Path, rows: Batch, tmp_path: Path, gather: str
):
    shares = [list(range(20)), [20, 21, 22]]  # neither has rows of every part
    settings = {"gather": gather, "microbatch_tokens": 60}
    check_ranks(tiny_model, rows, tmp_path, shares, settings, PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("gather", ["once", "layerwise"])
def test_the_gradient_does_not_depend_on_tensor_parallel(
    tiny_model: Path, rows: Batch, tmp_path: Path, replicas: int, gather: str
):
    parts = [list(range(r, 23, replicas)) for r in range(replicas)]
    shares = [part for part in parts for _ in range(2)]
    ranks = check_ranks(tiny_model, rows, tmp_path, shares, {"tensor_parallel": 2, "gather": gather})
    assert [r["coordinates"] for r in ranks] == [
        Coordinates(dp=d, tp=t) for d in range(replicas) for t in range(2)
    ]


@pytest.mark.parametrize(
    ("tied", "replicas"),
    [
        pytest.param(False, 1, marks=pytest.mark.thorough),
        *(pytest.param(True, r, marks=pytest.mark.slow) for r in (1, 2)),
    ],
)
def test_gradients_do_not_depend_on_a_sharded_vocabulary(
    tiny_model: Path, rows: Batch, tmp_path: Path, tied: bool, replicas: int
):
    """The 97 ids of `tiny_model` do not divide evenly, so each rank holds all of them. Use 100."""
    torch.manual_seed(0)
    settings = Qwen2Config.from_pretrained(tiny_model, vocab_size=100, tie_word_embeddings=tied)
    Qwen2ForCausalLM(settings).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    shares = [part for r in range(replicas) for part in [list(range(r, 23, replicas))] * 2]
    check_ranks(tmp_path / "model", rows, tmp_path, shares, {"tensor_parallel": 2})


@pytest.fixture(scope="module")
def loud_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with large logits: logprobs down to -60, where a rounded temperature shows."""
    folder = tmp_path_factory.mktemp("models") / "loud"
    causal_lm = AutoModelForCausalLM.from_pretrained(tiny_model)
    causal_lm.model.norm.weight.data.mul_(60.0)
    causal_lm.save_pretrained(folder)
    return folder


ONE_SHARE_SMALL = [list(range(20)), [20, 21, 22]]
IN_BFLOAT16 = {
    "two ranks, layer by layer": (ONE_SHARE_SMALL, {"gather": "layerwise", "microbatch_tokens": 60}),
    "two ranks": (ONE_SHARE_SMALL, {}),
    "tensor parallel": ([list(range(23))] * 2, {"tensor_parallel": 2}),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "split",
    [pytest.param(name, marks=() if "layer" in name else pytest.mark.slow) for name in IN_BFLOAT16],
)
def test_bfloat16_computes_the_same_on_any_number_of_ranks(
    loud_model: Path, rows: Batch, tmp_path: Path, split: str
):
    """Matrix products of other sizes round differently, but the results are closer than to
    float32."""
    shares, settings = IN_BFLOAT16[split]
    still = {
        "dtype": "bfloat16",
        "learning_rate": 1e-12,
    }  # logprobs after the update are of the same weights
    alone = actor(loud_model, **still)
    rows = rows.with_columns(temperature=np.full(len(rows), 0.6, np.float32))
    said = alone.logprobs(rows, into="said")["said"]
    rows = rows.with_columns(old_logprobs=said, reference_logprobs=said)
    gradient, metrics = spmd.one_step(alone, rows)
    exact = actor(loud_model, learning_rate=1e-12)
    rounding = (
        (exact.logprobs(rows, into="said").ragged("said")[0] - torch.tensor(said.flatten().to_numpy()))
        .abs()
        .mean()
    )
    ranks = run_ranks(tmp_path / "run", loud_model, rows, shares, **settings, **still)
    of_row = {row: logprobs for rank in ranks for row, logprobs in rank["after"].items()}
    found = torch.tensor([x for row in range(len(rows)) for x in of_row[row]])
    expected = torch.tensor([x for row in said.to_pylist() for x in row])
    assert float(expected.min()) < -30
    # A temperature rounded to bfloat16, 0.6016, would scale all by 0.997.
    assert float((found * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=5e-4)
    assert float((found - expected).abs().mean()) < rounding
    rounding_of_gradient = difference(gradient, spmd.one_step(exact, rows)[0])
    assert difference(ranks[0]["gradient"], gradient) < rounding_of_gradient
    collected = merge(rank["metrics"]["_metrics"] for rank in ranks if rank["coordinates"].tp == 0)
    assert collected["grad_norm"].value == pytest.approx(metrics["grad_norm"], rel=rounding_of_gradient)


def check_ranks(
    model: Path,
    rows: Batch,
    folder: Path,
    shares: list[list[int]],
    settings: dict[str, Any],
    parts: Sequence[list[int]] = (),
) -> list[dict]:
    alone = actor(model)
    gradient, metrics = spmd.one_step(alone, rows)
    ranks = run_ranks(folder / "run", model, rows, shares, parts=parts, **settings)
    assert difference(ranks[0]["gradient"], gradient) < 1e-6
    collected = merge(r["metrics"]["_metrics"] for r in ranks if r["coordinates"].tp == 0)
    for name, metric in collected.items():
        assert metric.value == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
    after = alone.logprobs(rows, into="after")["after"].to_pylist()
    for rank in ranks:
        for row, logprobs in rank["after"].items():
            assert logprobs == pytest.approx(after[row], abs=2e-4)
    saved = AutoModelForCausalLM.from_pretrained(folder / "run" / "saved")
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, ranks[0]["weights"][name])
    return ranks


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters(tiny_model: Path, rows: Batch):
    exact, half = actor(tiny_model), actor(tiny_model, dtype="bfloat16")
    a, b = (worker.logprobs(rows, into="scored").ragged("scored")[0] for worker in (exact, half))
    assert 0 < (a - b).abs().mean() < 0.03
    frozen = ReferenceWorker(ReferenceConfig(model=tiny_model, dtype="bfloat16"))
    assert {p.dtype for p in frozen.engine.model.parameters()} == {torch.bfloat16}  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(frozen.logprobs(rows, into="scored").ragged("scored")[0], b)
    half.update(rows, loss=spmd.LOSS)
    assert {p.dtype for p in half.engine.model.parameters()} == {torch.float32}  # pyright: ignore[reportAttributeAccessIssue]
    assert {t.dtype for _, t in half.engine.named_tensors()} == {torch.bfloat16}


def test_microbatches_hold_every_row_once_and_keep_to_the_budget():
    lengths = np.random.default_rng(0).integers(1, 300, 1000)
    plan = plan_microbatches(lengths, 1000)
    assert sorted(np.concatenate(plan)) == list(range(1000))
    assert all(len(part) * lengths[part].max() <= 1000 for part in plan)
    padded = sum(len(part) * lengths[part].max() for part in plan)
    assert padded < 1.02 * lengths.sum()
    packed = plan_microbatches(lengths, 1000, packed=True)
    assert sorted(np.concatenate(packed)) == list(range(1000))
    assert all(500 < lengths[part].sum() <= 1000 for part in packed[:-1])
    tailed = np.array([800] + [10] * 500)
    assert all(len(p) * tailed[p].max() <= 2000 for p in plan_microbatches(tailed, 1000, packed=True)), (
        "attention pads"
    )
    assert plan_microbatches(np.array([], dtype=np.int64), 10) == []
    assert [len(p) for p in plan_microbatches(np.array([50, 50]), 10)] == [1, 1]


def test_tokens_of_no_rows_are_none():
    assert tokens_of(np.array([0, 2, 5]), np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("decay", "half_way"), [("constant", 1.0), (("linear", 104), 0.55), (("cosine", 104), 0.55)]
)
def test_the_learning_rate_rises_and_falls(decay: Any, half_way: float):
    schedule = OptimizerConfig(learning_rate=1.0, warmup_steps=4, decay=decay)
    assert schedule.rate(0) == 0.25 and schedule.rate(4) == 1.0
    assert schedule.rate(54) == pytest.approx(half_way)
    assert schedule.rate(1000) == pytest.approx(1.0 if decay == "constant" else 0.1)


@pytest.mark.parametrize("offload", ["nothing", "moments"])
def test_moments_decay_as_configured(tiny_model: Path, rows: Batch, offload: Any):
    """After one step from zero, a moment is 1 - beta times the gradient, or its square."""
    found: dict[float, Any] = {}
    for first, second in ((0.9, 0.95), (0.5, 0.8)):
        worker = actor(tiny_model, betas=(first, second), offload=offload)
        worker.update(rows, loss=PolicyLoss(old="old_logprobs"))
        engine: Any = worker.engine
        state = engine.optimizer.state[engine.model.causal_lm.get_input_embeddings().weight]
        found[first] = [state[name].cpu() for name in ("exp_avg", "exp_avg_sq")]
        worker.close()
    torch.testing.assert_close(found[0.5][0], found[0.9][0] * 5)
    torch.testing.assert_close(found[0.5][1], found[0.9][1] * 4)
    with pytest.raises(UserError, match=r"ActorConfig.betas.1: input should be less than 1, not 1.0"):
        ActorConfig(model="m", betas=(0.9, 1.0))


def test_a_decay_without_an_end_is_refused():
    with pytest.raises(UserError, match=r"needs more steps than frozen_steps and warmup_steps \(5\)"):
        OptimizerConfig(decay=("linear", 5), warmup_steps=5)
    wrong: Any = "linear"
    with pytest.raises(UserError, match=r"decay must be .*\(\"linear\", steps\) .*, not 'linear'"):
        OptimizerConfig(decay=wrong)
    with pytest.raises(UserError, match=r'no setting \'decay_steps\' .*; set decay=\("linear", steps\)'):
        OptimizerConfig(decay_steps=5)  # pyright: ignore[reportCallIssue]


def test_rows_that_cannot_be_scored_are_named():
    with pytest.raises(UserError, match="row with sample_id 8 has an empty prompt"):
        check_rows(Batch.of(sample_id=[7, 8], prompt_ids=[[1], []], response_ids=[[1], [2]]), ())
    with pytest.raises(
        UserError, match="row 1: column 'advantages' has 1 values for a response of 2 tokens"
    ):
        check_rows(
            Batch.of(prompt_ids=[[1], [1]], response_ids=[[1], [2, 3]], advantages=[[1.0], [1.0]]),
            ["advantages"],
        )


def test_a_token_that_the_model_does_not_have_is_named(tiny_model: Path):
    with pytest.raises(UserError, match=r"column 'response_ids' has token id 97; .* has ids 0 to 96"):
        actor(tiny_model).logprobs(Batch.of(prompt_ids=[[1]], response_ids=[[97]]))


@pytest.mark.thorough
def test_gradients_of_several_ranks_in_bfloat16_are_near_those_in_float32(
    tiny_model: Path, rows: Batch, tmp_path: Path
):
    """Each sum is rounded to 8 bits, a relative error of 2^-9. The gradient is at most 1 % off."""
    shares = [list(range(0, len(rows), 2)), list(range(1, len(rows), 2))]
    settings: dict[str, Any] = {"dtype": "bfloat16", "microbatch_tokens": 100}
    rounded, exact = (
        run_ranks(tmp_path / dtype, tiny_model, rows, shares, gradients=dtype, **settings)[0]["gradient"]
        for dtype in ("bfloat16", "float32")
    )
    off = sum(float((rounded[n].double() - exact[n].double()).square().sum()) for n in exact)
    whole = sum(float(g.double().square().sum()) for g in exact.values())
    assert 1e-4 < (off / whole) ** 0.5 < 1e-2
    assert all(g.dtype == torch.float32 for g in rounded.values())


def test_rounded_gradients_of_exact_passes_are_refused():
    with pytest.raises(UserError, match='gradients="bfloat16" would round the float32 gradients'):
        ActorConfig(model="m", gradients="bfloat16")
