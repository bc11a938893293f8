"""LoRA on the real engine: steps equal plain `peft`, the base is frozen, and adapters save and
load."""

import json
import math
from pathlib import Path
from typing import Any

import lora_ranks
import numpy as np
import pyarrow as pa
import pytest
import torch
from families import FAMILIES, amplify, make
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import run_processes
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import weft
from weft.algorithms.grpo import grpo
from weft.algorithms.kl import KlPenalty
from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.algorithms.preference import dpo
from weft.algorithms.preference_loss import PreferenceLoss
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.metric_names import untimed
from weft.dataflow.source import TableSource
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training.lora import Lora
from weft.workers.training.safetensors_files import write_merged

NO_ROWS = TableSource("no rows", pa.table({"x": []}))


KINDS = {
    "lora": Lora(rank=4, alpha=8),
    "rslora": Lora(rank=4, alpha=8 * 4**0.5, targets=("q_proj", "mlp.down_proj")),
    "dora": Lora(rank=4, alpha=8, dora=True),
}
LOSS = PolicyLoss(old="old_logprobs")


def actor(model: Path, lora: Lora | None = KINDS["lora"], **settings: Any) -> ActorWorker:
    config = ActorConfig(
        model=str(model), lora=lora, **{"learning_rate": 1e-2, "max_grad_norm": None, **settings}
    )
    return ActorWorker(config)


def values(metrics: Any) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def adapter_of(worker: ActorWorker) -> dict[str, torch.Tensor]:
    engine: Any = worker.engine
    return {name: tensor.clone() for name, tensor in engine.adapter_tensors()}


def base_of(worker: ActorWorker) -> dict[str, torch.Tensor]:
    engine: Any = worker.engine
    return {
        n: p.detach().clone()
        for n, p in engine.model.causal_lm.named_parameters()
        if not p.requires_grad
    }


def with_adapter(worker: ActorWorker, rows: Batch, steps: int = 2) -> ActorWorker:
    """Return the worker after some updates, so that B is not 0."""
    for _ in range(steps):
        worker.update(rows, loss=LOSS)
    return worker


def by_peft(
    model: Path, lora: Lora, start: dict[str, torch.Tensor], rows: Batch, steps: int, dtype: torch.dtype
) -> Any:
    """Take the same steps with `peft`, torch's AdamW and a written-out loss, row by row."""
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=8,
        target_modules=targets,
        use_rslora=lora == KINDS["rslora"],
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    policy: Any = get_peft_model(causal_lm, settings, autocast_adapter_dtype=False)
    parameters = {
        n.removeprefix("base_model.model."): p for n, p in policy.named_parameters() if p.requires_grad
    }
    assert parameters.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name])
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    gradients: list[dict[str, torch.Tensor]] = []
    for _ in range(steps):
        total, count = torch.zeros((), dtype=dtype), 0
        for row in rows.to_rows():
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
            log_p = F.log_softmax(policy(input_ids=ids).logits / row["temperature"], -1)
            logprobs = log_p[0, :-1].gather(1, ids[0, 1:, None])[len(row["prompt_ids"]) - 1 :, 0]
            mask = torch.tensor(row["response_mask"])
            total = total - (logprobs * mask).sum()
            count += int(mask.sum())
        optimizer.zero_grad()
        (total / count).backward()
        gradients.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        optimizer.step()
    return policy, parameters, gradients


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_steps_are_those_of_peft(tiny_model: Path, rows: Batch, kind: str):
    worker = actor(tiny_model, KINDS[kind])
    engine: Any = worker.engine
    start, base = adapter_of(worker), base_of(worker)
    seen: list[dict[str, torch.Tensor]] = []

    def keep(*_: object) -> None:
        named = engine.model.causal_lm.named_parameters()
        seen.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    engine.optimizer.register_step_pre_hook(keep)
    for _ in range(3):
        worker.update(rows, loss=NegativeLogLikelihood())
    policy, parameters, gradients = by_peft(tiny_model, KINDS[kind], start, rows, 3, torch.float64)
    for mine, theirs in zip(seen, gradients, strict=True):
        assert mine.keys() == theirs.keys()
        squares = sum(float((mine[n] - theirs[n]).square().sum()) for n in theirs)
        assert (squares / sum(float(g.square().sum()) for g in theirs.values())) ** 0.5 < 1e-5
    after = adapter_of(worker)
    # Compare norms over all parameters. Adam divides by gradients: near zero, rounding decides the
    # sign, and that depends on the CPU.
    off, moved = (
        sum(float((p.detach() - each[n]).square().sum()) for n, p in parameters.items()) ** 0.5
        for each in (after, start)
    )
    assert off < 1e-3 * moved
    assert all(torch.equal(tensor, base[name]) for name, tensor in base_of(worker).items()), (
        "the base stands still"
    )
    assert len(engine.optimizer.state) == len(after)
    # Rollouts get the weights that `peft` merges.
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(after[name])
    expected = policy.merge_and_unload().state_dict()
    published = dict(worker.engine.named_tensors())
    assert (
        published.keys()
        == dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters()).keys()
    )
    assert all(float((tensor - expected[name]).abs().max()) < 1e-6 for name, tensor in published.items())


