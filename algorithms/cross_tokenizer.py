"""Distillation from a teacher with another tokenizer.

distillation(prompts, ..., tokenizers=SharedSpans(student="model", teacher="teacher"))

The teacher reads the text of the student's response in its own tokens. Places where tokens of both
models end cut a response into spans, which have the same bytes for both:

    student    12 | 4 = | E          teacher    1 2 | 4= | <end>

- A span of one token on each side compares both distributions over the tokens that have the same
  bytes in both vocabularies. All other tokens are the tail.
- Another span compares its log-probability, the sum over its tokens: log q(span) - log p(span) is the
  advantage of each of its tokens. This is minus the one-sample estimate of the reverse KL.

This is exact for the tokens that each model read. The teacher could also write a span in other
tokens: their probability is not counted, so log q(span) is at most the log-probability of the text.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import field_validator

from ..dataflow.batch import Batch
from ..dataflow.column import (
    ADVANTAGES,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_MASK,
    STUDENT_SPANS,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_RESPONSE_IDS,
    TEACHER_RESPONSE_LOGPROBS,
    TEACHER_SPANS,
)
from ..dataflow.config import Config
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from ..dataflow.metrics import Mean, Metrics
from ..dataflow.operation import node
from ..dataflow.prompts.token_bytes import TokenBytes
from ..dataflow.prompts.tokenizer import Tokenizer
from .loss import response_rows

UNMAPPED = "unmapped"
"""Prefix of the columns of the teacher's likeliest tokens: [M * top] of its vocabulary."""
_CANDIDATES = (f"{UNMAPPED}_ids", f"{UNMAPPED}_logprobs")


class SharedSpans(Config):
    """Distillation across tokenizers: compare student and teacher between places where tokens of both
    end. The teacher's prompts are in its own tokens: `Prompts.read(..., teacher=...)`.

    Raises:
        UserError: a tokenizer does not exist or its tokens have no fixed bytes, or `ends` names no
            special token.
    """

    student: str | Path
    """Required. Folder or Hugging Face id of the student's tokenizer."""
    teacher: str | Path
    """Required. Folder or Hugging Face id of the teacher's tokenizer."""
    ends: tuple[tuple[str, str], ...] = ()
    """Special tokens of the student and of the teacher that mean the same, such as
    (("<|im_end|>", "<end_of_turn>"),). By default, `eos_token` of both, the tokens that end a turn in
    their chat templates, and special tokens with equal names. Set it if responses end with others."""

    @field_validator("student", "teacher")
    @classmethod
    def _from_here(cls, value: str | Path) -> str | Path:
        # Other processes have other working directories.
        folder = Path(value).expanduser()
        return type(value)(folder.absolute()) if folder.is_dir() else value

    def check(self) -> None:
        """Raise the errors of the class, before any process starts."""
        _aligner(self)


@dataclass(frozen=True)
class _Alignment:
    """A response in the tokens of both models."""

    teacher_ids: list[int]
    """[M] the teacher's tokens, up to the last shared end."""
    student_spans: np.ndarray
    """[L] int32: the span of each of the student's tokens, from 0; -1 after the last shared end."""
    teacher_spans: np.ndarray
    """[M] int32: the span of each of the teacher's tokens."""


