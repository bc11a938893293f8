"""LengthForecast: forecasts response lengths from earlier responses. Rounds: sorts prompts by these
forecasts, so that long responses share a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..dataflow.buffer.leases import Forecast
from ..dataflow.safe_files import open_file

FORECASTS = "forecasts.arrow"
"""File of a checkpoint with the state of all forecasts."""

_HALF = 1 << 62


class LengthForecast:
    """Forecasts the responses of one node from the lengths of its earlier responses.

        forecast = LengthForecast(num_rows=len(source))
        forecast.observe(groups, positions, prompt_tokens, lengths)
        forecast.expect(positions, prompt_tokens).tokens

    A least-squares line predicts the length from the number of prompt tokens. For a row with
    responses in an earlier epoch, their mean replaces the prediction, as far as the responses to one
    prompt resemble each other. Without any relation, all rows get almost the same forecast, and the
    order of generation does not change.

    All sums are integers, so the order of arrival does not change a forecast.
    """

    def __init__(self, num_rows: int) -> None:
        self._group = np.full(num_rows, -1, np.int64)
        """[source rows] Lease of the latest responses."""
        self._number = np.zeros(num_rows, np.int64)
        """[source rows] Number of these responses."""
        self._tokens = np.zeros(num_rows, np.int64)
        self._squares = np.zeros(num_rows, np.int64)
        """[source rows] Sums of their lengths, and of the squares."""
        self._sums = [0] * 6
        """Sums over all responses, of 1, x, y, x * x, x * y and y * y for a prompt of x and a response
        of y tokens."""
        self._longest = 1

    def expect(self, positions: np.ndarray, prompt_tokens: np.ndarray) -> Forecast:
        """Return the forecast of rows at these positions of the source, with these numbers of prompt
        tokens ([rows] int64 each)."""
        number, line = self._number[positions], self._by_prompt(prompt_tokens)
        own = self._tokens[positions] / np.maximum(number, 1)
        tokens = np.where(number > 0, line + self._weights(number) * (own - line), line)
        return Forecast(np.rint(tokens), number > 0)

    def observe(
        self,
        groups: int | np.ndarray,
        positions: np.ndarray,
        prompt_tokens: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Add responses of a lease. The arguments are [responses] int64: positions in the source,
        tokens of the prompt, and tokens of the response."""
        first = np.unique(positions[self._group[positions] != groups])
        self._group[positions] = groups
        x, y = prompt_tokens.astype(np.int64), lengths.astype(np.int64)
        for column, values in ((self._number, 1), (self._tokens, y), (self._squares, y * y)):
            column[first] = 0
            np.add.at(column, positions, values)
        new = len(x), int(x.sum()), int(y.sum()), int(x @ x), int(x @ y), int(y @ y)
        self._sums = [before + more for before, more in zip(self._sums, new, strict=True)]
        self._longest = max(self._longest, int(y.max(initial=1)))

    def _by_prompt(self, prompt_tokens: np.ndarray) -> np.ndarray:
        number, x, y, xx, xy, yy = self._sums
        if not number:
            return np.full(len(prompt_tokens), np.nan)
        spread, common = number * xx - x * x, number * xy - x * y
        slope = common / spread if spread else 0.0
        # A slope that chance explains counts for nothing: shrink it by 1 - 1 / F.
        explained, total = slope * common, number * yy - y * y
        chance = (total - explained) / max(1, number - 2)
        slope *= max(0.0, 1 - chance / explained) if explained else 0.0
        return np.clip(y / number + slope * (prompt_tokens - x / number), 1, self._longest)

    def _weights(self, number: np.ndarray) -> np.ndarray:
        """Return the weight of each mean, given its number of responses: the share of its variance
        that depends on the prompt, by an analysis of variance. A half if no prompt has two
        responses."""
        rows = np.flatnonzero(self._number > 1)
        each, tokens = self._number[rows].astype(float), self._tokens[rows].astype(float)
        groups, total = len(rows), float(each.sum())
        if groups < 2:
            return np.full(len(number), 0.5)
        within = float((self._squares[rows] - tokens**2 / each).sum()) / (total - groups)
        between = float((each * (tokens / each - tokens.sum() / total) ** 2).sum()) / (groups - 1)
        size = (total - float((each**2).sum()) / total) / (groups - 1)
        of_prompt = max(0.0, between - within) / size
        return number * of_prompt / np.maximum(number * of_prompt + within, 1e-9)

    # Checkpoints

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self._group, self._number, self._tokens, self._squares

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The forecast as [n] int64 arrays, for `restore`."""
        rows = np.flatnonzero(self._number)
        return {
            "size": np.array([len(self._number), self._longest]),
            "rows": np.concatenate([rows, *(column[rows] for column in self._columns)]),
            # The sums may exceed int64.
            "sums": np.array([half for each in self._sums for half in divmod(each, _HALF)]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a `state`, unless it belongs to a source with another number of rows."""
        size, longest = state["size"].tolist()
        if size != len(self._number):
            return
        rows, *values = np.split(state["rows"], 1 + len(self._columns))
        for column, own in zip(self._columns, values, strict=True):
            column[rows] = own
        halves = state["sums"].tolist()
        self._sums = [high * _HALF + low for high, low in zip(halves[::2], halves[1::2], strict=True)]
        self._longest = longest


