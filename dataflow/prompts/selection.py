"""Selection of prompts before training: removal of near-duplicates and of held-out prompts, and a choice
of the most informative ones.

All parts take time and memory in proportion to the words of the prompts.

- *Near-duplicates* have at least a given Jaccard similarity of their sets of 5 consecutive words. MinHash
  with 64 hashes in 16 bands (Broder 1997) finds candidates, which are then compared exactly. It
  misses one in 4,500 pairs with similarity 0.8, and one in 80 with similarity 0.7.
- *Leaks* are near-duplicates of a held-out prompt, or share 13 consecutive words with one (for a shorter
  held-out prompt of at least 8 words: all of them), unless more than 10 rows have these words (after
  arXiv:2005.14165, appendix C), or more than 10 and 1 % of the rows have 6 of them in a row: then they
  belong to a template.
- *Information* follows MIG (arXiv:2504.13835): labels are the nodes of a graph, a row gives its weight to
  its labels and their neighbours, and the information of a set of rows is a sum of concave functions of
  the weight of each node. See `Labels`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import UserError
from .conversations import read_messages
from .files import Rows
from .formats import Format, as_text, column_kind, is_list_of_text

# Texts of prompts


def prompt_texts(rows: Rows, format: Format) -> list[str]:
    """Return the text of each row's prompt, without a chat template and system prompts. Rows without
    a prompt column give the beginning that both responses share, or the whole text."""
    if format.text:
        return _texts(rows, format.text)
    column = format.prompt or format.dialogue
    if column is None:
        pairs = [_spoken(rows, path) for path in format.responses.values()]
        return [_common_start(list(texts)) for texts in zip(*pairs, strict=True)]
    texts = _spoken(rows, column)
    if format.context is None:
        return texts
    more = rows.column(format.context)
    lines = (
        ["\n".join(line for line in value or () if line) for value in more.to_pylist()]
        if is_list_of_text(more.type)
        else _texts(rows, format.context)
    )
    return [f"{text}\n\n{extra}".rstrip() for text, extra in zip(texts, lines, strict=True)]


def _texts(rows: Rows, path: str) -> list[str]:
    return [text or "" for text in as_text(rows.column(path)).to_pylist()]


def _spoken(rows: Rows, path: str) -> list[str]:
    """Return texts, or the contents of conversations up to the last assistant turn."""
    if column_kind(rows, path) == "text":
        return _texts(rows, path)
    texts: list[str] = []
    for messages in read_messages(rows, path):
        said = messages[:-1] if messages[-1]["role"] == "assistant" and len(messages) > 1 else messages
        texts.append("\n".join(_content(one) for one in said if one["role"] != "system"))
    return texts


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(b.get("text", "")) for b in content if isinstance(b, Mapping))
    return content if isinstance(content, str) else ""


def _common_start(texts: Sequence[str]) -> str:
    low, high = min(texts), max(texts)
    differ = next((k for k, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:differ]


# Words as numbers

_WORD = re.compile(r"\w+|[^\w\s.,;:!?'\"()\[\]{}]")
"""Words, numbers and signs. Operators count, because `2 + 3` and `2 - 3` are different tasks."""


@dataclass(frozen=True)
class _Words:
    """The words of texts, end to end."""

    ids: np.ndarray
    """[words] int64"""
    starts: np.ndarray
    """[texts + 1] int64: the words of text i are `ids[starts[i]:starts[i + 1]]`."""
    known: Mapping[str, int]

    @classmethod
    def of(cls, texts: Sequence[str], known: dict[str, int] | None = None) -> _Words:
        known = {} if known is None else known
        ids: list[int] = []
        starts = [0]
        for text in texts:
            ids += [known.setdefault(word, len(known)) for word in _WORD.findall(text.lower())]
            starts.append(len(ids))
        return cls(np.array(ids, np.int64), np.array(starts, np.int64), known)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def runs(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the hash of each run of `length` consecutive words of a text, [runs] uint64, its text
        and its first word, [runs]."""
        number = len(self.ids) - length + 1
        if number < 1:
            return np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64)
        hashes, mixed = np.zeros(number, np.uint64), _mixed(self.ids.astype(np.uint64))
        for k in range(length):
            hashes = hashes * _FACTOR + mixed[k : k + number]
        text = np.repeat(np.arange(len(self.lengths)), self.lengths)
        first = np.flatnonzero(text[:number] == text[length - 1 :])
        return _mixed(hashes[first]), text[first], first


