"""Several adapters over one model in the engine `transformers`, and runs that train them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import weft
from weft.algorithms.advantages import group_advantages
from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import GenerationError, WeightSyncError
from weft.resharding.publisher import WeightPublisher
from weft.resharding.weights import whole
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.generation.engine import GenerationRequest, Requests, Response, generate
from weft.workers.generation.transformers_engine import TransformersEngine
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.training.adapter import serve_adapters
from weft.workers.training.lora import Lora

FOUR = {
    "plain": Lora(rank=3, alpha=6),
    "wide": Lora(rank=9, alpha=4),
    "queries": Lora(rank=2, alpha=8, targets=("q_proj",)),
    "dora": Lora(rank=4, alpha=8, dora=True),
}
PROMPTS = [np.array(ids, np.int32) for ids in ([5, 6, 7], [8, 9], [10, 11, 12, 13, 14], [15])]


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher()
    yield publisher
    publisher.close()


def new_weights(
    engine: TransformersEngine, publisher: WeightPublisher, policy: str, version: int
) -> None:
    """Send the engine random weights of an adapter."""
    generator = torch.Generator().manual_seed(version)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * (0.3 if "magnitude" not in name else 1.0)
        for name, tensor in engine._adapters[policy].tensors().items()
    }
    checksum = engine.update_weights(publisher.publish(whole(tensors), version), policy)
    assert checksum == publisher.finish()


def engine_of(folder: Path, publisher: WeightPublisher) -> TransformersEngine:
    engine = TransformersEngine(str(folder), adapters=FOUR)
    for version, name in enumerate(FOUR, 3):
        new_weights(engine, publisher, name, version)
    return engine


def requests_to(*policies: str) -> list[GenerationRequest]:
    return [
        GenerationRequest(10 * k + row, ids, seed=row, policy=name)
        for k, name in enumerate(FOUR)
        for row, ids in enumerate(PROMPTS)
        if name in policies
    ]


def responses(engine: TransformersEngine, *policies: str, temperature: float = 0) -> dict[int, Response]:
    sampling = weft.Sampling(max_tokens=12, temperature=temperature, stop=None)
    steps = generate(engine, requests_to(*policies), sampling)
    return {one.request_id: one for step in steps for one in step}


def same(one: Response, other: Response) -> bool:
    """Whether tokens, log-probabilities and versions are equal to the bit."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("token_ids", "logprobs", "versions")
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mixed_batch_of_four_adapters_equals_each_adapter_alone(
    tiny_model: Path, publisher: WeightPublisher, temperature: float
):
    engine = engine_of(tiny_model, publisher)
    mixed = responses(engine, *FOUR, temperature=temperature)
    assert len(mixed) == len(FOUR) * len(PROMPTS)
    for version, name in enumerate(FOUR, 3):
        alone = responses(engine, name, temperature=temperature)
        assert all(same(one, mixed[id]) for id, one in alone.items())
        assert {int(v) for one in alone.values() for v in one.versions} == {version}
    first = [mixed[10 * k].token_ids.tolist() for k in range(len(FOUR))]
    assert all(first.count(ids) == 1 for ids in first), "the adapters differ"


def test_requests_to_another_adapter_join_while_others_decode(
    tiny_model: Path, publisher: WeightPublisher
):
    engine = engine_of(tiny_model, publisher)
    alone = responses(engine, "plain") | responses(engine, "dora")
    sampling = weft.Sampling(max_tokens=12, temperature=0, stop=None)
    own, late = Requests(engine), Requests(engine)
    for request in requests_to("plain"):
        own.submit(request, sampling)
    found = [one for _ in range(5) for one in own.step()]
    for request in requests_to("dora"):
        late.submit(request, sampling)
    dropped = late.submit(replace(requests_to("dora")[0], request_id=99), sampling)
    late.abort([dropped])
    assert engine.num_unfinished == 2 * len(PROMPTS)
    while own.num_unfinished or late.num_unfinished:
        found += [*own.step(), *late.step()]
    assert {one.request_id for one in found} == alone.keys()
    assert all(same(one, alone[one.request_id]) for one in found)


