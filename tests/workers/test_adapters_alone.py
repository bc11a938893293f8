"""Publishing adapters alone: the decision, and small updates that merged weights would round
away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import weft
from weft.algorithms.grpo import grpo
from weft.dataflow.batch import Batch
from weft.dataflow.errors import GenerationError, UserError
from weft.workers.actor import ActorConfig, ActorWorker, agree_on_adapters
from weft.workers.generation.engine import GenerationRequest, generate
from weft.workers.reference import ReferenceWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.rollout_config import RolloutConfig
from weft.workers.training.lora import Lora

LORA = Lora(rank=4, alpha=8)


def a_pair(actor: dict[str, Any], rollout: dict[str, Any]) -> tuple[Any, Any]:
    """Return handles of an actor and a rollout that follows it."""
    leader = weft.group(weft.ActorWorker, name="actor", **{"model": "folder", "lora": LORA, **actor})
    follower = weft.group(weft.RolloutWorker, name="rollout", **{"model": "folder", **rollout})
    follower.follows(leader)
    return leader, follower


@pytest.mark.parametrize(
    ("actor", "rollout", "published"),
    [
        ({"dtype": "bfloat16"}, {}, "adapter"),
        ({}, {}, "merged"),  # float32 loses nothing
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, "merged"),
        ({"dtype": "bfloat16"}, {"model": "another"}, "merged"),
        ({"dtype": "bfloat16", "transport": "vllm:nccl"}, {}, "merged"),
        ({"dtype": "bfloat16", "lora": Lora(dora=True)}, {}, "merged"),
        ({"dtype": "bfloat16", "lora": Lora(dora=True)}, {"engine": "transformers"}, "adapter"),
        ({"dtype": "bfloat16", "lora": Lora(rank=600)}, {}, "merged"),
        ({"dtype": "bfloat16"}, {"quantization": "int8"}, "merged"),
        ({"dtype": "bfloat16", "lora": Lora(published="merged")}, {}, "merged"),
        ({"lora": Lora(published="adapter")}, {}, "adapter"),
    ],
)
def test_the_adapter_travels_alone_in_bfloat16_where_all_followers_serve_it(
    actor: dict[str, Any], rollout: dict[str, Any], published: str
):
    leader, follower = a_pair(actor, rollout)
    for _ in range(2):  # a second decision starts from the setting, so it gives the same result
        agree_on_adapters([leader, follower])
        assert leader.config.lora.published == published
        if published == "adapter":
            assert follower.config.adapters == {"actor": leader.config.lora}
            assert follower.config.dtype == leader.config.dtype
        else:
            assert follower.config == follower.given
    assert leader.given.lora.published in (None, published)


def test_one_follower_that_takes_complete_weights_decides_for_all():
    leader, follower = a_pair({"dtype": "bfloat16"}, {})
    teacher: Any = weft.group(ReferenceWorker, name="teacher", model="folder")
    teacher.follows(leader)
    agree_on_adapters([leader, follower, teacher])
    assert leader.config.lora.published == "merged" and not follower.config.adapters


def test_adapters_that_cannot_be_served_are_refused_by_name_on_request():
    leader, follower = a_pair({"lora": Lora(dora=True, published="adapter")}, {})
    with pytest.raises(
        UserError, match=r"of 'actor': 'rollout' cannot take the adapter alone: vLLM cannot serve.*dora"
    ):
        agree_on_adapters([leader, follower])

    class Own(RolloutWorker):
        def new_engine(self, **settings: Any) -> Any:
            raise NotImplementedError

    own: Any = weft.group(Own, name="rollout", model="folder")
    own.follows(leader)
    assert Own.refuses_adapter(own.config, leader.config) == "Own has a custom engine"


def small_update(worker: ActorWorker, rms: float) -> dict[str, torch.Tensor]:
    """Give the adapter an update of this size, and return it by layer."""
    engine: Any = worker.engine
    torch.manual_seed(1)
    layers = {n: p for n, p in engine.model.causal_lm.named_parameters() if ".lora_" in n}
    updates: dict[str, torch.Tensor] = {}
    for name, b in layers.items():
        if ".lora_B." in name:
            a = layers[name.replace("lora_B", "lora_A")]
            b.data.normal_()
            b.data *= rms / (2 * (b @ a)).square().mean().sqrt()  # alpha / rank is 2
            updates[name.partition(".lora_B")[0]] = (2 * (b @ a)).detach()
    return updates


def arrived(
    rollout: RolloutWorker, base: dict[str, torch.Tensor], served: bool
) -> dict[str, torch.Tensor]:
    """Return the update in effect in a rollout, by layer."""
    model: Any = rollout.engine.model  # pyright: ignore[reportAttributeAccessIssue]
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}
    if not served:
        return {
            name: parameters[f"{name}.weight"] - base[f"{name}.weight"].double()
            for name in layers_of(base)
        }
    pairs = {
        n: [parameters[f"{n}.lora_{part}.default.weight"] for part in "BA"] for n in layers_of(base)
    }
    return {name: 2 * (b @ a) for name, (b, a) in pairs.items()}


def layers_of(base: dict[str, torch.Tensor]) -> list[str]:
    return [name.removesuffix(".weight") for name in base if "proj.weight" in name]


@pytest.mark.parametrize("published", ["adapter", "merged"])
def test_a_small_update_arrives_by_the_adapter_and_is_lost_when_merged(tiny_model: Path, published: Any):
    lora = LORA.model_copy(update={"published": published})
    worker = ActorWorker(ActorConfig(model=str(tiny_model), lora=lora, dtype="bfloat16"))
    served = published == "adapter"
    rollout = RolloutWorker(
        RolloutConfig(
            model=str(tiny_model),
            engine="transformers",
            dtype="bfloat16",
            adapters={"actor": lora} if served else {},
        )
    )
    plain: Any = rollout.engine.model  # pyright: ignore[reportAttributeAccessIssue]
    base = {
        n.replace(".base_layer", ""): p.detach().clone()
        for n, p in plain.named_parameters()
        if "lora_" not in n
    }
    updates = small_update(worker, 1e-5)
    weights = worker.publish_weights(1)
    num_bytes = sum(entry.num_bytes for entry in worker._publisher._transfer.entries)
    checksum = rollout.receive_weights(weights)
    assert worker.finish_publishing(1).checksum == checksum
    found = arrived(rollout, base, served)
    lost = [float((found[n] - u.double()).norm() / u.double().norm()) for n, u in updates.items()]
    if served:
        assert max(lost) < 0.01
        assert num_bytes < 100_000  # the model is 5 times as large
    else:
        assert min(lost) > 0.7
    worker.close()


def test_nothing_is_generated_before_the_first_adapter_has_come(tiny_model: Path):
    lora = LORA.model_copy(update={"published": "adapter"})
    rollout = RolloutWorker(
        RolloutConfig(model=str(tiny_model), engine="transformers", adapters={"actor": lora})
    )
    requests = [GenerationRequest(0, torch.tensor([5, 6]).numpy(), seed=0)]
    with pytest.raises(GenerationError, match="no complete version of the weights has arrived"):
        next(generate(rollout.engine, requests, weft.Sampling(max_tokens=2)))


@pytest.mark.parametrize("dora", [False, True])
def test_a_served_adapter_has_the_trainers_log_probabilities(tiny_model: Path, dora: bool):
    lora = Lora(rank=4, alpha=8, dora=dora, published="adapter")
    worker = ActorWorker(ActorConfig(model=str(tiny_model), lora=lora))
    small_update(worker, 1e-2)
    rollout = RolloutWorker(
        RolloutConfig(model=str(tiny_model), engine="transformers", adapters={"actor": lora})
    )
    rollout.receive_weights(worker.publish_weights(3))
    requests = [GenerationRequest(0, torch.tensor([5, 6, 7], dtype=torch.int32).numpy(), seed=0)]
    (found,) = [
        r for step in generate(rollout.engine, requests, weft.Sampling(max_tokens=16)) for r in step
    ]
    batch = Batch.of(prompt_ids=[[5, 6, 7]], response_ids=[found.token_ids.tolist()])
    mine = worker.logprobs(batch, into="x")["x"].to_pylist()[0]
    assert max(abs(a - b) for a, b in zip(mine, found.logprobs.tolist(), strict=True)) < 1e-4
    assert set(found.versions.tolist()) == {3}
    worker.close()


class EvenTokens:
    """A reward that needs no text: the share of even tokens."""

    def score(self, samples: Any) -> Any:
        return even_tokens(samples)


@weft.node(reads=("response_ids",), writes=("reward",))
def even_tokens(samples: Batch) -> Batch:
    return samples.with_columns(
        reward=[np.mean(np.array(ids) % 2 == 0) for ids in samples["response_ids"].to_pylist()]
    )


@pytest.mark.thorough
def test_a_bfloat16_run_sends_adapters_and_resumes(tiny_model: Path, tmp_path: Path):
    prompts = weft.TableSource(
        "prompts", pa.table({"prompt_ids": [[5, 6, 7], [8, 9], [10, 11], [12, 13, 14]]})
    )
    gaps: list[float] = []
    for steps, resume in ((2, "none"), (4, "latest")):
        leader, follower = a_pair(
            {"model": str(tiny_model), "dtype": "bfloat16", "learning_rate": 1e-2},
            {"model": str(tiny_model), "engine": "transformers"},
        )
        sampling = weft.Sampling(max_tokens=6)
        graph = grpo(
            prompts, rollout=follower, reward=EvenTokens(), actor=leader, n=4, sampling=sampling
        )
        with weft.Driver(
            graph,
            schedule=weft.Synchronous(steps=steps, prompts_per_step=4),
            checkpoint=weft.CheckpointConfig(every=2),
            resume=resume,
            root=tmp_path,
            name="adapters",
            progress=False,
        ) as driver:
            metrics = driver.run()
        assert follower.config.adapters["actor"].published == "adapter"
        gaps += [row["actor/mean_logprob_gap"] for row in metrics if "actor/mean_logprob_gap" in row]
    assert max(gaps) < 0.02 and metrics[-1]["step"] == 4