_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return pseudo-random uint64 values (splitmix64)."""
    values = values + _FACTOR
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Near-duplicates

SHINGLE = 5
"""[words] Length of the runs that similarity compares."""
LEAST_SIMILARITY = 0.7
"""Smallest threshold that misses few pairs."""
_BANDS, _ROWS = 16, 4
_NEWEST = 4
"""Number of kept texts that a new one is compared with in each band, newest first."""


class _Shingles:
    """The set of runs of 5 words of each text; of a shorter text, its whole text is the only run."""

    def __init__(self, words: _Words) -> None:
        hashes, text, _ = words.runs(SHINGLE)
        short = np.flatnonzero(words.lengths < SHINGLE)
        whole = np.zeros(len(short), np.uint64)
        for k in range(SHINGLE - 1):
            has = words.lengths[short] > k
            whole[has] = whole[has] * _FACTOR + _mixed(
                words.ids[words.starts[short[has]] + k].astype(np.uint64)
            )
        # A whole text is never equal to a run of a longer one.
        hashes = np.concatenate([hashes, _mixed(whole ^ _FACTOR)])
        text = np.concatenate([text, short])
        order = np.lexsort((hashes, text))
        hashes, text = hashes[order], text[order]
        first = np.ones(len(hashes), bool)
        first[1:] = (hashes[1:] != hashes[:-1]) | (text[1:] != text[:-1])
        self.hashes, text = hashes[first], text[first]
        self.starts = np.searchsorted(text, np.arange(len(words.lengths) + 1))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, text: int) -> np.ndarray:
        return self.hashes[self.starts[text] : self.starts[text + 1]]

    def signatures(self) -> np.ndarray:
        """Return the MinHash signatures, [texts, 64] uint64."""
        chance = np.random.default_rng(0)
        number = _BANDS * _ROWS
        factors = chance.integers(0, 2**63, number, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        added = chance.integers(0, 2**63, number, dtype=np.uint64)
        found = np.empty((len(self), number), np.uint64)
        # Every text has at least one run.
        for k in range(number):
            found[:, k] = np.minimum.reduceat(self.hashes * factors[k] + added[k], self.starts[:-1])
        return found


class _Similar:
    """Finds a kept text that is similar to a given one, by MinHash."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._buckets: list[dict[int, list[tuple[np.ndarray, np.ndarray, int]]]]
        self._buckets = [{} for _ in range(_BANDS)]

    def find(self, shingles: np.ndarray, signature: np.ndarray, bands: list[int], but: Any) -> Any:
        """Return (number, similarity) of a kept text that is similar enough, or None. `but(number)`
        excludes texts."""
        seen: set[int] = set()
        for bucket, key in zip(self._buckets, bands, strict=True):
            for other, signed, number in reversed(bucket.get(key, ())):
                if number in seen:
                    continue
                seen.add(number)
                # The share of equal hashes estimates the similarity with a deviation of 0.06.
                if np.count_nonzero(signed == signature) < (self._threshold - 0.3) * len(signature):
                    continue
                common = len(np.intersect1d(shingles, other, assume_unique=True))
                similarity = common / (len(shingles) + len(other) - common)
                if similarity >= self._threshold and not but(number):
                    return number, similarity
        return None

    def add(self, number: int, shingles: np.ndarray, signature: np.ndarray, bands: list[int]) -> None:
        for bucket, key in zip(self._buckets, bands, strict=True):
            kept = bucket.setdefault(key, [])
            kept.append((shingles, signature, number))
            if len(kept) > _NEWEST:
                del kept[0]