def test_a_new_version_of_one_adapter_leaves_the_others(tiny_model: Path, publisher: WeightPublisher):
    engine = engine_of(tiny_model, publisher)
    before = responses(engine, *FOUR)
    new_weights(engine, publisher, "wide", 9)
    assert engine.version == 9
    for id, one in responses(engine, *FOUR).items():
        if list(FOUR)[id // 10] == "wide":
            assert set(one.versions.tolist()) == {9} and not same(one, before[id])
        else:
            assert same(one, before[id])


def test_a_policy_without_weights_rejects_requests_and_the_others_do_not(
    tiny_model: Path, publisher: WeightPublisher
):
    engine = TransformersEngine(str(tiny_model), adapters=FOUR)
    new_weights(engine, publisher, "wide", 1)
    assert len(responses(engine, "wide")) == len(PROMPTS)
    with pytest.raises(GenerationError, match="policy 'plain': no complete version of the weights"):
        responses(engine, "plain")
    with pytest.raises(GenerationError, match=r"no policy 'wild'; did you mean 'wide'\?; it serves"):
        engine.submit(GenerationRequest(0, PROMPTS[0], policy="wild"), weft.Sampling(max_tokens=1))
    wrong = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 2)}
    with pytest.raises(WeightSyncError):
        engine.update_weights(publisher.publish(whole(wrong), 2), "wide")
    with pytest.raises(GenerationError, match="policy 'wide': no complete version"):
        responses(engine, "wide")
    with pytest.raises(WeightSyncError, match="weights version 3: the engine serves no policy 'wild'"):
        engine.update_weights(publisher.publish(whole(wrong), 3), "wild")


def test_adapters_are_served_by_name_and_layer(tiny_model: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    served = dict(zip(FOUR, serve_adapters(model, [*FOUR.values()]), strict=True))
    tensors = {name: adapter.tensors() for name, adapter in served.items()}
    layers = {"self_attn.q_proj"}
    assert {
        n.split(".lora_")[0].split("layers.0.")[-1] for n in tensors["queries"] if ".0." in n
    } == layers
    assert tensors["plain"].keys() == tensors["wide"].keys() < tensors["dora"].keys()
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    assert [len(tensors[policy][name]) for policy in ("plain", "wide", "dora")] == [3, 9, 4]


def small_update(worker: ActorWorker, seed: int) -> None:
    engine: Any = worker.engine
    torch.manual_seed(seed)
    for name, parameter in engine.model.causal_lm.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.05)


def test_a_rollout_samples_with_the_adapter_of_the_named_actor(tiny_model: Path):
    loras = {"a": Lora(rank=4, published="adapter"), "b": Lora(rank=2, published="adapter")}
    workers = {
        name: ActorWorker(ActorConfig(model=str(tiny_model), lora=lora)) for name, lora in loras.items()
    }
    config = RolloutConfig(model=str(tiny_model), engine="transformers", adapters=loras)
    rollout = RolloutWorker(config)
    for version, (name, worker) in enumerate(workers.items(), 2):
        small_update(worker, version)
        checksum = rollout.receive_weights(worker.publish_weights(version), policy=name)
        worker.compare_canaries({"rollout[0]": rollout.canary(policy=name)}, version)
        assert worker.finish_publishing(version).checksum == checksum
    ids = np.arange(len(PROMPTS))
    prompts = Batch.of(sample_id=ids, group_id=ids, parent_id=ids, prompt_ids=PROMPTS)
    for version, (name, worker) in enumerate(workers.items(), 2):
        steps = rollout.generate(prompts, n=2, sampling=weft.Sampling(max_tokens=8), policy=name)
        rows = Batch.concat([part[0].rows for part in steps if part])
        assert set(rows["policy"].to_pylist()) == {name}
        assert set(rows.ragged_numpy("response_versions")[0].tolist()) == {version}
        rows = rows.with_columns(prompt_ids=[PROMPTS[k] for k in rows.numpy("parent_id").tolist()])
        own = worker.logprobs(rows, into="own").ragged_numpy("own")[0]
        assert np.abs(own - rows.ragged_numpy("response_logprobs")[0]).max() < 1e-4
        worker.close()


# Runs