def test_the_merged_weights_are_those_of_peft_to_a_rounding(
    tiny_model: Path, rows: Batch, tmp_path: Path
):
    for kind, lora in KINDS.items():
        worker = with_adapter(actor(tiny_model, lora), rows)
        worker.save(tmp_path / kind)
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        policy: Any = PeftModel.from_pretrained(base, tmp_path / kind)
        merged = policy.merge_and_unload().state_dict()
        for name, tensor in worker.engine.named_tensors():
            assert float((tensor - merged[name]).abs().max()) < 1e-6, (kind, name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_policy_is_the_model(tiny_model: Path, rows: Batch, kind: str):
    plain, fresh = actor(tiny_model, None), actor(tiny_model, KINDS[kind])
    mine, theirs = (worker.logprobs(rows, into="x").ragged_numpy("x")[0] for worker in (fresh, plain))
    assert np.abs(mine - theirs).max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_adapter_off_it_is_the_model_to_the_bit(tiny_model: Path, rows: Batch, kind: str):
    worker = with_adapter(actor(tiny_model, KINDS[kind]), rows)
    off = worker.logprobs(rows, into="x", adapter=False)
    assert off == actor(tiny_model, None).logprobs(rows, into="x")
    on = worker.logprobs(rows, into="x")
    assert np.abs(on.ragged_numpy("x")[0] - off.ragged_numpy("x")[0]).max() > 1e-2


def test_asking_the_reference_between_two_parts_of_a_step_changes_no_gradient(
    tiny_model: Path, rows: Batch
):
    plain, asked = actor(tiny_model), actor(tiny_model)
    for worker in (plain, asked):
        for _ in range(2):
            if worker is asked:
                worker.logprobs(rows, adapter=False)
            worker.update(rows.slice(0, 9), loss=LOSS, last=False)
            if worker is asked:
                worker.logprobs(rows, adapter=False)
            worker.update(rows.slice(9, 14), loss=LOSS)
    assert all(
        torch.equal(tensor, adapter_of(plain)[name]) for name, tensor in adapter_of(asked).items()
    )


def test_published_weights_have_the_trainers_logprobs(tiny_model: Path, rows: Batch, tmp_path: Path):
    for kind, lora in KINDS.items():
        worker = with_adapter(actor(tiny_model, lora), rows, steps=4)
        worker.save(tmp_path / kind, merged=True)
        merged = actor(tmp_path / kind, None)
        mine, theirs = (w.logprobs(rows, into="x").ragged_numpy("x")[0] for w in (worker, merged))
        assert np.abs(mine - theirs).mean() < 1e-6 and np.abs(mine - theirs).max() < 1e-5, kind
        loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / kind).named_parameters())
        assert all(torch.equal(loaded[name], tensor) for name, tensor in worker.engine.named_tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_keeps_the_adapter_in_float32_and_the_base_in_bfloat16(
    tiny_model: Path, rows: Batch, kind: str
):
    worker = with_adapter(actor(tiny_model, KINDS[kind], dtype="bfloat16"), rows)
    assert {tensor.dtype for tensor in base_of(worker).values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in adapter_of(worker).values()} == {torch.float32}
    published = dict(worker.engine.named_tensors())
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    exact = with_adapter(actor(tiny_model, KINDS[kind]), rows)
    for name, tensor in exact.engine.named_tensors():
        assert float((published[name].float() - tensor).abs().max()) < 0.02, name
    mine, theirs = (w.logprobs(rows, into="x").ragged_numpy("x")[0] for w in (worker, exact))
    assert 0 < np.abs(mine - theirs).mean() < 0.03


DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
}
OTHER_LAYERS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "GPT-2": ("gpt2", {}, {"c_attn", "c_fc", "c_proj"}),
    "DeepSeek V3": (
        "deepseek_v3",
        DEEPSEEK,
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    ),
    "Mixtral": (*FAMILIES["Mixtral"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
}
"""Models with unusual layers -> the layers of "all-linear"."""


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_adapters_of_models_with_layers_of_other_kinds_are_those_of_peft(
    name: str, rows: Batch, tmp_path: Path
):
    kind, settings, layers = OTHER_LAYERS[name]
    amplify(make(kind, settings)).save_pretrained(tmp_path / "model")
    fresh, plain = actor(tmp_path / "model"), actor(tmp_path / "model", None)
    assert {n.split(".lora_")[0].rpartition(".")[2] for n in adapter_of(fresh)} == layers
    first, own = (w.logprobs(rows, into="x").ragged_numpy("x")[0] for w in (fresh, plain))
    assert np.abs(first - own).max() < 1e-5
    worker = with_adapter(fresh, rows, steps=2)
    worker.save(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()  # pyright: ignore
    published = dict(worker.engine.named_tensors())
    assert all(float((tensor - merged[n]).abs().max()) < 1e-5 for n, tensor in published.items())
    worker.save(tmp_path / "merged", merged=True)
    mine, theirs = (
        w.logprobs(rows, into="x").ragged_numpy("x")[0]
        for w in (worker, actor(tmp_path / "merged", None))
    )
    assert np.abs(mine - theirs).max() < 1e-4 < np.abs(mine - own).max()


@pytest.mark.parametrize(
    ("kind", "settings", "lora", "says"),
    [
        (
            "deepseek_v3",
            DEEPSEEK,
            Lora(targets=("o_proj", "gate_proj")),
            "its name stands for the experts; take some of",
        ),
        (
            "falcon_h1",
            FAMILIES["Falcon-H1"][1],
            Lora(targets=("out_proj",)),
            "fused kernels of Mamba read its weight",
        ),
        ("gpt2", {}, Lora(dora=True), "stores its weights transposed"),
        ("gpt2", {}, Lora(targets=("wte",)), "no layer 'wte'; it has c_attn, c_fc, c_proj"),
        (
            "llama",
            {},
            Lora(targets=("lm_head",)),
            "no layer 'lm_head'; it has down_proj, gate_proj, k_proj, o_proj, q_proj,",
        ),
    ],
)
def test_targets_that_can_have_no_adapter_are_named_with_those_that_can(
    kind: str, settings: dict[str, Any], lora: Lora, says: str, tmp_path: Path
):
    make(kind, settings).save_pretrained(tmp_path)
    with pytest.raises(UserError) as refused:
        ActorWorker.check(ActorConfig(model=str(tmp_path), lora=lora), [], NO_ROWS)
    assert says in str(refused.value)


def test_the_scale_is_alpha_over_the_rank_or_over_its_root():
    from weft.workers.training.adapter import merged_weight

    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((6, 5), (4, 5), (6, 4)))
    torch.testing.assert_close(merged_weight(weight, a, b, 8 / 4), weight + 2 * b @ a)
    scaled = merged_weight(weight, a, b, 8 / math.sqrt(4), torch.full((6,), 3.0))
    torch.testing.assert_close(scaled.norm(dim=1), torch.full((6,), 3.0))
    torch.testing.assert_close(F.normalize(scaled, dim=1), F.normalize(weight + 4 * b @ a, dim=1))


# Files


def test_an_adapter_is_saved_as_peft_saves_it(tiny_model: Path, rows: Batch, tmp_path: Path):
    for kind, lora in KINDS.items():
        worker = with_adapter(actor(tiny_model, lora), rows)
        folder = tmp_path / kind
        for _ in range(2):  # the second save replaces the first
            worker.save(folder)
        names = {path.name for path in folder.iterdir()}
        assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
        assert not {"config.json", "model.safetensors"} & names
        assert json.loads((folder / "adapter_config.json").read_text())[
            "base_model_name_or_path"
        ] == str(tiny_model)
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        policy: Any = PeftModel.from_pretrained(base, folder)
        loaded = dict(policy.base_model.model.named_parameters())
        assert all(torch.equal(loaded[name], tensor) for name, tensor in adapter_of(worker).items()), (
            kind
        )
        (tmp_path / "theirs").mkdir(exist_ok=True)
        policy.save_pretrained(tmp_path / "theirs" / kind)
        mine, theirs = (
            load_file(path / "adapter_model.safetensors")
            for path in (folder, tmp_path / "theirs" / kind)
        )
        assert mine.keys() == theirs.keys() and all(
            torch.equal(mine[name], theirs[name]) for name in theirs
        ), kind


@pytest.mark.parametrize(("kind", "dtype"), [("lora", "float32"), ("dora", "bfloat16")])
def test_a_resume_from_a_checkpoint_equals_an_uninterrupted_run_exactly(
    tiny_model: Path, rows: Batch, tmp_path: Path, dtype: str, kind: str
):
    worker = with_adapter(actor(tiny_model, KINDS[kind], dtype=dtype), rows)
    worker.save_checkpoint(tmp_path / "step")
    assert worker.checkpoint_written(wait=True)
    worker.save(tmp_path / "saved")
    with_adapter(worker, rows)

    again = actor(tiny_model, KINDS[kind], dtype=dtype)
    again.load_checkpoint(tmp_path / "step")
    assert again.version == 2
    with_adapter(again, rows)
    assert all(
        torch.equal(tensor, adapter_of(worker)[name]) for name, tensor in adapter_of(again).items()
    )
    kept, saved = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (tmp_path / "step" / "model", tmp_path / "saved")
    )
    assert kept == saved
    names = adapter_of(worker)
    state = {f"model.{name}" for name in names}
    state |= {f"optimizer.{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert load_file(tmp_path / "step" / "state" / "rank_0.safetensors").keys() == state


def test_a_checkpoint_of_another_adapter_is_refused(tiny_model: Path, tmp_path: Path):
    worker = actor(tiny_model)
    worker.save_checkpoint(tmp_path / "step")
    assert worker.checkpoint_written(wait=True)
    with pytest.raises(
        UserError, match=r"lora_A.default.weight' has shape \[4, 128\] there, and has shape \[8, 128\]"
    ):
        actor(tiny_model, Lora(rank=8)).load_checkpoint(tmp_path / "step")
    with pytest.raises(UserError, match="is missing there, and has shape"):
        actor(tiny_model, None).load_checkpoint(tmp_path / "step")


# Several ranks

SPLITS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one unit": (2, "lora", {"gather": "once"}),
    "layer by layer": (2, "dora", {"gather": "layerwise", "microbatch_tokens": 60}),
    "bfloat16": (2, "dora", {"dtype": "bfloat16"}),
    "tensor parallel": (2, "lora", {"tensor_parallel": 2}),
    "two by two, layer by layer": (4, "rslora", {"tensor_parallel": 2, "gather": "layerwise"}),
}
IN_EVERY_TEST_RUN = ("layer by layer",)