def _bands(signatures: np.ndarray) -> list[list[int]]:
    """Return the key of each band of each text."""
    parts = signatures.reshape(len(signatures), _BANDS, _ROWS)
    keys = np.zeros(parts.shape[:2], np.uint64)
    for k in range(_ROWS):
        keys = _mixed(keys ^ parts[:, :, k])
    return keys.tolist()


# Dropped rows


@dataclass(frozen=True)
class Dropped:
    """A row that is left out, and why."""

    row: int
    reason: str
    """`near_duplicate`, `held_out` or `redundant`."""
    of: int | None = None
    """Row, or held-out row, that this row is like."""
    similarity: float | None = None
    """Jaccard similarity; None if the rows share a run of words."""


def drop_similar(
    texts: Sequence[str],
    answers: Sequence[object] | None = None,
    held_out: Sequence[str] = (),
    *,
    threshold: float = 0.8,
) -> list[Dropped]:
    """Return the rows that are leaks of held-out prompts, and near-duplicates of an earlier row.

    Args:
        answers: ground truth of each row. Similar prompts with different answers are different
            tasks, not duplicates; but they may be leaks.
        threshold: smallest Jaccard similarity of near-duplicates, from 0.7 to 1.

    >>> texts = ["What is the sum of two and three?", "what is the sum of two and three", "Name a colour."]
    >>> drop_similar(texts, held_out=["name a colour"])
    [Dropped(row=1, reason='near_duplicate', of=0, similarity=1.0), Dropped(row=2, reason='held_out', of=0, similarity=1.0)]
    """
    if not LEAST_SIMILARITY <= threshold <= 1:
        raise UserError(
            f"similarity {threshold:g}: it must be from {LEAST_SIMILARITY:g} to 1; below, most pairs would be missed"
        )
    number = len(held_out)
    # One numbering of words for both.
    words = _Words.of([*held_out, *texts])
    shingles = _Shingles(words)
    signatures = shingles.signatures()
    bands = _bands(signatures)
    leaks, kept = _Similar(threshold), _Similar(threshold)
    for k in range(number):
        leaks.add(k, shingles.of(k), signatures[k], bands[k])
    by_words = _shared_runs(words, number)
    found: list[Dropped] = []
    for row in range(len(texts)):
        k = row + number
        own = shingles.of(k), signatures[k], bands[k]
        if (like := leaks.find(*own, but=lambda _: False)) is not None:
            found.append(Dropped(row, "held_out", *like))
            continue
        if row in by_words:
            found.append(Dropped(row, "held_out", by_words[row]))
            continue

        def differs(other: int, row: int = row) -> bool:
            return answers is not None and answers[other] != answers[row]

        if (like := kept.find(*own, but=differs)) is not None:
            found.append(Dropped(row, "near_duplicate", *like))
            continue
        kept.add(row, *own)
    return found


LONGEST_RUN, SHORTEST_RUN = 13, 8
"""[words] Length of the runs that leaks share with a held-out prompt; shorter ones are compared in full."""
COMMON = 10
"""Largest number of rows with a run. More rows show that it is part of a template."""
PIECE = 6
"""[words] Length of the pieces of a run that show whether the run touches a template."""
COMMON_PIECE = 0.01
"""Largest share of the rows with a piece, if these are more than `COMMON`."""


