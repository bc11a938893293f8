"""StopStrings: which sampled token completes a stop string. All engines use it, so they end responses at the same token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.prompts.tokenizer import Tokenizer

MARGIN = 16
"""Extra tokens that are decoded before the ones that can hold the stop string: the first decoded token may lose a space."""


class StopStrings:
    """The stop strings of a sampling, and the decoder of a model's tokens.

    A token ends a response when the text has one more occurrence of a stop string with it than without it.

    >>> letters = StopStrings(("ab",), lambda ids: "".join("abc"[i] for i in ids))
    >>> [letters.end([0, 1][:length]) for length in (1, 2)], letters.end([0, 1, 2]), letters.end([2, 0, 1, 0, 1])
    ([False, True], False, True)

    Args:
        stop: texts that end a response.
        decode: token ids -> their text.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._window = max(len(text.encode()) for text in stop) + MARGIN  # a token of text has at least one byte

    def end(self, token_ids: Sequence[int] | np.ndarray) -> bool:
        """Whether the last of these tokens completes a stop string."""
        tail = [int(token) for token in token_ids[-self._window :]]
        text = self._decode(tail)
        if not any(stop in text for stop in self._stop):
            return False
        before = self._decode(tail[:-1])
        return any(text.count(stop) > before.count(stop) for stop in self._stop)


def stop_strings(sampling: Sampling, model: str) -> StopStrings | None:
    """The stop strings of a sampling, with the tokenizer of a model's folder, or None if it has none or ignores them.

    Raises:
        UserError: the folder has no tokenizer.
    """
    if not sampling.stop or sampling.ignore_stop:
        return None
    decode = tokenizer_of(model).decode
    return StopStrings(sampling.stop, lambda ids: decode([list(ids)])[0])


@cache
def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model's folder. Reward functions get text from the same one.

    Raises:
        UserError: the folder has no tokenizer.
    """
    return Tokenizer.load(model)
