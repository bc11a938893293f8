"""Recorded expert routes of both engines equal the choices of `transformers` routers on single
rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make
from vllm_groups import experts_group

from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.dataflow.errors import GenerationError
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import whole
from weft.workers.generation.engine import GenerationEngine, GenerationRequest, Response, generate
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig

LAYERS, CHOSEN = 2, 2
SETTINGS = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 32,
    "initializer_range": 0.1,
    "vocab_size": 100,
}
PROMPTS = [[5, 6, 7, 8], [9], [5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9]]
REQUESTS = [
    GenerationRequest(number, np.array(ids, np.int32), seed=number) for number, ids in enumerate(PROMPTS)
]
SAMPLING = Sampling(max_tokens=9, stop=None)


@pytest.fixture(scope="module")
def model() -> Any:
    return make("qwen3_moe", SETTINGS)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def experts(kind: str) -> Iterator[None]:
    with experts_group() if kind == "vllm" else nullcontext():
        yield


def worker_of(folder: Path, engine: Any, **settings: Any) -> RolloutWorker:
    return RolloutWorker(
        RolloutConfig(
            model=folder, engine=engine, routes=True, max_num_seqs=8, kv_cache_gib=0.05, **settings
        )
    )


def sampled(engine: GenerationEngine, requests: list[GenerationRequest] = REQUESTS) -> list[Response]:
    found = (one for step in generate(engine, requests, SAMPLING) for one in step)
    return sorted(found, key=lambda one: one.request_id)


def chosen_alone(model: Any, prompt: list[int], response: Response) -> torch.Tensor:
    """Return the experts chosen by the model's routers, [P + L - 1, layers, k], in ascending
    order."""
    seen: list[torch.Tensor] = []
    hooks = [
        block.mlp.gate.register_forward_hook(lambda _m, _i, out: seen.append(out[2]))
        for block in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([[*prompt, *response.token_ids[:-1].tolist()]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).sort(-1).values


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_routes_are_those_of_each_row_alone_under_the_weights_that_it_was_sampled_with(
    kind: str, experts: None, model: Any, folder: Path
):
    worker = worker_of(folder, kind)
    engine = worker.engine
    publisher = WeightPublisher()
    try:
        first = sampled(engine)
        for response in first:
            assert response.routes is not None and response.routes.dtype == np.uint16
            expected = chosen_alone(model, PROMPTS[response.request_id], response)
            assert torch.equal(torch.from_numpy(np.sort(response.routes.astype(np.int64), -1)), expected)
        staggered: list[Response] = []
        for request in REQUESTS:  # they decode together, but begin one after the other
            engine.submit(request, SAMPLING)
            staggered += engine.step()
        while engine.num_unfinished:
            staggered += engine.step()
        for response in staggered:
            alone = first[response.request_id]
            assert response.token_ids.tolist() == alone.token_ids.tolist()
            assert response.routes is not None and alone.routes is not None
            assert np.array_equal(np.sort(response.routes, -1), np.sort(alone.routes, -1))
        steps = generate(engine, REQUESTS, SAMPLING)
        for _ in range(3):
            assert next(steps) == []
        assert steps.send([0]) == []  # cancel the first request
        weights = {
            name: p.detach().flip(0).contiguous() if "mlp.gate" in name else p.detach()
            for name, p in model.named_parameters()
        }
        engine.update_weights(publisher.publish(whole(published_names(worker, weights)), 1))
        publisher.finish()
        later = [one for step in steps for one in step]
        assert {one.request_id for one in later} == {1, 2, 3}
        # continues under other routers, but keeps its earlier tokens and routes
        for response in later:
            before = int((response.versions == 0).sum())
            assert 0 < before < len(response.versions)
            same = len(PROMPTS[response.request_id]) + before - 1
            assert response.routes is not None
            kept = first[response.request_id].routes
            assert kept is not None and len(kept) == len(response.routes)
            assert np.array_equal(response.routes[:same], kept[:same])
            assert not np.array_equal(response.routes[same:], kept[same:])
    finally:
        publisher.close()
        worker.close()


def published_names(worker: RolloutWorker, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename tensors as in the checkpoint, with one tensor per expert."""
    found = {}
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = (
                zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
                if last == "gate_up_proj"
                else [(last, expert)]
            )
            found |= {f"{path}.{number}.{part}.weight": one.contiguous() for part, one in parts}
    return found


def test_a_worker_writes_them_as_a_column(folder: Path):
    worker = worker_of(folder, "transformers")
    rows = Batch.of(sample_id=[0, 1], group_id=[0, 1], prompt_ids=[[5, 6, 7], [8]])
    found = [
        children.rows
        for item in worker.generate(rows, n=2, sampling=SAMPLING)
        if item
        for children in [item[0]]
    ]
    for row in Batch.concat(found).to_rows():
        prompt = 3 if row["parent_id"] == 0 else 1
        assert len(row["routes"]) == (prompt + len(row["response_ids"]) - 1) * LAYERS * CHOSEN
    worker.close()


@pytest.mark.vllm
def test_on_a_cpu_prefixes_that_are_not_computed_again_have_no_routes(folder: Path):
    with pytest.raises(GenerationError, match="routes=True and prefix_caching=True"):
        worker_of(folder, "vllm", prefix_caching=True)


@pytest.mark.gpu
@pytest.mark.vllm
def test_on_a_gpu_vllm_returns_them_itself(model: Any, folder: Path):
    worker = worker_of(folder, "vllm", dtype="float32")
    try:
        for response in sampled(worker.engine):
            assert response.routes is not None
            expected = chosen_alone(model, PROMPTS[response.request_id], response)
            assert torch.equal(torch.from_numpy(np.sort(response.routes.astype(np.int64), -1)), expected)
    finally:
        worker.close()