class _Aligner:
    """Aligns responses, and maps the teacher's tokens to the student's.

    Special tokens that mean the same count as one byte, which no text has.
    """

    def __init__(
        self, of_student: str | Path, of_teacher: str | Path, ends: Sequence[tuple[str, str]]
    ) -> None:
        student, teacher = Tokenizer.load(of_student), Tokenizer.load(of_teacher)
        self._student, self._teacher = TokenBytes(student), TokenBytes(teacher)
        self._specials = _specials(student, teacher, ends)
        by_bytes, own = self._student.ids, self._teacher.ids
        self.student_of = np.full(len(self._teacher.of_id), -1, np.int32)
        """[teacher's vocabulary] the student's token with the same bytes; -1 without one."""
        for piece in own.keys() & by_bytes.keys():
            self.student_of[own[piece]] = by_bytes[piece]
        for ours, theirs in reversed(self._specials.items()):  # of several, the first stays
            self.student_of[theirs] = ours

    def align(self, responses: Sequence[Sequence[int]]) -> list[_Alignment]:
        read = [self._read(ids) for ids in responses]
        texts = [part for parts, _ in read for part in parts if isinstance(part, str)]
        encoded = iter(self._teacher.encode(texts))
        found: list[_Alignment] = []
        for (parts, ends), ids in zip(read, responses, strict=True):
            tokens = [(part, next(encoded) if isinstance(part, str) else [part]) for part in parts]
            teacher_ids, teacher_ends = self._written(tokens)
            shared = np.intersect1d(ends, teacher_ends)
            shared = shared[shared > 0]
            spans = np.full(len(ids), -1, np.int32)
            own = np.searchsorted(shared, ends)
            spans[: len(ends)] = np.where(own < len(shared), own, -1)
            kept = int(np.searchsorted(teacher_ends, shared[-1], "right")) if len(shared) else 0
            of_teacher = np.searchsorted(shared, teacher_ends[:kept]).astype(np.int32)
            found.append(_Alignment(teacher_ids[:kept], spans, of_teacher))
        return found

    def _read(self, ids: Sequence[int]) -> tuple[list[str | int], np.ndarray]:
        """Return the teacher's input: texts, and its own special tokens; and the end of each of the
        student's tokens [bytes]. Both stop at a token without a meaning for the teacher."""
        parts: list[str | int] = []
        text, ends, end = bytearray(), list[int](), 0
        for token in ids:
            piece = self._student.of_id[token] if token < len(self._student.of_id) else None
            if piece is not None:
                text += piece
                end += len(piece)
            elif token in self._specials:
                decoded, whole = _decoded(text)
                if not whole:
                    break
                parts += [decoded, self._specials[token]]
                text, end = bytearray(), end + 1
            else:
                break
            ends.append(end)
        parts.append(_decoded(text)[0])
        return [part for part in parts if part != ""], np.array(ends, np.int64)

    def _written(self, parts: Sequence[tuple[str | int, list[int]]]) -> tuple[list[int], np.ndarray]:
        """Return the teacher's tokens, and the end of each [bytes], up to the first that differs from
        its text: a normaliser changed the text, or the vocabulary lacks a part of it."""
        ids: list[int] = []
        ends: list[int] = []
        end = 0
        for part, tokens in parts:
            if isinstance(part, int):
                end += 1
                ids.append(part)
                ends.append(end)
                continue
            wanted, at = part.encode(), 0
            for token in tokens:
                piece = self._teacher.of_id[token]
                if piece is None or wanted[at : at + len(piece)] != piece:
                    return ids, np.array(ends, np.int64)
                at += len(piece)
                ids.append(token)
                ends.append(end + at)
            if at < len(wanted):
                break
            end += at
        return ids, np.array(ends, np.int64)


def _aligner(spans: SharedSpans) -> _Aligner:
    return _cached(spans.student, spans.teacher, spans.ends)


@functools.lru_cache(maxsize=4)
def _cached(*settings: Any) -> _Aligner:
    return _Aligner(*settings)


def _decoded(data: bytearray) -> tuple[str, bool]:
    """Return the text of these bytes up to the first that is not UTF-8, and whether that is all."""
    try:
        return data.decode(), True
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), False


def _specials(student: Tokenizer, teacher: Tokenizer, ends: Sequence[tuple[str, str]]) -> dict[int, int]:
    """Map the student's special tokens to the teacher's: first the pairs in `ends`, then the ends of texts
    and turns, then equal names."""
    found: dict[int, int] = {}
    for pair in ends:
        ids = [_special(one, name) for one, name in zip((student, teacher), pair, strict=True)]
        found[ids[0]] = ids[1]
    # The first ends a text, the last a turn; they are one token without a chat template.
    ours, theirs = list(student.end_tokens), list(teacher.end_tokens)
    if ours and theirs:
        found.setdefault(ours[-1], theirs[-1])
        found.setdefault(ours[0], theirs[0])
    known = {name: teacher.backend.token_to_id(name) for name in teacher.special_texts}
    for name in student.special_texts:
        token, other = student.backend.token_to_id(name), known.get(name)
        if token is not None and other is not None:
            found.setdefault(token, other)
    return found


