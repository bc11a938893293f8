"""The names of Weft's settings in TRL, verl, OpenRLHF, slime and AReaL."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

LIBRARIES = ("TRL", "verl", "OpenRLHF", "slime", "AReaL")


class _PeerName(NamedTuple):
    weft: str
    """A setting of `weft.train`, or `Class(setting=...)` for a setting of a class."""
    names: Sequence[str]
    """Names in each library, in the order of `LIBRARIES`, separated by spaces."""
    note: str
    """How the setting differs between the libraries."""

    @property
    def setting(self) -> str:
        """The setting's bare name, such as `low` for `Clipped(low=..., high=...)`."""
        return (
            self.weft if self.weft.isidentifier() else re.findall(r'(\w+)(?:=|": )\.\.\.', self.weft)[0]
        )

    def names_of(self, library: str) -> Sequence[str]:
        return self.names[LIBRARIES.index(library)].split()


def _rows(table: str) -> tuple[_PeerName, ...]:
    rows = re.sub(r"\n +", " ", table).strip().splitlines()
    cells = (["" if cell == "-" else cell for cell in row.split(" | ")] for row in rows)
    return tuple(_PeerName(weft, others[:5], "".join(others[5:])) for weft, *others in cells)


# Name in Weft | names in each library, or `-` | note. Continuation lines are indented.
PEER_NAMES = _rows("""
model | model_name_or_path | actor_rollout_ref.model.path | pretrain | hf_checkpoint | actor.path
data | train_dataset dataset_name | data.train_files | prompt_data | prompt_data |
    train_dataset.path
held_out | eval_dataset | data.val_files | eval_dataset | eval_prompt_data | valid_dataset.path
rewards | reward_funcs | custom_reward_function.path reward_fn | remote_rm_url | custom_rm_path
    rm_type | reward_fn
method | loss_type | algorithm.adv_estimator | advantage_estimator | advantage_estimator | -
prompts_per_step | per_device_train_batch_size generation_batch_size | data.train_batch_size
    data.gen_batch_size | rollout_batch_size train_batch_size | rollout_batch_size global_batch_size
    | train_dataset.batch_size | prompts of a step on all devices, each with `n` responses
ActorWorker(microbatch_tokens=...) | gradient_accumulation_steps |
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu |
    micro_train_batch_size micro_rollout_batch_size | micro_batch_size max_tokens_per_gpu |
    actor.mb_spec.max_tokens_per_mb | tokens of one forward pass; gradients are always accumulated
    over the batch
n | num_generations | actor_rollout_ref.rollout.n | n_samples_per_prompt | n_samples_per_prompt |
    gconfig.n_samples
max_tokens | max_completion_length | data.max_response_length | generate_max_len max_new_tokens |
    rollout_max_response_len | gconfig.max_new_tokens
reading={"max_prompt_tokens": ...} | max_prompt_length | data.max_prompt_length | prompt_max_len |
    rollout_max_prompt_len | train_dataset.max_length
RolloutWorker(max_context=...) | vllm_max_model_length | actor_rollout_ref.rollout.max_model_len |
    max_len | rollout_max_context_len | vllm.max_model_len
Sampling(temperature=...) | temperature | actor_rollout_ref.rollout.temperature | temperature |
    rollout_temperature | gconfig.temperature
Sampling(top_p=...) | top_p | actor_rollout_ref.rollout.top_p | top_p | rollout_top_p | gconfig.top_p
Sampling(top_k=...) | top_k | actor_rollout_ref.rollout.top_k | - | rollout_top_k | gconfig.top_k
Sampling(min_p=...) | min_p | - | - | - | -
Sampling(stop=...) | - | - | - | rollout_stop | gconfig.stop
learning_rate | - | actor_rollout_ref.actor.optim.lr actor.lr | actor_learning_rate | lr |
    actor.optimizer.lr
ActorWorker(warmup_steps=...) | warmup_ratio | actor_rollout_ref.actor.optim.lr_warmup_steps |
    lr_warmup_ratio | lr_warmup_iters | warmup_steps_proportion
ActorWorker(max_grad_norm=...) | - | actor_rollout_ref.actor.grad_clip | max_norm | clip_grad |
    actor.gradient_clipping
steps | max_steps num_train_epochs | trainer.total_training_steps trainer.total_epochs |
    num_episodes max_epochs | num_rollout | total_train_steps total_train_epochs | updates, not
    epochs
kl | beta | actor_rollout_ref.actor.kl_loss_coef kl_loss_coef algorithm.kl_ctrl.kl_coef kl_coef |
    init_kl_coef | kl_loss_coef | actor.kl_ctl | the beta of a DPO loss is PreferenceLoss(beta=...)
Clipped(low=..., high=...) | epsilon epsilon_high | actor_rollout_ref.actor.clip_ratio
    clip_ratio_low clip_ratio_high | eps_clip eps_clip_low_high | eps_clip eps_clip_high |
    actor.eps_clip actor.eps_clip_higher
PolicyLoss(entropy_coefficient=...) | - | actor_rollout_ref.actor.entropy_coeff | entropy_loss_coef
    | entropy_coef | -
lora | peft_config lora_r | actor_rollout_ref.model.lora_rank lora_rank lora_alpha | lora_rank
    lora_alpha | - | actor.use_lora
MovingReferenceWorker(mix=...) | ref_model_mixup_alpha | - | - | - | -
ActorWorker(activation_checkpointing=...) | gradient_checkpointing |
    actor_rollout_ref.model.enable_gradient_checkpointing | gradient_checkpointing |
    recompute_granularity | actor.gradient_checkpointing
ActorWorker(offload=...) | - | actor_rollout_ref.actor.fsdp_config.param_offload
    fsdp_config.optimizer_offload | adam_offload | offload_train | -
ActorWorker(dtype=...) | bf16 fp16 | actor_rollout_ref.rollout.dtype | param_dtype | - | actor.dtype
RolloutWorker(engine=...) | use_vllm | actor_rollout_ref.rollout.name | - | - | -
RolloutWorker(gpu_memory_utilization=...) | vllm_gpu_memory_utilization |
    actor_rollout_ref.rollout.gpu_memory_utilization | vllm_gpu_memory_utilization |
    sglang_mem_fraction_static | vllm.gpu_memory_utilization
RolloutWorker(tensor_parallel=...) | vllm_tensor_parallel_size |
    actor_rollout_ref.rollout.tensor_model_parallel_size tensor_parallel_size |
    vllm_tensor_parallel_size | rollout_num_gpus_per_engine tensor_model_parallel_size |
    vllm.tensor_parallel_size
Driver(placement=...) | - | trainer.n_gpus_per_node trainer.nnodes | actor_num_gpus_per_node
    vllm_num_engines | actor_num_gpus_per_node rollout_num_gpus | allocation_mode cluster.n_nodes
Asynchronous(max_staleness=...) | - | async_training.staleness_threshold | async_train | - |
    rollout.max_head_offpolicyness
evaluate_every | eval_steps | trainer.test_freq | eval_steps | eval_interval | evaluator.freq_steps
CheckpointConfig(every=...) | save_steps | trainer.save_freq | save_steps | save_interval |
    saver.freq_steps
resume | resume_from_checkpoint | trainer.resume_mode | load_checkpoint | load | recover.mode
name | run_name | trainer.experiment_name | wandb_run_name | wandb_group | experiment_name
    trial_name
root | output_dir | trainer.default_local_dir | save_path ckpt_path | save | cluster.fileroot
trackers | report_to | trainer.logger trainer.project_name | use_wandb use_tensorboard | use_wandb |
    stats_logger.wandb.mode
""")


