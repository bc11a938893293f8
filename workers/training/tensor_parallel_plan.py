"""TensorParallelPlan: how `transformers` says that ranks may share the layers of a model, and whether so many can. Without torch.

    in the plan                          what a rank has
    colwise                              rows of the weight: some outputs, with which it goes on alone
    rowwise                              columns of it, for the inputs that it has; the ranks' outputs are added up
    colwise_gather_output, colwise_rep   as colwise, and the outputs are gathered
    rowwise_split_input, rowwise_rep     as rowwise, of an input that all ranks have
    replicated_with_grad_allreduce       all of it, applied to its own heads: its gradients are added up once a step
    moe_tp_experts, ep_dispatch_experts  some of the experts, whole, where a plan may cut each of them: their outputs are added up

Whatever a plan does not name is the same on all ranks, and gets the same gradient there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dataflow.errors import UserError
from ..models.model_folder import EXPERTS_NAMES

ROWS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""Styles that share the rows of a weight -> whether outputs are gathered."""
COLUMNS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
"""Styles that share its columns -> whether all ranks have the whole input."""
PARTIAL = frozenset({"replicated_with_grad_allreduce"})
EXPERTS = frozenset({"moe_tp_experts", "ep_dispatch_experts"})
_CUTS_OF_EXPERTS = frozenset({"packed_colwise", "rowwise", "grouped_gemm"})
"""How plans cut experts that have [experts, ...] weights and take hidden states, numbers and weights; others (Llama 4) are others."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class TensorParallelPlan:
    """The style of each module that ranks share; names have `*` in the place of numbers."""

    styles: Mapping[str, str]

    @classmethod
    def of(
        cls, shared: Mapping[str, str] | None, experts: Mapping[str, str] | None
    ) -> TensorParallelPlan:
        """The plan of a model.

        Args:
            shared: its `tp_plan`.
            experts: its `ep_plan`, for models that name their experts there alone (GPT-OSS).
        """
        styles = {
            **{name: style for name, style in (experts or {}).items() if style in EXPERTS},
            **(shared or {}),
        }
        of_experts = [name for name, style in styles.items() if style in EXPERTS]
        # Embeddings and head are shared without a plan.
        styles = {name: style for name, style in styles.items() if style != "embedding_rowwise"}
        inside = {
            name
            for name, style in styles.items()
            for module in of_experts
            if name.startswith(f"{module}.") and style in _CUTS_OF_EXPERTS
        }
        return cls({name: style for name, style in styles.items() if name not in inside})

    def style_of(self, name: str) -> str | None:
        """The style of a module, by its name with numbers; None: all ranks have it.

        >>> TensorParallelPlan({"layers.*.up": "colwise"}).style_of("layers.12.up")
        'colwise'
        """
        return self.styles.get(_NUMBER.sub(".*", name))

    @property
    def unknown(self) -> dict[str, str]:
        """Modules whose style cannot be carried out."""
        known = {*ROWS, *COLUMNS, *PARTIAL, *EXPERTS}
        return {name: style for name, style in self.styles.items() if style not in known}

    @property
    def shares_heads(self) -> bool:
        """Whether each rank has its own attention heads."""
        return any(
            style == "colwise" and re.search(r"att\w*\.", name) for name, style in self.styles.items()
        )

    @property
    def shares_experts(self) -> bool:
        """Whether each rank has its own experts."""
        return any(style in EXPERTS for style in self.styles.values())


def check_tensor_parallel(model: str | Path, settings: Any, ranks: int) -> None:
    """See that so many ranks can share a model.

    Args:
        settings: of its text, as `transformers` completes them (`complete_text_settings`).

    Raises:
        UserError: naming the rule and the setting that breaks it.
    """
    plan = TensorParallelPlan.of(
        settings.base_model_tp_plan, getattr(settings, "base_model_ep_plan", None)
    )
    kind, what = settings.model_type, f"tensor_parallel={ranks}"
    if not plan.styles:
        raise UserError(
            f"{what} cannot share model {str(model)!r}: transformers has no plan for models of type {kind!r}; leave it at 1"
        )
    if plan.unknown:
        named = ", ".join(f"{name} ({style})" for name, style in sorted(plan.unknown.items()))
        raise UserError(
            f"{what} cannot share models of type {kind!r}: their plan asks for {named}; leave it at 1"
        )
    numbers: dict[str, Any] = {"intermediate_size": getattr(settings, "intermediate_size", None)}
    if plan.shares_heads:
        numbers |= {
            name: getattr(settings, name, None) for name in ("num_attention_heads", "num_key_value_heads")
        }
    if plan.shares_experts:
        counts = [name for name in EXPERTS_NAMES if isinstance(getattr(settings, name, None), int)]
        numbers |= {name: getattr(settings, name) for name in counts[:1]}
    for name, number in numbers.items():
        if isinstance(number, int) and number % ranks:
            raise UserError(f"{what} does not divide the model's {name} ({number})")