def _special(tokenizer: Tokenizer, name: str) -> int:
    token = tokenizer.backend.token_to_id(name)
    if token is None or name not in tokenizer.special_texts:
        raise UserError(
            f"SharedSpans.ends names {name!r}, but {tokenizer.name!r} has no such special token; it has "
            f"{', '.join(map(repr, tokenizer.special_texts)) or 'none'}"
        )
    return token


@node(
    reads=(RESPONSE_IDS,),
    may_read=(RESPONSE_MASK,),
    writes=(TEACHER_RESPONSE_IDS, STUDENT_SPANS, TEACHER_SPANS),
)
def retokenized(samples: Batch, *, tokenizers: SharedSpans) -> tuple[Batch, Metrics]:
    """Add the responses in the teacher's tokens, and the spans of both models' tokens.

    No span: tokens after the first that the teacher cannot read (a byte that is not UTF-8, or a
    special token without a counterpart), and spans with a token that is not trained. The metric
    `compared_fraction` is the share of trained tokens with a span, and `one_to_one_fraction` the share
    in spans of one token on each side.
    """
    values, starts = samples.ragged_numpy(RESPONSE_IDS)
    trained = samples.ragged_numpy(RESPONSE_MASK)[0] > 0 if RESPONSE_MASK in samples else None
    responses = [values[a:b].tolist() for a, b in itertools.pairwise(starts)]
    aligned = _aligner(tokenizers).align(responses)
    spans = np.concatenate([np.zeros(0, np.int32), *(one.student_spans for one in aligned)])
    lengths = [len(one.teacher_ids) for one in aligned]
    ends = np.cumsum([0, *lengths])
    theirs = np.concatenate([np.zeros(0, np.int32), *(one.teacher_spans for one in aligned)])
    number = Spans(spans, starts, theirs, ends)
    if trained is not None:
        mixed = np.bincount(number.of_student[~trained], minlength=number.count + 1) > 0
        spans = np.where(mixed[number.of_student], np.int32(-1), spans)
        number = Spans(spans, starts, theirs, ends)
    counted = np.ones(len(spans), bool) if trained is None else trained
    weight = float(counted.sum())
    metrics: Metrics = {
        "compared_fraction": Mean(float((counted & (spans >= 0)).sum()), weight),
        "one_to_one_fraction": Mean(float((counted & number.alone).sum()), weight),
    }
    ids = np.array([token for one in aligned for token in one.teacher_ids], np.int32)
    made = {
        TEACHER_RESPONSE_IDS: (ids, ends),
        STUDENT_SPANS: (spans, starts),
        TEACHER_SPANS: (theirs, ends),
    }
    return samples.with_columns(**{str(name): value for name, value in made.items()}), metrics


