"""Routers of mixtures of experts: replayed routes, and the load-balancing loss.

Both must equal `transformers` on single rows in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import families
import numpy as np
import pyarrow as pa
import pytest
import torch
from family_cases import check, config_of, on_one_rank, run_ranks, write_models
from spmd import one_step
from torch import Tensor
from torch.nn import functional as F
from training_rows import make_rows

from weft.algorithms.policy_loss import NegativeLogLikelihood
from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.generation.engine import GenerationRequest, Response, generate
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.reference import ReferenceConfig, ReferenceWorker
from weft.workers.training.routers import Balance, balance_gradient

LAYERS, CHOSEN, EXPERTS = 2, 2, 4
MODELS = ("Mixtral", "Qwen3 MoE", "GPT-OSS")
COEFFICIENT = 10.0
NO_ROWS = TableSource("no rows", pa.table({"x": []}))
Wanted = Callable[[Tensor, Tensor], Tensor]
"""Weights of prescribed experts: [T, experts] logits, [T, chosen] indices -> [T, chosen]."""
WEIGHTS: dict[str, Wanted] = {
    "Mixtral": lambda logits, taken: F.normalize(logits.softmax(-1).gather(-1, taken), 1, -1),
    "Qwen3 MoE": lambda logits, taken: logits.softmax(-1).gather(-1, taken),
    "GPT-OSS": lambda logits, taken: logits.gather(-1, taken).softmax(-1),
}


def with_routes(rows: Batch, *, same: bool = False) -> Batch:
    """Add random routes. With `same`, rows with equal prompts have equal routes on the prompt."""
    rng = np.random.default_rng(1)
    lengths = rows.lengths("prompt_ids") + rows.lengths("response_ids") - 1
    order = (
        rng.random((int(lengths.max()) * LAYERS, EXPERTS))
        .argsort(-1)[:, :CHOSEN]
        .reshape(-1, LAYERS, CHOSEN)
    )
    drawn = (
        rng.random((int(lengths.sum()) * LAYERS, EXPERTS))
        .argsort(-1)[:, :CHOSEN]
        .reshape(-1, LAYERS, CHOSEN)
    )
    each = [order[:n] for n in lengths] if same else np.split(drawn, np.cumsum(lengths)[:-1])
    return rows.with_columns(routes=[one.ravel() for one in each])


def with_equal_prompts(rows: Batch) -> Batch:
    """Give the second row of each pair the prompt of the first."""
    prompts = [[*range(5, 17), number // 2] for number in range(len(rows))]
    return rows.with_columns(prompt_ids=prompts)


ROWS = make_rows(9)
ROUTED = with_routes(ROWS)
ROWS_BY_NAME = {
    "chosen": ROWS,
    "shared prompts": with_equal_prompts(ROWS),
    "replayed": ROUTED,
    "replayed, shared prompts": with_routes(with_equal_prompts(ROWS), same=True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("mixtures"), (*MODELS, "PhiMoE", "Qwen3"))


def actor(models: Path, name: str, **settings: Any) -> ActorWorker:
    return ActorWorker(ActorConfig(**config_of(models, name, **settings)))


@dataclass(frozen=True)
class Expected:
    """Results of `transformers` in float64."""

    said: list[list[float]]
    """Log-probabilities of responses."""
    likelihood: dict[str, Tensor]
    """Gradient of the mean likelihood."""
    balance: dict[str, Tensor]
    """Gradient of the load-balancing loss."""
    router_loss: float

    def with_loss(self, coefficient: float) -> dict[str, Tensor]:
        return {
            name: of + coefficient * self.balance.get(name, torch.zeros_like(of))
            for name, of in self.likelihood.items()
        }


@cache
def reference(folder: Path, rows: str) -> Expected:
    """Compute row by row; routers take the rows' routes in a forward pass written here."""
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    name, given = folder.name, ROWS_BY_NAME[rows]
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float64
    )
    model: Any = loaded.eval()
    model.set_experts_implementation("eager")
    seen: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    taken: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    current: list[Tensor | None] = [None]
    for layer, block in enumerate(model.model.layers):
        gate = block.mlp.router if name == "GPT-OSS" else block.mlp.gate

        def forward(
            hidden: Tensor, gate: Any = gate, layer: int = layer
        ) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(
                hidden.reshape(-1, hidden.shape[-1]), gate.weight, getattr(gate, "bias", None)
            )
            routes = current[0]
            indices = logits.topk(CHOSEN).indices if routes is None else routes[:, layer]
            seen[layer].append(logits)
            taken[layer].append(indices)
            return logits, WEIGHTS[name](logits, indices), indices

        gate.forward = forward
    said, likelihood, tokens = [], torch.zeros((), dtype=torch.float64), 0
    for row in given.to_rows():
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        routes = row.get("routes")
        current[0] = None if routes is None else torch.tensor(routes).view(-1, LAYERS, CHOSEN)
        logits = model(ids[:, :-1], use_cache=False).logits[0] / row["temperature"]
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[len(row["prompt_ids"]) - 1 :, 0]
        said.append(logprobs.tolist())
        mask = torch.tensor(row["response_mask"])
        likelihood, tokens = likelihood - (logprobs * mask).sum(), tokens + int(mask.sum())
    logits_of: Any = tuple(torch.cat(logits) for logits in seen)
    loads = torch.bincount(
        torch.cat([indices.flatten() for of in taken for indices in of]), minlength=EXPERTS
    )
    probabilities = torch.cat(logits_of).softmax(-1).sum(0)
    balance = EXPERTS * (loads * probabilities).sum() / sum(len(logits) for logits in logits_of) ** 2
    if "routes" not in given:  # the function of `transformers` only knows the routers' own choices
        theirs: Any = load_balancing_loss_func(logits_of, EXPERTS, CHOSEN)
        assert theirs.item() == pytest.approx(balance.item(), rel=1e-6)
    named = dict(model.named_parameters())
    gradients = [
        torch.autograd.grad(of, list(named.values()), retain_graph=True, allow_unused=True)
        for of in (likelihood / tokens, balance)
    ]
    both = [{n: g for n, g in zip(named, each, strict=True) if g is not None} for each in gradients]
    return Expected(said, both[0], both[1], balance.item())


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients, relative to the second."""
    squares = sum(
        float((found[name].double() - gradient).square().sum()) for name, gradient in expected.items()
    )
    return (squares / sum(float(gradient.square().sum()) for gradient in expected.values())) ** 0.5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", ["replayed", "replayed, shared prompts"])
def test_the_experts_of_the_rows_are_taken_and_weighed_by_the_models_own_scores(
    models: Path, name: str, rows: str
):
    worker, expected = actor(models, name, microbatch_tokens=60), reference(models / name, rows)
    given = ROWS_BY_NAME[rows]
    for found, wanted in zip(
        worker.logprobs(given)["old_logprobs"].to_pylist(), expected.said, strict=True
    ):
        assert found == pytest.approx(wanted, abs=2e-5)
    gradient, metrics = one_step(worker, given, NegativeLogLikelihood())
    assert off(gradient, expected.likelihood) < 1e-5
    assert 0 < metrics["moved_routes"] < 1  # the routes are random


@pytest.mark.parametrize("again", [True, "elementwise"])
def test_layers_that_are_computed_a_second_time_take_the_same_experts(models: Path, again: Any):
    plain, twice = (
        one_step(
            actor(models, "Mixtral", router_loss=COEFFICIENT, **settings),
            ROUTED,
            NegativeLogLikelihood(),
        )
        for settings in ({}, {"activation_checkpointing": again})
    )
    assert off(twice[0], plain[0]) < 1e-6
    for name in ("expert_load", "moved_routes", "router_entropy", "router_loss"):
        assert twice[1][name] == pytest.approx(plain[1][name])


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, "chosen") for name in MODELS),
        ("Mixtral", "shared prompts"),
        ("Mixtral", "replayed"),
        ("Mixtral", "replayed, shared prompts"),
    ],
)
def test_the_loss_of_routers_is_that_of_transformers_for_all_rows_however_they_are_cut(
    models: Path, name: str, rows: str
):
    expected = reference(models / name, rows)
    gradient = expected.with_loss(COEFFICIENT)
    assert off(expected.likelihood, gradient) > 2e-3  # replay makes a difference
    for tokens in (30, 1000):
        worker = actor(models, name, router_loss=COEFFICIENT, microbatch_tokens=tokens)
        found, metrics = one_step(worker, ROWS_BY_NAME[rows], NegativeLogLikelihood())
        assert off(found, gradient) < 1e-5
        assert metrics["router_loss"] == pytest.approx(expected.router_loss, rel=1e-5)


def test_without_the_setting_nothing_is_added_and_experts_are_watched(models: Path):
    found, metrics = one_step(actor(models, "Mixtral"), ROWS, NegativeLogLikelihood())
    expected = reference(models / "Mixtral", "chosen")
    assert off(found, expected.likelihood) < 1e-5
    assert metrics["router_loss"] == pytest.approx(expected.router_loss, rel=1e-5)
    assert 1 <= metrics["expert_load"] <= metrics["max_expert_load"] <= EXPERTS / CHOSEN
    assert 0 < metrics["router_entropy"] <= np.log(EXPERTS)
    assert "moved_routes" not in metrics


def test_the_gradient_of_a_balance_is_that_of_its_formula():
    torch.manual_seed(0)
    logits = torch.randn(5, EXPERTS, dtype=torch.float64, requires_grad=True)
    counts, frequencies = (
        torch.tensor([1.0, 0.0, 3.0, 1.0, 2.0]),
        torch.tensor([0.7, 0.1, 0.9, 0.3], dtype=torch.float64),
    )
    (2.5 * (counts[:, None] * logits.softmax(-1) * frequencies).sum()).backward()
    assert logits.grad is not None
    torch.testing.assert_close(
        balance_gradient(logits.detach(), counts, Balance(2.5, frequencies)), logits.grad
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_parallel": 2}, {"sequence_parallel": 2}],
    ids=["data", "tensor", "sequence"],
)
@pytest.mark.parametrize("rows", [ROWS, ROUTED], ids=["chosen", "replayed"])
def test_two_ranks_find_the_same_as_one(
    models: Path, tmp_path: Path, settings: dict[str, Any], rows: Batch
):
    names = ["Mixtral", "Qwen3 MoE"] if not settings else ["Mixtral"]
    alone = on_one_rank(models, names, rows, router_loss=COEFFICIENT)
    replica = 2 if settings else 1
    common = {"router_loss": COEFFICIENT, "microbatch_tokens": 60}
    ranks = run_ranks(models, tmp_path, 2, names, replica, rows=rows, **common, **settings)
    for name in names:
        check(tmp_path, name, ranks, alone[name], replica)


# Routes recorded by generators


def sampled(folder: Path) -> list[Response]:
    engine = TransformersEngine(str(folder), routes=True)
    prompts = [[5, 6, 7, 8], [9], [5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9]]
    requests = [
        GenerationRequest(number, np.array(ids, np.int32), seed=number)
        for number, ids in enumerate(prompts)
    ]
    steps = generate(engine, requests, Sampling(max_tokens=9, temperature=1.5))
    found = sorted((one for step in steps for one in step), key=lambda one: one.request_id)
    engine.close()
    return found


def rows_of(responses: list[Response]) -> Batch:
    prompts = [[5, 6, 7, 8], [9], [5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9]]
    return Batch.of(
        sample_id=list(range(len(prompts))),
        prompt_ids=prompts,
        response_ids=[one.token_ids for one in responses],
        response_logprobs=[one.logprobs for one in responses],
        temperature=np.full(len(prompts), 1.5, np.float32),
        routes=[one.routes.ravel() for one in responses if one.routes is not None],
    )


@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
def test_recorded_routes_equal_the_trainers_choices_in_float32(models: Path, name: str):
    rows = rows_of(sampled(models / name))
    worker = actor(models, name)
    replayed = worker.logprobs(rows)["old_logprobs"].values.to_numpy()
    chosen = worker.logprobs(rows.select([c for c in rows.columns if c != "routes"]))[
        "old_logprobs"
    ].values.to_numpy()
    assert np.abs(replayed - chosen).max() < 1e-6
    assert replayed == pytest.approx(rows["response_logprobs"].values.to_numpy(), abs=2e-5)
    _, metrics = one_step(worker, rows, NegativeLogLikelihood())
    assert metrics["moved_routes"] == 0


def test_a_reference_replays_the_same_routes_by_default(models: Path):
    worker = ReferenceWorker(ReferenceConfig(model=models / "Mixtral"))
    expected = reference(models / "Mixtral", "replayed").said
    replayed, own = (
        worker.logprobs(ROUTED, replay=on)["reference_logprobs"].to_pylist() for on in (True, False)
    )
    assert replayed[0] == pytest.approx(expected[0], abs=2e-5)
    assert own[0] != pytest.approx(expected[0], abs=1e-3)
    dense = ReferenceWorker(ReferenceConfig(model=models / "Qwen3"))
    assert len(dense.logprobs(ROUTED)) == len(ROUTED)  # it has no routers


def test_a_mismatch_is_refused_by_name(models: Path):
    worker = actor(models, "Mixtral")
    short = ROUTED.with_columns(routes=[row["routes"][:-1] for row in ROUTED.to_rows()])
    with pytest.raises(
        UserError,
        match=r"sample_id 0: column 'routes' has \d+ values, and .*Mixtral \(2 layers, 2 experts",
    ):
        worker.logprobs(short)
    wrong = ROUTED.with_columns(routes=[[9] * len(row["routes"]) for row in ROUTED.to_rows()])
    with pytest.raises(UserError, match=r"column 'routes' has expert 9; .*Mixtral has experts 0 to 3"):
        worker.logprobs(wrong)
    with pytest.raises(UserError, match="PhiMoE' cannot replay the column 'routes'"):
        actor(models, "PhiMoE").logprobs(ROUTED)
    with pytest.raises(UserError, match=r"router_loss=10: model .*PhiMoE' has no routers"):
        actor(models, "PhiMoE", router_loss=COEFFICIENT)
    with pytest.raises(
        UserError, match=r"routes=True: model .*PhiMoE' has no routers whose choice can be recorded"
    ):
        TransformersEngine(str(models / "PhiMoE"), routes=True)
    with pytest.raises(UserError, match=r"router_loss=10: .*Qwen3 is not a mixture of experts"):
        ActorWorker.check(
            ActorConfig(**config_of(models, "Qwen3", router_loss=COEFFICIENT)), [], NO_ROWS
        )


def test_families_have_the_settings_of_this_file():
    for name in MODELS:
        settings = families.make_family(name).config
        assert (settings.num_hidden_layers, settings.num_experts_per_tok) == (LAYERS, CHOSEN)
