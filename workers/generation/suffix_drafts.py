"""Drafts that continue earlier responses to the same prompt, of the group and of earlier epochs, or
the response itself.

vLLM imports this module in each of its processes, because `Speculation` names its drafters.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np

MATCH = 3
"""Minimum number of equal tokens before the place that a draft continues."""
MAX_RESPONSES = 8
"""Maximum number of responses that are kept for a prompt, except for running ones."""
MAX_PROMPT = 4096
"""Maximum number of tokens at the end of a prompt that drafts can continue."""
MAX_TOKENS = 20_000_000
"""Maximum number of tokens that are kept for all prompts, in 80 MB."""


class Drafts:
    """Drafts for the responses to many prompts.

        drafts = Drafts()
        drafts.update("a", prompt, response)   # request "a" of the prompt has sampled more tokens
        drafts.draft("a", most=4)              # likely next tokens, or []
        drafts.keep({"a"})                     # all other requests have ended

    - A draft continues the text after the latest occurrence of the response's last three tokens, in
      the prompt, the response itself, or another response to the prompt. Running responses count.
    - It is at most as long as the match, since long matches predict better (arXiv:2411.04975).
    - While sampled tokens follow the text of a draft, so do later drafts. A response that follows
      itself is expected to repeat itself.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS, *, shared: bool = True) -> None:
        self._shared = shared
        """Whether a draft may continue other responses."""
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        """By the prompt's tokens, or else by the request; the latest one comes last."""
        self._running: dict[str, _Running] = {}
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def update(self, request: str, prompt: np.ndarray, response: np.ndarray) -> None:
        """Add the new tokens of a response. Takes all tokens of it, [L] int32, and of its prompt, [P]
        int32."""
        running = self._running.get(request)
        if running is None:
            key = prompt.tobytes() if self._shared else request.encode()
            own = self._prompts.get(key)
            if own is None:
                own = self._prompts[key] = _Prompt(array("i", prompt.tolist()))
                self._num_tokens += len(prompt)
            self._prompts.move_to_end(key)
            running = self._running[request] = _Running(own)
            self._num_tokens += len(running.response)
        new = response[running.num_tokens :].tolist()
        for token in new:
            running.append(token)
        self._num_tokens += len(new)

    def draft(self, request: str, most: int) -> list[int]:
        """Return a draft of at most `most` tokens for a response."""
        return self._running[request].draft(most)

    def keep(self, requests: set[str]) -> None:
        """Forget which requests run, except for these. Their responses remain."""
        for request in self._running.keys() - requests:
            self._num_tokens -= self._running.pop(request).end()
        if self._num_tokens > self._max_tokens:
            for key in [key for key, prompt in self._prompts.items() if not prompt.num_running]:
                if self._num_tokens <= self._max_tokens:
                    break
                self._num_tokens -= sum(map(len, self._prompts.pop(key).texts))

    def __len__(self) -> int:
        """Return the number of tokens that are kept."""
        return self._num_tokens


class _Prompt:
    """A prompt and its responses. They have an index while a response runs, of about 200 bytes per
    token."""

    def __init__(self, tokens: array[int]) -> None:
        self.texts: list[array[int]] = [tokens]
        """The prompt, then responses from the oldest on."""
        self.num_running = 0
        self._places: dict[int, tuple[array[int], int]] = {}
        """Hash of `MATCH` successive tokens -> text and position after their latest occurrence. Two
        equal hashes of different tokens cost a bad draft."""

    def start(self) -> array[int]:
        """Add a response."""
        if not self.num_running:
            for text in self.texts:
                first = max(MATCH, len(text) - MAX_PROMPT) if text is self.texts[0] else MATCH
                for position in range(first, len(text)):
                    self.index(text, position)
        self.num_running += 1
        # The end of the prompt, so that the first tokens have a match too.
        self.texts.append(response := self.texts[0][-MATCH:])
        return response

    def end(self) -> int:
        """Note that a response has ended. Return the number of tokens that were dropped."""
        self.num_running -= 1
        if self.num_running:
            return 0
        self._places.clear()
        old = self.texts[1:-MAX_RESPONSES]
        del self.texts[1:-MAX_RESPONSES]
        return sum(map(len, old))

    def index(self, text: array[int], position: int) -> None:
        self._places[hash(tuple(text[position - MATCH : position]))] = text, position

    def find(self, text: array[int]) -> tuple[array[int], int] | None:
        """Return the place after the latest occurrence of a text's last tokens, if any."""
        return self._places.get(hash(tuple(text[-MATCH:]))) if len(text) >= MATCH else None


class _Running:
    """A running response, and the place in an earlier text that it follows."""

    def __init__(self, prompt: _Prompt) -> None:
        self._prompt = prompt
        self.response = prompt.start()
        """The end of the prompt, and the tokens of the response."""
        self.num_tokens = 0
        self._place: tuple[array[int], int] | None = None
        self._match = 0
        """Number of equal tokens before the place."""

    def append(self, token: int) -> None:
        if len(self.response) >= MATCH:
            self._prompt.index(self.response, len(self.response))
        self.response.append(token)
        self.num_tokens += 1
        if self._place is not None:
            text, position = self._place
            if text[position] == token and position + 1 < len(text):
                self._place, self._match = (text, position + 1), self._match + 1
                return
        self._place, self._match = self._prompt.find(self.response), MATCH

    def draft(self, most: int) -> list[int]:
        found: list[int] = []
        if self._place is None:
            return found
        text, position = self._place
        for at in range(position, position + min(most, self._match)):
            if at < len(text):
                found.append(text[at])
            elif text is self.response:  # it repeats itself
                found.append(found[at - len(text)])
            else:
                break
        return found

    def end(self) -> int:
        return self._prompt.end()


class SuffixDrafter:
    """Proposer of vLLM's speculative method "custom_class", for vLLM's model runner V1. It drafts
    after `WorkerExtension.weft_draft` has attached it to the model runner.

    vLLM's method "suffix" needs a package that must be compiled, shares a cache among all prompts, and
    cannot be switched off for large batches.
    """

    drafts = partial(Drafts)

    def __init__(self, vllm_config: Any) -> None:
        self.runner: Any = None
        self.tokens = 0
        """Maximum length of a draft; 0 switches drafts off."""
        self._max_context: int = vllm_config.model_config.max_model_len
        self._drafts = self.drafts()

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing. vLLM calls it with the model."""

    def propose(
        self, sampled: list[list[int]], ends: np.ndarray, token_ids: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """Return a draft for each row of vLLM's batch.

        Args:
            sampled: the new tokens of each row; empty if its prompt is incomplete.
            ends: [rows] number of tokens of each row, with the new ones.
            token_ids: [rows, context] int32 tokens of prompts and responses.
        """
        if self.runner is None:
            return [[] for _ in sampled]
        batch = self.runner.input_batch
        names: list[str] = batch.req_ids
        found: list[list[int]] = []
        for row, (new, end) in enumerate(zip(sampled, ends[: len(sampled)].tolist(), strict=True)):
            if not new:
                found.append([])
                continue
            name, start = names[row], int(batch.num_prompt_tokens[row])
            self._drafts.update(name, token_ids[row, :start], token_ids[row, start:end])
            found.append(self._drafts.draft(name, min(self.tokens, self._max_context - end - 1)))
        self._drafts.keep({*names})
        return found


class NgramDrafter(SuffixDrafter):
    """Drafts from the prompt and the response itself. vLLM's method "ngram" for CPUs takes tens of
    milliseconds for a step, and no other engine can start in its process."""

    drafts = partial(Drafts, max_tokens=0, shared=False)
