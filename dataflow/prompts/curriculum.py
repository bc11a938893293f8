"""Curriculum: which prompts a run issues next, by measured solve rates.

`Curriculum` is the description that a source carries (`Prompts.with_curriculum`). `PromptQueue`
(`prompt_queue.py`) is its state in one run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from ..config import Config
from ..errors import UserError, nearest
from ..source import Source

NEW = "new"
"""Pool of the prompts without a solve rate."""


def learnability(solve_rate: float) -> float:
    """Return p (1 - p), the variance of the outcomes of a prompt with solve rate p: largest for
    prompts that half of the responses solve (arXiv:2408.15099). For `Curriculum(follow=...)`.

    >>> learnability(0.5), learnability(1.0)
    (0.25, 0.0)
    """
    return solve_rate * (1 - solve_rate)


def unsolved(solve_rate: float) -> float:
    """Return 1 - p for solve rate p: hard prompts are drawn most often (arXiv:2501.12599). For
    `Curriculum(follow=...)`.

    >>> unsolved(0.25)
    0.75
    """
    return 1 - solve_rate


class Pool(Config):
    """Prompts of similar difficulty, and their share of the drawn prompts.

    >>> Pool(name="hard", up_to=0.2, share=2).name
    'hard'
    """

    name: str
    """Required. Set it to a word that names the pool in metrics."""
    up_to: float = Field(default=1.0, ge=0, le=1)
    """[share] Largest recent solve rate of a prompt in this pool. A prompt is in the first pool that
    can hold it. Lower it to make the pool harder."""
    share: float = Field(default=1.0, gt=0)
    """[weight] Share of this pool in the drawn prompts, relative to the other pools that have
    prompts. Raise it to train more on prompts of this difficulty."""

    @field_validator("name")
    @classmethod
    def _is_word(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z]\w*", name) or name == NEW:
            raise ValueError(
                f"a pool is called by a word in small letters other than {NEW!r}, not {name!r}"
            )
        return name


class Gate(Config):
    """Retires a prompt after `times` groups in a row with a solve rate on one side of a bound.

    >>> Gate(at_least=1.0, times=2).passes([(16, 16), (16, 16)]), Gate(at_least=1.0).passes([(16, 16), (15, 16)])
    (True, False)
    """

    at_least: float | None = Field(default=None, ge=0, le=1)
    """[share] Smallest solve rate of such a group: 1 retires prompts that are always solved. Set either
    this or `at_most`."""
    at_most: float | None = Field(default=None, ge=0, le=1)
    """[share] Largest solve rate of such a group: 0 retires prompts that are never solved. Set either
    this or `at_least`."""
    times: int = Field(default=2, ge=1, le=100)
    """[groups] Number of groups in a row. Raise it if groups are small, because a few responses say
    little about a solve rate."""
    return_after: int | None = Field(default=None, ge=1)
    """[steps] Time until a retired prompt returns. If its next group still passes the gate, it retires
    again. None keeps it retired while others remain. Set it if the policy may forget solved
    prompts, or come to solve hard ones."""

    @model_validator(mode="after")
    def _has_one_bound(self) -> Gate:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a gate has one bound: at_least=... or at_most=...")
        return self

    def passes(self, groups: Sequence[tuple[int, int]]) -> bool:
        """Whether (solved, votes) of a prompt's groups, newest first, retire it."""
        recent = groups[: self.times]
        if len(recent) < self.times:
            return False
        # Divide, because 0.29 * 100 is less than 29.
        if self.at_least is not None:
            return all(solved / votes >= self.at_least for solved, votes in recent)
        return all(solved / votes <= (self.at_most or 0.0) for solved, votes in recent)