def _shared_runs(words: _Words, held_out: int) -> dict[int, int]:
    """Return row -> the first of the `held_out` first texts that has a run of the row's words."""
    found: dict[int, int] = {}
    lengths = np.minimum(words.lengths[:held_out], LONGEST_RUN)
    lengths = np.where(lengths >= SHORTEST_RUN, lengths, 0)
    touched = _common_pieces(words, held_out) if lengths.any() else np.empty(0, np.int64)
    for length in np.unique(lengths[lengths > 0]).tolist():
        hashes, text, first = words.runs(length)
        own = touched[first + length - PIECE + 1] == touched[first]
        hashes, text = hashes[own], text[own]
        wanted = text < held_out
        wanted[wanted] = lengths[text[wanted]] == length
        runs, at = np.unique(hashes[wanted], return_index=True)
        if not len(runs):
            continue
        of = text[wanted][at]
        hashes, text = hashes[text >= held_out], text[text >= held_out] - held_out
        place = np.minimum(np.searchsorted(runs, hashes), len(runs) - 1)
        there = runs[place] == hashes
        place, text = _distinct(place[there], text[there], len(words.lengths))
        rows_of_run = np.bincount(place, minlength=len(runs))
        for run, row in zip(place.tolist(), text.tolist(), strict=True):
            if rows_of_run[run] <= COMMON:
                found[row] = min(found.get(row, held_out), int(of[run]))
    return found


def _common_pieces(words: _Words, held_out: int) -> np.ndarray:
    """Return, for each word, how many pieces that many rows have begin before it, [words + 1]."""
    hashes, text, first = words.runs(PIECE)
    _, number = np.unique(hashes, return_inverse=True)
    rows = len(words.lengths) - held_out
    of_row = text >= held_out
    piece, _ = _distinct(number[of_row], text[of_row], len(words.lengths))
    times = np.bincount(piece, minlength=int(number.max(initial=0)) + 1)
    flags = np.zeros(len(words.ids) + 1, np.int64)
    flags[first + 1] = times[number] > max(COMMON, COMMON_PIECE * rows)
    return np.cumsum(flags)


# Information

_POWER = 0.8
"""Exponent of the concave function of a node's weight."""
_MOST_LABELS = 16
"""Largest number of labels of a row: the rarest ones."""
_NEIGHBOURS = 5
"""Largest number of a label's neighbours."""
_LEAST_WEIGHT = 0.2
"""Smallest weight of an edge."""
_ACCURACY = 0.01
"""Epsilon of stochastic greedy: the expected information is at least 1 - 1/e - epsilon of the largest."""


