"""Microbatches: parts of a call's rows, prepared for the model and the loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ...algorithms.loss import PackedRows
from ...dataflow.batch import Batch
from ...dataflow.column import (
    IMAGES,
    KEPT_COUNTS,
    KEPT_IDS,
    PER_CANDIDATE,
    PROMPT_IDS,
    RESPONSE_IDS,
    ROUTES,
    TEACHER_IDS,
    TEMPERATURE,
)
from ...dataflow.errors import UserError
from ..dispatch import RowCost
from ..kept_sets import KeptSets
from ..models.images import ImageInputs, ImageReader
from .microbatch_plan import (
    SharingCost,
    equal_prompts,
    even_microbatches,
    level_microbatches,
    plan_microbatches,
    plan_shared,
)
from .packed_sequences import PackedSequences, SharedPrompts, to_device
from .routers import Routers, Routing


@dataclass(frozen=True)
class Microbatches:
    """The rows of one call, on the host: their tokens, and the columns that a loss reads.

    A microbatch is an array of row indexes, `[rows]` int64. A rank with an empty microbatch only
    joins the collectives of other ranks.
    """

    prompt: tuple[np.ndarray, np.ndarray]
    """Prompts: ([P] int32 tokens, [rows + 1] cu_seqlens)."""
    response: tuple[np.ndarray, np.ndarray]
    """Responses: ([T] int32 tokens, [rows + 1] cu_seqlens)."""
    temperatures: np.ndarray | None
    """[rows] float32; None means 1 for all rows."""
    ragged: Mapping[str, Tensor]
    """Columns with one value per response token, [T], or with k values, [T, k]."""
    scalars: Mapping[str, Tensor]
    """Columns with one value per row, [rows]."""
    device: torch.device
    reads_last: bool = False
    """Whether the head reads the position of each response token, instead of the one before."""
    same_prompt: np.ndarray | None = None
    """[rows] int64, equal for rows that share a prompt. None disables sharing."""
    routes: list[np.ndarray] | None = None
    """Experts of each row's tokens, [tokens, layers, chosen]; None lets the routers choose."""
    images: _ShownRows | None = None
    kept_sets: KeptSets | None = None
    """The kept sets of the T response tokens; None if all are the whole vocabulary."""

    @classmethod
    def from_batch(
        cls,
        batch: Batch,
        columns: Iterable[str],
        device: torch.device,
        *,
        vocabulary: int,
        context: int | None = None,
        owner: str,
        reads_last: bool = False,
        sharing: SharingCost | None = None,
        routers: Routers | None = None,
        images: ImageReader | None = None,
    ) -> Microbatches:
        """Check the rows of a batch, and copy them with the `columns` that the loss reads.

        `owner` is the model's name in messages, `vocabulary` its number of token ids, and `context`
        a row's maximum number of tokens. `sharing` compares the cost with and without shared
        prompts; None disables sharing. `routers` replay the experts in the column `routes`; None
        lets the routers choose.

        A loss that reads `teacher_ids` compares whole distributions, so kept sets are left out then.

        Raises:
            UserError: a response has no prompt, a row exceeds the context, a ragged column does not
                match its responses, the model lacks a token id or an expert, or images do not match
                their prompt or the model.
        """
        columns = list(columns)
        is_truncated = KEPT_COUNTS in batch and str(TEACHER_IDS) not in columns
        check_rows(batch, [*columns, *([str(KEPT_COUNTS)] if is_truncated else [])])
        for name in (PROMPT_IDS, RESPONSE_IDS):
            values, _ = batch.ragged_numpy(name)
            if len(values) and not 0 <= int(values.min()) <= int(values.max()) < vocabulary:
                wrong = values.max() if values.max() >= vocabulary else values.min()
                raise UserError(
                    f"column {str(name)!r} has token id {wrong}; {owner} has ids 0 to {vocabulary - 1}"
                )
        temperatures = None
        if TEMPERATURE in batch:
            given = batch.numpy(TEMPERATURE)
            # Greedy rows (temperature 0) use the plain logits, like temperature 1.
            if not np.isin(given, (0.0, 1.0)).all():
                temperatures = np.where(given == 0, np.float32(1), given)
        ragged = {c: _of_tokens(batch, c, vocabulary, owner) for c in columns if _is_ragged(batch, c)}
        scalars = {c: torch.tensor(batch.numpy(c)) for c in columns if not _is_ragged(batch, c)}
        shown = _ShownRows.from_batch(batch, images, owner)
        prompts = batch.ragged_numpy(PROMPT_IDS) if shown is None else shown.prompts
        sequences = (prompts, batch.ragged_numpy(RESPONSE_IDS))
        tokens = np.diff(sequences[0][1]).astype(np.int64) + np.diff(sequences[1][1])
        if context is not None and len(tokens) and tokens.max() > context:
            i = int(np.argmax(tokens))
            raise UserError(
                f"row {_name_of(batch, i)} has {tokens[i]} tokens, prompt and response together; {owner} reads at most {context} "
                "(its max_position_embeddings); drop longer rows (too_long='drop' where they are read), or lower max_tokens"
            )
        routes = None if routers is None else _routes(batch, routers, owner)
        same_prompt = None
        if sharing is not None:
            prompts = None
            # routes of samples of a prompt differ if weights changed between them
            if routes is not None:
                prompts = [
                    of[:length].tobytes()
                    for of, length in zip(routes, batch.lengths(PROMPT_IDS), strict=True)
                ]
            same_prompt = equal_prompts(*sequences[0], np.diff(sequences[1][1]), sharing, prompts)
        kept = _kept_sets(batch, vocabulary, owner) if is_truncated else None
        layout = reads_last, same_prompt, routes, shown
        return cls(*sequences, temperatures, ragged, scalars, device, *layout, kept)

    def plan(
        self, max_tokens: int, *, packed: bool, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Split the rows with a response into microbatches; rows with equal `groups` ([rows]) stay
        together."""
        prompts, after = self._lengths()
        rows = np.flatnonzero(np.diff(self.response[1]))
        groups = None if groups is None else groups[rows]
        if self.same_prompt is not None:
            plan = plan_shared(
                prompts[rows], after[rows], self.same_prompt[rows], max_tokens, groups=groups
            )
        else:
            plan = plan_microbatches((prompts + after)[rows], max_tokens, packed=packed, groups=groups)
        return [rows[part] for part in plan]

    def plan_in_lockstep(
        self,
        number: int,
        max_tokens: int,
        cost: RowCost,
        *,
        packed: bool,
        pads: bool,
        groups: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Like `plan`, for ranks in lockstep: return up to `number` microbatches of similar
        cost."""
        if packed and self.same_prompt is None:
            prompts, after = self._lengths()
            rows = np.flatnonzero(np.diff(self.response[1]))
            lengths, own = (prompts + after)[rows], None if groups is None else groups[rows]
            plan = even_microbatches(lengths, cost(lengths), number, max_tokens, pads=pads, groups=own)
            if plan is not None:
                return [rows[part] for part in plan]
        cut = partial(self.plan, packed=packed, groups=groups)
        cost_of = partial(self._cost_of, cost=SharingCost(cost, masked=pads))
        return level_microbatches(cut, cost_of, number, max_tokens)

    def _cost_of(self, part: np.ndarray, cost: SharingCost) -> float:
        prompts, after = (lengths[part] for lengths in self._lengths())
        if self.same_prompt is None:
            return float(cost.row(prompts + after).sum())
        return cost.shared(prompts, after, self.same_prompt[part])

    def _lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two counts per row: the tokens of the prompt, and those after it that the model
        reads: all but the last, or all with `reads_last`."""
        return np.diff(self.prompt[1]), np.diff(self.response[1]) - 1 + self.reads_last

    def inputs(
        self, part: np.ndarray
    ) -> tuple[Tensor, PackedSequences, np.ndarray, Tensor, Tensor | None, KeptSets | None]:
        """Return the arguments of `ResponseModel` for a part. An empty part gets one token, whose
        result is ignored. If the loss reads `teacher_ids`, targets are [T, 1 + k]: the response
        token, then the teacher's."""
        device = self.device
        if not len(part):
            zero = torch.zeros(1, dtype=torch.long, device=device)
            routing = Routing(torch.zeros(1, device=device))
            nobody = replace(PackedSequences.of_lengths([1], device), routing=routing)
            return zero, nobody, np.zeros(1, np.int64), zero, None, None
        (prompts, p_starts), (responses, r_starts) = self.prompt, self.response
        p_lengths = np.diff(p_starts)[part].astype(np.int64)
        r_lengths = np.diff(r_starts)[part].astype(np.int64)
        after = r_lengths - 1 + self.reads_last
        same = None if self.same_prompt is None else self.same_prompt[part]
        place = _Placement.of_rows(p_lengths, after, same)
        ids = [prompts[p_starts[i] : p_starts[i + 1]] for i in part[place.prompts]]
        for row in place.alone:
            i = part[row]
            response = responses[r_starts[i] : r_starts[i] + after[row]]
            ids += [prompts[p_starts[i] : p_starts[i + 1]], response]
        ids += [
            responses[r_starts[part[row]] : r_starts[part[row]] + after[row]] for row in place.shared
        ]
        starts = np.cumsum(r_lengths) - r_lengths
        # Position of each response token in the microbatch.
        read = np.repeat(place.begins - starts, r_lengths) + np.arange(int(r_lengths.sum()))
        if not self.reads_last:
            # The position before a token predicts it; the end of the prompt predicts the first
            # token.
            read -= 1
            read[starts] = place.last
        rows = PackedSequences(p_lengths + after, device)
        if len(place.shared):
            more = after[place.shared] > 0  # a response of one token adds no input after its prompt
            rows = SharedPrompts.among(
                p_lengths[place.prompts],
                (p_lengths + after)[place.alone],
                after[place.shared][more],
                place.prompt_of[more],
                device,
            )
        rows = replace(rows, routing=self._routing(part, place, p_lengths, p_lengths + after))
        if self.images is not None:
            rows = replace(rows, shown=self.images.shown(part, after, device))
        temperatures = None
        if self.temperatures is not None:
            temperatures = to_device(np.repeat(self.temperatures[part], r_lengths), device)
        tokens = tokens_of(r_starts, part)
        wanted = responses[tokens].astype(np.int64)
        if str(TEACHER_IDS) in self.ragged:
            candidates = self.ragged[str(TEACHER_IDS)][torch.from_numpy(tokens)].numpy()
            wanted = np.concatenate([wanted[:, None], candidates], 1)
        kept = self.kept_sets
        if kept is not None:
            kept = KeptSets(kept.counts[tokens], kept.ids[tokens_of(kept.ends, tokens)])
        targets = to_device(wanted, device)
        ids_in_order = to_device(np.concatenate(ids).astype(np.int64), device)
        return ids_in_order, rows, read, targets, temperatures, kept

    def _routing(
        self, part: np.ndarray, place: _Placement, prompts: np.ndarray, lengths: np.ndarray
    ) -> Routing:
        """Return the routing of a part's tokens, in the order of its placement. `prompts` and
        `lengths` ([rows]) count the tokens of each row's prompt and of each complete row."""
        sharing = np.bincount(place.prompt_of, minlength=len(place.prompts))
        alone, after = int(lengths[place.alone].sum()), int((lengths - prompts)[place.shared].sum())
        # A shared prompt's tokens count once for each of its rows.
        counts = np.concatenate([np.repeat(sharing, prompts[place.prompts]), np.ones(alone + after)])
        routes = None
        if self.routes is not None:
            pieces = [self.routes[part[row]][: prompts[row]] for row in place.prompts]
            pieces += [self.routes[part[row]] for row in place.alone]
            pieces += [self.routes[part[row]][prompts[row] :] for row in place.shared]
            routes = to_device(np.concatenate(pieces).astype(np.int32), self.device)
        return Routing(to_device(counts.astype(np.float32), self.device), routes)

    def packed(self, part: np.ndarray | None = None, computed: Mapping[str, Tensor] = {}) -> PackedRows:
        """Return a part on the device, in the format that losses read, with the columns that the
        model computed. Without `part`, return all rows on the host, for the loss to count."""
        cu_seqlens = self.response[1]
        if part is None:
            return PackedRows.of(torch.from_numpy(np.diff(cu_seqlens)), **self.ragged, **self.scalars)
        lengths, tokens = np.diff(cu_seqlens)[part], torch.from_numpy(tokens_of(cu_seqlens, part))
        rows = torch.from_numpy(part)
        columns = {c: v[tokens] for c, v in self.ragged.items()} | {
            c: v[rows] for c, v in self.scalars.items()
        }
        columns = {**{c: to_device(v, self.device) for c, v in columns.items()}, **computed}
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return PackedRows(to_device(ends, self.device), columns, int(ends[-1]))


@dataclass(frozen=True)
class _Placement:
    """Order of a microbatch's tokens: shared prompts, complete rows, responses to shared
    prompts."""

    prompts: np.ndarray
    """[prompts] int64: one row of each shared prompt."""
    alone: np.ndarray
    """[complete rows] int64: rows that do not share a prompt."""
    shared: np.ndarray
    """[responses] int64: rows that share a prompt."""
    prompt_of: np.ndarray
    """[responses] int64: index into `prompts` of each row's prompt."""
    begins: np.ndarray
    """[rows] int64: position of the first token after each row's prompt."""
    last: np.ndarray
    """[rows] int64: position of the last token of each row's prompt."""

    @classmethod
    def of_rows(cls, prompts: np.ndarray, after: np.ndarray, same: np.ndarray | None) -> _Placement:
        """Place rows with these numbers of tokens in prompts and after prompts, [rows] int64 each.
        `same` ([rows]) is equal for rows with equal prompts; None shares no prompts."""
        firsts = shared = prompt_of = np.zeros(0, np.int64)
        alone = np.arange(len(prompts))
        if same is not None:
            _, first, of_row, count = np.unique(
                same, return_index=True, return_inverse=True, return_counts=True
            )
            several = count[of_row] > 1
            alone, shared, firsts = np.flatnonzero(~several), np.flatnonzero(several), first[count > 1]
            prompt_of = np.searchsorted(np.flatnonzero(count > 1), of_row[shared])
        ends = np.cumsum(prompts[firsts])
        begins = np.zeros(len(prompts), np.int64)
        begins[alone] = ends[-1:].sum() + np.cumsum((prompts + after)[alone]) - after[alone]
        begins[shared] = (
            ends[-1:].sum() + (prompts + after)[alone].sum() + np.cumsum(after[shared]) - after[shared]
        )
        last = begins - 1
        last[shared] = ends[prompt_of] - 1
        return cls(firsts, alone, shared, prompt_of, begins, last)


@dataclass(frozen=True)
class _ShownRows:
    """The images of rows, encoded: all inputs of the model together would not fit into memory."""

    reader: ImageReader
    encoded: list[list[Any]]
    is_image: list[np.ndarray]
    """[P] bool for each row: which tokens of its prompt are image tokens."""
    prompts: tuple[np.ndarray, np.ndarray]
    """Prompts with all image tokens: ([P] int32 tokens, [rows + 1] cu_seqlens)."""

    @classmethod
    def from_batch(cls, batch: Batch, reader: ImageReader | None, owner: str) -> _ShownRows | None:
        if IMAGES not in batch or not batch.lengths(IMAGES).any():
            return None
        if reader is None:
            raise UserError(
                f"column {str(IMAGES)!r} holds images, but {owner} reads text alone; leave the column out"
            )
        if ROUTES in batch:
            raise UserError(
                f"column {str(ROUTES)!r}: routes of rows with images are not supported; sample without routes=True"
            )
        values, starts = batch.ragged_numpy(PROMPT_IDS)
        encoded = [[one.as_buffer() for one in images.values or ()] for images in batch[IMAGES]]
        ids: list[np.ndarray] = []
        is_image: list[np.ndarray] = []
        for row, images in enumerate(encoded):
            try:
                seen = reader.read(values[starts[row] : starts[row + 1]], images)
            except UserError as error:
                raise UserError(f"row {_name_of(batch, row)}: {error}") from error
            ids.append(seen.ids)
            is_image.append(seen.is_image)
        return cls(reader, encoded, is_image, (np.concatenate(ids), np.cumsum([0, *map(len, ids)])))

    def shown(self, part: np.ndarray, after: np.ndarray, device: torch.device) -> ImageInputs | None:
        """Return the images of these rows ([rows] int64), or None if they have none. `after` is the
        number of tokens after each prompt."""
        images = [self.reader.see(image) for row in part for image in self.encoded[row]]
        if not images:
            return None
        places = [
            np.pad(self.is_image[row], (0, more))
            for row, more in zip(part.tolist(), after.tolist(), strict=True)
        ]
        return ImageInputs.of(torch.from_numpy(np.concatenate(places)).to(device), images)


def tokens_of(cu_seqlens: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the indexes of the tokens of these rows ([rows] int64), row by row: [T] int64.

    >>> tokens_of(np.array([0, 2, 5]), np.array([1, 0])).tolist()
    [2, 3, 4, 0, 1]
    """
    starts, lengths = cu_seqlens[rows].astype(np.int64), np.diff(cu_seqlens)[rows].astype(np.int64)
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


def check_rows(batch: Batch, columns: Iterable[str]) -> None:
    """Check prompts and column lengths, so that errors name the row and the column."""
    lengths = batch.lengths(RESPONSE_IDS)
    empty = np.flatnonzero((batch.lengths(PROMPT_IDS) == 0) & (lengths > 0))
    if len(empty):
        raise UserError(
            f"row {_name_of(batch, empty[0])} has an empty prompt, so its first token has no log-probability"
        )
    for column in columns:
        if _is_ragged(batch, column) and column not in PER_CANDIDATE:
            wrong = np.flatnonzero(batch.lengths(column) != lengths)
            if len(wrong):
                i = wrong[0]
                raise UserError(
                    f"row {_name_of(batch, i)}: column {column!r} has {batch.lengths(column)[i]} values "
                    f"for a response of {lengths[i]} tokens"
                )


def _of_tokens(batch: Batch, column: str, vocabulary: int, owner: str) -> Tensor:
    """Return a column with one value per response token, [T], or with k values, [T, k] (int64 for
    token ids)."""
    values, starts = batch.ragged_numpy(column)
    if column not in PER_CANDIDATE:
        return torch.tensor(values)
    lengths, found = batch.lengths(RESPONSE_IDS), np.diff(starts)
    k = int((found // np.maximum(lengths, 1)).max(initial=0))
    wrong = np.flatnonzero((found != k * lengths) | ((found == 0) & (lengths > 0)))
    if len(wrong):
        i = wrong[0]
        raise UserError(
            f"row {_name_of(batch, i)}: column {column!r} has {found[i]} values for a response of {lengths[i]} tokens, and other rows "
            f"have {k} for each token; every row needs a teacher, and all teachers the same `top`"
        )
    if column != str(TEACHER_IDS):
        return torch.tensor(values).view(int(lengths.sum()), k)
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < vocabulary:
        wrong_id = values.max() if values.max() >= vocabulary else values.min()
        raise UserError(
            f"column {column!r} has token id {wrong_id}; {owner} has ids 0 to {vocabulary - 1}: a teacher must have the vocabulary of "
            "its student"
        )
    return torch.tensor(values.astype(np.int64)).view(int(lengths.sum()), k)


def _kept_sets(batch: Batch, vocabulary: int, owner: str) -> KeptSets | None:
    """Return the kept sets of all response tokens, or None if all are the whole vocabulary."""
    responses, starts = batch.ragged_numpy(RESPONSE_IDS)
    ids, id_starts = batch.ragged_numpy(KEPT_IDS)
    kept = KeptSets(batch.ragged_numpy(KEPT_COUNTS)[0], ids)
    wrong = np.flatnonzero(np.diff(kept.ends[starts]) != np.diff(id_starts))
    if len(wrong):
        i = wrong[0]
        raise UserError(
            f"row {_name_of(batch, i)}: column {str(KEPT_IDS)!r} has {np.diff(id_starts)[i]} ids, and column {str(KEPT_COUNTS)!r} counts "
            f"{np.diff(kept.ends[starts])[i]}"
        )
    if not kept.counts.any():
        return None
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        strange = ids.max() if ids.max() >= vocabulary else ids.min()
        raise UserError(
            f"column {str(KEPT_IDS)!r} has token id {strange}; {owner} has ids 0 to {vocabulary - 1}"
        )
    of_token = np.repeat(np.arange(len(kept.counts)), np.abs(kept.counts))
    listed = np.zeros(len(kept.counts), bool)
    listed[of_token[ids == responses[of_token]]] = True
    wrong = np.flatnonzero((kept.counts != 0) & (listed != (kept.counts > 0)))
    if len(wrong):
        i = int(np.searchsorted(starts, wrong[0], side="right")) - 1
        raise UserError(
            f"row {_name_of(batch, i)}: token {wrong[0] - starts[i]} of the response ({responses[wrong[0]]}) is not in its kept set, so it "
            "was not sampled from it"
        )
    return kept


def _routes(batch: Batch, routers: Routers, owner: str) -> list[np.ndarray]:
    values, starts = batch.ragged_numpy(ROUTES)
    wanted = (
        (batch.lengths(PROMPT_IDS) + batch.lengths(RESPONSE_IDS) - 1) * routers.layers * routers.chosen
    )
    wrong = np.flatnonzero((np.diff(starts) != wanted) & (batch.lengths(RESPONSE_IDS) > 0))
    if len(wrong):
        i = wrong[0]
        raise UserError(
            f"row {_name_of(batch, i)}: column {str(ROUTES)!r} has {np.diff(starts)[i]} "
            f"values, and {owner} ({routers.layers} layers, {routers.chosen} experts for "
            f"each token) takes {wanted[i]}"
        )
    if len(values) and values.max() >= routers.experts:
        raise UserError(
            f"column {str(ROUTES)!r} has expert {values.max()}; {owner} has experts 0 to {routers.experts - 1}"
        )
    shape = (-1, routers.layers, routers.chosen)
    return [
        # Rows without a response are not checked, and may end with an incomplete token.
        values[a : b - (b - a) % (shape[1] * shape[2])].reshape(shape)
        for a, b in itertools.pairwise(starts)
    ]


def _name_of(batch: Batch, row: int | np.integer[Any]) -> str:
    return f"with sample_id {batch['sample_id'][int(row)].as_py()}" if "sample_id" in batch else str(row)


def _is_ragged(batch: Batch, column: str) -> bool:
    return pa.types.is_list(batch[column].type)