class Curriculum(Config):
    """Which prompts to draw, and how often, by the solve rates that the run measures.

    The solve rate of a prompt is the share of solved responses in its last two groups. A response (of
    agents: an episode) solves its prompt if the outcome column is at least `solved`. Responses without
    an outcome, or with masked tokens only, have no vote.

    Without settings, a curriculum only measures: the prompts come in the usual order.

        weft.Curriculum(
            pools=(weft.Pool(name="hard", up_to=0.2), weft.Pool(name="medium", up_to=0.8, share=3), weft.Pool(name="easy")),
            retire=(weft.Gate(at_least=1.0, times=2, return_after=50),),
        )
    """

    outcome: str | None = None
    """Column whose value says whether a response solves its prompt. None takes the only grader with
    verdicts, or else the only reward function. Set it if there are several reward functions: a sum
    may contain shaping terms, such as a length penalty."""
    solved: float = 1.0
    """[outcome] Smallest outcome of a solved response. Lower it for graders that give partial
    credit."""
    votes: int = Field(default=1, ge=1)
    """[responses] Smallest number of responses with a vote for a group to count. Raise it, at most to
    `n`, so that groups that lost rows retire no prompt."""
    pools: tuple[Pool, ...] = ()
    """Pools by difficulty, hardest first. Prompts that have no solve rate yet are in the pool "new"
    with a share of 1. Set it to train more on prompts of some difficulty."""
    retire: tuple[Gate, ...] = ()
    """Gates that retire prompts. Set it to save the generation of prompts without signal."""
    sources: str | None = None
    """Column that names each prompt's source, such as "data_source", or "source" after
    `Prompts.mix`. Set it to weight sources."""
    weights: Mapping[str, float] = Field(default_factory=dict)
    """[weight] Weight of each source in the drawn prompts. Empty uses the number of its active
    prompts. Set it to choose the mixture."""
    follow: Callable[[float], float] | None = None
    """Function of a solve rate, such as `learnability` or `unsolved`. Its mean over a source's active
    prompts multiplies the weight of the source, but no source falls below a twentieth of the largest
    mean. Set it if the best mixture changes during training."""

    @model_validator(mode="after")
    def _fits_together(self) -> Curriculum:
        names = [pool.name for pool in self.pools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two pools are called {twice!r}; rename one of them")
        bounds = [pool.up_to for pool in self.pools]
        if bounds != sorted(set(bounds)) or (bounds and bounds[-1] != 1):
            raise ValueError(f"pools have increasing bounds up_to, the last of 1, not {bounds}")
        if (self.weights or self.follow) and self.sources is None:
            raise ValueError("weights and follow need sources=..., the column that names each source")
        if wrong := next((name for name, weight in self.weights.items() if not weight > 0), None):
            raise ValueError(
                f"weights: {wrong!r} has weight {self.weights[wrong]!r}; it must be above 0"
            )
        return self

    def sources_of(self, table: pa.Table, where: str) -> tuple[list[str], np.ndarray]:
        """Return the names of the sources, and the index of each row's source, [rows].

        Raises:
            UserError: the column of sources is missing or has empty values, or the weights are for
                other sources.
        """
        if self.sources is None:
            return [""], np.zeros(len(table), np.int64)
        if self.sources not in table.column_names:
            known = (
                nearest(self.sources, table.column_names) or f"; it has {', '.join(table.column_names)}"
            )
            raise UserError(
                f"{where}: Curriculum(sources={self.sources!r}): there is no such column{known}"
            )
        coded = table.column(self.sources).cast(pa.string()).combine_chunks().dictionary_encode()
        if coded.null_count:
            row = int(np.flatnonzero(coded.is_null().to_numpy(zero_copy_only=False))[0])
            raise UserError(
                f"{where}: Curriculum(sources={self.sources!r}): row {row + 1} names no source; fill the column in, or drop the row"
            )
        names = coded.dictionary.to_pylist()
        for name in self.weights or ():
            if name not in names:
                known = nearest(name, names) or f"; they are {', '.join(names)}"
                raise UserError(f"{where}: Curriculum(weights=...): there is no source {name!r}{known}")
        if self.weights and (
            missing := next((name for name in names if name not in self.weights), None)
        ):
            raise UserError(
                f"{where}: Curriculum(weights=...) lacks the source {missing!r}; add its weight"
            )
        return names, coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def curriculum_of(source: Source) -> Curriculum | None:
    return getattr(source, "curriculum", None)