@dataclass(frozen=True)
class Labels:
    """The weight that each row gives to the nodes of a label graph.

    - The labels of a row are those given, or its words and signs that occur in at least 2 rows and at
      most a fifth of them; of more than 16, the rarest.
    - An edge joins two labels that occur together. Its weight is the cosine n_ij / sqrt(n_i n_j) of
      their numbers of rows; each label keeps its 5 heaviest edges of at least 0.2. MIG instead
      compares embeddings of labels that a language model wrote.
    - A row with quality q gives q / (number of its labels) to each of its labels. A label passes its
      share on to itself, with weight 1, and to its neighbours, in proportion to the weights.
    - The information of a set of rows is the sum over nodes of w ** 0.8, where w is the weight that the
      node has got from all rows of the set. It is monotone and submodular.
    """

    nodes: np.ndarray
    """[entries] node of each entry, row by row."""
    weights: np.ndarray
    """[entries] float64 weight that the row gives to the node."""
    starts: np.ndarray
    """[rows + 1] first entry of each row."""
    number: int
    """Number of nodes."""

    @classmethod
    def of(
        cls, labels: Sequence[Sequence[str]] | None, texts: Sequence[str], quality: np.ndarray
    ) -> Labels:
        """Args:
        labels: labels of each row; None uses the words of the texts.
        quality: [rows] weight of each row, at least 0.
        """
        if labels is None:
            words = _Words.of(texts)
            row = np.repeat(np.arange(len(texts)), words.lengths)
            row, node = _distinct(row, words.ids, len(words.known))
            rows_of = np.bincount(node, minlength=len(words.known))
            kept = (rows_of[node] >= 2) & (rows_of[node] <= max(2, len(texts) / 5))
        else:
            known: dict[str, int] = {}
            pairs = [
                (row, known.setdefault(label, len(known)))
                for row, own in enumerate(labels)
                for label in own
            ]
            both = np.array(pairs, np.int64).reshape(-1, 2)
            row, node = _distinct(both[:, 0], both[:, 1], len(known))
            rows_of = np.bincount(node, minlength=len(known))
            kept = np.ones(len(node), bool)
        row, node = row[kept], node[kept]
        row, node = _rarest(row, node, rows_of)
        return cls._spread(row, node, rows_of, quality)

    @classmethod
    def _spread(
        cls, row: np.ndarray, node: np.ndarray, rows_of: np.ndarray, quality: np.ndarray
    ) -> Labels:
        number, size = len(rows_of), len(quality)
        share = quality[row] / np.maximum(np.bincount(row, minlength=size), 1)[row]
        one, other, weight = _edges(row, node, rows_of)
        # Each label passes its share on to itself and its neighbours.
        total = 1 + np.bincount(one, weights=weight, minlength=number)
        first = np.searchsorted(one, np.arange(number + 1))
        times = np.diff(first)[node]
        entry = np.repeat(np.arange(len(node)), times)
        offset = np.arange(len(entry)) - np.repeat(np.cumsum(times) - times, times)
        edge = first[node[entry]] + offset
        rows = np.concatenate([row, row[entry]])
        nodes = np.concatenate([node, other[edge]])
        weights = np.concatenate([share / total[node], share[entry] * weight[edge] / total[node[entry]]])
        key, inverse = np.unique(rows * max(number, 1) + nodes, return_inverse=True)
        weights = np.bincount(inverse, weights=weights, minlength=len(key))
        rows, nodes = np.divmod(key, max(number, 1))
        return cls(nodes, weights, np.searchsorted(rows, np.arange(size + 1)), number)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def information(self, rows: np.ndarray) -> float:
        """Return the information of a set of rows."""
        return float((self._weight_of(rows) ** _POWER).sum())

    def _weight_of(self, rows: np.ndarray) -> np.ndarray:
        entries, _ = self._entries(rows)
        return np.bincount(self.nodes[entries], weights=self.weights[entries], minlength=self.number)

    def _entries(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the entries of rows, and the first entry of each row among them."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        ends = np.cumsum(lengths)
        offset = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        return np.repeat(self.starts[rows], lengths) + offset, ends - lengths

    def choose(self, number: int, seed: int = 0) -> Iterator[int]:
        """Yield `number` rows, each the one with the largest gain of information among a random
        sample of the rest (stochastic greedy, arXiv:1409.7938, algorithm 1). The sample has
        (rows / number) ln(100) rows, so about 4.6 gains are computed for each row of the data. If
        this covers the rest, the choice is greedy; of equal gains, the first row wins.
        """
        rest, weight = np.arange(len(self)), np.zeros(self.number)
        chance = np.random.default_rng(seed)
        size = math.ceil(len(self) / max(number, 1) * math.log(1 / _ACCURACY))
        for _ in range(min(number, len(self))):
            places = np.arange(len(rest))
            if size < len(rest):
                # With repetitions, which does not change the bound, and is much faster.
                places = np.unique(chance.integers(0, len(rest), size))
            rows = np.sort(rest[places])
            entries, first = self._entries(rows)
            before = weight[self.nodes[entries]]
            gains = (before + self.weights[entries]) ** _POWER - before**_POWER
            # A row without labels has no entries, and `reduceat` cannot sum them.
            sums = np.concatenate([[0.0], np.cumsum(gains)])
            ends = np.append(first[1:], len(entries))
            best = int(rows[np.argmax(np.round(sums[ends] - sums[first], 12))])
            own = slice(self.starts[best], self.starts[best + 1])
            weight[self.nodes[own]] += self.weights[own]
            # Swap with the last, which keeps the removal O(1).
            at = places[np.flatnonzero(rest[places] == best)[0]]
            rest[at] = rest[-1]
            rest = rest[:-1]
            yield best


def _distinct(row: np.ndarray, node: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each pair of row and node once, sorted."""
    return np.divmod(np.unique(row * max(number, 1) + node), max(number, 1))


def _rarest(row: np.ndarray, node: np.ndarray, rows_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((node, rows_of[node], row))
    row, node = row[order], node[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    kept = rank < _MOST_LABELS
    return row[kept], node[kept]


def _edges(
    row: np.ndarray, node: np.ndarray, rows_of: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the edges (from, to, weight) of the label graph, sorted by from, in both directions."""
    number = max(len(rows_of), 1)
    sizes = np.bincount(row)
    starts = np.cumsum(sizes) - sizes
    parts: list[np.ndarray] = []
    # Rows with equally many labels form a rectangle.
    for size in np.unique(sizes[sizes > 1]).tolist():
        own = np.sort(node[starts[sizes == size][:, None] + np.arange(size)], axis=1)
        one, other = np.triu_indices(size, 1)
        parts.append((own[:, one] * number + own[:, other]).ravel())
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    pairs, together = np.unique(np.concatenate(parts), return_counts=True)
    one, other = np.divmod(pairs, number)
    weight = together / np.sqrt(rows_of[one].astype(float) * rows_of[other])
    heavy = weight >= _LEAST_WEIGHT
    one, other, weight = one[heavy], other[heavy], weight[heavy]
    one, other = np.concatenate([one, other]), np.concatenate([other, one])
    weight = np.concatenate([weight, weight])
    order = np.lexsort((other, -weight, one))
    one, other, weight = one[order], other[order], weight[order]
    kept = np.arange(len(one)) - np.searchsorted(one, one) < _NEIGHBOURS
    return one[kept], other[kept], weight[kept]


# Selection


@dataclass(frozen=True)
class Selection:
    kept: np.ndarray
    """Kept rows, in the order of the data."""
    dropped: tuple[Dropped, ...]
    information: float | None = None
    """Information of the kept rows, divided by the information of all rows that could be kept; None
    if no rows had to be chosen."""
    random_information: float | None = None
    """The same for a random choice of as many rows."""


def select(
    texts: Sequence[str],
    *,
    answers: Sequence[object] | None = None,
    held_out: Sequence[str] = (),
    labels: Sequence[Sequence[str]] | None = None,
    quality: np.ndarray | None = None,
    threshold: float = 0.8,
    rows: int | None = None,
    seed: int = 0,
) -> Selection:
    """Drop leaks and near-duplicates (`drop_similar`). If more than `rows` rows remain, choose those
    with the most information (`Labels`).

    >>> found = select(["a b", "a b", "c d"], rows=1)
    >>> found.kept.tolist(), [(one.row, one.reason) for one in found.dropped]
    ([0], [(1, 'near_duplicate'), (2, 'redundant')])
    """
    dropped = drop_similar(texts, answers, held_out, threshold=threshold)
    kept = np.setdiff1d(np.arange(len(texts)), [one.row for one in dropped])
    if rows is None or rows >= len(kept):
        return Selection(kept, tuple(dropped))
    quality = np.ones(len(texts)) if quality is None else quality
    left: list[int] = kept.tolist()
    own = None if labels is None else [labels[row] for row in left]
    graph = Labels.of(own, [texts[row] for row in left], quality[kept])
    chosen = np.sort(np.fromiter(graph.choose(rows, seed), np.int64))
    by_chance = np.random.default_rng(seed).permutation(len(kept))[:rows]
    whole = graph.information(np.arange(len(kept))) or 1.0
    redundant = [Dropped(int(row), "redundant") for row in np.delete(kept, chosen)]
    found = Selection(kept[chosen], tuple(sorted([*dropped, *redundant], key=lambda one: one.row)))
    shares = (graph.information(one) / whole for one in (chosen, by_chance))
    return replace(found, information=next(shares), random_information=next(shares))
