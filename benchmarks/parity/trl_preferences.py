"""TRL's preference losses as functions of the inputs of `parity.py`, for `peers.py` in .venv-peers.

TRL's losses are part of its trainers' steps. The steps run unmodified, with a model that returns
given log-probabilities.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from inputs import PAIRS, Function

DPO: dict[str, dict[str, Any]] = {
    "dpo": {"loss_types": ["sigmoid"], "beta": 0.1},
    "dpo, length-normalised": {"loss_types": ["sigmoid_norm"], "beta": 2.0},
    "robust dpo": {"loss_types": ["robust"], "beta": 0.1, "label_smoothing": 0.1},
    "ipo": {"loss_types": ["ipo"], "beta": 0.1},
    "hinge": {"loss_types": ["hinge"], "beta": 0.1},
    "dpo with likelihood (rpo)": {"loss_types": ["sigmoid", "sft"], "beta": 0.1},
}


class Identity:
    """The parts of accelerate that the steps need, for one process."""

    device = torch.device("cpu")

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = gather


def preferences_of_trl() -> dict[str, Function]:
    smoothed = {"loss_type": "sigmoid", "beta": 0.1, "simpo_gamma": 0.0, "label_smoothing": 0.1}
    return {
        **{f"trl {name}": partial(dpo, settings) for name, settings in DPO.items()},
        "trl cdpo": lambda x: cpo(x.logprobs - x.reference_logprobs, x.lengths, smoothed),
        "trl simpo": simpo,
        "trl orpo, odds ratio": orpo,
        "trl kto": kto,
        "trl bradley-terry": lambda x: bradley_terry(x.scores, None),
        "trl bradley-terry with margin": lambda x: bradley_terry(x.scores, x.margins),
    }


def cpo(
    scores: torch.Tensor, lengths: torch.Tensor, settings: dict[str, Any], *, per_token: bool = False
) -> Any:
    from trl.experimental.cpo import CPOTrainer  # pyright: ignore[reportMissingImports]

    scores = of_rows(scores, lengths) / (lengths if per_token else 1)
    trainer = SimpleNamespace(alpha=0.0, accelerator=Identity(), **settings)
    return CPOTrainer.cpo_loss(trainer, scores[:PAIRS], scores[PAIRS:])[0].mean()


def simpo(x: SimpleNamespace) -> Any:
    settings = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.0}
    return cpo(x.logprobs, x.lengths, settings, per_token=True)


def orpo(x: SimpleNamespace) -> Any:
    from trl.experimental.orpo import ORPOTrainer  # pyright: ignore[reportMissingImports]

    scores, trainer = (
        of_rows(x.logprobs, x.lengths) / x.lengths,
        SimpleNamespace(beta=0.1, accelerator=Identity()),
    )
    return -ORPOTrainer.odds_ratio_loss(trainer, scores[:PAIRS], scores[PAIRS:])[0].mean()


def of_rows(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.sum() for part in values.split(lengths.tolist())])


def padded(values: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Pad to [rows, longest] with 0."""
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
    """Return a batch with one prompt token before each response."""
    places = torch.arange(1 + int(lengths.max()))
    completion = ((places > 0) & (places <= lengths[:, None])).long()
    return {
        "input_ids": completion,
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
    }


def dpo(settings: dict[str, Any], x: SimpleNamespace) -> Any:
    """Average over pairs, one at a time, so that TRL's means over the batch's tokens are per
    pair."""
    from trl import DPOTrainer  # pyright: ignore[reportMissingImports]

    weights = [1.0] * len(settings["loss_types"])
    losses: list[torch.Tensor] = []
    for pair in range(PAIRS):
        rows = torch.tensor([pair, PAIRS + pair])
        trainer = of_trainer(**settings, loss_weights=weights, model=SimpleNamespace(training=True))
        chosen, rejected = padded(x.reference_logprobs, x.lengths, rows).sum(1).chunk(2)
        batch = batch_of(x.lengths[rows]) | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        model = model_of(padded(x.logprobs, x.lengths, rows))
        losses.append(DPOTrainer._compute_loss(trainer, model, batch, False))
    return torch.stack(losses).mean()


def kto(x: SimpleNamespace) -> Any:
    """Use TRL's divergence: the mean over mismatched responses, at least 0."""
    from trl import KTOTrainer  # pyright: ignore[reportMissingImports]

    rows = torch.arange(2 * PAIRS)
    trainer = of_trainer(
        model=SimpleNamespace(training=True),
        loss_type="kto",
        beta=0.1,
        desirable_weight=1.5,
        undesirable_weight=1.0,
        calculate_KL=True,
        _compute_kl_logps=lambda model, batch: of_rows(x.mismatched_logprobs, x.lengths),
    )
    batch = batch_of(x.lengths) | {
        "label": rows < PAIRS,
        "ref_logps": of_rows(x.reference_logprobs, x.lengths),
        "ref_KL_logps": of_rows(x.mismatched_reference_logprobs, x.lengths),
    }
    return KTOTrainer._compute_loss(trainer, model_of(padded(x.logprobs, x.lengths, rows)), batch, False)


def bradley_terry(rewards: torch.Tensor, margins: torch.Tensor | None) -> torch.Tensor:
    from trl import RewardTrainer  # pyright: ignore[reportMissingImports]

    def model(**_: Any) -> Any:
        return SimpleNamespace(logits=rewards[:, None])

    inputs: dict[str, Any] = {"attention_mask": torch.ones(len(rewards), 1)}
    if margins is not None:
        inputs["margin"] = margins
    return RewardTrainer.compute_loss(of_trainer(model=SimpleNamespace(training=True)), model, inputs)
