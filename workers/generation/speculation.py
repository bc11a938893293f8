"""Speculation: settings of drafts, which of them the model accepts, and whether they pay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import Field, model_validator

from ...dataflow.config import Config
from ...dataflow.metrics import Mean, Metrics
from ..models.model_folder import find_model_config, text_settings


class Speculation(Config):
    """Speculative decoding: something cheap drafts the next tokens, and the model checks all of them
    in one step (arXiv:2211.17192). Only vLLM supports it.

        rollout = weft.group(weft.RolloutWorker, ..., speculation=weft.Speculation(method="suffix"))

    Responses keep the model's distribution and its log-probabilities, however bad the drafts are.
    """

    method: Literal["suffix", "ngram", "draft_model", "mtp"] = "suffix"
    """What drafts. "suffix" continues earlier responses to the same prompt, of the group and of
    earlier epochs. "ngram" continues text of the prompt and the response itself. "draft_model"
    samples from a smaller model. "mtp" uses the heads of a model that was trained to predict several
    tokens. Choose "ngram" if responses copy from their prompts, and the last two for text that never
    repeats."""
    tokens: int = Field(default=4, ge=1, le=32)
    """[tokens] Maximum length of a draft. Raise it if `draft_acceptance` is above 0.8."""
    model: str | Path | None = None
    """Folder or Hugging Face id of the draft model. Set it for "draft_model", to a small model with the
    vocabulary of the policy. It is never updated, so its acceptance falls as the policy changes."""
    off_above: int | None = Field(default=None, ge=0)
    """[responses] Draft only while at most this many responses decode together. None measures for
    each batch size whether drafts pay. Set it if equal runs must sample equal
    tokens; a resumed run still samples others."""

    @model_validator(mode="after")
    def _has_a_draft_model_if_it_needs_one(self) -> Speculation:
        if self.model is None and self.method == "draft_model":
            raise ValueError("method='draft_model' needs a draft model; pass model=...")
        if self.model is not None and self.method != "draft_model":
            raise ValueError(
                f"method={self.method!r} takes no draft model; leave out model={str(self.model)!r}, or choose method='draft_model'"
            )
        return self

    @property
    def has_weights(self) -> bool:
        """Whether weights that never arrive again draft."""
        return self.method in ("draft_model", "mtp")

    def engine_arguments(self, max_num_seqs: int, on_gpu: bool) -> dict[str, Any]:
        """Return vLLM's `speculative_config`."""
        found: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.tokens}
        if self.drafts_by_weft(on_gpu):
            module = "weft.workers.generation.suffix_drafts"
            drafter = "SuffixDrafter" if self.method == "suffix" else "NgramDrafter"
            return {**found, "method": "custom_class", "model": f"{module}.{drafter}"}
        if self.method == "ngram":
            found |= {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
        if self.model is not None:
            found["model"] = str(find_model_config(self.model).parent)
        limit = min(max_num_seqs // 2 if self.off_above is None else self.off_above, max_num_seqs)
        drafting, plain = (1, limit, self.tokens), (limit + 1, max_num_seqs, 0)
        # `VllmDrafts` overwrites it. vLLM captures CUDA graphs for the numbers in it.
        found["num_speculative_tokens_per_batch_size"] = [
            part for part in (drafting, plain) if part[0] <= part[1]
        ]
        return found

    def drafts_by_weft(self, on_gpu: bool) -> bool:
        """Return whether Weft's drafters draft, which need the tokens of the step before."""
        return self.method == "suffix" or (self.method == "ngram" and not on_gpu)


def has_mtp_heads(settings: Mapping[str, Any]) -> bool:
    """Return whether a model with this `config.json` has heads that predict several tokens.

    >>> has_mtp_heads({"num_nextn_predict_layers": 1}), has_mtp_heads({"num_hidden_layers": 4})
    (True, False)
    """
    text = text_settings(settings)
    return any(
        isinstance(value, int) and value > 0
        for name, value in text.items()
        if "nextn" in name or "mtp" in name
    )


class Payoff:
    """Decides before each step of an engine whether to draft.

        drafts = payoff.decide(responses=12)
        ...  # the step
        payoff.note(seconds=0.02, tokens=19)

    Checking drafts is nearly free for few responses, because a step takes as long as reading the
    weights, and costs as much as further responses for many. So the answer depends on the number of
    responses. Numbers between two powers of two share an answer. For each, the engine decodes 16
    steps with drafts and 16 without, then 480 in the way with the smaller median time per token, and
    then measures again.
    """

    TRIAL, CYCLE = 16, 512

    def __init__(self, off_above: int | None = None) -> None:
        self._off_above = off_above
        self._sizes: dict[int, _Size] = {}
        self._size: _Size | None = None
        self._drafted = False

    def decide(self, responses: int) -> bool:
        """Return whether to draft in the next step, which decodes this many responses."""
        if self._off_above is not None:
            return responses <= self._off_above
        size = self._sizes.setdefault(responses.bit_length(), _Size())
        drafts = size.next()
        # A step checks the drafts of the step before it, so the first one after a change is mixed.
        self._size = size if drafts == self._drafted else None
        self._drafted = drafts
        return drafts

    def note(self, seconds: float, tokens: int) -> None:
        """Note the duration of the step and the number of its tokens."""
        if self._size is not None and tokens:
            self._size.costs[self._drafted].append(seconds / tokens)


class _Size:
    """Batches of similar size."""

    def __init__(self) -> None:
        self._steps = 0
        self._pays = True
        self.costs: dict[bool, list[float]] = {True: [], False: []}
        """[s/token] of the measured steps with and without drafts."""

    def next(self) -> bool:
        place = self._steps % Payoff.CYCLE
        self._steps += 1
        if place == 0:
            self.costs = {True: [], False: []}
        if place < 2 * Payoff.TRIAL:
            return place < Payoff.TRIAL
        if place == 2 * Payoff.TRIAL and all(self.costs.values()):
            self._pays = median(self.costs[True]) < median(self.costs[False])
        return self._pays


class DraftCounts:
    """Counts drafts, and the tokens of them that the model accepted.

    >>> counts = DraftCounts()
    >>> counts.note(drafted=3, accepted=1)
    >>> {name: metric.value for name, metric in counts.metrics().items()}
    {'draft_acceptance': 0.3333333333333333, 'draft_acceptance_1': 1.0, 'draft_acceptance_2': 0.0, 'draft_acceptance_3': 0.0}
    """

    def __init__(self) -> None:
        self._drafted_at: list[int] = []
        self._accepted_at: list[int] = []
        """Number of accepted tokens at each position of a draft."""

    def note(self, drafted: int, accepted: int) -> None:
        new = [0] * (drafted - len(self._drafted_at))
        self._drafted_at += new
        self._accepted_at += new
        for position in range(drafted):
            self._drafted_at[position] += 1
            self._accepted_at[position] += position < accepted

    def metrics(self) -> Metrics:
        if not self._drafted_at:
            return {}
        pairs = [*zip(self._accepted_at, self._drafted_at, strict=True)]
        at = {f"draft_acceptance_{k}": Mean(float(a), float(d)) for k, (a, d) in enumerate(pairs, 1)}
        total = Mean(float(sum(self._accepted_at)), float(sum(self._drafted_at)))
        return {"draft_acceptance": total, **at}
