"""TensorParallelPlan: how `transformers` splits the layers of a model over ranks, without torch.

    style in the plan                    part of each rank
    colwise                              rows of the weight: some outputs, which stay on the rank
    rowwise                              columns of the weight for its inputs; outputs are summed
    colwise_gather_output, colwise_rep   like colwise, but outputs are gathered
    rowwise_split_input, rowwise_rep     like rowwise, from an input that all ranks have
    replicated_with_grad_allreduce       the whole weight, applied to the rank's heads; gradients are
                                         summed once a step
    moe_tp_experts, ep_dispatch_experts  some whole experts (a plan may cut each one instead); outputs
                                         are summed over ranks

Modules outside the plan are replicated, and get the same gradient on all ranks.
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
"""Styles that split the rows of a weight, mapped to whether ranks gather the outputs."""
COLUMNS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
"""Styles that split the columns of a weight, mapped to whether all ranks have the whole input."""
PARTIAL = frozenset({"replicated_with_grad_allreduce"})
EXPERTS = frozenset({"moe_tp_experts", "ep_dispatch_experts"})
_CUTS_OF_EXPERTS = frozenset({"packed_colwise", "rowwise", "grouped_gemm"})
"""How plans split experts whose weights are [experts, ...] and that take hidden states, indexes and
weights. Other experts (Llama 4) use other styles."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class TensorParallelPlan:
    """Tensor-parallel style of each split module, keyed by module name with `*` for numbers."""

    styles: Mapping[str, str]

    @classmethod
    def of_model(
        cls, shared: Mapping[str, str] | None, experts: Mapping[str, str] | None
    ) -> TensorParallelPlan:
        """Return the plan of a model with this `tp_plan`. Models that list their experts only in an
        `ep_plan` (GPT-OSS) need that one too."""
        styles = {name: style for name, style in (experts or {}).items() if style in EXPERTS}
        styles |= shared or {}
        of_experts = [name for name, style in styles.items() if style in EXPERTS]
        # Weft splits embeddings and head without a plan.
        styles = {name: style for name, style in styles.items() if style != "embedding_rowwise"}
        inside = {
            name
            for name, style in styles.items()
            for module in of_experts
            if name.startswith(f"{module}.") and style in _CUTS_OF_EXPERTS
        }
        return cls({name: style for name, style in styles.items() if name not in inside})

    def style_of(self, name: str) -> str | None:
        """Return the style of a module, given its name with numbers, or None if the module is
        replicated.

        >>> TensorParallelPlan({"layers.*.up": "colwise"}).style_of("layers.12.up")
        'colwise'
        """
        return self.styles.get(_NUMBER.sub(".*", name))

    @property
    def unknown(self) -> dict[str, str]:
        """Maps the names of modules with an unsupported style to that style."""
        known = {*ROWS, *COLUMNS, *PARTIAL, *EXPERTS}
        return {name: style for name, style in self.styles.items() if style not in known}

    @property
    def shares_heads(self) -> bool:
        split = [name for name, style in self.styles.items() if style == "colwise"]
        return any(re.search(r"att\w*\.", name) for name in split)

    @property
    def shares_experts(self) -> bool:
        return any(style in EXPERTS for style in self.styles.values())


def check_tensor_parallel(model: str | Path, settings: Any, ranks: int) -> None:
    """Check that this number of ranks can split a model with these text settings
    (`complete_text_settings`). Raises UserError if not; it names the rule and the setting."""
    plan = TensorParallelPlan.of_model(
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
        for name in ("num_attention_heads", "num_key_value_heads"):
            numbers[name] = getattr(settings, name, None)
    if plan.shares_experts:
        counts = [name for name in EXPERTS_NAMES if isinstance(getattr(settings, name, None), int)]
        numbers |= {name: getattr(settings, name) for name in counts[:1]}
    for name, number in numbers.items():
        if isinstance(number, int) and number % ranks:
            raise UserError(f"{what} does not divide the model's {name} ({number})")