class Shares:
    """Rewards that need no text: the share of even, or of odd tokens."""

    def __init__(self, parity: int) -> None:
        self.parity = parity

    def score(self, samples: Any) -> Any:
        return share_of_tokens(samples, parity=self.parity)


@weft.node(reads=("response_ids",), writes=("reward",))
def share_of_tokens(samples: Batch, *, parity: int) -> Batch:
    shares = [np.mean(np.array(ids) % 2 == parity) for ids in samples["response_ids"].to_pylist()]
    return samples.with_columns(reward=np.array(shares, np.float32))


SOURCE = weft.TableSource(
    "prompts", pa.table({"prompt_ids": [[5, 6, 7], [8, 9], [10, 11], [12, 13, 14]]})
)
SAMPLING = weft.Sampling(max_tokens=6)


@weft.graph
def parities(prompts: Any, *, rollout: Any, even: Any, odd: Any) -> None:
    for parity, actor in enumerate((even, odd)):
        samples = rollout.generate(prompts, n=4, sampling=SAMPLING, policy=actor)
        samples = group_advantages(Shares(parity).score(samples))
        actor.update(samples, loss=PolicyLoss())


def actor_of(model: Path, name: str, rank: int) -> Any:
    lora = Lora(rank=rank, published="adapter")
    return weft.group(weft.ActorWorker, name=name, model=str(model), lora=lora, learning_rate=1e-2)


def trained(
    model: Path, root: Path, *names: str, steps: int = 4, **settings: Any
) -> tuple[list[dict[str, float]], Mapping[str, Path]]:
    """Train these adapters, and return the metrics and the folders of the saved adapters."""
    actors = {name: actor_of(model, name, rank) for rank, name in zip((4, 2), names, strict=False)}
    rollout: Any = weft.group(weft.RolloutWorker, model=str(model), engine="transformers")
    rollout.follows(*actors.values())
    if len(actors) > 1:
        graph = parities(SOURCE, rollout=rollout, **actors)
    else:
        (actor,) = actors.values()
        more = {"reward": Shares(0), "actor": actor, "n": 4, "sampling": SAMPLING}
        graph = grpo(SOURCE, rollout=weft.with_policy(rollout, actor), **more)
    settings = {"name": "-".join([*names, str(steps)]), "root": root, "progress": False} | settings
    with weft.Driver(
        graph, schedule=weft.Synchronous(steps=steps, prompts_per_step=4), **settings
    ) as driver:
        metrics = driver.run()
        folders = {name: driver.directory.path / name for name in actors}
        for name, actor in actors.items():
            driver.call(actor, "save", path=folders[name])
    return metrics, folders


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def equal(one: Path, other: Path) -> bool:
    mine, theirs = saved(one), saved(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.thorough
def test_an_adapter_learns_the_same_beside_another_and_alone(tiny_model: Path, tmp_path: Path):
    both, folders = trained(tiny_model, tmp_path, "even", "odd")
    alone, own = trained(tiny_model, tmp_path, "even")
    assert equal(folders["even"], own["even"])
    for mine, theirs in zip(alone[1:], both[1:], strict=True):
        assert all(theirs[name] == mine[name] for name in ("even/loss", "even/grad_norm"))
        assert max(theirs[f"{name}/mean_logprob_gap"] for name in ("even", "odd")) < 1e-5
    # Only adapters travel. The model has about 5 times as many bytes.
    assert max(row[f"{name}/weights_bytes"] for row in both for name in ("even", "odd")) < 100_000


@pytest.mark.thorough
def test_a_resumed_run_restores_the_adapters_of_all_actors(tiny_model: Path, tmp_path: Path):
    whole_run, wanted = trained(tiny_model, tmp_path, "even", "odd")
    checkpoint = {"checkpoint": weft.CheckpointConfig(every=2), "name": "run"}
    trained(tiny_model, tmp_path, "even", "odd", steps=2, **checkpoint)
    resumed, found = trained(tiny_model, tmp_path, "even", "odd", resume="latest", **checkpoint)
    assert resumed[-1]["step"] == 4 and len(whole_run) == 5
    assert all(equal(found[name], wanted[name]) for name in ("even", "odd"))