def run_ranks(folder: Path, model: Path, rows: Batch, ranks: int, config: dict[str, Any]) -> Any:
    """Return the results of `lora_ranks.py` on `ranks` ranks."""
    with pa.ipc.new_file(folder / "rows.arrow", rows.record.schema) as file:
        file.write_batch(rows.record)
    case = {
        "ranks": ranks,
        "config": {"model": str(model), "learning_rate": 1e-2, "max_grad_norm": None, **config},
    }
    (folder / "case.json").write_text(json.dumps(case))
    run_processes(lora_ranks.main, folder, ranks)
    return torch.load(folder / "results.pt")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "split",
    [pytest.param(name, marks=() if name in IN_EVERY_TEST_RUN else pytest.mark.slow) for name in SPLITS],
)
def test_several_ranks_train_the_adapter_of_one(
    tiny_model: Path, rows: Batch, tmp_path: Path, split: str
):
    ranks, kind, settings = SPLITS[split]
    dtype = settings.get("dtype", "float32")
    results = run_ranks(
        tmp_path, tiny_model, rows, ranks, {**settings, "lora": KINDS[kind].model_dump()}
    )
    assert {tensor.dtype for tensor in results["adapter"].values()} == {torch.float32}
    alone = with_adapter(actor(tiny_model, KINDS[kind], dtype=dtype), rows)
    off = alone.logprobs(rows, into="x", adapter=False).ragged_numpy("x")[0]
    found = np.concatenate([results["off"][row] for row in range(len(rows))])
    if dtype == "float32":
        assert np.abs(off - found).max() < 1e-5
        for name, tensor in adapter_of(alone).items():
            # AdamW's first steps are the sign of the gradient times 1e-2, however small it is, so
            # rounding can flip some.
            assert float((results["adapter"][name] - tensor).abs().max()) < 3e-5, name
    else:  # autocast and FSDP round in other places, and AdamW steps by the sign of small gradients
        assert np.abs(off - found).mean() < 0.03
    saved, kept = (
        load_file(tmp_path / f / "adapter_model.safetensors") for f in ("saved", "step/model")
    )
    assert saved.keys() == kept.keys() and all(torch.equal(saved[name], kept[name]) for name in saved)
    again = actor(tiny_model, KINDS[kind], dtype=dtype)
    again.load_checkpoint(tmp_path / "step")
    assert all(
        torch.equal(tensor, results["adapter"][name]) for name, tensor in adapter_of(again).items()
    )
    # Holds for bfloat16 as well: the adapter is gathered in float32, and rounded only by the merge.
    assert all(
        torch.equal(tensor, results["published"][name]) for name, tensor in again.engine.named_tensors()
    )


