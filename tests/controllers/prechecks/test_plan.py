"""Sizes, bytes and seconds of a plan, computed by hand for toys."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo

from weft.algorithms.methods import supervised
from weft.algorithms.sampling import Sampling
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.node_layout import assumed_machine
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.prechecks import plan_memory
from weft.controllers.prechecks.dry_run import planning
from weft.controllers.prechecks.plan import Plan, gpu_memory_alerts, plan_of
from weft.controllers.prechecks.plan_memory import GroupMemory, group_memory
from weft.controllers.prechecks.plan_sizes import sample_bytes, step_sizes
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Asynchronous, Synchronous
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import CostModel, Generation, LinearCost
from weft.dataflow.errors import Planned, UserError
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.workers.actor import ActorWorker
from weft.workers.reference import MovingReferenceWorker, ReferenceWorker
from weft.workers.rollout import RolloutWorker

COSTS = CostModel(
    nodes={
        "rollout.generate": LinearCost(fixed_s=1.0, per_row_s=0.1),
        "actor.update": LinearCost(per_row_s=0.05),
        "rollout.receive_weights": LinearCost(fixed_s=0.25),
        "elsewhere": LinearCost(fixed_s=100.0),
    }
)


def planned(max_num_seqs: int = 256, **settings: Any) -> Plan:
    rollout = group(ToyRollout, max_num_seqs=max_num_seqs)
    reward, actor = group(ToyReward), group(ToyActor)
    rollout.follows(actor)
    training = toy_grpo(prompts(8), rollout=rollout, reward=reward, actor=actor, n=4)
    apart = {
        "rollout": Place(ResourcePool("a", cpus=2), ranks=2),
        "actor": Place(ResourcePool("b", cpus=1)),
    }
    common = {
        "schedule": Synchronous(steps=5, prompts_per_step=6),
        "placement": apart,
        "backend": Simulated(COSTS),
    }
    with planning() as made, pytest.raises(Planned):
        Driver(training, **{**common, **settings})
    assert made.spec is not None
    return plan_of(made.spec)


class ManyRewards(ToyReward):
    @classmethod
    def default_ranks(cls, config: Any, cpus: int) -> int:
        return cpus // 4


def test_a_group_without_a_place_counts_with_the_ranks_that_it_gets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    reward, rollout, actor = group(ManyRewards), group(ToyRollout), group(ToyActor)
    training = toy_grpo(prompts(8), rollout=rollout, reward=reward, actor=actor, n=4)
    with assumed_machine(16, 80 << 30), planning() as made:
        with pytest.raises(Planned):
            Driver(training, schedule=Synchronous(steps=1, prompts_per_step=6), backend=RayBackend())
        assert made.spec is not None
        ranks = {g.group: g.ranks for g in plan_of(made.spec).groups}
    assert (ranks["reward"], ranks["rollout"]) == (16, 1)


def test_a_step_takes_the_sum_of_its_sequential_calls():
    time = planned().time
    assert time is not None and not time.at_best
    # 24 rows: 12 on each of two rollouts, all of them on the one actor.
    assert time.nodes == pytest.approx(
        {"rollout.generate": 1 + 12 * 0.1, "actor.update": 24 * 0.05, "rollout.receive_weights": 0.25}
    )
    assert time.seconds == pytest.approx(2.2 + 1.2 + 0.25)


def test_where_generation_runs_ahead_the_slowest_pool_is_the_time_that_nothing_beats():
    time = planned(schedule=Asynchronous(steps=5, prompts_per_step=6)).time
    assert time is not None and time.at_best and time.seconds == pytest.approx(2.2 + 0.25)


def test_costs_with_lengths_give_the_bound_of_the_simulation():
    generation = Generation(lengths=((10,),), decode_step_s=0.5)
    backend = Simulated(CostModel(nodes={"rollout.generate": generation}))
    time = planned(max_num_seqs=4, backend=backend).time
    # 24 responses of 10 tokens, four at a time on each of two replicas.
    assert time is not None and time.at_best and time.seconds == pytest.approx(24 * 10 * 0.5 / 4 / 2)


def test_a_step_lists_rows_updates_memory_and_machine():
    plan = planned()
    assert (plan.sizes.prompts, plan.sizes.rows) == (6, 24)
    [update] = plan.updates
    assert (update.rows, update.replicas, update.optimizer_steps, update.microbatches_per_replica) == (
        24,
        1,
        1,
        1,
    )
    assert {g.group: g.ranks for g in plan.groups if g.group in ("rollout", "actor")} == {
        "rollout": 2,
        "actor": 1,
    }
    assert plan.host_bytes == plan.driver_bytes + sum(g.ranks * g.libraries for g in plan.groups)
    assert plan.machine.memory_bytes > plan.machine.memory_free > 0 and plan.device_bytes == {}
    assert (
        plan.disk_bytes
        == plan.sample_bytes
        == 5 * sample_bytes(plan.spec.graphs["train"], plan.sizes)
        > 0
    )


def test_groups_that_share_gpus_need_memory_for_the_largest_and_what_others_leave_there():
    pool = ResourcePool("gpus", gpus=2)
    with assumed_machine(2, 80):
        plan = planned(placement={name: Place(pool, ranks=2) for name in ("rollout", "actor")})
    rollout = GroupMemory(
        "rollout", 2, "gpus", True, 5, {"at rest": {"weights": 10, "key/value cache": 30}}, idle=30
    )
    actor = GroupMemory(
        "actor",
        2,
        "gpus",
        True,
        5,
        {"at rest": {"weights": 20}, "update": {"activations": 7}},
        moves=20,
        idle=20,
        folder=9,
    )
    assert (plan.machine.gpus, plan.machine.gpu_bytes) == (2, 80)
    plan = replace(plan, groups=(rollout, actor), driver_bytes=100)
    assert plan.device_bytes == {"gpus": 40 + 20}
    # The actor's copy stays in host memory; vLLM discards its weights. Rank 0 writes the folder.
    assert plan.host_bytes == 100 + 2 * 5 + 2 * 5 + 2 * 20 + 9
    other = replace(actor, pool="others", group="actor")
    alone = replace(plan, groups=(rollout, other))
    assert alone.host_bytes == 100 + 2 * 5 + 2 * 5 + 9, "each has its own GPUs"
    keeps = replace(rollout, moves=10)
    assert replace(plan, groups=(keeps, actor)).host_bytes == plan.host_bytes + 2 * 10


def test_a_model_without_safetensors_files_is_not_refused_since_a_run_reads_others(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    plan = planned()
    place = plan.spec.placement["actor"]
    actor: Any = group(ActorWorker, model=str(tmp_path))
    found = group_memory(plan.spec, "actor", actor, place, plan.sizes, gpu_bytes=0)
    assert "has no safetensors files" in found.unknown and not found.phases


def test_a_model_with_latent_attention_counts_its_weights_though_its_cache_is_unknown(
    tmp_path: Path,
):
    write_model(tmp_path, layers=1, hidden=16, vocabulary=32)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"kv_lora_rank": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    plan = planned()
    place = plan.spec.placement["rollout"]
    rollout: Any = group(RolloutWorker, model=str(tmp_path), engine="transformers")
    found = group_memory(plan.spec, "rollout", rollout, place, plan.sizes, gpu_bytes=0)
    assert "keys and values" in found.unknown and "kv_lora_rank=4" in found.unknown
    assert found.phases[plan_memory.REST]["weights"] > 0
    assert plan_memory.CACHE not in found.phases["generate"]


def test_a_plan_refuses_wrong_weight_files_unless_another_engine_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 4}')
    save_file(
        {"model.embed_tokens.weight": np.zeros((4, 2), np.float32)}, tmp_path / "model.safetensors"
    )

    def refuse(*_: Any, **__: Any) -> int:
        raise UserError("its files have no 'model.norm.weight'")

    monkeypatch.setattr(plan_memory, "_activations", refuse)
    plan = planned()
    place, sizes = plan.spec.placement["actor"], replace(plan.sizes, response_tokens=10.0)
    actor: Any = group(ActorWorker, model=str(tmp_path))
    with pytest.raises(UserError, match=r"no 'model.norm.weight'"):
        group_memory(plan.spec, "actor", actor, place, sizes, gpu_bytes=0)
    own: Any = group(ActorWorker, model=str(tmp_path), engine=refuse)
    assert (
        "no 'model.norm.weight'"
        in group_memory(plan.spec, "actor", own, place, sizes, gpu_bytes=0).unknown
    )


def test_responses_of_data_count_with_their_mean_length():
    ragged = pa.list_(pa.int32())
    columns = {"prompt_ids": [[1, 2], [1, 2, 3, 4]], "response_ids": [[1] * 10, [1] * 20]}
    rows = TableSource(
        "rows", pa.table({name: pa.array(each, ragged) for name, each in columns.items()})
    )
    sizes = step_sizes(supervised(rows, actor=group(ActorWorker, model="m")), 4)
    assert (sizes.prompt_tokens, sizes.response_tokens, sizes.sampled, sizes.rows) == (3, 15, False, 4)


def test_the_longest_responses_of_a_graph_count_wherever_it_samples_them():
    @graph
    def twice(prompts: Any, *, rollout: Any, long: int, short: int) -> Any:
        first = rollout.generate(prompts, n=1, sampling=Sampling(max_tokens=long))
        return rollout.generate(first, n=1, sampling=Sampling(max_tokens=short))

    rollout = group(RolloutWorker, model="m")
    for long, short in ((30, 5), (5, 30)):
        made = twice(prompts(4), rollout=rollout, long=long, short=short)
        assert step_sizes(made, 4).response_tokens == 30


@pytest.mark.thorough
def test_a_plan_that_exceeds_the_gpu_names_the_first_setting_that_fits(tmp_path: Path):
    write_model(tmp_path, layers=2, hidden=512, vocabulary=65_536)
    rows = supervised_rows(16, prompt=1000, response=3000)
    actor: Any = group(ActorWorker, model=str(tmp_path), dtype="bfloat16", microbatch_tokens=16384)
    place = {"actor": Place(ResourcePool("gpus", gpus=1), ranks=1)}
    made: dict[int, list[str]] = {}
    for mib in (20 << 10, 3100, 1024):
        with assumed_machine(1, mib << 20), planning() as seen, pytest.raises(Planned):
            Driver(
                supervised(rows, actor=actor),
                schedule=Synchronous(steps=1, prompts_per_step=16),
                placement=place,
                backend=Simulated(CostModel(nodes={})),
            )
        assert seen.spec is not None
        with assumed_machine(1, mib << 20):
            made[mib] = gpu_memory_alerts(seen.spec)
    assert made[20 << 10] == []
    (said,) = made[3100]
    assert said.startswith("worker group 'actor' needs about ")
    assert "Set activation_checkpointing=" in said, said
    (said,) = made[1024]
    assert "use more GPUs" in said, said


def test_a_moving_reference_has_an_average_on_the_host_and_in_checkpoints(tmp_path: Path):
    write_model(tmp_path, layers=2, hidden=64, vocabulary=100)
    plan = planned()
    place, model = plan.spec.placement["rollout"], str(tmp_path)
    settings: dict[str, Any] = {"model": model, "dtype": "bfloat16"}
    frozen: Any = group(ReferenceWorker, **settings)
    moving: Any = group(MovingReferenceWorker, mix=0.5, **settings)
    spec, sizes = replace(plan.spec, checkpoint=CheckpointConfig(every=2)), plan.sizes
    one = group_memory(spec, "rollout", frozen, place, sizes, gpu_bytes=0)
    two = group_memory(spec, "rollout", moving, place, sizes, gpu_bytes=0)
    numbers = one.phases[plan_memory.REST]["weights"] // 2
    assert numbers > 50_000 and not one.on_host and not one.checkpoint
    assert two.on_host == {"moving average": 4 * numbers, "copy for a checkpoint": 4 * numbers}
    assert (two.folder, two.checkpoint) == (2 * 2 * numbers, 2 * 6 * numbers), "of two ranks"


def supervised_rows(number: int, *, prompt: int, response: int) -> TableSource:
    ragged = pa.list_(pa.int32())
    columns = {"prompt_ids": [[1] * prompt] * number, "response_ids": [[1] * response] * number}
    return TableSource("rows", pa.table({n: pa.array(each, ragged) for n, each in columns.items()}))


def write_model(folder: Path, *, layers: int, hidden: int, vocabulary: int) -> None:
    """Write the folder of a model whose weights file is a hole."""
    settings: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        start, end = end, end + 4 * parameter.numel()
        header[name] = {
            "dtype": "F32",
            "shape": list(parameter.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