@cache
def _known() -> dict[str, list[tuple[str, _PeerName]]]:
    """Map the last part of a library's name to pairs (library and full name, setting)."""
    found: dict[str, list[tuple[str, _PeerName]]] = {}
    for row in PEER_NAMES:
        for library in LIBRARIES:
            for name in row.names_of(library):
                found.setdefault(name.rpartition(".")[2], []).append((f"{library} {name}", row))
    return found


def peer_hint(name: str, known: Collection[str]) -> str:
    """Return a suffix for an error message: Weft's name for another library's setting, or "".

    >>> peer_hint("num_generations", ["n", "steps"])
    "; num_generations is TRL's name: Weft's is 'n'"
    >>> peer_hint("--actor.lr", ["learning_rate"])
    "; actor.lr is verl's name: Weft's is 'learning_rate'"
    >>> peer_hint("max_steps", ["shuffle"])
    "; max_steps is TRL's name: Weft's is weft.train(steps=...) (updates, not epochs)"
    >>> peer_hint("nonsense", ["n"])
    ''
    """
    name = name.lstrip("+-").replace("-", "_")
    parts = name.split(".")
    # A setting of Weft, spelled differently.
    if parts[-1] in known and len(parts) == 1:
        return ""
    candidates = _known().get(parts[-1], [])
    # Several names may share the last part: prefer the longest common ending.
    best = max(
        candidates, key=lambda each: _common_end(each[0].split(" ")[1].split("."), parts), default=None
    )
    # A bare `n` is too common to attribute to a library.
    if best is None or (parts[-1] == "n" and len(parts) == 1):
        return ""
    library, row = best[0].split(" ")[0], best[1]
    own = f"weft.train({row.weft}=...)" if row.weft.isidentifier() else row.weft
    note = f" ({row.note})" if row.note else ""
    return f"; {name} is {library}'s name: Weft's is {repr(row.setting) if row.setting in known else own}{note}"


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of equal parts at the end.

    >>> _common_end(["actor", "lr"], ["actor", "optim", "lr"])
    1
    """
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count


def markdown_table() -> str:
    """Return the Markdown table for docs/coming_from.md."""
    lines = ["| Weft | " + " | ".join(LIBRARIES) + " |", "|---" * (len(LIBRARIES) + 1) + "|"]
    for row in PEER_NAMES:
        names = [", ".join(f"`{name}`" for name in row.names_of(library)) for library in LIBRARIES]
        note = f": {row.note}" if row.note else ""
        lines.append(f"| `{row.weft}`{note} | " + " | ".join(names) + " |")
    return "\n".join(lines)
