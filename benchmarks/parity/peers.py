"""Functions of TRL and verl for `parity.py`. Runs in .venv-peers.

    python benchmarks/parity/peers.py SEED OUTPUTS.npz

TRL's losses are methods of trainers; a stand-in for the trainer holds the settings.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from inputs import BOUNDS, MAX_TOKENS, Function, alone, among_several, draw, draw_pairs, evaluate
from trl_preferences import preferences_of_trl


def module(name: str) -> Any:
    return importlib.import_module(name)  # Weft's environment, where types are checked, has neither


def of_verl() -> dict[str, Function]:
    core, correction = (
        module("verl.trainer.ppo.core_algos"),
        module("verl.trainer.ppo.rollout_corr_helper"),
    )
    functional, configs = module("verl.utils.torch_functional"), module("verl.workers.config")

    def config(**settings: Any) -> Any:
        return configs.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)

    def estimator(name: str, **settings: Any) -> Function:
        function = getattr(core, f"compute_{name}_outcome_advantage")

        def call(x: SimpleNamespace) -> Any:
            return function(x.outcome_rewards, response_mask=x.mask, index=x.groups.numpy(), **settings)[
                0
            ]

        return call

    def reinforce_plus_plus(x: SimpleNamespace) -> Any:
        function = core.compute_reinforce_plus_plus_outcome_advantage
        return function(x.token_rewards, response_mask=x.mask, config=SimpleNamespace(gamma=0.99))[0]

    def remax(x: SimpleNamespace) -> Any:
        return core.compute_remax_outcome_advantage(
            x.outcome_rewards, x.baselines, response_mask=x.mask
        )[0]

    def gae(index: int) -> Function:
        return lambda x: core.compute_gae_advantage_return(
            x.token_rewards, x.values, x.mask, 0.99, 0.95
        )[index]

    def loss(name: str, mode: str = "token-mean", **settings: Any) -> Function:
        function = core.get_policy_loss_fn(name)

        def call(x: SimpleNamespace) -> Any:
            return function(x.old, x.logprobs, x.advantages, x.mask, mode, config(**settings))[0]

        return call

    def gspo(x: SimpleNamespace) -> Any:
        function, settings = (
            core.get_policy_loss_fn("gspo"),
            config(clip_ratio_low=0.05, clip_ratio_high=0.08),
        )
        return function(
            x.old, x.logprobs, x.row_advantages[:, None], x.mask, "seq-mean-token-mean", settings
        )[0]

    def corrected(x: SimpleNamespace) -> Any:
        weights, _ = correction.compute_rollout_correction_weights(
            x.old - x.reference, x.mask, "token", 1.2
        )
        function = core.get_policy_loss_fn("vanilla")
        return function(
            x.old, x.logprobs, x.advantages, x.mask, "token-mean", config(clip_ratio_c=1e6), weights
        )[0]

    def reinforce(x: SimpleNamespace) -> Any:
        function = core.compute_policy_loss_reinforce
        return function(x.old, x.logprobs, x.advantages, x.mask, "token-mean", config())[0]

    def aggregated(mode: str, **settings: Any) -> Function:
        return lambda x: core.agg_loss(-x.logprobs, x.mask, mode, **settings)

    def kl(name: str) -> Function:
        return lambda x: core.kl_penalty(x.logprobs, x.reference, name)

    def value_loss(mode: str) -> Function:
        return lambda x: core.compute_value_loss(x.new_values, x.returns, x.values, x.mask, 0.2, mode)[0]

    def adaptive(x: SimpleNamespace) -> Any:
        controller, values = core.AdaptiveKLController(0.2, 6.0, 10_000), []
        for observed in (8.0, 6.1, 2.0, 5.9):
            controller.update(observed, 256)
            values.append(controller.value)
        return torch.tensor(values)

    def weights(level: str) -> Function:
        return lambda x: correction.compute_rollout_correction_weights(
            x.old - x.reference, x.mask, level, 1.5
        )[0]

    def kept(rule: str) -> Function:
        def call(x: SimpleNamespace) -> Any:
            bounds = "_".join(map(str, BOUNDS))
            mask, _ = correction.compute_rollout_rejection_mask(
                x.old - x.reference, x.mask, rule, bounds
            )
            return mask.float()

        return call

    def right_or_wrong(x: SimpleNamespace) -> Any:
        x.outcome_rewards = (x.outcome_rewards > 0).float()
        return among_several(estimator("gpg"))(x)

    def far(x: SimpleNamespace) -> Any:
        x.reference = x.reference + 4
        return kl("k3")(x)

    grouped = {
        "verl grpo": estimator("grpo"),
        "verl grpo_vectorized": estimator("grpo_vectorized"),
        "verl rloo": estimator("rloo"),
        "verl opo": estimator("opo"),
        "verl reinforce_plus_plus_baseline": estimator("reinforce_plus_plus_baseline"),
        "verl gpg advantages": estimator("gpg"),
    }
    rules = ("token_k1", "seq_sum_k1", "seq_mean_k1")
    return {
        **{name: among_several(function) for name, function in grouped.items()},
        **{f"{name}, groups of one row": alone(function) for name, function in grouped.items()},
        "verl grpo without deviation": among_several(estimator("grpo", norm_adv_by_std_in_grpo=False)),
        "verl rloo_vectorized": estimator("rloo_vectorized"),
        "verl grpo_passk": among_several(
            estimator("grpo_passk", config={"norm_adv_by_std_in_grpo": False})
        ),
        "verl grpo_passk, divided by the deviation": among_several(estimator("grpo_passk", config={})),
        **{f"verl rejection {rule}": kept(rule) for rule in rules},
        **{f"verl rejection {rule}, the same bounds": kept(rule) for rule in rules},
        "verl gae, advantages": gae(0),
        "verl gae, returns": gae(1),
        "verl reinforce_plus_plus": reinforce_plus_plus,
        "verl remax": remax,
        "verl masked_whiten": lambda x: functional.masked_whiten(x.advantages, x.mask),
        "verl masked_whiten without shift": lambda x: functional.masked_whiten(
            x.advantages, x.mask, shift_mean=False
        ),
        "verl compute_rewards": lambda x: core.compute_rewards(
            x.outcome_rewards, x.old, x.reference, 0.1
        ),
        "verl AdaptiveKLController": adaptive,
        "verl vanilla": loss("vanilla", clip_ratio_c=1e6),
        "verl vanilla, clip-higher": loss(
            "vanilla", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e6
        ),
        "verl vanilla, dual clip": loss("vanilla", clip_ratio_c=1.5),
        "verl vanilla, sequence mean": loss("vanilla", "seq-mean-token-mean", clip_ratio_c=1e6),
        "verl vanilla, corrected": corrected,
        "verl gspo": gspo,
        "verl sapo": loss("sapo", tau_pos=1.0, tau_neg=1.05),
        "verl cispo": loss("cispo", clip_ratio_low=0.2, clip_ratio_high=0.28),
        "verl gpg": loss("gpg"),
        "verl reinforce": reinforce,
        "verl agg_loss token-mean": aggregated("token-mean"),
        "verl agg_loss seq-mean-token-mean": aggregated("seq-mean-token-mean"),
        "verl agg_loss seq-mean-token-sum-norm": aggregated(
            "seq-mean-token-sum-norm", loss_scale_factor=MAX_TOKENS
        ),
        **{
            f"verl kl_penalty {name}": kl(name)
            for name in ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
        },
        "verl value loss": value_loss("token-mean"),
        "verl value loss, sequence mean": value_loss("seq-mean-token-mean"),
        "verl correction weights token": weights("token"),
        "verl correction weights sequence": weights("sequence"),
        "verl gpg advantages, rewards of 0 and 1": right_or_wrong,
        "verl kl_penalty k3, far from the reference": far,
    }


def of_trl() -> dict[str, Function]:
    grpo, rloo = (
        module("trl.trainer.grpo_trainer").GRPOTrainer,
        module("trl.trainer.rloo_trainer").RLOOTrainer,
    )
    rewards, gkd = module("trl.rewards"), module("trl.experimental.gkd.gkd_trainer").GKDTrainer
    accelerator = SimpleNamespace(
        gather=lambda t: t, reduce=lambda t, **_: t, num_processes=1, sync_gradients=True
    )

    def trainer(x: SimpleNamespace, loss_type: str, **settings: Any) -> Any:
        entropy_coef = settings.pop("entropy_coef", 0.0)
        arguments = {
            "use_bias_correction_kl": False,
            "delta": None,
            "sapo_temperature_pos": 1.0,
            "sapo_temperature_neg": 1.05,
            "steps_per_generation": 1,
        }
        return SimpleNamespace(
            **{
                "_get_per_token_logps_and_entropies": lambda *_, **__: (x.logprobs, x.entropy, None),
                "_metrics": {"train": defaultdict(list)},
                "_entropy_bonus_enabled": entropy_coef > 0,
                "accelerator": accelerator,
                "args": SimpleNamespace(
                    **arguments | {k: settings.pop(k) for k in list(settings) if k in arguments}
                ),
                "aux_loss_enabled": False,
                "beta": 0.0,
                "current_gradient_accumulation_steps": 1,
                "entropy_coef": entropy_coef,
                "epsilon_low": 0.2,
                "epsilon_high": 0.28,
                "importance_sampling_level": "token",
                "loss_type": loss_type,
                "max_completion_length": MAX_TOKENS,
                "model": SimpleNamespace(training=True),
                "off_policy_mask_threshold": None,
                "top_entropy_quantile": 1.0,
                "use_adaptive_entropy": False,
                "use_vllm": False,
            }
            | settings
        )

    def inputs(x: SimpleNamespace) -> dict[str, Any]:
        ids = torch.zeros_like(x.mask)
        return {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": x.mask,
            "advantages": x.row_advantages,
            "old_per_token_logps": x.old,
            "old_logps": (x.old * x.mask).sum(1),
            "ref_per_token_logps": x.reference,
            "num_items_in_batch": x.mask.sum(),
        }

    def loss(loss_type: str, **settings: Any) -> Function:
        return lambda x: grpo._compute_loss(trainer(x, loss_type, **settings), None, inputs(x))

    def rloo_loss(x: SimpleNamespace) -> Any:
        return rloo._compute_loss(trainer(x, "rloo"), None, inputs(x))

    def overlong(x: SimpleNamespace) -> Any:
        penalty = rewards.get_soft_overlong_punishment(max_completion_len=40, soft_punish_cache=16)
        return torch.tensor(penalty([[0] * n for n in x.lengths.tolist()]))

    def masked_row(x: SimpleNamespace) -> Any:
        x.mask[0] = 0
        return loss("grpo")(x)

    def divergence(beta: float) -> Function:
        def call(x: SimpleNamespace) -> Any:
            labels = torch.where(x.mask > 0, 0, -100)
            total = gkd.generalized_jsd_loss(
                x.logits, x.reference_logits, labels, beta=beta, reduction="sum"
            )
            return total / x.mask.sum()

        return call

    return {
        "trl grpo": loss("grpo"),
        "trl bnpo": loss("bnpo"),
        "trl dapo": loss("dapo"),
        "trl dr_grpo": loss("dr_grpo"),
        "trl cispo": loss("cispo", epsilon_high=1.2),
        "trl sapo": loss("sapo"),
        "trl luspo": loss("luspo", importance_sampling_level="sequence"),
        "trl grpo, sequence level": loss(
            "grpo", importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.08
        ),
        "trl grpo, two-sided": loss("grpo", delta=1.5),
        "trl grpo, kl": loss("grpo", beta=0.04),
        "trl bnpo, entropy bonus": loss("bnpo", entropy_coef=0.01),
        "trl rloo": rloo_loss,
        "trl soft overlong punishment": overlong,
        "trl gkd, reverse": divergence(1.0),
        "trl grpo, a row without a trained token": masked_row,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    seed, outputs = int(sys.argv[1]), sys.argv[2]
    found = evaluate(of_verl() | of_trl(), draw(seed)) | evaluate(preferences_of_trl(), draw_pairs(seed))
    np.savez(outputs, **found)  # pyright: ignore[reportArgumentType]