class Spans:
    """The spans of a batch, numbered over all rows.

    Args:
        student: [T] span of each of the student's tokens in its row, or -1.
        student_ends: [rows + 1] cu_seqlens.
        teacher, teacher_ends: the same for the teacher's tokens, which all have a span.
    """

    def __init__(
        self,
        student: np.ndarray,
        student_ends: np.ndarray,
        teacher: np.ndarray,
        teacher_ends: np.ndarray,
    ) -> None:
        lengths = np.diff(teacher_ends)
        counts = np.zeros(len(lengths), np.int64)
        counts[lengths > 0] = teacher[teacher_ends[1:][lengths > 0] - 1] + 1
        first = np.concatenate([[0], np.cumsum(counts)])
        self.count = int(first[-1])
        self.of_student = np.where(
            student >= 0, student + np.repeat(first[:-1], np.diff(student_ends)), self.count
        )
        """[T] span of each of the student's tokens; `count` for one without a span."""
        self.of_teacher = teacher + np.repeat(first[:-1], lengths)
        """[M] span of each of the teacher's tokens."""
        sizes = (np.bincount(of, minlength=self.count + 1) for of in (self.of_student, self.of_teacher))
        single = np.logical_and(*(size == 1 for size in sizes))
        single[self.count] = False
        self.alone = single[self.of_student]
        """[T] whether the token's span has one token on each side."""
        self.token = np.zeros(self.count + 1, np.int64)
        """[spans + 1] the last of the teacher's tokens in each span."""
        self.token[self.of_teacher] = np.arange(len(teacher))

    @classmethod
    def of(cls, samples: Batch) -> Spans:
        return cls(*samples.ragged_numpy(STUDENT_SPANS), *samples.ragged_numpy(TEACHER_SPANS))

    def sums(self, of_token: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the sum of values over the tokens of each span: [spans + 1] float32."""
        return np.bincount(of_token, weights=values, minlength=self.count + 1).astype(np.float32)


@node(
    reads=lambda base: (
        *(RESPONSE_LOGPROBS, RESPONSE_IDS, STUDENT_SPANS, TEACHER_SPANS, TEACHER_RESPONSE_LOGPROBS),
        *([base] if base else []),
    ),
    may_read=(RESPONSE_MASK,),
    writes=(ADVANTAGES,),
)
def span_advantages(
    samples: Batch, *, weight: float = 1.0, base: str | None = None, single: bool = True
) -> Batch:
    """Compute advantages `weight` (log q(span) - log p(span)) for each token of a span, where q is the
    teacher and p the sampling student; 0 without a span. Add the column `base`, if one is named. Without
    `single`, spans of one token on each side get 0.

    For such spans, this is `teacher_advantages`.

    >>> columns = {"student_spans": [[0, 1, 1]], "teacher_spans": [[0, 1]], "teacher_response_logprobs": [[-0.5, -4.0]]}
    >>> samples = Batch.of(response_ids=[[5, 6, 7]], response_logprobs=[[-1.0, -1.0, -2.0]], **columns)
    >>> span_advantages(samples)["advantages"].to_pylist(), span_advantages(samples, single=False)["advantages"].to_pylist()
    ([[0.5, -1.0, -1.0]], [[0.0, -1.0, -1.0]])
    """
    rows = response_rows(samples, RESPONSE_IDS, RESPONSE_LOGPROBS, *([base] if base else []))
    spans = Spans.of(samples)
    compared = spans.of_student < spans.count
    own = np.where(compared, rows[RESPONSE_LOGPROBS].numpy(), 0.0)  # may be NaN where masked
    student = spans.sums(spans.of_student, own)
    teacher = spans.sums(spans.of_teacher, samples.ragged_numpy(TEACHER_RESPONSE_LOGPROBS)[0])
    gains = torch.from_numpy((teacher - student)[spans.of_student])
    counted = torch.from_numpy(compared & (single | ~spans.alone))
    gained = weight * torch.where(counted, gains, 0.0)
    total = gained + rows[base] if base else gained
    return samples.with_columns(advantages=(total, rows.cu_seqlens))


@node(
    reads=(RESPONSE_IDS, STUDENT_SPANS, TEACHER_SPANS, *_CANDIDATES),
    writes=(TEACHER_IDS, TEACHER_LOGPROBS),
)
def shared_candidates(samples: Batch, *, tokenizers: SharedSpans, top: int) -> Batch:
    """Turn the teacher's likeliest tokens (`unmapped_ids`) into tokens of the student, for spans of one token on each
    side: `top` for each of the student's tokens.

    A token of the teacher that the student lacks, and all tokens of other spans, have id 0 and the
    log-probability minus infinity: `Distillation` counts them to the tail.
    """
    spans = Spans.of(samples)
    ids, logprobs = (samples.ragged_numpy(name)[0] for name in _CANDIDATES)
    starts = samples.ragged_numpy(RESPONSE_IDS)[1].astype(np.int64)
    k = len(ids) // max(1, len(spans.of_teacher)) or 1  # below `top` for a smaller vocabulary
    student_of = np.append(_aligner(tokenizers).student_of, np.int32(-1))
    # The model may have more ids than its tokenizer.
    found = student_of[np.minimum(ids, len(student_of) - 1)].reshape(-1, k)
    of_token = spans.token[spans.of_student[spans.alone]]
    own, likely = found[of_token], logprobs.reshape(-1, k)[of_token]
    made_ids = np.zeros((len(spans.of_student), top), np.int32)
    made = np.full(made_ids.shape, -np.inf, np.float32)
    made_ids[spans.alone, :k] = np.maximum(own, 0)
    made[spans.alone, :k] = np.where(own >= 0, likely, -np.inf)
    ends = starts * top
    return samples.with_columns(
        teacher_ids=(made_ids.ravel(), ends), teacher_logprobs=(made.ravel(), ends)
    )