# Checkpoints


def write_forecasts(folder: Path, state: Mapping[str, np.ndarray]) -> None:
    """Write [n] int64 arrays by name into a checkpoint's folder, if there are any."""
    if state:
        values = pa.array(state.values(), pa.list_(pa.int64()))
        table = pa.table({"name": list(state), "values": values})
        with pa.ipc.new_file(folder / FORECASTS, table.schema) as file:
            file.write_table(table)


def read_forecasts(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays in a checkpoint's folder; empty if it has none."""
    if not (folder / FORECASTS).exists():
        return {}
    with open_file(folder / FORECASTS) as file, pa.ipc.open_file(file) as arrays:
        table = arrays.read_all()
    names, values = table["name"].to_pylist(), table["values"].combine_chunks()
    return {name: values[k].values.to_numpy() for k, name in enumerate(names)}


# The order of prompts


class Rounds:
    """Sorts prompts so that long responses share steps ("long rounds", arXiv:2509.21009), and the
    other steps are short.

        positions = Rounds(positions, 8 * prompts_per_step, expect)
        next(positions)

    Takes the prompts of several steps at a time, and sorts them by the expected length of their
    responses. The order depends only on earlier responses. Each prompt comes once, and its responses
    are all trained on, so over whole rounds their lengths have the distribution of the policy. (A round that ends when
    enough responses have finished would train on too many short ones.)

    Args:
        positions: positions of source rows, which it consumes.
        size: number of prompts to sort. 1: keeps the order.
        expect: returns the expected lengths of responses to the rows at some positions; NaN if
            nothing is known, which keeps the order.
        pending: rows that an earlier `Rounds` has sorted and not returned.
    """

    def __init__(
        self,
        positions: Iterator[int],
        size: int,
        expect: Callable[[np.ndarray], np.ndarray],
        pending: Iterable[int] = (),
    ) -> None:
        self._positions, self._size, self._expect = positions, size, expect
        self.pending = deque(pending)
        """Sorted rows that `next` returns first."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.pending:
            taken, again = self._take()
            if len(taken) > 1:
                rows = np.array(taken, np.int64)
                taken = rows[np.argsort(self._expect(rows), kind="stable")].tolist()
            self.pending.extend([*taken, *again])
        if not self.pending:
            raise StopIteration
        return self.pending.popleft()

    def _take(self) -> tuple[list[int], list[int]]:
        """Return the next distinct rows, and the repeated row that ended them, if any. Sorting would put
        both copies into the same step."""
        taken: dict[int, None] = {}
        for position in self._positions:
            if position in taken:
                return [*taken], [position]
            taken[position] = None
            if len(taken) == self._size:
                break
        return [*taken], []