# Mistakes


def test_mistakes_are_found_before_any_process_starts(tiny_model: Path):
    def check(lora: Lora, **settings: Any) -> None:
        ActorWorker.check(ActorConfig(model=str(tiny_model), lora=lora, **settings), [], NO_ROWS)

    check(Lora(targets=("q_proj", "mlp.up_proj")))
    with pytest.raises(UserError, match="has no layer 'q_prj'; did you mean 'q_proj'"):
        check(Lora(targets=("k_proj", "q_prj")))
    with pytest.raises(UserError, match=r"has no layer 'proj'; did you mean '\w_proj'"):
        check(Lora(targets=("proj",)))
    with pytest.raises(UserError, match="Lora: targets is empty"):
        Lora(targets=())
    with pytest.raises(UserError, match=r"Lora.rank: input should be greater than or equal to 1, not 0"):
        Lora(rank=0)
    with pytest.raises(UserError, match="did you mean 'alpha'"):
        Lora(alhpa=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(UserError, match="tensor_parallel=2 splits the rows that DoRA normalizes"):
        check(Lora(dora=True), tensor_parallel=2)


def test_a_layer_that_is_no_linear_one_of_the_backbone_is_refused(tiny_model: Path):
    for target in ("embed_tokens", "lm_head", "norm"):
        with pytest.raises(
            UserError,
            match=rf"the backbone of .* \(Qwen2ForCausalLM\) has no layer '{target}'; it has down_proj, gate_proj",
        ):
            actor(tiny_model, Lora(targets=(target,)))


def test_a_reference_without_an_adapter_to_turn_off_is_refused(tiny_model: Path):
    with pytest.raises(UserError, match=r"adapter_off\(\) takes a handle made with lora=weft.Lora"):
        weft.adapter_off(weft.group(weft.ActorWorker, model=str(tiny_model)))
    plain = weft.group(weft.ActorWorker, model=str(tiny_model))
    with pytest.raises(
        UserError, match=r"node 'actor.logprobs': adapter=False, but the actor has no adapter"
    ):
        node = type("Node", (), {"name": "actor.logprobs", "arguments": {"adapter": False}})()
        ActorWorker.check(plain.config, [node], NO_ROWS)  # pyright: ignore[reportArgumentType]


# Runs


class Parity:
    """A reward that needs no text: the share of even tokens."""

    def score(self, samples: Any) -> Any:
        return parity(samples)


@weft.node(reads=("response_ids",), writes=("reward",))
def parity(samples: Batch) -> Batch:
    return samples.with_columns(
        reward=[np.mean(np.array(ids) % 2 == 0) for ids in samples["response_ids"].to_pylist()]
    )


def train(
    root: Path, name: str, model: Path, schedule: Any, *, off: bool, **settings: Any
) -> list[dict[str, Any]]:
    """Return the metrics of a GRPO run whose reference is the actor without adapter, or a second
    model."""
    rng = np.random.default_rng(0)
    prompts = weft.TableSource(
        "prompts", pa.table({"prompt_ids": [rng.integers(0, 97, 5) for _ in range(8)]})
    )
    actor = weft.group(
        weft.ActorWorker, model=str(model), lora=Lora(rank=4, alpha=8), learning_rate=1e-2, **settings
    )
    rollout = weft.group(weft.RolloutWorker, model=str(model), engine="transformers")
    rollout.follows(actor)
    reference = weft.adapter_off(actor) if off else weft.group(weft.ReferenceWorker, model=str(model))
    graph = grpo(
        prompts,
        rollout=rollout,
        reward=Parity(),
        actor=actor,
        reference=reference,
        n=4,
        sampling=weft.Sampling(max_tokens=6),
        loss=PolicyLoss(kl=KlPenalty(coefficient=0.1)),
    )
    with weft.Driver(graph, schedule=schedule, root=root, name=name, progress=False) as driver:
        return driver.run()


@pytest.mark.parametrize("schedule", [weft.Synchronous, weft.Pipelined])
def test_a_reference_with_the_adapter_off_equals_a_separate_model(
    tiny_model: Path, tmp_path: Path, schedule: Any
):
    when = schedule(steps=3, prompts_per_step=4)
    off, apart = (train(tmp_path, str(off), tiny_model, when, off=off) for off in (True, False))
    assert [row["step"] for row in off] == [0, 1, 2, 3]
    assert off[-1]["actor/max_logprob_gap"] < 1e-4 and off[-1]["actor/kl"] > 1e-4
    for mine, theirs in zip(map(untimed, off), map(untimed, apart), strict=True):
        names = [name for name in theirs if name.startswith(("actor/", "reward/"))]
        assert {n: mine[n] for n in names} == pytest.approx(
            {n: theirs[n] for n in names}, rel=1e-4, abs=1e-6
        )


def test_dpo_begins_at_its_reference_and_learns(tiny_model: Path, tmp_path: Path):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 40, 4).tolist() for _ in range(16)]
    columns = {"chosen_ids": [[p[0], 1] for p in prompts], "rejected_ids": [[p[1], 1] for p in prompts]}
    pairs = weft.TableSource("pairs", pa.table({"prompt_ids": prompts, **columns}))
    actor = weft.group(weft.ActorWorker, model=str(tiny_model), lora=Lora(rank=4), learning_rate=1e-2)
    graph = dpo(pairs, actor=actor, reference=weft.adapter_off(actor), loss=PreferenceLoss(beta=0.5))
    schedule = weft.Synchronous(steps=12, prompts_per_step=16)
    with weft.Driver(graph, schedule=schedule, root=tmp_path, name="dpo", progress=False) as driver:
        metrics = driver.run()
    assert metrics[1]["actor/reward_margin"] == pytest.approx(0, abs=1e-4)
    assert metrics[-1]["actor/reward_margin"] > 0.5 and metrics[-1]["actor/loss"] < 0.5


def test_supervised_fine_tuning_learns_its_training_data(tiny_model: Path, rows: Batch):
    worker = actor(tiny_model)
    losses = [values(worker.update(rows, loss=NegativeLogLikelihood()))["loss"] for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_folder_of_an_adapter_is_merged_into_that_of_a_whole_model(
    tiny_model: Path, rows: Batch, tmp_path: Path
):
    worker = with_adapter(actor(tiny_model, KINDS["dora"]), rows)
    worker.save(tmp_path / "adapter")
    worker.save(tmp_path / "merged", merged=True)
    write_merged(tmp_path / "adapter", tmp_path / "exported")
    ours, exported = (
        load_file(tmp_path / name / "model.safetensors") for name in ("merged", "exported")
    )
    assert ours.keys() == exported.keys()
    assert all(torch.allclose(ours[name], exported[name], atol=1e-5) for name in ours)
    assert not (tmp_path / "exported" / "adapter_config.json").exists()
