"""TRL's preference losses on given inputs: values and gradients. Runs in .venv-peers, never in Weft's environment.

    python benchmarks/parity/trl_preferences.py INPUTS.npz OUTPUTS.npz

TRL's losses are part of its trainers' steps. The steps are called as they are, with a model that answers with given log-probabilities.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

DPO: dict[str, dict[str, Any]] = {
    "dpo": {"loss_types": ["sigmoid"], "beta": 0.1},
    "dpo, length-normalised": {"loss_types": ["sigmoid_norm"], "beta": 2.0},
    "robust dpo": {"loss_types": ["robust"], "beta": 0.1, "label_smoothing": 0.1},
    "ipo": {"loss_types": ["ipo"], "beta": 0.1},
    "hinge": {"loss_types": ["hinge"], "beta": 0.1},
    "dpo with likelihood (rpo)": {"loss_types": ["sigmoid", "sft"], "beta": 0.1},
}


class Identity:
    """What the steps want of accelerate, for one process."""

    device = torch.device("cpu")

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = gather


def main(inputs: str, outputs: str) -> None:
    given = {name: torch.tensor(values) for name, values in np.load(inputs).items()}
    lengths, number = given["lengths"], len(given["lengths"]) // 2  # rows: all chosen ones, then all rejected ones
    found: dict[str, np.ndarray] = {}

    def keep(name: str, value: torch.Tensor, *wanted: torch.Tensor) -> None:
        gradients = torch.autograd.grad(value, wanted)
        found[f"{name}/value"] = value.detach().numpy()
        found[f"{name}/gradient"] = torch.cat([g.flatten() for g in gradients]).numpy()

    def tokens() -> torch.Tensor:
        return given["logprobs"].clone().requires_grad_()

    for name, settings in DPO.items():
        logprobs = tokens()
        losses = []
        for pair in range(number):  # one at a time: TRL's means over the tokens of a batch are then means over a pair's
            rows = torch.tensor([pair, number + pair])
            losses.append(dpo(settings, logprobs, given["reference_logprobs"], lengths, rows))
        keep(name, torch.stack(losses).mean(), logprobs)
    for name, settings in {
        "simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.0},
        "cdpo": {"loss_type": "sigmoid", "beta": 0.1, "simpo_gamma": 0.0, "label_smoothing": 0.1},
    }.items():
        from trl.experimental.cpo import CPOTrainer  # pyright: ignore[reportMissingImports]

        logprobs = tokens()
        scores = of_rows(logprobs - (0 if name == "simpo" else given["reference_logprobs"]), lengths)
        if name == "simpo":
            scores = scores / lengths
        trainer = SimpleNamespace(alpha=0.0, accelerator=Identity(), **settings)
        losses, *_ = CPOTrainer.cpo_loss(trainer, scores[:number], scores[number:])
        keep(name, losses.mean(), logprobs)
    from trl.experimental.orpo import ORPOTrainer  # pyright: ignore[reportMissingImports]

    logprobs = tokens()
    scores = of_rows(logprobs, lengths) / lengths
    odds, *_ = ORPOTrainer.odds_ratio_loss(
        SimpleNamespace(beta=0.1, accelerator=Identity()), scores[:number], scores[number:]
    )
    keep("orpo, odds ratio", -odds.mean(), logprobs)
    logprobs = tokens()
    keep("kto", kto(logprobs, given, lengths, number), logprobs)
    rewards = given["rewards"].clone().requires_grad_()
    keep("bradley-terry", bradley_terry(rewards, None), rewards)
    rewards = given["rewards"].clone().requires_grad_()
    keep("bradley-terry with margin", bradley_terry(rewards, given["margins"]), rewards)
    np.savez(outputs, **found)  # pyright: ignore[reportArgumentType]


def of_rows(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.sum() for part in values.split(lengths.tolist())])


def padded(values: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[rows, longest], 0 behind the end."""
    parts = values.split(lengths.tolist())
    return torch.nn.utils.rnn.pad_sequence([parts[i] for i in rows.tolist()], batch_first=True)


def model_of(log_probs: torch.Tensor) -> Any:
    zeros = torch.zeros_like(log_probs)
    answer = SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)

    def model(**_: Any) -> Any:
        return answer

    model.training = True  # pyright: ignore[reportFunctionMemberAccess]
    return model


def of_trainer(**settings: Any) -> Any:
    plain = {
        "accelerator": Identity(),
        "aux_loss_enabled": False,
        "ld_alpha": None,
        "precompute_ref_logps": True,
        "f_divergence_type": "reverse_kl",
        "label_smoothing": 0.0,
        "use_weighting": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "args": SimpleNamespace(center_rewards_coefficient=None),
    }
    return SimpleNamespace(**{**plain, **settings})


def batch_of(lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Prompts of one token before the responses."""
    places = torch.arange(1 + int(lengths.max()))
    completion = ((places > 0) & (places <= lengths[:, None])).long()
    return {"input_ids": completion, "attention_mask": torch.ones_like(completion), "completion_mask": completion}


def dpo(
    settings: dict[str, Any], logprobs: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    from trl import DPOTrainer  # pyright: ignore[reportMissingImports]

    loss_types = settings["loss_types"]
    trainer = of_trainer(**{**settings, "loss_weights": [1.0] * len(loss_types)}, model=SimpleNamespace(training=True))
    chosen, rejected = padded(reference, lengths, rows).sum(1).chunk(2)
    batch = batch_of(lengths[rows]) | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return DPOTrainer._compute_loss(trainer, model_of(padded(logprobs, lengths, rows)), batch, False)


def kto(logprobs: torch.Tensor, given: dict[str, torch.Tensor], lengths: torch.Tensor, number: int) -> torch.Tensor:
    """With the divergence that TRL takes: the mean over mismatched responses, not below 0."""
    from trl import KTOTrainer  # pyright: ignore[reportMissingImports]

    rows = torch.arange(2 * number)
    trainer = of_trainer(
        model=SimpleNamespace(training=True),
        loss_type="kto",
        beta=0.1,
        desirable_weight=1.5,
        undesirable_weight=1.0,
        calculate_KL=True,
        _compute_kl_logps=lambda model, batch: of_rows(given["mismatched_logprobs"], lengths),
    )
    batch = batch_of(lengths) | {
        "label": rows < number,
        "ref_logps": of_rows(given["reference_logprobs"], lengths),
        "ref_KL_logps": of_rows(given["mismatched_reference_logprobs"], lengths),
    }
    return KTOTrainer._compute_loss(trainer, model_of(padded(logprobs, lengths, rows)), batch, False)


def bradley_terry(rewards: torch.Tensor, margins: torch.Tensor | None) -> torch.Tensor:
    from trl import RewardTrainer  # pyright: ignore[reportMissingImports]

    def model(**_: Any) -> Any:
        return SimpleNamespace(logits=rewards[:, None])

    inputs: dict[str, Any] = {"attention_mask": torch.ones(len(rewards), 1)}
    if margins is not None:
        inputs["margin"] = margins
    return RewardTrainer.compute_loss(of_trainer(model=SimpleNamespace(training=True)), model, inputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
